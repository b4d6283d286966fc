# SPDX-License-Identifier: Apache-2.0
"""Trapezoid: the part of a matrix on one side of a diagonal, as it lies in a local array. 0-based."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Trapezoid", "copy_part"]

_WIDTH, _FINEST = 256, 64  # columns at a time: wide where all belongs, narrow where the diagonal is

Indices = NDArray[np.int64]
Part = tuple[slice, slice, "NDArray[np.bool_] | None"]


@dataclass(frozen=True, slots=True)
class Trapezoid:
    """The elements (i, j) with ``j - i <= diagonal`` ("L") or ``j - i >= diagonal`` ("U"). Local.

    Attributes:
        uplo: "L" or "U".
        diagonal: the last (first) diagonal that belongs to it; 0 is the main diagonal, positive ones lie above it.
    """

    uplo: str
    diagonal: int = 0

    @classmethod
    def of_shape(cls, shape: tuple[int, int], uplo: str, diag: str = "N") -> Trapezoid:
        """Return what ScaLAPACK's p?trmr2d moves of a matrix. Local.

        A tall upper trapezoid ends, and a wide lower one begins, so that its diagonal ends in the last corner.

        Args:
            shape: rows and columns.
            uplo: "L" or "U".
            diag: "U" leaves the diagonal out.

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
        """Return which of these elements belong to it, as a rows × cols array in F order."""
        apart: Indices = (cols[:, None] - rows).T
        return apart <= self.diagonal if self.uplo == "L" else apart >= self.diagonal

    def parts(
        self, rows: Indices, cols: Indices, width: int = _WIDTH, finest: int = _FINEST
    ) -> Iterator[Part]:
        """Return what a local array has of it: ``(row slice, column slice, mask)``, ``width`` columns at a time.

        A mask of None means that all of it belongs. Masked parts hold all of the diagonal, and are ``finest`` columns
        wide at most. Of some columns what is not masked comes first.

        Args:
            rows: global index of each local row, ascending.
            cols: global index of each local column, ascending.
            width: columns of the largest parts.
            finest: columns of those that are masked.
        """
        edges = cols - self.diagonal
        first, after = (np.searchsorted(rows, edges, side) for side in ("left", "right"))

        def crossed(down: slice, across: slice, width: int) -> Iterator[Part]:
            """Yield the parts of rows that the diagonal crosses somewhere in these columns."""
            for at in range(across.start, across.stop, width):
                here = slice(at, min(at + width, across.stop))
                low, high = int(first[at]), int(after[here.stop - 1])
                whole = slice(high, down.stop) if self.uplo == "L" else slice(down.start, low)
                if whole.stop > whole.start:
                    yield whole, here, None
                if high == low:
                    continue
                if here.stop - at <= finest:
                    yield slice(low, high), here, self.mask(rows[low:high], cols[here])
                else:
                    yield from crossed(slice(low, high), here, max(finest, (here.stop - at) // 4))

        return crossed(slice(0, len(rows)), slice(0, len(cols)), width)


def copy_part(
    dst: NDArray[np.generic], src: NDArray[np.generic], part: Trapezoid, rows: Indices, cols: Indices
) -> None:
    """Copy the elements of ``part`` from one local array to another that lies the same way. Local.

    Args:
        dst, src: local arrays of one shape.
        part: what to copy; everything else of ``dst`` keeps its values.
        rows, cols: global indices of their rows and columns, ascending.
    """
    for down, across, mask in part.parts(rows, cols):
        np.copyto(dst[down, across], src[down, across], where=True if mask is None else mask)
