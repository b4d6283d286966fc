// SPDX-License-Identifier: Apache-2.0
// The solution with a lower triangle of at most 32 ROWS rows, whose diagonal is taken as ones, in the place of x. A warp
// has two columns of x in its registers: first the 32 rows that are solved for, behind them the others, which move up
// when these are known. So one short loop serves all rows; unrolled, the code of large triangles would be longer than
// the caches of instructions. A block of threads gets TILE columns of the triangle at a time, while it solves with those
// before.
#include "factor.cuh"

template<int BYTES> __device__ __forceinline__ void fetch(T* to, const T* of) {
#if __CUDA_ARCH__ >= 800
  const u32 place = (u32)__cvta_generic_to_shared(to);
  if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0],[%1],16;" :: "r"(place), "l"(of) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0],[%1],%2;" :: "r"(place), "l"(of), "n"(BYTES) : "memory");
#else
  for (int i = 0; i < BYTES / (int)sizeof(T); ++i) to[i] = of[i];
#endif
}
__device__ __forceinline__ void fetched_but(int groups) {
#if __CUDA_ARCH__ >= 800
  if (groups) asm volatile("cp.async.wait_group 1;" ::: "memory");
  else asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
  __syncthreads();
}
__device__ __forceinline__ void grouped() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
__device__ __forceinline__ T of_lane(T a, int lane) {
  const REAL x = __shfl_sync(~0u, re(a), lane);
  if constexpr (sizeof(T) == sizeof(REAL)) return number(x, 0);
  else return number(x, __shfl_sync(~0u, im(a), lane));
}
extern "C" __global__ void __launch_bounds__(128) substitute(const T* a, i64 ld, int n, T* x, i64 ldx, int columns) {
  extern __shared__ __align__(16) unsigned char memory[];
  constexpr int HIGH = 32 * ROWS, EACH = 16 / sizeof(T);
  T* tiles = (T*)memory;  // element (r, c) of a tile is [c * HIGH + r]; behind the second one, 96 that nothing depends on
  const int t = threadIdx.x, lane = t % 32, first = 2 * (blockIdx.x * 4 + t / 32);
  const bool together = n % EACH == 0 && ld % EACH == 0 && (u64)a % 16 == 0;
  auto next = [&](int start) {  // fetches the tile that begins with this column
    T* tile = tiles + start / TILE % 2 * TILE * HIGH;
    const T* of = a + start * ld;
    const int top = start / 32 * 32;
    #pragma unroll 1
    for (int c = 0; c < TILE && start + c < n; ++c, of += ld, tile += HIGH)
      if (together)
        for (int r = top + t * EACH; r < n; r += 128 * EACH) fetch<16>(tile + r, of + r);
      else
        #pragma unroll 1
        for (int r = top + t; r < n; r += 128) fetch<sizeof(T)>(tile + r, of + r);
    grouped();
  };
  T v[ROWS][2];
  #pragma unroll
  for (int i = 0; i < ROWS; ++i)
    for (int k = 0; k < 2; ++k) {
      v[i][k] = T{};
      if (i * 32 + lane < n && first + k < columns) v[i][k] = x[(first + k) * ldx + i * 32 + lane];
    }
  #pragma unroll 1
  for (int start = -TILE; start < n; start += TILE) {
    const bool more = start + TILE < n;
    if (more) next(start + TILE);
    if (start < 0) continue;
    fetched_but(more);
    const int block = start / 32, part = start % 32, count = min(TILE, n - start);
    const T* tile = tiles + start / TILE % 2 * TILE * HIGH + block * 32 + lane;
    #pragma unroll 2
    for (int c = 0; c < count; ++c, tile += HIGH) {
      T known[2];
      for (int k = 0; k < 2; ++k) known[k] = of_lane(v[0][k], part + c);
      const T beside = tile[0];
      if (lane > part + c)
        for (int k = 0; k < 2; ++k) take(v[0][k], beside, known[k]);
      #pragma unroll
      for (int from = 1; from < ROWS; from += 4)
        if (block + from < ROWS)
          #pragma unroll
          for (int i = from; i < from + 4; ++i)
            if (i < ROWS) {
              const T factor = tile[i * 32];
              for (int k = 0; k < 2; ++k) take(v[i][k], factor, known[k]);
            }
    }
    __syncthreads();
    if (part + TILE < 32 && more) continue;
    for (int k = 0; k < 2; ++k)
      if (block * 32 + lane < n && first + k < columns) x[(first + k) * ldx + block * 32 + lane] = v[0][k];
    #pragma unroll
    for (int i = 1; i < ROWS; ++i)
      for (int k = 0; k < 2; ++k) v[i - 1][k] = v[i][k];
  }
}
