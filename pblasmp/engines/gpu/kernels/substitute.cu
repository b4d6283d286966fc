// SPDX-License-Identifier: Apache-2.0
// The solution with a lower triangle of at most 32 ROWS rows, whose diagonal is taken as ones, in the place of x. A warp
// has two columns of x in its registers. A block of threads gets TILE columns of the triangle at a time, while it solves
// with those before.
#include "factor.cuh"

__device__ __forceinline__ void fetch(T* to, const T* of) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0],[%1],%2;"
               :: "r"((u32)__cvta_generic_to_shared(to)), "l"(of), "n"(sizeof(T)) : "memory");
#else
  *to = *of;
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
extern "C" __global__ void __launch_bounds__(128) substitute(const T* a, i64 ld, int n, T* x, i64 ldx, int columns) {
  extern __shared__ __align__(16) unsigned char memory[];
  constexpr int HIGH = 32 * ROWS;
  T* tiles = (T*)memory;  // element (r, c) of a tile is [c * HIGH + r]
  const int t = threadIdx.x, lane = t % 32, first = 2 * (blockIdx.x * 4 + t / 32);
  auto next = [&](int start) {  // fetches the tile that begins with this column
    T* tile = tiles + start / TILE % 2 * TILE * HIGH;
    const int top = start / 32 * 32;
    #pragma unroll 1  // the copies are asynchronous, and NVRTC would take three times as long
    for (int c = 0; c < TILE; ++c)
      for (int r = top + t; r < n; r += 128)
        if (start + c < n) fetch(tile + c * HIGH + r, a + (start + c) * ld + r);
    grouped();
  };
  next(0);
  T v[ROWS][2];
  #pragma unroll
  for (int i = 0; i < ROWS; ++i)
    for (int k = 0; k < 2; ++k) {
      v[i][k] = T{};
      if (i * 32 + lane < n && first + k < columns) v[i][k] = x[(first + k) * ldx + i * 32 + lane];
    }
  #pragma unroll
  for (int b = 0; b < ROWS; ++b)
    for (int part = 0; part < 32; part += TILE) {
      const int start = b * 32 + part, count = min(TILE, n - start);
      if (count <= 0) break;
      if (start + TILE < n) next(start + TILE);
      fetched_but(start + TILE < n);
      const T* tile = tiles + start / TILE % 2 * TILE * HIGH;
      #pragma unroll 4
      for (int c = 0; c < count; ++c) {
        T known[2];
        for (int k = 0; k < 2; ++k)
          known[k] = number(__shfl_sync(~0u, re(v[b][k]), part + c), __shfl_sync(~0u, im(v[b][k]), part + c));
        const T beside = tile[c * HIGH + b * 32 + lane];
        if (lane > part + c)
          for (int k = 0; k < 2; ++k) take(v[b][k], beside, known[k]);
        #pragma unroll
        for (int i = b + 1; i < ROWS; ++i) {
          const T factor = tile[c * HIGH + i * 32 + lane];
          for (int k = 0; k < 2; ++k) take(v[i][k], factor, known[k]);
        }
      }
      __syncthreads();
    }
  #pragma unroll
  for (int i = 0; i < ROWS; ++i)
    for (int k = 0; k < 2; ++k)
      if (i * 32 + lane < n && first + k < columns) x[(first + k) * ldx + i * 32 + lane] = v[i][k];
}
