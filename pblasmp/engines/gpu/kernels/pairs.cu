// SPDX-License-Identifier: Apache-2.0
// Each block has MOST exchanges.
#include "factor.cuh"
#include "exchanges.cuh"

extern "C" __global__ void __launch_bounds__(1024) pairs(const int* pivots, int count, int first, int back, int* out) {
  __shared__ int other[MOST];
  int start = blockIdx.x * MOST;
  moves(pivots + start, min(MOST, count - start), first + start, back, other, out + 4 * start);
}
