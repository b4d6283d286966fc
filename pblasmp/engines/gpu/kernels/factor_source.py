# SPDX-License-Identifier: Apache-2.0
"""The CUDA text of the kernels that factor panels. It includes no headers."""

from __future__ import annotations

from .compiler import cuda

COMMON = (
    cuda("complex.cuh")
    + r"""
typedef unsigned int u32; typedef unsigned long long u64; typedef long long i64;
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
#ifdef KIND
typedef KIND T; typedef REAL_KIND REAL;
__device__ __forceinline__ T number(REAL x, REAL y) { T a; set(a, x, y); return a; }
__device__ __forceinline__ T negative(T a) { return number(-re(a), -im(a)); }
__device__ __forceinline__ bool is_zero(T a) { return re(a) == 0 && im(a) == 0; }
#endif
__device__ __forceinline__ float size_of(float a) { return fabsf(a); }
__device__ __forceinline__ double size_of(double a) { return fabs(a); }
__device__ __forceinline__ float size_of(c64 a) { return fabsf(a.x) + fabsf(a.y); }
__device__ __forceinline__ double size_of(c128 a) { return fabs(a.x) + fabs(a.y); }
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
)

# Before cuSOLVER: found[1] becomes n less the first row of the lower triangle that has NaN, if there is one.
LOOK = (
    COMMON
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
    COMMON
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
    COMMON
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
    COMMON
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

MEETING = r"""
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

# A narrow panel in the shared memory of all blocks, each with some of its rows. For a column every block finds its
# largest element and shows it, with its row; they meet; every block takes the largest, exchanges rows and eliminates.
# Slots of odd and even columns alternate, so that one meeting a column is enough.
LU = (
    COMMON
    + MEETING
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
    COMMON
    + MEETING
    + r"""
__device__ __forceinline__ T times(T a, T b) { T d = number(0, 0); take(d, negative(a), b); return d; }
__device__ __forceinline__ T scaled(T a, REAL s) { return number(re(a) * s, im(a) * s); }
__device__ __forceinline__ T other(T a, int lane)
{ REAL x = __shfl_xor_sync(~0u, re(a), lane), y = __shfl_xor_sync(~0u, im(a), lane); return number(x, y); }

extern "C" __global__ void __launch_bounds__(512) qr(
    T* a, i64 ld, int m, int w, int rows, T* v, i64 ldv, T* block_factor, T* tau, T* shown, REAL* sizes, u32* count) {
  extern __shared__ __align__(16) unsigned char memory[];
  T* x = (T*)memory;
  T* y = x + (i64)w * rows;  // the column, conjugated and scaled
  __shared__ REAL size_[16];
  __shared__ T part[16][WIDEST], line[WIDEST], dot[WIDEST], use[WIDEST], t_[WIDEST][WIDEST], factors[4];
  __shared__ REAL shrinks;
  const REAL LEAST = sizeof(REAL) == 4 ? (REAL)1.1754943508222875e-38 : (REAL)2.2250738585072014e-308;  // no denormal
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
      T each = conjugate(x[j * rows + r]);
      y[r] = base + r > j ? number(re(each) / by, im(each) / by) : number(0, 0);
    }
    if (t == 0) sizes[side * blocks + block] = top;
    __syncthreads();
    for (int c = warp; c < w; c += 2 * warps) {  // two columns at a time hide each other's latency
      int d = min(c + warps, w - 1);
      const T *of = c == j ? y : x + c * rows, *beside = d == j ? y : x + d * rows;  // with itself: scaled twice
      const REAL sign = c == j ? -1 : 1, besides = d == j ? -1 : 1;
      T sum = number(0, 0), more = sum;
      #pragma unroll 4
      for (int r = lane; r < mine; r += 32) {
        T each = y[r];
        sum = plus(sum, times(each, number(re(of[r]), sign * im(of[r]))));
        more = plus(more, times(each, number(re(beside[r]), besides * im(beside[r]))));
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
        REAL size = sizes[side * blocks + b], share = size > 0 ? size / most : (REAL)0;
        sum = plus(sum, scaled(show[b * WIDEST + lane], lane == j ? share * share : share));
      }
    if (lane < w) part[warp][lane] = sum;
    if (t < w) line[t] = show[blocks * WIDEST + t];
    __syncthreads();
    if (t < w) {
      sum = part[0][t];
      for (int i = 1; i < warps; ++i) sum = plus(sum, part[i][t]);
      dot[t] = sum;  // times ``most``; of the column itself, its squares over most^2
    }
    __syncthreads();
    if (t == 0) {
      T alpha = line[j], factor = number(0, 0), scale = factor, by_most = factor;
      REAL below = re(dot[j]), tiny = 0;
      if (!(below == 0 && im(alpha) == 0)) {  // all in units of the largest number: denormal ones have few digits
        REAL big = fmax(below == 0 ? (REAL)0 : most, fmax(fabs(re(alpha)), fabs(im(alpha))));
        REAL p = re(alpha) / big, q = im(alpha) / big, s = below == 0 ? (REAL)0 : most / big;
        REAL norm = sqrt(p * p + q * q + s * below * s), beta = p >= 0 ? -norm : norm;
        T unit = over(number(1, 0), number(p - beta, q));
        factor = number((beta - p) / beta, -q / beta);
        by_most = scaled(unit, s);
        if (big < LEAST) { tiny = big; scale = unit; }  // 1 / big may be infinite
        else scale = over(number(1, 0), number(re(alpha) - beta * big, im(alpha)));
        alpha = number(beta * big, 0);
      }
      factors[0] = factor; factors[1] = scale; factors[2] = alpha; factors[3] = by_most; shrinks = tiny;
      if (block == 0) tau[j] = factor;
    }
    __syncthreads();
    const T factor = factors[0], scale = factors[1], diagonal = factors[2], by_most = factors[3];
    const REAL tiny = shrinks;
    const bool acts = !is_zero(factor);
    if (t < w && acts) {
      if (t > j) use[t] = times(conjugate(factor), plus(line[t], times(conjugate(by_most), dot[t])));
      if (t < j) use[t] = plus(conjugate(line[t]), times(by_most, conjugate(dot[t])));
    }
    __syncthreads();
    if (acts)
      for (int r = t; r < mine; r += blockDim.x) {
        if (base + r < j) continue;
        T e = number(1, 0);
        if (base + r > j) {
          e = x[j * rows + r];
          if (tiny > 0) e = number(re(e) / tiny, im(e) / tiny);
          x[j * rows + r] = e = times(e, scale);
        } else x[j * rows + r] = diagonal;
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
