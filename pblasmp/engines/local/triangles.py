# SPDX-License-Identifier: Apache-2.0
"""Local products of slabs: of whole slabs, with a triangular left slab, or for one triangle of the result.

Each computes ``target = alpha left right + beta target`` where it applies. Elements that may not be read have no
effect, even if they are NaN; elements that may not be written keep their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...layout import Trapezoid
from ..arrays import scale
from ..local_part import LocalPart, Tile, even_runs
from ..protocol import Operations

__all__ = ["Diagonal", "Gemm", "Kernel", "LeftPart", "ResultPart", "whole"]

_TILES = 64  # most tiles of a diagonal: queueing more would take longer than computing them
_TEMPORARY = 64 << 20  # bytes of the tiles of a diagonal that are multiplied at once

Array = Any  # numpy.ndarray or cupy.ndarray
Indices = NDArray[np.int64]
Diagonal = Literal["stored", "ones", "real"]


class Gemm(NamedTuple):
    """``target = alpha left right + beta c``, where it applies.

    Attributes:
        alpha, beta: scalars.
        left, right: slabs, rows × k and k × columns.
        target: the array to write.
        start: global index where k begins.
        compute: the type in which products are summed.
        c: like ``target``, which is the default.
        follows: another product of the same parts is added to the same target next.
    """

    alpha: complex
    left: Array
    right: Array
    beta: complex
    target: Array
    start: int = 0
    compute: str | None = None
    c: Array | None = None
    follows: bool = False


Kernel = Callable[[Operations, Gemm], None]
"""Computes what applies of a product of slabs, by an engine's operations."""


def whole(operations: Operations, g: Gemm) -> None:
    """Multiply everything."""
    operations.gemm(g.alpha, g.left, g.right, g.beta, g.target, g.compute, g.c)


def _finest(operations: Operations, extent: int) -> int:
    """Return the columns of the tiles on a diagonal of length ``extent``. Local."""
    return max(operations.tile, -(-extent // _TILES))


class LeftPart:
    """The left slab counts only inside a trapezoid of its matrix.

    Args:
        part: in terms of the slab's rows and of k.
        rows: global index of each row of the slab, ascending.
        diagonal: the main diagonal is as stored, ones, or the real parts of the stored values.
        ks: global index of each column of the slab, ascending; None: they are contiguous.
    """

    def __init__(
        self, part: Trapezoid, rows: Indices, diagonal: Diagonal = "stored", ks: Indices | None = None
    ) -> None:
        self._part, self._rows, self._diagonal, self._ks = part, rows, diagonal, ks
        self._bands: dict[tuple[int, int], tuple[list[list[_Cut]], list[slice]]] = {}

    def __call__(self, operations: Operations, g: Gemm) -> None:
        """Multiply the parts that count completely, and the tiles on the diagonal, in bands of rows."""
        bands, rest = self._cut(operations, g.start, g.left.shape[1])
        for across in rest:
            if g.beta != 0 and g.c is not None:
                operations.copy_where(g.target[across], g.c[across], None)
            if g.beta != 1:
                scale(g.target[across], g.beta)
        tasks = [partial(self._multiply, operations, g, band) for band in bands]
        operations.concurrently(tasks, work=[sum(map(_Cut.elements, band)) for band in bands])

    def _multiply(self, operations: Operations, g: Gemm, band: Iterable[_Cut]) -> None:
        for cut in band:
            factors = g.left[cut.across, cut.along]
            if cut.mask is not None:
                factors = self._masked(operations, factors, cut.mask, cut.diagonal)
            old = g.c[cut.across] if g.c is not None and cut.first else None
            beta = g.beta if cut.first else 1
            operations.gemm(g.alpha, factors, g.right[cut.along], beta, g.target[cut.across], g.compute, old)

    def _cut(self, operations: Operations, start: int, width: int) -> tuple[list[list[_Cut]], list[slice]]:
        """Return the parts for some indices of k by bands, and the rows without any; both are made once."""
        if (start, width) not in self._bands:
            ks = np.arange(start, start + width) if self._ks is None else self._ks
            places = operations.xp.asarray(self._rows), operations.xp.asarray(ks)
            count = len(self._rows)
            step = operations.band or max(1, count)
            bands = [
                list(self._band(operations, at, min(at + step, count), ks, places))
                for at in range(0, count, step)
            ]
            first = (cut.across for band in bands for cut in band if cut.first)
            some = sorted(filter(None, bands), key=lambda band: -sum(map(_Cut.elements, band)))
            self._bands[start, width] = some, _gaps(first, count)
        return self._bands[start, width]

    def _band(
        self, operations: Operations, top: int, bottom: int, ks: Indices, places: tuple[Array, Array]
    ) -> Iterator[_Cut]:
        """Yield the parts of some rows. ``places`` are the indices of rows and k on the device."""
        begun = bytearray(bottom - top)  # whether a row has had a part: all rows of a part, or none
        finest = _finest(operations, len(ks))
        for along, rows, cut in self._part.T.parts(ks, self._rows[top:bottom], finest):
            across = slice(top + rows.start, top + rows.stop)
            mask = on_diagonal = None
            if cut:
                down, over = places[0][across], places[1][along]
                mask = self._part.T.mask(over, down).T  # in C order
                on_diagonal = None if self._diagonal == "stored" else down[:, None] == over
            yield _Cut(along, across, mask, on_diagonal, first=not begun[rows.start])
            begun[rows] = b"\1" * (rows.stop - rows.start)

    def _masked(self, operations: Operations, factors: Array, mask: Array, on_diagonal: Array) -> Array:
        xp = operations.xp
        masked = xp.where(mask, factors, factors.dtype.type(0))
        if self._diagonal == "ones":
            masked = xp.where(on_diagonal, factors.dtype.type(1), masked)
        elif self._diagonal == "real":
            masked = xp.where(on_diagonal, masked.real, masked).astype(factors.dtype, copy=False)
        return masked


class _Cut(NamedTuple):
    """A part of the left slab: indices of k, rows, which elements count, which are on the main diagonal.

    ``first``: nothing has been added to these rows before.
    """

    along: slice
    across: slice
    mask: Array
    diagonal: Array
    first: bool

    def elements(self) -> int:
        """Return how many elements of the left slab it has."""
        return int((self.along.stop - self.along.start) * (self.across.stop - self.across.start))


def _gaps(parts: Iterable[slice], extent: int) -> list[slice]:
    """Return the gaps between disjoint parts of ``extent`` indices."""
    gaps, at = [], 0
    for start, stop in sorted((part.start, part.stop) for part in parts):
        if at < start:
            gaps.append(slice(at, start))
        at = stop
    return [*gaps, slice(at, extent)] if at < extent else gaps


class ResultPart:
    """Only a trapezoid of the result is computed.

    Args:
        part: what is computed.
        rows, cols: global index of each row and column of the local result, ascending.
        hermitian: the main diagonal is real.
    """

    def __init__(self, part: Trapezoid, rows: Indices, cols: Indices, *, hermitian: bool) -> None:
        self._local = LocalPart(part, rows, cols, hermitian=hermitian)

    def __call__(self, operations: Operations, g: Gemm) -> None:
        """Multiply: the parts without a mask in place, the tiles on the diagonal in temporaries."""
        runs = self._runs(operations, g.target.dtype.itemsize)
        tasks = [partial(self._multiply, operations, g, run) for run in runs]
        operations.concurrently(tasks, follows=g.follows, work=[sum(map(_elements, run)) for run in runs])

    @staticmethod
    def _multiply(operations: Operations, g: Gemm, run: Sequence[Tile]) -> None:
        """Multiply tiles of one size."""
        c, factors, views = None if g.beta == 0 else g.c, [], []
        for down, across, _ in run:
            factors.append((g.left[down], g.right[:, across]))
            views.append((g.target[down, across], None if c is None else c[down, across]))
        if run[0][2] is None:
            parts = [(*both, *view) for both, view in zip(factors, views, strict=True)]
            operations.gemms(g.alpha, parts, g.beta, g.compute)
            return
        first = views[0][0]
        by_columns = first.strides[0] < first.strides[1]
        shape = first.shape[::-1] if by_columns else first.shape
        memory = operations.xp.empty((len(run), *shape), first.dtype)
        products = [each.T if by_columns else each for each in memory]
        parts = [(*both, product, None) for both, product in zip(factors, products, strict=True)]
        operations.gemms(g.alpha, parts, 0, g.compute)
        for (_, _, part), (view, old), product in zip(run, views, products, strict=True):
            operations.add(view, 1, product, g.beta, view if old is None else old, part, conjugate=False)

    def _runs(self, operations: Operations, item: int) -> list[list[Tile]]:
        """Return the tiles, those together that one call multiplies if the engine's can."""
        tiles, found = self._tiles(operations), list[list[Tile]]()
        if not operations.batches:
            return [[tile] for tile in tiles]
        for cut in (False, True):
            some = [tile for tile in tiles if (tile[2] is not None) == cut]
            most = max(1, _TEMPORARY // (item * _elements(some[0]))) if cut and some else None
            found += even_runs(some, _about, most)
        return sorted(found, key=lambda run: -sum(map(_elements, run)))

    def _tiles(self, operations: Operations) -> list[Tile]:
        self._local.indices(operations.xp)  # made now, since tasks on several streams read them
        return self._local.tiles(_finest(operations, len(self._local.cols)))

    def write(
        self,
        operations: Operations,
        beta: complex,
        c: Array | None,
        d: Array,
        of: Callable[[slice, slice], Array],
    ) -> None:
        """Write into D what ``of`` returns for given rows and columns, plus beta C. Local.

        Args:
            operations: the engine's.
            beta: scales C.
            c: like ``d``; may be ``d``, or None for that.
            d: the local result.
            of: returns the values to add.
        """
        c = d if c is None else c
        for down, across, part in self._tiles(operations):
            added = of(down, across)
            operations.add(d[down, across], 1, added, beta, c[down, across], part, conjugate=False)


def _elements(tile: Tile) -> int:
    down, across, _ = tile
    return int((down.stop - down.start) * (across.stop - across.start))


def _about(tile: Tile) -> tuple[tuple[int, int], tuple[int, int]]:
    down, across, _ = tile
    return (down.stop - down.start, across.stop - across.start), (down.start, across.start)
