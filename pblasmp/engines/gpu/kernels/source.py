# SPDX-License-Identifier: Apache-2.0
"""The CUDA text of the kernels of ``kernels.py``. It includes no headers."""

from __future__ import annotations

_COMMON = r"""
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
"""

COMPLEX = r"""
struct alignas(8) c64 { float x, y; }; struct alignas(16) c128 { double x, y; };
__device__ __forceinline__ float plus(float a, float b) { return a + b; }
__device__ __forceinline__ double plus(double a, double b) { return a + b; }
__device__ __forceinline__ c64 plus(c64 a, c64 b) { return c64{a.x + b.x, a.y + b.y}; }
__device__ __forceinline__ c128 plus(c128 a, c128 b) { return c128{a.x + b.x, a.y + b.y}; }
__device__ __forceinline__ float conjugate(float a) { return a; }
__device__ __forceinline__ double conjugate(double a) { return a; }
__device__ __forceinline__ c64 conjugate(c64 a) { return c64{a.x, -a.y}; }
__device__ __forceinline__ c128 conjugate(c128 a) { return c128{a.x, -a.y}; }
"""

# A complex number in a word, and its conjugate: the upper half with the other sign.
_WORDS = r"""
struct alignas(16) quad { u32 v[4]; };
__device__ __forceinline__ u64 flipped(u64 x) { return x ^ 0x8000000000000000ull; }
__device__ __forceinline__ quad flipped(quad x) { x.v[3] ^= 0x80000000u; return x; }
"""

SYNC = (
    _COMMON
    + r"""
struct Peers { u32* p[RANKS]; };
__device__ __forceinline__ u32 acquire(const u32* p)
{ u32 v; asm volatile("ld.acquire.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ void release(u32* p, u32 v)
{ asm volatile("st.release.sys.global.u32 [%0],%1;" :: "l"(p), "r"(v) : "memory"); }

// Words of a rank: for every kind of barrier, one from each rank; then how often this rank arrived and waited.
__device__ void arrive_(Peers peers, int size, int rank, int kind, int kinds) {
  u32* mine = peers.p[rank];
  u32* count = mine + kinds * size + 2 * kind;
  __shared__ u32 epoch;
  if (threadIdx.x == 0) { epoch = *count + 1; *count = epoch; }
  __syncthreads();
  __threadfence_system();
  if (threadIdx.x < size) release(peers.p[threadIdx.x] + kind * size + rank, epoch);
}
__device__ void await_(Peers peers, int size, int rank, int kind, int kinds) {
  u32* mine = peers.p[rank];
  u32* count = mine + kinds * size + 2 * kind + 1;
  __shared__ u32 epoch;
  if (threadIdx.x == 0) { epoch = *count + 1; *count = epoch; }
  __syncthreads();
  if (threadIdx.x < size) while ((int)(acquire(mine + kind * size + threadIdx.x) - epoch) < 0) {}
  __syncthreads();
  __threadfence_system();
}
extern "C" __global__ void arrive(Peers peers, int size, int rank, int kind, int kinds)
{ arrive_(peers, size, rank, kind, kinds); }
extern "C" __global__ void await(Peers peers, int size, int rank, int kind, int kinds)
{ await_(peers, size, rank, kind, kinds); }
extern "C" __global__ void meet(Peers peers, int size, int rank, int kind, int kinds)
{ arrive_(peers, size, rank, kind, kinds); await_(peers, size, rank, kind, kinds); }

struct Words { u32* p[WAITS]; };
extern "C" __global__ void raise_flags(Words flags, int count) {
  __threadfence_system();
  if (threadIdx.x < count) release(flags.p[threadIdx.x], 1);
}
extern "C" __global__ void await_flags(Words flags, int count) {
  if (threadIdx.x < count) {
    u32* flag = flags.p[threadIdx.x];
    while (!acquire(flag)) {}
    *flag = 0;
  }
  __syncthreads();
  __threadfence_system();
}
"""
)

# Numbers as they are stored, and as they are summed.
NUMBERS = (
    _COMMON
    + COMPLEX
    + r"""
struct bf16 { u16 v; }; struct fp16 { u16 v; }; struct e4m3 { u8 v; }; struct e5m2 { u8 v; };
__device__ __forceinline__ float wide(bf16 a) { return __uint_as_float((u32)a.v << 16); }
__device__ __forceinline__ float wide(fp16 a)
{ float f; asm("cvt.f32.f16 %0,%1;" : "=f"(f) : "h"(a.v)); return f; }
__device__ __forceinline__ float wide(float a) { return a; }
__device__ __forceinline__ double wide(double a) { return a; }
__device__ __forceinline__ c64 wide(c64 a) { return a; }
__device__ __forceinline__ c128 wide(c128 a) { return a; }
__device__ __forceinline__ void narrow(float f, bf16& a) {
  u32 u = __float_as_uint(f);
  a.v = f != f ? 0x7fff : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
__device__ __forceinline__ void narrow(float f, fp16& a) { asm("cvt.rn.f16.f32 %0,%1;" : "=h"(a.v) : "f"(f)); }
__device__ __forceinline__ void narrow(float f, float& a) { a = f; }
__device__ __forceinline__ void narrow(double f, double& a) { a = f; }
__device__ __forceinline__ void narrow(c64 f, c64& a) { a = f; }
__device__ __forceinline__ void narrow(c128 f, c128& a) { a = f; }
#ifdef FLOAT8
__device__ __forceinline__ void narrow(float f, e4m3& a)
{ u16 r; asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;" : "=h"(r) : "f"(0.0f), "f"(f)); a.v = r; }
__device__ __forceinline__ void narrow(float f, e5m2& a)
{ u16 r; asm("cvt.rn.satfinite.e5m2x2.f32 %0,%1,%2;" : "=h"(r) : "f"(0.0f), "f"(f)); a.v = r; }
#endif
__device__ __forceinline__ float times(float a, float b) { return a * b; }
__device__ __forceinline__ double times(double a, double b) { return a * b; }
__device__ __forceinline__ c64 times(c64 a, c64 b) { return c64{a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x}; }
__device__ __forceinline__ c128 times(c128 a, c128 b) { return c128{a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x}; }
template<class T> __device__ __forceinline__ T gelu(T x)
{ return T(0.5) * x * (T(1) + tanh(T(0.7978845608028654) * (x + T(0.044715) * x * x * x))); }
template<class T> __device__ __forceinline__ T activate(T x, int f)
{ return f == 1 ? (x < T(0) ? T(0) : x) : f == 2 ? gelu(x) : x; }
template<> __device__ __forceinline__ c64 activate(c64 x, int) { return x; }
template<> __device__ __forceinline__ c128 activate(c128 x, int) { return x; }
__device__ __forceinline__ float size_of(float x) { return fabsf(x); }
__device__ __forceinline__ float size_of(double x) { return (float)fabs(x); }
__device__ __forceinline__ float size_of(c64) { return 0; }
__device__ __forceinline__ float size_of(c128) { return 0; }
__device__ __forceinline__ float scaled(float x, float s) { return x * s; }
__device__ __forceinline__ double scaled(double x, float s) { return x * s; }
__device__ __forceinline__ c64 scaled(c64 x, float) { return x; }
__device__ __forceinline__ c128 scaled(c128 x, float) { return x; }
"""
)

# V adjacent entries per thread, added in the order of the parts: the same bits wherever the same parts are added. There
# may be none.
ADD = r"""
__host__ __device__ constexpr int least(int a, int b) { return a < b ? a : b; }
template<class T> struct alignas(least(16, V * sizeof(T))) Line { T v[V]; };
struct Parts { const PART* p[P ? P : 1]; };
struct Outs { OUT* p[OUTS]; };
extern "C" __global__ void __launch_bounds__(512) add(
    Parts parts, u64 ld_parts, Outs outs, u64 ld_first, u64 ld_rest, u64 rows, u64 lines,
    const CTYPE* c, u64 ld_c, SUM beta, const BIAS* bias, int activation, const float* scale, float* amax) {
  float largest = 0;
  float by = scale ? *scale : 1.0f;
  INDEX n = rows * lines, step = (INDEX)gridDim.x * blockDim.x;
  for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < n; at += step) {
    INDEX i = at, row = i / (INDEX)lines;
    u64 col = (u64)(i - row * (INDEX)lines) * V;
    SUM sum[V];
#if P
    Line<PART> in[P];
    #pragma unroll
    for (int p = 0; p < P; p++) in[p] = *(const Line<PART>*)(parts.p[p] + row * ld_parts + col);
    #pragma unroll
    for (int j = 0; j < V; j++) sum[j] = wide(in[0].v[j]);
    #pragma unroll
    for (int p = 1; p < P; p++)
      #pragma unroll
      for (int j = 0; j < V; j++) sum[j] = plus(sum[j], wide(in[p].v[j]));
#else
    #pragma unroll
    for (int j = 0; j < V; j++) sum[j] = SUM{};
#endif
    if (c) {
      Line<CTYPE> old = *(const Line<CTYPE>*)(c + row * ld_c + col);
      #pragma unroll
      for (int j = 0; j < V; j++) sum[j] = plus(sum[j], times(beta, wide(old.v[j])));
    }
    if (bias) {
      #pragma unroll
      for (int j = 0; j < V; j++) sum[j] = plus(sum[j], wide(bias[col + j]));
    }
    Line<OUT> out;
    #pragma unroll
    for (int j = 0; j < V; j++) {
      SUM y = activate(sum[j], activation);
      if (amax) largest = fmaxf(largest, size_of(y));
      narrow(scale ? scaled(y, by) : y, out.v[j]);
    }
    #pragma unroll
    for (int q = 0; q < OUTS; q++) *(Line<OUT>*)(outs.p[q] + row * (q ? ld_rest : ld_first) + col) = out;
  }
  if (amax) {
    for (int lane = 16; lane; lane >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane));
    if (threadIdx.x % 32 == 0) atomicMax((int*)amax, __float_as_int(largest));
  }
}
"""

# Copies in four dimensions, the last a run of bytes. Consecutive copies take consecutive blocks of threads. T is as
# wide as every address and stride allows. Of short runs (EACH is 0) a thread copies a word; of long ones a warp
# copies EACH words per thread, so that narrow words also reach the speed of memory. With FLIP every word is a complex
# number, whose conjugate is written.
MOVE = (
    _COMMON
    + _WORDS
    + r"""
struct Strides { u64 a, b, c; };
struct Move { char* to; const char* from; Strides there, here; u64 nb, nc, run, total, first; };
struct Moves { Move m[MOVES]; };
extern "C" __global__ void __launch_bounds__(512) move(const __grid_constant__ Moves moves, int count) {
  u32 group = EACH ? 32 : 1, lane = threadIdx.x % group, words = EACH ? 32 * EACH : 1, each = blockDim.x / group;
  for (int number = 0; number < count; ++number) {
    const Move& m = moves.m[number];
    INDEX pieces = (m.run + words - 1) / words;
    u64 block = (blockIdx.x + gridDim.x - (u32)m.first) % gridDim.x;
    for (u64 at = block * each + threadIdx.x / group; at < m.total; at += (u64)gridDim.x * each) {
      INDEX i = at, x = i % pieces; i /= pieces;
      INDEX c = i % (INDEX)m.nc; i /= (INDEX)m.nc;
      INDEX b = i % (INDEX)m.nb, a = i / (INDEX)m.nb;
      T* to = (T*)(m.to + a * m.there.a + b * m.there.b + c * m.there.c) + (u64)x * words + lane;
      const T* from = (const T*)(m.from + a * m.here.a + b * m.here.b + c * m.here.c) + (u64)x * words + lane;
#if EACH
      long long left = (long long)m.run - (long long)x * words - lane;
      T word[EACH];
#pragma unroll
      for (int j = 0; j < EACH; ++j) if (32 * j < left) word[j] = from[32 * j];
#pragma unroll
      for (int j = 0; j < EACH; ++j) if (32 * j < left) to[32 * j] = FLIP(word[j]);
#else
      *to = FLIP(*from);
#endif
    }
  }
}
"""
)
# Tiles of 32 x 32, through shared memory: read along the columns, written along the rows. Both dimensions are runs at
# equal distances. Every entry is one word; FLIP changes the sign of its upper half.
TRANSPOSE = (
    _COMMON
    + _WORDS
    + r"""
struct Steps { u64 row_run, row, col_run, col; };
__device__ __forceinline__ u64 at(Steps s, u32 r, u32 c, u32 rows_run, u32 cols_run)
{ return r / rows_run * s.row_run + r % rows_run * s.row + c / cols_run * s.col_run + c % cols_run * s.col; }
extern "C" __global__ void __launch_bounds__(256) transpose(
    char* to, Steps there, const char* from, Steps here, u32 rows, u32 rows_run, u32 cols, u32 cols_run) {
  __shared__ T tile[32][33];
  u32 x = threadIdx.x % 32, y = threadIdx.x / 32, across = (cols + 31) / 32;
  u64 tiles = (u64)((rows + 31) / 32) * across;
  for (u64 i = blockIdx.x; i < tiles; i += gridDim.x) {
    u32 r = i / across * 32, c = i % across * 32;
    for (u32 j = y; j < 32; j += 8)
      if (r + j < rows && c + x < cols) tile[j][x] = *(const T*)(from + at(here, r + j, c + x, rows_run, cols_run));
    __syncthreads();
    for (u32 j = y; j < 32; j += 8)
      if (r + x < rows && c + j < cols) *(T*)(to + at(there, r + x, c + j, rows_run, cols_run)) = FLIP(tile[x][j]);
    __syncthreads();
  }
}
"""
)
# D = alpha X + beta C in some tiles, a row of blocks of threads each; of a triangle only what is in it.
SUM = (
    NUMBERS
    + r"""
typedef ELEMENT E;
struct Tile { E* d; const E* x; const E* c; u32 rows, cols, i, j; };
struct Tiles { Tile t[TILES]; };
struct Deal { u32 block, nprocs, turn, lead, skipped, unused; };
__device__ __forceinline__ u64 index_of(Deal d, u32 place) {
  u32 at = place + d.skipped, block = at / d.block;
  return ((u64)block * d.nprocs + d.turn) * d.block + at % d.block - d.lead;
}
__device__ __forceinline__ float real(float a) { return a; }
__device__ __forceinline__ double real(double a) { return a; }
__device__ __forceinline__ c64 real(c64 a) { return c64{a.x, 0}; }
__device__ __forceinline__ c128 real(c128 a) { return c128{a.x, 0}; }
extern "C" __global__ void __launch_bounds__(256) sum(
    const __grid_constant__ Tiles tiles, u64 ld, u64 x_down, u64 x_across, u64 c_down, u64 c_across,
    E alpha, E beta, Deal down, Deal across) {
  const Tile& t = tiles.t[blockIdx.y];
  u64 total = (u64)t.rows * t.cols;
  for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (u64)gridDim.x * blockDim.x) {
    u64 col = at / t.rows, row = at - col * t.rows;
#if TRIANGLE
    u64 r = index_of(down, t.i + (u32)row), c = index_of(across, t.j + (u32)col);
    if (TRIANGLE == 1 ? r < c : r > c) continue;
    bool diagonal = REAL && r == c;
#else
    const bool diagonal = false;
#endif
    E x = t.x[row * x_down + col * x_across];
    if (CONJUGATE) x = conjugate(x);
    E sum = times(alpha, diagonal ? real(x) : x);
    if (KEEPS) {
      E old = t.c[row * c_down + col * c_across];
      sum = plus(sum, times(beta, diagonal ? real(old) : old));
    }
    t.d[row + col * ld] = diagonal ? real(sum) : sum;
  }
}
"""
)
