# SPDX-License-Identifier: Apache-2.0
"""Triangular solves with a matrix in panels: each worker solves for the right-hand sides that it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..protocol import Operations
from .factor_panels import FactorPanels

__all__ = ["Columns", "columns_of", "sweep"]

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
    n, plain = panels.shape.cols, op == "N"
    conjugate = op == "C" and panels.dtype.kind == "c"
    for k in range(panels.shape.panels) if lower == plain else reversed(range(panels.shape.panels)):
        panel = panels.again(k)
        first, stop = panels.shape.bounds(k)
        rest = slice(stop, n) if lower else slice(0, first)
        square, beside = panel[first:stop], panel[rest]
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
