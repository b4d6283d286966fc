# SPDX-License-Identifier: Apache-2.0
"""Systems of equations, and inverses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..engines.factor import FactorOperands, Found
from ..layout.factor_problem import FactorProblem
from .call import FactorisationCall, Matrix, Pivots, T, layout_of, local_of, turned

if TYPE_CHECKING:
    from ..layout.level3 import Diag, Uplo
    from ..layout.problem import Op

__all__ = ["CALLS", "inv", "inverse_of", "solve", "solve_keeping"]

Assume = Literal["gen", "pos", "tri"]

_ASSUMED = ("gen", "pos", "tri")
_NO_PIVOTS = np.empty(0, np.int64)


def solve(
    a: Matrix,
    b: Matrix,
    assume: Assume = "gen",
    *,
    op_a: Op = "N",
    uplo: Uplo = "L",
    diag: Diag = "N",
    out: Matrix | None = None,
    algo: str = "auto",
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
        algo: "auto", or the name of an algorithm.

    Raises:
        FactorisationError: A is exactly singular, or not positive definite, at ``index``; then X is not computed.
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?GESV, ?POSV, ?TRTRS.
    """
    return _Solve(a=a, b=b, assume=assume, op_a=op_a, uplo=uplo, diag=diag, out=out, algo=algo).run()


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
    algo: str = "auto",
) -> tuple[Matrix, Pivots]:
    """Do as ``solve``, write A's factor to ``factor`` if there is one, and return the pivots, too. Collective."""
    return _SolveKeeping(
        a=a, b=b, assume=assume, op_a=op_a, uplo=uplo, diag=diag, factor=factor, out=out, algo=algo
    ).run()


class _Solves(FactorisationCall[T]):
    """A call that solves a system."""

    name = "solve"
    matrices = ("a", "b", "factor", "out")
    like = "b"

    def check(self) -> None:
        self.check_matrix("a")
        self.check_letter("assume", _ASSUMED)
        self.check_letter("op_a", "NTC")
        self.check_letter("uplo", "LU")
        self.check_letter("diag", "NU")
        self.check_right("b", "a")
        self.check_like("factor", "a")
        self.check_like("out", "b")

    def problem(self) -> FactorProblem:
        assume, op, upper = self.how["assume"], self.how["op_a"], self.upper
        a, factor = (turned(layout_of(self.given[name]), upper) for name in ("a", "factor"))
        b, x = self["b"].descriptor, self.written.descriptor
        if assume == "gen":
            return FactorProblem("lu", a, b, factor, x, op=op)
        if assume == "pos":
            # The transpose of a Hermitian matrix is its conjugate.
            return FactorProblem("cholesky", a, b, factor, x, conjugate=upper != (op == "T"))
        solved = op if not upper else "T" if op == "N" else "N"
        unit, conjugate = self.how["diag"] == "U", upper and op == "C"
        return FactorProblem("triangular", a, b, None, x, op=solved, unit=unit, conjugate=conjugate)

    def operands(self) -> FactorOperands:
        a, factor = (turned(local_of(self.given[name]), self.upper) for name in ("a", "factor"))
        return FactorOperands(a, self["b"].local, factor, self.written.local)

    def _check_found(self, found: Found) -> None:
        """Raise if A is singular or not positive definite. Collective over the context."""
        if found.info and self.how["assume"] == "pos":
            self.not_positive(found.info)
        if found.info:
            self.singular(
                found.info, complete=self.how["assume"] == "gen" and self.given["factor"] is not None
            )


class _Solve(_Solves[Matrix]):
    """A call of ``solve``."""

    def end(self, found: Found) -> Matrix:
        self._check_found(found)
        return self.written


class _SolveKeeping(_Solves[tuple[Matrix, Pivots]]):
    """A call of ``solve_keeping``."""

    def end(self, found: Found) -> tuple[Matrix, Pivots]:
        self._check_found(found)
        return self.written, _NO_PIVOTS if found.pivots is None else found.pivots


def inv(
    a: Matrix,
    assume: Assume = "gen",
    *,
    uplo: Uplo = "L",
    diag: Diag = "N",
    out: Matrix | None = None,
    algo: str = "auto",
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
        algo: "auto", or the name of an algorithm.

    Raises:
        FactorisationError: A is exactly singular, or not positive definite, at ``index``.
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?GETRI, ?POTRI, ?TRTRI.
    """
    return inverse_of(a, None, assume, uplo=uplo, diag=diag, out=out, algo=algo)


def inverse_of(
    a: Matrix,
    pivots: Pivots | None = None,
    assume: Assume = "gen",
    *,
    uplo: Uplo = "L",
    diag: Diag = "N",
    factored: bool = False,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Do as ``inv``, or if ``factored`` from a factor and ``pivots`` that are legal and equal on every rank."""
    return _Inverse(
        a=a, assume=assume, pivots=pivots, uplo=uplo, diag=diag, factored=factored, out=out, algo=algo
    ).run()


class _Inverse(FactorisationCall[Matrix]):
    """A call of ``inv`` or ``inverse_of``."""

    name = "inv"

    def __init__(self, *, pivots: Pivots | None = None, factored: bool = False, **arguments: Any) -> None:
        super().__init__(factored=factored, **arguments)
        self._pivots = pivots

    def check(self) -> None:
        self.check_matrix("a")
        self.check_letter("assume", _ASSUMED)
        self.check_letter("uplo", "LU")
        self.check_letter("diag", "NU")
        self.check_like("out", "a")

    def new(self) -> Matrix:
        return self.out_or_new(self["a"].descriptor, zeros=self.how["assume"] != "gen")

    def problem(self) -> FactorProblem:
        a, x = (turned(each.descriptor, self.upper) for each in (self["a"], self.written))
        assume, factored = self.how["assume"], self.how["factored"]
        if assume == "tri":
            return FactorProblem("triangular", a, d=x, inverse=True, unit=self.how["diag"] == "U")
        routine: Literal["lu", "cholesky"] = "lu" if assume == "gen" else "cholesky"
        return FactorProblem(routine, a, d=x, factored=factored, inverse=True, conjugate=self.upper)

    def operands(self) -> FactorOperands:
        a, x = (turned(each.local, self.upper) for each in (self["a"], self.written))
        return FactorOperands(a, None, None, x, pivots=self._pivots)

    def end(self, found: Found) -> Matrix:
        if found.info and self.how["assume"] == "pos":
            self.not_positive(found.info)
        return super().end(found)


CALLS: dict[str, type[FactorisationCall[Any]]] = {"solve": _Solve, "inv": _Inverse}
"""The calls that can be planned, by function."""
