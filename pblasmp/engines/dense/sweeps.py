# SPDX-License-Identifier: Apache-2.0
"""Triangular solves with a matrix in panels: each worker solves for the right-hand sides that it has."""

from __future__ import annotations

from typing import Any

from ..protocol import Operations
from .factor_panels import FactorPanels

__all__ = ["sweep"]

Array = Any


def sweep(
    operations: Operations,
    panels: FactorPanels,
    x: Array | None,
    *,
    lower: bool,
    unit: bool = False,
    op: str = "N",
    order: int | None = None,
) -> None:
    """Replace ``x`` by the solution of ``op(T) y = x`` for a triangle T of a matrix in panels. Collective.

    Collective over the workers of ``panels``.

    Args:
        operations: the engine's.
        panels: all final.
        x: this rank's right-hand sides, each a column; None if it has none.
        lower: which triangle.
        unit: its diagonal is taken as ones.
        op: "N", "T" or "C".
        order: T's order; by default all columns.
    """
    if x is None and not panels.sends:
        return
    n = panels.shape.cols if order is None else order
    count = -(-n // panels.shape.width)
    plain = op == "N"
    conjugate = op == "C" and panels.dtype.kind == "c"
    for k in range(count) if lower == plain else reversed(range(count)):
        panel = panels.again(k)
        if x is None:
            continue
        first, stop = panels.shape.bounds(k)
        stop = min(stop, n)
        rest = slice(stop, n) if lower else slice(0, first)
        square, beside = panel[first:stop, : stop - first], panel[rest, : stop - first]
        if conjugate:
            square, beside = square.conj(), beside.conj()
        if plain:
            operations.trsm(1, square, x[first:stop], lower=lower, unit=unit)
            operations.gemm(-1, beside, x[first:stop], 1, x[rest])
        else:
            operations.gemm(-1, beside.T, x[rest], 1, x[first:stop])
            operations.trsm(1, square.T, x[first:stop], lower=not lower, unit=unit)
