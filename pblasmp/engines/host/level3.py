# SPDX-License-Identifier: Apache-2.0
"""The level-3 routines as sums of products of slabs.

``trmm`` has a triangular left slab; ``symm`` and ``hemm`` are the triangle that is there and the rest of its transpose;
the rank-k updates compute one triangle of the result. What stands to the right of B is seen transposed.
"""

from __future__ import annotations

from dataclasses import replace

from ...layout import Level3Problem, Trapezoid
from ..base import Options
from .kernels import Kernel, LeftPart, ResultPart
from .operand import Operand
from .product import Slabs, Term, needs

__all__ = ["left_of", "level3_slabs"]


def left_of(p: Level3Problem) -> tuple[bool, bool, str]:
    """Return how the triangular A of trmm and trsm is seen to the left of B or of its transpose.

    Returns:
        Whether it is transposed, whether it is conjugated, and where its triangle then is.
    """
    flip = (p.op_a != "N") != (p.side == "R")
    return flip, p.op_a == "C" and p.d.dtype.kind == "c", "U" if (p.uplo == "L") == flip else "L"


def level3_slabs(p: Level3Problem, options: Options, rank: int, size: int) -> Slabs:
    """Return any routine but trsm and the sums, as ``rank`` of ``size`` ranks computes it. Local."""
    return (_sided if p.traits.shape == "sided" else _updated)(p, options.alpha, rank, size)


def _sided(p: Level3Problem, alpha: complex, rank: int, size: int) -> Slabs:
    assert p.b is not None
    turned = p.side == "R"
    d = p.d.T if turned else p.d
    outer_rows = d.global_indices(rank)[0] if rank < d.grid.size else None

    def left(flip: bool, conjugate: bool) -> Operand:
        return Operand(p.a, flip, conjugate, needs(d, size, 0), d.rows, "a")

    def triangle(part: Trapezoid, diagonal: str = "there") -> Kernel:
        assert outer_rows is not None
        return LeftPart(part, outer_rows, diagonal)  # type: ignore[arg-type]

    product = p.traits.triangular
    right = Operand(p.b, not turned, False, needs(d, size, 1), d.cols, "b", stays=not product)
    if product:  # D may be B: its slabs are always copies
        flip, conjugate, uplo = left_of(p)
        parts = [(left(flip, conjugate), Trapezoid(uplo), "ones" if p.diag == "U" else "there")]
    else:
        there, other = Trapezoid(p.uplo), Trapezoid(p.uplo, -1 if p.uplo == "L" else 1).T
        hermitian = p.is_hermitian
        parts = [
            (left(False, hermitian and turned), there, "real" if hermitian else "there"),
            (left(True, hermitian and not turned), other, "there"),
        ]
    terms = tuple(
        Term(alpha, i, len(parts), triangle(part, diagonal))
        for i, (_, part, diagonal) in enumerate(parts)
        if outer_rows is not None
    )
    operands = (*(x for x, _, _ in parts), right)
    return Slabs(
        d, d.shape[0], operands, terms or (Term(alpha, 0, len(parts)),), turned=turned, in_place=product
    )


def _updated(p: Level3Problem, alpha: complex, rank: int, size: int) -> Slabs:
    d, part, hermitian = p.d, p.written, p.is_hermitian
    assert part is not None
    flip, conjugate = p.op_a != "N", p.op_a == "C" and hermitian
    x = [("a", p.a)] if p.b is None else [("a", p.a), ("b", p.b)]
    # k contiguous, on both sides: BLAS is faster by a tenth then, with products as small as those of a triangle.
    lefts = [Operand(m, flip, conjugate, needs(d, size, 0), d.rows, name, order="C") for name, m in x]
    rights = [
        Operand(m, flip, conjugate != hermitian, needs(d, size, 1), d.cols, name, order="C") for name, m in x
    ]
    multiply: Kernel = (
        ResultPart(part, *d.global_indices(rank), hermitian) if rank < d.grid.size else Term.multiply
    )
    if p.b is None:
        operands, pairs = [*lefts, *rights], [(alpha, 0, 1)]
    elif p.traits.swept_twice:
        other = complex(alpha).conjugate() if hermitian else alpha
        operands, pairs = [*lefts, *rights], [(alpha, 0, 3), (other, 1, 2)]
    else:
        operands, pairs = [lefts[0], rights[1]], [(alpha, 0, 1)]
    unique, number = _merged(operands)
    terms = tuple(Term(factor, number[left], number[right], multiply) for factor, left, right in pairs)
    return Slabs(d, p.k, unique, terms, part)


def _merged(operands: list[Operand]) -> tuple[tuple[Operand, ...], list[int]]:
    """Return the operands with those of the same slabs as one, and which of them each has become.

    To the left and to the right of a product stand the same slabs where D's rows are dealt out as its columns are.
    """
    unique: list[Operand] = []
    number = []
    for x in operands:
        like = next((i for i, y in enumerate(unique) if replace(x, needs=y.needs) == y), len(unique))
        if like == len(unique):
            unique.append(x)
        else:
            both = zip(unique[like].needs, x.needs, strict=True)
            unique[like] = replace(x, needs=tuple(tuple(sorted({*here, *there})) for here, there in both))
        number.append(like)
    return tuple(unique), number
