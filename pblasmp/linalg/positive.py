# SPDX-License-Identifier: Apache-2.0
"""Cholesky factorizations."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, cast

from ..engines.product import Found
from ..layout.routines import Sizes
from ..matrix.columns import by_column, is_vector
from ..runtime.direct_forms import FormRow, HandleForm
from ..runtime.planned import run
from .factorization_call import FactorizationCall, Matrix, Right, Roles, flag, pair_of

T = TypeVar("T")


def cholesky(a: Matrix, lower: bool = True, *, out: Matrix | None = None, algo: str = "auto") -> Matrix:
    """Return the Cholesky factor of a positive definite matrix. Collective over the context.

    A = L L^H, or with ``lower=False`` A = U^H U. Only that triangle of A is read and only that of the result is
    written: outside it ``out`` keeps its values, and a new matrix has zeros. The default is NumPy's; SciPy's is U.

    Args:
        a: n × n, symmetric or Hermitian: float32, float64, complex64 or complex128, in any layout.
        lower: return L, not U.
        out: where to write the factor, which may be ``a``; by default a new matrix in the layout of A.
        algo: "auto", or the name of an algorithm.

    Raises:
        FactorizationError: A is not positive definite; ``index`` is the last row, from 0, of the first leading
            principal minor that is not. The columns of L (rows of U) of earlier panels are in ``out``.
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?POTRF; NumPy, numpy.linalg.cholesky.

    Example:
        >>> a = ctx.scatter(np.array([[4.0, 2], [2, 5]]), block=1)
        >>> pb.linalg.cholesky(a).allgather().tolist()
        [[2.0, 0.0], [1.0, 2.0]]

    See Also:
        cho_factor and cho_solve, to solve with it; solve with ``assume_a="pos"``.
    """
    of_flag: Any = lower
    uplo = "L" if of_flag is True else "U" if of_flag is False else ""
    found = _FORM.run((a, uplo, out, algo))
    if found and not found.info:
        return cast("Matrix", out)
    call = _Cholesky(a=a, lower=lower, out=out, algo=algo)
    if found:
        call.not_positive(found.info)
    return run(call, voted=True) if found is False else call.run()


_FORM = HandleForm(
    "potrf", FormRow(Sizes({"a": "n n", "d": "n n"}), "a", "a"), ("a", "uplo", "out", "algo"), "cholesky"
)


def cho_factor(
    a: Matrix, lower: bool = False, *, out: Matrix | None = None, algo: str = "auto"
) -> tuple[Matrix, bool]:
    """Return ``(c, lower)``: the Cholesky factor as ``cho_solve`` takes it. Collective over the context.

    It is that of ``cholesky``, with SciPy's default: U.

    Args:
        a, out, algo: as for ``cholesky``.
        lower: factor A = L L^H, not U^H U.

    Raises:
        FactorizationError: A is not positive definite, as for ``cholesky``.
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?POTRF; SciPy, scipy.linalg.cho_factor.

    Example:
        >>> a = ctx.scatter(np.array([[4.0, 2], [2, 5]]), block=1)
        >>> c, lower = pb.linalg.cho_factor(a)
        >>> np.triu(c.allgather()).tolist(), lower
        ([[2.0, 1.0], [0.0, 2.0]], False)

    See Also:
        cho_solve, cholesky.
    """
    return _CholeskyFactor(a=a, lower=lower, out=out, algo=algo).run()


class _Definite(FactorizationCall[T]):
    """A call that factors A."""

    def __init__(self, *, lower: bool, **arguments: Any) -> None:
        super().__init__(lower=flag(lower), **arguments)

    def directly(self) -> tuple[Matrix, Found] | Literal[False] | None:
        return self.at_once("potrf", self.given["a"], uplo=self.uplo)

    def check(self) -> None:
        self.check_matrix("a")
        self.check_flags("lower")
        self.check_like("out", "a")

    def new(self) -> Matrix:
        return self.out_or_new(self["a"].descriptor, zeros=True)

    def roles(self) -> Roles:
        upper = self.upper
        return Roles("cholesky", self["a"], c=self.written, turned="ac" * upper, options={"conjugate": upper})


class _Cholesky(_Definite[Matrix]):
    """A call of ``cholesky``."""

    name = "cholesky"

    def end(self, found: Found) -> Matrix:
        return self.not_positive(found.info) if found.info else self.written


class _CholeskyFactor(_Definite[tuple[Matrix, bool]]):
    """A call of ``cho_factor``."""

    name = "cho_factor"

    def end(self, found: Found) -> tuple[Matrix, bool]:
        return self.not_positive(found.info) if found.info else (self.written, self.how["lower"])


def cho_solve(
    c_and_lower: tuple[Matrix, bool], b: Right, *, out: Matrix | None = None, algo: str = "auto"
) -> Right:
    """Return X with A X = B for a matrix A that has been factored. Collective over the context.

    Args:
        c_and_lower: what ``cho_factor`` returns, or ``(cholesky(a), True)``: L or U, n × n, of which the other
            triangle is not read, and whether it is L.
        b: n × m; or a vector, as for ``solve``.
        out: where to write X, which may be ``b``; by default a new matrix in the layout of B.
        algo: "auto", or the name of an algorithm.

    Raises:
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?POTRS; SciPy, scipy.linalg.cho_solve.

    Example:
        >>> a = ctx.scatter(np.array([[4.0, 2], [2, 5]]), block=1)
        >>> b = ctx.scatter(np.array([[8.0], [12]]), block=1)
        >>> x = pb.linalg.cho_solve(pb.linalg.cho_factor(a), b)
        >>> x.allgather().round(6).tolist()
        [[1.0], [2.0]]

    See Also:
        cho_factor, solve.
    """
    if is_vector(b):
        return cast("Right", by_column(cho_solve, pair_of(c_and_lower)[0], locals()))
    return cast("Right", _CholeskySolve(c_and_lower=c_and_lower, b=b, out=out, algo=algo).run())


class _CholeskySolve(FactorizationCall[Matrix]):
    """A call of ``cho_solve``."""

    name = "cho_solve"
    matrices = ("c", "b", "out")
    like = "b"

    def __init__(self, *, c_and_lower: tuple[Matrix, bool], **arguments: Any) -> None:
        c, lower = pair_of(c_and_lower)
        super().__init__(c=c, lower=flag(lower), **arguments)

    def directly(self) -> tuple[Matrix, Found] | Literal[False] | None:
        c, b, _ = self.given.values()
        return None if b is None else self.at_once("potrs", c, b, uplo=self.uplo)

    def check(self) -> None:
        self.check_matrix("c")
        if self.how["lower"] is None:
            self.wrong(
                "c_and_lower: expected a pair, the factor and whether it is lower, got a DistributedMatrix"
            )
        else:
            self.check_flags("lower")
        self.check_right("b", "c")
        self.check_like("out", "b")

    def roles(self) -> Roles:
        options = {"factored": True, "conjugate": self.upper}
        return Roles("cholesky", self["c"], self["b"], None, self.written, "a" * self.upper, options)


CALLS = (_Cholesky, _CholeskyFactor, _CholeskySolve)
"""The calls that can be planned."""
