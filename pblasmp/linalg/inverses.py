# SPDX-License-Identifier: Apache-2.0
"""Inverses."""

from __future__ import annotations

from typing import Any, Literal

from ..engines.product import Found
from ..layout.factor_problem import FactorRoutine
from .assumptions import COMPUTED, Assume, AssumingCall
from .factorization_call import FactorizationCall, Matrix, Pivots, Roles


def inv(
    a: Matrix,
    assume_a: Assume = "gen",
    *,
    lower: bool = False,
    unit_diagonal: bool = False,
    out: Matrix | None = None,
    algo: str = "auto",
) -> Matrix:
    """Return the inverse of a matrix, all of it whatever ``assume_a`` says. Collective over the context.

    To solve a system, ``solve`` takes a third of the operations and is more accurate.

    Args:
        a: n × n: float32, float64, complex64 or complex128, in any layout.
        assume_a, lower: as for ``solve``.
        unit_diagonal: of a triangular matrix: the diagonal is taken as ones and not read.
        out: where to write the inverse, which may be ``a``; by default a new matrix in the layout of A.
        algo: "auto", or the name of an algorithm.

    Raises:
        FactorizationError: A is exactly singular, or not positive definite, at ``index``.
        ArgumentError: shapes, types or options do not fit; the message names every fault.
        RankMismatchError: the ranks gave different arguments.
        UnsupportedError: the engine does not offer it.

    Source: LAPACK, ?GETRI, ?POTRI, ?TRTRI; NumPy, numpy.linalg.inv.

    Example:
        >>> a = ctx.scatter(np.array([[4.0, 2], [2, 5]]), block=1)
        >>> (16 * pb.linalg.inv(a)).allgather().round(6).tolist()
        [[5.0, -2.0], [-2.0, 4.0]]

    See Also:
        solve, which is faster and more accurate than a product with the inverse.
    """
    return _Inverse(
        a=a, assume_a=assume_a, lower=lower, unit_diagonal=unit_diagonal, out=out, algo=algo
    ).run()


def inverse_of(
    a: Matrix,
    pivots: Pivots | None = None,
    assume_a: Assume = "gen",
    *,
    lower: bool = False,
    unit_diagonal: bool = False,
    out: Matrix | None = None,
) -> Matrix:
    """Do as LAPACK with a factor, and ``pivots`` that are legal and equal everywhere. Collective over the context.

    Of a triangular or positive definite matrix only the triangle is written, without a diagonal of ones.
    """
    how: dict[str, Any] = {"lower": lower, "unit_diagonal": unit_diagonal, "algo": "auto"}
    return _Inverse(a=a, assume_a=assume_a, pivots=pivots, factored=True, out=out, **how).run()


class _Inverse(AssumingCall):
    """A call of ``inv`` or ``inverse_of``."""

    name = "inv"

    def __init__(self, *, pivots: Pivots | None = None, factored: bool = False, **arguments: Any) -> None:
        super().__init__(factored=factored, **arguments)
        self._pivots = pivots

    def directly(self) -> tuple[Matrix, Found] | Literal[False] | None:
        a, kind = self.given["a"], self.kind
        if kind not in COMPUTED or (kind != "tri" and self.unit):
            return None
        if self.how["factored"]:
            routine = {"gen": "getri", "pos": "potri", "tri": "trtri"}[kind]
        else:
            routine = {"gen": "getrf getri", "pos": "potrf potri", "tri": "trtri laset"}[kind]
        return self.at_once(routine, a, pivots=self._pivots, uplo=self.uplo, diag=self.diag)

    def check(self) -> None:
        super().check()
        self.check_like("out", "a")

    def new(self) -> Matrix:
        return self.out_or_new(self["a"].descriptor, zeros=self.how["factored"])

    def roles(self) -> Roles:
        kind, upper, options = self.kind, self.upper, {"factored": self.how["factored"], "inverse": True}
        routine: FactorRoutine = "triangular" if kind == "tri" else "lu" if kind == "gen" else "cholesky"
        options |= {"unit": self.unit} if kind == "tri" else {"conjugate": upper}
        return Roles(routine, self["a"], d=self.written, turned="ad" * upper, options=options)


CALLS: dict[str, type[FactorizationCall[Any]]] = {"inv": _Inverse}
"""The calls that can be planned, by function."""
