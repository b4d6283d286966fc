// SPDX-License-Identifier: Apache-2.0
// Inverses of twice as many columns, X21 = -X22 L21 X11: of two blocks of HALF columns on a diagonal the inverses X11
// and X22 are known, and L21 is between them. Places are those of INVERT. Each block of threads has COLUMNS columns.
#include "factor.cuh"

extern "C" __global__ void __launch_bounds__(HALF) join(const T* a, T* inverse, i64 ld) {
  __shared__ T right[HALF][COLUMNS];
  const int i = threadIdx.x, left = blockIdx.y * COLUMNS;
  const i64 base = blockIdx.x * 2 * HALF * (ld + 1);
  const T *first = inverse + base + left * ld, *last = inverse + base + HALF * (ld + 1), *between = a + base + HALF;
  T *to = inverse + base + HALF + left * ld, sums[COLUMNS];
  for (int c = 0; c < COLUMNS; ++c) right[i][c] = first[c * ld + i];
  for (int pass = 0; pass < 2; ++pass) {
    __syncthreads();
    for (int c = 0; c < COLUMNS; ++c) sums[c] = T{};
    const T* by = pass ? last : between;
    const int begin = pass ? 0 : left, end = pass ? min(HALF, i / 32 * 32 + 32) : HALF;  // the rest is zero
    #pragma unroll 4
    for (int k = begin; k < end; ++k) {
      T factor = by[k * ld + i];
      #pragma unroll
      for (int c = 0; c < COLUMNS; ++c) take(sums[c], factor, right[k][c]);
    }
    __syncthreads();
    for (int c = 0; c < COLUMNS; ++c) right[i][c] = sums[c];
  }
  for (int c = 0; c < COLUMNS; ++c) to[c * ld + i] = negative(sums[c]);
}
