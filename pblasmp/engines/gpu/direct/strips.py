# SPDX-License-Identifier: Apache-2.0
"""A triangle of a result, cut into strips of columns and tiles on its diagonal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ...direct.spans import Span
from ...local_part import even_runs
from ..kernels.kernels import Deal

__all__ = ["Strip", "deal", "portions", "runs", "strips_of"]

_STRIP = 256  # columns of a triangle's tiles, at least
_STRIPS = 16  # of a triangle, at most
_SCRATCH = 64 << 20  # bytes for the tiles of a triangle that are summed at a time


class Strip(NamedTuple):
    """Some adjacent local columns of a triangle.

    Attributes:
        j, width: the first, and how many.
        start, stop: the local rows that are entirely in the triangle.
        i, rows: the first of the rows that the diagonal crosses, and how many they are.
    """

    j: int
    width: int
    start: int
    stop: int
    i: int
    rows: int


@lru_cache(1024)
def strips_of(rows: Span, row: int, cols: Span, col: int, m: int, n: int, uplo: str) -> tuple[Strip, ...]:
    """Return a rank's columns of a triangle, cut so that tiles on the diagonal get the same size."""
    turn = (col - cols.source) % cols.nprocs
    lead = cols.lead if turn == 0 else 0
    width = -(-max(_STRIP, -(-n // _STRIPS)) // _STRIP) * _STRIP
    strips, j = [], 0
    while j < n:
        stop = min(n, (j + lead) // width * width + width - lead)
        first, last = cols.at_place(col, j), cols.at_place(col, stop - 1)
        i, end = rows.below(first, row), rows.below(last + 1, row)
        strips.append(Strip(j, stop - j, *((end, m) if uplo == "L" else (0, i)), i, end - i))
        j = stop
    return tuple(strips)


def portions(tiles: Sequence[Strip], item: int) -> Iterator[list[Strip]]:
    """Yield tiles whose sums fit into the scratch memory together."""
    some: list[Strip] = []
    nbytes = 0
    for tile in tiles:
        size = tile.rows * tile.width * item
        if some and nbytes + size > _SCRATCH:
            yield some
            some, nbytes = [], 0
        some.append(tile)
        nbytes += size
    if some:
        yield some


def runs(tiles: Sequence[Strip]) -> Iterator[list[Strip]]:
    """Return tiles of the same size at equal distances, so that one call multiplies them all. Local."""
    return even_runs(tiles, lambda tile: ((tile.rows, tile.width), (tile.i, tile.j)))


def deal(span: Span, process: int) -> Deal:
    """Return how the indices of a process are dealt out, as kernels take it."""
    turn = (process - span.source) % span.nprocs
    return Deal(span.block, span.nprocs, turn, span.lead, span.lead if turn == 0 else 0)
