# SPDX-License-Identifier: Apache-2.0
"""What a rank has of a triangle that is dealt out: tiles on the diagonal, and what is below or above each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...direct.sub_matrix import SubMatrix, UnfitError

__all__ = ["TrianglePiece", "check_tiles", "staircase"]


class TrianglePiece(NamedTuple):
    """Rows i to i1 and columns j to j1 of this rank's part; with ``tile`` a triangle of them, else all."""

    i: int
    i1: int
    j: int
    j1: int
    tile: bool


def check_tiles(x: SubMatrix) -> None:
    """Raise UnfitError if a block of the diagonal is on several ranks."""
    rows, cols = x.rows, x.cols
    if not (rows.whole or cols.whole) and (rows.block, rows.lead) != (cols.block, cols.lead):
        raise UnfitError


def staircase(x: SubMatrix, *, lower: bool) -> Iterator[TrianglePiece]:
    """Yield the pieces of this rank's part of a triangle. Local."""
    rows, cols, row, col = x.rows, x.cols, x.row, x.col
    if rows == cols and row == col:
        yield TrianglePiece(0, x.m, 0, x.n, True)
        return
    if not cols.whole:
        for start, stop, j in cols.blocks(col):
            i, i1, j1 = rows.below(start, row), rows.below(stop, row), j + stop - start
            if i1 > i:
                yield TrianglePiece(i, i1, j, j1, True)
            above, below = (i1, x.m) if lower else (0, i)
            if below > above:
                yield TrianglePiece(above, below, j, j1, False)
    else:
        for start, stop, i in rows.blocks(row):
            j, j1, i1 = cols.below(start, col), cols.below(stop, col), i + stop - start
            if j1 > j:
                yield TrianglePiece(i, i1, j, j1, True)
            left, right = (0, j) if lower else (j1, x.n)
            if right > left:
                yield TrianglePiece(i, i1, left, right, False)
