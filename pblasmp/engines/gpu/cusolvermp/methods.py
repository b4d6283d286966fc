# SPDX-License-Identifier: Apache-2.0
"""cuSOLVERMp's eigenvalues as an algorithm of the GPU engine."""

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
    """cuSOLVERMp's syevd."""

    name = "cusolvermp"

    def serves(self, problem: AnyProblem) -> bool:
        return isinstance(problem, FactorProblem) and problem.routine == "eigh"

    def refusal(
        self, engine: Engine, problem: FactorProblem, options: Options, operands: Operands | None
    ) -> str:
        solver = solver_of(session_of(engine))
        return solver if isinstance(solver, str) else ""

    def cost(self, engine: Engine, problem: FactorProblem, options: Options) -> float:
        return 2.0

    def prepare(
        self, engine: Engine, problem: FactorProblem, options: Options, operands: Operands
    ) -> Product:
        solver = solver_of(session_of(engine))
        assert isinstance(solver, Cusolvermp)
        return CusolvermpProduct(engine, solver, problem)


METHODS: tuple[Method, ...] = (CusolvermpMethod(),)
