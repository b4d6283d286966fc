# SPDX-License-Identifier: Apache-2.0
"""Eigenvalues and singular values by ScaLAPACK, or by the LAPACK of one rank, on matrices moved to its layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....comm import Agreement
from ....layout import Grid, MatrixDescriptor, Trapezoid
from ....layout.factor_problem import FactorProblem
from ...arrays import new_part
from ...factor import FactorOperands, Found
from ...local.extremes import scale_by_power
from ...local.library_product import LibraryProduct, is_in
from ...protocol import Engine
from .library import Scalapack

__all__ = ["LapackProduct", "ScalapackProduct", "work_layout"]

Array = NDArray[Any]

_BLOCK = 64  # of matrices that are moved
_BLOCKS = 16, 256  # of those that stay
_LOWER = Trapezoid("L")


def work_layout(x: MatrixDescriptor, size: int) -> MatrixDescriptor:
    """Return the layout in which a matrix is computed with by ``size`` ranks: its own, if that is a good one. Local.

    ScaLAPACK takes F order, square blocks, and a matrix that begins on the first process.
    """
    rows, cols = x.block
    if (
        rows == cols
        and _BLOCKS[0] <= rows <= _BLOCKS[1]
        and rows * max(x.grid.nprow, x.grid.npcol) <= max(x.shape)
        and x.grid.size == size
        and x.source == x.lead == (0, 0)
    ):
        return replace(x, order="F", ld=None)
    grid = Grid.squarest(size)
    block = max(1, min(_BLOCK, -(-max(x.shape) // max(grid.nprow, grid.npcol))))
    return MatrixDescriptor(x.shape, (block, block), grid, dtype=x.dtype, order="F")


class _SpectralProduct(LibraryProduct):
    """Eigenvalues or singular values by a library. Making and running one is collective over the context.

    Args:
        engine: where.
        problem: what is computed.
        work: the layout in which A is computed with.
    """

    def __init__(self, engine: Engine, problem: FactorProblem, work: MatrixDescriptor) -> None:
        super().__init__(engine, problem)
        self._a = work
        if not is_in(problem.a, work):
            self.moved = (f"a to {work}",)

    def _eigenvalues(self, a: Array, z: Array | None) -> tuple[int, Array, int]:
        """Write eigenvectors. Collective over the context.

        Returns:
            INFO, the eigenvalues asked for, ascending, and the column of ``z`` with the eigenvector of the first.
        """
        raise NotImplementedError

    def _singular_values(self, a: Array, u: Array | None, vh: Array | None) -> tuple[int, Array]:
        """Return INFO and the singular values, descending; write U and V^H. Collective."""
        raise NotImplementedError

    def compute(self, operands: FactorOperands) -> Found:
        """Compute, and return what was found. Collective over the context."""
        p, work, given = self._problem, self._a, operands
        real, least = np.dtype(p.a.dtype.char.lower()), min(p.a.shape)
        first, last = p.subset or (0, least - 1)
        wanted = {"d": (p.d, given.d), "c": (p.c, given.c)}
        if least == 0:
            return Found(values=np.empty(0, real))
        part = _LOWER if p.routine == "eigh" else None
        a = self._copied(p.a, given.a, work, part=part, conjugate=self._conjugate)
        size, by = self._scale(a)
        if not math.isfinite(size):  # it is unknown whether the library ends
            for layout, array in wanted.values():
                if layout is not None:
                    array[...] = math.nan
            return Found(values=np.full(last + 1 - first, math.nan, real))
        layouts, places = self._places(wanted)
        column = 0
        if p.routine == "eigh":
            info, values, column = self._eigenvalues(a, places["d"])
        else:
            info, values = self._singular_values(a, places["d"], places["c"])
        told: Array
        info, told = self._engine.transport.comm.bcast((info, values), 0)
        if info:
            return Found(info)
        for name, (layout, array) in wanted.items():
            if layout is not None:
                self._home(layouts[name], places[name], column, layout, array)
        scale_by_power(told, -by)
        return Found(values=told)

    def _places(
        self, wanted: dict[str, tuple[MatrixDescriptor | None, Any]]
    ) -> tuple[dict[str, MatrixDescriptor], dict[str, Any]]:
        """Return the layouts of vectors while they are computed, and arrays, the results' own if they fit.

        Collective over the context.
        """
        layouts: dict[str, MatrixDescriptor] = {}
        places: dict[str, Any] = {}
        for name, (x, array) in wanted.items():
            places[name] = None
            if x is not None:
                shape = self._a.shape if self._problem.routine == "eigh" else x.shape
                layouts[name] = work = replace(self._a, shape=shape)
                places[name] = array if is_in(x, work) else new_part(self._engine, work)
        return layouts, places

    def _home(
        self, work: MatrixDescriptor, array: Array, column: int, x: MatrixDescriptor, out: Array
    ) -> None:
        """Move vectors, as many as are wanted from a column on, to the result. Collective."""
        if array is not out:
            rank, end = self._engine.transport.rank, column + x.shape[1]
            inside = work.global_indices(rank)[1] if rank < work.grid.size else np.empty(0, np.int64)
            here = slice(*np.searchsorted(inside, (column, end)).tolist())
            self._move(work[:, column:end], array[:, here], x, out)


class ScalapackProduct(_SpectralProduct):
    """Eigenvalues or singular values by ScaLAPACK."""

    def __init__(self, engine: Engine, problem: FactorProblem, library: Scalapack) -> None:
        super().__init__(engine, problem, work_layout(problem.a, engine.transport.size))
        self._library = library
        library.grid(self._a.grid)
        self.path = f"ScaLAPACK, p?{self._routine}" + (", on moved matrices" if self.moved else "")

    @property
    def _routine(self) -> str:
        """The routine's name without the letter of its type."""
        p = self._problem
        if p.routine == "svd":
            return "gesvd"
        family = "he" if p.a.dtype.kind == "c" else "sy"
        return family + ("ev" if p.d is None else "evd" if p.subset is None else "evr")

    @property
    def _more(self) -> int:
        """The elements that p?ormtr needs; p?syevd asks for fewer on some grids, and then returns wrong vectors."""
        block, (rows, cols) = self._a.block[0], self._a.local_shape(0)
        return block * (rows + cols + 2 * block)

    @property
    def _works(self) -> list[np.dtype | Array]:
        """The types of the workspaces of the eigenvalue routines."""
        dtype = self._a.dtype
        real = [np.dtype(dtype.char.lower())] if dtype.kind == "c" else []
        integers = [np.dtype(np.int32)] if self._problem.d is not None else []
        return [dtype, *real, *integers]

    def _eigenvalues(self, a: Array, z: Array | None) -> tuple[int, Array, int]:
        p, n, library = self._problem, self._a.shape[0], self._library
        real = np.dtype(p.a.dtype.char.lower())
        values = np.zeros(n, real)
        first, last = p.subset or (0, n - 1)
        of_a = library.operand(self._a, a)
        of_z = library.operand(self._a, a if z is None else z)
        shared: tuple[Any, ...]
        if z is None or p.subset is None:
            shared = ("N" if z is None else "V", "L", n, *of_a, values, *of_z)
        else:
            # With fewer vectors than a block has columns, its p?ormtr refuses the workspace: wrong vectors, and INFO 0.
            start = max(0, min(first, last + 1 - self._a.block[0]))
            stop = max(last + 1, min(n, start + self._a.block[0]))
            found = np.zeros(2, np.int32)
            bound = np.zeros(1, real)
            shared = (
                "V", "I", "L", n, *of_a, bound, bound.copy(), start + 1, stop, found[:1], found[1:], values, *of_z,
            )  # fmt: skip
        info = library.call(self._routine, p.a.dtype, shared, self._works, p.routine, self._more)
        if z is not None and p.subset is not None:
            return info, values[first - start : last + 1 - start], first - start
        return info, values[first : last + 1], 0

    def _singular_values(self, a: Array, u: Array | None, vh: Array | None) -> tuple[int, Array]:
        p, library, work = self._problem, self._library, self._a
        (m, n), least = work.shape, min(work.shape)
        real = np.dtype(p.a.dtype.char.lower())
        values = np.zeros(least, real)
        of_u = library.operand(work, a) if u is None else library.operand(replace(work, shape=(m, least)), u)
        of_vh = (
            library.operand(work, a) if vh is None else library.operand(replace(work, shape=(least, n)), vh)
        )
        works: list[np.dtype | Array] = [p.a.dtype]
        if p.a.dtype.kind == "c":
            works.append(np.empty(1 + 4 * max(m, n), real))
        jobs = "N" if u is None else "V", "N" if vh is None else "V"
        shared = *jobs, m, n, *library.operand(work, a), values, *of_u, *of_vh
        return library.call("gesvd", p.a.dtype, shared, works, p.routine, self._more), values


class LapackProduct(_SpectralProduct):
    """Eigenvalues or singular values by the LAPACK of the first rank, which the others wait for."""

    path = "LAPACK on one rank"

    def __init__(self, engine: Engine, problem: FactorProblem) -> None:
        x = problem.a
        one = MatrixDescriptor(
            x.shape, tuple(max(1, each) for each in x.shape), Grid(1, 1), dtype=x.dtype, order="F"
        )
        super().__init__(engine, problem, one)

    def _eigenvalues(self, a: Array, z: Array | None) -> tuple[int, Array, int]:
        from scipy.linalg import eigh

        p = self._problem

        def compute() -> Any:
            how: dict[str, Any] = {} if p.subset is None else {"subset_by_index": p.subset, "driver": "evr"}
            if z is not None and p.subset is None:
                how["driver"] = "evd"
            found = eigh(a, lower=True, overwrite_a=True, check_finite=False, eigvals_only=z is None, **how)
            if z is None:
                return found
            z[:, : found[1].shape[1]] = found[1]
            return found[0]

        return *self._alone(compute), 0

    def _singular_values(self, a: Array, u: Array | None, vh: Array | None) -> tuple[int, Array]:
        from scipy.linalg import svd

        def compute() -> Any:
            if u is None and vh is None:
                return svd(a, compute_uv=False, overwrite_a=True, check_finite=False)
            left, values, right = svd(a, full_matrices=False, overwrite_a=True, check_finite=False)
            for place, found in ((u, left), (vh, right)):
                if place is not None:
                    place[...] = found
            return values

        return self._alone(compute)

    def _alone(self, compute: Callable[[], Any]) -> tuple[int, Array]:
        """Return INFO and the values, computed on the first rank. Collective."""
        info, values = 0, np.empty(0)
        with Agreement(self._engine.transport.comm, self._problem.routine):
            if self._engine.transport.rank == 0:
                try:
                    values = compute()
                except np.linalg.LinAlgError:
                    info = 1
        return info, values
