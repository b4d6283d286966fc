# SPDX-License-Identifier: Apache-2.0
"""LocalPart: the elements of a local array that are in a trapezoid of its matrix."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..layout import Trapezoid
from ..layout.pieces import Rectangle, pieces

__all__ = ["LocalPart"]

Array = Any  # numpy.ndarray or cupy.ndarray
Indices = NDArray[np.int64]


class LocalPart:
    """The elements of a local array that are in a trapezoid of its matrix. Local.

    Args:
        part: the trapezoid.
        rows, cols: global index of each row and column of the array, ascending.
        hermitian: the main diagonal is real: its imaginary parts are not read, and are written as 0.
    """

    def __init__(self, part: Trapezoid, rows: Indices, cols: Indices, *, hermitian: bool = False) -> None:
        self.part, self.rows, self.cols, self.hermitian = part, rows, cols, hermitian
        self._is_tile = False
        self._pieces: dict[int, list[Rectangle]] = {}
        self._tiles: dict[Rectangle, LocalPart] = {}
        self._indices: tuple[Array, Array] | None = None

    @cached_property
    def T(self) -> LocalPart:  # noqa: N802
        """The same elements of the transposed array."""
        turned = LocalPart(self.part.T, self.cols, self.rows, hermitian=self.hermitian)
        turned._is_tile = self._is_tile
        return turned

    @cached_property
    def mask(self) -> NDArray[np.bool_]:
        """Which elements of the array are inside."""
        return self.part.mask(self.rows, self.cols)

    @cached_property
    def real(self) -> NDArray[np.bool_] | None:
        """Which elements of the array are on the main diagonal, if that is real; otherwise None."""
        return self.rows[:, None] == self.cols if self.hermitian else None

    def pieces(self, finest: int) -> list[Rectangle]:
        """Return the pieces that it consists of, the largest first; they are found once. Local.

        Args:
            finest: columns of the pieces that are only partly inside; such tiles are not divided further.
        """
        if self._is_tile:
            return [Rectangle(0, len(self.rows), 0, len(self.cols), True)]
        if finest not in self._pieces:
            found = pieces(self.part, self.rows, self.cols, finest=finest)
            self._pieces[finest] = sorted(found, key=lambda piece: -piece.size)
        return self._pieces[finest]

    def tile(self, piece: Rectangle) -> LocalPart | None:
        """Return which elements of a piece are inside, None for all; made once, with the indices made so far. Local."""
        if self._is_tile:
            return self
        if piece.cut and piece not in self._tiles:
            down, across = piece.here
            tile = LocalPart(self.part, self.rows[down], self.cols[across], hermitian=self.hermitian)
            tile._is_tile = True
            if self._indices is not None:
                tile._indices = self._indices[0][down], self._indices[1][:, across]
            self._tiles[piece] = tile
        return self._tiles.get(piece)

    def indices(self, xp: Any) -> tuple[Array, Array]:
        """Return the global indices of rows (as a column) and columns (as a row), made once. Local."""
        if self._indices is None:
            self._indices = xp.asarray(self.rows[:, None]), xp.asarray(self.cols[None, :])
        return self._indices
