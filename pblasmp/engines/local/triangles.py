# SPDX-License-Identifier: Apache-2.0
"""Local products of slabs: of whole slabs, with a triangular left slab, or for one triangle of the result.

Each computes ``target = alpha left right + beta target`` where it applies. Elements that may not be read have no
effect, even if they are NaN; elements that may not be written keep their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...layout import Trapezoid
from ...layout.pieces import LocalPart, Rectangle, even_runs, pieces
from ..arrays import scale
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
        operations.concurrently(tasks, work=[_size(band) for band in bands])

    def _multiply(self, operations: Operations, g: Gemm, band: Iterable[_Cut]) -> None:
        for cut in band:
            along, across = cut.piece.here
            factors = g.left[across, along]
            if cut.mask is not None:
                factors = self._masked(operations, factors, cut.mask, cut.diagonal)
            old = g.c[across] if g.c is not None and cut.first else None
            beta = g.beta if cut.first else 1
            operations.gemm(g.alpha, factors, g.right[along], beta, g.target[across], g.compute, old)

    def _cut(self, operations: Operations, start: int, width: int) -> tuple[list[list[_Cut]], list[slice]]:
        """Return the parts for some indices of k by bands, and the rows without any; both are made once."""
        if (start, width) not in self._bands:
            ks = np.arange(start, start + width) if self._ks is None else self._ks
            places = operations.xp.asarray(self._rows), operations.xp.asarray(ks)
            count = len(self._rows)
            step = operations.band or max(1, count)
            ends = [min(at + step, count) for at in range(0, count, step)]
            bands: list[list[_Cut]] = [[] for _ in ends]
            begun = bytearray(count)  # whether a row has had a part: all rows of a part, or none
            finest = _finest(operations, width)
            for piece in pieces(self._part.T, ks, self._rows, ends, finest):
                along, across = piece.here
                mask = on_diagonal = None
                if piece.cut:
                    down, over = places[0][across], places[1][along]
                    mask = self._part.T.mask(over, down).T  # in C order
                    on_diagonal = None if self._diagonal == "stored" else down[:, None] == over
                bands[piece.j // step].append(_Cut(piece, mask, on_diagonal, first=not begun[piece.j]))
                begun[across] = b"\1" * (piece.j1 - piece.j)
            first = (cut.piece.here[1] for band in bands for cut in band if cut.first)
            some = sorted(filter(None, bands), key=lambda band: -_size(band))
            self._bands[start, width] = some, _gaps(first, count)
        return self._bands[start, width]

    def _masked(self, operations: Operations, factors: Array, mask: Array, on_diagonal: Array) -> Array:
        xp = operations.xp
        masked = xp.where(mask, factors, factors.dtype.type(0))
        if self._diagonal == "ones":
            masked = xp.where(on_diagonal, factors.dtype.type(1), masked)
        elif self._diagonal == "real":
            masked = xp.where(on_diagonal, masked.real, masked).astype(factors.dtype, copy=False)
        return masked


class _Cut(NamedTuple):
    """A part of the left slab, as k × rows: which elements count, which are on the main diagonal.

    ``first``: nothing has been added to these rows before.
    """

    piece: Rectangle
    mask: Array
    diagonal: Array
    first: bool


def _size(band: Iterable[_Cut]) -> int:
    """Return how many elements of the left slab a band has."""
    return sum(cut.piece.size for cut in band)


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
        work = [run[0].size * len(run) for run in runs]
        operations.concurrently(tasks, follows=g.follows, work=work)

    def _multiply(self, operations: Operations, g: Gemm, run: Sequence[Rectangle]) -> None:
        """Multiply pieces of one size."""
        c, factors, views = None if g.beta == 0 else g.c, [], []
        for piece in run:
            down, across = piece.here
            factors.append((g.left[down], g.right[:, across]))
            views.append((g.target[down, across], None if c is None else c[down, across]))
        if not run[0].cut:
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
        for piece, (view, old), product in zip(run, views, products, strict=True):
            part = self._local.tile(piece)
            operations.add(view, 1, product, g.beta, view if old is None else old, part, conjugate=False)

    def _runs(self, operations: Operations, item: int) -> list[list[Rectangle]]:
        """Return the pieces, those together that one call multiplies if the engine's can."""
        every, found = self._pieces(operations), list[list[Rectangle]]()
        if not operations.batches:
            return [[piece] for piece in every]
        for cut in (False, True):
            some = [piece for piece in every if piece.cut == cut]
            most = max(1, _TEMPORARY // (item * some[0].size)) if cut and some else None
            found += even_runs(some, most)
        return sorted(found, key=lambda run: -run[0].size * len(run))

    def _pieces(self, operations: Operations) -> list[Rectangle]:
        self._local.indices(operations.xp)  # made now, since tasks on several streams read them
        return self._local.pieces(_finest(operations, len(self._local.cols)))

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
        for piece in self._pieces(operations):
            here, part = piece.here, self._local.tile(piece)
            operations.add(d[here], 1, of(*here), beta, c[here], part, conjugate=False)
