// SPDX-License-Identifier: Apache-2.0
// The unknowns of one triangle, size x columns, have been found by its inverse; x has the right-hand sides less the
// contributions of other unknowns, and becomes the unknowns. What was found is taken as it is if the condition of the
// triangle is at most FAIR, after a step of iterative refinement if it is at most POOR; beyond, a step is not enough,
// and the equations are solved by substitution. Triangle and inverse are lower ones, or turned their transposes. Each
// block of threads has TILE columns.
#include "factor.cuh"

extern "C" __global__ void __launch_bounds__(4 * WIDTH) refine(
    T* x, i64 down, i64 across, const T* found, i64 found_down, i64 found_across, const T* triangle, const T* inverse,
    const REAL* condition, int turned, int size, i64 columns) {
  extern __shared__ __align__(16) unsigned char memory[];
  T *right = (T*)memory, *known = right + WIDTH * TILE;  // row i, column c is [i * TILE + c]
  int t = threadIdx.x, threads = 4 * WIDTH, i = t % WIDTH, from = t / WIDTH * (TILE / 4);
  i64 first = (i64)blockIdx.x * TILE;
  int wide = (int)min((i64)TILE, columns - first);
  bool refines = !(*condition <= FAIR), substitutes = !(*condition <= POOR);
  for (int at = t; at < WIDTH * TILE; at += threads) {
    int r = across == 1 ? at / TILE : at % WIDTH, c = across == 1 ? at % TILE : at / WIDTH;
    bool inside = r < size && c < wide;
    T now = {}, old = {};
    if (inside) now = found[r * found_down + (first + c) * found_across];
    if (inside && refines) old = x[r * down + (first + c) * across];
    if (inside && !refines) x[r * down + (first + c) * across] = now;
    if (refines) { right[r * TILE + c] = old; known[r * TILE + c] = now; }
  }
  if (!refines) return;
  __syncthreads();
  T sums[TILE / 4];
  if (substitutes) {
    #pragma unroll
    for (int c = 0; c < TILE / 4; ++c) sums[c] = right[i * TILE + from + c];
    for (int step = 0; step < size; ++step) {
      int k = turned ? size - 1 - step : step;
      if (i == k)
        #pragma unroll
        for (int c = 0; c < TILE / 4; ++c) known[k * TILE + from + c] = over(sums[c], triangle[k * WIDTH + k]);
      __syncthreads();
      if (turned ? i < k : i > k) {
        T factor = triangle[turned ? i * WIDTH + k : k * WIDTH + i];
        #pragma unroll
        for (int c = 0; c < TILE / 4; ++c) take(sums[c], factor, known[k * TILE + from + c]);
      }
    }
    __syncthreads();
  } else {
    int begin = turned ? i / 32 * 32 : 0, end = turned ? size : min(size, i / 32 * 32 + 32);  // alike in a warp
    for (int pass = 0; pass < 2; ++pass) {
      T *of = pass ? right : known, *to = pass ? known : right;
      const T* by = pass ? inverse : triangle;
      #pragma unroll
      for (int c = 0; c < TILE / 4; ++c) { sums[c] = to[i * TILE + from + c]; if (pass) sums[c] = negative(sums[c]); }
      for (int k = begin; k < end; ++k) {
        T factor = by[turned ? i * WIDTH + k : k * WIDTH + i];
        #pragma unroll
        for (int c = 0; c < TILE / 4; ++c) take(sums[c], factor, of[k * TILE + from + c]);
      }
      __syncthreads();
      #pragma unroll
      for (int c = 0; c < TILE / 4; ++c) to[i * TILE + from + c] = pass ? negative(sums[c]) : sums[c];
      __syncthreads();
    }
  }
  for (int at = t; at < WIDTH * TILE; at += threads) {
    int r = across == 1 ? at / TILE : at % WIDTH, c = across == 1 ? at % TILE : at / WIDTH;
    if (r < size && c < wide) x[r * down + (first + c) * across] = known[r * TILE + c];
  }
}
