# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK's eigenvalues and singular values as an algorithm of the host engine, and LAPACK's on one rank."""

from __future__ import annotations

from ....layout.factor_problem import FactorProblem
from ...local.spectral import OneRankMethod, SpectralMethod
from ...product import Product
from ...protocol import Engine, Method
from ...request import Operands, Options
from .library import Scalapack, scalapack_of
from .product import LapackProduct, ScalapackProduct, work_layout

__all__ = ["METHODS", "SMALL"]

SMALL = 200
"""The largest order, or longer side, for which one rank is as fast as all."""

_INT_MAX = 2**31 - 1


class ScalapackMethod(SpectralMethod):
    """ScaLAPACK's p?syevd, p?syevr, p?gesvd, or those for complex matrices."""

    name = "scalapack"

    def refusal(
        self, engine: Engine, problem: FactorProblem, options: Options, operands: Operands | None
    ) -> str:
        work = work_layout(problem.a, engine.transport.size)
        rows, cols = work.local_shape(0)
        if max(rows * cols, *work.shape) > _INT_MAX:
            return "a rank would have more elements than ScaLAPACK's 32-bit integers count: take more ranks"
        found = scalapack_of(engine)
        return found if isinstance(found, str) else ""

    def cost(self, engine: Engine, problem: FactorProblem, options: Options) -> float:
        return 1.0

    def prepare(
        self, engine: Engine, problem: FactorProblem, options: Options, operands: Operands
    ) -> Product:
        found = scalapack_of(engine)
        assert isinstance(found, Scalapack)
        return ScalapackProduct(engine, problem, found)


METHODS: tuple[Method, ...] = (OneRankMethod("lapack", LapackProduct, SMALL), ScalapackMethod())
