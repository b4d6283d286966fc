# SPDX-License-Identifier: Apache-2.0
"""Triangular solves with a matrix in panels.

Each worker solves for the right-hand sides that it has, and gets all panels. For few right-hand sides panels stay where
they are: then the right-hand sides are spread over the workers, each of which has the rows of its panels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..protocol import Operations, Transport
from .factor_panels import FactorPanels, Workbench

__all__ = ["Columns", "Dealt", "Sides", "Spread", "columns_of", "sides_of", "sweep"]

Array = Any
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
    panels.begin()
    n, plain = panels.shape.cols, op == "N"
    conjugate = op == "C" and panels.dtype.kind == "c"
    for k in range(panels.shape.panels) if lower == plain else reversed(range(panels.shape.panels)):
        first, stop = panels.shape.bounds(k)
        rest = slice(stop, n) if lower else slice(0, first)
        panel = panels.again(k, slice(first, n) if lower else slice(stop))
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
        """Exchange rows 0 to ``last`` with those in ``pivots``, from 1; see ``FactorOperations``. Collective."""

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


class Spread:
    """Few right-hand sides: their sum over all ranks counts, and panels stay where they are. Making one is local.

    Args as for ``Dealt``; the first rank has ``right``.
    """

    def __init__(self, bench: Workbench, panels: FactorPanels, right: FactorPanels) -> None:
        self._operations, self._panels, self._transport = bench.operations, panels, bench.engine.transport
        self._right, self._placed = right, False
        shape = right.shape.rows, right.shape.cols
        self._whole = self._operations.scratch("spread", shape, right.dtype, "F")
        self._whole[...] = right.own(0) if right.mine else 0

    def swap(self, last: int, pivots: Array, *, back: bool = False) -> None:
        """Exchange rows of all ranks' terms. Local."""
        self._operations.swap_rows(self._whole, 0, last, pivots, back=back)

    def count_all(self) -> None:
        """Do nothing: all rows count. Local."""

    def sweep(self, *, lower: bool, unit: bool = False, op: str = "N") -> None:
        """Solve with a triangle of the matrix. Collective over the workers."""
        _sweep_spread(
            self._transport, self._operations, self._panels, self._whole,
            placed=self._placed, lower=lower, unit=unit, op=op,
        )  # fmt: skip
        self._placed = True

    def finish(self) -> None:
        """Give the first rank the sum. Collective over the workers."""
        self._transport.sum_ranks(self._whole.T)
        if self._right.mine:
            self._right.own(0)[...] = self._whole


def sides_of(bench: Workbench, panels: FactorPanels, right: FactorPanels, *, begins: bool = False) -> Sides:
    """Return right-hand sides in the form that their shape says. Local."""
    if panels.sends and right.shape.workers < panels.shape.workers:
        spread = bench.operations.spread or Spread
        sides: Sides = spread(bench, panels, right)
        return sides
    return Dealt(bench, panels, right, begins=begins)


def _sweep_spread(
    transport: Transport,
    operations: Operations,
    panels: FactorPanels,
    x: Array,
    *,
    placed: bool,
    lower: bool,
    unit: bool,
    op: str,
) -> None:
    """Replace the sum of all ranks' ``x`` by the solution: afterwards a rank has the rows of its panels, and zeros.

    With ``placed`` that is so before, too.
    """
    n, plain = panels.shape.cols, op == "N"
    conjugate = op == "C" and panels.dtype.kind == "c"
    known = x if plain else operations.scratch("known", x.shape, x.dtype, "F")
    for k in range(panels.shape.panels) if lower == plain else reversed(range(panels.shape.panels)):
        first, stop = panels.shape.bounds(k)
        rest = slice(stop, n) if lower else slice(0, first)
        rows, mine = x[first:stop], panels.has(k)
        if plain or not placed:
            _add_up(transport, operations, rows)
            if not mine:
                rows[...] = 0
        if mine:
            panel = panels.own(k)
            square, beside = panel[first:stop], panel[rest]
            if conjugate:
                square, beside = square.conj(), beside.conj()
            if plain:
                operations.trsm(1, square, rows, lower=lower, unit=unit)
                operations.gemm(-1, beside, rows, 1, x[rest])
            else:
                operations.gemm(-1, beside.T, known[rest], 1, rows)
                operations.trsm(1, square.T, rows, lower=not lower, unit=unit)
        if not plain:
            known[first:stop] = rows
            _add_up(transport, operations, known[first:stop])


def _add_up(transport: Transport, operations: Operations, rows: Array) -> None:
    """Replace rows of an array in F order by their sum over all ranks. Collective."""
    if rows.shape[1] == 1:
        transport.sum_ranks(rows.T)
        return
    together = operations.scratch("spread rows", rows.shape, rows.dtype, "F")
    together[...] = rows
    transport.sum_ranks(together.T)
    rows[...] = together
