# SPDX-License-Identifier: Apache-2.0
"""What a rank has of a triangle that is dealt out: tiles on the diagonal, and what is below or above each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...direct.spans import Span
from ...direct.sub_matrix import SubMatrix, UnfitError

__all__ = ["Band", "TrianglePiece", "bands", "check_tiles", "staircase"]


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


class Band(NamedTuple):
    """Rows i to i1 and columns j to j1 of this rank's part: the elements that ``mask`` has, or all if it is None."""

    i: int
    i1: int
    j: int
    j1: int
    mask: NDArray[np.bool_] | None


def bands(x: SubMatrix, *, lower: bool, width: int, most: int) -> Iterator[Band]:
    """Yield this rank's part of a triangle in fewer pieces than ``staircase`` if blocks are narrow. Local.

    Args:
        x: the matrix.
        lower: which triangle.
        width: rows or columns of this rank that may be in one piece.
        most: elements of a piece with a mask, unless it is of one block.
    """
    rows, cols, row, col = x.rows, x.cols, x.row, x.col
    by_rows = cols.whole
    along, mine, across, others = (rows, row, cols, col) if by_rows else (cols, col, rows, row)
    extent = x.n if by_rows else x.m
    rest_comes_first = lower == by_rows  # across the band
    for start, stop, place, place1 in _bands_along(along, mine, across, others, width, most):
        begin, end = across.below(start, others), across.below(stop, others)
        if end > begin:
            i = along.at_place(mine, np.arange(place, place1))
            j = across.at_place(others, np.arange(begin, end))
            i, j = (i, j) if by_rows else (j, i)
            mask = i[:, None] >= j if lower else i[:, None] <= j
            yield Band(*_ordered(by_rows, place, place1, begin, end), mask)
        rest = (0, begin) if rest_comes_first else (end, extent)
        if rest[1] > rest[0]:
            yield Band(*_ordered(by_rows, place, place1, *rest), None)


def _ordered(by_rows: bool, *places: int) -> tuple[int, int, int, int]:
    """Return i, i1, j and j1, given those along a band and those across it. Local."""
    return places if by_rows else (*places[2:], *places[:2])  # type: ignore[return-value]


def _bands_along(
    along: Span, mine: int, across: Span, others: int, width: int, most: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the bands of a process: the first index, the index after the last, and their places. Local."""
    blocks, at = along.blocks(mine), 0
    while at < len(blocks):
        start, _, place = blocks[at]
        count = max(1, width // along.block)
        while True:
            first, stop, last = blocks[min(at + count, len(blocks)) - 1]
            place1 = last + stop - first
            held = across.below(stop, others) - across.below(start, others)
            if count == 1 or held * (place1 - place) <= most:
                break
            count //= 2
        yield start, stop, place, place1
        at += count
