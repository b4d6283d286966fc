# SPDX-License-Identifier: Apache-2.0
"""Levels 1 and 2 of the PBLAS: vectors, and matrices times vectors.

A vector is a matrix of one row or one column, or such a part of one, in any layout. The level-2 routines, and those of
level 1 that write a vector, are level-3 routines of one column; ``layout.vector_routines`` says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..matrix.distributed import DistributedMatrix
from ..runtime.handle import Handle
from .docstrings import described
from .vector_calls import column, computed, same, written

if TYPE_CHECKING:
    from ..layout.level3_problem import Diag, Uplo
    from ..layout.schemes import Op

__all__ = [
    "amax",
    "asum",
    "axpy",
    "copy",
    "dot",
    "dotc",
    "gemv",
    "ger",
    "gerc",
    "hemv",
    "her",
    "her2",
    "nrm2",
    "scal",
    "swap",
    "symv",
    "syr",
    "syr2",
    "trmv",
    "trsv",
]

Matrix = DistributedMatrix


# -- level 1


@described
def dot(x: Matrix, y: Matrix) -> Any:
    """Return the sum of x_i y_i, a NumPy scalar, on every rank. Collective over the context."""
    return computed("dot", {"x": x, "y": y})


@described
def dotc(x: Matrix, y: Matrix) -> Any:
    """Return the sum of conj(x_i) y_i, a NumPy scalar, on every rank. Collective over the context."""
    return computed("dotc", {"x": x, "y": y})


@described
def nrm2(x: Matrix) -> Any:
    """Return the Euclidean norm, a real NumPy scalar, on every rank. Collective over the context.

    It is scaled like LAPACK's nrm2: it overflows or underflows only if the norm itself does.
    """
    return computed("nrm2", {"x": x})


@described
def asum(x: Matrix) -> Any:
    """Return the sum of the absolute values, a real NumPy scalar, on every rank. Collective over the context.

    Of a complex number those of its real and imaginary part are added, as BLAS does.
    """
    return computed("asum", {"x": x})


@described
def amax(x: Matrix) -> tuple[Any, int]:
    """Return ``(value, index)`` of the element of largest absolute value, on every rank. Collective over the context.

    The index is 0-based in x, the first of equals. Of a complex number the absolute values of its real and imaginary
    part are added, as BLAS does. NaN counts as the largest. An empty vector has (0, -1).
    """
    value, index = computed("amax", {"x": x})
    return value, index


@described
def axpy(x: Matrix, y: Matrix, *, alpha: complex = 1, out: Matrix | None = None) -> Matrix:
    """Return ``alpha x + y``, laid out like y. Collective over the context."""
    return written("axpy", locals())


@described
def scal(x: Matrix, *, alpha: complex, out: Matrix | None = None) -> Matrix:
    """Return ``alpha x``, laid out like x. Collective over the context."""
    mine, target = column(x), column(out)
    if not (isinstance(mine, Handle) and isinstance(target, Handle) and same(mine, target)):
        return written("scal", {"x": x, "alpha": alpha, "out": out})
    computed("scal", {"x": x}, alpha)
    assert out is not None
    return out


@described
def copy(x: Matrix, out: Matrix | None = None) -> Matrix:
    """Return a copy of x, laid out like x or written into ``out``. Collective over the context."""
    return written("copy", locals())


@described
def swap(x: Matrix, y: Matrix) -> None:
    """Exchange the elements of two vectors, in any layouts. Collective over the context."""
    computed("swap", {"x": x, "y": y})


# -- level 2


@described
def gemv(
    a: Matrix,
    x: Matrix,
    y: Matrix | None = None,
    *,
    op_a: Op = "N",
    alpha: complex = 1,
    beta: complex = 0,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return ``alpha op(A) x + beta y``. Collective over the context.

    A new result is laid out like y, or else along A, as a row if x is one. A stays where it is.
    """
    return written("gemv", locals())


@described
def symv(
    a: Matrix,
    x: Matrix,
    y: Matrix | None = None,
    *,
    uplo: Uplo = "L",
    alpha: complex = 1,
    beta: complex = 0,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return ``alpha A x + beta y`` for a symmetric A. Collective over the context.

    A new result is laid out like y, or else like x. A stays where it is.
    """
    return written("symv", locals())


@described
def hemv(
    a: Matrix,
    x: Matrix,
    y: Matrix | None = None,
    *,
    uplo: Uplo = "L",
    alpha: complex = 1,
    beta: complex = 0,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return ``alpha A x + beta y`` for a Hermitian A. Collective over the context.

    The imaginary parts of A's diagonal are taken as 0 and not read. A new result is laid out like y, or else like x. A
    stays where it is.
    """
    return written("hemv", locals())


@described
def trmv(
    a: Matrix,
    x: Matrix,
    *,
    uplo: Uplo = "L",
    op_a: Op = "N",
    diag: Diag = "N",
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return ``op(A) x`` for a triangular A, laid out like x. Collective over the context."""
    return written("trmv", locals())


@described
def trsv(
    a: Matrix,
    x: Matrix,
    *,
    uplo: Uplo = "L",
    op_a: Op = "N",
    diag: Diag = "N",
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return y with ``op(A) y = x`` for a triangular A, laid out like x. Collective over the context."""
    return written("trsv", locals())


@described
def ger(
    x: Matrix, y: Matrix, a: Matrix | None = None, *, alpha: complex = 1, out: Matrix | None = None
) -> Matrix:
    """Return ``alpha x y^T + A``. Collective over the context.

    A new result is laid out like A, or else in x's blocks of rows and y's of columns, on x's grid.
    """
    return written("ger", locals())


@described
def gerc(
    x: Matrix, y: Matrix, a: Matrix | None = None, *, alpha: complex = 1, out: Matrix | None = None
) -> Matrix:
    """Return ``alpha x y^H + A``. Collective over the context.

    A new result is laid out like A, or else in x's blocks of rows and y's of columns, on x's grid.
    """
    return written("gerc", locals())


@described
def syr(
    x: Matrix, a: Matrix | None = None, *, uplo: Uplo = "L", alpha: complex = 1, out: Matrix | None = None
) -> Matrix:
    """Return a triangle of ``alpha x x^T + A``. Collective over the context.

    Outside the triangle ``out`` keeps its values; a new matrix has those of A, or zeros.
    """
    return written("syr", locals())


@described
def her(
    x: Matrix, a: Matrix | None = None, *, uplo: Uplo = "L", alpha: float = 1, out: Matrix | None = None
) -> Matrix:
    """Return a triangle of ``alpha x x^H + A``. Collective over the context.

    Outside the triangle ``out`` keeps its values; a new matrix has those of A, or zeros. The imaginary parts of A's
    diagonal are not read; those of the result are 0.
    """
    return written("her", locals())


@described
def syr2(
    x: Matrix,
    y: Matrix,
    a: Matrix | None = None,
    *,
    uplo: Uplo = "L",
    alpha: complex = 1,
    out: Matrix | None = None,
) -> Matrix:
    """Return a triangle of ``alpha x y^T + alpha y x^T + A``. Collective over the context.

    Outside the triangle ``out`` keeps its values; a new matrix has those of A, or zeros.
    """
    return written("syr2", locals())


@described
def her2(
    x: Matrix,
    y: Matrix,
    a: Matrix | None = None,
    *,
    uplo: Uplo = "L",
    alpha: complex = 1,
    out: Matrix | None = None,
) -> Matrix:
    """Return a triangle of ``alpha x y^H + conj(alpha) y x^H + A``. Collective over the context.

    Outside the triangle ``out`` keeps its values; a new matrix has those of A, or zeros. The imaginary parts of A's
    diagonal are not read; those of the result are 0.
    """
    return written("her2", locals())
