# SPDX-License-Identifier: Apache-2.0
"""Trapezoid: the part of a matrix on one side of a diagonal. 0-based."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Trapezoid"]

Indices = NDArray[np.int64]


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
