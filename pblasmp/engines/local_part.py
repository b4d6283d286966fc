# SPDX-License-Identifier: Apache-2.0
"""LocalPart: the elements of a local array that are in a trapezoid of its matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..layout import Trapezoid

__all__ = ["LocalPart", "Tile", "even_runs"]

Array = Any  # numpy.ndarray or cupy.ndarray
Indices = NDArray[np.int64]
Thing = TypeVar("Thing")


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
        self._tiles: dict[int, list[Tile]] = {}
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

    def tiles(self, finest: int) -> list[Tile]:
        """Return the tiles that it consists of, the largest first; they are made once, including ``indices``. Local.

        Args:
            finest: columns of the tiles that are only partly inside; such tiles are not divided further.
        """
        if self._is_tile:
            return [(slice(None), slice(None), self)]
        if finest not in self._tiles:
            tiles = self._tiles[finest] = []
            for down, across, cut in self.part.parts(self.rows, self.cols, finest):
                tile = None
                if cut:
                    rows, cols = self.rows[down], self.cols[across]
                    tile = LocalPart(self.part, rows, cols, hermitian=self.hermitian)
                    tile._is_tile = True
                    if self._indices is not None:
                        tile._indices = self._indices[0][down], self._indices[1][:, across]
                tiles.append((down, across, tile))
            tiles.sort(key=lambda tile: (tile[0].start - tile[0].stop) * (tile[1].stop - tile[1].start))
        return self._tiles[finest]

    def indices(self, xp: Any) -> tuple[Array, Array]:
        """Return the global indices of rows (as a column) and columns (as a row), made once. Local."""
        if self._indices is None:
            self._indices = xp.asarray(self.rows[:, None]), xp.asarray(self.cols[None, :])
        return self._indices


Tile = tuple[slice, slice, "LocalPart | None"]
"""Rows, columns, and which elements of them are inside (None: all)."""


def even_runs(
    things: Sequence[Thing], about: Callable[[Thing], tuple[Any, tuple[int, int]]], most: int | None = None
) -> Iterator[list[Thing]]:
    """Yield runs of adjacent things that are alike and at equal distances, so that one call computes them all. Local.

    Args:
        things: in order.
        about: returns what those of a run have in common, and where a thing begins: row and column.
        most: how many a run may have, at most.
    """
    run: list[Thing] = []
    kind, at = None, [(0, 0)]
    for thing in things:
        found, place = about(thing)
        even = len(run) < 2 or all(
            here - last == second - first
            for here, last, second, first in zip(place, at[-1], at[1], at[0], strict=True)
        )
        if run and (found != kind or not even or len(run) == most):
            yield run
            run = []
        if not run:
            kind, at = found, []
        run.append(thing)
        at.append(place)
    if run:
        yield run
