# SPDX-License-Identifier: Apache-2.0
"""Copies between a rank's part of a block-cyclic matrix and the whole matrix in memory that ranks share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...layout import MatrixDescriptor
from ...layout.axis import Axis
from ...layout.caches import sized_cache
from ..arrays import strided

__all__ = ["CopiedParts"]

Array = Any
_STRIP = 128  # columns at a time of a triangle that is copied


@dataclass(frozen=True)
class _BlockRun:
    """Blocks of the local array at equal distances in the matrix: where they are here, and there."""

    here: tuple[slice, slice]
    shape: tuple[int, int, int, int]  # row blocks, rows, column blocks, columns
    at: tuple[int, int]
    step: tuple[int, int]  # between blocks there
    mask: Array | None = None


@sized_cache(lambda runs: 300 * len(runs))
def _runs(axis: Axis, process: int) -> tuple[tuple[int, int, int, int, int], ...]:
    """Return runs of equal blocks of one process: the first index here, there, how many, how long, how far apart."""
    if axis.nprocs == 1:
        return ((0, 0, 1, axis.extent, 0),) if axis.extent else ()
    starts, stops = (each.tolist() for each in axis.blocks(process))
    step = axis.block * axis.nprocs
    runs: list[tuple[int, int, int, int, int]] = []
    here = 0
    for start, stop in zip(starts, stops, strict=True):
        length = stop - start
        if runs and runs[-1][3] == length and runs[-1][1] + runs[-1][2] * step == start:
            at, there, count, *_ = runs[-1]
            runs[-1] = at, there, count + 1, length, step
        else:
            runs.append((here, start, 1, length, step))
        here += length
    return tuple(runs)


class CopiedParts:
    """How a matrix gets from its layout into shared panels and back: planned once. Making one is local.

    Args:
        d: its layout.
        rank: this rank.
        lower: only its lower triangle or trapezoid is moved.
        strictly: nor is its diagonal moved out.
    """

    def __init__(
        self, d: MatrixDescriptor, rank: int, *, lower: bool = False, strictly: bool = False
    ) -> None:
        self._strictly = int(strictly)
        self._in: list[_BlockRun] = []
        self._out: list[_BlockRun] = []
        if rank >= d.grid.size or not all(d.shape):
            return
        self._d, self._coords = d, d.grid.coords(rank)
        rows, cols = d.shape
        if not lower:
            self._in = self._out = list(self._pieces(0, rows, 0, cols))
            return
        for first in range(0, min(rows, cols), _STRIP):
            stop = min(first + _STRIP, cols)
            end = min(stop, rows)
            self._in += self._pieces(first, rows, first, stop)
            self._out += self._pieces(first, end, first, stop, cut=True)
            self._out += self._pieces(end, rows, first, stop)

    def _pieces(
        self, top: int, bottom: int, left: int, right: int, *, cut: bool = False
    ) -> Iterator[_BlockRun]:
        """Yield the pieces of rows ``top`` to ``bottom`` and columns ``left`` to ``right``."""
        (p, q), d = self._coords, self._d
        down, across = d.rows.local_window(p, top, bottom), d.cols.local_window(q, left, right)
        rows, cols = d.rows.window(top, bottom), d.cols.window(left, right)
        for (i, x, m, mb, over), (j, y, n, nb, beyond) in itertools.product(_runs(rows, p), _runs(cols, q)):
            here = (
                slice(down.start + i, down.start + i + m * mb),
                slice(across.start + j, across.start + j + n * nb),
            )
            mask = None
            if cut:
                apart = rows.globals(p)[i : i + m * mb, None] + top - cols.globals(q)[j : j + n * nb] - left
                inside = apart >= self._strictly
                if not inside.any():
                    continue
                mask = None if inside.all() else inside.reshape(m, mb, n, nb)
            yield _BlockRun(here, (m, mb, n, nb), (x + top, y + left), (over, beyond), mask)

    def into(self, local: Array, whole: Array, *, conjugate: bool = False, exactly: bool = False) -> None:
        """Copy this rank's part into the shared array; ``exactly``: nothing beyond the part is written. Local."""
        for piece in self._out if exactly else self._in:
            here, there = _both(local, whole, piece)
            where = True if piece.mask is None else piece.mask
            if conjugate:
                np.conjugate(here, out=there, where=where)
            else:
                np.copyto(there, here, where=where)

    def back(self, local: Array, whole: Array, *, conjugate: bool = False) -> None:
        """Copy this rank's part out of the shared array. Local."""
        for piece in self._out:
            here, there = _both(local, whole, piece)
            where = True if piece.mask is None else piece.mask
            np.copyto(here, there.conj() if conjugate else there, where=where)


def _both(local: Array, whole: Array, piece: _BlockRun) -> tuple[Array, Array]:
    """Return a piece in the local array, and in the whole one, as views with an axis of blocks and one inside them."""
    here = local[piece.here].reshape(piece.shape)
    i, j = piece.at
    down, across = whole.strides
    strides = piece.step[0] * down, down, piece.step[1] * across, across
    there = strided(whole[i:, j:], piece.shape, strides)
    return here, there
