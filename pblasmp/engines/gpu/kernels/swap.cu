// SPDX-License-Identifier: Apache-2.0
// Of few exchanges every block finds the moves itself: "exchange" needs no kernel before it.
#include "factor.cuh"
#include "exchanges.cuh"

__device__ void carry(T* a, i64 ld, i64 first, i64 cols, i64 step, const int* pairs, int count) {
  i64 to[4], of[4];
  #pragma unroll
  for (int q = 0; q < 4; ++q) {
    int i = threadIdx.x + q * blockDim.x;
    to[q] = i < count ? pairs[2 * i] : 0;
    of[q] = i < count ? pairs[2 * i + 1] : 0;
  }
  for (i64 c = first; c < cols; c += step) {
    T row[4][COLUMNS];
    #pragma unroll
    for (int q = 0; q < 4; ++q)
      #pragma unroll
      for (int j = 0; j < COLUMNS; ++j) if (to[q] != of[q] && c + j < cols) row[q][j] = a[(c + j) * ld + of[q]];
    __syncthreads();
    #pragma unroll
    for (int q = 0; q < 4; ++q)
      #pragma unroll
      for (int j = 0; j < COLUMNS; ++j) if (to[q] != of[q] && c + j < cols) a[(c + j) * ld + to[q]] = row[q][j];
  }
}
// MOST exchanges at a time, of a few columns one after another, which stay in the cache.
extern "C" __global__ void __launch_bounds__(512) swap(
    T* a, i64 ld, i64 cols, const int* pairs, int count, int back) {
  const i64 step = (i64)gridDim.x * COLUMNS;
  for (i64 c = (i64)blockIdx.x * COLUMNS; c < cols; c += step)
    for (int done = 0; done < count; done += MOST) {
      const int start = back ? (count - 1 - done) / MOST * MOST : done;
      carry(a + start, ld, c, min(c + COLUMNS, cols), step, pairs + 4 * start, 2 * min(MOST, count - start));
      __syncthreads();
    }
}
extern "C" __global__ void __launch_bounds__(512) exchange(
    T* a, i64 ld, i64 cols, const int* pivots, int count, int first, int back) {
  __shared__ int other[FEW], pairs[4 * FEW];
  moves(threadIdx.x, pivots, count, first, back, other, pairs);
  __syncthreads();
  carry(a, ld, (i64)blockIdx.x * COLUMNS, cols, (i64)gridDim.x * COLUMNS, pairs, 2 * count);
}
