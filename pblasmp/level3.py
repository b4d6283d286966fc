# SPDX-License-Identifier: Apache-2.0
"""The level-3 PBLAS beside the product: triangular and symmetric products, solves, rank-k updates, sums; plans.

Each routine returns a new matrix or writes into ``out=``; ``plan(routine, ...)`` prepares one to run many times.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, ParamSpec

from .errors import LayoutError
from .layout.level3 import ROUTINES
from .level3_plan import planned, run
from .matrix import DistributedMatrix
from .products import matmul, plan_matmul

if TYPE_CHECKING:
    from collections.abc import Callable

    from .layout.level3 import Diag, Side, Uplo
    from .layout.problem import Op
    from .plans import RoutinePlan

__all__ = [
    "geadd",
    "hemm",
    "her2k",
    "herk",
    "herkx",
    "plan",
    "symm",
    "syr2k",
    "syrk",
    "syrkx",
    "tradd",
    "trmm",
    "trsm",
]

Matrix = DistributedMatrix
Parameters = ParamSpec("Parameters")


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
    redistribute: bool = True,
    algo: str = "auto",
) -> Matrix:
    """Return X where ``op(A) X = alpha B``, or ``X op(A) = alpha B``. Collective over the context.

    Args:
        a: square triangular matrix, of which only the triangle ``uplo`` is read.
        b: m × n.
        side: "L": A stands to the left of B; "R": to the right.
        uplo: "L" or "U": which triangle A has.
        op_a: "N", "T" or "C" (conjugate transpose).
        diag: "U": A has ones on its diagonal, which is not read.
        alpha: a number; with 0 neither A nor B is read, and the result is 0.
        out: where to write the result, which may be ``b``; by default a new matrix that lies like B.
        redistribute: whether operands that the engine cannot take as they lie may be moved first.
        algo: the way to take: "auto", or one that the engine has (host: "shared", "gathered", "panels").

    Raises:
        LayoutError: sizes, types or options do not fit; every fault is named.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return run("trsm", **locals())


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
    redistribute: bool = True,
    algo: str = "auto",
) -> Matrix:
    """Return ``alpha op(A) B`` or ``alpha B op(A)`` for a triangular A. Collective over the context.

    Args:
        a: square triangular matrix, of which only the triangle ``uplo`` is read.
        b: m × n.
        side: "L": A stands to the left of B; "R": to the right.
        uplo: "L" or "U": which triangle A has.
        op_a: "N", "T" or "C" (conjugate transpose).
        diag: "U": A has ones on its diagonal, which is not read.
        alpha: a number; with 0 neither A nor B is read, and the result is 0.
        out: where to write the result, which may be ``b``; by default a new matrix that lies like B.
        redistribute: whether operands that the engine cannot take as they lie may be moved first.
        algo: the way to take: "auto", or one that the engine has (host: "shared", "gathered", "panels").

    Raises:
        LayoutError: sizes, types or options do not fit; every fault is named.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return run("trmm", **locals())


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
    redistribute: bool = True,
    algo: str = "auto",
) -> Matrix:
    """Return ``alpha A B + beta C`` or ``alpha B A + beta C`` for a symmetric A. Collective over the context.

    Args:
        a: square symmetric matrix, of which only the triangle ``uplo`` is read.
        b: m × n.
        c: lies like the result; None stands for zeros. With ``beta == 0`` it is not read.
        side: "L" for A B, "R" for B A.
        uplo: "L" or "U": which triangle of A is there.
        alpha, beta: numbers; with ``alpha == 0`` neither A nor B is read.
        out: where to write the result, which may be ``c``; by default a new one that lies like C, else like B.
        redistribute: whether operands that the engine cannot take as they lie may be moved first.
        algo: the way to take: "auto", or one that the engine has (host: "shared", "gathered", "panels").

    Raises:
        LayoutError: sizes, types or options do not fit; every fault is named.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return run("symm", **locals())


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
    redistribute: bool = True,
    algo: str = "auto",
) -> Matrix:
    """Return ``alpha A B + beta C`` or ``alpha B A + beta C`` for a Hermitian A. Collective over the context.

    Args:
        a: square Hermitian matrix, of which only the triangle ``uplo`` is read.
        b: m × n.
        c: lies like the result; None stands for zeros. With ``beta == 0`` it is not read.
        side: "L" for A B, "R" for B A.
        uplo: "L" or "U": which triangle of A is there.
        alpha, beta: numbers; with ``alpha == 0`` neither A nor B is read.
            The imaginary parts of A's diagonal are taken as 0 and not read.
        out: where to write the result, which may be ``c``; by default a new one that lies like C, else like B.
        redistribute: whether operands that the engine cannot take as they lie may be moved first.
        algo: the way to take: "auto", or one that the engine has (host: "shared", "gathered", "panels").

    Raises:
        LayoutError: sizes, types or options do not fit; every fault is named.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return run("hemm", **locals())


def syrk(
    a: Matrix,
    c: Matrix | None = None,
    *,
    uplo: Uplo = "L",
    op_a: Op = "N",
    alpha: complex = 1,
    beta: complex = 0,
    out: Matrix | None = None,
    redistribute: bool = True,
    algo: str = "auto",
) -> Matrix:
    """Return a triangle of ``alpha op(A) op(A)^T + beta C``. Collective over the context.

    Only the triangle ``uplo`` of C is read and only that of the result written: outside it ``out`` keeps its
    values, a new matrix has C's, or zeros where there is no C.

    Args:
        a: n × k, or k × n where ``op_a`` is not "N".
        c: n × n, lies like the result; None stands for zeros. With ``beta == 0`` it is not read.
        uplo: "L" or "U": which triangle is computed.
        op_a: "N" or "T"; for real types "C" is "T".
        alpha, beta: numbers; with ``alpha == 0`` A is not read.
        out: where to write the result, which may be ``c``; by default a new one that lies like C, else in
            A's blocks on A's grid.
        redistribute: whether operands that the engine cannot take as they lie may be moved first.
        algo: the way to take: "auto", or one that the engine has (host: "shared", "gathered", "panels", "summed").

    Raises:
        LayoutError: sizes, types or options do not fit; every fault is named.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return run("syrk", **locals())


def herk(
    a: Matrix,
    c: Matrix | None = None,
    *,
    uplo: Uplo = "L",
    op_a: Op = "N",
    alpha: float = 1,
    beta: float = 0,
    out: Matrix | None = None,
    redistribute: bool = True,
    algo: str = "auto",
) -> Matrix:
    """Return a triangle of ``alpha op(A) op(A)^H + beta C``. Collective over the context.

    Only the triangle ``uplo`` of C is read and only that of the result written: outside it ``out`` keeps its
    values, a new matrix has C's, or zeros where there is no C.

    The imaginary parts of the diagonal of C are not read, those of the result are 0.

    Args:
        a: n × k, or k × n where ``op_a`` is not "N".
        c: n × n, lies like the result; None stands for zeros. With ``beta == 0`` it is not read.
        uplo: "L" or "U": which triangle is computed.
        op_a: "N" or "C"; for real types "T" is "C".
        alpha, beta: real numbers; with ``alpha == 0`` A is not read.
        out: where to write the result, which may be ``c``; by default a new one that lies like C, else in
            A's blocks on A's grid.
        redistribute: whether operands that the engine cannot take as they lie may be moved first.
        algo: the way to take: "auto", or one that the engine has (host: "shared", "gathered", "panels", "summed").

    Raises:
        LayoutError: sizes, types or options do not fit; every fault is named.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return run("herk", **locals())


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
    redistribute: bool = True,
    algo: str = "auto",
) -> Matrix:
    """Return a triangle of ``alpha (op(A) op(B)^T + op(B) op(A)^T) + beta C``. Collective over the context.

    Only the triangle ``uplo`` of C is read and only that of the result written: outside it ``out`` keeps its
    values, a new matrix has C's, or zeros where there is no C.

    Args:
        a, b: n × k each, or k × n where ``op_a`` is not "N".
        c: n × n, lies like the result; None stands for zeros. With ``beta == 0`` it is not read.
        uplo: "L" or "U": which triangle is computed.
        op_a: "N" or "T"; for real types "C" is "T".
        alpha, beta: numbers; with ``alpha == 0`` neither A nor B is read.
        out: where to write the result, which may be ``c``; by default a new one that lies like C, else in
            A's blocks on A's grid.
        redistribute: whether operands that the engine cannot take as they lie may be moved first.
        algo: the way to take: "auto", or one that the engine has (host: "shared", "gathered", "panels", "summed").

    Raises:
        LayoutError: sizes, types or options do not fit; every fault is named.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return run("syr2k", **locals())


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
    redistribute: bool = True,
    algo: str = "auto",
) -> Matrix:
    """Return a triangle of ``alpha op(A) op(B)^H + conj(alpha) op(B) op(A)^H + beta C``. Collective over the context.

    Only the triangle ``uplo`` of C is read and only that of the result written: outside it ``out`` keeps its
    values, a new matrix has C's, or zeros where there is no C.

    The imaginary parts of the diagonal of C are not read, those of the result are 0.

    Args:
        a, b: n × k each, or k × n where ``op_a`` is not "N".
        c: n × n, lies like the result; None stands for zeros. With ``beta == 0`` it is not read.
        uplo: "L" or "U": which triangle is computed.
        op_a: "N" or "C"; for real types "T" is "C".
        alpha, beta: numbers, beta a real one; with ``alpha == 0`` neither A nor B is read.
        out: where to write the result, which may be ``c``; by default a new one that lies like C, else in
            A's blocks on A's grid.
        redistribute: whether operands that the engine cannot take as they lie may be moved first.
        algo: the way to take: "auto", or one that the engine has (host: "shared", "gathered", "panels", "summed").

    Raises:
        LayoutError: sizes, types or options do not fit; every fault is named.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return run("her2k", **locals())


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
    redistribute: bool = True,
    algo: str = "auto",
) -> Matrix:
    """Return a triangle of ``alpha op(A) op(B)^T + beta C``, taken to be symmetric. Collective over the context.

    Only the triangle ``uplo`` of C is read and only that of the result written: outside it ``out`` keeps its
    values, a new matrix has C's, or zeros where there is no C.

    Args:
        a, b: n × k each, or k × n where ``op_a`` is not "N".
        c: n × n, lies like the result; None stands for zeros. With ``beta == 0`` it is not read.
        uplo: "L" or "U": which triangle is computed.
        op_a: "N" or "T"; for real types "C" is "T".
        alpha, beta: numbers; with ``alpha == 0`` neither A nor B is read.
        out: where to write the result, which may be ``c``; by default a new one that lies like C, else in
            A's blocks on A's grid.
        redistribute: whether operands that the engine cannot take as they lie may be moved first.
        algo: the way to take: "auto", or one that the engine has (host: "shared", "gathered", "panels", "summed").

    Raises:
        LayoutError: sizes, types or options do not fit; every fault is named.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return run("syrkx", **locals())


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
    redistribute: bool = True,
    algo: str = "auto",
) -> Matrix:
    """Return a triangle of ``alpha op(A) op(B)^H + beta C``, taken to be Hermitian. Collective over the context.

    Only the triangle ``uplo`` of C is read and only that of the result written: outside it ``out`` keeps its
    values, a new matrix has C's, or zeros where there is no C.

    The imaginary parts of the diagonal of C are not read, those of the result are 0.

    Args:
        a, b: n × k each, or k × n where ``op_a`` is not "N".
        c: n × n, lies like the result; None stands for zeros. With ``beta == 0`` it is not read.
        uplo: "L" or "U": which triangle is computed.
        op_a: "N" or "C"; for real types "T" is "C".
        alpha, beta: numbers, beta a real one; with ``alpha == 0`` neither A nor B is read.
        out: where to write the result, which may be ``c``; by default a new one that lies like C, else in
            A's blocks on A's grid.
        redistribute: whether operands that the engine cannot take as they lie may be moved first.
        algo: the way to take: "auto", or one that the engine has (host: "shared", "gathered", "panels", "summed").

    Raises:
        LayoutError: sizes, types or options do not fit; every fault is named.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return run("herkx", **locals())


def geadd(
    a: Matrix,
    c: Matrix,
    *,
    op_a: Op = "N",
    alpha: complex = 1,
    beta: complex = 1,
    out: Matrix | None = None,
    redistribute: bool = True,
    algo: str = "auto",
) -> Matrix:
    """Return ``alpha op(A) + beta C``. Collective over the context.

    Args:
        a: m × n, or n × m where ``op_a`` is not "N".
        c: m × n; with ``beta == 0`` it is not read.
        op_a: "N", "T" or "C" (conjugate transpose).
        alpha, beta: numbers; with ``alpha == 0`` A is not read.
        out: where to write the result, which may be ``c``; by default a new matrix that lies like C.
        redistribute: whether operands that the engine cannot take as they lie may be moved first.
        algo: the way to take: "auto", or one that the engine has (host: "moved").

    Raises:
        LayoutError: sizes, types or options do not fit; every fault is named.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return run("geadd", **locals())


def tradd(
    a: Matrix,
    c: Matrix,
    *,
    uplo: Uplo = "L",
    op_a: Op = "N",
    alpha: complex = 1,
    beta: complex = 1,
    out: Matrix | None = None,
    redistribute: bool = True,
    algo: str = "auto",
) -> Matrix:
    """Return the triangle or trapezoid ``uplo`` of ``alpha op(A) + beta C``. Collective over the context.

    Only the triangle ``uplo`` of C is read and only that of the result written: outside it ``out`` keeps its
    values, a new matrix has C's.

    Args:
        a: m × n, or n × m where ``op_a`` is not "N".
        c: m × n; with ``beta == 0`` it is not read.
        uplo: "L" or "U": which side of the main diagonal of op(A) and C.
        op_a: "N", "T" or "C" (conjugate transpose).
        alpha, beta: numbers; with ``alpha == 0`` A is not read.
        out: where to write the result, which may be ``c``; by default a new matrix that lies like C.
        redistribute: whether operands that the engine cannot take as they lie may be moved first.
        algo: the way to take: "auto", or one that the engine has (host: "moved").

    Raises:
        LayoutError: sizes, types or options do not fit; every fault is named.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.
    """
    return run("tradd", **locals())


def plan(
    routine: Callable[Parameters, Matrix], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> RoutinePlan:
    """Prepare ``routine(*args, **kwargs)``, to run it any number of times. Collective over the context.

    ``pb.plan(pb.syrk, a, c, uplo="U", beta=1, out=c)``, say; ``plan_matmul`` is ``plan`` of ``matmul``.

    Args:
        routine: ``pb.matmul`` or a level-3 routine.
        *args: its arguments, ``**kwargs`` as well.

    Returns:
        A plan: ``plan()`` runs it on what the matrices then hold, ``plan(c=other)`` on others that lie the same way.
        Without ``out`` every run writes the same new matrix.

    Raises:
        LayoutError: ``routine`` is no routine of pblasmp; or what the routine itself raises.
    """
    name = getattr(routine, "__name__", repr(routine))
    if routine is not matmul and not (name in ROUTINES and routine is globals()[name]):
        raise LayoutError(f"plan: expected pb.matmul or a level-3 routine such as pb.trsm, got {name}")
    given = inspect.signature(routine).bind(*args, **kwargs)
    if routine is matmul:
        return plan_matmul(*given.args, **given.kwargs)
    given.apply_defaults()
    return planned(name, **given.arguments)
