# SPDX-License-Identifier: Apache-2.0
"""Symmetric and triangular matrices times few columns: the matrix stays where it is, columns and partial sums move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ...direct.blas_form import MIRRORED, old_values
from ...direct.spans import Span, whole_span
from ...direct.sub_matrix import SubMatrix, UnfitError
from .local_triangle import Triangular
from .products import collected, copied, gemm, side_by_side
from .program import Preparation
from .slabs import Factor, SharedSlabs, Step, Steps, integer, scalar
from .staircase import TrianglePiece, check_tiles, staircase

__all__ = ["multiplied_in_place"]

_PORTION = 1 << 16
"""Elements of A that a cache keeps between the product with them and the one with their transpose."""


class _StoredProduct(NamedTuple):
    """One of the products with what is stored of A: with A itself, or with its transpose.

    Attributes:
        turned: it is the transpose.
        right: the columns, as rows, along A's columns; along its rows for the transpose.
        sums: partial sums along A's rows, or along its columns.
        parts: how what is summed is dealt out.
        place: which of the slabs of sums is this rank's.
    """

    turned: bool
    right: SharedSlabs
    sums: SharedSlabs
    parts: Span
    place: tuple[int, int]


def multiplied_in_place(call: Preparation, x: SubMatrix, to: SubMatrix) -> Callable[[], Steps]:
    """Prepare symm, hemm or trmm: each rank multiplies what it has of the triangle.

    After one more meeting the ranks that have D add the partial sums up. If only the rows or only the columns of a
    symmetric matrix are dealt out, both products have the same columns and sums, each as long as the matrix.
    """
    asked = call.asked
    assert asked.b is not None
    check_tiles(x)
    is_complex = asked.d[0].pattern.is_complex
    symmetric = asked.routine in ("symm", "hemm")
    conjugated = is_complex and (asked.routine == "hemm" or asked.op_a == "C")
    from_right = asked.side == "R"  # A is symmetric, and D's transpose is A times B's
    if (from_right and (conjugated or not symmetric)) or (conjugated and not x.by_columns):
        raise UnfitError  # BLAS conjugates only what it transposes
    if from_right:
        to = SubMatrix(asked.d, turned=True)
    columns = SubMatrix(asked.b, turned=not from_right)
    width = columns.rows.extent
    before = copied(old_values(asked, to), to)  # trmm has no C
    together = symmetric and (x.rows.whole or x.cols.whole)
    terms: list[_StoredProduct] = []
    for turned in (False, True):
        if not (symmetric or turned == (asked.op_a != "N")):
            continue
        if together and terms:
            terms.append(terms[0]._replace(turned=True))
            continue
        place = (x.col, x.row) if turned else (x.row, x.col)
        along, across = (x.rows, x.cols) if turned else (x.cols, x.rows)
        parts = along
        if together:
            parts, place = (x.cols, (0, x.col)) if x.rows.whole else (x.rows, (0, x.row))
            along = across = whole_span(x.rows.extent)
        right = call.stage(columns, whole_span(width), along, by_columns=False)
        sums = call.room(x, across, side_by_side(width, parts.nprocs), by_columns=True)
        terms.append(_StoredProduct(turned, right, sums, parts, place))
    separate = terms[:1] if together else terms
    products = _StoredProducts(call, x, width, conjugated=conjugated, together=together)

    def compute() -> Steps:
        if not x.active:
            return []
        zeroed: Steps = [(call.slab_array(term.sums, *term.place).fill, (0,)) for term in separate]
        return zeroed + products.steps(terms, symmetric=symmetric)

    def finish() -> Steps:
        if not to.active:
            return []
        return [*before, *collected(call, to, [(term.sums, term.parts) for term in separate], asked.beta)]

    call.finish = finish
    return compute


def _portions(piece: TrianglePiece) -> Iterator[TrianglePiece]:
    """Yield a piece in portions; a triangle stays whole."""
    i, i1, j, j1, tile = piece
    height, width = i1 - i, j1 - j
    if tile or height * width <= _PORTION:
        yield piece
    elif height >= width:
        step = max(1, _PORTION // width)
        for at in range(i, i1, step):
            yield TrianglePiece(at, min(at + step, i1), j, j1, False)
    else:
        step = max(1, _PORTION // height)
        for at in range(j, j1, step):
            yield TrianglePiece(i, i1, at, min(at + step, j1), False)


class _StoredProducts:
    """What a rank computes of the products.

    Args:
        call: the call.
        x: A.
        width: how many columns there are.
        conjugated: its transpose is conjugated.
        together: the columns and sums are along all rows and columns of A, not this rank's.
    """

    def __init__(
        self, call: Preparation, x: SubMatrix, width: int, *, conjugated: bool, together: bool
    ) -> None:
        self._call, self._x, self._width, self._conjugated = call, x, width, conjugated
        self._item, self._together = x.held.pattern.itemsize, together
        self._alpha, self._one = scalar(call.asked.alpha, call.letter), scalar(1, call.letter)
        self._tile = (
            None
            if call.asked.routine in ("symm", "hemm")
            else Triangular(call, x.by_columns, by_columns=True)
        )

    def steps(self, terms: list[_StoredProduct], *, symmetric: bool) -> Steps:
        """Return the steps of all products: first the triangles, then what is beside them."""
        call, x = self._call, self._x
        pieces = sorted(staircase(x, lower=call.asked.uplo == "L"), key=lambda piece: not piece.tile)
        if symmetric:
            pieces = [portion for piece in pieces for portion in _portions(piece)]
        steps: Steps = []
        factors = [
            (call.slab(term.sums, *term.place), call.slab(term.right, 0, term.place[1])) for term in terms
        ]
        for piece in pieces:
            for term, (sums, right) in zip(terms, factors, strict=True):
                if not piece.tile:
                    steps.append(self._rectangle(piece, sums, right, turned=term.turned))
                elif not symmetric:
                    into, of = (
                        call.slab_array(term.sums, *term.place),
                        call.slab_array(term.right, 0, term.place[1]),
                    )
                    steps += self._triangle(piece, into, of, sums, turned=term.turned)
                elif not term.turned:
                    steps.append(self._symmetric(piece, sums, right))
        return steps

    def _at(self, piece: TrianglePiece) -> int:
        """Return the address of a piece's first element."""
        x = self._x
        first = piece.i + piece.j * x.ld if x.by_columns else piece.i * x.ld + piece.j
        return x.at + first * self._item

    def _places(self, piece: TrianglePiece) -> tuple[int, int]:
        """Return where a piece's rows and columns begin, in the columns and the sums."""
        x = self._x
        if not self._together:
            return piece.i, piece.j
        return x.rows.at_place(x.row, piece.i), x.cols.at_place(x.col, piece.j)

    def _along(self, right: Factor, at: int) -> Factor:
        """Return the columns from an index on."""
        return Factor(right.at + at * self._item, False, right.ld)

    def _rectangle(self, piece: TrianglePiece, sums: Factor, right: Factor, *, turned: bool) -> Step:
        x, (i, i1, j, j1, _) = self._x, piece
        of = Factor(self._at(piece), x.by_columns != turned, x.ld, turned and self._conjugated)
        down, across = self._places(piece)
        m, n = i1 - i, j1 - j
        if turned:
            m, n, down, across = n, m, across, down
        return gemm(
            self._call, m, self._width, n,
            self._alpha, of, self._along(right, across), self._one, sums.below(down, self._item),
        )  # fmt: skip

    def _triangle(
        self, piece: TrianglePiece, sums: np.ndarray, right: np.ndarray, at: Factor, *, turned: bool
    ) -> Steps:
        """Return the steps of a triangular tile, whose sums nothing has been added to."""
        x, (i, i1, j, j1, _) = self._x, piece
        if turned:
            i, i1, j, j1 = j, j1, i, i1
        assert self._tile is not None
        copied: Step = (np.copyto, (sums[i:i1], right[:, j:j1].T))
        of = Factor(self._at(piece), x.by_columns, x.ld)
        return [copied, *self._tile.steps(of, i1 - i, self._width, at.below(i, self._item))]

    def _symmetric(self, piece: TrianglePiece, sums: Factor, right: Factor) -> Step:
        """Return the step of a symmetric or Hermitian tile."""
        x, call, m = self._x, self._call, piece.i1 - piece.i
        hermitian = self._conjugated
        uplo = call.asked.uplo if x.by_columns else MIRRORED[call.asked.uplo]
        down, across = self._places(piece)
        of, columns = (self._at(piece), integer[x.ld]), self._along(right, across)
        into = sums.below(down, self._item)
        if self._width == 1 and (hermitian or call.letter in "sd"):
            one = integer[1]
            return call.function("hemv" if hermitian else "symv"), (
                uplo.encode(), integer[m], self._alpha, *of, columns.at, one, self._one, into.at, one,
            )  # fmt: skip
        return call.function("hemm" if hermitian else "symm"), (
            b"L", uplo.encode(), integer[m], integer[self._width], self._alpha, *of,
            columns.at, integer[columns.ld], self._one, into.at, integer[into.ld],
        )  # fmt: skip
