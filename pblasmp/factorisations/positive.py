# SPDX-License-Identifier: Apache-2.0
"""Cholesky factorisations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..calls import factor_directly
from ..engines.factor import FactorOperands, Found
from ..layout.factor_problem import FactorProblem
from .call import FactorisationCall, Matrix, turned

if TYPE_CHECKING:
    from ..layout.level3 import Uplo

__all__ = ["CALLS", "cho_solve", "cholesky"]


def cholesky(a: Matrix, uplo: Uplo = "L", out: Matrix | None = None, *, algo: str = "auto") -> Matrix:
    """Return the Cholesky factor of a positive definite matrix. Collective over the context.

    A = L L^H with ``uplo="L"``, A = U^H U with ``uplo="U"``. Only that triangle of A is read and only that of the
    result is written: outside it ``out`` keeps its values, and a new matrix has zeros.

    Args:
        a: n × n, symmetric or Hermitian: float32, float64, complex64 or complex128, in any layout.
        uplo: "L" or "U".
        out: where to write the factor, which may be ``a``; by default a new matrix in the layout of A.
        algo: "auto", or the name of an algorithm.

    Raises:
        FactorisationError: A is not positive definite; ``index`` is the last row, from 0, of the first leading
            principal minor that is not. The columns of L (rows of U) of earlier panels are in ``out``.
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?POTRF.
    """
    return _Cholesky(a=a, uplo=uplo, out=out, algo=algo).run()


class _Cholesky(FactorisationCall[Matrix]):
    """A call of ``cholesky``."""

    name = "cholesky"

    def directly(self) -> tuple[Matrix, Found] | Literal[False] | None:
        a, out = self.given["a"], self.given["out"]
        return factor_directly("potrf", a, None, out, call=self.name, uplo=self.how["uplo"])

    def check(self) -> None:
        self.check_matrix("a")
        self.check_letter("uplo", "LU")
        self.check_like("out", "a")

    def new(self) -> Matrix:
        return self.out_or_new(self["a"].descriptor, zeros=True)

    def problem(self) -> FactorProblem:
        a, out = (turned(x.descriptor, self.upper) for x in (self["a"], self.written))
        return FactorProblem("cholesky", a, c=out, conjugate=self.upper)

    def operands(self) -> FactorOperands:
        a, out = (turned(x.local, self.upper) for x in (self["a"], self.written))
        return FactorOperands(a, None, out, None)

    def end(self, found: Found) -> Matrix:
        return self.not_positive(found.info) if found.info else self.written


def cho_solve(
    factor: Matrix, b: Matrix, uplo: Uplo = "L", out: Matrix | None = None, *, algo: str = "auto"
) -> Matrix:
    """Return X with A X = B for a matrix A that ``cholesky`` has factored. Collective over the context.

    Args:
        factor: n × n: L or U, of which the other triangle is not read.
        b: n × m.
        uplo: "L" or "U": which of them ``factor`` is.
        out: where to write X, which may be ``b``; by default a new matrix in the layout of B.
        algo: "auto", or the name of an algorithm.

    Raises:
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?POTRS.
    """
    return _CholeskySolve(factor=factor, b=b, uplo=uplo, out=out, algo=algo).run()


class _CholeskySolve(FactorisationCall[Matrix]):
    """A call of ``cho_solve``."""

    name = "cho_solve"
    matrices = ("factor", "b", "out")
    like = "b"

    def directly(self) -> tuple[Matrix, Found] | Literal[False] | None:
        factor, b, out = self.given.values()
        return factor_directly("potrs", factor, b, out, call=self.name, uplo=self.how["uplo"])

    def check(self) -> None:
        self.check_matrix("factor")
        self.check_letter("uplo", "LU")
        self.check_right("b", "factor")
        self.check_like("out", "b")

    def problem(self) -> FactorProblem:
        factor = turned(self["factor"].descriptor, self.upper)
        b, x = self["b"].descriptor, self.written.descriptor
        return FactorProblem("cholesky", factor, b, None, x, factored=True, conjugate=self.upper)

    def operands(self) -> FactorOperands:
        factor = turned(self["factor"].local, self.upper)
        return FactorOperands(factor, self["b"].local, None, self.written.local)


CALLS: dict[str, type[FactorisationCall[Any]]] = {"cholesky": _Cholesky, "cho_solve": _CholeskySolve}
"""The calls that can be planned, by function."""
