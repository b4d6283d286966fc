# SPDX-License-Identifier: Apache-2.0
"""Products and level-3 routines as sums of products of slabs, and how a rank multiplies slabs.

``trmm`` has a triangular left slab; ``symm`` and ``hemm`` use the stored triangle and the rest of its transpose; the
rank-k updates compute one triangle of the result. If the triangular matrix is to the right of B, everything is
transposed.

A kernel computes ``target = alpha left right + beta target`` where it applies: of whole slabs, with a triangular left
slab, or for one triangle of the result. Elements that may not be read have no effect, even if they are NaN; elements
that may not be written keep their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...layout import Level3Problem, MatmulProblem, MatrixDescriptor, Trapezoid
from ...layout.caches import Hashed
from ...layout.pieces import LocalPart, Rectangle, even_runs, pieces
from ..arrays import scale
from ..operations import Operations
from ..protocol import Engine
from .panels import Needs, Operand, needs

THIN = 16
"""A matrix with so many times as many columns as what it is multiplied by: reading it takes the time, and queueing."""
TILES = 64  # most tiles of a diagonal: queueing more would take longer than computing them
_TEMPORARY = 64 << 20  # bytes of the tiles of a diagonal that are multiplied at once

Array = Any  # numpy.ndarray or cupy.ndarray
Indices = NDArray[np.int64]
Diagonal = Literal["stored", "ones", "real"]


class Gemm(NamedTuple):
    """``target = alpha left right + beta c``, where it applies.

    Attributes:
        left, right: slabs, rows × k and k × columns.
        target: the array to write.
        start: global index where k begins.
        compute: the type in which products are summed.
        c: like ``target``, which is the default.
        follows: another product of the same parts is added to the same target next.
        row: of all of this rank's rows, the one that these begin with.
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
    row: int = 0


Kernel = Callable[[Operations, Gemm], None]
"""Computes what applies of a product of slabs, by an engine's operations."""


def whole(operations: Operations, g: Gemm) -> None:
    """Multiply everything."""
    operations.gemm(g.alpha, g.left, g.right, g.beta, g.target, g.compute, g.c)


def _finest(operations: Operations, extent: int) -> int:
    """Return the columns of the tiles on a diagonal of length ``extent``. Local."""
    return max(operations.tile, -(-extent // TILES))


_Place = tuple[int, int, int, int]
"""Of a left slab: among the rank's rows the first, and how many; of k the first index, and how many."""


class LeftPart:
    """The left slab counts only inside a trapezoid of its matrix.

    Args:
        part: in terms of the slab's rows and of k.
        rows: global index of each of the rank's rows, ascending; a slab may have some that are next to each other.
        diagonal: the main diagonal is as stored, ones, or the real parts of the stored values.
        ks: global index of each column of the slab, ascending; None: they are contiguous.
    """

    def __init__(
        self, part: Trapezoid, rows: Indices, diagonal: Diagonal = "stored", ks: Indices | None = None
    ) -> None:
        self._part, self._rows, self._diagonal, self._ks = part, rows, diagonal, ks
        self._bands: dict[tuple[int, ...], tuple[list[list[_Cut]], list[slice]]] = {}
        self._runs: dict[_Place, list[Array]] = {}

    def __call__(self, operations: Operations, g: Gemm) -> None:
        """Multiply the parts that count completely, and the tiles on the diagonal, in bands of rows."""
        place = g.row, len(g.left), g.start, g.left.shape[1]
        runs = partial(self._runs_of, operations, place)
        if operations.multiply_part(g, runs, self._diagonal):
            return
        coarser = operations.coarser if g.right.shape[1] * THIN <= g.left.shape[1] else 1
        bands, rest = self._cut(operations, place, coarser)
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

    def _cut(
        self, operations: Operations, place: _Place, coarser: int
    ) -> tuple[list[list[_Cut]], list[slice]]:
        """Return the parts of a slab by bands, and the rows without any; both are made once."""
        key = (*place, coarser)
        if key not in self._bands:
            rows, ks = self._indices(place)
            places = operations.xp.asarray(rows), operations.xp.asarray(ks)
            count, width = len(rows), len(ks)
            step = operations.band * coarser or max(1, count)
            ends = [min(at + step, count) for at in range(0, count, step)]
            bands: list[list[_Cut]] = [[] for _ in ends]
            begun = bytearray(count)  # whether a row has had a part: all rows of a part, or none
            finest = _finest(operations, width) * coarser
            for piece in pieces(self._part.T, ks, rows, ends, finest):
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
            self._bands[key] = some, _gaps(first, count)
        return self._bands[key]

    def _runs_of(self, operations: Operations, place: _Place) -> list[Array]:
        """Return for each row which elements count, from and to, and which is on the main diagonal, or -1."""
        if place not in self._runs:
            rows, ks = self._indices(place)
            limit = rows + self._part.diagonal
            begin, end = np.zeros_like(limit), np.full_like(limit, len(ks))
            if self._part.uplo == "L":
                end = np.searchsorted(ks, limit, "right")
            else:
                begin = np.searchsorted(ks, limit, "left")
            own = np.searchsorted(ks, rows, "left")
            here = (own >= begin) & (own < end)
            here[here] = ks[own[here]] == rows[here]
            found = begin, end, np.where(here, own, -1)
            self._runs[place] = [operations.xp.asarray(each.astype(np.int32)) for each in found]
        return self._runs[place]

    def _indices(self, place: _Place) -> tuple[Indices, Indices]:
        """Return the global indices of a slab's rows and columns."""
        row, count, start, width = place
        return self._rows[row : row + count], np.arange(
            start, start + width
        ) if self._ks is None else self._ks

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
            c: like ``d``; may be ``d``, or None for that.
            d: the local result.
            of: returns the values to add.
        """
        c = d if c is None else c
        for piece in self._pieces(operations):
            here, part = piece.here, self._local.tile(piece)
            operations.add(d[here], 1, of(*here), beta, c[here], part, conjugate=False)


@dataclass(frozen=True)
class Term:
    """``alpha left right`` of a sum of products; ``left`` and ``right`` number the operands."""

    alpha: complex
    left: int
    right: int
    multiply: Kernel = whole


@dataclass(frozen=True)
class Slabs:
    """D as a sum of products of slabs.

    Attributes:
        d: its descriptor.
        k: the extent of the summation, the same for all terms.
        operands: each as outer × k; outer is D's rows for a left operand, D's columns for a right one.
        terms: the products to add up.
        part: the part of D that is written; None for all.
        turned: the terms are those of D's transpose, which ``d`` describes.
        in_place: D may be B.
        backwards: panels begin with the last indices of k.
    """

    d: MatrixDescriptor
    k: int
    operands: tuple[Operand, ...]
    terms: tuple[Term, ...]
    part: Trapezoid | None = None
    turned: bool = False
    in_place: bool = False
    backwards: bool = False


def matmul_slabs(p: MatmulProblem, alpha: complex, engine: Engine) -> Slabs:
    """Return a product as this rank computes it. Local."""
    size, dtype = engine.transport.size, engine.operations.slab_dtype
    conj = p.a.dtype.kind == "c"
    operands = (
        Operand(
            p.a, p.op_a != "N", conj and p.op_a == "C", needs(p.d, size, 0), p.d.rows, dtype(p.a.dtype), "a"
        ),
        Operand(
            p.b, p.op_b == "N", conj and p.op_b == "C", needs(p.d, size, 1), p.d.cols, dtype(p.b.dtype), "b"
        ),
    )
    return Slabs(p.d, p.k, operands, (Term(alpha, 0, 1),))


def triangle_of(p: Level3Problem) -> tuple[bool, bool, str]:
    """Return how the triangular A of trmm and trsm looks to the left of B or of its transpose. Local.

    Returns:
        Whether A is transposed, whether it is conjugated, and which triangle it then has.
    """
    flip = (p.op_a != "N") != (p.side == "R")
    return flip, p.op_a == "C" and p.d.dtype.kind == "c", "U" if (p.uplo == "L") == flip else "L"


@dataclass(frozen=True)
class SidedPart:
    """A part of A to the left of B, or of B's transpose: how A is transformed, and which part counts (None: all)."""

    flip: bool
    conjugate: bool
    part: Trapezoid | None = None
    diagonal: Diagonal = "stored"


def sided_parts(p: Level3Problem) -> tuple[SidedPart, ...]:
    """Return the parts whose products with B, added up, are those of trmm, symm and hemm. Local."""
    if p.traits.triangular:
        flip, conjugate, uplo = triangle_of(p)
        return (SidedPart(flip, conjugate, Trapezoid(uplo), "ones" if p.diag == "U" else "stored"),)
    stored, other = Trapezoid(p.uplo), Trapezoid(p.uplo, -1 if p.uplo == "L" else 1).T
    hermitian, turned = p.is_hermitian, p.side == "R"
    return (
        SidedPart(False, hermitian and turned, stored, "real" if hermitian else "stored"),
        SidedPart(True, hermitian and not turned, other),
    )


def routine_slabs(p: Level3Problem, alpha: complex, engine: Engine) -> Slabs:
    """Return any level-3 routine but solves and sums, as this rank computes it. Local."""
    return (_sided if p.traits.shape == "sided" else _updated)(p, alpha, engine)


def _sided(p: Level3Problem, alpha: complex, engine: Engine) -> Slabs:
    assert p.b is not None
    rank, size = engine.transport.rank, engine.transport.size
    dtype = engine.operations.slab_dtype(p.d.dtype)
    turned = p.side == "R"
    d = p.d.T if turned else p.d
    outer_rows = d.global_indices(rank)[0] if rank < d.grid.size else None

    # the first panel of the first one has all rows: that of a lower triangle, or backwards that of an upper one
    parts = sorted(
        [(part.uplo, part, x) for x in sided_parts(p) if (part := x.part)], key=lambda each: each[0]
    )
    lefts = (
        Operand(p.a, x.flip, x.conjugate, needs(d, size, 0), d.rows, dtype, "a", triangle=uplo)
        for uplo, _, x in parts
    )
    operands = (*lefts, Operand(p.b, not turned, False, needs(d, size, 1), d.cols, dtype, "b"))
    terms = tuple(
        Term(alpha, i, len(parts), LeftPart(part, outer_rows, x.diagonal))
        for i, (_, part, x) in enumerate(parts)
        if outer_rows is not None
    )
    return Slabs(
        d, d.shape[0], operands, terms or (Term(alpha, 0, len(parts)),),
        turned=turned, in_place=p.traits.triangular,
        backwards=p.traits.triangular and triangle_of(p)[2] == "U",  # large products first, while the rest arrives
    )  # fmt: skip


def _updated(p: Level3Problem, alpha: complex, engine: Engine) -> Slabs:
    rank, size = engine.transport.rank, engine.transport.size
    dtype = engine.operations.slab_dtype(p.d.dtype)
    d, part, hermitian = p.d, p.written, p.is_hermitian
    assert part is not None
    flip, conjugate = p.op_a != "N", p.op_a == "C" and hermitian
    x = [("a", p.a)] if p.b is None else [("a", p.a), ("b", p.b)]
    order = engine.operations.update_order
    lefts = [
        Operand(m, flip, conjugate, needs(d, size, 0), d.rows, dtype, name, order=order) for name, m in x
    ]
    rights = [
        Operand(m, flip, conjugate != hermitian, needs(d, size, 1), d.cols, dtype, name, order=order)
        for name, m in x
    ]
    multiply: Kernel = whole
    if rank < d.grid.size:
        multiply = ResultPart(part, *d.global_indices(rank), hermitian=hermitian)
    if p.b is None:
        operands, pairs = [*lefts, *rights], [(alpha, 0, 1)]
    elif p.traits.swept_twice:
        other = complex(alpha).conjugate() if hermitian else alpha
        operands, pairs = [*lefts, *rights], [(alpha, 0, 3), (other, 1, 2)]
    else:
        operands, pairs = [lefts[0], rights[1]], [(alpha, 0, 1)]
    unique, index = _merged(operands)
    terms = tuple(Term(factor, index[left], index[right], multiply) for factor, left, right in pairs)
    return Slabs(d, p.k, unique, terms, part)


def _merged(operands: list[Operand]) -> tuple[tuple[Operand, ...], list[int]]:
    """Merge operands that have the same slabs; return the merged ones, and the index of each operand among them.

    Left and right slabs are the same if D's rows are distributed like its columns.
    """
    unique: list[Operand] = []
    index = []
    for x in operands:
        like = next((i for i, y in enumerate(unique) if replace(x, needs=y.needs) == y), len(unique))
        if like == len(unique):
            unique.append(x)
        else:
            unique[like] = replace(x, needs=_both(unique[like].needs, x.needs))
        index.append(like)
    return tuple(unique), index


@lru_cache(16)
def _both(here: Needs, there: Needs) -> Needs:
    """Return which slabs each rank multiplies of two operands that are the same."""
    return Hashed(tuple(sorted({*pair[0], *pair[1]})) for pair in zip(here, there, strict=True))
