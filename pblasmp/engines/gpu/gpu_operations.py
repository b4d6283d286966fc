# SPDX-License-Identifier: Apache-2.0
"""The operations of a GPU rank on its own arrays: CuPy and cuBLAS, queued on CuPy's current stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from ...dtypes import DTYPES, is_float8
from ...errors import ArgumentError, UnsupportedError
from ...layout.pieces import LocalPart
from ...logs import logger
from ..arrays import blas_operand, scale, trsm_words
from ..local.extremes import scale_by_power
from ..product import Workspace
from .kernels.lt import LETTERS, WORKSPACE_BYTES
from .kernels.lt_product import Batch, Op
from .kernels.views import View, contiguous, copy_where, to_bits
from .runtime.arena import current
from .session import Session
from .types import DIAGONALS, FILLS, OPS, SIDES, compute_type, stored_dtype

Array = Any

_INT_MAX = 2**31 - 1
_LANES = ("main", "beside0", "beside1", "beside2")  # streams of products that run at the same time
LANES = len(_LANES)
_BESIDE = (*_LANES[1:], "beside3")  # likewise, but none of them is the caller's stream
_AS_IT_IS: dict[str, Op] = {"N": "N", "T": "T"}
_TURNED: dict[str, Op] = {"N": "T", "T": "N"}


class GpuOperations:
    """See ``engines.protocol.Operations``. Making one is local.

    Args:
        session: whose streams, memory and local products are used.

    Attributes:
        remarks: on products that another library computed than was meant to, for the reports of plans.
    """

    tile = 256  # smaller tiles waste less work but slow cuBLAS down
    band, coarser = 1024, 4
    panel = 8192
    lead = 1024  # while this much is multiplied, the rest arrives
    solved = 2048, 1024
    batches = True
    stripes = 4
    update_order = ""
    copy_where = staticmethod(copy_where)
    panel_flops = 1e11  # 0.15 ms of an H200 in 16 bits, as long as the host takes to queue a panel

    def __init__(self, session: Session) -> None:
        import cupy

        self.xp: Any = cupy
        self._session, self._runtime = session, session.runtime
        self._products = session.gpu.products
        self._lane = _LANES[0]
        self._factors = False
        self._turn, self._lags = 0, False  # whether the caller's stream has yet to wait for the last tasks
        # kernels, by what they add and where
        self._sums: dict[tuple[Any, ...], Any] = {}
        self.remarks: tuple[str, ...] = ()
        self._values: dict[np.dtype, Array] = {}  # value of every byte as an 8-bit float, by type

    def workspace(self, nbytes: int, *, apart: bool = False, follows: bool = False) -> Workspace:
        lanes = {_LANES[0], *(_BESIDE if follows else _LANES)} if apart else _LANES[:1]
        return Workspace(nbytes + len(lanes) * WORKSPACE_BYTES, 0)

    def scratch(self, name: str, shape: tuple[int, int], dtype: np.dtype, order: str = "C") -> Array:
        nbytes = math.prod(shape) * dtype.itemsize
        flat: Array = self.bytes(name, nbytes)[:nbytes].view(stored_dtype(dtype))
        return flat.reshape(shape) if order == "C" else flat.reshape(shape[::-1]).T

    def bytes(self, name: str, nbytes: int, owner: str = "operations") -> Array:
        """Return at least ``nbytes`` of an owner's buffer ``name``. Local."""
        self._runtime.follow_stream()
        return self._runtime.arena.buffer(owner, name, nbytes)

    def stored(self, dtype: np.dtype) -> np.dtype:
        return stored_dtype(dtype)

    def slab_dtype(self, dtype: np.dtype) -> np.dtype:
        return dtype

    def multiplies(self, dtype: np.dtype) -> np.dtype:
        """Return ``dtype``, or bfloat16 for 8-bit floats, which cuBLAS has only in another interface. Local."""
        return DTYPES["bfloat16"] if is_float8(dtype) else dtype

    def store(self, d: Array, x: Array, dtype: np.dtype) -> None:
        """Queue the rounding of ``x`` into ``d``; ``x`` is float32 if ``d`` has 8-bit floats. Local."""
        if d.strides[0] < d.strides[1]:
            d, x = d.T, x.T
        d[...] = to_bits(self.xp, x, dtype) if is_float8(dtype) else x

    def writes(self, dtype: np.dtype) -> bool:
        return not is_float8(dtype)

    def operand(self, array: Array, dtype: np.dtype, name: str = "") -> Array:
        wide = self.multiplies(dtype)
        if wide == dtype:
            return array
        if dtype not in self._values:
            bits = np.arange(256, dtype=np.uint8).view(dtype).astype(wide).view(np.uint16)
            self._values[dtype] = self.xp.asarray(bits)
        transposed = array.shape[0] > 1 and array.strides[0] < array.strides[1]
        source = array.T if transposed else array
        values = self.scratch(f"wide {name}", source.shape, wide)
        if source.size:
            self.xp.take(self._values[dtype], source, out=values.view(np.uint16))
        return values.T if transposed else values

    def refusal(self, dtype: np.dtype, compute: str | None) -> str:
        try:
            compute_type(self.multiplies(dtype), compute)
        except UnsupportedError as error:
            return str(error)
        return ""

    def gemm(
        self,
        alpha: complex,
        a: Array,
        b: Array,
        beta: complex,
        d: Array,
        compute: str | None = None,
        c: Array | None = None,
        batch: Batch | None = None,
    ) -> None:
        """Queue ``d = alpha a b + beta c``, or as many as a batch has, which needs no copies of ``c`` then. Local."""
        if d.size == 0:
            return
        plain = c is None and compute is None and batch is None
        if self._factors and plain and self._queued_by_cublas(alpha, a, b, beta, d):
            return
        flag, ldd = blas_operand(d)
        turned = flag == "N"  # d is in F order: compute its transpose
        c = None if beta == 0 else c
        if c is not None and (a.shape[1] == 0 or not self._reads(c, d)):
            self.copy_where(d, c, None)
            c = None
        if self._lane == _LANES[0]:
            self._runtime.follow_stream()  # products share a workspace
        if a.shape[1] == 0:  # the memory order of empty a and b is unknown
            scale(d, beta)
            return
        if turned:
            a, b, d, c = b.T, a.T, d.T, c if c is None else c.T
            batch = batch if batch is None else batch._replace(x=batch.w, w=batch.x)
        (x, op_x), (w, op_w) = _row_major(a), _row_major(b)
        rows, cols = d.shape
        target = View(int(d.data.ptr), rows, cols, ldd, np.dtype(d.dtype))
        old = None if c is None else View.of(c)
        self.multiply(
            x, w, target, old, op_x=op_x, op_w=op_w, alpha=alpha, beta=beta, compute=compute, batch=batch
        )

    def gemms(
        self,
        alpha: complex,
        parts: Sequence[tuple[Array, Array, Array, Array | None]],
        beta: complex,
        compute: str | None = None,
    ) -> None:
        """Queue several products, as one batch if they are at equal distances. Local."""
        a, b, d, c = parts[0]
        together = len(parts) > 1 and a.shape[1] > 0
        steps = [step for each in zip(*parts, strict=True) if (step := _step(each)) is not None]
        if together and len(steps) == len(parts[0]) and (c is None or self._reads(c, d)):
            self.gemm(alpha, a, b, beta, d, compute, c, Batch(len(parts), *steps))
            return
        for a, b, d, c in parts:
            self.gemm(alpha, a, b, beta, d, compute, c)

    def _reads(self, c: Array, d: Array) -> bool:
        """Return whether products read ``c`` as it is where they write ``d``."""
        turned = blas_operand(d)[0] == "N"
        return c.dtype == d.dtype and contiguous(c, turned=turned)

    def _queued_by_cublas(self, alpha: complex, a: Array, b: Array, beta: complex, d: Array) -> bool:
        """Queue a product by cuBLAS if it has the type, and all sizes fit into 32 bits; return whether. Local."""
        dtype, k = d.dtype, a.shape[1]
        if not (a.dtype == b.dtype == dtype) or k == 0:
            return False
        (of_a, lda), (of_b, ldb), (of_d, ldd) = blas_operand(a), blas_operand(b), blas_operand(d)
        (m, n), left, right, ops = d.shape, a, b, (_AS_IT_IS[of_a], _AS_IT_IS[of_b])
        if of_d == "T":  # cuBLAS writes columns: compute the transpose
            m, n, left, right, ops = n, m, b, a, (_TURNED[of_b], _TURNED[of_a])
            lda, ldb = ldb, lda
        if dtype not in LETTERS or max(m, n, k, lda, ldb, ldd) > _INT_MAX:
            return False
        if self._lane == _LANES[0]:
            self._runtime.follow_stream()  # products share a workspace
        matrices = left.data.ptr, lda, right.data.ptr, ldb, d.data.ptr, ldd
        stream = self.xp.cuda.get_current_stream().ptr
        self._products.gemm(stream, ops, (m, n, k), alpha, beta, matrices, dtype, lane=self._lane)
        return True

    def multiply(
        self,
        x: View,
        w: View,
        d: View,
        c: View | None,
        *,
        op_x: Op,
        op_w: Op,
        alpha: complex = 1,
        beta: complex = 0,
        compute: str | None = None,
        batch: Batch | None = None,
    ) -> None:
        """Queue ``d = alpha op_x(x) op_w(w) + beta c``; ``c`` is ``d`` by default. By cuBLASLt if it can. Local.

        With ``batch``, queue as many such products.
        """
        stream = self.xp.cuda.get_current_stream()
        try:
            self._products.multiply(
                stream.ptr, x, w, d,
                op_x=op_x, op_w=op_w, alpha=alpha, beta=beta, c=c, compute=compute, batch=batch, lane=self._lane,
            )  # fmt: skip
        except UnsupportedError as error:
            if is_float8(x.dtype):
                raise
            self._substitute(f"in this context cuBLAS computed what cuBLASLt has not: {error}")
        else:
            return
        for i in range(1 if batch is None else batch.size):
            if i and batch is not None:
                x, w, d = x.shifted(batch.x), w.shifted(batch.w), d.shifted(batch.d)
                c = None if c is None else c.shifted(batch.c)
            if c is not None and c != d:
                self._session.gpu.kernels.copy(stream, d, c)
            k = x.cols if op_x == "N" else x.rows
            self._check(f"a local product of {d.rows} x {d.cols} x {k}", d.cols, d.rows, k, x.ld, w.ld, d.ld)
            self._products.gemm_ex(stream.ptr, x, w, d, op_x, op_w, alpha, beta, compute, lane=self._lane)

    def _substitute(self, remark: str) -> None:
        """Log and keep a remark on products that another library computed."""
        if remark not in self.remarks:
            logger.warning(remark)
            self.remarks += (remark,)

    def concurrently(
        self, tasks: Sequence[Callable[[], None]], *, follows: bool = False, work: Sequence[int] = ()
    ) -> None:
        """Queue tasks on a few streams: products too small for all multiprocessors run at the same time. Local.

        Each goes to the stream that has the least to do by then.
        """
        gpu, lags = self._session.gpu, follows or self._lags
        lanes = (_BESIDE if lags else _LANES)[: len(tasks)]
        if len(lanes) < 2:
            for task in tasks:
                task()
            return
        self._runtime.follow_stream()
        gpu.use_current_stream()
        others = [lane for lane in lanes if lane != _LANES[0]]
        for lane in others:
            gpu.follow(lane, "main")
        try:
            loads = [0] * len(lanes)
            for task, share in zip(tasks, work or [1] * len(tasks), strict=True):
                which = loads.index(min(loads))
                loads[which] += share
                self._lane = lanes[which]
                with current(gpu.stream(self._lane)):
                    task()
        except BaseException:
            follows = False
            raise
        finally:
            self._lane = _LANES[0]
            self._join(gpu, others, follows)

    def _join(self, gpu: Any, lanes: Sequence[str], follows: bool) -> None:
        """Let the caller's stream wait for what lanes have queued, or if more follows, for what they had before."""
        self._turn = 1 - self._turn
        for lane in lanes:
            gpu.mark(f"{lane} {self._turn}", lane)
        if not follows or self._lags:
            for lane in lanes:
                gpu.await_mark("main", f"{lane} {1 - self._turn if follows else self._turn}")
        self._lags = follows

    @contextmanager
    def beside(self, lane: str) -> Iterator[None]:
        """Queue the work of a block on the engine's stream of that name, which the caller orders. Local."""
        before, self._lane = self._lane, lane
        try:
            with current(self._session.gpu.stream(lane)):
                yield
        finally:
            self._lane = before

    def trsm(self, alpha: complex, a: Array, x: Array, *, lower: bool, unit: bool) -> None:
        side, uplo, trans, m, n, lda, ldx = trsm_words(a, x, lower=lower)
        if m == 0 or n == 0:
            return
        self._check(f"solving {x.shape[0]} equations for {x.shape[1]} right-hand sides", m, n, lda, ldx)
        scalar = np.array(alpha, dtype=x.dtype)
        arguments = (
            SIDES[side], FILLS[uplo], OPS[trans], DIAGONALS["U" if unit else "N"], m, n,
            scalar.ctypes.data, int(a.data.ptr), lda, int(x.data.ptr), ldx,
        )  # fmt: skip
        if self._lane == _LANES[0]:
            self._runtime.follow_stream()  # it shares a workspace with products
        self._products.trsm(self.xp.cuda.get_current_stream().ptr, x.dtype, *arguments, lane=self._lane)

    @staticmethod
    def _check(what: str, *numbers: int) -> None:
        if max(numbers) > _INT_MAX:
            raise ArgumentError(f"{what} does not fit the 32-bit integers of cuBLAS: use more ranks")

    def add(
        self,
        d: Array,
        alpha: complex,
        x: Array,
        beta: complex,
        c: Array,
        part: LocalPart | None,
        *,
        conjugate: bool,
    ) -> None:
        """Queue ``alpha x + beta c`` into a part of ``d``, by one kernel. Local."""
        if d.size == 0:
            return
        if self._lane == _LANES[0]:
            self._runtime.follow_stream()  # one of these may be a product's own buffer
        places: Any = () if part is None else part.indices(self.xp)
        if d.strides[0] < d.strides[1]:  # kernels run along rows
            d, x, c, *places = (each.T for each in (d, x, c, *places))
        is_complex, uplo = d.dtype.kind == "c", None if part is None else part.part.uplo
        hermitian = is_complex and part is not None and part.hermitian
        how = _factor(alpha, "alpha"), _factor(beta, "beta"), conjugate and is_complex, uplo, hermitian
        if how not in self._sums:
            self._sums[how] = _sum(*how)
        numbers = d.dtype.type(alpha), d.dtype.type(beta)
        where = () if part is None else (*places, part.part.diagonal)
        self._sums[how](x if alpha != 0 else d, c if beta != 0 else d, *numbers, *where, d)

    def scale_by_power(self, x: Array, exponent: int) -> None:
        """Queue the multiplication of an array by a power of two. Local."""
        if x.dtype.char in "dD":
            scale_by_power(x, exponent)
            return
        for part in (x.real, x.imag) if x.dtype.kind == "c" else (x,):
            if exponent and part.size:
                _power()(part, 2.0**exponent, part)


@cache
def _power() -> Any:
    """Return a kernel that multiplies float32 by a power of two, by way of float64.

    CuPy compiles kernels that take denormal numbers of float32 for 0: here they are integers.
    """
    import cupy

    code = """
    unsigned bits = __float_as_uint(x), size = bits & 0x7fffffffu;
    double y = (size < 0x800000u ? int(size) * 0x1p-149 : double(__uint_as_float(size))) * unit;
    size = y < 0x1p-126 ? unsigned(__double2uint_rn(y * 0x1p149)) : __float_as_uint(float(y));
    d = __uint_as_float(size | (bits & 0x80000000u));
    """
    return cupy.ElementwiseKernel("float32 x, float64 unit", "float32 d", code, "pblasmp_power")


def _factor(value: complex, name: str) -> str | None:
    """Return what a term is multiplied by in a kernel; "" for 1, which would cost denormal numbers; None for 0."""
    return None if value == 0 else "" if value == 1 else f"{name} * "


def _sum(alpha: str | None, beta: str | None, conjugate: bool, uplo: str | None, hermitian: bool) -> Any:
    """Return a kernel that reads and writes only what it must, and only once."""
    import cupy

    left, right = "conj(x)" if conjugate else "x", "c"
    if hermitian:
        left, right = (f"(row == col ? T(real({each})) : {each})" for each in (left, right))
    factors = (alpha, left), (beta, right)
    terms = [f"{factor}{term}" for factor, term in factors if factor is not None]
    code = f"d = {' + '.join(terms) or 'T(0)'};"
    if hermitian:
        code += " if (row == col) d = T(real(d));"
    arguments = "T x, T c, T alpha, T beta"
    if uplo is not None:
        arguments += ", int64 row, int64 col, int64 diagonal"
        code = f"if (col - row {'<=' if uplo == 'L' else '>='} diagonal) {{ {code} }}"
    name = "_".join(
        [
            "pblasmp_sum",
            *(
                "" if factor is None else f"{factor[:1]}{term}"
                for factor, term in ((alpha, "x"), (beta, "c"))
            ),
            "conj" * conjugate,
            uplo or "",
            "real" * hermitian,
        ]
    )
    return cupy.ElementwiseKernel(arguments, "T d", code, name)


def _step(arrays: Sequence[Array | None]) -> int | None:
    """Return the entries from one array to the next, all of one kind at equal distances, 0 for no arrays; or None."""
    there = [each for each in arrays if each is not None]
    if not there:
        return 0
    item, at = there[0].itemsize, [int(each.data.ptr) for each in there]
    nbytes = at[-1] - at[-2] if len(at) > 1 else 0
    alike = len({(each.shape, each.strides, each.dtype) for each in there}) == 1 and len(at) == len(arrays)
    even = alike and nbytes >= 0 and nbytes % item == 0
    return nbytes // item if even and at == [at[0] + i * nbytes for i in range(len(at))] else None


def _row_major(array: Array) -> tuple[View, Op]:
    """Return a matrix as it is in memory, and the op that makes the array of it."""
    flag, ld = blas_operand(array)
    rows, cols = array.shape
    address, dtype = int(array.data.ptr), np.dtype(array.dtype)
    return (
        (View(address, rows, cols, ld, dtype), "N")
        if flag == "T"
        else (View(address, cols, rows, ld, dtype), "T")
    )
