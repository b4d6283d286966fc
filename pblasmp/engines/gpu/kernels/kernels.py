# SPDX-License-Identifier: Apache-2.0
"""The engine's own CUDA kernels: sums of the ranks' parts, barriers and flags, strided and transposing copies.

They are compiled when they are first needed (CuPy caches them on disk), one module for each combination of types. They
include no headers, since CuPy does not find CUDA's everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ....dtypes import accumulation_dtype
from ....errors import ArgumentError
from .views import Move, View

__all__ = ["Deal", "Kernels", "Launch", "Tile", "common_run", "vector_width"]

_VECTOR_BYTES = 16
_THREADS = 512
_SUM_THREADS = 256
_TILE = 32
_LONG = 64  # words of a run that a warp copies together
_MOVES = 32  # copies by one kernel, at most: parameters take up to 4 KB
_WAITS = 32  # flags that one kernel waits for, at most: one thread of a warp each
_TILES = 32  # of matrices that are added, by one kernel
_U32 = 2**32

_TYPES = {
    "float64": "double",
    "float32": "float",
    "float16": "fp16",
    "bfloat16": "bf16",
    "complex64": "c64",
    "complex128": "c128",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}
_ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2}

_COMMON = r"""
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
"""

_SYNC = (
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
_NUMBERS = (
    _COMMON
    + r"""
struct bf16 { u16 v; }; struct fp16 { u16 v; }; struct e4m3 { u8 v; }; struct e5m2 { u8 v; };
struct alignas(8) c64 { float x, y; }; struct alignas(16) c128 { double x, y; };
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
__device__ __forceinline__ float plus(float a, float b) { return a + b; }
__device__ __forceinline__ double plus(double a, double b) { return a + b; }
__device__ __forceinline__ c64 plus(c64 a, c64 b) { return c64{a.x + b.x, a.y + b.y}; }
__device__ __forceinline__ c128 plus(c128 a, c128 b) { return c128{a.x + b.x, a.y + b.y}; }
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

# V adjacent entries per thread, added in the order of the parts: the same bits wherever the same parts are added.
_ADD = r"""
__host__ __device__ constexpr int least(int a, int b) { return a < b ? a : b; }
template<class T> struct alignas(least(16, V * sizeof(T))) Line { T v[V]; };
struct Parts { const PART* p[P]; };
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
    Line<PART> in[P];
    #pragma unroll
    for (int p = 0; p < P; p++) in[p] = *(const Line<PART>*)(parts.p[p] + row * ld_parts + col);
    SUM sum[V];
    #pragma unroll
    for (int j = 0; j < V; j++) sum[j] = wide(in[0].v[j]);
    #pragma unroll
    for (int p = 1; p < P; p++)
      #pragma unroll
      for (int j = 0; j < V; j++) sum[j] = plus(sum[j], wide(in[p].v[j]));
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

# Copies in four dimensions, the last a run of bytes, one after another: the blocks of threads that begin the next one
# follow those that end the one before. T is as wide as every address and stride allows. Of short runs (EACH is 0) a
# thread copies a word; of long ones a warp copies EACH words per thread, so that narrow words also reach the speed of
# memory.
_MOVE = (
    _COMMON
    + r"""
struct Strides { u64 a, b, c; };
struct alignas(16) quad { u32 v[4]; };
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
      for (int j = 0; j < EACH; ++j) if (32 * j < left) to[32 * j] = word[j];
#else
      *to = *from;
#endif
    }
  }
}
"""
)
# Tiles of 32 x 32, through shared memory: read along the columns, written along the rows. Both dimensions are runs at
# equal distances. Every entry is one word; FLIP changes the sign of its upper half.
_TRANSPOSE = (
    _COMMON
    + r"""
struct Steps { u64 row_run, row, col_run, col; };
struct alignas(16) quad { u32 v[4]; };
__device__ __forceinline__ u64 at(Steps s, u32 r, u32 c, u32 rows_run, u32 cols_run)
{ return r / rows_run * s.row_run + r % rows_run * s.row + c / cols_run * s.col_run + c % cols_run * s.col; }
__device__ __forceinline__ u64 flipped(u64 x) { return x ^ 0x8000000000000000ull; }
__device__ __forceinline__ quad flipped(quad x) { x.v[3] ^= 0x80000000u; return x; }
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
_SUM = (
    _NUMBERS
    + r"""
typedef ELEMENT E;
struct Tile { E* d; const E* x; const E* c; u32 rows, cols, i, j; };
struct Tiles { Tile t[TILES]; };
struct Deal { u32 block, nprocs, turn, lead, skipped, unused; };
__device__ __forceinline__ u64 index_of(Deal d, u32 place) {
  u32 at = place + d.skipped, block = at / d.block;
  return ((u64)block * d.nprocs + d.turn) * d.block + at % d.block - d.lead;
}
__device__ __forceinline__ float conjugate(float a) { return a; }
__device__ __forceinline__ double conjugate(double a) { return a; }
__device__ __forceinline__ c64 conjugate(c64 a) { return c64{a.x, -a.y}; }
__device__ __forceinline__ c128 conjugate(c128 a) { return c128{a.x, -a.y}; }
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
_WORDS = {16: "quad", 8: "u64", 4: "u32", 2: "u16", 1: "u8"}


def vector_width(part: np.dtype, cols: int, views: Sequence[View]) -> int:
    """Return how many adjacent entries a thread can add at once: 16 bytes of a part, or one entry. Local.

    Args:
        part: type of the parts.
        cols: entries of a row.
        views: all matrices that are read or written in this way: their rows must be aligned for vectors.
    """
    width = max(1, _VECTOR_BYTES // part.itemsize)
    if cols % width:
        return 1
    for view in views:
        aligned = min(_VECTOR_BYTES, width * view.dtype.itemsize)
        together = view.address | (view.ld * view.dtype.itemsize if view.rows > 1 else 0)
        if together % aligned:
            return 1
    return width


def common_run(numbers: Sequence[int]) -> int:
    """Return the most bytes, up to 16, a power of two, that every number is a multiple of. Local."""
    together = 0
    for number in numbers:
        together |= number
    return min(_VECTOR_BYTES, together & -together) if together else _VECTOR_BYTES


class Launch:
    """A kernel with its arguments, to be queued any number of times. Local.

    The first time CuPy compiles the kernel and reads the arguments. From the second time on the driver gets the
    addresses of copies of them, which costs the host much less.
    """

    __slots__ = ("_arguments", "_copies", "_grid", "_kernel", "_place", "_queue", "_shape", "_threads")

    def __init__(
        self, kernel: Any, blocks: tuple[int, ...], threads: int, arguments: tuple[Any, ...]
    ) -> None:
        self._kernel, self._grid, self._threads, self._arguments = kernel, blocks, threads, arguments
        self._shape: tuple[int, ...] | None = None

    def __call__(self, stream: Any) -> None:
        """Queue it on a stream of CuPy. Local."""
        if self._shape is None:
            self._kernel(self._grid, (self._threads,), self._arguments, stream=stream)
            self._shape = ()
            return
        if not self._shape:
            self._copy()
        self._queue(*self._shape, stream.ptr, self._place, 0)

    def _copy(self) -> None:
        """Copy the arguments to where the driver reads them."""
        from cupy_backends.cuda.api import driver

        copies = [np.array(each) for each in self._arguments]
        addresses = np.array([each.ctypes.data for each in copies], np.uintp)
        self._copies, self._place = (addresses, *copies), addresses.ctypes.data  # they must last
        grid = (*self._grid, 1, 1)[:3]
        self._queue = driver.launchKernel
        self._shape = (int(self._kernel.kernel.ptr), *grid, self._threads, 1, 1, 0)


class Tile(NamedTuple):
    """A part of matrices that are added: the addresses of D, X and C, and how many rows and columns it has.

    Of a triangle also ``i`` and ``j``, the places of its first row and column among those of this rank.
    """

    d: int
    x: int
    c: int
    rows: int
    cols: int
    i: int = 0
    j: int = 0


class Deal(NamedTuple):
    """How the indices of a process are dealt out: in blocks, of which every ``nprocs``-th is its own.

    Attributes:
        block, nprocs: as above.
        turn: which block is its first.
        lead: how many indices the first block of all lacks.
        skipped: how many of these it would have.
    """

    block: int
    nprocs: int
    turn: int
    lead: int
    skipped: int


Stored = tuple[bool, int]  # whether a matrix is in Fortran order, and its leading dimension


class Kernels:
    """The kernels, compiled for the current GPU when they are needed. Local.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._functions: dict[Any, Any] = {}
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        self.multiprocessors = int(properties["multiProcessorCount"])

    def _compiled(self, name: str, code: str, **macros: Any) -> Any:
        key = (name, *sorted(macros.items()))
        if key not in self._functions:
            options = ("-std=c++17", *(f"-D{macro}={value}" for macro, value in macros.items()))
            module = self._cupy.RawModule(code=code, options=options)
            self._functions[key] = module.get_function(name)
        return self._functions[key]

    def _launch(self, kernel: Any, blocks: int, threads: int, stream: Any, *arguments: Any) -> None:
        kernel((blocks,), (threads,), arguments, stream=stream)

    def signal(self, what: str, flags: Sequence[int], rank: int, kind: int, kinds: int) -> Launch:
        """Return half a barrier of all ranks, or a whole one. Local.

        Args:
            what: "arrive": signal every rank; "await": wait until every rank has arrived once more than last time;
                "meet": both.
            flags: addresses of every rank's words: ``kinds * (size + 2)`` of them, zero at first.
            rank: the index of this rank's.
            kind: which barrier; each has separate counts.
            kinds: how many there are.
        """
        size = len(flags)
        kernel = self._compiled(what, _SYNC, RANKS=size, WAITS=_WAITS)
        ints = (np.int32(size), np.int32(rank), np.int32(kind), np.int32(kinds))
        threads = -(-size // 32) * 32
        return Launch(kernel, (1,), threads, (_struct(flags), *ints))

    def await_flags(self, stream: Any, flags: Sequence[int]) -> None:
        """Queue a wait until the words at these addresses are no longer zero, and set them to zero. Local."""
        kernel = self._compiled("await_flags", _SYNC, RANKS=1, WAITS=_WAITS)
        for first in range(0, len(flags), _WAITS):
            some = flags[first : first + _WAITS]
            words = _struct([*some, *[0] * (_WAITS - len(some))])
            self._launch(kernel, 1, _WAITS, stream, words, np.int32(len(some)))

    def add(
        self,
        stream: Any,
        parts: Sequence[View],
        outs: Sequence[View],
        *,
        beta: complex = 0,
        c: View | None = None,
        bias: View | None = None,
        activation: str | None = None,
        scale: int = 0,
        amax: int = 0,
        blocks: int = 0,
    ) -> None:
        """Queue ``out = scale f(sum of parts + beta C + bias)``, summed in float32 or wider, rounded once. Local.

        Args:
            stream: CuPy's.
            parts: matrices of one shape, type and leading dimension, added in this order.
            outs: where the same result is stored, here or at peers; all but the first share a leading dimension.
            beta, c: read if beta is not 0.
            bias: one row.
            activation: None, "relu", "gelu".
            scale, amax: addresses of one float32, 0 for none.
            blocks: of threads, at most; 0: two for each multiprocessor. For tests.

        Raises:
            ArgumentError: the shapes or types differ.
        """
        first, out = parts[0], outs[0]
        c = c if beta != 0 else None
        _check_added(parts, outs, c, bias)
        if not first.rows * first.cols:
            return
        width = vector_width(first.dtype, first.cols, [*parts, *outs, *([c] if c else [])])
        lines = first.cols // width
        exact = accumulation_dtype(first.dtype)
        read = c or (out if out.dtype.itemsize > 1 else first)  # an operand needs a type even if not read
        types = {"PART": first, "OUT": out, "CTYPE": read, "BIAS": bias or first}
        macros = {
            **{name: _TYPES[view.dtype.name] for name, view in types.items()}, "SUM": _TYPES[exact.name],
            "P": len(parts), "OUTS": len(outs), "V": width, "INDEX": _index(first.rows * lines),
        }  # fmt: skip
        if out.dtype.itemsize == 1:
            macros["FLOAT8"] = 1
        kernel = self._compiled("add", _NUMBERS + _ADD, **macros)
        grid = min(blocks or 2 * self.multiprocessors, -(-first.rows * lines // _THREADS))
        u64 = np.uint64
        self._launch(
            kernel, grid, _THREADS, stream,
            _struct([part.address for part in parts]), u64(first.ld),
            _struct([view.address for view in outs]), u64(out.ld), u64(outs[-1].ld),
            u64(first.rows), u64(lines),
            u64(c.address if c else 0), u64(c.ld if c else 0), _scalar(beta, exact),
            u64(bias.address if bias else 0), np.int32(_ACTIVATIONS[activation]), u64(scale), u64(amax),
        )  # fmt: skip

    def copy(self, stream: Any, to: View, of: View) -> None:
        """Queue a copy of a matrix at memory speed. Local."""
        if (to.rows, to.cols, to.dtype.itemsize) != (of.rows, of.cols, of.dtype.itemsize):
            raise ArgumentError(f"a matrix of {of.rows} x {of.cols} is to be copied to {to.rows} x {to.cols}")
        size = of.dtype.itemsize
        whole = (1, 1, of.rows, of.cols * size)
        self.move(stream, [(to.address, (0, 0, to.ld * size), of.address, (0, 0, of.ld * size), whole)])

    def move(self, stream: Any, moves: Iterable[Move]) -> None:
        """Queue what ``moves`` returns. Local."""
        for launch in self.moves(moves):
            launch(stream)

    def moves(self, moves: Iterable[Move]) -> list[Launch]:
        """Return copies in four dimensions, the last of them contiguous bytes, which do not overlap. Local.

        Blocks of a block-cyclic matrix are packed so: (blocks down, rows of one, blocks across, bytes of a row of one).

        Args:
            moves: of each where it is written, and the bytes from one to the next along the first three dimensions
                there; the same where it is read; the extents of the four dimensions.

        Raises:
            ArgumentError: an extent or a stride is negative.
        """
        alike: dict[tuple[int, int], list[Move]] = {}
        for each in moves:
            _, there, _, here, extents = each
            if min(*extents, *there, *here) < 0:
                raise ArgumentError(
                    f"extents {tuple(extents)}, strides {tuple(there)} and {tuple(here)}: none may be < 0"
                )
            if 0 not in extents:
                word = _word(each)
                many = 0 if extents[-1] // word < _LONG else 8 if word <= 4 else 4
                alike.setdefault((word, many), []).append(each)
        return [
            self._move(word, many, some[first : first + _MOVES])
            for (word, many), some in alike.items()
            for first in range(0, len(some), _MOVES)
        ]

    def _move(self, word: int, each: int, moves: Sequence[Move]) -> Launch:
        """Return one kernel: ``word`` bytes at a time, ``each`` times by a thread of a warp, or 0."""
        # a piece is what so many threads copy at a time
        threads, piece = (32, 32 * each * word) if each else (1, word)
        totals = [math.prod(counts) * -(-run // piece) for *_, (*counts, run) in moves]
        needed = [-(-total * threads // _THREADS) for total in totals]
        grid, first, words = min(4 * self.multiprocessors, sum(needed)), 0, []
        for (to, there, of, here, (_, b, c, run)), total, count in zip(moves, totals, needed, strict=True):
            words += [to, of, *there, *here, b, c, run // word, total, first]
            first = (first + count) % grid
        room = _room(len(moves))
        kernel = self._compiled(
            "move", _MOVE, T=_WORDS[word], EACH=each, INDEX=_index(max(totals)), MOVES=room
        )
        words_of_all = len(words) // len(moves) * room
        return Launch(kernel, (grid,), _THREADS, (_struct(words, words_of_all), np.int32(len(moves))))

    def sum(
        self,
        dtype: np.dtype,
        tiles: Sequence[Tile],
        d: Stored,
        x: Stored,
        c: Stored,
        alpha: complex,
        beta: complex,
        *,
        conjugate: bool = False,
        uplo: str = "",
        real: bool = False,
        deals: tuple[Deal, Deal] | None = None,
    ) -> list[Launch]:
        """Return kernels that compute ``D = alpha X + beta C``, in one triangle if ``uplo`` is given. Local.

        Args:
            dtype: the type of all matrices, of those that BLAS has.
            tiles: the parts.
            d, x, c: how the matrices are stored.
            alpha, beta: scalars; C is not read if beta is 0.
            conjugate: X's conjugate is added.
            uplo: "L" or "U": only what is on the diagonal and below or above it is read and written.
            real: the diagonal is real.
            deals: how rows and columns are dealt out, for ``uplo``.
        """
        tiles = [tile for tile in tiles if tile.rows and tile.cols]
        (by_columns, ld), deals = d, deals or (Deal(1, 1, 0, 0, 0), Deal(1, 1, 0, 0, 0))
        if not by_columns:  # add the transposes
            tiles = [tile._replace(rows=tile.cols, cols=tile.rows, i=tile.j, j=tile.i) for tile in tiles]
            x, c, deals = (not x[0], x[1]), (not c[0], c[1]), deals[::-1]
            uplo = {"L": "U", "U": "L", "": ""}[uplo]
        u64, strides = np.uint64, [(1, lead) if columns else (lead, 1) for columns, lead in (x, c)]
        macros = {
            "ELEMENT": _TYPES[dtype.name], "TRIANGLE": ("", "L", "U").index(uplo), "REAL": int(real),
            "CONJUGATE": int(conjugate), "KEEPS": int(beta != 0),
        }  # fmt: skip
        rest = (
            u64(ld), *(u64(each) for pair in strides for each in pair), _scalar(alpha, dtype), _scalar(beta, dtype),
            *(_struct([deal[0] | deal[1] << 32, deal[2] | deal[3] << 32, deal[4]]) for deal in deals),
        )  # fmt: skip
        launches = []
        for first in range(0, len(tiles), _TILES):
            some = tiles[first : first + _TILES]
            words = [
                word
                for tile in some
                for word in (*tile[:3], tile.rows | tile.cols << 32, tile.i | tile.j << 32)
            ]
            kernel = self._compiled("sum", _SUM, **macros, TILES=_room(len(some)))
            most = max(tile.rows * tile.cols for tile in some)
            grid = max(1, min(8 * self.multiprocessors // len(some), -(-most // _SUM_THREADS)))
            tiles_struct = _struct(words, 5 * _room(len(some)))
            launches.append(Launch(kernel, (grid, len(some)), _SUM_THREADS, (tiles_struct, *rest)))
        return launches

    def transpose(
        self,
        stream: Any,
        to: int,
        there: Sequence[int],
        of: int,
        here: Sequence[int],
        extents: Sequence[int],
        itemsize: int,
        *,
        conjugate: bool = False,
    ) -> None:
        """Queue a copy of runs of rows x runs of columns: rows are adjacent in ``to``, columns in ``of``. Local.

        Args:
            stream: CuPy's.
            to, of: addresses, multiples of ``itemsize`` as all strides are.
            there, here: bytes from one to the next: runs of rows, rows, runs of columns, columns.
            extents: how many of each.
            itemsize: bytes of an entry: 1, 2, 4, 8 or 16.
            conjugate: write the conjugates of complex numbers.
        """
        row_runs, rows, col_runs, cols = extents
        if not row_runs * rows * col_runs * cols:
            return
        flip = "flipped" if conjugate else ""
        kernel = self._compiled("transpose", _TRANSPOSE, T=_WORDS[itemsize], FLIP=flip)
        tiles = -(-row_runs * rows // _TILE) * -(-col_runs * cols // _TILE)
        u32, u64 = np.uint32, np.uint64
        self._launch(
            kernel, min(8 * self.multiprocessors, tiles), 8 * _TILE, stream,
            u64(to), _struct(there), u64(of), _struct(here),
            u32(row_runs * rows), u32(rows), u32(col_runs * cols), u32(cols),
        )  # fmt: skip


def _check_added(parts: Sequence[View], outs: Sequence[View], c: View | None, bias: View | None) -> None:
    """Raise ArgumentError if matrices cannot be added to these results. Local."""
    first, out = parts[0], outs[0]
    like = [view for view in (*parts, *outs, c) if view is not None]
    if any((view.rows, view.cols) != (first.rows, first.cols) for view in like):
        raise ArgumentError(f"matrices of other shapes than {first.rows} x {first.cols} are to be added")
    if any((view.dtype, view.ld) != (first.dtype, first.ld) for view in parts) or any(
        view.dtype != out.dtype or view.ld != outs[-1].ld for view in outs[1:]
    ):
        raise ArgumentError("parts, and results after the first, must have one type and leading dimension")
    if bias is not None and bias.cols != first.cols:
        raise ArgumentError(f"bias has {bias.cols} entries for {first.cols} columns")


def _word(move: Move) -> int:
    """Return how many bytes of a copy a thread can move at once."""
    to, there, of, here, (*counts, run) = move
    used = [stride for n, *pair in zip(counts, there, here, strict=True) if n > 1 for stride in pair]
    return common_run([to, of, run, *used])


def _index(total: int) -> str:
    """Return the type for counting to ``total``: division in 64 bits takes three times as long."""
    return "unsigned" if total < _U32 else "u64"


def _struct(values: Sequence[int], room: int = 0) -> Any:
    """Return a struct of addresses or strides, in the form that kernels take; zeros up to ``room`` follow."""
    words = np.zeros(max(room, len(values)), np.uint64)
    words[: len(values)] = values
    return words.view(_words(len(words)))[0]


@lru_cache
def _words(count: int) -> np.dtype:
    return np.dtype([("p", np.uint64, count)])


def _room(count: int) -> int:
    """Return for how many parts a kernel is compiled that takes ``count`` of at most 32."""
    return 1 if count == 1 else 4 if count <= 4 else 32


def _scalar(value: complex, dtype: np.dtype) -> Any:
    return dtype.type(value) if dtype.kind == "c" else dtype.type(complex(value).real)
