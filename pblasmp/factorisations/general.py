# SPDX-License-Identifier: Apache-2.0
"""LU factorisations, solves by them, determinants and conditions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..calls import factor_directly
from ..engines.factor import FactorOperands, Found
from ..errors import short_repr
from ..layout.factor_problem import FactorProblem
from .call import FactorisationCall, Matrix, Pivots, T, digest

if TYPE_CHECKING:
    from ..layout.problem import Op

__all__ = ["CALLS", "cond_estimate", "lu", "lu_solve", "lu_with_info", "slogdet"]


def lu(a: Matrix, out: Matrix | None = None, *, algo: str = "auto") -> tuple[Matrix, Pivots]:
    """Return the LU factors of a matrix with partial pivoting, and the pivots. Collective over the context.

    P A = L U. L has a diagonal of ones, which is not stored. In step i row i was exchanged with row ``pivots[i]``.

    Args:
        a: m × n: float32, float64, complex64 or complex128, in any layout.
        out: where to write L, below the diagonal, and U; it may be ``a``. By default a new matrix in the layout of A.
        algo: "auto", or the name of an algorithm.

    Returns:
        The matrix of the factors, and min(m, n) pivots, counted from 0; the same array of int64 on every rank.

    Raises:
        FactorisationError: A is exactly singular: the diagonal element of U at ``index`` is zero. The factors are
            complete and in ``out``.
        ArgumentError: shapes or types do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?GETRF.
    """
    return _Lu(a=a, out=out, algo=algo).run()


def lu_with_info(a: Matrix, out: Matrix | None = None, *, algo: str = "auto") -> tuple[Matrix, Pivots, int]:
    """Do as ``lu``, but return INFO as LAPACK does, also if A is singular. Collective over the context."""
    return _LuWithInfo(a=a, out=out, algo=algo).run()


class _Factors(FactorisationCall[T]):
    """A call that factors A."""

    square = False

    def check(self) -> None:
        self.check_matrix("a", square=self.square)
        self.check_like("out", "a")

    def problem(self) -> FactorProblem:
        return FactorProblem("lu", self["a"].descriptor, c=self.written.descriptor)

    def operands(self) -> FactorOperands:
        return FactorOperands(self["a"].local, None, self.written.local, None)


class _LuFactors(_Factors[T]):
    """A call that returns the factors."""

    name = "lu"

    def directly(self) -> tuple[Matrix, Found] | Literal[False] | None:
        return factor_directly("getrf", self.given["a"], None, self.given["out"], call=self.name)


class _Lu(_LuFactors[tuple[Matrix, Pivots]]):
    """A call of ``lu``."""

    def end(self, found: Found) -> tuple[Matrix, Pivots]:
        if found.info:
            self.singular(found.info)
        assert found.pivots is not None
        return self.written, found.pivots


class _LuWithInfo(_LuFactors[tuple[Matrix, Pivots, int]]):
    """A call of ``lu_with_info``."""

    def end(self, found: Found) -> tuple[Matrix, Pivots, int]:
        assert found.pivots is not None
        return self.written, found.pivots, found.info


def lu_solve(
    factors: Matrix,
    pivots: Pivots,
    b: Matrix,
    op_a: Op = "N",
    out: Matrix | None = None,
    *,
    algo: str = "auto",
) -> Matrix:
    """Return X with op(A) X = B for a matrix A that ``lu`` has factored. Collective over the context.

    Args:
        factors: n × n: L and U as ``lu`` returns them.
        pivots: n integers, likewise; the same on every rank.
        b: n × m.
        op_a: "N", "T" (transpose) or "C" (conjugate transpose).
        out: where to write X, which may be ``b``; by default a new matrix in the layout of B.
        algo: "auto", or the name of an algorithm.

    Raises:
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?GETRS.
    """
    return _LuSolve(factors=factors, pivots=pivots, b=b, op_a=op_a, out=out, algo=algo).run()


class _LuSolve(FactorisationCall[Matrix]):
    """A call of ``lu_solve``."""

    name = "lu_solve"
    matrices = ("factors", "b", "out")
    like = "b"

    def __init__(self, *, pivots: Pivots, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._given, self._pivots = pivots, _integers(pivots)
        self.values = {"pivots": "" if self._pivots is None else digest(self._pivots)}

    def directly(self) -> tuple[Matrix, Found] | Literal[False] | None:
        factors, b, out = self.given.values()
        if b is None or self._pivots is None:
            return None
        op = self.how["op_a"]
        return factor_directly("getrs", factors, b, out, call=self.name, pivots=self._pivots, op_a=op)

    def check(self) -> None:
        self.check_matrix("factors")
        self.check_letter("op_a", "NTC")
        self.check_right("b", "factors")
        self.check_like("out", "b")
        n, p = self["factors"].shape[0], self._pivots
        if p is None or len(p) != n or not ((p >= 0) & (p < n)).all():
            self.wrong(f"pivots: expected {n} integers from 0 to {n - 1}, got {short_repr(self._given)}")

    def problem(self) -> FactorProblem:
        factors, b, x = self["factors"].descriptor, self["b"].descriptor, self.written.descriptor
        return FactorProblem("lu", factors, b, None, x, factored=True, op=self.how["op_a"])

    def operands(self) -> FactorOperands:
        factors, b, x = self["factors"].local, self["b"].local, self.written.local
        return FactorOperands(factors, b, None, x, pivots=self._pivots)


def _integers(values: object) -> Pivots | None:
    """Return values of any type as integers; None if they are not a vector of these. Local."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # of a distributed matrix, of lists of several lengths
        return None
    fit = array.ndim == 1 and (array.dtype.kind in "iu" or not array.size)
    return array.astype(np.int64) if fit else None


def slogdet(a: Matrix, *, algo: str = "auto") -> tuple[Any, float]:
    """Return the sign of the determinant and the logarithm of its absolute value. Collective over the context.

    As NumPy does; the same on every rank.

    Args:
        a: n × n: float32, float64, complex64 or complex128, in any layout. It keeps its values.
        algo: "auto", or the name of an algorithm.

    Returns:
        ``(sign, logabsdet)`` with det(A) = sign exp(logabsdet): a number of A's type, of absolute value 1, and a real
        one. For an exactly singular matrix 0 and minus infinity.

    Raises:
        ArgumentError: shapes or types do not fit.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: NumPy, numpy.linalg.slogdet.
    """
    return _SignAndLogarithm(a=a, algo=algo).run()


class _SignAndLogarithm(_Factors[tuple[Any, float]]):
    """A call of ``slogdet``."""

    name = "slogdet"
    square = True

    def end(self, found: Found) -> tuple[Any, float]:
        dtype, pivots, diagonal = self["a"].dtype.type, found.pivots, found.diagonal
        if found.info:
            return dtype(0), -math.inf
        assert pivots is not None
        assert diagonal is not None
        exchanged = pivots != np.arange(len(pivots))
        sizes = np.abs(diagonal)
        signs = diagonal / sizes if diagonal.dtype.kind == "c" else np.sign(diagonal)
        sign = np.prod(signs) * (-1 if exchanged.sum() % 2 else 1)
        mine = dtype(sign), float(np.log(sizes.astype(np.float64)).sum())
        told: tuple[Any, float] = self.ctx.comm.bcast(mine)  # processors round logarithms differently
        return told


def cond_estimate(a: Matrix, *, algo: str = "auto") -> float:
    """Return an estimate of the condition number of a matrix in the 1-norm. Collective over the context.

    It is the norm of A times a lower bound of the norm of its inverse, from an LU factorisation and a few solves. The
    bound is nearly always within a factor of 3. The same on every rank.

    Args:
        a: n × n: float32, float64, complex64 or complex128, in any layout. It keeps its values.
        algo: "auto", or the name of an algorithm.

    Returns:
        The estimate; infinite if A is exactly singular or so near to it that solves overflow, 0 for an empty matrix.

    Raises:
        ArgumentError: shapes or types do not fit.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?GECON.
    """
    return _Condition(a=a, algo=algo).run()


class _Condition(FactorisationCall[float]):
    """A call of ``cond_estimate``."""

    name = "cond_estimate"
    matrices = ("a",)

    def check(self) -> None:
        self.check_matrix("a")

    def new(self) -> None:
        return None

    def problem(self) -> FactorProblem:
        return FactorProblem("condition", self["a"].descriptor)

    def operands(self) -> FactorOperands:
        return FactorOperands(self["a"].local, None, None, None)

    def end(self, found: Found) -> float:
        return found.condition


CALLS: dict[str, type[FactorisationCall[Any]]] = {
    "lu": _Lu,
    "lu_solve": _LuSolve,
    "slogdet": _SignAndLogarithm,
    "cond_estimate": _Condition,
}
"""The calls that can be planned, by function."""
