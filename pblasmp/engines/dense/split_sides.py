# SPDX-License-Identifier: Apache-2.0
"""Right-hand sides of a matrix in split panels, on the same grid: their rows are where the matrix's are.

Panels travel along process rows to the columns of the right-hand sides, and unknowns down process columns. If
right-hand sides are few, panels stay where they are, and a process row adds up what its ranks subtract from the
right-hand sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..protocol import Operations
from .factor_panels import FactorPanels
from .panel_shape import are_few
from .split_panels import SplitPanels

__all__ = ["SplitSides"]

Array = Any


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
            x = panels.outbox.room("solutions", self._x.shape, right.dtype)
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
            part = panels.outbox.room("unknowns", (stop - first, x.shape[1]), panels.dtype)
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
            part = panels.outbox.room("unknowns", (stop - first, x.shape[1]), x.dtype)
            if mine:
                panel = panels.own(k)[panels.local(slice(first, n) if lower else slice(0, stop))]
                square, beside, _, rest = self._parts(k, panel, lower=lower, conjugate=conjugate)
            if mine and not plain:
                operations.gemm(1, beside.T, known[rest], 0, part)
                panels.down.add_up(head, "unknowns", part)
            if panels.row == head:
                total = panels.outbox.room("total", (stop - first, x.shape[1]), x.dtype)
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
