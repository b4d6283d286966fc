# SPDX-License-Identifier: Apache-2.0
"""Products and level-3 routines as sums of products of slabs.

``trmm`` has a triangular left slab; ``symm`` and ``hemm`` use the stored triangle and the rest of its transpose; the
rank-k updates compute one triangle of the result. If the triangular matrix is to the right of B, everything is
transposed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ...layout import Level3Problem, MatmulProblem, MatrixDescriptor, Trapezoid
from ...layout.caches import Hashed
from ..moving.panels import Needs, Operand, needs
from ..protocol import Engine
from .triangles import Diagonal, Kernel, LeftPart, ResultPart, whole

__all__ = ["SidedPart", "Slabs", "Term", "matmul_slabs", "routine_slabs", "sided_parts", "triangle_of"]


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

    parts = sided_parts(p)
    lefts = (Operand(p.a, x.flip, x.conjugate, needs(d, size, 0), d.rows, dtype, "a") for x in parts)
    operands = (*lefts, Operand(p.b, not turned, False, needs(d, size, 1), d.cols, dtype, "b"))
    terms = tuple(
        Term(alpha, i, len(parts), LeftPart(x.part, outer_rows, x.diagonal))
        for i, x in enumerate(parts)
        if outer_rows is not None and x.part is not None
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
