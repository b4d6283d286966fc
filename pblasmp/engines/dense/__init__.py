# SPDX-License-Identifier: Apache-2.0
"""Products, level-3 routines and factorizations that every engine can run. A new one is a file and a row here."""

from __future__ import annotations

from ...layout.factor_problem import FactorProblem
from ..protocol import Engine, Method
from ..request import AnyProblem, Operands, Options
from . import add, slab_products, solve, stationary, steps, summed
from .elimination import CholeskyProduct, ConditionProduct, LuProduct
from .qr import LeastSquaresProduct, QrProduct
from .sweeps import TriangularProduct
from .workbench import PanelsProduct

__all__ = ["METHODS"]

_PRODUCTS: dict[str, type[PanelsProduct]] = {
    "cholesky": CholeskyProduct,
    "lu": LuProduct,
    "qr": QrProduct,
    "lstsq": LeastSquaresProduct,
    "triangular": TriangularProduct,
    "condition": ConditionProduct,
}

_TALL = ("lu", "qr", "lstsq")  # of whose panels a rank has all rows at a time


class PanelsMethod(Method):
    """Matrices are moved to panels, block columns that ranks have whole, computed with there, and moved back."""

    name, least = "panels", 1.0

    def serves(self, problem: AnyProblem) -> bool:
        return isinstance(problem, FactorProblem) and problem.routine in _PRODUCTS

    def refusal(
        self, engine: Engine, problem: FactorProblem, options: Options, operands: Operands | None
    ) -> str:
        if problem.factored or problem.routine not in _TALL:
            return ""
        (rows, _), dtype = problem.a.shape, problem.a.dtype
        most = engine.operations.tallest(dtype)
        return "" if rows <= most else f"{rows} rows: these GPUs factor {most} at most, of {dtype.name}"

    def prepare(
        self, engine: Engine, problem: FactorProblem, options: Options, operands: Operands
    ) -> PanelsProduct:
        return _PRODUCTS[problem.routine](engine, problem)


METHODS: tuple[Method, ...] = (
    *summed.METHODS,
    *slab_products.METHODS,
    *stationary.METHODS,
    *solve.METHODS,
    *add.METHODS,
    *steps.METHODS,
    PanelsMethod(),
)
