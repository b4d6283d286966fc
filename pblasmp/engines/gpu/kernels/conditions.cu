// SPDX-License-Identifier: Apache-2.0
// The conditions of lower triangles of WIDTH columns, WIDTH * (WIDTH + 1) elements apart: the product of the largest
// sums of sizes in a row of a triangle and of its inverse.
#include "factor.cuh"

__device__ __forceinline__ REAL larger(REAL a, REAL b) { return a != a || a > b ? a : b; }  // NaN is the largest
extern "C" __global__ void __launch_bounds__(4 * WIDTH) conditions(
    const T* triangles, const T* inverses, REAL* conditions, int count) {
  __shared__ REAL sums[4][WIDTH], most[2];
  const int i = threadIdx.x % WIDTH, part = threadIdx.x / WIDTH;
  for (int triangle = blockIdx.x; triangle < count; triangle += gridDim.x) {
    for (int pass = 0; pass < 2; ++pass) {
      const T* x = (pass ? inverses : triangles) + (i64)triangle * WIDTH * (WIDTH + 1);
      REAL sum = 0;
      #pragma unroll 8
      for (int k = part; k <= i; k += 4) sum += size_of(x[k * WIDTH + i]);
      sums[part][i] = sum;
      __syncthreads();
      if (threadIdx.x < 32) {
        REAL all = 0;
        for (int r = threadIdx.x; r < WIDTH; r += 32)
          all = larger(all, sums[0][r] + sums[1][r] + sums[2][r] + sums[3][r]);
        for (int lane = 16; lane; lane >>= 1) all = larger(all, __shfl_xor_sync(~0u, all, lane));
        if (threadIdx.x == 0) most[pass] = all;
      }
      __syncthreads();
    }
    if (threadIdx.x == 0) conditions[triangle] = most[0] * most[1];
  }
}
