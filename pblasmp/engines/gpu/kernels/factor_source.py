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
__device__ void moves(const int* pivots, int count, int first, int back, int* other, int* pairs) {
  int t = threadIdx.x;
  if (t < count) other[t] = pivots[t] - 1 - first;
  __syncthreads();
  if (t < count) {
    const int p = other[t];
    int top = t, below = p;
    bool single = p < 0 || p >= count;
    #pragma unroll 8
    for (int i = count - 1; i >= 0; --i) {  // from where rows are at the end back to where they were
      const int q = other[i];
      if (q == p && i < t) single = false;
      top = top == i ? q : top == q ? i : top;
      below = below == i ? q : below == q ? i : below;
    }
    int to[2] = {t, single ? p : 0}, of[2] = {top, single ? below : 0};
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
  __shared__ int other[MOST];
  int start = blockIdx.x * MOST;
  moves(pivots + start, min(MOST, count - start), first + start, back, other, out + 4 * start);
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
  __shared__ int other[FEW], pairs[4 * FEW];
  moves(pivots, count, first, back, other, pairs);
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

# A narrow panel in the registers of all blocks: each thread has ROWS rows, of which the first COLUMNS - j elements are
# left at column j; after each column they move up by one. What is done is in shared memory. For a column every block
# shows its largest element and that row; every block takes the largest of all. Rows stay where they are: only their
# places are exchanged, and at the end they are written there. While blocks learn of a column's largest element, they
# subtract what the pivot before contributes to all columns but this one. 1 / pivot comes with its row, or 0 if that is
# not exact enough.
# What is shown goes in words of 16 bytes, half data, half a tag that no other column has: a reader waits until it finds
# the tag, which takes no fence and no counter. Slots of odd and even columns alternate: a block that shows column
# j + 2 has seen all others at column j + 1, and they had read column j by then.
LU = (
    COMMON
    + MEETING
    + r"""
struct __align__(16) Several { T of[16 / sizeof(T)]; };
constexpr int PARTS = sizeof(T) / sizeof(REAL), TOGETHER = 16 / sizeof(T), CHUNK = COLUMNS < 16 ? COLUMNS : 16;
constexpr int WORDS = (COLUMNS * (int)sizeof(T) + 7) / 8, SLOT = 4 + WORDS, WARPS = THREADS / 32;
typedef REAL Rows[ROWS][COLUMNS * PARTS];  // of numbers, not of complex ones: these would not be in registers
__device__ __forceinline__ T element(const Rows& x, int i, int c)
{ return number(x[i][c * PARTS], x[i][c * PARTS + PARTS - 1]); }
__device__ __forceinline__ void put(Rows& x, int i, int c, T a)
{ x[i][c * PARTS] = re(a); if (PARTS == 2) x[i][c * PARTS + PARTS - 1] = im(a); }
__device__ __forceinline__ void show(uint4* to, u64 word, u32 tag)
{ asm volatile("st.volatile.global.v4.u32 [%0],{%1,%2,%3,%2};"
               :: "l"(to), "r"((u32)word), "r"(tag), "r"((u32)(word >> 32)) : "memory"); }
__device__ __forceinline__ bool got(const uint4* of, u32 tag, u64& word) {
  u32 low, first, high, second;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(low), "=r"(first), "=r"(high), "=r"(second) : "l"(of) : "memory");
  word = (u64)high << 32 | low;
  return first == tag && second == tag;
}
__device__ __forceinline__ u32 most(u32 x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, x);
#else
  for (int lane = 16; lane; lane >>= 1) x = max(x, __shfl_xor_sync(~0u, x, lane));
  return x;
#endif
}
// Sizes in the order of numbers: 0 for nothing, 1 for NaN, which is taken only if there is nothing else.
__device__ __forceinline__ u64 rank_of(float a) { return a == a ? (u64)__float_as_uint(a) + 2 : 1; }
__device__ __forceinline__ u64 rank_of(double a) { return a == a ? (u64)__double_as_longlong(a) + 2 : 1; }
// Whether this lane has the largest key of its warp, of several the one whose place is the first.
__device__ __forceinline__ bool leads(u64 key, u32 place) {
  u32 high = (u32)(key >> 32), low = (u32)key;
  bool may = true;
  if (sizeof(REAL) == 8) may = high == most(high);
  const u32 largest = most(may ? low : 0u);
  may = may && low == largest;
  const u32 earliest = most(may ? ~place : 0u);  // all lanes take part in each
  return may && ~place == earliest;
}
__device__ __forceinline__ T inverse(T a) {
  const REAL size = size_of(a), least = sizeof(REAL) == 4 ? (REAL)7.888609052210118e-31 : (REAL)9.332636185032189e-302;
  return size > least && size < 1 / least ? over(number(1, 0), a) : T{};  // far from denormal numbers
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) lu(
    T* a, i64 ld, int m, int w, int rows, int* pivots, int first, int* info, uint4* shown, u32* count) {
  extern __shared__ __align__(16) unsigned char memory[];
  T* done = (T*)memory;  // element (r, c) is done[c * rows + r]
  __shared__ Several pivots_[2][COLUMNS / TOGETHER + 2], line[COLUMNS / TOGETHER + 2];  // behind 1 / pivot
  __shared__ u64 keys[WARPS];
  __shared__ int places[WARPS], owners[WARPS], chosen_place, chosen_block;
  const int t = threadIdx.x, lane = t % 32, warp = t / 32, block = blockIdx.x, blocks = gridDim.x;
  const int base = block * rows, mine = min(rows, m - base), steps = min(m, w);
  const u32 before = acquire(count + 1);  // tags of earlier panels
  Rows x;
  T factor[ROWS];
  int place[ROWS];  // where a row is by now; once it has been a pivot, less 1 << 30
  bool zero = true;
  #pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int r = t + i * THREADS;
    place[i] = r < mine ? base + r : -1;
    #pragma unroll
    for (int c = 0; c < COLUMNS; ++c) put(x, i, c, r < mine && c < w ? a[c * ld + base + r] : T{});
  }
  for (int j = 0; j < steps; ++j) {
    const u32 tag = before + j + 1;
    const int live = 16 + (w - j) * (int)sizeof(T);  // bytes of a row that are shown
    uint4* slots = shown + (i64)(j & 1) * blocks * SLOT;
    Several* pivot_ = pivots_[j & 1];
    u64 key = 0;
    int at = 0, own = 0;
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const u64 each = place[i] >= 0 ? rank_of(size_of(element(x, i, 0))) : 0;
      if (each > key || (each == key && each && place[i] < at)) { key = each; at = place[i]; own = i; }
    }
    if (leads(key, at)) { keys[warp] = key; places[warp] = at; owners[warp] = t + own * THREADS; }
    __syncthreads();
    key = lane < WARPS ? keys[lane] : 0;
    at = lane < WARPS ? places[lane] : 0;
    const int from = __ffs(__ballot_sync(~0u, leads(key, at))) - 1, owner = owners[from];
    const bool candidate = warp == owner % THREADS / 32;  // of this block
    key = __shfl_sync(~0u, key, from);
    at = __shfl_sync(~0u, at, from);
    uint4* slot = slots + block * SLOT;
    if (candidate && lane < 2) show(slot + lane, lane ? (u64)at : key, tag);
    if (j > 0) {
      const Several* last = pivots_[(j - 1) & 1] + 1;
      #pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        if (place[i] < 0) continue;
        #pragma unroll
        for (int from = 0; from < COLUMNS; from += CHUNK)
          if (from <= w - j)
            #pragma unroll
            for (int c = from; c < from + CHUNK; c += TOGETHER) {
              const Several some = last[c / TOGETHER];
              #pragma unroll
              for (int k = 0; k < TOGETHER; ++k)
                if (c + k > 1 && c + k < COLUMNS) {
                  T next = element(x, i, c + k);
                  if (!zero) take(next, factor[i], some.of[k]);
                  put(x, i, c + k - 1, next);
                }
            }
      }
    }
    if (candidate) {
      #pragma unroll
      for (int i = 0; i < ROWS; ++i)
        if (t + i * THREADS == owner) {
          line[0].of[0] = inverse(element(x, i, 0));
          #pragma unroll
          for (int c = 0; c < COLUMNS; ++c) line[1 + c / TOGETHER].of[c % TOGETHER] = element(x, i, c);
        }
      __syncwarp();
      for (int e = lane; e * 8 < live; e += 32) show(slot + 2 + e, ((u64*)line)[e], tag);
    }
    if (warp == 0) {
      u64 best = 0;
      u32 row = 0;
      int which = 0;
      bool waits;
      do {
        waits = false;
        #pragma unroll
        for (int b = 0; b < POLLS * 32; b += 64) {
          if (b >= blocks) break;
          const int one = min(b + lane, blocks - 1), two = min(b + lane + 32, blocks - 1);  // perhaps one twice
          const uint4 *of_one = slots + one * SLOT, *of_two = slots + two * SLOT;
          u64 of[4];
          waits |= !(got(of_one, tag, of[0]) & got(of_one + 1, tag, of[1]) & got(of_two, tag, of[2])
                     & got(of_two + 1, tag, of[3]));
          if (of[0] > best || (of[0] == best && (u32)of[1] < row)) { best = of[0]; row = (u32)of[1]; which = one; }
          if (of[2] > best || (of[2] == best && (u32)of[3] < row)) { best = of[2]; row = (u32)of[3]; which = two; }
        }
        if (waits) best = 0;
      } while (waits);
      const int winner = __ffs(__ballot_sync(~0u, leads(best, row))) - 1;
      which = __shfl_sync(~0u, which, winner);
      row = __shfl_sync(~0u, row, winner);
      if (lane == 0) { chosen_place = (int)row; chosen_block = which; }
      for (int e = lane; e * 8 < live; e += 32) {
        u64 part;
        while (!got(slots + which * SLOT + 2 + e, tag, part)) {}
        ((u64*)pivot_)[e] = part;
      }
    }
    __syncthreads();
    const int chosen = chosen_place;
    const T inverted = pivot_[0].of[0], diagonal = pivot_[1].of[0], beside = pivot_[1 + 1 / TOGETHER].of[1 % TOGETHER];
    zero = is_zero(diagonal);
    if (block == 0 && t == 0) {
      pivots[j] = first + chosen + 1;
      if (zero && *info == 0) *info = first + j + 1;
    }
    if (block == chosen_block)
      for (int c = t; c < w - j; c += THREADS) done[(j + c) * rows + owner] = ((T*)(pivot_ + 1))[c];
    #pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (place[i] < 0) continue;
      if (place[i] == chosen) { place[i] = j - (1 << 30); continue; }
      if (place[i] == j) place[i] = chosen;
      T each = element(x, i, 0);
      if (!zero && is_zero(inverted)) each = over(each, diagonal);
      else if (!zero) { const T old = each; each = T{}; take(each, negative(old), inverted); }
      factor[i] = each;
      done[j * rows + t + i * THREADS] = each;
      if (COLUMNS > 1) {
        T next = element(x, i, COLUMNS > 1);
        if (!zero) take(next, each, beside);
        put(x, i, 0, next);
      }
    }
  }
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int r = t + i * THREADS;
    if (r < mine) {
      const int to = place[i] < 0 ? place[i] + (1 << 30) : place[i];
      for (int c = 0; c < w; ++c) a[c * ld + to] = done[c * rows + r];
    }
  }
  if (t == 0 && atomicAdd(count, 1u) == blocks - 1u) {
    *count = 0;
    count[1] = before + steps;
  }
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
