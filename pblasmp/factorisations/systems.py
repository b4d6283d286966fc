# SPDX-License-Identifier: Apache-2.0
"""Systems of equations, and inverses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..calls import factor_directly
from ..engines.factor import FactorOperands, Found
from ..layout.factor_problem import FactorProblem
from ..layout.grid import one_of
from .call import FactorisationCall, Matrix, Pivots, layout_of, local_of, turned

if TYPE_CHECKING:
    from ..layout.level3 import Diag, Uplo
    from ..layout.problem import Op

__all__ = ["CALLS", "inv", "inverse_of", "solve", "solve_keeping"]

Assume = Literal["gen", "pos", "tri"]

_ASSUMED = ("gen", "pos", "tri")


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
            B keeps its values, also as ``out``; another ``out`` may have been written to.
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?GESV, ?POSV, ?TRTRS.
    """
    return _Solve(a=a, b=b, assume=assume, op_a=op_a, uplo=uplo, diag=diag, out=out, algo=algo).run()


def solve_keeping(
    a: Matrix, b: Matrix, factor: Matrix, *, uplo: Uplo = "L", out: Matrix | None = None
) -> Matrix:
    """Do as ``solve`` with a positive definite A, and write its Cholesky factor to ``factor``. Collective."""
    return _Solve(
        a=a, b=b, assume="pos", op_a="N", uplo=uplo, diag="N", factor=factor, out=out, algo="auto"
    ).run()


class _Assuming(FactorisationCall[Matrix]):
    """A call that is told what kind of matrix A is."""

    def end(self, found: Found) -> Matrix:
        if found.info and self.how["assume"] == "pos":
            self.not_positive(found.info)
        return super().end(found)


class _Solve(_Assuming):
    """A call of ``solve``, or of ``solve_keeping``."""

    name = "solve"
    matrices = ("a", "b", "factor", "out")
    optional = ("factor", "out")
    like = "b"

    def directly(self) -> tuple[Matrix, Found] | Literal[False] | None:
        a, b, factor, out = self.given.values()
        assume, options = self.how["assume"], {name: self.how[name] for name in ("op_a", "uplo", "diag")}
        if b is None or factor is not None or not one_of(assume, _ASSUMED):
            return None
        if assume != "tri" and not all(one_of(options[name], ("N",)) for name in ("op_a", "diag")):
            return None
        routine = {"gen": "gesv", "pos": "posv", "tri": "trtrs"}[assume]
        return factor_directly(routine, a, b, out, call=self.name, **options)

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


def inv(
    a: Matrix,
    assume: Assume = "gen",
    *,
    uplo: Uplo = "L",
    diag: Diag = "N",
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return the inverse of a matrix, all of it whatever ``assume`` says. Collective over the context.

    To solve a system, ``solve`` takes a third of the operations and is more accurate.

    Args:
        a: n × n: float32, float64, complex64 or complex128, in any layout.
        assume: as for ``solve``.
        uplo: with "pos" and "tri", which triangle of A is read.
        diag: with "tri": "U" takes the diagonal as ones and does not read it.
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
    """Do as ``inv``, or if ``factored`` as LAPACK with a factor, and ``pivots`` that are legal and equal everywhere.

    With "pos" and "tri" then only the triangle is written, without a diagonal of ones.
    """
    return _Inverse(
        a=a, assume=assume, pivots=pivots, uplo=uplo, diag=diag, factored=factored, out=out, algo=algo
    ).run()


class _Inverse(_Assuming):
    """A call of ``inv`` or ``inverse_of``."""

    name = "inv"

    def __init__(self, *, pivots: Pivots | None = None, factored: bool = False, **arguments: Any) -> None:
        super().__init__(factored=factored, **arguments)
        self._pivots = pivots

    def directly(self) -> tuple[Matrix, Found] | Literal[False] | None:
        a, out, assume = self.given["a"], self.given["out"], self.how["assume"]
        options = {name: self.how[name] for name in ("uplo", "diag")}
        if not one_of(assume, _ASSUMED) or (assume != "tri" and not one_of(options["diag"], ("N",))):
            return None
        if self.how["factored"]:
            routine = {"gen": "getri", "pos": "potri", "tri": "trtri"}[assume]
        else:
            routine = {"gen": "getrf getri", "pos": "potrf potri", "tri": "trtri laset"}[assume]
        return factor_directly(routine, a, None, out, call=self.name, pivots=self._pivots, **options)

    def check(self) -> None:
        self.check_matrix("a")
        self.check_letter("assume", _ASSUMED)
        self.check_letter("uplo", "LU")
        self.check_letter("diag", "NU")
        self.check_like("out", "a")

    def new(self) -> Matrix:
        return self.out_or_new(self["a"].descriptor, zeros=self.how["factored"])

    def problem(self) -> FactorProblem:
        a, x = (turned(each.descriptor, self.upper) for each in (self["a"], self.written))
        assume, factored = self.how["assume"], self.how["factored"]
        if assume == "tri":
            unit = self.how["diag"] == "U"
            return FactorProblem("triangular", a, d=x, factored=factored, inverse=True, unit=unit)
        routine: Literal["lu", "cholesky"] = "lu" if assume == "gen" else "cholesky"
        return FactorProblem(routine, a, d=x, factored=factored, inverse=True, conjugate=self.upper)

    def operands(self) -> FactorOperands:
        a, x = (turned(each.local, self.upper) for each in (self["a"], self.written))
        return FactorOperands(a, None, None, x, pivots=self._pivots)


CALLS: dict[str, type[FactorisationCall[Any]]] = {"solve": _Solve, "inv": _Inverse}
"""The calls that can be planned, by function."""
