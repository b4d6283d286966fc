// SPDX-License-Identifier: Apache-2.0
// The triangles on the diagonal of a rank's panels, each WIDTH x WIDTH with zeros above the diagonal and ones behind the
// last column: L, or the transpose of U. Block y of threads copies panel y; WIDTH + 1 columns of WIDTH are from one to
// the next. Zeros go to the same places in inverse.
#include "factor.cuh"

extern "C" __global__ void __launch_bounds__(256) triangles(
    const T* a, i64 ld, i64 n, int width, int group, int workers, int rank, int lower, int unit, T* out,
    T* inverse) {
  __shared__ T tile[32][33];
  const int tiles = (WIDTH + 31) / 32, top = blockIdx.x % tiles * 32, left = blockIdx.x / tiles * 32;
  const int x = threadIdx.x % 32, y = threadIdx.x / 32, i = blockIdx.y;
  const i64 at = (((i64)(i / group) * workers + rank) * group + i % group) * width;
  const int size = (int)min((i64)width, n - at);
  const T* square = a + (i64)i * width * ld + at;
  out += (i64)i * WIDTH * (WIDTH + 1);
  inverse += (i64)i * WIDTH * (WIDTH + 1);
  for (int c = y; c < 32; c += 8) {
    int row = (lower ? top : left) + x, col = (lower ? left : top) + c;
    T value = {};
    if (row < size && col < size && (lower ? row >= col : row <= col)) value = square[col * ld + row];
    tile[c][x] = value;
  }
  __syncthreads();
  for (int c = y; c < 32; c += 8) {
    int row = top + x, col = left + c;
    T value = lower ? tile[c][x] : tile[x][c];
    if (row == col && (unit || row >= size)) value = number(1, 0);
    if (row >= WIDTH || col >= WIDTH) continue;
    out[(i64)col * WIDTH + row] = value;
    inverse[(i64)col * WIDTH + row] = T{};
  }
}
