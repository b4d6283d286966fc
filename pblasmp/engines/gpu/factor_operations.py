# SPDX-License-Identifier: Apache-2.0
"""What factorizations need of a GPU: panels by cuSOLVER and by kernels of the engine, exchanges of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np

from ...bindings import FillMode
from ...dtypes import element_type
from ..arrays import adjoint_of, blas_operand, scale, set_diagonal
from ..dense.split_panels import SplitPanels
from ..local.slab_terms import Gemm
from ..operations import Operations
from .gpu_operations import LANES, GpuOperations
from .grid_panels import GridPanels, QueuedPanels
from .kernels.factor import SUBSTITUTED, FactorKernels
from .kernels.lt import LETTERS
from .kernels.lt_product import Op
from .kernels.views import View, leading
from .session import Session
from .spread import QueuedSpread
from .triangles import Halves

Array = Any

Update = tuple[tuple[int, int, int], tuple[int, int, int, int, int, int]]
"""Rows, columns and depth of a product, and the addresses and leading dimensions of its factors and of the result."""

_TURNED: tuple[Op, Op] = ("N", "T")
_AS_IT_IS: tuple[Op, Op] = ("N", "N")
_ADJOINT: tuple[Op, Op] = ("N", "C")

_LEAST, _MANY = 256, 1 << 21  # of fewer equations, if unknowns are so many: at least so many equations
_MANY_AHEAD = 1 << 19  # unknowns, if inverses are made beside other work
FEW_COLUMNS = 4  # by which a kernel multiplies a part of a matrix; for more cuBLAS does, in bands of rows
_FEW_UNKNOWNS = 1024  # columns for which a kernel substitutes faster than cuBLAS: two for each warp
_WIDTHS = ((40_000, 1024), (4_000, 512), (0, 256))  # order from which on panels are so wide


class GpuFactorOperations(GpuOperations):
    """See ``engines.protocol.Operations``. Everything is queued on CuPy's current stream. Making one is local.

    Args:
        session: whose streams, memory and local products are used.

    Attributes:
        factor_width: columns of a panel; 0: by the order of the matrix.
        kernels: what is compiled for them.
        inverts: equations and right-hand sides from which on ``trsm`` takes inverses of blocks; with a diagonal of
            ones, twice as many equations, and the last number of right-hand sides.
    """

    workers = 1 << 30
    factor_alone = 0
    factor_wait = 1_400_000  # 3.5 ms at 3.3 GB/s: a wait of 0.9 ms over sockets, as bytes between nodes count
    shared_panels: Any = None
    own_panels: Any = QueuedPanels
    grid_panels: Any = GridPanels
    split_panels: Any = SplitPanels
    spread: Any = QueuedSpread
    shared_from = 6_000_000
    shared_width = 1024
    gemqrt: Any = None
    factor_width = 0
    inverts = 1024, 2, 128
    exchanged_rows = Operations.exchanged_rows

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        runtime = session.runtime
        self.kernels = FactorKernels(self.xp, runtime.shared_memory, runtime.multiprocessors)

    @contextmanager
    def factoring(self) -> Iterator[None]:
        before, self._factors = self._factors, True
        try:
            yield
        finally:
            self._factors = before

    def coarse(self) -> AbstractContextManager[None]:
        return self._products.in_tf32()

    def panel_width(self, order: int) -> int:
        """Return how many columns a panel has: wide ones multiply faster, narrow ones let ranks wait less. Local."""
        return self.factor_width or next(width for least, width in _WIDTHS if order >= least)

    def tallest(self, dtype: np.dtype) -> int:
        """Return how many rows a panel of LU or QR can have: shared memory must hold a column of it. Local."""
        return self.kernels.tallest(dtype)

    def copy_panel(self, to: Array, of: Array) -> None:
        """Queue the copy of an array in F order. Local."""
        if to.size:
            self._session.gpu.kernels.copy(self._current(), View.of(to.T), View.of(of.T))

    def potrf(self, a: Array, info: Array, first: int) -> None:
        """Queue the factorization of a panel of a positive definite matrix. Local."""
        n = a.shape[1]
        square, below = a[:n], a[n:]
        if not n:
            return
        found = self.kernels.look(self._current(), square)
        ld = leading(a)
        self._solver("potrf", a, (int(FillMode.LOWER), n), (int(a.data.ptr), ld), (), found)
        self.kernels.judge(self._current(), a, found, info, first)
        if below.size:
            left = square.conj() if square.dtype.kind == "c" else square
            self.trsm(1, left, below.T, lower=True, unit=False)

    def trsm(self, alpha: complex, a: Array, x: Array, *, lower: bool, unit: bool) -> None:
        """Queue the solution of ``a y = alpha x`` in the place of ``x``, if it is large by products. Local."""
        if self._halves_win(len(a), x.shape[1], unit=unit):
            if alpha != 1:
                scale(x, alpha)
            Halves(self, a, x, x, lower=lower, unit=unit).run()
        elif unit and lower and alpha == 1 and self._substitutes(a, x):
            self.kernels.substitute(self._current(), a, x)
        else:
            super().trsm(alpha, a, x, lower=lower, unit=unit)

    def solver(
        self, a: Array, x: Array, *, lower: bool, unit: bool, turn: int = 0
    ) -> tuple[Array, Callable[[], None]]:
        """Return where the right-hand sides are to be, and what queues the solution; inverses are queued now. Local."""
        if not self._halves_win(len(a), x.shape[1], unit=unit, many=_MANY_AHEAD):
            return x, partial(self.trsm, 1, a, x, lower=lower, unit=unit)
        by_rows = blas_operand(x)[0] == "T"
        right = self.temporary("right", x.shape[::-1] if by_rows else x.shape, np.dtype(x.dtype))
        right = right.T if by_rows else right
        return right, Halves(self, a, right, x, lower=lower, unit=unit, turn=turn).run

    def multiply_part(self, g: Gemm, runs: Callable[[], Sequence[Array]], diagonal: str) -> bool:
        """Queue a product of few columns with some elements of each row of the left matrix, which are read once. Local.

        Returns:
            False if there are more columns, or other types: then nothing is queued.
        """
        old = None if g.beta == 0 else g.target if g.c is None else g.c
        arrays = g.left, g.right, g.target, g.target if old is None else old
        dtype, columns = np.dtype(g.target.dtype), g.right.shape[1]
        if columns > FEW_COLUMNS or dtype not in LETTERS or any(each.dtype != dtype for each in arrays):
            return False
        if g.target.size:
            if self._lane == "main":
                self._runtime.follow_stream()
            matrices = [*map(_place, arrays[:3]), (0, 0, 0) if old is None else _place(old)]
            self.kernels.part(self._current(), dtype, matrices, runs(), columns, (g.alpha, g.beta), diagonal)
        return True

    @staticmethod
    def _substitutes(a: Array, x: Array) -> bool:
        """Return whether a kernel takes less time than cuBLAS's ``trsm`` for a diagonal of ones. Local."""
        fits = 0 < len(a) <= SUBSTITUTED and 0 < x.shape[1] <= _FEW_UNKNOWNS
        return fits and all(blas_operand(each)[0] == "N" for each in (a, x))

    def _halves_win(self, n: int, columns: int, *, unit: bool, many: int = _MANY) -> bool:
        """Return whether products and inverses take less time than cuBLAS's ``trsm``, as on an H200. Local."""
        order, *least = self.inverts
        if n >= order * (1 + unit):  # L of LU often has large conditions: then refinement takes as long again
            return columns >= least[unit]
        return not unit and n >= _LEAST and n * columns >= many

    def apply(
        self,
        op: Op,
        a: tuple[int, int, int, int],
        x: int,
        alpha: complex,
        beta: complex,
        y: int,
        columns: int,
        dtype: np.dtype,
    ) -> None:
        """Queue ``y = alpha op(a) x + beta y`` on addresses: it takes a third of the host's time of ``gemm``. Local.

        Args:
            op: "N" or "T".
            a: address, rows, columns and leading dimension of a matrix in F order.
            x, y: where rows of ``columns`` elements begin, one behind the other.
            columns: of ``x`` and ``y``.
            dtype: of all three.
        """
        at, rows, cols, ld = a
        if columns == 1:
            stream, places = int(self._current().ptr), (at, ld, x, y)
            self._products.gemv(stream, op, (rows, cols), alpha, beta, places, dtype, lane=self._lane)
            return
        to, of, turned = (rows, cols, _TURNED) if op == "N" else (cols, rows, _AS_IT_IS)
        matrices = x, columns, at, ld, y, columns
        self.multiply_at(int(self._current().ptr), turned, (columns, to, of), alpha, beta, matrices, dtype)

    def multiply_at(
        self,
        stream: int,
        ops: tuple[Op, Op],
        sizes: tuple[int, int, int],
        alpha: complex,
        beta: complex,
        matrices: tuple[int, int, int, int, int, int],
        dtype: np.dtype,
    ) -> None:
        """Queue ``d = alpha op(a) op(b) + beta d`` on addresses, as ``LocalProducts.gemm``. Local."""
        self._products.gemm(stream, ops, sizes, alpha, beta, matrices, dtype, lane=self._lane)

    def subtract(self, products: Sequence[Update], dtype: np.dtype) -> None:
        """Queue ``d -= a b^H`` for several matrices, on a few streams. Local."""
        if self._lane == "main":
            self._runtime.follow_stream()  # products share a workspace
        count = min(len(products), LANES)
        self.concurrently([partial(self._subtract, products[i::count], dtype) for i in range(count)])

    def _subtract(self, products: Sequence[Update], dtype: np.dtype) -> None:
        stream, ops = int(self._current().ptr), _ADJOINT if dtype.kind == "c" else _TURNED
        for sizes, matrices in products:
            self.multiply_at(stream, ops, sizes, -1, 1, matrices, dtype)

    def temporary(self, name: str, shape: tuple[int, int], dtype: np.dtype) -> Array:
        """Return an array in F order in a buffer that only the current lane uses. Local."""
        if self._lane == "main":
            return self.scratch(name, shape, dtype, "F")
        nbytes = math.prod(shape) * dtype.itemsize
        flat: Array = self._runtime.arena.buffer("operations", name, nbytes)[:nbytes].view(dtype)
        return flat.reshape(shape[::-1]).T

    def _solver(
        self,
        name: str,
        a: Array,
        extents: tuple[int, ...],
        place: tuple[int, int],
        more: tuple[int, ...],
        info: Array,
    ) -> None:
        """Queue one of cuSOLVER's factorizations; its arguments in C are in this order, then workspace and info."""
        from cupy_backends.cuda.libs import cusolver as library

        handle = self.xp.cuda.device.get_cusolver_handle()  # the thread's, with which it ends
        letter = element_type(a.dtype).blas
        size = getattr(library, f"{letter}{name}_bufferSize")(handle, *extents, *place)
        work = self.xp.empty(max(1, size), a.dtype)
        function = getattr(library, f"{letter}{name}")
        function(handle, *extents, *place, *more, int(work.data.ptr), size, int(info.data.ptr))

    def _current(self) -> Any:
        return self.xp.cuda.get_current_stream()

    # -- LU

    def getrf(self, a: Array, pivots: Array, info: Array, first: int) -> None:
        least = min(a.shape)
        if not least:
            return
        self._halves(a, pivots, info, first, 0, least)
        if least < a.shape[1]:
            rest = a[:, least:]
            self.kernels.swap(self._current(), rest, pivots, first)
            self.trsm(1, a[:, :least], rest, lower=True, unit=True)

    def _halves(self, a: Array, pivots: Array, info: Array, first: int, start: int, stop: int) -> None:
        """Factor the columns from ``start`` to ``stop``, from row ``start`` on: first one half, then the other."""
        base = self.kernels.width("lu", len(a) - start, np.dtype(a.dtype))
        stream, width = self._current(), stop - start
        if width <= base:
            own = a[start:, start:stop]
            self.kernels.lu(stream, own, pivots[start:stop], info, first + start)
            return
        blocks = -(-width // base)
        middle = start + blocks // 2 * base if blocks > 1 else start + width // 2
        self._halves(a, pivots, info, first, start, middle)
        top, right = a[start:middle, start:middle], a[start:, middle:stop]
        self.kernels.swap(stream, right, pivots[start:middle], first + start)
        upper = a[start:middle, middle:stop]
        self.trsm(1, top, upper, lower=True, unit=True)
        if middle < len(a):
            self.gemm(-1, a[middle:, start:middle], upper, 1, a[middle:, middle:stop])
        self._halves(a, pivots, info, first, middle, stop)
        self.kernels.swap(stream, a[middle:, start:middle], pivots[middle:stop], first + middle)

    def swap_rows(self, a: Array, first: int, last: int, pivots: Array, *, back: bool = False) -> None:
        if a.size and first < last:
            if self._lane == "main":
                self._runtime.follow_stream()
            self.kernels.swap(self._current(), a[first:], pivots[first:last], first, back=back)

    # -- QR

    def geqrt(self, a: Array, t: Array) -> None:
        rows, cols = a.shape
        if not cols:
            return
        xp, stream = self.xp, self._current()
        base = min(cols, self.kernels.width("qr", rows, np.dtype(a.dtype)))
        v = xp.empty((rows, cols), a.dtype, order="F")
        v[:cols] = 0
        tau, small = xp.empty(cols, a.dtype), xp.empty(base * base, a.dtype)
        for start in range(0, cols, base):
            stop = min(start + base, cols)
            n = stop - start
            own, factor = v[start:, start:stop], small[: n * n].reshape(n, n).T
            self.kernels.qr(stream, a[start:, start:stop], own, factor, tau[start:stop])
            if stop < cols:
                self._reflect(own, factor, a[start:, stop:])
        self._block_factor(v, tau, t)

    def _reflect(self, v: Array, t: Array, x: Array) -> None:
        """Queue the product of ``x`` with the adjoint of I - V T V^H, in its place."""
        shape = v.shape[1], x.shape[1]
        inner, factor = (self.xp.empty(shape, x.dtype, order="F") for _ in range(2))
        self.gemm(1, adjoint_of(v), x, 0, inner)
        self.gemm(1, adjoint_of(t), inner, 0, factor)
        self.gemm(-1, v, factor, 1, x)

    def larft(self, v: Array, tau: Array, t: Array) -> None:
        """Queue the making of T from vectors whose ones and zeros are not stored. Local."""
        xp, n = self.xp, v.shape[1]
        if n:
            whole = xp.empty(v.shape, v.dtype, order="F")
            whole[n:] = v[n:]
            whole[:n] = xp.tril(v[:n], -1)
            set_diagonal(xp, whole, 1)
            self._block_factor(whole, tau, t)

    def _block_factor(self, v: Array, tau: Array, t: Array) -> None:
        """Queue the making of T from vectors whose ones and zeros are stored."""
        n = v.shape[1]
        inner = self.xp.empty((n, n), v.dtype, order="F")
        self.gemm(1, adjoint_of(v), v, 0, inner)
        self.block_reflector(inner, tau, t)

    def block_reflector(self, inner: Array, tau: Array, t: Array) -> None:
        """Queue the making of T: its inverse is the upper triangle of V^H V, with 1/tau on the diagonal. Local."""
        self.kernels.reflector(self._current(), inner, t, tau, after=False)
        self.trsm(1, inner, t, lower=False, unit=False)
        self.kernels.reflector(self._current(), inner, t, tau, after=True)


def _place(a: Array) -> tuple[int, int, int]:
    """Return the address of an array, and how many elements apart its rows and columns are."""
    down, across = (int(step) // a.itemsize for step in a.strides)
    return int(a.data.ptr), down, across
