# SPDX-License-Identifier: Apache-2.0
"""cuSOLVERMp's routines as an algorithm of the GPU engine."""

from __future__ import annotations

from ....layout.factor_problem import FactorProblem
from ...product import Product
from ...protocol import Engine, Method
from ...request import AnyProblem, Operands, Options
from ..session import session_of
from .library import Cusolvermp, solver_of
from .product import CusolvermpProduct

__all__ = ["METHODS"]


class CusolvermpMethod(Method):
    """cuSOLVERMp's potrf, getrf, geqrf and gels, what is solved with their factors, and syevd."""

    name = "cusolvermp"

    def serves(self, problem: AnyProblem) -> bool:
        return isinstance(problem, FactorProblem) and problem.routine not in (
            "triangular",
            "condition",
            "svd",
        )

    def refusal(
        self, engine: Engine, problem: FactorProblem, options: Options, operands: Operands | None
    ) -> str:
        p = problem
        if p.inverse and p.routine != "qr":
            return "cuSOLVERMp has no inverse"
        if p.routine == "lu" and p.op != "N" and p.d is not None:
            return f"cuSOLVERMp solves with A, not with its transposes, got trans={p.op!r}"
        if p.routine == "lstsq" and p.op != "N":
            return "cuSOLVERMp's gels is for op(A) with more rows than columns, or a square A itself"
        if p.routine == "qr" and p.a.shape[0] < p.a.shape[1]:
            return "cuSOLVERMp's QR is for as many rows as columns or more"
        if p.routine != "eigh" and (0 in p.a.shape or (p.d is not None and p.right == 0)):
            return "there is nothing to compute for cuSOLVERMp: an extent is 0"
        solver = solver_of(session_of(engine))
        return solver if isinstance(solver, str) else ""

    def cost(self, engine: Engine, problem: FactorProblem, options: Options) -> float:
        return 2.0  # on panels: 1

    def prepare(
        self, engine: Engine, problem: FactorProblem, options: Options, operands: Operands
    ) -> Product:
        solver = solver_of(session_of(engine))
        assert isinstance(solver, Cusolvermp)
        return CusolvermpProduct(engine, solver, problem)


METHODS: tuple[Method, ...] = (CusolvermpMethod(),)
