# SPDX-License-Identifier: Apache-2.0
"""Copies between a rank's part of a block-cyclic matrix and the whole matrix in memory that ranks share."""

from __future__ import annotations

from typing import Any

from ...layout import MatrixDescriptor, Trapezoid
from ...layout.axis import Axis
from ...layout.intersection import Piece, Stretch, copy, intersect
from ...layout.pieces import pieces

__all__ = ["STRIP", "CopiedParts"]

Array = Any
Window = tuple[slice, slice]
STRIP = 128  # columns at a time of a triangle that is copied


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
        self._parts: list[tuple[Window, Window, Piece, Array]] = []  # where here and there, and a mask
        if rank >= d.grid.size or 0 in d.local_shape(rank):
            return
        process, axes, indices = d.grid.coords(rank), (d.rows, d.cols), d.global_indices(rank)
        strips = range(STRIP, d.shape[1] + STRIP, STRIP)
        ends = indices[1].searchsorted(strips).tolist()
        moved_out = Trapezoid("L", -int(strictly))
        for piece in pieces(Trapezoid("L") if lower else None, *indices, ends):
            rows, cols = (of[here] for of, here in zip(indices, piece.here, strict=True))
            there = slice(int(rows[0]), int(rows[-1]) + 1), slice(int(cols[0]), int(cols[-1]) + 1)
            shared = map(_within, axes, process, there)
            mask = moved_out.mask(rows, cols) if piece.cut else None
            self._parts.append((piece.here, there, Piece(*shared), mask))

    def into(self, local: Array, whole: Array, *, conjugate: bool = False, exactly: bool = False) -> None:
        """Copy this rank's part into the shared array; ``exactly``: nothing beyond the part is written. Local."""
        for here, there, piece, mask in self._parts:
            copy(whole[there], local[here], piece, conjugate=conjugate, where=mask if exactly else None)

    def back(self, local: Array, whole: Array, *, conjugate: bool = False) -> None:
        """Copy this rank's part out of the shared array. Local."""
        for here, there, piece, mask in self._parts:
            copy(local[here], whole[there], piece.back, conjugate=conjugate, where=mask)


def _within(of: Axis, process: int, part: slice) -> tuple[Stretch, ...]:
    """Return where the indices of a process are among all indices of a part of an axis. Local."""
    return intersect(of.window(part.start, part.stop), process, Axis.whole(part.stop - part.start), 0)
