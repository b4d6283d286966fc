# SPDX-License-Identifier: Apache-2.0
"""A triangle of a result, cut into strips of columns and tiles on its diagonal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from ....layout import Trapezoid
from ....layout.pieces import Rectangle, pieces
from ...direct.spans import Span
from ..kernels.kernels import Deal

_STRIP = 256  # columns of a triangle's tiles, at least
_STRIPS = 16  # of a triangle, at most
_SCRATCH = 64 << 20  # bytes for the tiles of a triangle that are summed at a time


@lru_cache(1024)
def strips_of(rows: Span, row: int, cols: Span, col: int, uplo: str) -> tuple[Rectangle, ...]:
    """Return a rank's columns of a triangle, cut so that tiles on the diagonal get the same size."""
    lead = cols.lead if (col - cols.source) % cols.nprocs == 0 else 0
    n = cols.count(col)
    width = -(-max(_STRIP, -(-n // _STRIPS)) // _STRIP) * _STRIP
    ends = [min(n, at - lead) for at in range(width, n + lead + width, width)]
    return tuple(pieces(Trapezoid(uplo), rows.indices(row), cols.indices(col), ends))


def portions(tiles: Sequence[Rectangle], item: int) -> Iterator[list[Rectangle]]:
    """Yield tiles whose sums fit into the scratch memory together."""
    some: list[Rectangle] = []
    nbytes = 0
    for tile in tiles:
        size = tile.size * item
        if some and nbytes + size > _SCRATCH:
            yield some
            some, nbytes = [], 0
        some.append(tile)
        nbytes += size
    if some:
        yield some


def deal(span: Span, process: int) -> Deal:
    """Return how the indices of a process are dealt out, as kernels take it."""
    turn = (process - span.source) % span.nprocs
    return Deal(span.block, span.nprocs, turn, span.lead, span.lead if turn == 0 else 0)
