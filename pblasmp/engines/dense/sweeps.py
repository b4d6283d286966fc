# SPDX-License-Identifier: Apache-2.0
"""Triangular solves with a matrix in panels, and the inverse of a triangle.

Each worker solves for the right-hand sides that it has, and gets all panels. For few right-hand sides panels of GPUs
stay where they are: then the right-hand sides are spread over the workers, each of which has the rows of its panels.

Right-hand sides of a matrix in split panels are on the same grid: their rows are where the matrix's are. Panels travel
along process rows to the columns of the right-hand sides, and unknowns down process columns. If right-hand sides are
few, panels stay where they are, and a process row adds up what its ranks subtract from the right-hand sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..operations import Operations
from ..product import Found
from ..request import Operands
from .factor_panels import FactorPanels
from .panel_shape import are_few, shape_beside, shape_of, shape_of_inverse
from .split_panels import SplitPanels
from .workbench import Mover, PanelsProduct, Workbench

Array = Any

_WIDE = 1024  # columns of a panel that is not read together with the next: products with it fill a GPU


class SplitSides:
    """See ``sweeps.Sides``. Making one is local.

    Args:
        operations: the engine's.
        panels: the matrix, which is final.
        right: the right-hand sides. If they are few, the first process column has them.
        begins: as for ``sweeps.columns_of``.
    """

    def __init__(
        self, operations: Operations, panels: SplitPanels, right: FactorPanels, *, begins: bool = False
    ) -> None:
        assert isinstance(right, SplitPanels)
        self._operations, self._panels, self._right, self._begins = operations, panels, right, begins
        self._few = are_few(panels.shape, right.shape.cols)
        self._x = right.array
        self._placed = False  # of few: only the rank with a row's diagonal block has not zeros there
        if self._few:
            shape = right.array.shape[0], right.shape.cols
            self._x = operations.scratch("terms", shape, right.dtype, "F")
            self._x[...] = right.array if right.mine else 0

    def swap(self, last: int, pivots: Array, *, back: bool = False) -> None:
        """Exchange rows as the matrix's pivots say. Collective over the process column."""
        self._panels.swap_rows(self._operations, [self._x], 0, last, back=back)

    def count_all(self) -> None:
        """Let all rows count from now on. Local."""
        self._begins = False

    def finish(self) -> None:
        """Let the right-hand sides be the solutions. Collective over the workers."""
        panels, right = self._panels, self._right
        if self._few:
            x = panels.outbox.temporary("solutions", self._x.shape, right.dtype)
            x[...] = self._x
            panels.across.add_up(0, "solutions", x)
            if right.mine:
                right.array[...] = x
        panels.settle()

    def sweep(self, *, lower: bool, unit: bool = False, op: str = "N") -> None:
        """Solve with a triangle of the matrix; see ``sweeps.sweep``. Collective over the workers."""
        count = self._panels.shape.panels
        steps = range(count) if lower == (op == "N") else range(count - 1, -1, -1)
        if self._few and self._right.shape.cols:
            self._sweep_few(steps, lower=lower, unit=unit, op=op)
        elif self._right.shape.cols:
            self._sweep(steps, lower=lower, unit=unit, op=op)

    def _parts(
        self, k: int, panel: Array, *, lower: bool, conjugate: bool
    ) -> tuple[Array, Array, slice, slice]:
        """Return the diagonal block and the rest of this rank's rows of a triangle's panel, and where those are."""
        starts, last = self._panels.starts, self._panels.upto(self._panels.shape.cols)
        rows = slice(starts[k], starts[k + 1])
        count = rows.stop - rows.start
        if lower:
            square, beside, rest = panel[:count], panel[count:], slice(rows.stop, last)
        else:
            square, beside, rest = panel[rows.start :], panel[: rows.start], slice(0, rows.start)
        return (square.conj(), beside.conj(), rows, rest) if conjugate else (square, beside, rows, rest)

    def _sweep(self, steps: Sequence[int], *, lower: bool, unit: bool, op: str) -> None:
        operations, panels, right = self._operations, self._panels, self._right
        conjugate, n = op == "C" and panels.dtype.kind == "c", panels.shape.cols
        for k in steps:
            first, stop = panels.shape.bounds(k)
            panel = panels.again(k, slice(first, n) if lower else slice(0, stop))
            x = self._x[:, : right.columns_upto(stop)] if self._begins else self._x
            square, beside, rows, rest = self._parts(k, panel, lower=lower, conjugate=conjugate)
            head = panels.head(k)
            part = panels.outbox.temporary("unknowns", (stop - first, x.shape[1]), panels.dtype)
            if op == "N":
                if panels.row == head:
                    operations.trsm(1, square, x[rows], lower=lower, unit=unit)
                    part[...] = x[rows]
                panels.down.spread(head, "unknowns", [part])
                operations.gemm(-1, beside, part, 1, x[rest])
                continue
            operations.gemm(1, beside.T, x[rest], 0, part)
            panels.down.add_up(head, "unknowns", part)
            if panels.row == head:
                x[rows] -= part
                operations.trsm(1, square.T, x[rows], lower=not lower, unit=unit)

    def _sweep_few(self, steps: Sequence[int], *, lower: bool, unit: bool, op: str) -> None:
        operations, panels, x = self._operations, self._panels, self._x
        conjugate, plain, n = op == "C" and panels.dtype.kind == "c", op == "N", panels.shape.cols
        known = x if plain else operations.scratch("known", x.shape, x.dtype, "F")
        for k in steps:
            first, stop = panels.shape.bounds(k)
            head, column, mine = panels.head(k), panels.shape.column(k), panels.has(k)
            rows = slice(panels.starts[k], panels.starts[k + 1])
            part = panels.outbox.temporary("unknowns", (stop - first, x.shape[1]), x.dtype)
            if mine:
                panel = panels.own(k)[panels.local(slice(first, n) if lower else slice(0, stop))]
                square, beside, _, rest = self._parts(k, panel, lower=lower, conjugate=conjugate)
            if mine and not plain:
                operations.gemm(1, beside.T, known[rest], 0, part)
                panels.down.add_up(head, "unknowns", part)
            if panels.row == head:
                total = panels.outbox.temporary("total", (stop - first, x.shape[1]), x.dtype)
                total[...] = x[rows]
                if plain or not self._placed:
                    panels.across.add_up(column, "total", total)
                if mine and not plain:
                    total -= part
                if mine:
                    triangle = square if plain else square.T
                    operations.trsm(1, triangle, total, lower=lower == plain, unit=unit)
                    part[...] = total
                x[rows] = part if mine else 0
                if not plain:
                    panels.across.spread(column, "unknowns", [part])
                    known[rows] = part
            if mine and plain:
                panels.down.spread(head, "unknowns", [part])
                operations.gemm(-1, beside, part, 1, x[rest])
        self._placed = True


Columns = Sequence[tuple[Array, int]]
"""Right-hand sides that a rank has, and for each the first row that counts: those before are zero, or not wanted."""


def columns_of(panels: FactorPanels, *, begins: bool = False) -> Columns:
    """Return this rank's panels of right-hand sides; with ``begins`` their rows before the diagonal do not count."""
    return [(panels.own(j), panels.shape.bounds(j)[0] if begins else 0) for j in panels.mine]


def sweep(
    operations: Operations,
    panels: FactorPanels,
    columns: Columns,
    *,
    lower: bool,
    unit: bool = False,
    op: str = "N",
) -> None:
    """Replace each x of ``columns`` by the solution of ``op(T) y = x`` for a triangle T of a matrix in panels.

    Collective over the workers of ``panels``.

    Args:
        operations: the engine's.
        panels: all final; T has as many rows as they have columns.
        columns: this rank's right-hand sides.
        lower: which triangle.
        unit: its diagonal is taken as ones.
        op: "N", "T" or "C".
    """
    if not columns and not panels.sends:
        return
    shape = panels.shape
    panels.begin(delays=shape.width < _WIDE)
    n, plain, strips = shape.cols, op == "N", list(panels.strips())
    conjugate = op == "C" and panels.dtype.kind == "c"
    for numbers in strips if lower == plain else reversed(strips):
        first, stop = shape.bounds(numbers[0])[0], shape.bounds(numbers[-1])[1]
        rest = slice(stop, n) if lower else slice(0, first)
        panel = panels.strip(numbers, slice(first, n) if lower else slice(stop))
        at = stop - first if lower else first
        square, beside = (panel[:at], panel[at:]) if lower else (panel[at:], panel[:at])
        if conjugate and columns:
            square, beside = square.conj(), beside.conj()
        for x, begin in columns:
            if stop <= begin:
                continue
            if plain:
                operations.trsm(1, square, x[first:stop], lower=lower, unit=unit)
                operations.gemm(-1, beside, x[first:stop], 1, x[rest])
            else:
                operations.gemm(-1, beside.T, x[rest], 1, x[first:stop])
                operations.trsm(1, square.T, x[first:stop], lower=not lower, unit=unit)


class Sides(Protocol):
    """Right-hand sides, which are replaced by solutions. Making one is local."""

    def swap(self, last: int, pivots: Array, *, back: bool = False) -> None:
        """Exchange rows 0 to ``last`` with those in ``pivots``, from 1; see ``Operations``. Collective."""

    def count_all(self) -> None:
        """Let all rows count from now on. Local."""

    def sweep(self, *, lower: bool, unit: bool = False, op: str = "N") -> None:
        """Solve with a triangle of the matrix; see ``sweep``. Collective over the workers."""

    def finish(self) -> None:
        """Write the solutions to the panels of the right-hand sides. Collective over the workers."""


class Dealt:
    """Right-hand sides of which each worker has some columns; see ``Sides``. Making one is local.

    Args:
        bench: where it is computed.
        panels: the matrix, which is final.
        right: the right-hand sides.
        begins: as for ``columns_of``.
    """

    def __init__(
        self, bench: Workbench, panels: FactorPanels, right: FactorPanels, *, begins: bool = False
    ) -> None:
        self._operations, self._panels = bench.operations, panels
        self._columns = columns_of(right, begins=begins)

    def swap(self, last: int, pivots: Array, *, back: bool = False) -> None:
        """Exchange rows of this rank's columns. Local."""
        for x, _ in self._columns:
            self._operations.swap_rows(x, 0, last, pivots, back=back)

    def count_all(self) -> None:
        """Let all rows count from now on. Local."""
        self._columns = [(x, 0) for x, _ in self._columns]

    def sweep(self, *, lower: bool, unit: bool = False, op: str = "N") -> None:
        """Solve with a triangle of the matrix; see ``sweep``. Collective over the workers."""
        sweep(self._operations, self._panels, self._columns, lower=lower, unit=unit, op=op)

    def finish(self) -> None:
        """Wait until the panels may be overwritten. Local."""
        self._panels.settle()


def sides_of(bench: Workbench, panels: FactorPanels, right: FactorPanels, *, begins: bool = False) -> Sides:
    """Return right-hand sides in the form that their shape says. Local."""
    if isinstance(panels, SplitPanels):
        return SplitSides(bench.operations, panels, right, begins=begins)
    if panels.sends and right.shape.workers < panels.shape.workers:
        sides: Sides = bench.operations.spread(bench, panels, right)
        return sides
    return Dealt(bench, panels, right, begins=begins)


class TriangularProduct(PanelsProduct):
    """A solve with a lower triangular matrix, or its inverse; of that perhaps the triangle alone is written.

    INFO is the index from 1 of the first diagonal element that is exactly zero.
    """

    delays = True

    def _prepare(self) -> None:
        p, engine, part = self._problem, self._engine, self._problem.factored
        assert p.d is not None
        shape = shape_of(engine, p.a, "triangular")
        right = shape_of_inverse(engine, shape) if p.b is None else shape_beside(engine, shape, p.b.shape[1])
        self._bench = bench = Workbench(engine, [shape, right], p.a.dtype)
        self._a = Mover(bench, 0, p.a, lower=True, conjugate=p.conjugate)
        self._b = self._mover(1, p.b)
        self._x = Mover(bench, 1, p.d, lower=part, strictly=part and p.unit)

    def _places(self) -> Sequence[Mover | None]:
        return None, None if self._b is None else self._x

    def _compute(self, given: Operands) -> Found:
        a, b, x, p = given.a, given.b, given.d, self._problem
        bench = self._bench
        panels, right = bench.panels(None, None if self._b is None else self._x.place(x, b, a))
        self._a.into(a, panels)
        if self._b is not None:
            self._b.into(b, right)
        else:
            right.set_identity(self._operations.xp)
        bench.fence()
        if not p.unit:
            zeros = np.flatnonzero(bench.diagonal(panels) == 0)
            if zeros.size:
                return Found(int(zeros[0]) + 1)
        sides = sides_of(bench, panels, right, begins=self._b is None)
        sides.sweep(lower=True, unit=p.unit, op=p.op)
        sides.finish()
        bench.fence()
        self._x.back(x, right)
        return Found()
