# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a triangle or trapezoid, cut into rectangles. Pure, 0-based.

The columns are cut into bands. The diagonal crosses some rows of a band; those beyond, on one side, are all inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .trapezoid import Trapezoid

__all__ = ["FINEST", "Rectangle", "copy_part", "even_runs", "pieces"]

FINEST = 64  # columns at the diagonal: smaller tiles waste less work but slow BLAS down

Indices = NDArray[np.int64]


class Rectangle(NamedTuple):
    """Rows ``i`` to ``i1`` and columns ``j`` to ``j1`` of a rank's part; if ``cut``, what the triangle has of them."""

    i: int
    i1: int
    j: int
    j1: int
    cut: bool

    @property
    def here(self) -> tuple[slice, slice]:
        """Its rows and columns, as an index of the local array."""
        return slice(self.i, self.i1), slice(self.j, self.j1)

    @property
    def shape(self) -> tuple[int, int]:
        """How many rows and columns it has."""
        return self.i1 - self.i, self.j1 - self.j

    @property
    def size(self) -> int:
        """How many elements it has."""
        return (self.i1 - self.i) * (self.j1 - self.j)


def pieces(
    part: Trapezoid | None,
    rows: Indices,
    cols: Indices,
    ends: Sequence[int] | None = None,
    finest: int | None = None,
) -> Iterator[Rectangle]:
    """Yield the pieces of a rank's part of a trapezoid, each element in one of them. Local.

    For given columns, what is entirely inside comes first. What the diagonal crosses is halved, until no piece is cut,
    or those that are have few columns.

    Args:
        part: the trapezoid; None: the whole matrix, which is one piece.
        rows, cols: global index of each of the rank's rows and columns, ascending.
        ends: places of columns where bands end, ascending; None: there is one band.
        finest: most columns of a piece that is cut; None: bands are not halved.
    """
    if part is None:
        if len(rows) and len(cols):
            yield Rectangle(0, len(rows), 0, len(cols), False)
        return
    edges, lower = cols - part.diagonal, part.uplo == "L"
    first, after = rows.searchsorted(edges), rows.searchsorted(edges, "right")

    def cut(top: int, bottom: int, j: int, j1: int) -> Iterator[Rectangle]:
        """Yield the pieces of some columns; rows ``top`` to ``bottom`` are not done yet."""
        i, i1 = int(first[j]), int(after[j1 - 1])  # the diagonal is between these
        start, stop = (i1, bottom) if lower else (top, i)
        if stop > start:
            yield Rectangle(start, stop, j, j1, False)
        if i1 > i and (finest is None or j1 - j <= finest):
            yield Rectangle(i, i1, j, j1, True)
        elif i1 > i:
            middle = (j + j1 + 1) // 2
            yield from cut(i, i1, j, middle)
            yield from cut(i, i1, middle, j1)

    for j, j1 in pairwise((0, *((len(cols),) if ends is None else ends))):
        if j1 > j:
            yield from cut(0, len(rows), j, j1)


def even_runs(some: Sequence[Rectangle], most: int | None = None) -> Iterator[list[Rectangle]]:
    """Yield runs of adjacent pieces of one size at equal distances, so that one call computes them all. Local.

    Args:
        some: pieces, in order.
        most: how many a run may have, at most.
    """
    run: list[Rectangle] = []
    for piece in some:
        pairs = ((run[-1], piece), (run[0], run[1])) if len(run) > 1 else ()
        even = len({(b.i - a.i, b.j - a.j) for a, b in pairs}) < 2
        if run and (piece.shape != run[0].shape or not even or len(run) == most):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def copy_part(
    dst: NDArray[np.generic],
    src: NDArray[np.generic],
    part: Trapezoid | None,
    rows: Indices,
    cols: Indices,
) -> None:
    """Copy the elements of ``part`` from one local array to another with the same layout. Local.

    Args:
        dst, src: local arrays of one shape.
        part: what to copy, None for all; everything else of ``dst`` keeps its values.
        rows, cols: global indices of their rows and columns, ascending.
    """
    for piece in pieces(part, rows, cols, finest=FINEST):
        down, across = here = piece.here
        where = part.mask(rows[down], cols[across]) if part is not None and piece.cut else True
        np.copyto(dst[here], src[here], where=where)
