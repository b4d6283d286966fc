// SPDX-License-Identifier: Apache-2.0
// The unknowns of one triangle, size x columns, have been found by its inverse; x has the right-hand sides less the
// contributions of other unknowns, and becomes the unknowns, or found does if it stays. What was found is taken as it
// is if the condition of the triangle is at most FAIR, after a step of iterative refinement if it is at most POOR;
// beyond, a step is not enough, and the equations are solved by substitution. Triangle and inverse are lower ones, or
// turned their transposes. Each block of threads has TILE columns, and DEEP columns of a matrix at a time.
#include "factor.cuh"

extern "C" __global__ void __launch_bounds__(8 * TILE) refine(
    T* x, i64 down, i64 across, T* found, i64 found_down, i64 found_across, const T* triangle, const T* inverse,
    const REAL* condition, int turned, int stays, int size, i64 columns) {
  extern __shared__ __align__(16) unsigned char memory[];
  constexpr int ROWS = (WIDTH + 31) / 32, HIGH = 32 * ROWS, THREADS = 8 * TILE;
  T *right = (T*)memory, *known = right + HIGH * TILE;  // row i, column c is [i * TILE + c]
  T* part = known + HIGH * TILE;  // of a matrix: element (i, k) is [k * (HIGH + 1) + i]
  const int t = threadIdx.x, lane = t % 32, own = t / 32 * 4;  // a warp has four columns
  const i64 first = (i64)blockIdx.x * TILE;
  const int wide = (int)min((i64)TILE, columns - first);
  const bool refines = !(*condition <= FAIR), substitutes = !(*condition <= POOR);
  if (stays && !refines) return;
  #pragma unroll 8
  for (int at = t; at < HIGH * TILE; at += THREADS) {
    const int r = across == 1 ? at / TILE : at % HIGH, c = across == 1 ? at % TILE : at / HIGH;
    const bool inside = r < size && c < wide;
    T now = {};
    if (inside) now = found[r * found_down + (first + c) * found_across];
    if (!refines) {
      if (inside) x[r * down + (first + c) * across] = now;
      continue;
    }
    known[r * TILE + c] = now;
    right[r * TILE + c] = inside ? x[r * down + (first + c) * across] : T{};
  }
  if (!refines) return;
  __syncthreads();
  T sums[ROWS][4];
  for (int pass = 0; pass < (substitutes ? 1 : 2); ++pass) {
    T *of = pass ? right : known, *to = pass ? known : right;
    const T* by = pass ? inverse : triangle;
    #pragma unroll
    for (int b = 0; b < ROWS; ++b)
      for (int c = 0; c < 4; ++c) {
        T value = to[(b * 32 + lane) * TILE + own + c];
        sums[b][c] = pass ? negative(value) : value;
      }
    if (substitutes) {
      #pragma unroll 1
      for (int step = 0; step < ROWS; ++step) {
        const int block = turned ? ROWS - 1 - step : step;
        for (int at = 0; at < 32; ++at) {
          const int k = block * 32 + (turned ? 31 - at : at);
          if (k >= size) continue;
          #pragma unroll
          for (int b = 0; b < ROWS; ++b)
            if (b * 32 + lane == k)
              for (int c = 0; c < 4; ++c) known[k * TILE + own + c] = over(sums[b][c], by[k * WIDTH + k]);
          __syncwarp();
          #pragma unroll
          for (int b = 0; b < ROWS; ++b) {
            const int i = b * 32 + lane;
            if (i >= size || (turned ? i >= k : i <= k)) continue;
            const T factor = by[turned ? i * WIDTH + k : k * WIDTH + i];
            for (int c = 0; c < 4; ++c) take(sums[b][c], factor, known[k * TILE + own + c]);
          }
        }
      }
      break;
    }
    for (int start = 0; start < size; start += DEEP) {
      __syncthreads();
      for (int at = t; at < DEEP * HIGH; at += THREADS) {  // as it is in memory
        const int i = turned ? at / DEEP : at % HIGH, k = turned ? at % DEEP : at / HIGH;
        T value = {};
        if (i < WIDTH && start + k < WIDTH) value = by[turned ? i * WIDTH + start + k : (start + k) * WIDTH + i];
        part[k * (HIGH + 1) + i] = value;
      }
      __syncthreads();
      #pragma unroll 2
      for (int k = 0; k < DEEP; ++k) {
        if (start + k >= size) break;
        T factors[4];
        for (int c = 0; c < 4; ++c) factors[c] = of[(start + k) * TILE + own + c];
        #pragma unroll
        for (int b = 0; b < ROWS; ++b) {
          if (turned ? b * 32 > start + k : b * 32 + 31 < start) continue;  // zeros
          const T each = part[k * (HIGH + 1) + b * 32 + lane];
          for (int c = 0; c < 4; ++c) take(sums[b][c], each, factors[c]);
        }
      }
    }
    __syncwarp();
    #pragma unroll
    for (int b = 0; b < ROWS; ++b)
      for (int c = 0; c < 4; ++c)
        to[(b * 32 + lane) * TILE + own + c] = pass ? negative(sums[b][c]) : sums[b][c];
    __syncwarp();
  }
  __syncthreads();
  if (stays) { x = found; down = found_down; across = found_across; }
  for (int at = t; at < HIGH * TILE; at += THREADS) {
    int r = across == 1 ? at / TILE : at % HIGH, c = across == 1 ? at % TILE : at / HIGH;
    if (r < size && c < wide) x[r * down + (first + c) * across] = known[r * TILE + c];
  }
}
