# SPDX-License-Identifier: Apache-2.0
"""The level-3 PBLAS other than GEMM: triangular and symmetric products, solves, rank-k updates, sums.

Each routine returns a new matrix or writes into ``out=``; ``pb.plan(routine, ...)`` prepares one to run many times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from .docstrings import complete
from .layout import Level3Problem, MatrixDescriptor
from .layout.grid import one_of
from .layout.routines import ROUTINES, Routine
from .matrix import DistributedMatrix
from .matrix_calls import MatrixCall

if TYPE_CHECKING:
    from .layout.level3 import Diag, Side, Uplo
    from .layout.problem import Op

__all__ = [
    "geadd",
    "hemm",
    "her2k",
    "herk",
    "herkx",
    "routine_call",
    "symm",
    "syr2k",
    "syrk",
    "syrkx",
    "tradd",
    "trmm",
    "trsm",
]

Matrix = DistributedMatrix
F = TypeVar("F", bound=Callable[..., Any])

_WORDS = {
    "side": '"L": A is to the left of B; "R": to the right.',
    "diag": '"U": A has ones on its diagonal, which is not read.',
    "algo": '"auto", or the name of an algorithm: ``pb.algorithms`` lists them.',
}


_RAISES = (
    "ArgumentError: sizes, types or options do not fit; the message names every fault.",
    "RankMismatchError: the ranks gave different arguments.",
    "UnsupportedError: the engine does not offer it.",
)


def _described(function: F) -> F:
    """Complete a routine's docstring by what the table says of it and of its arguments. Local."""
    row = ROUTINES[function.__name__]
    has_c = "c" in row.operands
    complete(function, lambda name: _meaning(row, name, has_c), _RAISES, *_notes(row))
    return function


def _notes(row: Routine) -> list[str]:
    """Return what else there is to say of a result, in paragraphs of a docstring. Local."""
    notes = []
    if row.triangle == "d":
        zeros = "" if row.shape == "added" else ", or zeros if there is no C"
        notes.append(
            "Only the triangle ``uplo`` of C is read, and only that of the result is written: outside it\n"
            f"    ``out`` keeps its values, and a new matrix has those of C{zeros}."
        )
    if row.hermitian:
        what = "A's diagonal are taken as 0 and not read"
        if row.triangle == "d":
            what = "C's diagonal are not read; those of the result are 0"
        notes.append(f"The imaginary parts of {what}.")
    return notes


def _meaning(row: Routine, name: str, has_c: bool) -> str:
    """Return what an argument is, in words. Local."""
    updated, added = row.shape == "updated", row.shape == "added"
    if name == "a" and row.shape == "sided":
        kind = "triangular" if row.triangular else "Hermitian" if row.hermitian else "symmetric"
        return f"square {kind} matrix, of which only the triangle ``uplo`` is read."
    if name in "ab":
        sizes = ("m × n", "n × m") if added else ("n × k", "k × n")
        return "m × n." if row.shape == "sided" else f'{sizes[0]}, or {sizes[1]} if ``op_a`` is not "N".'
    if name == "c":
        like = "n × n" if updated else "m × n"
        return f"{like}{'' if added else ', in any layout; None means zeros'}. With ``beta == 0`` it is not read."
    if name == "uplo":
        return (
            f'"L" or "U": the triangle {"of A that is read" if row.triangle == "a" else "that is computed"}.'
        )
    if name == "op_a":
        if not updated:
            return '"N", "T" or "C" (conjugate transpose).'
        mine, other = "CT" if row.hermitian else "TC"
        return f'"N" or "{mine}"; for real types "{other}" is "{mine}".'
    if name in ("alpha", "beta"):
        kind = "a real number" if name in row.real else "a number"
        what = "C is not" if name == "beta" else "neither A nor B is" if "b" in row.operands else "A is not"
        return f"{kind}; with 0 {what} read."
    if name == "out":
        like = "of C" if added else "of B" if not has_c else "of C, else of B"
        if updated:
            like = "of C, else in A's blocks on A's grid"
        return f"where to write the result, which may be ``{row.in_place}``; by default a new one in the layout {like}."
    return _WORDS[name]


@_described
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
    return _run("trsm", locals())


@_described
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
    return _run("trmm", locals())


@_described
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
    return _run("symm", locals())


@_described
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
    return _run("hemm", locals())


@_described
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
    return _run("syrk", locals())


@_described
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
    return _run("herk", locals())


@_described
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
    return _run("syr2k", locals())


@_described
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
    return _run("her2k", locals())


@_described
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
    return _run("syrkx", locals())


@_described
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
    return _run("herkx", locals())


@_described
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
    return _run("geadd", locals())


@_described
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
    return _run("tradd", locals())


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


def _run(routine: str, arguments: dict[str, Any]) -> Matrix:
    """Return what the level-3 routine of that name computes. Collective over the context."""
    result: Matrix = _Level3Call(routine, arguments).run()
    return result
