# SPDX-License-Identifier: Apache-2.0
"""The CUDA text of the kernels that solve with triangles, by inverses of the blocks on their diagonals."""

from __future__ import annotations

from .factor_source import COMMON, MEETING

# A block of threads for each block of WIDTH columns on the diagonals of lower triangles: its inverse, to the same
# place. Triangles have ld columns of ld elements, and one more is between them. n is the columns of all triangles.
# Above diagonals nothing is written. A warp inverts BASE columns, one each lane; then of two inverses side by side one
# is made, X21 = -X22 L21 X11, until there is one.
INVERT = (
    COMMON
    + r"""
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
    T* own = x + t / 32 * BASE * (WIDTH + 1), column[BASE];
    const int j = t % 32;
    #pragma unroll
    for (int i = 0; i < BASE; ++i) {
      T sum = {}, more = {};
      if (i == j) sum = number(1, 0);
      #pragma unroll
      for (int k = 0; k < i; ++k) take(k % 2 ? more : sum, own[k * WIDTH + i], column[k]);
      column[i] = i < j ? T{} : over(plus(sum, more), own[i * WIDTH + i]);
    }
    __syncwarp();
    if (j < BASE)
      #pragma unroll
      for (int i = 0; i < BASE; ++i) own[j * WIDTH + i] = column[i];
  }
  __syncthreads();
  #pragma unroll
  for (int half = BASE; half < WIDTH; half *= 2) {
    constexpr int MOST = WIDTH > BASE ? WIDTH * WIDTH / 4 / THREADS : 1;
    const int i = t % half, first = t / half, apart = THREADS / half;
    for (int top = 0; top < WIDTH; top += 2 * half) {
      T *upper = x + top * (WIDTH + 1), *between = upper + half, *lower = upper + half * (WIDTH + 1), sums[MOST];
      for (int pass = 0; pass < 2; ++pass) {
        const T *left = pass ? lower : between, *right = pass ? between : upper;
        #pragma unroll
        for (int q = 0; q < MOST; ++q) sums[q] = T{};
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
"""
)

# Inverses of twice as many columns, X21 = -X22 L21 X11: of two blocks of HALF columns on a diagonal the inverses X11
# and X22 are known, and L21 is between them. Places are those of INVERT. Each block of threads has COLUMNS columns.
JOIN = (
    COMMON
    + r"""
extern "C" __global__ void __launch_bounds__(HALF) join(const T* a, T* inverse, i64 ld) {
  __shared__ T right[HALF][COLUMNS];
  const int i = threadIdx.x, left = blockIdx.y * COLUMNS;
  const i64 base = blockIdx.x * 2 * HALF * (ld + 1);
  const T *first = inverse + base + left * ld, *last = inverse + base + HALF * (ld + 1), *between = a + base + HALF;
  T *to = inverse + base + HALF + left * ld, sums[COLUMNS];
  for (int c = 0; c < COLUMNS; ++c) right[i][c] = first[c * ld + i];
  for (int pass = 0; pass < 2; ++pass) {
    __syncthreads();
    for (int c = 0; c < COLUMNS; ++c) sums[c] = T{};
    const T* by = pass ? last : between;
    const int begin = pass ? 0 : left, end = pass ? min(HALF, i / 32 * 32 + 32) : HALF;  // the rest is zero
    #pragma unroll 4
    for (int k = begin; k < end; ++k) {
      T factor = by[k * ld + i];
      #pragma unroll
      for (int c = 0; c < COLUMNS; ++c) take(sums[c], factor, right[k][c]);
    }
    __syncthreads();
    for (int c = 0; c < COLUMNS; ++c) right[i][c] = sums[c];
  }
  for (int c = 0; c < COLUMNS; ++c) to[c * ld + i] = negative(sums[c]);
}
"""
)

# The conditions of lower triangles of WIDTH columns, WIDTH * (WIDTH + 1) elements apart: the product of the largest
# sums of sizes in a row of a triangle and of its inverse.
CONDITIONS = (
    COMMON
    + r"""
__device__ __forceinline__ REAL larger(REAL a, REAL b) { return a != a || a > b ? a : b; }  // NaN is the largest
extern "C" __global__ void __launch_bounds__(4 * WIDTH) conditions(
    const T* triangles, const T* inverses, REAL* conditions, int count) {
  __shared__ REAL sums[4][WIDTH], most[2];
  const int i = threadIdx.x % WIDTH, part = threadIdx.x / WIDTH;
  for (int triangle = blockIdx.x; triangle < count; triangle += gridDim.x) {
    for (int pass = 0; pass < 2; ++pass) {
      const T* x = (pass ? inverses : triangles) + (i64)triangle * WIDTH * (WIDTH + 1);
      REAL sum = 0;
      #pragma unroll 8
      for (int k = part; k <= i; k += 4) sum += size_of(x[k * WIDTH + i]);
      sums[part][i] = sum;
      __syncthreads();
      if (threadIdx.x < 32) {
        REAL all = 0;
        for (int r = threadIdx.x; r < WIDTH; r += 32)
          all = larger(all, sums[0][r] + sums[1][r] + sums[2][r] + sums[3][r]);
        for (int lane = 16; lane; lane >>= 1) all = larger(all, __shfl_xor_sync(~0u, all, lane));
        if (threadIdx.x == 0) most[pass] = all;
      }
      __syncthreads();
    }
    if (threadIdx.x == 0) conditions[triangle] = most[0] * most[1];
  }
}
"""
)

# The triangles on the diagonal of a rank's panels, each WIDTH x WIDTH with zeros above the diagonal and ones behind the
# last column: L, or the transpose of U. Block y of threads copies panel y; WIDTH + 1 columns of WIDTH are from one to
# the next. Zeros go to the same places in inverse.
TRIANGLES = (
    COMMON
    + r"""
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
"""
)

# The unknowns of one triangle, size x columns, have been found by its inverse; x has the right-hand sides less the
# contributions of other unknowns, and becomes the unknowns. What was found is taken as it is if the condition of the
# triangle is at most FAIR, after a step of iterative refinement if it is at most POOR; beyond, a step is not enough,
# and the equations are solved by substitution. Triangle and inverse are lower ones, or turned their transposes. Each
# block of threads has TILE columns, and DEEP columns of a matrix at a time.
REFINE = (
    COMMON
    + r"""
extern "C" __global__ void __launch_bounds__(8 * TILE) refine(
    T* x, i64 down, i64 across, const T* found, i64 found_down, i64 found_across, const T* triangle, const T* inverse,
    const REAL* condition, int turned, int size, i64 columns) {
  extern __shared__ __align__(16) unsigned char memory[];
  constexpr int ROWS = (WIDTH + 31) / 32, HIGH = 32 * ROWS, THREADS = 8 * TILE;
  T *right = (T*)memory, *known = right + HIGH * TILE;  // row i, column c is [i * TILE + c]
  T* part = known + HIGH * TILE;  // of a matrix: element (i, k) is [k * (HIGH + 1) + i]
  const int t = threadIdx.x, lane = t % 32, own = t / 32 * 4;  // a warp has four columns
  const i64 first = (i64)blockIdx.x * TILE;
  const int wide = (int)min((i64)TILE, columns - first);
  const bool refines = !(*condition <= FAIR), substitutes = !(*condition <= POOR);
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
      #pragma unroll
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
  for (int at = t; at < HIGH * TILE; at += THREADS) {
    int r = across == 1 ? at / TILE : at % HIGH, c = across == 1 ? at % TILE : at / HIGH;
    if (r < size && c < wide) x[r * down + (first + c) * across] = known[r * TILE + c];
  }
}
"""
)

# The solution with a lower triangle of at most 32 ROWS rows, whose diagonal is taken as ones, in the place of x. A warp
# has two columns of x in its registers. A block of threads gets TILE columns of the triangle at a time, while it solves
# with those before.
SUBSTITUTE = (
    COMMON
    + r"""
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
    #pragma unroll 4
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
