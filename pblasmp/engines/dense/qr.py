# SPDX-License-Identifier: Apache-2.0
"""QR factorization of panels by Householder reflectors, Q formed or applied, and least squares."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...comm import largest_size
from ...dtypes import real_dtype
from ..local.extremes import (
    SINGULAR,
    column_sizes,
    is_dependent,
    largest,
    rank_tolerance,
    scaling,
)
from ..operations import Operations
from ..product import Found
from ..request import Operands
from .elimination import right_looking
from .factor_panels import FactorPanels, SharedPanels
from .panel_shape import shape_beside, shape_of
from .sweeps import sides_of
from .workbench import Mover, PanelsProduct, Workbench

Array = Any

_PROBES = (
    8  # random vectors: with fewer, a singular value is now and then taken for one that is ten times as large
)


class QrProduct(PanelsProduct):
    """A QR factorization, whose factors of reflectors are told; or a product with the Q of one, or with its adjoint."""

    def _prepare(self) -> None:
        p, engine = self._problem, self._engine
        shape = shape_of(engine, p.a, "qr", narrow=True)
        shapes = [shape] if p.d is None else [shape, shape_beside(engine, shape, p.d.shape[1])]
        self._bench = bench = Workbench(engine, shapes, p.a.dtype, reflectors=True)
        self._a, self._out = Mover(bench, 0, p.a), self._mover(0, p.c)
        self._x, self._y = (self._mover(1, each, conjugate=p.conjugate) for each in (p.b, p.d))

    def _places(self) -> Sequence[Mover | None]:
        return () if self._problem.factored else (self._out,)

    def _compute(self, given: Operands) -> Found:
        if self._problem.factored:
            self._apply(given)
            return Found()
        bench, out = self._bench, given.c
        assert self._out is not None
        (panels,) = bench.panels(self._out.place(out, given.a))
        self._a.into(given.a, panels)
        bench.handed_in((panels,))
        factor(self._operations, panels)
        panels.settle()
        bench.fence()
        tau = factors_of(bench, panels)
        self._out.back(out, panels)
        return Found(tau=tau)

    def _apply(self, given: Operands) -> None:
        """Write Q B, or Q^H B, to D; without B its first columns."""
        bench = self._bench
        panels, right = bench.panels()
        self._a.into(given.a, panels)
        if self._x is None:
            right.set_identity(self._operations.xp)
        else:
            self._x.into(given.b, right)
        bench.fence()
        panels.set_factors(self._operations, given.tau)
        bench.fence()
        multiply(self._operations, panels, right, adjoint=self._problem.op == "C")
        panels.settle()
        bench.fence()
        assert self._y is not None
        self._y.back(given.d, right)


class LeastSquaresProduct(PanelsProduct):
    """The least-squares solution of A X = B for a tall A, or the least solution of A^H X = B.

    If the factors are wanted, all is as in LAPACK: only zeros on the diagonal of R are faults, and the solution for a
    matrix of zeros is zero.
    """

    delays = True

    def _prepare(self) -> None:
        p, engine = self._problem, self._engine
        assert p.b is not None
        assert p.d is not None
        self._least, self._shape = p.op == "C", p.a.shape
        self._rows, self._comm = p.b.shape[0], engine.transport.comm
        self._tolerance = 0.0 if p.c is not None else rank_tolerance(p.a)
        shape = shape_of(engine, p.a, "lstsq", narrow=True)
        shapes = [shape, shape_beside(engine, shape, p.b.shape[1])]
        if p.c is None:
            shapes.append(shape_beside(engine, shape, _PROBES)._replace(rows=p.a.shape[1]))
        self._bench = bench = Workbench(engine, shapes, p.a.dtype, reflectors=True)
        self._a = Mover(bench, 0, p.a, conjugate=p.conjugate)
        self._out = self._mover(0, p.c, conjugate=p.conjugate)
        self._b, self._x = Mover(bench, 1, p.b), Mover(bench, 1, p.d)

    def _compute(self, given: Operands) -> Found:
        return Found(self._solve(given.a, given.b, given.d, given.c))

    def _solve(self, a: Array, b: Array, x: Array, out: Array) -> int:
        """Compute; return 0, or i if column i of R, counted from 1, depends on others."""
        bench, operations, n = self._bench, self._operations, self._shape[1]
        panels, right, *probe = bench.panels()
        self._a.into(a, panels)
        self._b.into(b, right)
        bench.fence()
        size, of_a, of_b = self._scale(panels, right)
        if size == 0 and (self._out is not None or 0 in self._shape):
            for y in right.arrays():
                y[...] = 0
            bench.fence()
            self._x.back(x, right)
            return 0
        factor(operations, panels)
        panels.settle()
        bench.fence()
        info = self._fault(panels, *probe) if math.isfinite(size) else 0  # of infinities R has NaN
        if self._out is not None:
            self._out.back(out, panels)
        if info:
            return info
        if not self._least:
            multiply(operations, panels, right, adjoint=True)
            panels.settle()
        sides = sides_of(bench, panels, right)
        sides.sweep(lower=False, op="C" if self._least else "N")
        sides.finish()
        last = right.upto(n)
        if self._least:
            for y in right.arrays():
                y[last:] = 0
            multiply(operations, panels, right)
            panels.settle()
        for y in right.arrays():
            count = len(y) if self._least else last
            operations.scale_by_power(y[:count], of_a - of_b)
            operations.scale_by_power(y[count:], -of_b)  # what is left of B
        bench.fence()
        self._x.back(x, right)
        return 0

    def _scale(self, panels: FactorPanels, right: FactorPanels) -> tuple[float, int, int]:
        """Scale A and B by powers of two if they are near the ends of the type's range. Collective.

        Returns:
            The size of A, and the exponents for A and for B.
        """
        xp, dtype = self._operations.xp, panels.dtype
        arrays = panels.arrays(), [y[: right.upto(self._rows)] for y in right.arrays()]
        sizes = largest_size(self._comm, *(largest(xp, each) for each in arrays))
        of_a, of_b = (scaling(size, dtype) for size in sizes)
        for each, exponent in zip(arrays, (of_a, of_b), strict=True):
            for array in each:
                self._operations.scale_by_power(array, exponent)
        return sizes[0], of_a, of_b

    def _fault(self, panels: FactorPanels, probe: FactorPanels | None = None) -> int:
        """Return which column of R, from 1, depends on others, the first that the diagonal shows, or 0. Collective.

        The diagonal alone does not show whether there is one. How large solutions for random vectors are does: as large
        as the inverse of R with columns of norm 1. If they overflow, the diagonal decides.
        """
        xp, norms = self._operations.xp, {}
        small: list[int] = []
        zeros: list[int] = []
        parts = {k: panels.above(xp, k) for k in panels.mine if k < panels.shape.steps}
        sizes = {
            k: functools.reduce(xp.maximum, (column_sizes(xp, x) for x in each)) for k, each in parts.items()
        }
        sizes = self._over_rows(panels, sizes, add=False)
        for k, size in sizes.items():
            square = panels.square(k)
            for found, tolerance in ((small, self._tolerance), (zeros, 0.0)) if len(square) else ():
                dependent = xp.flatnonzero(is_dependent(xp, square.diagonal(), size, tolerance))
                found += [panels.shape.bounds(k)[0] + int(each) + 1 for each in dependent[:1]]
        if probe is not None:
            sums = {k: sum(xp.sum(_squared(xp, x / sizes[k]), axis=0) for x in parts[k]) for k in parts}
            sums = self._over_rows(panels, sums, add=True)
            for k in (k for k in sums if len(panels.square(k))):  # others of the process column have the same
                norms[panels.shape.bounds(k)[0]] = self._bench.on_host(
                    xp.asarray(sizes[k] * xp.sqrt(sums[k]))
                )
        everyones = self._comm.allgather((small, zeros, norms))
        least = min((each for small, *_ in everyones for each in small), default=0)
        if probe is None or any(zeros for _, zeros, _ in everyones):
            return least
        scale = np.ones((panels.shape.cols, 1))
        for *_, norms in everyones:
            for first, each in norms.items():
                scale[first : first + panels.shape.width, 0] = each
        squares = self._solved_squares(panels, probe, scale)
        told = self._comm.allgather(sum(float(xp.sum(each)) for each in squares))
        norm = math.sqrt(sum(told) / _PROBES)
        if not math.isfinite(norm):
            return least
        if norm * SINGULAR * np.finfo(panels.dtype).eps < 1:
            return 0
        if least:
            return least
        rows = np.zeros(len(scale))
        for each in squares:
            rows[probe.rows] += self._bench.on_host(xp.sum(each, axis=1))
        self._comm.sum_into(rows)
        return int(self._comm.bcast(int(np.argmax(rows)) + 1))

    def _solved_squares(self, panels: FactorPanels, probe: FactorPanels, scale: Array) -> list[Array]:
        """Return the squared sizes of ``scale R^-1`` times this rank's random vectors. Collective over the workers."""
        xp, columns = self._operations.xp, probe.arrays()
        for k, x in zip(probe.mine, columns, strict=False):
            values = np.random.default_rng(k).standard_normal((len(scale), x.shape[1]))
            x[...] = xp.asarray(values[probe.rows].astype(x.dtype))
        sides = sides_of(self._bench, panels, probe)
        sides.sweep(lower=False)
        sides.finish()
        return [_squared(xp, x * xp.asarray(scale[probe.rows])) for x in columns]

    def _over_rows(self, panels: FactorPanels, found: dict[int, Array], *, add: bool) -> dict[int, Array]:
        """Return what this rank has found of its panels, joined with what ranks with other rows have. Collective.

        Numbers of columns, none negative: either they are added, or the largest counts.
        """
        if panels.whole_rows:
            return found
        xp, columns = self._operations.xp, np.zeros(panels.shape.cols)
        for k, each in found.items():
            columns[slice(*panels.shape.bounds(k))] = self._bench.on_host(xp.asarray(each))
        if add:
            self._comm.sum_into(columns)
        else:
            columns = np.array(largest_size(self._comm, *columns))
        real = real_dtype(panels.dtype)
        return {k: xp.asarray(columns[slice(*panels.shape.bounds(k))].astype(real)) for k in found}


def _squared(xp: Any, x: Array) -> Array:
    size = xp.abs(x)
    return size * size


def _blocks(panels: FactorPanels) -> Array:
    assert panels.blocks is not None
    return panels.blocks


def _together(operations: Operations, panels: FactorPanels) -> tuple[Array, Array] | None:
    """Return all panels as one array and their Ts side by side, if LAPACK takes them so here; else None. Local."""
    if operations.gemqrt is None or not isinstance(panels, SharedPanels):
        return None
    width, least = panels.shape.width, min(panels.shape.rows, panels.shape.cols)
    ts = _blocks(panels).transpose(0, 2, 1).reshape(-1, width).T
    return panels.array, ts[:, :least]


def factor(operations: Operations, panels: FactorPanels) -> None:
    """Replace a matrix in panels by R and the reflectors, and write their Ts. Collective over the workers."""
    shape = panels.shape
    alone = _together(operations, panels) if shape.workers == 1 else None
    if alone is not None:
        if panels.rank == 0:
            operations.geqrt(*alone)
        return

    def finish(k: int) -> None:
        panels.geqrt(operations, k)

    def update(k: int, panel: Array, group: Sequence[int]) -> None:
        panels.reflect(operations, panel, k, panels.run(group), adjoint=True)

    right_looking(panels, shape.steps, finish, update)


def factors_of(bench: Workbench, panels: FactorPanels) -> Array:
    """Return the factors of all reflectors. After a fence; local."""
    return bench.on_host(panels.factors())[: min(panels.shape.rows, panels.shape.cols)].copy()


def multiply(
    operations: Operations, panels: FactorPanels, right: FactorPanels, *, adjoint: bool = False
) -> None:
    """Replace this rank's columns of a matrix by their product with Q, or Q^H. Collective over the workers."""
    columns = right.arrays()
    if not columns and not panels.sends:
        return
    if (together := _together(operations, panels)) is not None:
        whole, ts = together
        for x in columns:
            operations.gemqrt(whole[:, : ts.shape[1]], ts, x, adjoint=adjoint)
        return
    panels.begin()
    steps = range(panels.shape.steps)
    for k in steps if adjoint else reversed(steps):
        panel = panels.reflector(operations, k)
        for x in columns:
            panels.reflect(operations, panel, k, x, adjoint=adjoint)
