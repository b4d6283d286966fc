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
from typing import Any

import numpy as np

from ..product import Found
from ..request import Operands
from .factor_panels import FactorPanels
from .panel_shape import are_few, shape_beside, shape_of, shape_of_inverse
from .split_panels import SplitPanels
from .workbench import Mover, PanelsProduct, Workbench

Array = Any

_WIDE = 1024  # columns of a panel that is not read together with the next: products with it fill a GPU


class Sides:
    """Right-hand sides, which are replaced by solutions: here each worker has some columns of them. Local to make.

    Args:
        panels: the matrix, which is final.
        begins: the rows before the diagonal of each panel of these are zero, or not wanted.
    """

    def __init__(
        self, bench: Workbench, panels: FactorPanels, right: FactorPanels, *, begins: bool = False
    ) -> None:
        self._operations, self._panels = bench.operations, panels
        # with the first row of each that counts
        self._counted = [(right.own(j), right.shape.bounds(j)[0] if begins else 0) for j in right.mine]

    def swap(self, last: int, pivots: Array, *, back: bool = False) -> None:
        """Exchange rows 0 to ``last`` with those in ``pivots``, from 1; see ``Operations``. Collective."""
        for x, _ in self._counted:
            self._operations.swap_rows(x, 0, last, pivots, back=back)

    def count_all(self) -> None:
        """Let all rows count from now on. Local."""
        self._counted = [(x, 0) for x, _ in self._counted]

    def sweep(self, *, lower: bool, unit: bool = False, op: str = "N") -> None:
        """Replace x by the solution of ``op(T) y = x`` for a triangle T of the matrix. Collective over the workers.

        Args:
            lower: which triangle; it has as many rows as the matrix has columns.
            unit: its diagonal is taken as ones.
            op: "N", "T" or "C".
        """
        operations, panels, counted = self._operations, self._panels, self._counted
        if not counted and not panels.sends:
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
            if conjugate and counted:
                square, beside = square.conj(), beside.conj()
            for x, begin in counted:
                if stop <= begin:
                    continue
                if plain:
                    operations.trsm(1, square, x[first:stop], lower=lower, unit=unit)
                    operations.gemm(-1, beside, x[first:stop], 1, x[rest])
                else:
                    operations.gemm(-1, beside.T, x[rest], 1, x[first:stop])
                    operations.trsm(1, square.T, x[first:stop], lower=not lower, unit=unit)

    def finish(self) -> None:
        """Write the solutions to the panels of the right-hand sides. Collective over the workers."""
        self._panels.settle()


class SplitSides(Sides):
    """Those on the grid of the matrix. If they are few, the first process column has them. Making one is local."""

    _panels: SplitPanels

    def __init__(
        self, bench: Workbench, panels: SplitPanels, right: FactorPanels, *, begins: bool = False
    ) -> None:
        assert isinstance(right, SplitPanels)
        operations = bench.operations
        self._operations, self._panels, self._right, self._begins = operations, panels, right, begins
        self._few = are_few(panels.shape, right.shape.cols)
        self._x = right.array
        self._placed = False  # of few: only the rank with a row's diagonal block has not zeros there
        if self._few:
            shape = right.array.shape[0], right.shape.cols
            self._x = operations.scratch("terms", shape, right.dtype, "F")
            self._x[...] = right.array if right.mine else 0

    def swap(self, last: int, pivots: Array, *, back: bool = False) -> None:
        self._panels.swap_rows(self._operations, [self._x], 0, last, back=back)

    def count_all(self) -> None:
        self._begins = False

    def finish(self) -> None:
        panels, right = self._panels, self._right
        if self._few:
            x = panels.outbox.temporary("solutions", self._x.shape, right.dtype)
            x[...] = self._x
            panels.across.add_up(0, "solutions", x)
            if right.mine:
                right.array[...] = x
        panels.settle()

    def sweep(self, *, lower: bool, unit: bool = False, op: str = "N") -> None:
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


def sides_of(bench: Workbench, panels: FactorPanels, right: FactorPanels, *, begins: bool = False) -> Sides:
    """Return right-hand sides in the form that their shape says. Local."""
    if isinstance(panels, SplitPanels):
        return SplitSides(bench, panels, right, begins=begins)
    if panels.sends and right.shape.workers < panels.shape.workers:
        sides: Sides = bench.operations.spread(bench, panels, right)
        return sides
    return Sides(bench, panels, right, begins=begins)


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
