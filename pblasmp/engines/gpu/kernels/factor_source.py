# SPDX-License-Identifier: Apache-2.0
"""The CUDA text of the kernels of factorisations. It includes no headers."""

from __future__ import annotations

__all__ = ["INVERT", "JUDGE", "LOOK", "LU", "PAIRS", "QR", "REFINE", "STEP", "SWAP", "TRIANGLES"]

_COMMON = r"""
typedef unsigned int u32; typedef unsigned long long u64; typedef long long i64;
struct alignas(8) c64 { float x, y; }; struct alignas(16) c128 { double x, y; };
#ifdef KIND
typedef KIND T; typedef REAL_KIND REAL;
#endif
__device__ __forceinline__ float size_of(float a) { return fabsf(a); }
__device__ __forceinline__ double size_of(double a) { return fabs(a); }
__device__ __forceinline__ float size_of(c64 a) { return fabsf(a.x) + fabsf(a.y); }
__device__ __forceinline__ double size_of(c128 a) { return fabs(a.x) + fabs(a.y); }
__device__ __forceinline__ bool is_zero(float a) { return a == 0; }
__device__ __forceinline__ bool is_zero(double a) { return a == 0; }
__device__ __forceinline__ bool is_zero(c64 a) { return a.x == 0 && a.y == 0; }
__device__ __forceinline__ bool is_zero(c128 a) { return a.x == 0 && a.y == 0; }
__device__ __forceinline__ void take(float& d, float a, float b) { d -= a * b; }
__device__ __forceinline__ void take(double& d, double a, double b) { d -= a * b; }
__device__ __forceinline__ void take(c64& d, c64 a, c64 b)
{ d.x -= a.x * b.x - a.y * b.y; d.y -= a.x * b.y + a.y * b.x; }
__device__ __forceinline__ void take(c128& d, c128 a, c128 b)
{ d.x -= a.x * b.x - a.y * b.y; d.y -= a.x * b.y + a.y * b.x; }
__device__ __forceinline__ float over(float a, float b) { return a / b; }
__device__ __forceinline__ double over(double a, double b) { return a / b; }
template<class C, class R> __device__ __forceinline__ C ratio(C a, C b) {  // Smith's, which does not overflow
  C q;
  R r, d;
  if (size_of(b.x) >= size_of(b.y)) {
    r = b.y / b.x; d = b.x + b.y * r; q.x = (a.x + a.y * r) / d; q.y = (a.y - a.x * r) / d;
  } else {
    r = b.x / b.y; d = b.x * r + b.y; q.x = (a.x * r + a.y) / d; q.y = (a.y * r - a.x) / d;
  }
  return q;
}
__device__ __forceinline__ c64 over(c64 a, c64 b) { return ratio<c64, float>(a, b); }
__device__ __forceinline__ c128 over(c128 a, c128 b) { return ratio<c128, double>(a, b); }
__device__ __forceinline__ void spoil(float& a) { a = __int_as_float(0x7fc00000); }
__device__ __forceinline__ void spoil(double& a) { a = __longlong_as_double(0x7ff8000000000000ll); }
__device__ __forceinline__ void spoil(c64& a) { spoil(a.x); spoil(a.y); }
__device__ __forceinline__ void spoil(c128& a) { spoil(a.x); spoil(a.y); }
"""

# Before cuSOLVER: found[1] becomes n less the first row of the lower triangle that has NaN, if there is one.
LOOK = (
    _COMMON
    + r"""
extern "C" __global__ void __launch_bounds__(512) look(const T* a, i64 ld, int n, int* found) {
  int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  for (int c = blockIdx.x * warps + threadIdx.x / 32; c < n; c += gridDim.x * warps)
    for (int r = c + lane; r < n; r += 32) {
      REAL size = size_of(a[c * ld + r]);
      if (size != size) atomicMax(found + 1, n - r);
    }
}
"""
)

# One block, after cuSOLVER: what it found becomes INFO, unless NaN comes first: then all is NaN. cuSOLVER leaves NaN
# where the pivot is negative, so that the factor does not tell.
JUDGE = (
    _COMMON
    + r"""
extern "C" __global__ void __launch_bounds__(512) judge(
    T* a, i64 ld, int rows, int cols, int* found, int* info, int first) {
  int at = found[0], nan = found[1] && at > cols - found[1], t = threadIdx.x;
  __syncthreads();
  if (at > 0 && nan)
    for (int c = 0; c < cols; ++c)
      for (int r = t; r < rows; r += blockDim.x) spoil(a[c * ld + r]);
  if (t == 0) {
    *info = at > 0 && !nan ? first + at : 0;
    found[0] = found[1] = 0;
  }
}
"""
)

_SUMS = r"""
__device__ __forceinline__ float plus(float a, float b) { return a + b; }
__device__ __forceinline__ double plus(double a, double b) { return a + b; }
__device__ __forceinline__ c64 plus(c64 a, c64 b) { a.x += b.x; a.y += b.y; return a; }
__device__ __forceinline__ c128 plus(c128 a, c128 b) { a.x += b.x; a.y += b.y; return a; }
__device__ __forceinline__ void one(float& a) { a = 1; }
__device__ __forceinline__ void one(double& a) { a = 1; }
__device__ __forceinline__ void one(c64& a) { a.x = 1; a.y = 0; }
__device__ __forceinline__ void one(c128& a) { a.x = 1; a.y = 0; }
__device__ __forceinline__ float negative(float a) { return -a; }
__device__ __forceinline__ double negative(double a) { return -a; }
__device__ __forceinline__ c64 negative(c64 a) { a.x = -a.x; a.y = -a.y; return a; }
__device__ __forceinline__ c128 negative(c128 a) { a.x = -a.x; a.y = -a.y; return a; }
__device__ REAL row(const T* x, int i, int size) {  // the sum of sizes in a row of a lower triangle
  REAL sum = 0;
  for (int k = 0; k <= i && k < size; ++k) sum += size_of(x[k * WIDTH + i]);
  return sum;
}
"""

# A block of threads for each block of the diagonal of a lower triangle, n x n: its copy, with zeros above the diagonal,
# and its inverse. Copies go side by side into a matrix with WIDTH rows, unless copy is null, inverses into one whose
# columns are ld apart, each as many times apart elements behind the first as there are rows above it.
# a[i * down + j * across] is in row i, column j. conditions[b] becomes the product of the largest sums of sizes in a
# row of both, unless it is null.
INVERT = (
    _COMMON
    + _SUMS
    + r"""
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
      if (i == j) one(sum);
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
    _COMMON
    + _SUMS
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
    if (row == col && (unit || row >= size)) one(value);
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
    _COMMON
    + _SUMS
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

# Exchanges one after another, row i with row pivots[i] - 1 - first, become moves: pairs[2 i] is where a row goes,
# pairs[2 i + 1] where it comes from. The first count are the top rows, the others the rows that they meet below.
_MOVES = r"""
__device__ void moves(const int* pivots, int count, int first, int back, int* other, int* slot, int* now, int* pairs) {
  int t = threadIdx.x;
  if (t < count) other[t] = pivots[t] - 1 - first;
  __syncthreads();
  if (t < count) {
    int p = other[t], s = t;
    if (p < 0 || p >= count) {
      for (int i = 0; i < t; ++i) if (other[i] == p) { s = i; break; }
      p = count + s;
    }
    slot[t] = p;
    now[t] = t;
    now[count + t] = other[t];
  }
  __syncthreads();
  if (t == 0)
    for (int i = 0; i < count; ++i) {
      int there = slot[i], row = now[i];
      now[i] = now[there];
      now[there] = row;
    }
  __syncthreads();
  if (t < count) {
    int p = other[t], single = slot[t] == count + t;
    int to[2] = {t, single ? p : 0}, of[2] = {now[t], single ? now[count + t] : 0};
    for (int i = 0; i < 2; ++i) {
      pairs[2 * (t + i * count)] = back ? of[i] : to[i];
      pairs[2 * (t + i * count) + 1] = back ? to[i] : of[i];
    }
  }
}
"""

# Each block has MOST exchanges.
PAIRS = (
    _COMMON
    + _MOVES
    + r"""
extern "C" __global__ void __launch_bounds__(1024) pairs(const int* pivots, int count, int first, int back, int* out) {
  __shared__ int other[MOST], slot[MOST], now[2 * MOST];
  int start = blockIdx.x * MOST;
  moves(pivots + start, min(MOST, count - start), first + start, back, other, slot, now, out + 4 * start);
}
"""
)

# Of few exchanges every block finds the moves itself: "exchange" needs no kernel before it.
SWAP = (
    _COMMON
    + _MOVES
    + r"""
__device__ void carry(T* a, i64 ld, i64 cols, const int* pairs, int count) {
  i64 to[4], of[4];
  #pragma unroll
  for (int q = 0; q < 4; ++q) {
    int i = threadIdx.x + q * blockDim.x;
    to[q] = i < count ? pairs[2 * i] : 0;
    of[q] = i < count ? pairs[2 * i + 1] : 0;
  }
  for (i64 c = (i64)blockIdx.x * COLUMNS; c < cols; c += (i64)gridDim.x * COLUMNS) {
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
extern "C" __global__ void __launch_bounds__(512) swap(T* a, i64 ld, i64 cols, const int* pairs, int count)
{ carry(a, ld, cols, pairs, count); }
extern "C" __global__ void __launch_bounds__(512) exchange(
    T* a, i64 ld, i64 cols, const int* pivots, int count, int first, int back) {
  __shared__ int other[FEW], slot[FEW], now[2 * FEW], pairs[4 * FEW];
  moves(pivots, count, first, back, other, slot, now, pairs);
  __syncthreads();
  carry(a, ld, cols, pairs, 2 * count);
}
"""
)

_MEETING = r"""
__device__ __forceinline__ u32 acquire(const u32* p)
{ u32 v; asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ void meet(u32* count, u32 target) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(count, 1u);
    while ((int)(acquire(count) - target) < 0) {}
    __threadfence();
  }
  __syncthreads();
}
"""

# One panel's step of a triangular solve for COLUMNS right-hand sides, whose rows are one behind the other. All blocks
# run at the same time, and meet between products. The unknowns x are found by the inverse of the panel's triangle, size
# x size, and one step of iterative refinement; right is spoiled. Forward, what a, rows x size, contributes to y is
# subtracted then; backward, what its transpose contributes to right is subtracted before.
STEP = (
    _COMMON
    + "#define WIDTH 1\n"
    + _SUMS
    + _MEETING
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

# A narrow panel in the shared memory of all blocks, each with some of its rows. For a column every block finds its
# largest element and shows it, with its row; they meet; every block takes the largest, exchanges rows and eliminates.
# Slots of odd and even columns alternate, so that one meeting a column is enough.
LU = (
    _COMMON
    + _MEETING
    + r"""
__device__ __forceinline__ void better(REAL& size, int& row, int& block, REAL s, int r, int b)
{ if (s > size || (s == size && r < row)) { size = s; row = r; block = b; } }

extern "C" __global__ void __launch_bounds__(512) lu(
    T* a, i64 ld, int m, int w, int rows, int* pivots, int first, int* info,
    T* shown, REAL* sizes, int* places, u32* count) {
  extern __shared__ __align__(16) unsigned char memory[];
  T* x = (T*)memory;
  __shared__ REAL size_[16];
  __shared__ int row_[16], chosen_row;
  __shared__ T pivot[WIDEST], old[WIDEST];
  const int t = threadIdx.x, block = blockIdx.x, blocks = gridDim.x, none = 0x7fffffff;
  const int base = block * rows, mine = min(rows, m - base), steps = min(m, w);
  for (int c = 0; c < w; ++c)
    for (int r = t; r < mine; r += blockDim.x) x[c * rows + r] = a[c * ld + base + r];
  __syncthreads();
  for (int j = 0; j < steps; ++j) {
    int side = j & 1;
    T* show = shown + (i64)side * (blocks + 1) * WIDEST;  // the last row is row j
    REAL size = -1;
    int row = none, from = block;
    for (int r = t; r < mine; r += blockDim.x)
      if (base + r >= j) better(size, row, from, size_of(x[j * rows + r]), base + r, block);
    for (int lane = 16; lane; lane >>= 1) {
      REAL s = __shfl_xor_sync(~0u, size, lane);
      int r = __shfl_xor_sync(~0u, row, lane);
      better(size, row, from, s, r, block);
    }
    if (t % 32 == 0) { size_[t / 32] = size; row_[t / 32] = row; }
    __syncthreads();
    if (t < 32) {
      int warps = blockDim.x / 32;
      size = t < warps ? size_[t] : (REAL)-1;
      row = t < warps ? row_[t] : none;
      for (int lane = 16; lane; lane >>= 1) {
        REAL s = __shfl_xor_sync(~0u, size, lane);
        int r = __shfl_xor_sync(~0u, row, lane);
        better(size, row, from, s, r, block);
      }
      if (t == 0) {
        sizes[side * blocks + block] = size;
        places[side * blocks + block] = row;
        chosen_row = row;
      }
    }
    __syncthreads();
    if (t < w) {
      if (chosen_row != none) show[block * WIDEST + t] = x[t * rows + chosen_row - base];
      if (j >= base && j < base + mine) show[blocks * WIDEST + t] = x[t * rows + j - base];
    }
    meet(count, (u32)(j + 1) * blocks);
    if (t < 32) {
      size = -1; row = none; from = 0;
      for (int b = t; b < blocks; b += 32) {
        REAL s = *(volatile REAL*)&sizes[side * blocks + b];
        better(size, row, from, s, *(volatile int*)&places[side * blocks + b], b);
      }
      for (int lane = 16; lane; lane >>= 1) {
        REAL s = __shfl_xor_sync(~0u, size, lane);
        int r = __shfl_xor_sync(~0u, row, lane), b = __shfl_xor_sync(~0u, from, lane);
        better(size, row, from, s, r, b);
      }
      if (row == none) { row = j; from = blocks; }  // all are NaN
      if (t == 0) chosen_row = row;
      for (int c = t; c < w; c += 32) {
        pivot[c] = show[from * WIDEST + c];
        old[c] = show[blocks * WIDEST + c];
      }
    }
    __syncthreads();
    row = chosen_row;
    if (row != j && t < w) {
      if (row >= base && row < base + mine) x[t * rows + row - base] = old[t];
      if (j >= base && j < base + mine) x[t * rows + j - base] = pivot[t];
    }
    __syncthreads();
    T diagonal = pivot[j];
    bool zero = is_zero(diagonal);
    if (block == 0 && t == 0) {
      pivots[j] = first + row + 1;
      if (zero && *info == 0) *info = first + j + 1;
    }
    if (!zero)
      for (int r = t; r < mine; r += blockDim.x)
        if (base + r > j) {
          T factor = over(x[j * rows + r], diagonal);
          x[j * rows + r] = factor;
          for (int c = j + 1; c < w; ++c) take(x[c * rows + r], factor, pivot[c]);
        }
    __syncthreads();
  }
  for (int c = 0; c < w; ++c)
    for (int r = t; r < mine; r += blockDim.x) a[c * ld + base + r] = x[c * rows + r];
  if (t == 0 && atomicAdd(count, 1u) == (u32)(steps + 1) * blocks - 1) *count = 0;
}
"""
)

# Householder reflectors of a narrow panel, as LU. For a column every block shows its dot products with all columns, of
# its rows below the diagonal; their sums give the norm, the products with the reflector, and a column of T.
# Elements of the column are divided by the largest of the block meanwhile: squares neither overflow nor underflow.
QR = (
    _COMMON
    + _MEETING
    + r"""
__device__ __forceinline__ float conj_(float a) { return a; }
__device__ __forceinline__ double conj_(double a) { return a; }
__device__ __forceinline__ c64 conj_(c64 a) { a.y = -a.y; return a; }
__device__ __forceinline__ c128 conj_(c128 a) { a.y = -a.y; return a; }
__device__ __forceinline__ float re(float a) { return a; }
__device__ __forceinline__ double re(double a) { return a; }
__device__ __forceinline__ float re(c64 a) { return a.x; }
__device__ __forceinline__ double re(c128 a) { return a.x; }
__device__ __forceinline__ float im(float) { return 0; }
__device__ __forceinline__ double im(double) { return 0; }
__device__ __forceinline__ float im(c64 a) { return a.y; }
__device__ __forceinline__ double im(c128 a) { return a.y; }
__device__ __forceinline__ void set(float& a, float x, float) { a = x; }
__device__ __forceinline__ void set(double& a, double x, double) { a = x; }
__device__ __forceinline__ void set(c64& a, float x, float y) { a.x = x; a.y = y; }
__device__ __forceinline__ void set(c128& a, double x, double y) { a.x = x; a.y = y; }
__device__ __forceinline__ T number(REAL x, REAL y) { T a; set(a, x, y); return a; }
__device__ __forceinline__ T times(T a, T b) { T d = number(0, 0); take(d, number(-re(a), -im(a)), b); return d; }
__device__ __forceinline__ T plus(T a, T b) { return number(re(a) + re(b), im(a) + im(b)); }
__device__ __forceinline__ T scaled(T a, REAL s) { return number(re(a) * s, im(a) * s); }
__device__ __forceinline__ T other(T a, int lane)
{ REAL x = __shfl_xor_sync(~0u, re(a), lane), y = __shfl_xor_sync(~0u, im(a), lane); return number(x, y); }

extern "C" __global__ void __launch_bounds__(512) qr(
    T* a, i64 ld, int m, int w, int rows, T* v, i64 ldv, T* block_factor, T* tau, T* shown, REAL* sizes, u32* count) {
  extern __shared__ __align__(16) unsigned char memory[];
  T* x = (T*)memory;
  T* y = x + (i64)w * rows;  // the column, conjugated and scaled
  __shared__ REAL size_[16];
  __shared__ T part[16][WIDEST], line[WIDEST], dot[WIDEST], use[WIDEST], t_[WIDEST][WIDEST], factors[3];
  const int t = threadIdx.x, block = blockIdx.x, blocks = gridDim.x, warps = blockDim.x / 32;
  const int base = block * rows, mine = min(rows, m - base), lane = t % 32, warp = t / 32;
  for (int c = 0; c < w; ++c)
    for (int r = t; r < mine; r += blockDim.x) x[c * rows + r] = a[c * ld + base + r];
  __syncthreads();
  for (int j = 0; j < w; ++j) {
    int side = j & 1;
    T* show = shown + (i64)side * (blocks + 1) * WIDEST;  // the last row is row j
    REAL top = 0;
    for (int r = t; r < mine; r += blockDim.x)
      if (base + r > j) top = fmax(top, size_of(x[j * rows + r]));
    for (int k = 16; k; k >>= 1) top = fmax(top, __shfl_xor_sync(~0u, top, k));
    if (lane == 0) size_[warp] = top;
    __syncthreads();
    for (int i = 0; i < warps; ++i) top = fmax(top, size_[i]);
    REAL by = top > 0 ? top : (REAL)1;
    for (int r = t; r < mine; r += blockDim.x) {
      T each = conj_(x[j * rows + r]);
      y[r] = base + r > j ? number(re(each) / by, im(each) / by) : number(0, 0);
    }
    if (t == 0) sizes[side * blocks + block] = top;
    __syncthreads();
    for (int c = warp; c < w; c += 2 * warps) {  // two columns at a time hide each other's latency
      int d = min(c + warps, w - 1);
      T sum = number(0, 0), more = sum;
      #pragma unroll 4
      for (int r = lane; r < mine; r += 32) {
        T each = y[r];
        sum = plus(sum, times(each, x[c * rows + r]));
        more = plus(more, times(each, x[d * rows + r]));
      }
      for (int k = 16; k; k >>= 1) { sum = plus(sum, other(sum, k)); more = plus(more, other(more, k)); }
      if (lane == 0) {
        show[block * WIDEST + c] = sum;
        if (c + warps < w) show[block * WIDEST + d] = more;
      }
    }
    if (t < w && j >= base && j < base + mine) show[blocks * WIDEST + t] = x[t * rows + j - base];
    meet(count, (u32)(j + 1) * blocks);
    REAL most = 0;
    for (int b = lane; b < blocks; b += 32) most = fmax(most, sizes[side * blocks + b]);
    for (int k = 16; k; k >>= 1) most = fmax(most, __shfl_xor_sync(~0u, most, k));
    if (!(most > 0)) most = 1;
    T sum = number(0, 0);
    if (lane < w)
      for (int b = warp; b < blocks; b += warps) {
        REAL size = sizes[side * blocks + b];
        sum = plus(sum, scaled(show[b * WIDEST + lane], size > 0 ? size / most : 1 / most));
      }
    if (lane < w) part[warp][lane] = sum;
    if (t < w) line[t] = show[blocks * WIDEST + t];
    __syncthreads();
    if (t < w) {
      sum = part[0][t];
      for (int i = 1; i < warps; ++i) sum = plus(sum, part[i][t]);
      dot[t] = sum;  // times ``most``
    }
    __syncthreads();
    if (t == 0) {
      T alpha = line[j], factor = number(0, 0), scale = number(0, 0);
      REAL below = re(dot[j]) / most;  // squares of the column below the diagonal, over most^2
      if (!(below == 0 && im(alpha) == 0)) {
        REAL big = fmax(most, fmax(fabs(re(alpha)), fabs(im(alpha))));
        REAL p = re(alpha) / big, q = im(alpha) / big, s = most / big;
        REAL norm = big * sqrt(p * p + q * q + s * below * s);
        REAL beta = re(alpha) >= 0 ? -norm : norm;
        factor = number((beta - re(alpha)) / beta, -im(alpha) / beta);
        scale = over(number(1, 0), number(re(alpha) - beta, im(alpha)));
        alpha = number(beta, 0);
      }
      factors[0] = factor; factors[1] = scale; factors[2] = alpha;
      if (block == 0) tau[j] = factor;
    }
    __syncthreads();
    const T factor = factors[0], scale = factors[1], diagonal = factors[2];
    const bool acts = !is_zero(factor);
    if (t < w && acts) {
      T by_most = scaled(scale, most);
      if (t > j) use[t] = times(conj_(factor), plus(line[t], times(conj_(by_most), dot[t])));
      if (t < j) use[t] = plus(conj_(line[t]), times(by_most, conj_(dot[t])));
    }
    __syncthreads();
    if (acts)
      for (int r = t; r < mine; r += blockDim.x) {
        if (base + r < j) continue;
        T e = number(1, 0);
        if (base + r > j) x[j * rows + r] = e = times(x[j * rows + r], scale);
        else x[j * rows + r] = diagonal;
        for (int c = j + 1; c < w; ++c) take(x[c * rows + r], e, use[c]);
      }
    if (block == 0)
      for (int i = warp; i < w; i += warps) {  // element i of column j of T, by a warp
        sum = lane >= i && lane < j && acts ? times(t_[i][lane], use[lane]) : number(0, 0);
        for (int k = 16; k; k >>= 1) sum = plus(sum, other(sum, k));
        if (lane == 0) t_[i][j] = i == j ? factor : times(number(-re(factor), -im(factor)), sum);
      }
    __syncthreads();
  }
  for (int c = 0; c < w; ++c)
    for (int r = t; r < mine; r += blockDim.x) {
      T e = x[c * rows + r];
      a[c * ld + base + r] = e;
      v[c * ldv + base + r] = base + r > c ? e : number(base + r == c, 0);
    }
  if (block == 0)
    for (int i = t; i < w * w; i += blockDim.x) block_factor[i] = t_[i % w][i / w];
  if (t == 0 && atomicAdd(count, 1u) == (u32)(w + 1) * blocks - 1) *count = 0;
}
"""
)
