// SPDX-License-Identifier: Apache-2.0
// A block of threads for each block of WIDTH columns on the diagonals of lower triangles: its inverse, to the same
// place. Triangles have ld columns of ld elements, and one more is between them. n is the columns of all triangles.
// Above diagonals nothing is written. A warp inverts BASE columns, one each lane; then of two inverses side by side one
// is made, X21 = -X22 L21 X11, until there is one. Loops stay loops: the first time that an instruction runs, it comes
// from far away, which takes longer than a loop.
#include "factor.cuh"

extern "C" __global__ void __launch_bounds__(4 * WIDTH) invert(const T* a, T* inverse, i64 ld, int n) {
  extern __shared__ __align__(16) unsigned char memory[];
  constexpr int BASE = WIDTH < 32 ? WIDTH : 32, THREADS = 4 * WIDTH;
  T* x = (T*)memory;  // x(i, j) is x[j * WIDTH + i]
  const int t = threadIdx.x, start = blockIdx.x * WIDTH, size = min(WIDTH, n - start);
  const i64 base = start * (ld + 1);
  for (int at = t; at < WIDTH * WIDTH; at += THREADS) {
    const int r = at % WIDTH, c = at / WIDTH;
    T value = {};
    if (r < size && r >= c) value = a[base + c * ld + r];
    if (r >= size && r == c) value = number(1, 0);
    x[at] = value;
  }
  __syncthreads();
  if (t / 32 < WIDTH / BASE) {
    T* own = x + t / 32 * BASE * (WIDTH + 1);
    const int j = t % 32;
    T rest[BASE];  // of a column of the identity: first the row that is found next
    #pragma unroll
    for (int i = 0; i < BASE; ++i) rest[i] = i == j ? number(1, 0) : T{};
    #pragma unroll 1
    for (int k = 0; k < BASE; ++k) {
      const T* below = own + k * (WIDTH + 1);
      const T found = j > k ? T{} : over(rest[0], below[0]);
      #pragma unroll
      for (int i = 1; i < BASE; ++i) { rest[i - 1] = rest[i]; take(rest[i - 1], below[i], found); }
      __syncwarp();
      if (j <= k) own[j * WIDTH + k] = found;
      __syncwarp();
    }
  }
  __syncthreads();
  #pragma unroll 1
  for (int half = BASE; half < WIDTH; half *= 2) {
    constexpr int MOST = WIDTH > BASE ? WIDTH * WIDTH / 4 / THREADS : 1;
    const int i = t % half, first = t / half, apart = THREADS / half;
    #pragma unroll 1
    for (int top = 0; top < WIDTH; top += 2 * half) {
      T *upper = x + top * (WIDTH + 1), *between = upper + half, *lower = upper + half * (WIDTH + 1), sums[MOST];
      #pragma unroll 1
      for (int pass = 0; pass < 2; ++pass) {
        const T *left = pass ? lower : between, *right = pass ? between : upper;
        #pragma unroll
        for (int q = 0; q < MOST; ++q) sums[q] = T{};
        #pragma unroll 2
        for (int k = 0; k < half; ++k) {
          const T factor = left[k * WIDTH + i];
          #pragma unroll
          for (int q = 0; q < MOST; ++q)
            if (first + q * apart < half) take(sums[q], factor, right[(first + q * apart) * WIDTH + k]);
        }
        __syncthreads();
        #pragma unroll
        for (int q = 0; q < MOST; ++q)
          if (first + q * apart < half) between[(first + q * apart) * WIDTH + i] = pass ? sums[q] : negative(sums[q]);
        __syncthreads();
      }
    }
  }
  for (int at = t; at < WIDTH * size; at += THREADS) {
    const int r = at % WIDTH, c = at / WIDTH;
    if (r < size && r >= c) inverse[base + c * ld + r] = x[at];
  }
}
