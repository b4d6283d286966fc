# SPDX-License-Identifier: Apache-2.0
"""LU factorizations, solves by them, determinants, and estimates of condition numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from ..engines.product import Found
from ..errors import short_repr
from ..matrix.columns import by_column, is_vector
from .factorization_call import FactorizationCall, Matrix, Pivots, Right, Roles, T, digest, op_of, pair_of

if TYPE_CHECKING:
    from .factorization_call import Trans


def lu_factor(a: Matrix, *, out: Matrix | None = None, algo: str = "auto") -> tuple[Matrix, Pivots]:
    """Return ``(lu, piv)``: LU factors of a matrix with partial pivoting, and pivots. Collective over the context.

    P A = L U. L has a diagonal of ones, which is not stored. In step i row i was exchanged with row ``piv[i]``.

    Args:
        a: m × n: float32, float64, complex64 or complex128, in any layout.
        out: where to write L, below the diagonal, and U; it may be ``a``. By default a new matrix in the layout of A.
        algo: "auto", or the name of an algorithm.

    Returns:
        The matrix of the factors, and min(m, n) pivots, counted from 0; the same array of int64 on every rank.

    Raises:
        FactorizationError: A is exactly singular: the diagonal element of U at ``index`` is zero. The factors are
            complete and in ``out``.
        ArgumentError: shapes or types do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?GETRF; SciPy, scipy.linalg.lu_factor.

    Example:
        >>> a = ctx.scatter(np.array([[4.0, 2], [2, 5]]), block=1)
        >>> lu, piv = pb.linalg.lu_factor(a)
        >>> lu.allgather().tolist(), piv.tolist()
        ([[4.0, 2.0], [0.5, 4.0]], [0, 1])

    See Also:
        lu_solve, solve.
    """
    return _Lu(a=a, out=out, algo=algo).run()


def lu_with_info(a: Matrix, *, out: Matrix | None = None) -> tuple[Matrix, Pivots, int]:
    """Do as ``lu_factor``, but return INFO as LAPACK does, also if A is singular. Collective over the context."""
    return _LuWithInfo(a=a, out=out, algo="auto").run()


class _Factors(FactorizationCall[T]):
    """A call that factors A."""

    square = False

    def check(self) -> None:
        self.check_matrix("a", square=self.square)
        self.check_like("out", "a")

    def roles(self) -> Roles:
        return Roles("lu", self["a"], c=self.written)


class _LuFactors(_Factors[T]):
    """A call that returns the factors."""

    name = "lu_factor"

    def directly(self) -> tuple[Matrix, Found] | Literal[False] | None:
        return self.at_once("getrf", self.given["a"])


class _Lu(_LuFactors[tuple[Matrix, Pivots]]):
    """A call of ``lu_factor``."""

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
    lu_and_piv: tuple[Matrix, Pivots],
    b: Right,
    trans: Trans = 0,
    *,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Right:
    """Return X with op(A) X = B for a matrix A that ``lu_factor`` has factored. Collective over the context.

    Args:
        lu_and_piv: what ``lu_factor`` returns: L and U, n × n, and n integers, the same on every rank.
        b: n × m; or a vector, as for ``solve``.
        trans: 0 or "N" for A, 1 or "T" for its transpose, 2 or "C" for its conjugate transpose.
        out: where to write X, which may be ``b``; by default a new matrix in the layout of B.
        algo: "auto", or the name of an algorithm.

    Raises:
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?GETRS; SciPy, scipy.linalg.lu_solve.

    Example:
        >>> a = ctx.scatter(np.array([[4.0, 2], [2, 5]]), block=1)
        >>> b = ctx.scatter(np.array([[8.0], [12]]), block=1)
        >>> x = pb.linalg.lu_solve(pb.linalg.lu_factor(a), b)
        >>> x.allgather().round(6).tolist()
        [[1.0], [2.0]]

    See Also:
        lu_factor, solve.
    """
    if is_vector(b):
        return cast("Right", by_column(lu_solve, pair_of(lu_and_piv)[0], locals()))
    return cast("Right", _LuSolve(lu_and_piv=lu_and_piv, b=b, trans=trans, out=out, algo=algo).run())


class _LuSolve(FactorizationCall[Matrix]):
    """A call of ``lu_solve``."""

    name = "lu_solve"
    matrices = ("lu", "b", "out")
    like = "b"

    def __init__(self, *, lu_and_piv: tuple[Matrix, Pivots], trans: Trans, **arguments: Any) -> None:
        lu, pivots = pair_of(lu_and_piv)
        super().__init__(lu=lu, trans=op_of(trans), **arguments)
        self._given, self._pivots = pivots, _integers(pivots)
        self.values = {"pivots": "" if self._pivots is None else digest(self._pivots)}

    def directly(self) -> tuple[Matrix, Found] | Literal[False] | None:
        lu, b, _ = self.given.values()
        if b is None or self._pivots is None:
            return None
        return self.at_once("getrs", lu, b, pivots=self._pivots, op_a=self.how["trans"])

    def check(self) -> None:
        self.check_matrix("lu")
        self.check_trans()
        self.check_right("b", "lu")
        self.check_like("out", "b")
        n, p = self["lu"].shape[0], self._pivots
        if self._given is None:
            self.wrong("lu_and_piv: expected a pair, the factors and the pivots, got a DistributedMatrix")
        elif p is None or len(p) != n or not ((p >= 0) & (p < n)).all():
            self.wrong(f"pivots: expected {n} integers from 0 to {n - 1}, got {short_repr(self._given)}")

    def roles(self) -> Roles:
        options = {"factored": True, "op": self.how["trans"]}
        return Roles("lu", self["lu"], self["b"], d=self.written, options=options)


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

    Example:
        >>> a = ctx.scatter(np.array([[4.0, 2], [2, 5]]), block=1)
        >>> sign, logarithm = pb.linalg.slogdet(a)
        >>> float(sign), round(float(np.exp(logarithm)), 6)
        (1.0, 16.0)

    See Also:
        det.
    """
    return _SignAndLogarithm(a=a, algo=algo).run()


def det(a: Matrix, *, algo: str = "auto") -> Any:
    """Return the determinant, a NumPy scalar of A's type, the same on every rank. Collective over the context.

    It over- or underflows only if it is outside the type's range itself; ``slogdet`` does not.

    Args:
        a, algo: as for ``slogdet``.

    Raises:
        ArgumentError: shapes or types do not fit.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: NumPy, numpy.linalg.det.

    Example:
        >>> a = ctx.scatter(np.array([[4.0, 2], [2, 5]]), block=1)
        >>> float(pb.linalg.det(a))
        16.0

    See Also:
        slogdet.
    """
    return _Determinant(a=a, algo=algo).run()


class _OfDiagonal(_Factors[T]):
    """A call that returns what the diagonal of U says."""

    square = True

    def signed(self, found: Found) -> tuple[Any, NDArray[np.float64]]:
        """Return the product of the signs of U's diagonal and of the exchanges, and the diagonal's sizes. Local."""
        pivots, diagonal = found.pivots, found.diagonal
        assert pivots is not None
        assert diagonal is not None
        exchanged = pivots != np.arange(len(pivots))
        sizes = np.abs(diagonal)
        signs = diagonal / sizes if diagonal.dtype.kind == "c" else np.sign(diagonal)
        return np.prod(signs) * (-1 if exchanged.sum() % 2 else 1), sizes.astype(np.float64)


class _SignAndLogarithm(_OfDiagonal[tuple[Any, float]]):
    """A call of ``slogdet``."""

    name = "slogdet"

    def end(self, found: Found) -> tuple[Any, float]:
        dtype = self["a"].dtype.type
        if found.info:
            return dtype(0), -math.inf
        sign, sizes = self.signed(found)
        mine = dtype(sign), float(np.log(sizes).sum())
        told: tuple[Any, float] = self.ctx.comm.bcast(mine)  # processors round logarithms differently
        return told


class _Determinant(_OfDiagonal[Any]):
    """A call of ``det``."""

    name = "det"

    def end(self, found: Found) -> Any:
        dtype = self["a"].dtype.type
        if found.info:
            return dtype(0)
        sign, sizes = self.signed(found)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return self.ctx.comm.bcast(dtype(sign * _product(sizes)))


def _product(numbers: NDArray[np.float64]) -> np.float64:
    """Return the product of numbers, which only over- or underflows if it is itself out of range. Local."""
    exponent = 0
    while len(numbers) > 1:
        fractions, exponents = np.frexp(numbers)
        exponent += int(exponents.sum(dtype=np.int64))
        starts = np.arange(0, len(fractions), 512)  # each is at least a half
        numbers = np.multiply.reduceat(fractions, starts)
    first = numbers[0] if len(numbers) else 1.0
    scaled: np.float64 = np.ldexp(np.float64(first), max(-4000, min(4000, exponent)))
    return scaled


def cond_estimate(a: Matrix, *, algo: str = "auto") -> float:
    """Return an estimate of the condition number of a matrix in the 1-norm. Collective over the context.

    It is the norm of A times a lower bound of the norm of its inverse, from an LU factorization and a few solves. The
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

    Example:
        >>> a = ctx.scatter(np.array([[4.0, 2], [2, 5]]), block=1)
        >>> round(pb.linalg.cond_estimate(a), 6)
        3.0625

    See Also:
        cond.
    """
    return _Condition(a=a, algo=algo).run()


class _Condition(FactorizationCall[float]):
    """A call of ``cond_estimate``."""

    name = "cond_estimate"
    matrices = ("a",)

    def check(self) -> None:
        self.check_matrix("a")

    def new(self) -> None:
        return None

    def roles(self) -> Roles:
        return Roles("condition", self["a"])

    def end(self, found: Found) -> float:
        return found.condition


CALLS = (_Lu, _LuSolve, _SignAndLogarithm, _Determinant, _Condition)
"""The calls that can be planned."""
