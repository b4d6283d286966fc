# SPDX-License-Identifier: Apache-2.0
"""The level-3 PBLAS other than GEMM: triangular and symmetric products, solves, rank-k updates, sums.

Each routine returns a new matrix or writes into ``out=``; ``pb.plan(routine, ...)`` prepares one to run many times.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .calls import MatrixCall, compute_directly, run
from .engines.direct import DIRECT
from .engines.request import Options
from .layout import Level3Problem, MatrixDescriptor
from .layout.redistribution import with_c_like_d
from .layout.routines import ROUTINES, Routine
from .matrix import DistributedMatrix
from .plans import Reading, Recipe, check_c, check_operands
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
    """Return X with ``op(A) X = alpha B``, or ``X op(A) = alpha B``. Collective over the context.

    Args:
        a: square triangular matrix, of which only the triangle ``uplo`` is read.
        b: m × n.
        side: "L": A is to the left of B; "R": to the right.
        uplo: "L" or "U": which triangle A has.
        op_a: "N", "T" or "C" (conjugate transpose).
        diag: "U": A has ones on its diagonal, which is not read.
        alpha: a number; with 0 neither A nor B is read, and the result is 0.
        out: where to write the result, which may be ``b``; by default a new matrix in the layout of B.
        algo: "auto", or the name of an algorithm: ``pb.algorithms`` lists them.

    Raises:
        ArgumentError: sizes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return _run(
        "trsm", a, b, side=side, uplo=uplo, op_a=op_a, diag=diag, alpha=alpha, out=out,
        algo=algo,
    )  # fmt: skip


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
    """Return ``alpha op(A) B`` or ``alpha B op(A)`` for a triangular A. Collective over the context.

    Args:
        a: square triangular matrix, of which only the triangle ``uplo`` is read.
        b: m × n.
        side: "L": A is to the left of B; "R": to the right.
        uplo: "L" or "U": which triangle A has.
        op_a: "N", "T" or "C" (conjugate transpose).
        diag: "U": A has ones on its diagonal, which is not read.
        alpha: a number; with 0 neither A nor B is read, and the result is 0.
        out: where to write the result, which may be ``b``; by default a new matrix in the layout of B.
        algo: "auto", or the name of an algorithm: ``pb.algorithms`` lists them.

    Raises:
        ArgumentError: sizes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return _run(
        "trmm", a, b, side=side, uplo=uplo, op_a=op_a, diag=diag, alpha=alpha, out=out,
        algo=algo,
    )  # fmt: skip


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
    """Return ``alpha A B + beta C`` or ``alpha B A + beta C`` for a symmetric A. Collective over the context.

    Args:
        a: square symmetric matrix, of which only the triangle ``uplo`` is read.
        b: m × n.
        c: like the result, in any layout; None means zeros. With ``beta == 0`` it is not read.
        side: "L" for A B, "R" for B A.
        uplo: "L" or "U": which triangle of A is stored.
        alpha, beta: numbers; with ``alpha == 0`` neither A nor B is read.
        out: where to write the result, which may be ``c``; by default a new one in the layout of C, else of B.
        algo: "auto", or the name of an algorithm: ``pb.algorithms`` lists them.

    Raises:
        ArgumentError: sizes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return _run(
        "symm", a, b, c, side=side, uplo=uplo, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


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
    """Return ``alpha A B + beta C`` or ``alpha B A + beta C`` for a Hermitian A. Collective over the context.

    Args:
        a: square Hermitian matrix, of which only the triangle ``uplo`` is read.
        b: m × n.
        c: like the result, in any layout; None means zeros. With ``beta == 0`` it is not read.
        side: "L" for A B, "R" for B A.
        uplo: "L" or "U": which triangle of A is stored.
        alpha, beta: numbers; with ``alpha == 0`` neither A nor B is read.
            The imaginary parts of A's diagonal are taken as 0 and not read.
        out: where to write the result, which may be ``c``; by default a new one in the layout of C, else of B.
        algo: "auto", or the name of an algorithm: ``pb.algorithms`` lists them.

    Raises:
        ArgumentError: sizes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return _run(
        "hemm", a, b, c, side=side, uplo=uplo, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


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
    """Return a triangle of ``alpha op(A) op(A)^T + beta C``. Collective over the context.

    Only the triangle ``uplo`` of C is read, and only that of the result is written: outside it ``out`` keeps its
    values, and a new matrix has those of C, or zeros if there is no C.

    Args:
        a: n × k, or k × n if ``op_a`` is not "N".
        c: n × n, in any layout; None means zeros. With ``beta == 0`` it is not read.
        uplo: "L" or "U": which triangle is computed.
        op_a: "N" or "T"; for real types "C" is "T".
        alpha, beta: numbers; with ``alpha == 0`` A is not read.
        out: where to write the result, which may be ``c``; by default a new one in the layout of C, else in
            A's blocks on A's grid.
        algo: "auto", or the name of an algorithm: ``pb.algorithms`` lists them.

    Raises:
        ArgumentError: sizes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return _run(
        "syrk", a, c=c, uplo=uplo, op_a=op_a, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


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
    """Return a triangle of ``alpha op(A) op(A)^H + beta C``. Collective over the context.

    Only the triangle ``uplo`` of C is read, and only that of the result is written: outside it ``out`` keeps its
    values, and a new matrix has those of C, or zeros if there is no C.

    The imaginary parts of the diagonal of C are not read; those of the result are 0.

    Args:
        a: n × k, or k × n if ``op_a`` is not "N".
        c: n × n, in any layout; None means zeros. With ``beta == 0`` it is not read.
        uplo: "L" or "U": which triangle is computed.
        op_a: "N" or "C"; for real types "T" is "C".
        alpha, beta: real numbers; with ``alpha == 0`` A is not read.
        out: where to write the result, which may be ``c``; by default a new one in the layout of C, else in
            A's blocks on A's grid.
        algo: "auto", or the name of an algorithm: ``pb.algorithms`` lists them.

    Raises:
        ArgumentError: sizes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return _run(
        "herk", a, c=c, uplo=uplo, op_a=op_a, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


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
    """Return a triangle of ``alpha (op(A) op(B)^T + op(B) op(A)^T) + beta C``. Collective over the context.

    Only the triangle ``uplo`` of C is read, and only that of the result is written: outside it ``out`` keeps its
    values, and a new matrix has those of C, or zeros if there is no C.

    Args:
        a, b: n × k each, or k × n if ``op_a`` is not "N".
        c: n × n, in any layout; None means zeros. With ``beta == 0`` it is not read.
        uplo: "L" or "U": which triangle is computed.
        op_a: "N" or "T"; for real types "C" is "T".
        alpha, beta: numbers; with ``alpha == 0`` neither A nor B is read.
        out: where to write the result, which may be ``c``; by default a new one in the layout of C, else in
            A's blocks on A's grid.
        algo: "auto", or the name of an algorithm: ``pb.algorithms`` lists them.

    Raises:
        ArgumentError: sizes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return _run(
        "syr2k", a, b, c, uplo=uplo, op_a=op_a, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


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
    """Return a triangle of ``alpha op(A) op(B)^H + conj(alpha) op(B) op(A)^H + beta C``. Collective over the context.

    Only the triangle ``uplo`` of C is read, and only that of the result is written: outside it ``out`` keeps its
    values, and a new matrix has those of C, or zeros if there is no C.

    The imaginary parts of the diagonal of C are not read; those of the result are 0.

    Args:
        a, b: n × k each, or k × n if ``op_a`` is not "N".
        c: n × n, in any layout; None means zeros. With ``beta == 0`` it is not read.
        uplo: "L" or "U": which triangle is computed.
        op_a: "N" or "C"; for real types "T" is "C".
        alpha, beta: numbers, of which beta is real; with ``alpha == 0`` neither A nor B is read.
        out: where to write the result, which may be ``c``; by default a new one in the layout of C, else in
            A's blocks on A's grid.
        algo: "auto", or the name of an algorithm: ``pb.algorithms`` lists them.

    Raises:
        ArgumentError: sizes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return _run(
        "her2k", a, b, c, uplo=uplo, op_a=op_a, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


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
    """Return a triangle of ``alpha op(A) op(B)^T + beta C``, taken to be symmetric. Collective over the context.

    Only the triangle ``uplo`` of C is read, and only that of the result is written: outside it ``out`` keeps its
    values, and a new matrix has those of C, or zeros if there is no C.

    Args:
        a, b: n × k each, or k × n if ``op_a`` is not "N".
        c: n × n, in any layout; None means zeros. With ``beta == 0`` it is not read.
        uplo: "L" or "U": which triangle is computed.
        op_a: "N" or "T"; for real types "C" is "T".
        alpha, beta: numbers; with ``alpha == 0`` neither A nor B is read.
        out: where to write the result, which may be ``c``; by default a new one in the layout of C, else in
            A's blocks on A's grid.
        algo: "auto", or the name of an algorithm: ``pb.algorithms`` lists them.

    Raises:
        ArgumentError: sizes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return _run(
        "syrkx", a, b, c, uplo=uplo, op_a=op_a, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


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
    """Return a triangle of ``alpha op(A) op(B)^H + beta C``, taken to be Hermitian. Collective over the context.

    Only the triangle ``uplo`` of C is read, and only that of the result is written: outside it ``out`` keeps its
    values, and a new matrix has those of C, or zeros if there is no C.

    The imaginary parts of the diagonal of C are not read; those of the result are 0.

    Args:
        a, b: n × k each, or k × n if ``op_a`` is not "N".
        c: n × n, in any layout; None means zeros. With ``beta == 0`` it is not read.
        uplo: "L" or "U": which triangle is computed.
        op_a: "N" or "C"; for real types "T" is "C".
        alpha, beta: numbers, of which beta is real; with ``alpha == 0`` neither A nor B is read.
        out: where to write the result, which may be ``c``; by default a new one in the layout of C, else in
            A's blocks on A's grid.
        algo: "auto", or the name of an algorithm: ``pb.algorithms`` lists them.

    Raises:
        ArgumentError: sizes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return _run(
        "herkx", a, b, c, uplo=uplo, op_a=op_a, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


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
    """Return ``alpha op(A) + beta C``. Collective over the context.

    Args:
        a: m × n, or n × m if ``op_a`` is not "N".
        c: m × n; with ``beta == 0`` it is not read.
        op_a: "N", "T" or "C" (conjugate transpose).
        alpha, beta: numbers; with ``alpha == 0`` A is not read.
        out: where to write the result, which may be ``c``; by default a new matrix in the layout of C.
        algo: "auto", or the name of an algorithm: ``pb.algorithms`` lists them.

    Raises:
        ArgumentError: sizes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return _run(
        "geadd", a, c=c, op_a=op_a, alpha=alpha, beta=beta, out=out, algo=algo,
    )  # fmt: skip


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
    """Return the triangle or trapezoid ``uplo`` of ``alpha op(A) + beta C``. Collective over the context.

    Only the triangle ``uplo`` of C is read, and only that of the result is written: outside it ``out`` keeps its
    values, and a new matrix has those of C.

    Args:
        a: m × n, or n × m if ``op_a`` is not "N".
        c: m × n; with ``beta == 0`` it is not read.
        uplo: "L" or "U": which side of the main diagonal of op(A) and C.
        op_a: "N", "T" or "C" (conjugate transpose).
        alpha, beta: numbers; with ``alpha == 0`` A is not read.
        out: where to write the result, which may be ``c``; by default a new matrix in the layout of C.
        algo: "auto", or the name of an algorithm: ``pb.algorithms`` lists them.

    Raises:
        ArgumentError: sizes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
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
    **how: Any,
) -> Matrix:
    """Return what the level-3 routine of that name computes. Collective over the context."""
    voted = False
    if (
        routine in DIRECT
        and how["algo"] == "auto"
        and (b is not None or "b" not in ROUTINES[routine].operands)
    ):
        options = {name: value for name, value in how.items() if name != "algo"}
        found = compute_directly(
            routine, a, b, c, out, lambda: _result(routine, a, b, c, how.get("op_a", "N")), **options
        )
        if isinstance(found, DistributedMatrix):
            return found
        voted = found is False
    result: Matrix = run(routine_call(routine, a, b, c, out=out, **how), voted=voted)
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
    recipe = Recipe(routine, problem, options, nearest, reasons, d, traits.in_place, partial)
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
    along = int(op_a != "N")
    order, block = x.shape[along], x.block[along]
    return MatrixDescriptor((order, order), (block, block), x.grid, dtype=x.dtype, order=x.order)
