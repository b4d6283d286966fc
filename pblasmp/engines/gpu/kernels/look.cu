// SPDX-License-Identifier: Apache-2.0
// Before cuSOLVER: found[1] becomes n less the first row of the lower triangle that has NaN, if there is one.
#include "factor.cuh"

extern "C" __global__ void __launch_bounds__(512) look(const T* a, i64 ld, int n, int* found) {
  int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  for (int c = blockIdx.x * warps + threadIdx.x / 32; c < n; c += gridDim.x * warps)
    for (int r = c + lane; r < n; r += 32) {
      REAL size = size_of(a[c * ld + r]);
      if (size != size) atomicMax(found + 1, n - r);
    }
}
