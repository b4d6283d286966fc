# SPDX-License-Identifier: Apache-2.0
"""Eigenvalues and singular values by a library: what is common, and libraries that compute on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm import Agreement, largest_size
from ...dtypes import real_dtype
from ...layout import Grid, MatrixDescriptor, Trapezoid
from ...layout.factor_problem import FactorProblem
from ..arrays import move, new_part, window_of
from ..product import Found, Product
from ..protocol import Engine, Method
from ..request import AnyProblem, Operands, Options
from .extremes import largest, scale_by_power, scaling

Array = Any

LOWER = Trapezoid("L")


class SpectralMethod(Method):
    """Computes eigenvalues and singular values."""

    def serves(self, problem: AnyProblem) -> bool:
        return isinstance(problem, FactorProblem) and problem.routine in ("eigh", "svd")


class SpectralProduct(Product):
    """Eigenvalues or singular values by a library. Making and running one is collective over the context.

    Args:
        work: the layout in which A is computed with.

    Attributes:
        exponents: of two, those of largest elements for which the library is right; None: those for which LAPACK is.
        replaces: whether the library writes the eigenvectors in the place of A.
    """

    exponents: range | None = None
    replaces = False

    def __init__(self, engine: Engine, problem: FactorProblem, work: MatrixDescriptor) -> None:
        self._engine, self._problem, self._a = engine, problem, work
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

    def _queue(self, operands: Operands) -> Found:
        p, work, given = self._problem, self._a, operands
        real, least = real_dtype(p.a.dtype), min(p.a.shape)
        first, last = p.subset or (0, least - 1)
        wanted = {"d": (p.d, given.d), "c": (p.c, given.c)}
        if least == 0:
            return Found(values=np.empty(0, real))
        a = self._new(work, p.d, given.d, keep=given.a)
        self._take(given.a, a)
        size, by = self._scaled(a)
        if not math.isfinite(size):  # it is unknown whether the library ends
            for layout, array in wanted.values():
                if layout is not None:
                    array[...] = math.nan
            return Found(values=np.full(last + 1 - first, math.nan, real))
        layouts, places = self._places(wanted, a)
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

    def _take(self, given: Array, a: Array) -> None:
        """Write to ``a`` what is computed with: all of A, or its lower triangle and zeros. Collective."""
        part = LOWER if self._problem.routine == "eigh" else None
        if part is not None:
            a[...] = 0
        move(self._engine, self._problem.a, self._a, (given, a), part)
        if self._problem.conjugate and a.size:
            self._engine.xp.conjugate(a, out=a)

    def _scaled(self, array: Array) -> tuple[float, int]:
        """Scale a matrix by a power of two if squares of its elements over- or underflow. Collective.

        Returns:
            The size of its largest element, and the exponent.
        """
        (size,) = largest_size(self._engine.transport.comm, largest(self._engine.xp, [array]))
        exponent = scaling(size, array.dtype, root=True, exponents=self.exponents)
        self._engine.operations.scale_by_power(array, exponent)
        return size, exponent

    def _new(self, work: MatrixDescriptor, d: MatrixDescriptor | None, array: Array, keep: Array) -> Array:
        """Return an array to compute in: the result's if eigenvectors replace A and one rank has all. Collective."""
        alone = self.replaces and self._engine.transport.size == 1 and self._problem.routine == "eigh"
        if alone and d is not None and is_in(d, work) and not self._engine.overlap(array, keep):
            return array
        return new_part(self._engine, work)

    def _places(
        self, wanted: dict[str, tuple[MatrixDescriptor | None, Any]], a: Array
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
                if self.replaces and self._problem.routine == "eigh":
                    places[name] = a
                else:
                    places[name] = array if is_in(x, work) else new_part(self._engine, work)
        return layouts, places

    def _alone(self, compute: Callable[[], Any]) -> tuple[int, NDArray[Any]]:
        """Return INFO and the values, which the first rank computes. Collective."""
        info, values = 0, np.empty(0)
        with Agreement(self._engine.transport.comm, self._problem.routine):
            if self._engine.transport.rank == 0:
                try:
                    values = compute()
                except np.linalg.LinAlgError:
                    info = 1
        return info, values

    def _home(
        self, work: MatrixDescriptor, array: Array, column: int, x: MatrixDescriptor, out: Array
    ) -> None:
        """Move vectors, as many as are wanted from a column on, to the result. Collective."""
        if array is not out:
            wanted = slice(None), slice(column, column + x.shape[1])
            here = window_of(array, work, self._engine.transport.rank, wanted)
            move(self._engine, work[wanted], x, (here, out))


class OneRankProduct(SpectralProduct):
    """Eigenvalues or singular values by the first rank, for which the others wait."""

    replaces = True

    def __init__(self, engine: Engine, problem: FactorProblem) -> None:
        x = problem.a
        shape = tuple(max(1, each) for each in x.shape)
        super().__init__(
            engine, problem, MatrixDescriptor(x.shape, shape, Grid(1, 1), dtype=x.dtype, order="F")
        )

    def _eigh(self, a: Array, subset: tuple[int, int] | None, *, vectors: bool) -> Array:
        """Return eigenvalues, on the host, with ``vectors`` their eigenvectors in the same columns of ``a``. Local.

        The rest of A may be overwritten.

        Raises:
            numpy.linalg.LinAlgError: they are not found.
        """
        raise NotImplementedError

    def _svd(self, a: Array, *, vectors: bool) -> tuple[Array, Array, Array]:
        """Return U and V^H, if they are asked for, around the singular values, on the host. Local.

        Raises:
            numpy.linalg.LinAlgError: they are not found.
        """
        raise NotImplementedError

    def _eigenvalues(self, a: Array, z: Array | None) -> tuple[int, Array, int]:
        subset = self._problem.subset
        info, values = self._alone(lambda: self._eigh(a, subset, vectors=z is not None))
        return info, values, subset[0] if subset else 0

    def _singular_values(self, a: Array, u: Array | None, vh: Array | None) -> tuple[int, Array]:
        def compute() -> Array:
            left, values, right = self._svd(a, vectors=u is not None or vh is not None)
            for place, found in ((u, left), (vh, right)):
                if place is not None:
                    place[...] = found
            return values

        return self._alone(compute)


class OneRankMethod(SpectralMethod):
    """One rank computes, and tells the others: for small matrices, and for one rank.

    Args:
        most: the largest order, or longer side, for which one rank is as fast as all.
        singular: for singular values the most ranks, and the longest side, for which it is.
    """

    def __init__(
        self, name: str, product: type[OneRankProduct], most: int, singular: tuple[int, int]
    ) -> None:
        self.name, self._product, self.most, self.singular = name, product, most, singular

    def _most(self, engine: Engine, problem: FactorProblem) -> int:
        ranks, longest = self.singular
        is_slow = problem.routine == "eigh" or engine.transport.size > ranks
        return self.most if is_slow else max(self.most, longest)

    def _suits(self, engine: Engine, problem: FactorProblem) -> bool:
        return engine.transport.size == 1 or max(problem.a.shape) <= self._most(engine, problem)

    def refusal(
        self, engine: Engine, problem: FactorProblem, options: Options, operands: Operands | None
    ) -> str:
        """Return why one rank is too slow, unless it is asked for by name. Local."""
        if options.algo == self.name or self._suits(engine, problem):
            return ""
        most = self._most(engine, problem)
        return f"one rank would compute alone: only up to {most} rows and columns, unless requested by name"

    def cost(self, engine: Engine, problem: FactorProblem, options: Options) -> float:
        """Return the least where one rank is as fast as all. Local."""
        return 0.5 if self._is_fast(engine, problem) else 3.0

    def _is_fast(self, engine: Engine, problem: FactorProblem) -> bool:
        return self._suits(engine, problem)

    def prepare(
        self, engine: Engine, problem: FactorProblem, options: Options, operands: Operands
    ) -> Product:
        return self._product(engine, problem)


def is_in(x: MatrixDescriptor, work: MatrixDescriptor) -> bool:
    """Return whether a matrix's local arrays are what the layout ``work`` has. Local."""
    return x.order == "F" and x.same_places(work)
