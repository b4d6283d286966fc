# SPDX-License-Identifier: Apache-2.0
"""The CUDA text of the kernels that solve with triangles, by inverses of the blocks on their diagonals."""

from __future__ import annotations

from .factor_source import COMMON, MEETING

__all__ = ["INVERT", "REFINE", "STEP", "TRIANGLES"]

# A block of threads for each block of the diagonal of a lower triangle, n x n: its copy, with zeros above the diagonal,
# and its inverse. Copies go side by side into a matrix with WIDTH rows, unless copy is null, inverses into one whose
# columns are ld apart, each as many times apart elements behind the first as there are rows above it.
# a[i * down + j * across] is in row i, column j. conditions[b] becomes the product of the largest sums of sizes in a
# row of both, unless it is null.
INVERT = (
    COMMON
    + r"""
__device__ REAL row(const T* x, int i, int size) {  // the sum of sizes in a row of a lower triangle
  REAL sum = 0;
  for (int k = 0; k <= i && k < size; ++k) sum += size_of(x[k * WIDTH + i]);
  return sum;
}
extern "C" __global__ void __launch_bounds__(4 * WIDTH) invert(
    const T* a, i64 down, i64 across, int n, T* copy, T* inverse, i64 apart, i64 ld, REAL* conditions) {
  extern __shared__ __align__(16) unsigned char memory[];
  T *x = (T*)memory, *pivots = x + WIDTH * WIDTH, *parts = pivots + WIDTH;  // x(i, j) is x[j * WIDTH + i]
  __shared__ REAL sums[2][WIDTH];
  int t = threadIdx.x, start = blockIdx.x * WIDTH, size = min(WIDTH, n - start), i = t % WIDTH, part = t / WIDTH;
  i64 base = (i64)start * WIDTH;
  for (int at = t; at < WIDTH * size; at += 4 * WIDTH) {
    int r = at % WIDTH, c = at / WIDTH;
    T value = {};
    if (r < size && r >= c) value = a[(start + r) * down + (start + c) * across];
    if (r == c) pivots[c] = value;
    x[at] = value;
    if (copy) copy[base + at] = value;
  }
  __syncthreads();
  if (t < WIDTH) sums[0][i] = row(x, i, size);
  __syncthreads();
  for (int j = size - 1; j >= 0; --j) {  // columns from j + 1 on are inverted
    T sum = {};
    if (i > j && i < size)
      for (int k = j + 1 + part; k <= i; k += 4) take(sum, x[k * WIDTH + i], x[j * WIDTH + k]);
    parts[part * WIDTH + i] = sum;
    __syncthreads();
    if (part == 0) {
      sum = plus(plus(parts[i], parts[WIDTH + i]), plus(parts[2 * WIDTH + i], parts[3 * WIDTH + i]));
      if (i == j) sum = number(1, 0);
      if (i >= j && i < size) x[j * WIDTH + i] = over(sum, pivots[j]);
    }
    __syncthreads();
  }
  for (int at = t; at < WIDTH * size; at += 4 * WIDTH)
    inverse[start * apart + at / WIDTH * ld + at % WIDTH] = x[at];
  if (!conditions) return;
  if (t < WIDTH) sums[1][i] = row(x, i, size);
  __syncthreads();
  if (t == 0) {
    REAL most[2] = {0, 0};
    for (int k = 0; k < 2; ++k)
      for (int r = 0; r < size; ++r) if (most[k] == most[k] && !(sums[k][r] <= most[k])) most[k] = sums[k][r];
    conditions[blockIdx.x] = most[0] * most[1];
  }
}
"""
)

# The triangles on the diagonal of a rank's panels, each WIDTH x WIDTH with zeros above the diagonal and ones behind the
# last column: L, or the transpose of U. Block y of threads copies panel y; WIDTH + 1 columns of WIDTH are from one to
# the next.
TRIANGLES = (
    COMMON
    + r"""
extern "C" __global__ void __launch_bounds__(256) triangles(
    const T* a, i64 ld, i64 n, int width, int group, int workers, int rank, int lower, int unit, T* out) {
  __shared__ T tile[32][33];
  const int tiles = (WIDTH + 31) / 32, top = blockIdx.x % tiles * 32, left = blockIdx.x / tiles * 32;
  const int x = threadIdx.x % 32, y = threadIdx.x / 32, i = blockIdx.y;
  const i64 at = (((i64)(i / group) * workers + rank) * group + i % group) * width;
  const int size = (int)min((i64)width, n - at);
  const T* square = a + (i64)i * width * ld + at;
  out += (i64)i * WIDTH * (WIDTH + 1);
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
    if (row < WIDTH && col < WIDTH) out[(i64)col * WIDTH + row] = value;
  }
}
"""
)

# The unknowns of one block on the diagonal, size x columns, have been found by its inverse; right are the right-hand
# sides less the contributions of other unknowns. x becomes what was found, after a step of iterative refinement if the
# block's condition asks for it. Block and inverse are those of INVERT, or turned their transposes. Each block of
# threads has TILE columns.
REFINE = (
    COMMON
    + r"""
extern "C" __global__ void __launch_bounds__(4 * WIDTH) refine(
    T* x, i64 down, i64 across, const T* found, i64 found_down, i64 found_across, const T* block, const T* inverse,
    const REAL* condition, int turned, int size, i64 columns) {
  extern __shared__ __align__(16) unsigned char memory[];
  T *right = (T*)memory, *known = right + WIDTH * TILE;  // row i, column c is [i * TILE + c]
  int t = threadIdx.x, threads = 4 * WIDTH, i = t % WIDTH, from = t / WIDTH * (TILE / 4);
  i64 first = (i64)blockIdx.x * TILE;
  int wide = (int)min((i64)TILE, columns - first);
  bool refines = !(*condition <= LIMIT);
  for (int at = t; at < WIDTH * TILE; at += threads) {
    int r = across == 1 ? at / TILE : at % WIDTH, c = across == 1 ? at % TILE : at / WIDTH;
    T old = {}, now = {};
    if (r < size && c < wide) {
      now = found[r * found_down + (first + c) * found_across];
      if (refines) old = x[r * down + (first + c) * across];
    }
    right[r * TILE + c] = old;
    known[r * TILE + c] = now;
  }
  __syncthreads();
  if (refines) {
    T sums[TILE / 4];
    for (int pass = 0; pass < 2; ++pass) {
      T *of = pass ? right : known, *to = pass ? known : right;
      const T* by = pass ? inverse : block;
      #pragma unroll
      for (int c = 0; c < TILE / 4; ++c) { sums[c] = to[i * TILE + from + c]; if (pass) sums[c] = negative(sums[c]); }
      for (int k = 0; k < size; ++k) {
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
"""
)

# One panel's step of a triangular solve for COLUMNS right-hand sides, whose rows are one behind the other. All blocks
# run at the same time, and meet between products. The unknowns x are found by the inverse of the panel's triangle, size
# x size, and one step of iterative refinement; right is spoiled. Forward, what a, rows x size, contributes to y is
# subtracted then; backward, what its transpose contributes to right is subtracted before.
STEP = (
    COMMON
    + MEETING
    + r"""
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
"""
)
