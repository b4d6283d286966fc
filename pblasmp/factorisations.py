# SPDX-License-Identifier: Apache-2.0
"""Factorisations, and systems of equations: Cholesky, LU with partial pivoting, QR, and what is solved with them.

Matrices of a call may have any layouts: each is moved to panels, computed with there, and moved back.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from .dtypes import ELEMENT_TYPES
from .engines.dense.cholesky import CholeskyJob
from .engines.dense.condition import ConditionJob
from .engines.dense.lu import LuJob
from .engines.dense.qr import LeastSquaresJob, QrJob
from .engines.dense.triangular import TriangularJob
from .engines.protocol import Engine
from .errors import ArgumentError, FactorisationError, LayoutError, PblasmpError, faults_text
from .handle import Handle
from .layout import MatrixDescriptor
from .layout.grid import one_of, short_repr
from .matrix import DistributedMatrix
from .plans import check_operands, context_of
from .runtime import Runtime

if TYPE_CHECKING:
    from types import TracebackType

    from .layout.level3 import Diag, Uplo
    from .layout.problem import Op

__all__ = [
    "QrFactors",
    "apply_q",
    "cho_solve",
    "cholesky",
    "cond_estimate",
    "form_q",
    "inv",
    "inverse_of",
    "lstsq",
    "lstsq_in_place",
    "lu",
    "lu_solve",
    "lu_with_info",
    "qr",
    "slogdet",
    "solve",
    "solve_keeping",
]

Matrix = DistributedMatrix
Assume = Literal["gen", "pos", "tri"]
Pivots = NDArray[np.int64]
T = TypeVar("T")

_NO_PIVOTS = np.empty(0, np.int64)

_OPTIONAL = {"out", "factor"}
_TYPES = tuple(name for name, row in ELEMENT_TYPES.items() if row.blas)


def cholesky(a: Matrix, uplo: Uplo = "L", out: Matrix | None = None) -> Matrix:
    """Return the Cholesky factor of a positive definite matrix. Collective over the context.

    A = L L^H with ``uplo="L"``, A = U^H U with ``uplo="U"``. Only that triangle of A is read and only that of the
    result is written: outside it ``out`` keeps its values, and a new matrix has zeros.

    Args:
        a: n × n, symmetric or Hermitian: float32, float64, complex64 or complex128, in any layout.
        uplo: "L" or "U".
        out: where to write the factor, which may be ``a``; by default a new matrix in the layout of A.

    Raises:
        FactorisationError: A is not positive definite; ``index`` is the last row, from 0, of the first leading
            principal minor that is not. The columns of L (rows of U) that were finished before are in ``out``.
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine has no factorisations.

    Source: LAPACK, ?POTRF.
    """
    call = _Call("cholesky", {"a": a, "out": out}, {"uplo": uplo})

    def check() -> None:
        call.square("a")
        call.letter("uplo", "LU")
        call.like("out", "a")

    with call:
        result = call.agree(check, lambda: call.result(out, a.descriptor, zeros=True))
        upper = uplo == "U"
        of, to = (_turned(x.descriptor, upper) for x in (a, result))
        job = call.job(lambda engine: CholeskyJob(engine, of, to, conjugate=upper))
        info = job.run(_turned(a.local, upper), _turned(result.local, upper))
        if info:
            call.not_positive(info)
    return result


def cho_solve(factor: Matrix, b: Matrix, uplo: Uplo = "L", out: Matrix | None = None) -> Matrix:
    """Return X with A X = B for a matrix A that ``cholesky`` has factored. Collective over the context.

    Args:
        factor: n × n: L or U, of which the other triangle is not read.
        b: n × m.
        uplo: "L" or "U": which of them ``factor`` is.
        out: where to write X, which may be ``b``; by default a new matrix in the layout of B.

    Raises:
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine has no factorisations.

    Source: LAPACK, ?POTRS.
    """
    call = _Call("cho_solve", {"factor": factor, "b": b, "out": out}, {"uplo": uplo})

    def check() -> None:
        call.square("factor")
        call.letter("uplo", "LU")
        call.right("b", "factor")
        call.like("out", "b")

    with call:
        result = call.agree(check, lambda: call.result(out, b.descriptor))
        upper = uplo == "U"
        of, right, to = _turned(factor.descriptor, upper), b.descriptor, result.descriptor
        job = call.job(
            lambda engine: CholeskyJob(engine, of, None, right, to, factored=True, conjugate=upper)
        )
        job.run(_turned(factor.local, upper), None, b.local, result.local)
    return result


def lu(a: Matrix, out: Matrix | None = None) -> tuple[Matrix, Pivots]:
    """Return the LU factors of a matrix with partial pivoting, and the pivots. Collective over the context.

    P A = L U. L has a diagonal of ones, which is not stored. In step i row i was exchanged with row ``pivots[i]``.

    Args:
        a: m × n: float32, float64, complex64 or complex128, in any layout.
        out: where to write L, below the diagonal, and U; it may be ``a``. By default a new matrix in the layout of A.

    Returns:
        The matrix of the factors, and min(m, n) pivots, counted from 0; the same array of int64 on every rank.

    Raises:
        FactorisationError: A is exactly singular: the diagonal element of U at ``index`` is zero. The factors are
            complete and in ``out``.
        ArgumentError: shapes or types do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine has no factorisations.

    Source: LAPACK, ?GETRF.
    """
    result, job, info, call = _factor_lu("lu", a, out)
    if info:
        call.singular(info)
    return result, job.pivots


def lu_with_info(a: Matrix, out: Matrix | None = None) -> tuple[Matrix, Pivots, int]:
    """Do as ``lu``, but return INFO as LAPACK does, also if A is singular. Collective over the context."""
    result, job, info, _ = _factor_lu("lu", a, out)
    return result, job.pivots, info


def _factor_lu(
    name: str, a: Matrix, out: Matrix | None, *, square: bool = False
) -> tuple[Matrix, LuJob, int, _Call]:
    """Factor A; return the factors, what was found with them, and INFO. Collective over the context."""
    call = _Call(name, {"a": a, "out": out}, {})

    def check() -> None:
        call.square("a", any_shape=not square)
        call.like("out", "a")

    with call:
        result = call.agree(check, lambda: call.result(out, a.descriptor))
        of, to = a.descriptor, result.descriptor
        job = call.job(lambda engine: LuJob(engine, of, to))
        info = job.run(a.local, result.local)
    return result, job, info, call


def lu_solve(factors: Matrix, pivots: Pivots, b: Matrix, op_a: Op = "N", out: Matrix | None = None) -> Matrix:
    """Return X with op(A) X = B for a matrix A that ``lu`` has factored. Collective over the context.

    Args:
        factors: n × n: L and U as ``lu`` returns them.
        pivots: n integers, likewise; the same on every rank.
        b: n × m.
        op_a: "N", "T" (transpose) or "C" (conjugate transpose).
        out: where to write X, which may be ``b``; by default a new matrix in the layout of B.

    Raises:
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine has no factorisations.

    Source: LAPACK, ?GETRS.
    """
    given, text = np.asarray(pivots), ""
    if given.ndim == 1 and given.dtype.kind in "iu":
        text = hashlib.blake2b(given.astype(np.int64).tobytes(), digest_size=8).hexdigest()
    call = _Call("lu_solve", {"factors": factors, "b": b, "out": out}, {"op_a": op_a}, {"pivots": text})

    def check() -> None:
        call.square("factors")
        call.letter("op_a", "NTC")
        call.right("b", "factors")
        call.like("out", "b")
        n = factors.shape[0]
        if not text or len(given) != n or not ((given >= 0) & (given < n)).all():
            call.fault(f"pivots: expected {n} integers from 0 to {n - 1}, got {short_repr(pivots)}")

    with call:
        result = call.agree(check, lambda: call.result(out, b.descriptor))
        of, right, to = factors.descriptor, b.descriptor, result.descriptor
        job = call.job(lambda engine: LuJob(engine, of, None, right, to, factored=True, op=op_a))
        job.run(factors.local, None, b.local, result.local, given.astype(np.int64))
    return result


def solve(
    a: Matrix,
    b: Matrix,
    assume: Assume = "gen",
    *,
    op_a: Op = "N",
    uplo: Uplo = "L",
    diag: Diag = "N",
    out: Matrix | None = None,
) -> Matrix:
    """Return X with op(A) X = B. Collective over the context.

    Args:
        a: n × n: float32, float64, complex64 or complex128, in any layout. It keeps its values.
        b: n × m, in any layout.
        assume: "gen": any matrix, by LU with partial pivoting; "pos": symmetric or Hermitian and positive definite, by
            Cholesky; "tri": triangular.
        op_a: "N", "T" (transpose) or "C" (conjugate transpose).
        uplo: with "pos" and "tri", which triangle of A is read.
        diag: with "tri": "U" takes the diagonal as ones and does not read it.
        out: where to write X, which may be ``b``; by default a new matrix in the layout of B.

    Raises:
        FactorisationError: A is exactly singular, or not positive definite, at ``index``; then X is not computed.
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine has no factorisations.

    Source: LAPACK, ?GESV, ?POSV, ?TRTRS.
    """
    return solve_keeping(a, b, assume, op_a=op_a, uplo=uplo, diag=diag, out=out)[0]


def solve_keeping(
    a: Matrix,
    b: Matrix,
    assume: Assume = "gen",
    *,
    op_a: Op = "N",
    uplo: Uplo = "L",
    diag: Diag = "N",
    factor: Matrix | None = None,
    out: Matrix | None = None,
) -> tuple[Matrix, Pivots]:
    """Do as ``solve``, write A's factor to ``factor`` if there is one, and return the pivots, too. Collective."""
    given = {"a": a, "b": b, "factor": factor, "out": out}
    call = _Call("solve", given, {"assume": assume, "op_a": op_a, "uplo": uplo, "diag": diag})

    def check() -> None:
        call.square("a")
        call.letter("assume", ("gen", "pos", "tri"))
        call.letter("op_a", "NTC")
        call.letter("uplo", "LU")
        call.letter("diag", "NU")
        call.right("b", "a")
        call.like("factor", "a")
        call.like("out", "b")

    with call:
        result = call.agree(check, lambda: call.result(out, b.descriptor))
        of, right, to = a.descriptor, b.descriptor, result.descriptor
        kept, into = (None, None) if factor is None else (factor.descriptor, factor.local)
        upper, conjugated = uplo == "U", op_a == "C"
        if assume == "gen":
            general = call.job(lambda engine: LuJob(engine, of, kept, right, to, op=op_a))
            info = general.run(a.local, into, b.local, result.local)
            return (result, general.pivots) if not info else call.singular(info, factor)
        if assume == "tri":
            op = op_a if not upper else "T" if op_a == "N" else "N"
            tri = call.job(
                lambda engine: TriangularJob(
                    engine,
                    _turned(of, upper),
                    right,
                    to,
                    unit=diag == "U",
                    op=op,
                    conjugate=upper and conjugated,
                )
            )
            info = tri.run(_turned(a.local, upper), b.local, result.local)
            return (result, _NO_PIVOTS) if not info else call.singular(info)
        # The transpose of a Hermitian matrix is its conjugate.
        conjugate = upper != (op_a == "T")
        positive = call.job(
            lambda engine: CholeskyJob(
                engine, _turned(of, upper), None if kept is None else _turned(kept, upper), right, to,
                conjugate=conjugate,
            )
        )  # fmt: skip
        info = positive.run(
            _turned(a.local, upper), None if into is None else _turned(into, upper), b.local, result.local
        )
        return (result, _NO_PIVOTS) if not info else call.not_positive(info)


def inv(
    a: Matrix,
    assume: Assume = "gen",
    *,
    uplo: Uplo = "L",
    diag: Diag = "N",
    out: Matrix | None = None,
) -> Matrix:
    """Return the inverse of a matrix. Collective over the context.

    To solve a system, ``solve`` takes a third of the operations and is more accurate.

    Args:
        a: n × n: float32, float64, complex64 or complex128, in any layout.
        assume: as for ``solve``.
        uplo: with "pos" and "tri", which triangle of A is read and of the inverse written: outside it ``out`` keeps its
            values, and a new matrix has zeros.
        diag: with "tri": "U" takes the diagonal as ones, which are neither read nor written.
        out: where to write the inverse, which may be ``a``; by default a new matrix in the layout of A.

    Raises:
        FactorisationError: A is exactly singular, or not positive definite, at ``index``.
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine has no factorisations.

    Source: LAPACK, ?GETRI, ?POTRI, ?TRTRI.
    """
    return inverse_of(a, None, assume, uplo=uplo, diag=diag, out=out)


def inverse_of(
    a: Matrix,
    pivots: Pivots | None = None,
    assume: Assume = "gen",
    *,
    uplo: Uplo = "L",
    diag: Diag = "N",
    factored: bool = False,
    out: Matrix | None = None,
) -> Matrix:
    """Do as ``inv``, or if ``factored`` from a factor and ``pivots`` that are legal and equal on every rank."""
    how = {"assume": assume, "uplo": uplo, "diag": diag, "factored": factored}
    call = _Call("inv", {"a": a, "out": out}, how)

    def check() -> None:
        call.square("a")
        call.letter("assume", ("gen", "pos", "tri"))
        call.letter("uplo", "LU")
        call.letter("diag", "NU")
        call.like("out", "a")

    with call:
        result = call.agree(check, lambda: call.result(out, a.descriptor, zeros=assume != "gen"))
        upper = uplo == "U" and assume != "gen"
        of, to, local, into = (
            _turned(x, upper) for x in (a.descriptor, result.descriptor, a.local, result.local)
        )
        if assume == "gen":
            general = call.job(
                lambda engine: LuJob(engine, of, None, None, to, factored=factored, inverse=True)
            )
            info = general.run(local, None, None, into, pivots)
            return result if not info else call.singular(info)
        if assume == "tri":
            tri = call.job(lambda engine: TriangularJob(engine, of, None, to, unit=diag == "U"))
            info = tri.run(local, None, into)
            return result if not info else call.singular(info)
        positive = call.job(
            lambda engine: CholeskyJob(
                engine, of, None, None, to, factored=factored, inverse=True, conjugate=upper
            )
        )
        info = positive.run(local, None, None, into)
        return result if not info else call.not_positive(info)


def slogdet(a: Matrix) -> tuple[Any, float]:
    """Return the sign of the determinant and the logarithm of its absolute value. Collective over the context.

    As NumPy does; the same on every rank.

    Args:
        a: n × n: float32, float64, complex64 or complex128, in any layout. It keeps its values.

    Returns:
        ``(sign, logabsdet)`` with det(A) = sign exp(logabsdet): a number of A's type, of absolute value 1, and a real
        one. For an exactly singular matrix 0 and minus infinity.

    Raises:
        ArgumentError: shapes or types do not fit.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine has no factorisations.

    Source: NumPy, numpy.linalg.slogdet.
    """
    _, job, info, _ = _factor_lu("slogdet", a, None, square=True)
    diagonal, exchanged = job.diagonal, job.pivots != np.arange(len(job.pivots))
    if info:
        return a.dtype.type(0), -math.inf
    sizes = np.abs(diagonal)
    sign = np.prod(diagonal / sizes) * (-1 if exchanged.sum() % 2 else 1)
    return a.dtype.type(sign), float(np.log(sizes.astype(np.float64)).sum())


def cond_estimate(a: Matrix) -> float:
    """Return an estimate of the condition number of a matrix in the 1-norm. Collective over the context.

    It is the norm of A times a lower bound of the norm of its inverse, from an LU factorisation and a few solves. The
    bound is nearly always within a factor of 3. The same on every rank.

    Args:
        a: n × n: float32, float64, complex64 or complex128, in any layout. It keeps its values.

    Returns:
        The estimate; infinite if A is exactly singular, 0 for an empty matrix.

    Raises:
        ArgumentError: shapes or types do not fit.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine has no factorisations.

    Source: LAPACK, ?GECON.
    """
    call = _Call("cond_estimate", {"a": a}, {})
    with call:
        call.agree(lambda: call.square("a"), lambda: None)
        of = a.descriptor
        job = call.job(lambda engine: ConditionJob(engine, of))
        return job.run(a.local)


class QrFactors:
    """A QR factorisation A = Q R, with Q as Householder reflectors. Made by ``pb.qr``. Local.

    Attributes:
        factors: m × n: R in the upper triangle or trapezoid, and below it the vectors of the reflectors.
        tau: the factors of the min(m, n) reflectors, the same array on every rank.
    """

    def __init__(self, factors: Matrix, tau: NDArray[Any]) -> None:
        self.factors, self.tau = factors, tau

    def r(self) -> Matrix:
        """Return R, min(m, n) × n, as a new matrix. Collective over the context."""
        least = min(self.factors.shape)
        top = self.factors[:least, :]
        return top.redistribute(replace(top.descriptor, ld=None), uplo="U")

    def q(self) -> Matrix:
        """Return the first min(m, n) columns of Q as a new matrix. Collective over the context.

        Source: LAPACK, ?ORGQR and ?UNGQR.
        """
        least = min(self.factors.shape)
        return form_q(self.factors[:, :least], self.tau)

    def apply(self, b: Matrix, op: Literal["N", "C"] = "N", out: Matrix | None = None) -> Matrix:
        """Return Q B, or Q^H B with ``op="C"``; Q is m × m. Collective over the context.

        Args:
            b: m rows, in any layout.
            op: "N" or "C".
            out: where to write the product, which may be ``b``; by default a new matrix in the layout of B.

        Raises:
            ArgumentError: shapes, types or options do not fit; the message names every fault.
            RankMismatchError: the ranks gave different arguments.

        Source: LAPACK, ?ORMQR and ?UNMQR.
        """
        least = min(self.factors.shape)
        return apply_q(self.factors[:, :least], self.tau, b, op, out=out)


def qr(a: Matrix, out: Matrix | None = None) -> QrFactors:
    """Return the QR factorisation of a matrix, by Householder reflectors. Collective over the context.

    Args:
        a: m × n: float32, float64, complex64 or complex128, in any layout.
        out: where to write R and the reflectors; it may be ``a``. By default a new matrix in the layout of A.

    Raises:
        ArgumentError: shapes or types do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine has no factorisations.

    Source: LAPACK, ?GEQRF.
    """
    call = _Call("qr", {"a": a, "out": out}, {})

    def check() -> None:
        call.square("a", any_shape=True)
        call.like("out", "a")

    with call:
        result = call.agree(check, lambda: call.result(out, a.descriptor))
        of, to = a.descriptor, result.descriptor
        job = call.job(lambda engine: QrJob(engine, of, to))
        job.factor(a.local, result.local)
        return QrFactors(result, job.tau)


def _digest(array: NDArray[Any]) -> str:
    """Return a text that differs if the values do."""
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=8).hexdigest()


def form_q(a: Matrix, tau: NDArray[Any], cols: int | None = None, out: Matrix | None = None) -> Matrix:
    """Return the first columns of the Q of A's reflectors, as many as A has, or ``cols``. Collective."""
    call = _Call("form_q", {"a": a, "out": out}, {"cols": cols}, {"tau": _digest(tau)})
    shape = a.shape[0], a.shape[1] if cols is None else cols

    def check() -> None:
        call.square("a", any_shape=True)
        call.like("out", "a", shape)

    with call:
        result = call.agree(check, lambda: call.result(out, replace(a.descriptor, shape=shape, ld=None)))
        of, to = a.descriptor, result.descriptor
        job = call.job(lambda engine: QrJob(engine, of, None, (None, to)))
        job.apply(a.local, tau, None, result.local)
    return result


def apply_q(
    a: Matrix, tau: NDArray[Any], b: Matrix, op: str = "N", side: str = "L", out: Matrix | None = None
) -> Matrix:
    """Return op(Q) B, or B op(Q) with ``side="R"``, for the Q of A's reflectors. Collective over the context."""
    right = side == "R"
    call = _Call("apply", {"a": a, "b": b, "out": out}, {"op": op, "side": side}, {"tau": _digest(tau)})

    def check() -> None:
        call.square("a", any_shape=True)
        call.letter("op", "NC")
        if b.dtype != a.dtype or b.shape[int(right)] != a.shape[0]:
            axis = "columns" if right else "rows"
            call.fault(f"b: expected {a.shape[0]} {axis} of {a.dtype.name}, got {_words(b.shape, b.dtype)}")
        call.like("out", "b")

    with call:
        result = call.agree(check, lambda: call.result(out, b.descriptor))
        of, x, y = a.descriptor, _turned(b.descriptor, right), _turned(result.descriptor, right)
        job = call.job(
            lambda engine: QrJob(engine, of, None, (x, y), adjoint=(op == "C") != right, conjugate=right)
        )
        job.apply(a.local, tau, _turned(b.local, right), _turned(result.local, right))
    return result


def lstsq(a: Matrix, b: Matrix, op_a: Op = "N", out: Matrix | None = None) -> Matrix:
    """Return the X that minimises the norms of the columns of op(A) X - B. Collective over the context.

    A is of full rank. If op(A) has more columns than rows, X is the solution of the least norm.

    Args:
        a: m × n: float32, float64, complex64 or complex128, in any layout. It keeps its values.
        b: as many rows as op(A), in any layout.
        op_a: "N", "T" (transpose) or "C" (conjugate transpose).
        out: where to write X, with as many rows as op(A) has columns; by default a new matrix in B's blocks.

    Raises:
        FactorisationError: A has no full rank: the diagonal element of R at ``index`` is exactly zero.
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine has no factorisations.

    Source: LAPACK, ?GELS.
    """
    call = _Call("lstsq", {"a": a, "b": b, "out": out}, {"op_a": op_a})

    def check() -> None:
        call.square("a", any_shape=True)
        call.letter("op_a", "NTC")
        rows, cols = a.shape if op_a == "N" else a.shape[::-1]
        if b.dtype != a.dtype or b.shape[0] != rows:
            call.fault(f"b: expected {rows} rows of {a.dtype.name}, got {_words(b.shape, b.dtype)}")
        call.like("out", "b", (cols, b.shape[1]))

    def new() -> Matrix:
        cols = a.shape[op_a == "N"]
        return call.result(out, replace(b.descriptor, shape=(cols, b.shape[1]), ld=None))

    with call:
        result = call.agree(check, new)
        least_squares(call, a, b, result, op_a)
    return result


def lstsq_in_place(a: Matrix, b: Matrix, op_a: Op = "N") -> None:
    """Do as ``lstsq`` with B of max(m, n) rows, which gets X, and A, which gets factors, as in LAPACK. Collective."""
    call = _Call("lstsq", {"a": a, "b": b}, {"op_a": op_a, "in place": True})

    def check() -> None:
        call.square("a", any_shape=True)
        call.letter("op_a", "NTC")
        if b.dtype != a.dtype or b.shape[0] != max(a.shape):
            call.fault(f"b: expected {max(a.shape)} rows of {a.dtype.name}, got {_words(b.shape, b.dtype)}")

    with call:
        call.agree(check, lambda: None)
        rows = a.shape[op_a != "N"]
        least_squares(call, a, b[:rows, :], b, op_a, factor=a)


def least_squares(
    call: _Call, a: Matrix, b: Matrix, x: Matrix, op_a: str, factor: Matrix | None = None
) -> None:
    """Solve on agreed arguments; A's factors are those of A^H if A is wide. Collective over the context."""
    wide = a.shape[0] < a.shape[1]
    tall = wide == (op_a != "N")  # op(A) is
    conjugate = not tall if op_a == "T" else wide
    kept = None if factor is None else _turned(factor.descriptor, wide)
    of, right, to = _turned(a.descriptor, wide), b.descriptor, x.descriptor
    job = call.job(
        lambda engine: LeastSquaresJob(engine, of, right, to, kept, least=not tall, conjugate=conjugate)
    )
    into = None if factor is None else _turned(factor.local, wide)
    info = job.run(_turned(a.local, wide), b.local, x.local, into)
    if info:
        call.singular(info)


def _turned(x: Any, transposed: bool) -> Any:
    """Return a descriptor or an array, or its transpose."""
    return x.T if transposed else x


class _Call:
    """One call: its arguments, what is wrong with them, and the job that the context keeps for such calls.

    A ``with`` block around all that is collective.

    Args:
        name: the function.
        given: its matrices by name; None for those that are left out.
        how: its other arguments.
        values: more that the ranks must agree on, but that does not decide how the call is computed.
    """

    def __init__(
        self,
        name: str,
        given: Mapping[str, Matrix | None],
        how: Mapping[str, Any],
        values: Mapping[str, str] | None = None,
    ) -> None:
        self._name, self._given, self._how, self._values = name, given, how, values or {}
        self._faults: list[str] = []
        self.context: Runtime[Any] = context_of(name, *given.values())

    def __enter__(self) -> None:
        self._running = self.context.running(self._name)
        self._running.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.__exit__(kind, error, trace)

    # -- faults

    def fault(self, text: str) -> None:
        """Note a fault."""
        self._faults.append(text)

    def square(self, name: str, *, any_shape: bool = False) -> None:
        """Note that the matrix is not square, or has no type that LAPACK has."""
        x = self._given[name]
        assert x is not None
        if x.dtype.name not in _TYPES:
            self._faults.append(f"{name}: expected one of {', '.join(_TYPES)}, got {x.dtype.name}")
        if x.shape[0] != x.shape[1] and not any_shape:
            self._faults.append(f"{name}: expected a square matrix, got {x.shape[0]} x {x.shape[1]}")

    def right(self, name: str, left: str) -> None:
        """Note that the matrix does not fit on the right of another."""
        x, a = self._given[name], self._given[left]
        assert x is not None
        assert a is not None
        if x.dtype != a.dtype:
            self._faults.append(f"{name}: expected {a.dtype.name} as {left}, got {x.dtype.name}")
        if x.shape[0] != a.shape[1]:
            self._faults.append(f"{name}: {x.shape[0]} rows, but {left} has {a.shape[1]} columns")

    def like(self, name: str, other: str, shape: tuple[int, int] | None = None) -> None:
        """Note that the matrix, if there is one, has not the shape and type of another, or is read-only."""
        x, a = self._given[name], self._given[other]
        assert a is not None
        if x is None:
            return
        shape = a.shape if shape is None else shape
        if (x.shape, x.dtype) != (shape, a.dtype):
            self._faults.append(f"{name}: expected {_words(shape, a.dtype)}, got {_words(x.shape, x.dtype)}")

    def letter(self, name: str, allowed: str | tuple[str, ...]) -> None:
        """Note that an option has a value that it must not have."""
        if not one_of(self._how[name], allowed):
            self._faults.append(f"{name}: expected one of {', '.join(allowed)}, got {self._how[name]!r}")

    # -- what every call does

    def agree(self, check: Callable[[], None], new: Callable[[], T]) -> T:
        """Check the arguments, agree on them, and return what ``new`` does. Collective over the context."""

        def first(facts: dict[str, Any]) -> T:
            check_operands(self.context, tuple(self._given.keys() - _OPTIONAL), self._given)
            self._writable()
            check()
            if self._faults:
                raise LayoutError(faults_text(f"this {self._name}", self._faults))
            facts.update({name: getattr(x, "descriptor", None) for name, x in self._given.items()})
            facts.update(self._how)
            facts.update(self._values)
            return new()

        def again(_: bool) -> T:
            self._writable()
            return new()

        key = self._key(), tuple(self._values.items())
        number, made = self.context.calls.agree(lambda: self.context.agreement(self._name), key, again, first)
        if not number:
            self.context.calls.remember(key, True)
        return made

    def _writable(self) -> None:
        for name in ("out", "factor"):
            x = self._given.get(name)
            if x is not None and not getattr(x.local.flags, "writeable", True):
                raise ArgumentError(f"{name}: its local array is read-only")

    def _key(self) -> Hashable:
        """Return all that decides how the call is computed, the same on every rank if the arguments are legal."""
        given: list[object] = list(self._given.values())
        if not all(x is None or (isinstance(x, Handle) and x.context is self.context) for x in given):
            return object()
        described = tuple(None if x is None else x.descriptor for x in self._given.values())
        return self._name, tuple(self._how.items()), described

    def job(self, make: Callable[[Engine], T]) -> T:
        """Return the job for such calls, made by the first. Collective over the context."""
        try:
            found: T = self.context.kept.find_or_make(self._key(), lambda: make(self.context.engine))  # type: ignore[type-var]
        except (PblasmpError, MemoryError) as error:  # the same on every rank
            with self.context.agreement(self._name):
                raise error from None
        return found

    def result(self, out: Matrix | None, d: MatrixDescriptor, *, zeros: bool = False) -> Matrix:
        """Return ``out``, or a new matrix in a layout without padding."""
        if out is not None:
            return out
        made: Matrix = self.context.allocate(replace(d, ld=None))
        if zeros:
            made.local[...] = 0
        return made

    def singular(self, info: int, factor: Matrix | None = None) -> NoReturn:
        """Raise the error, as all ranks do."""
        complete = "" if factor is None else "; the factors are complete"
        with self.context.agreement(self._name):
            raise FactorisationError.at(
                info - 1,
                f"{self._name}: the matrix is exactly singular: a zero on the diagonal at index {info - 1}{complete}",
            )
        raise AssertionError

    def not_positive(self, info: int) -> NoReturn:
        """Raise the error, as all ranks do."""
        with self.context.agreement(self._name):
            raise FactorisationError.at(
                info - 1,
                f"{self._name}: the matrix is not positive definite: its leading principal minor of order {info}, "
                f"up to index {info - 1}, is not positive",
            )
        raise AssertionError


def _words(shape: tuple[int, int], dtype: Any) -> str:
    return f"{shape[0]} x {shape[1]} of {dtype.name}"
