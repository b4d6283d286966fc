# SPDX-License-Identifier: Apache-2.0
"""Factorizations on panels as an algorithm of every engine that has a LAPACK for its arrays."""

from __future__ import annotations

from collections.abc import Callable

from ...comm import Agreement
from ...layout.factor_problem import FactorProblem
from ..product import FactorProduct, Found, Product
from ..protocol import Engine, Method
from ..request import AnyProblem, Operands, Options
from .elimination import CholeskyJob, ConditionJob, LuJob
from .qr import LeastSquaresJob, QrJob
from .sweeps import TriangularJob

Compute = Callable[[Operands], Found]


def _cholesky(engine: Engine, p: FactorProblem) -> Compute:
    job = CholeskyJob(
        engine, p.a, p.c, p.b, p.d, factored=p.factored, inverse=p.inverse, conjugate=p.conjugate
    )
    return lambda given: Found(job.run(given.a, given.c, given.b, given.d), diagonal=job.diagonal)


def _lu(engine: Engine, p: FactorProblem) -> Compute:
    job = LuJob(engine, p.a, p.c, p.b, p.d, factored=p.factored, inverse=p.inverse)

    def compute(given: Operands) -> Found:
        info = job.run(given.a, given.c, given.b, given.d, given.pivots, op=p.op)
        return Found(info, job.pivots, job.diagonal)

    return compute


def _qr(engine: Engine, p: FactorProblem) -> Compute:
    if not p.factored:
        factoring = QrJob(engine, p.a, p.c)

        def factor(given: Operands) -> Found:
            factoring.factor(given.a, given.c)
            return Found(tau=factoring.tau)

        return factor
    assert p.d is not None
    job = QrJob(engine, p.a, None, (p.b, p.d), adjoint=p.op == "C", conjugate=p.conjugate)

    def apply(given: Operands) -> Found:
        job.apply(given.a, given.tau, given.b, given.d)
        return Found()

    return apply


def _lstsq(engine: Engine, p: FactorProblem) -> Compute:
    assert p.b is not None
    assert p.d is not None
    job = LeastSquaresJob(engine, p.a, p.b, p.d, p.c, least=p.op == "C", conjugate=p.conjugate)
    return lambda given: Found(job.run(given.a, given.b, given.d, given.c))


def _triangular(engine: Engine, p: FactorProblem) -> Compute:
    assert p.d is not None
    job = TriangularJob(engine, p.a, p.b, p.d, unit=p.unit, part=p.factored, op=p.op, conjugate=p.conjugate)
    return lambda given: Found(job.run(given.a, given.b, given.d))


def _condition(engine: Engine, p: FactorProblem) -> Compute:
    job = ConditionJob(engine, p.a)
    return lambda given: Found(condition=job.run(given.a))


_JOBS: dict[str, Callable[[Engine, FactorProblem], Compute]] = {
    "cholesky": _cholesky,
    "lu": _lu,
    "qr": _qr,
    "lstsq": _lstsq,
    "triangular": _triangular,
    "condition": _condition,
}


_TALL = ("lu", "qr", "lstsq")  # of whose panels a rank has all rows at a time


class PanelsMethod(Method):
    """Matrices are moved to panels, block columns that ranks have whole, computed with there, and moved back."""

    name, least = "panels", 1.0

    def serves(self, problem: AnyProblem) -> bool:
        return isinstance(problem, FactorProblem) and problem.routine in _JOBS

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
    ) -> Product:
        return _PanelsProduct(engine, problem)


class _PanelsProduct(FactorProduct):
    """A factorization on panels. Making and running one is collective over the context."""

    path = "panels"

    def __init__(self, engine: Engine, problem: FactorProblem) -> None:
        self._operations = engine.operations
        try:
            self._compute = _JOBS[problem.routine](engine, problem)
        except MemoryError as error:  # the same on every rank
            with Agreement(engine.transport.comm, problem.routine):
                raise error from None

    def compute(self, operands: Operands) -> Found:
        with self._operations.factoring():
            return self._compute(operands)


METHODS: tuple[Method, ...] = (PanelsMethod(),)
