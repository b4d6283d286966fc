# SPDX-License-Identifier: Apache-2.0
"""The level-3 PBLAS other than GEMM: triangular and symmetric products, solves, rank-k updates, sums.

Each routine returns a new matrix or writes into ``out=``; ``pb.plan(routine, ...)`` prepares one to run many times.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..layout import Level3Problem, MatrixDescriptor
from ..layout.grid import one_of
from ..layout.routines import ROUTINES
from ..matrix.distributed import DistributedMatrix
from ..runtime.direct_forms import HandleForm
from ..runtime.matrix_calls import MatrixCall
from .docstrings import described

if TYPE_CHECKING:
    from ..layout.level3_problem import Diag, Side, Uplo
    from ..layout.schemes import Op

__all__ = [
    "geadd",
    "hemm",
    "her2k",
    "herk",
    "herkx",
    "symm",
    "syr2k",
    "syrk",
    "syrkx",
    "tradd",
    "trmm",
    "trsm",
]

Matrix = DistributedMatrix


@described
def trsm(
    a: Matrix,
    b: Matrix,
    *,
    side: Side = "L",
    uplo: Uplo = "L",
    op_a: Op = "N",
    diag: Diag = "N",
    alpha: complex = 1,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return X with ``op(A) X = alpha B``, or ``X op(A) = alpha B``. Collective over the context."""
    return _run("trsm", (a, b, side, uplo, op_a, diag, alpha, out, algo))


@described
def trmm(
    a: Matrix,
    b: Matrix,
    *,
    side: Side = "L",
    uplo: Uplo = "L",
    op_a: Op = "N",
    diag: Diag = "N",
    alpha: complex = 1,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return ``alpha op(A) B`` or ``alpha B op(A)`` for a triangular A. Collective over the context."""
    return _run("trmm", (a, b, side, uplo, op_a, diag, alpha, out, algo))


@described
def symm(
    a: Matrix,
    b: Matrix,
    c: Matrix | None = None,
    *,
    side: Side = "L",
    uplo: Uplo = "L",
    alpha: complex = 1,
    beta: complex = 0,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return ``alpha A B + beta C`` or ``alpha B A + beta C`` for a symmetric A. Collective over the context."""
    return _run("symm", (a, b, c, side, uplo, alpha, beta, out, algo))


@described
def hemm(
    a: Matrix,
    b: Matrix,
    c: Matrix | None = None,
    *,
    side: Side = "L",
    uplo: Uplo = "L",
    alpha: complex = 1,
    beta: complex = 0,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return ``alpha A B + beta C`` or ``alpha B A + beta C`` for a Hermitian A. Collective over the context."""
    return _run("hemm", (a, b, c, side, uplo, alpha, beta, out, algo))


@described
def syrk(
    a: Matrix,
    c: Matrix | None = None,
    *,
    uplo: Uplo = "L",
    op_a: Op = "N",
    alpha: complex = 1,
    beta: complex = 0,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return a triangle of ``alpha op(A) op(A)^T + beta C``. Collective over the context."""
    return _run("syrk", (a, c, uplo, op_a, alpha, beta, out, algo))


@described
def herk(
    a: Matrix,
    c: Matrix | None = None,
    *,
    uplo: Uplo = "L",
    op_a: Op = "N",
    alpha: float = 1,
    beta: float = 0,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return a triangle of ``alpha op(A) op(A)^H + beta C``. Collective over the context."""
    return _run("herk", (a, c, uplo, op_a, alpha, beta, out, algo))


@described
def syr2k(
    a: Matrix,
    b: Matrix,
    c: Matrix | None = None,
    *,
    uplo: Uplo = "L",
    op_a: Op = "N",
    alpha: complex = 1,
    beta: complex = 0,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return a triangle of ``alpha (op(A) op(B)^T + op(B) op(A)^T) + beta C``. Collective over the context."""
    return _run("syr2k", (a, b, c, uplo, op_a, alpha, beta, out, algo))


@described
def her2k(
    a: Matrix,
    b: Matrix,
    c: Matrix | None = None,
    *,
    uplo: Uplo = "L",
    op_a: Op = "N",
    alpha: complex = 1,
    beta: float = 0,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return a triangle of ``alpha op(A) op(B)^H + conj(alpha) op(B) op(A)^H + beta C``.

    Collective over the context.
    """
    return _run("her2k", (a, b, c, uplo, op_a, alpha, beta, out, algo))


@described
def syrkx(
    a: Matrix,
    b: Matrix,
    c: Matrix | None = None,
    *,
    uplo: Uplo = "L",
    op_a: Op = "N",
    alpha: complex = 1,
    beta: complex = 0,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return a triangle of ``alpha op(A) op(B)^T + beta C``, taken to be symmetric. Collective over the context."""
    return _run("syrkx", (a, b, c, uplo, op_a, alpha, beta, out, algo))


@described
def herkx(
    a: Matrix,
    b: Matrix,
    c: Matrix | None = None,
    *,
    uplo: Uplo = "L",
    op_a: Op = "N",
    alpha: complex = 1,
    beta: float = 0,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return a triangle of ``alpha op(A) op(B)^H + beta C``, taken to be Hermitian. Collective over the context."""
    return _run("herkx", (a, b, c, uplo, op_a, alpha, beta, out, algo))


@described
def geadd(
    a: Matrix,
    c: Matrix,
    *,
    op_a: Op = "N",
    alpha: complex = 1,
    beta: complex = 1,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return ``alpha op(A) + beta C``. Collective over the context."""
    return _run("geadd", (a, c, op_a, alpha, beta, out, algo))


@described
def tradd(
    a: Matrix,
    c: Matrix,
    *,
    uplo: Uplo = "L",
    op_a: Op = "N",
    alpha: complex = 1,
    beta: complex = 1,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return the triangle or trapezoid ``uplo`` of ``alpha op(A) + beta C``. Collective over the context."""
    return _run("tradd", (a, c, uplo, op_a, alpha, beta, out, algo))


_FORMS = {
    name: HandleForm(name, ROUTINES[name], [*inspect.signature(globals()[name]).parameters])
    for name in __all__
}


class _Level3Call(MatrixCall):
    """A call of a level-3 routine."""

    def __init__(self, routine: str, arguments: dict[str, Any]) -> None:
        pop = arguments.pop
        super().__init__(routine, routine, (pop("a"), pop("b", None), pop("c", None), pop("out")), arguments)

    def new(self) -> MatrixDescriptor:
        a, b, c, _ = self._given
        like = c if c is not None or self.row.shape == "updated" else b
        x: MatrixDescriptor = a.descriptor
        if like is not None:
            x = like.descriptor
            return replace(x, ld=None)
        along = 0 if one_of(self._how["op_a"], "N") else 1
        order, block = x.shape[along], x.block[along]
        return MatrixDescriptor((order, order), (block, block), x.grid, dtype=x.dtype, order=x.order)

    def validate(self, problem: Level3Problem, facts: dict[str, Any]) -> None:  # noqa: ARG002
        _, b, c, out = self._given
        like = "c" if c is not None else "d" if b is None or self.row.shape == "updated" else "b"
        problem.validate("out" if out is not None else like)


def routine_call(routine: str, **arguments: Any) -> MatrixCall:
    """Return a call of the level-3 routine of that name with these arguments, all of which are given. Local."""
    return _Level3Call(routine, arguments)


def _run(routine: str, arguments: tuple[Any, ...]) -> Matrix:
    """Return what a level-3 routine computes for its function's arguments in order. Collective over the context."""
    form = _FORMS[routine]
    done = form.run(arguments)
    if done:
        out: Matrix = arguments[form.out]
        return out
    by_name = dict(zip(form.names, arguments, strict=True))
    result: Matrix = _Level3Call(routine, by_name).run(voted=done is False)
    return result
