# SPDX-License-Identifier: Apache-2.0
"""What a rank has of a triangle that is dealt out: tiles on the diagonal, and what is below or above each of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ....layout import Trapezoid
from ....layout.pieces import TrianglePiece, pieces
from ...direct.spans import Span
from ...direct.sub_matrix import SubMatrix, UnfitError

__all__ = ["check_tiles", "staircase"]


def check_tiles(x: SubMatrix) -> None:
    """Raise UnfitError if a block of the diagonal is on several ranks."""
    rows, cols = x.rows, x.cols
    if not (rows.whole or cols.whole) and (rows.block, rows.lead) != (cols.block, cols.lead):
        raise UnfitError


def staircase(x: SubMatrix, uplo: str, width: int = 0, most: int = 0) -> Iterator[TrianglePiece]:
    """Yield the pieces of this rank's part of a triangle: what is cut are tiles, one for each block. Local.

    Args:
        x: the matrix.
        uplo: which triangle.
        width: put blocks together to so many columns (rows, if a rank has all columns): what is cut needs a mask.
        most: elements of such a piece, unless it is of one block.
    """
    part, rows, cols = Trapezoid(uplo), x.rows.indices(x.row), x.cols.indices(x.col)
    if x.rows == x.cols and x.row == x.col:
        return pieces(part, rows, cols)
    if not x.cols.whole:
        return pieces(part, rows, cols, _ends(rows, x.cols, x.col, width, most))
    ends = _ends(cols, x.rows, x.row, width, most)
    return (piece.T for piece in pieces(part.T, cols, rows, ends))


def _ends(across: NDArray[np.int64], span: Span, process: int, width: int, most: int) -> Iterator[int]:
    """Yield where the bands of a process's blocks end: the places after them."""
    blocks, at, count = span.blocks(process), 0, max(1, width // span.block)
    while at < len(blocks):
        start, _, place = blocks[at]
        while True:
            first, stop, last = blocks[min(at + count, len(blocks)) - 1]
            end = last + stop - first
            if count == 1 or np.diff(across.searchsorted((start, stop))) * (end - place) <= most:
                break
            count //= 2
        yield end
        at += count
