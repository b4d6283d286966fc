# SPDX-License-Identifier: Apache-2.0
"""What direct calls ask of a BLAS, which sees every matrix in Fortran order: one in C order is the transpose."""

from __future__ import annotations

from ...layout.routines import ROUTINES
from .asked import Asked, Part
from .sub_matrix import SubMatrix, UnfitError, same_elements

_MIRRORED = {"L": "U", "U": "L"}
_OTHER_SIDE = {"L": "R", "R": "L"}


def factors_of_product(asked: Asked) -> tuple[SubMatrix, SubMatrix]:
    """Return op(A) and the transpose of op(B). Local."""
    assert asked.b is not None
    x = SubMatrix(asked.a, turned=asked.op_a != "N", conjugated=asked.op_a == "C")
    return x, SubMatrix(asked.b, turned=asked.op_b == "N", conjugated=asked.op_b == "C")


def moved_in_place(x: SubMatrix, y: SubMatrix, to: SubMatrix) -> int:
    """Return how many elements move if the larger factor of ``x y^T`` stays: the other one, and partial sums. Local."""
    m, n = to.rows.extent, to.cols.extent
    return m * n * (x.cols if m >= n else y.cols).nprocs + min(m, n) * x.cols.extent


def triangular_words(asked: Asked, of_columns: bool, by_columns: bool) -> tuple[str, str, str]:
    """Return the side, the triangle and the op of trsm or trmm. Local.

    Args:
        asked: the call.
        of_columns, by_columns: whether the triangular matrix, and the other one, are in Fortran order.

    Raises:
        UnfitError: BLAS conjugates only what it transposes.
    """
    op = "T" if asked.op_a == "C" and not asked.d[0].pattern.is_complex else asked.op_a
    if of_columns != by_columns:
        if op == "C":
            raise UnfitError
        op = "T" if op == "N" else "N"
    side = asked.side if by_columns else _OTHER_SIDE[asked.side]
    return side, asked.uplo if of_columns else _MIRRORED[asked.uplo], op


def sided_words(asked: Asked, x: SubMatrix, y: SubMatrix, to: SubMatrix) -> tuple[str, str, str, int, int]:
    """Return the name of symm or hemm, the side, the triangle, and D's rows and columns. Local.

    Args:
        asked: the call.
        x, y, to: A, B and D.

    Raises:
        UnfitError: BLAS takes no such mixture of memory orders.
    """
    hermitian = asked.routine == "hemm" and asked.d[0].pattern.is_complex
    if y.by_columns != to.by_columns or (hermitian and x.by_columns != to.by_columns):
        raise UnfitError
    side = asked.side if to.by_columns else _OTHER_SIDE[asked.side]
    uplo = asked.uplo if x.by_columns else _MIRRORED[asked.uplo]
    m, n = (to.m, to.n) if to.by_columns else (to.n, to.m)
    return "hemm" if hermitian else "symm", side, uplo, m, n


def factors_of_update(asked: Asked) -> tuple[list[SubMatrix], int, bool]:
    """Return op(A), and op(B) if there is one, of a rank-k or rank-2k update; k; whether it is Hermitian. Local.

    Raises:
        UnfitError: BLAS knows only the other op.
    """
    is_complex = asked.d[0].pattern.is_complex
    hermitian = ROUTINES[asked.routine].hermitian and is_complex
    if is_complex and asked.op_a == ("T" if hermitian else "C"):
        raise UnfitError
    factors = [SubMatrix(part, turned=asked.op_a != "N") for part in (asked.a, asked.b) if part is not None]
    return factors, factors[0].cols.extent, hermitian


def start_of_update(asked: Asked, to: SubMatrix) -> SubMatrix | None:
    """Return what D starts as, None if it is C already or what it is does not matter. Local.

    Raises:
        UnfitError: C is not where D is, or D was given: outside the triangle it keeps its values.
    """
    c = asked.c
    if c is None or same_elements(c, asked.d) or (not asked.new and asked.beta == 0):
        return None
    if not asked.new:
        raise UnfitError
    return _in_the_places_of(to, c, asked)


def old_values(asked: Asked, to: SubMatrix) -> SubMatrix | None:
    """Return C if it is read, and is not D; its transpose if ``to`` is D's. Local.

    Raises:
        UnfitError: it is not where D is.
    """
    c = asked.c
    if c is None or asked.beta == 0 or same_elements(c, asked.d):
        return None
    return _in_the_places_of(to, c, asked)


def _in_the_places_of(to: SubMatrix, c: Part, asked: Asked) -> SubMatrix:
    """Return C, turned as ``to`` is against D."""
    old = SubMatrix(c, turned=to.transposed != asked.d[-1])
    if not old.same_places(to):
        raise UnfitError
    return old
