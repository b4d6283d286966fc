# SPDX-License-Identifier: Apache-2.0
"""Factorisations by cuSOLVERMp, on matrices in layouts that it takes: moved there and back if they are not."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....bindings import FillMode, Operation, SideMode
from ....layout import Grid, MatrixDescriptor, Trapezoid
from ....layout.factor_problem import FactorProblem
from ...arrays import new_part
from ...factor import FactorOperands, Found
from ...local.extremes import column_sizes, is_dependent, rank_tolerance, scale_by_power
from ...local.library_product import LibraryProduct, is_in
from ...protocol import Engine
from ..cublasmp.call import part_mask, write_part
from .library import Cusolvermp

__all__ = ["CusolvermpProduct", "layouts", "taken"]

Array = Any

_BLOCK = 512  # of matrices that are moved: the fastest of 256, 512 and 1024 where all ranks still have work
_LOWER = Trapezoid("L")


def taken(x: MatrixDescriptor, size: int) -> bool:
    """Return whether cuSOLVERMp takes a layout on ``size`` ranks as it is. Local.

    It takes F order and square blocks. Blocks of one element have hung, and so have solves on some of the ranks.
    """
    return (
        x.order == "F"
        and x.block[0] == x.block[1] > 1
        and x.grid.size == size
        and x.source == x.lead == (0, 0)
    )


def layouts(p: FactorProblem, size: int) -> tuple[MatrixDescriptor, MatrixDescriptor | None]:
    """Return the layouts in which a problem is computed: that of A and its factors, that of right-hand sides. Local.

    The result's layout, or A's, if cuSOLVERMp takes it. LU is on one row of processes, since on several its pivots are
    not those of partial pivoting; what applies reflectors is on one column, since on several its blocks may not be
    wider than the right-hand sides.
    """
    x = p.c if p.c is not None else p.a
    grid = x.grid if x.grid.size == size else Grid.squarest(size)
    if p.routine == "lu":
        grid = Grid(1, size)
    elif p.routine == "lstsq" or (p.routine == "qr" and p.factored):
        grid = Grid(size, 1)
    if taken(x, size) and (x.grid == grid or (x.grid.nprow, x.grid.npcol) == (grid.nprow, grid.npcol)):
        a = replace(x, ld=None)
    else:
        most = max(2, -(-max(x.shape) // (4 * max(grid.nprow, grid.npcol))))
        block = min(_BLOCK, most)
        a = MatrixDescriptor(x.shape, (block, block), grid, dtype=x.dtype, order="F")
    beside = None
    if p.d is not None or p.routine == "eigh":
        rows, cols = p.a.shape[0], p.a.shape[1] if p.routine == "eigh" else p.right
        beside = MatrixDescriptor((rows, cols), a.block, a.grid, dtype=x.dtype, order="F")
    return a, beside


class CusolvermpProduct(LibraryProduct):
    """A factorisation by cuSOLVERMp. Making and running one is collective over the context.

    Args:
        engine: where.
        library: cuSOLVERMp.
        problem: what is computed.
    """

    def __init__(self, engine: Engine, library: Cusolvermp, problem: FactorProblem) -> None:
        super().__init__(engine, problem)
        self._library = library
        self._size = engine.transport.size
        self._a, self._beside = layouts(problem, self._size)
        library.grid(self._a.grid)
        given = {"a": (problem.a, self._a), "b": (problem.b, self._beside), "d": (problem.d, self._beside)}
        self.moved = tuple(
            f"{name} to {work}"
            for name, (x, work) in given.items()
            if x is not None and work is not None and not is_in(x, work[: x.shape[0], :])
        )
        self.path = "cuSOLVERMp" + (", on moved matrices" if self.moved else "")

    def compute(self, operands: FactorOperands) -> Found:
        """Compute, and return what was found. Collective over the context."""
        with ExitStack() as closing:
            return _RUNS[self._problem.routine](self, operands, closing)

    # -- calling

    def _operand(
        self, work: MatrixDescriptor, array: Array, closing: ExitStack, number: int = 0
    ) -> tuple[Any, ...]:
        """Return C's four arguments for a work matrix. Local."""
        descriptor = self._library.descriptor(work, array, closing)
        return self._library.address(array, number), 1, 1, descriptor

    def _by_columns(self, values: Array, work: MatrixDescriptor) -> NDArray[Any]:
        """Return on every rank what each rank has for its columns, as one array on the host. Collective."""
        _, cols = work.global_indices(self._engine.transport.rank)
        return self._everyones((cols, values[: len(cols)]), work.shape[1])

    def _of_columns(self, whole: NDArray[Any], work: MatrixDescriptor) -> Array:
        """Return this rank's part of such an array, on its GPU. Local."""
        _, cols = work.global_indices(self._engine.transport.rank)
        padded = np.zeros(work.shape[1], whole.dtype)
        padded[: len(whole)] = whole
        mine = np.zeros(len(cols) + work.block[1], whole.dtype)
        mine[: len(cols)] = padded[cols]
        return self._library.runtime.cupy.asarray(mine)

    def _own_diagonal(self, work: MatrixDescriptor, array: Array) -> tuple[NDArray[np.int64], Array]:
        """Return which diagonal elements this rank has, and a copy of them on its GPU. Local."""
        rows, cols = work.global_indices(self._engine.transport.rank)
        both, i, j = np.intersect1d(rows, cols, return_indices=True)
        cupy = self._library.runtime.cupy
        if not both.size:
            return both, cupy.empty(0, work.dtype)
        return both, array[cupy.asarray(i), cupy.asarray(j)]

    def _everyones(self, own: tuple[NDArray[np.int64], Array], count: int) -> NDArray[Any]:
        """Return on every rank what the ranks have of an array of ``count`` elements. Collective."""
        indices, values = own
        whole = np.zeros(count, values.dtype)
        mine = indices, self._library.runtime.cupy.asnumpy(values)
        for at, part in self._engine.transport.comm.allgather(mine):
            whole[at] = part
        return whole

    def _diagonal(self, work: MatrixDescriptor, array: Array) -> NDArray[Any]:
        """Return a matrix's diagonal on every rank. Collective."""
        return self._everyones(self._own_diagonal(work, array), min(work.shape))

    def _is_nan(self, array: Array, before: tuple[NDArray[np.int64], Array], k: int) -> bool:
        """Return whether a Cholesky factorisation has ended at row ``k`` because of NaN. Collective.

        The library has overwritten the pivot. It was NaN if A's diagonal element was, or an element of L left of it is.
        """
        rows, cols = self._a.global_indices(self._engine.transport.rank)
        row, left = np.flatnonzero(rows == k), int(np.searchsorted(cols, k))
        here = False
        if row.size and left:
            here = bool(np.isnan(self._library.runtime.cupy.asnumpy(array[int(row[0]), :left])).any())
        diagonal = self._everyones(before, self._a.shape[0])
        return bool(np.isnan(diagonal[k])) or any(self._engine.transport.comm.allgather(here))

    # -- routines

    def _cholesky(self, given: FactorOperands, closing: ExitStack) -> Found:
        p, library, work = self._problem, self._library, self._a
        n, dtype, lower = work.shape[0], work.dtype, FillMode.LOWER
        if p.factored:
            a = self._read(p.a, given.a, part=_LOWER, conjugate=self._conjugate)
        else:
            out = p.c, given.c
            a = self._copied(
                p.a, given.a, work, out, given.b, given.d, part=_LOWER, conjugate=self._conjugate
            )
        of_a = self._operand(work, a, closing)
        if not p.factored:
            before = self._own_diagonal(work, a)
            info = library.call("Potrf", dtype, (lower, n, *of_a))
            if info and self._is_nan(a, before, info - 1):
                info = 0
                write_part(a, np.nan, part_mask(_LOWER, work, self._engine.transport.rank))
            if info:
                self._give_factor(given, a, _LOWER)
                return Found(info)
        if p.d is not None:
            self._solved(
                given, closing,
                lambda b, beside: library.call("Potrs", dtype, (lower, n, beside.shape[1], *of_a, *b)),
            )  # fmt: skip
        if not p.factored:
            self._give_factor(given, a, _LOWER)
        return Found()

    def _give_factor(self, given: FactorOperands, a: Array, part: Trapezoid | None = None) -> None:
        """Write the factors where they are wanted. Collective."""
        p = self._problem
        if p.c is None:
            return
        if self._conjugate:
            self._conjugated(a)
        self._back(self._a, a, p.c, given.c, part)

    def _solved(
        self,
        given: FactorOperands,
        closing: ExitStack,
        solve: Callable[[tuple[Any, ...], MatrixDescriptor], int],
    ) -> int:
        """Solve in place on the right-hand sides, and write the solutions. Collective."""
        p, beside = self._problem, self._beside
        assert p.b is not None
        assert p.d is not None
        assert beside is not None
        b = self._copied(p.b, given.b, beside, (p.d, given.d), given.a, given.c)
        info = solve(self._operand(beside, b, closing, 1), beside) if beside.shape[1] else 0
        self._back(beside, b, p.d, given.d)
        return info

    def _lu(self, given: FactorOperands, closing: ExitStack) -> Found:
        p, library, work = self._problem, self._library, self._a
        (m, n), dtype = work.shape, work.dtype
        diagonal = None
        if p.factored:
            a = self._read(p.a, given.a)
            assert given.pivots is not None
            pivots = given.pivots
            ipiv = self._of_columns(pivots + 1, work)
        else:
            a = self._copied(p.a, given.a, work, (p.c, given.c), given.b, given.d)
            ipiv = self._of_columns(np.arange(1, min(m, n) + 1), work)
        of_a = self._operand(work, a, closing)
        at = ipiv.data.ptr
        info = 0
        if not p.factored:
            library.call("Getrf", dtype, (m, n, *of_a, at))
            pivots = self._by_columns(ipiv, work)[: min(m, n)] - 1
            diagonal = self._diagonal(work, a)
            zeros = np.flatnonzero(diagonal == 0)
            info = int(zeros[0]) + 1 if zeros.size else 0
            self._give_factor(given, a)
        if p.d is not None and not info:
            self._solved(
                given, closing,
                lambda b, beside: library.call(
                    "Getrs", dtype, (Operation.N, n, beside.shape[1], *of_a, at, *b)
                ),
            )  # fmt: skip
        return Found(info, pivots, diagonal)

    def _qr(self, given: FactorOperands, closing: ExitStack) -> Found:
        p, library, work = self._problem, self._library, self._a
        (m, n), dtype = work.shape, work.dtype
        if not p.factored:
            a = self._copied(p.a, given.a, work, (p.c, given.c))
            tau = self._of_columns(np.zeros(min(m, n), dtype), work)
            of_a = self._operand(work, a, closing)
            library.call("Geqrf", dtype, (m, n, *of_a), (tau.data.ptr,))
            self._give_factor(given, a)
            return Found(tau=self._by_columns(tau, work)[: min(m, n)])
        beside, xp = self._beside, self._engine.xp
        assert beside is not None
        assert p.d is not None
        a, conjugate = self._read(p.a, given.a), p.conjugate and dtype.kind == "c"
        if p.b is not None:
            x = self._copied(p.b, given.b, beside, (p.d, given.d), given.a)
        else:
            x = new_part(self._engine, beside)
            rows, cols = beside.global_indices(self._engine.transport.rank)
            if x.size:
                x[...] = xp.asarray(rows)[:, None] == xp.asarray(cols)[None, :]
        if conjugate:
            self._conjugated(x)
        tau = self._of_columns(np.asarray(given.tau, dtype), work)
        operation = Operation.N if p.op == "N" else Operation.C if dtype.kind == "c" else Operation.T
        of_a, of_x = self._operand(work, a, closing), self._operand(beside, x, closing, 1)
        shared = SideMode.LEFT, operation, m, beside.shape[1], n, *of_a, tau.data.ptr, *of_x
        library.call("Ormqr", dtype, shared)
        if conjugate:
            self._conjugated(x)
        self._back(beside, x, p.d, given.d)
        return Found()

    def _lstsq(self, given: FactorOperands, closing: ExitStack) -> Found:
        p, library, work, beside = self._problem, self._library, self._a, self._beside
        (m, n), dtype = work.shape, work.dtype
        assert beside is not None
        assert p.b is not None
        assert p.d is not None
        b = self._copied(p.b, given.b, beside)
        a = self._copied(p.a, given.a, work, (p.c, given.c), conjugate=self._conjugate)
        rows = self._rows(beside, p.b.shape[0])
        (size, by), (_, of_right) = self._scale(a), self._scale(b[:rows])
        if size == 0 and p.c is None:
            return Found(1)
        if size == 0:  # as LAPACK does
            b[...] = 0
            self._back(beside, b, p.d, given.d)
            return Found()
        of_a, of_b = self._operand(work, a, closing), self._operand(beside, b, closing, 1)
        library.call("Gels", dtype, (Operation.N, m, n, beside.shape[1], *of_a, *of_b))
        tolerance = rank_tolerance(p.a) if p.c is None else 0.0
        dependent = is_dependent(np, self._diagonal(work, a)[:n], self._sizes_of_r(work, a), tolerance)
        self._give_factor(given, a)
        if dependent.any():
            return Found(int(dependent.argmax()) + 1)
        solved, operations = self._rows(beside, n), self._engine.operations
        operations.scale_by_power(b[:solved], by - of_right)
        operations.scale_by_power(b[solved:], -of_right)  # what is left of B
        self._back(beside, b, p.d, given.d)
        return Found()

    def _sizes_of_r(self, work: MatrixDescriptor, array: Array) -> NDArray[Any]:
        """Return the sizes of R's columns on every rank. Collective."""
        xp, n = self._engine.xp, work.shape[1]
        rows, cols = work.global_indices(self._engine.transport.rank)
        sizes = np.zeros(n, work.dtype).real
        if rows.size and rows[0] < n:
            own = array[: self._rows(work, n)]
            inside = xp.asarray(rows[: len(own)])[:, None] <= xp.asarray(cols)[None, :]
            own = xp.where(inside, own, work.dtype.type(0))
            sizes[cols] = self._library.runtime.cupy.asnumpy(column_sizes(xp, own))
        found: NDArray[Any] = np.max(self._engine.transport.comm.allgather(sizes), axis=0)
        return found

    def _eigh(self, given: FactorOperands, closing: ExitStack) -> Found:
        p, library, work, beside = self._problem, self._library, self._a, self._beside
        n, dtype = work.shape[0], work.dtype
        assert beside is not None
        real = np.dtype(dtype.char.lower())
        if n == 0:
            return Found(values=np.empty(0, real))
        a = self._copied(p.a, given.a, work, part=_LOWER, conjugate=self._conjugate)
        first, last = p.subset or (0, n - 1)
        fits = p.d is not None and is_in(p.d, beside)
        vectors = given.d if fits else new_part(self._engine, beside)
        size, by = self._scale(a, always=True)  # near the ends of the range its eigenvectors are wrong
        if not math.isfinite(size):  # it is unknown whether the library ends
            if p.d is not None:
                given.d[...] = math.nan
            return Found(values=np.full(last + 1 - first, math.nan, real))
        values = library.runtime.cupy.zeros(n, real)
        job = ctypes.create_string_buffer(b"V")
        of_a, of_v = self._operand(work, a, closing), self._operand(beside, vectors, closing, 1)
        shared = ctypes.addressof(job), FillMode.LOWER, n, *of_a, values.data.ptr, *of_v
        library.call("Syevd", dtype, shared)
        found: NDArray[Any] = self._engine.transport.comm.bcast(library.runtime.cupy.asnumpy(values), 0)
        order = np.argsort(found, kind="stable")  # equal ones come in any order
        order = order[first : last + 1]
        if p.d is not None:
            if len(order) == n and (np.diff(order) == 1).all():
                self._back(beside, vectors, p.d, given.d)
            else:
                self._by_order(vectors, order, given.d)
        found = found[order]
        scale_by_power(found, -by)
        return Found(values=found, doubtful=p.d is not None)

    def _by_order(self, vectors: Array, order: NDArray[np.int64], out: Array) -> None:
        """Write column ``order[j]`` of the eigenvectors to column j of the result, by way of whole rows. Collective."""
        beside, d = self._beside, self._problem.d
        assert beside is not None
        assert d is not None
        n, count = beside.shape[1], len(order)
        rows = replace(beside, block=(-(-n // self._size), n), grid=Grid(self._size, 1))
        whole = new_part(self._engine, rows)
        self._move(beside, vectors, rows, whole)
        if whole.size:
            whole[:, :count] = whole[:, self._engine.xp.asarray(order)]
        self._move(rows[:, :count], whole[:, :count], d, out)


_RUNS: dict[str, Callable[[CusolvermpProduct, FactorOperands, ExitStack], Found]] = {
    "cholesky": CusolvermpProduct._cholesky,
    "lu": CusolvermpProduct._lu,
    "qr": CusolvermpProduct._qr,
    "lstsq": CusolvermpProduct._lstsq,
    "eigh": CusolvermpProduct._eigh,
}
