# SPDX-License-Identifier: Apache-2.0
"""Triangles, trapezoids, and a rank's part of one, cut into rectangles. Pure, 0-based.

The columns are cut into bands. The diagonal crosses some rows of a band; those beyond, on one side, are all inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .axis import Axis
from .descriptor import MatrixDescriptor
from .intersection import Piece, Stretch, copy, intersect

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
        """Return the part of a matrix that ScaLAPACK's p?trmr2d moves; ``diag`` "U" leaves out the diagonal. Local.

        A tall upper trapezoid ends, and a wide lower one begins, so that its diagonal ends in the last corner.

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
        edges, across = rows + self.diagonal, cols[:, None]
        inside: NDArray[np.bool_] = (across <= edges if self.uplo == "L" else across >= edges).T
        return inside


FINEST = 64  # columns at the diagonal: smaller tiles waste less work but slow BLAS down


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
    """Yield runs of adjacent pieces of one size at equal distances, so that one call computes up to ``most``. Local."""
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


Array = Any  # numpy.ndarray or cupy.ndarray
STRIP = 128  # columns at a time of a triangle that is copied


def write_inside(
    dst: Array,
    values: Callable[[tuple[slice, slice]], Any],
    part: Trapezoid | None,
    rows: Indices,
    cols: Indices,
    xp: Any = np,
) -> None:
    """Write into the elements of ``part`` of a local array, None for all; the others keep their values. Local.

    ``values`` returns what a piece becomes, by its rows and columns: as many elements, or a number. Global indices of
    rows and columns are ascending.
    """
    ends = [*range(STRIP, len(cols), STRIP), len(cols)]
    for piece in pieces(part, rows, cols, ends, FINEST):
        down, across = here = piece.here
        found = values(here)
        if part is not None and piece.cut:
            found = xp.where(xp.asarray(part.mask(rows[down], cols[across])), found, dst[here])
        dst[here] = found


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

        Tiles of ``finest`` columns that are only partly inside are not divided further.
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


Window = tuple[slice, slice]


class CopiedParts:
    """How a matrix gets from its layout into shared panels and back: planned once. Making one is local.

    ``lower``: only its lower triangle or trapezoid is moved; ``strictly``: nor is its diagonal moved out.
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
