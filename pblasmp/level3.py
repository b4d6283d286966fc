# SPDX-License-Identifier: Apache-2.0
"""The level-3 PBLAS other than GEMM: triangular and symmetric products, solves, rank-k updates, sums.

Each routine returns a new matrix or writes into ``out=``; ``pb.plan(routine, ...)`` prepares one to run many times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from .calls import compute_directly, run
from .docstrings import complete
from .engines.direct import FAMILIES
from .engines.request import Options
from .layout import Level3Problem, MatrixDescriptor
from .layout.grid import one_of
from .layout.redistribution import with_c_like_d
from .layout.routines import ROUTINES, Routine
from .matrix import DistributedMatrix
from .matrix_calls import MatrixCall, Reading, Recipe, check_c, check_operands
from .plans import Task
from .runtime import Runtime

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
    return _run(
        "trsm", a, b, side=side, uplo=uplo, op_a=op_a, diag=diag, alpha=alpha, out=out,
        algo=algo,
    )  # fmt: skip


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
    return _run(
        "trmm", a, b, side=side, uplo=uplo, op_a=op_a, diag=diag, alpha=alpha, out=out,
        algo=algo,
    )  # fmt: skip


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
    return _run(
        "symm", a, b, c, side=side, uplo=uplo, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


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
    return _run(
        "hemm", a, b, c, side=side, uplo=uplo, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


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
    return _run(
        "syrk", a, c=c, uplo=uplo, op_a=op_a, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


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
    return _run(
        "herk", a, c=c, uplo=uplo, op_a=op_a, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


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
    return _run(
        "syr2k", a, b, c, uplo=uplo, op_a=op_a, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


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
    return _run(
        "her2k", a, b, c, uplo=uplo, op_a=op_a, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


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
    return _run(
        "syrkx", a, b, c, uplo=uplo, op_a=op_a, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


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
    return _run(
        "herkx", a, b, c, uplo=uplo, op_a=op_a, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


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
    return _run(
        "geadd", a, c=c, op_a=op_a, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


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
    return _run(
        "tradd", a, c=c, uplo=uplo, op_a=op_a, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


def routine_call(
    routine: str,
    a: Matrix,
    b: Matrix | None = None,
    c: Matrix | None = None,
    *,
    out: Matrix | None = None,
    **how: Any,
) -> MatrixCall:
    """Return a call of the level-3 routine of that name. Local."""
    return MatrixCall(routine, (a, b, c, out), {"routine": routine, **how}, _read)


def _run(
    routine: str,
    a: Matrix,
    b: Matrix | None = None,
    c: Matrix | None = None,
    *,
    out: Matrix | None = None,
    algo: str,
    **options: Any,
) -> Matrix:
    """Return what the level-3 routine of that name computes. Collective over the context."""
    voted = False
    if (
        routine in FAMILIES
        and type(algo) is str
        and algo == "auto"
        and (b is not None or "b" not in ROUTINES[routine].operands)
    ):
        found = compute_directly(
            routine, a, b, c, out, lambda: _result(routine, a, b, c, options.get("op_a", "N")), **options
        )
        if isinstance(found, DistributedMatrix):
            return found
        voted = found is False
    result: Matrix = run(routine_call(routine, a, b, c, out=out, algo=algo, **options), voted=voted)
    return result


def _read(
    ctx: Runtime[Any],
    facts: dict[str, Any],
    a: Matrix,
    b: Matrix | None,
    c: Matrix | None,
    out: Matrix | None,
    *,
    routine: str,
    side: Side = "L",
    uplo: Uplo = "L",
    op_a: Op = "N",
    diag: Diag = "N",
    beta: complex = 0,
    **how: Any,
) -> Reading:
    """Check the arguments of a routine, and add what must be equal on every rank to ``facts``. Local."""
    traits = ROUTINES[routine]
    required = traits.operands if traits.shape == "added" else traits.operands.replace("c", "")
    check_operands(ctx, required, {"a": a, "b": b, "c": c, "out": out})
    d = out.descriptor if out is not None else _result(routine, a, b, c, op_a)
    of_b, of_c = (None if x is None else x.descriptor for x in (b, c))
    asked = Level3Problem(routine, a.descriptor, d, of_b, of_c, side, uplo, op_a, diag)
    options = Options.of(d.dtype, beta=beta, real=" ".join(traits.real), **how)
    facts.update(asked.facts() | options.facts(), out="given" if out is not None else "new")
    asked.validate(_name_of_result(traits, b, c, out))
    check_c(asked, beta)
    problem = asked if options.beta != 0 else replace(asked, c=None)
    nearest = with_c_like_d(problem)
    reasons = () if nearest == problem else ("c is moved to the layout of the result",)
    partial = asked.written is not None
    recipe = Recipe(Task(problem, options, nearest, reasons), d, traits.in_place, partial)
    return recipe, recipe.matrices(ctx, a, b, c, out), None, None


def _name_of_result(traits: Routine, b: Matrix | None, c: Matrix | None, out: Matrix | None) -> str:
    """Return the argument that D's layout comes from, or "d" if that is A."""
    if out is not None:
        return "out"
    return "c" if c is not None else "d" if b is None or traits.shape == "updated" else "b"


def _result(routine: str, a: Matrix, b: Matrix | None, c: Matrix | None, op_a: str) -> MatrixDescriptor:
    """Return the layout of a new result: C's, else B's; for a rank-k update A's blocks on A's grid."""
    square = ROUTINES[routine].shape == "updated"
    like = c if c is not None or square else b
    if like is not None:
        return replace(like.descriptor, ld=None)
    x = a.descriptor
    along = 0 if one_of(op_a, "N") else 1
    order, block = x.shape[along], x.block[along]
    return MatrixDescriptor((order, order), (block, block), x.grid, dtype=x.dtype, order=x.order)
