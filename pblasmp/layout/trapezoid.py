# SPDX-License-Identifier: Apache-2.0
"""Trapezoid: the part of a matrix on one side of a diagonal, within a local array. 0-based."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Trapezoid", "copy_part"]

_FINEST = 64  # columns at the diagonal: smaller tiles waste less work but slow BLAS down

Indices = NDArray[np.int64]
Part = tuple[slice, slice, bool]


@dataclass(frozen=True, slots=True)
class Trapezoid:
    """The elements (i, j) with ``j - i <= diagonal`` ("L") or ``j - i >= diagonal`` ("U"). Local.

    Attributes:
        uplo: "L" or "U".
        diagonal: the last (first) diagonal that belongs to it; 0 is the main diagonal, positive ones are above it.
    """

    uplo: str
    diagonal: int = 0

    @classmethod
    def of_shape(cls, shape: tuple[int, int], uplo: str, diag: str = "N") -> Trapezoid:
        """Return the part of a matrix that ScaLAPACK's p?trmr2d moves. Local.

        A tall upper trapezoid ends, and a wide lower one begins, so that its diagonal ends in the last corner.

        Args:
            shape: rows and columns.
            uplo: "L" or "U".
            diag: "U" leaves out the diagonal.

        Source: ScaLAPACK REDIST, p?trmr2d (the functions insidemat of its four types).
        """
        rows, cols = shape
        inward = int(diag == "U")
        if uplo == "L":
            return cls("L", max(cols - rows, 0) - inward)
        return cls("U", min(cols - rows, 0) + inward)

    @property
    def T(self) -> Trapezoid:  # noqa: N802
        """The same elements of the transposed matrix."""
        return Trapezoid("L" if self.uplo == "U" else "U", -self.diagonal)

    @property
    def rest(self) -> Trapezoid:
        """All the other elements."""
        return Trapezoid("U", self.diagonal + 1) if self.uplo == "L" else Trapezoid("L", self.diagonal - 1)

    def mask(self, rows: Indices, cols: Indices) -> NDArray[np.bool_]:
        """Return which elements of these rows and columns belong to it, as a rows × cols array in F order."""
        apart: Indices = (cols[:, None] - rows).T
        return apart <= self.diagonal if self.uplo == "L" else apart >= self.diagonal

    def parts(self, rows: Indices, cols: Indices, finest: int = _FINEST) -> Iterator[Part]:
        """Yield the parts of a local array in it, as large as possible: ``(row slice, column slice, cut)``.

        A part belongs to it completely, unless it is cut: cut parts contain the diagonal, and are at most ``finest``
        columns wide. For given columns, the part that is not cut comes first. Columns are halved until no part is cut,
        or they are that narrow.

        Args:
            rows: global index of each local row, ascending.
            cols: global index of each local column, ascending.
            finest: columns of the parts that are cut.
        """
        edges = cols - self.diagonal
        first, after = (np.searchsorted(rows, edges, side) for side in ("left", "right"))

        def cut(down: slice, across: slice) -> Iterator[Part]:
            """Yield the parts of some columns; ``down`` are the rows that are not done yet."""
            low, high = int(first[across.start]), int(after[across.stop - 1])  # the diagonal is between these
            whole = slice(high, down.stop) if self.uplo == "L" else slice(down.start, low)
            if whole.stop > whole.start:
                yield whole, across, False
            crossed = slice(low, high)
            if low < high and across.stop - across.start <= finest:
                yield crossed, across, True
            elif low < high:
                middle = (across.start + across.stop + 1) // 2
                yield from cut(crossed, slice(across.start, middle))
                yield from cut(crossed, slice(middle, across.stop))

        return cut(slice(0, len(rows)), slice(0, len(cols))) if len(cols) else iter(())


def copy_part(
    dst: NDArray[np.generic], src: NDArray[np.generic], part: Trapezoid, rows: Indices, cols: Indices
) -> None:
    """Copy the elements of ``part`` from one local array to another with the same layout. Local.

    Args:
        dst, src: local arrays of one shape.
        part: what to copy; everything else of ``dst`` keeps its values.
        rows, cols: global indices of their rows and columns, ascending.
    """
    for down, across, cut in part.parts(rows, cols):
        where = part.mask(rows[down], cols[across]) if cut else True
        np.copyto(dst[down, across], src[down, across], where=where)
