// SPDX-License-Identifier: Apache-2.0
// The blocks of a row of the grid have MOST exchanges: few threads each, which then take turns less often.
#include "factor.cuh"
#include "exchanges.cuh"

extern "C" __global__ void __launch_bounds__(128) pairs(const int* pivots, int count, int first, int back, int* out) {
  __shared__ int other[MOST];
  const int start = blockIdx.x * MOST;
  moves(blockIdx.y * blockDim.x + threadIdx.x, pivots + start, min(MOST, count - start), first + start, back, other, out + 4 * start);
}
