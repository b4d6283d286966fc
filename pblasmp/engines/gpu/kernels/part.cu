// SPDX-License-Identifier: Apache-2.0
// target = alpha left right + beta c. Of row r of the left matrix the elements from begin[r] to end[r] count. No others
// are read, and of the one in the place own[r] nothing if ONES, or only the real part if REALS. Each is read once, in
// the order of memory: a warp has 32 ROWS rows if columns are contiguous (BY_COLUMNS), else ROWS. c may be 0, or the
// target.
#include "factor.cuh"

__device__ __forceinline__ T value(const T* at, bool special) {
  if (special && ONES) return number(1, 0);
  T x = *at;
  return special && REALS ? number(re(x), 0) : x;
}
__device__ __forceinline__ void finish(
    T less, T alpha, T beta, bool adds, const T* c, i64 c_at, T* target, i64 at) {
  T sum = {};
  take(sum, alpha, less);
  if (adds) take(sum, negative(beta), c[c_at]);
  target[at] = sum;
}
extern "C" __global__ void __launch_bounds__(256) part(
    const T* left, i64 down, i64 along, const T* right, i64 right_down, i64 right_across, T* target, i64 target_down,
    i64 target_across, const T* c, i64 c_down, i64 c_across, const int* begin, const int* end, const int* own, int rows,
    int columns, double alpha_re, double alpha_im, double beta_re, double beta_im) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = 8;
  const T alpha = number(alpha_re, alpha_im), beta = number(beta_re, beta_im);
  const bool adds = c;
  // the rows of a thread are so many apart; a warp takes so many elements of a row at a time
  constexpr int apart = BY_COLUMNS ? 32 : 1, AHEAD = 8 / ROWS;  // elements of each row that are under way at a time
  constexpr int step = BY_COLUMNS ? 8 : 32, chunk = AHEAD * step;
  const int first = BY_COLUMNS ? warp : lane;
  const int top = BY_COLUMNS ? blockIdx.x * 32 * ROWS + lane : (blockIdx.x * warps + warp) * ROWS;
  __shared__ int low, high;
  __shared__ T factors[2][COLUMNS][chunk];  // of the right matrix
  if (threadIdx.x == 0) { low = 0x7fffffff; high = 0; }
  __syncthreads();
  int from[ROWS], to[ROWS], special[ROWS];
  for (int i = 0; i < ROWS; ++i) {
    const int r = top + i * apart;
    from[i] = r < rows ? begin[r] : 0;
    to[i] = r < rows ? end[r] : 0;
    special[i] = r < rows ? own[r] : -1;
    if (from[i] < to[i]) { atomicMin(&low, from[i]); atomicMax(&high, to[i]); }
  }
  __syncthreads();
  T sum[ROWS][COLUMNS] = {};
  int turn = 0;
  for (int k = low / 32 * 32; k < high; k += chunk, turn ^= 1) {
    T e[ROWS][AHEAD];
    #pragma unroll
    for (int i = 0; i < ROWS; ++i)
      #pragma unroll
      for (int u = 0; u < AHEAD; ++u) {
        const int at = k + first + u * step;
        e[i][u] = T{};
        if (at >= from[i] && at < to[i])
          e[i][u] = value(left + (top + i * apart) * down + at * along, at == special[i]);
      }
    for (int x = threadIdx.x; x < chunk * COLUMNS; x += 32 * warps) {
      const int at = k + x % chunk, j = x / chunk;
      if (at < high && j < columns) factors[turn][j][x % chunk] = right[at * right_down + j * right_across];
    }
    __syncthreads();
    #pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      const int at = k + first + u * step;
      #pragma unroll
      for (int i = 0; i < ROWS; ++i)
        if (at >= from[i] && at < to[i])
          #pragma unroll
          for (int j = 0; j < COLUMNS; ++j) take(sum[i][j], e[i][u], factors[turn][j][first + u * step]);
    }
  }
  #pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int r = top + i * apart;
    #pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
#if BY_COLUMNS
      __shared__ T parts[8][32];
      parts[warp][lane] = sum[i][j];
      __syncthreads();
      T all = parts[0][lane];
      if (warp == 0) for (int w = 1; w < warps; ++w) all = plus(all, parts[w][lane]);
      const bool writes = warp == 0;
#else
      T all = sum[i][j];
      for (int k = 16; k; k >>= 1)
        all = plus(all, number(__shfl_xor_sync(~0u, re(all), k), __shfl_xor_sync(~0u, im(all), k)));
      const bool writes = lane == 0;
#endif
      if (writes && r < rows && j < columns)
        finish(all, alpha, beta, adds, c, r * c_down + j * c_across, target, r * target_down + j * target_across);
      if (BY_COLUMNS) __syncthreads();
    }
  }
}
