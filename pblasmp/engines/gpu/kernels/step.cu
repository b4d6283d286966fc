// SPDX-License-Identifier: Apache-2.0
// One panel's step of a triangular solve for COLUMNS right-hand sides, whose rows are one behind the other. All blocks
// run at the same time, and meet between products. The unknowns x are found by the inverse of the panel's triangle, size
// x size, and one step of iterative refinement; right is spoiled. Forward, what a, rows x size, contributes to y is
// subtracted then; backward, what its transpose contributes to right is subtracted before.
#include "factor.cuh"
#include "meeting.cuh"

__device__ __forceinline__ T fresh(const T* p) {  // what another block may have written
  T v;
  for (int i = 0; i < (int)(sizeof(T) / sizeof(REAL)); ++i) ((REAL*)&v)[i] = ((const volatile REAL*)p)[i];
  return v;
}
__device__ __forceinline__ T over_warp(T v) {
  for (int lane = 16; lane; lane >>= 1) {
    T o;
    for (int i = 0; i < (int)(sizeof(T) / sizeof(REAL)); ++i)
      ((REAL*)&o)[i] = __shfl_xor_sync(~0u, ((REAL*)&v)[i], lane);
    v = plus(v, o);
  }
  return v;
}
// Element at of y becomes the difference, or the sum, of what is there, or at first nothing, and -less.
__device__ __forceinline__ void put(T* y, i64 at, T less, int adds, int first) {
  if (adds) less = negative(less);
  y[at] = first ? less : plus(fresh(y + at), less);
}
// Subtracts from sum the products of elements first, first + step, ... of a, which are apart, with those rows of x.
// Eight loads are under way at a time.
__device__ __forceinline__ void dots(const T* a, i64 apart, int first, int step, int count, const T* x, T* sum) {
  int c = first;
  for (; c + 7 * step < count; c += 8 * step) {
    T e[8];
    #pragma unroll
    for (int u = 0; u < 8; ++u) e[u] = a[(c + u * step) * apart];
    #pragma unroll
    for (int u = 0; u < 8; ++u)
      #pragma unroll
      for (int j = 0; j < COLUMNS; ++j) take(sum[j], e[u], x[(i64)(c + u * step) * COLUMNS + j]);
  }
  for (; c < count; c += step)
    #pragma unroll
    for (int j = 0; j < COLUMNS; ++j) take(sum[j], a[c * apart], x[(i64)c * COLUMNS + j]);
}
__device__ void straight(const T* a, i64 ld, int rows, int cols, const T* x, T* y, int adds, int first, T (*part)[32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (int top = blockIdx.x * 32; top < rows; top += gridDim.x * 32) {
    const int r = top + lane;
    T sum[COLUMNS];
    for (int j = 0; j < COLUMNS; ++j) sum[j] = T{};
    if (r < rows) dots(a + r, ld, warp, warps, cols, x, sum);
    for (int j = 0; j < COLUMNS; ++j) {
      part[warp][lane] = sum[j];
      __syncthreads();
      if (warp == 0 && r < rows) {
        T all = part[0][lane];
        for (int w = 1; w < warps; ++w) all = plus(all, part[w][lane]);
        put(y, (i64)r * COLUMNS + j, all, adds, first);
      }
      __syncthreads();
    }
  }
}
__device__ void turned(const T* a, i64 ld, int rows, int cols, const T* x, T* y, int adds, int first, T (*part)[32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int per = (cols + gridDim.x - 1) / gridDim.x, share = per >= warps ? 1 : warps / per, slots = warps / share;
  for (int base = 0; base < per; base += slots) {
    const int o = base + warp / share, i = blockIdx.x * per + o, mine = warp / share < slots && o < per && i < cols;
    T sum[COLUMNS];
    for (int j = 0; j < COLUMNS; ++j) sum[j] = T{};
    if (mine) dots(a + i * ld, 1, warp % share * 32 + lane, share * 32, rows, x, sum);
    for (int j = 0; j < COLUMNS; ++j) {
      T all = over_warp(sum[j]);
      if (lane == 0) part[warp][0] = all;
      __syncthreads();
      if (mine && warp % share == 0 && lane == 0) {
        for (int w = 1; w < share; ++w) all = plus(all, part[warp + w][0]);
        put(y, (i64)i * COLUMNS + j, all, adds, first);
      }
      __syncthreads();
    }
  }
}
__device__ void known(T* to, const T* x, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = fresh(x + i);
  __syncthreads();
}
extern "C" __global__ void __launch_bounds__(512, 1) step(
    const T* inverse, const T* triangle, i64 wide, int size, int transposed, T* right, T* x, const T* a, i64 ld,
    int rows, T* y, int forward, u32* count) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ T part[16][32];
  T* held = (T*)memory;
  u32 meetings = 0, blocks = gridDim.x;
  if (!forward && rows > 0) {
    turned(a, ld, rows, size, y, right, 0, 0, part);
    meet(count, ++meetings * blocks);
  }
  for (int pass = 0; pass < 3; ++pass) {
    known(held, pass == 1 ? x : right, size * COLUMNS);
    const T* by = pass == 1 ? triangle : inverse;
    T* to = pass == 1 ? right : x;
    if (transposed) turned(by, wide, size, size, held, to, pass != 1, pass == 0, part);
    else straight(by, wide, size, size, held, to, pass != 1, pass == 0, part);
    if (pass < 2 || forward) meet(count, ++meetings * blocks);
  }
  if (forward && rows > 0) {
    known(held, x, size * COLUMNS);
    straight(a, ld, rows, size, held, y, 0, 0, part);
  }
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(count, 1u) == (meetings + 1) * blocks - 1) *count = 0;
}
