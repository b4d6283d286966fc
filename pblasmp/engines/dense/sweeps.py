# SPDX-License-Identifier: Apache-2.0
"""Triangular solves with a matrix in panels.

Each worker solves for the right-hand sides that it has, and gets all panels. For few right-hand sides panels of GPUs
stay where they are: then the right-hand sides are spread over the workers, each of which has the rows of its panels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..protocol import Operations
from .factor_panels import FactorPanels, Workbench
from .split_panels import SplitPanels
from .split_sides import SplitSides

__all__ = ["Columns", "Dealt", "Sides", "columns_of", "sides_of", "sweep"]

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
