# SPDX-License-Identifier: Apache-2.0
"""GEMM + AllReduce without overlap: one local product, then the sum of the partial products over the ranks."""

from __future__ import annotations

from typing import Any

from ...dtypes import accumulation_dtype
from ...layout import MatmulProblem, ParallelProblem
from ..local.epilogue import Finish, number
from ..method import travel_refusal, type_refusal
from ..product import Product
from ..protocol import Engine, Method
from ..request import AnyProblem, Operands, Options

__all__ = ["METHODS", "ReducedProduct"]

Array = Any


class ReducedProduct(Product):
    """Each rank multiplies its part of k; the partial products are summed over all ranks. Making one is local.

    Args:
        engine: where it runs.
        p: the product, of scheme "matmul_allreduce".
        options: alpha, beta, and the type in which products are summed.
        finish: computes the epilogue and amax; None if there is neither.
    """

    path = "partial products summed over ranks"

    def __init__(self, engine: Engine, p: MatmulProblem, options: Options, finish: Finish | None) -> None:
        self._engine, self._p, self._options, self._finish = engine, p, options, finish
        self._dtype = accumulation_dtype(p.d.dtype)
        self._inside = engine.transport.rank < p.d.grid.size
        nbytes = p.m * p.n * self._dtype.itemsize
        self.sent_bytes = nbytes if engine.transport.size > 1 else 0
        self.workspace = engine.operations.workspace(nbytes)

    def _queue(self, operands: Operands) -> None:
        engine, p, options, operations = self._engine, self._p, self._options, self._engine.operations
        partial, alpha = self._partial(operands), options.alpha
        if operands.scales is not None:
            alpha = alpha * number(operands.scales.a) * number(operands.scales.b)
        if self._inside and p.k and alpha != 0:
            left, right = (
                operations.operand(_op(x, op), matrix.dtype, name)
                for x, op, matrix, name in ((operands.a, p.op_a, p.a, "x"), (operands.b, p.op_b, p.b, "w"))
            )
            operations.gemm(alpha, left, right, 0, partial, options.compute)
        else:
            partial[...] = 0
        engine.transport.sum_ranks(partial)
        if self._inside and options.beta != 0 and operands.c is not None:
            c = operands.c.astype(self._dtype, copy=False)
            operations.add(partial, 1, partial, options.beta, c, None, conjugate=False)
        if self._finish is not None:
            self._finish(partial, operands)
        if self._inside and partial is not operands.d:
            operations.store(operands.d, partial, p.d.dtype)

    def _partial(self, operands: Operands) -> Array:
        """Return the array for the sum: D, if it is contiguous, has the right type, and does not hold C."""
        p, d = self._p, operands.d
        packed = d.flags.c_contiguous if p.d.order == "C" else d.flags.f_contiguous
        if self._inside and packed and d.dtype == self._dtype and self._options.beta == 0:
            return d
        return self._engine.operations.scratch("partial", (p.m, p.n), self._dtype, p.d.order)


def _op(array: Array, op: str) -> Array:
    out = array if op == "N" else array.T
    return out.conj() if op == "C" and out.dtype.kind == "c" else out


class SumMethod(Method):
    """GEMM + AllReduce as one product and one sum over the ranks."""

    name = "sum"

    def serves(self, problem: AnyProblem) -> bool:
        if isinstance(problem, ParallelProblem):
            return problem.form == "matmul_allreduce"
        return isinstance(problem, MatmulProblem) and problem.scheme == "matmul_allreduce"

    def view(self, problem: AnyProblem) -> AnyProblem | str:
        return problem.as_allreduce() if isinstance(problem, ParallelProblem) else problem

    def refusal(
        self, engine: Engine, problem: MatmulProblem, options: Options, operands: Operands | None
    ) -> str:
        travels = accumulation_dtype(problem.d.dtype)
        why = type_refusal(engine, problem, options, operands)
        return why or travel_refusal(options.comm_dtype, travels)

    def cost(self, engine: Engine, problem: MatmulProblem, options: Options) -> float:
        return 3.0

    def prepare(
        self, engine: Engine, problem: MatmulProblem, options: Options, operands: Operands
    ) -> ReducedProduct:
        finish = Finish(engine, problem) if Finish.needed(problem, operands) else None
        return ReducedProduct(engine, problem, options, finish)


METHODS = (SumMethod(),)
