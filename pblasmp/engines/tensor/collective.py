# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products without overlap: one local product, and one collective before or after it."""

from __future__ import annotations

from ...dtypes import accumulation_dtype
from ...layout import ParallelProblem
from ..protocol import Engine
from ..request import Operands, Options
from .base import Memory, OperandsT, ParallelProduct, TensorMethod, TensorProduct
from .messages import MESSAGES

__all__ = ["METHODS", "CollectiveGather", "CollectiveOutput", "CollectiveSum"]

_LONGEST = (1 << 31) - 1  # the largest count of an MPI 3 collective


class CollectiveGather(TensorProduct[OperandsT]):
    """AllGather + GEMM: one AllGather, then one product of all tokens."""

    form = "allgather_matmul"

    def _prepare(self) -> None:
        p, inputs = self.p, self.p.inputs[0]
        if not p.return_gathered:
            self.own["gathered"] = Memory(p.dtype, [(sum(p.tokens), inputs)])
        self.own["shard"] = Memory(p.dtype, [(p.tokens[self.rank], inputs)])

    def _multiply(self, operands: OperandsT) -> None:
        p, x = self.p, operands.a
        gathered = operands.gathered
        if gathered is None:
            gathered = self.memory("gathered")
        if not self.packed(x):
            x = self.memory("shard")
            self.copy(x, operands.a)
        self.all_gather(x, gathered, [tokens * p.inputs[0] for tokens in p.tokens])
        self.whole(operands, gathered, operands.c, operands.d)


class CollectiveSum(TensorProduct[OperandsT]):
    """GEMM + ReduceScatter, or + AllReduce: one product, then its sum over the ranks."""

    def _prepare(self) -> None:
        p = self.p
        self.own["partial"] = Memory(self.travels, [(p.tokens[0], p.outputs[0])])
        if not self.everywhere:
            self.own["sums"] = Memory(self.travels, [(p.rows[self.rank], p.outputs[0])])

    def _multiply(self, operands: OperandsT) -> None:
        out = operands.d
        straight = self.plain(operands) and self.packed(out) and self.p.out_dtype == self.travels
        partial = out if straight and self.everywhere else self.memory("partial")
        self.part(operands, operands.a, partial)
        if self.everywhere:
            sums = partial
            self.all_reduce(sums)
        else:
            sums = out if straight else self.memory("sums")
            self.reduce_scatter(partial, sums, self.p.rows)
        if not straight:
            self.add(operands, [sums], [out], operands.c)


class CollectiveOutput(TensorProduct[OperandsT]):
    """GEMM + AllGather of the output: one product of this rank's columns, one AllGather, copies to their places."""

    form = "matmul_allgather"

    def _prepare(self) -> None:
        p, tokens = self.p, self.p.tokens[0]
        self.own["partial"] = Memory(p.out_dtype, [(tokens, p.outputs[self.rank])])
        self.own["gathered"] = Memory(p.out_dtype, [(1, tokens * sum(p.outputs))])

    def _multiply(self, operands: OperandsT) -> None:
        p, columns = self.p, self.p.slices("outputs")
        mine = columns[self.rank]
        part, gathered = self.memory("partial"), self.memory("gathered")
        if p.outputs[self.rank]:
            self.whole(operands, operands.a, None if operands.c is None else operands.c[:, mine], part)
        self.all_gather(part, gathered, [p.tokens[0] * outputs for outputs in p.outputs])
        panels = self.cut(gathered, [(p.tokens[0], outputs) for outputs in p.outputs])
        for place, panel in zip(columns, panels, strict=True):
            self.copy(operands.d[:, place], panel)


# -- the rows of the registry: the collectives of an engine's transport


class _Gather(CollectiveGather[Operands], ParallelProduct):
    path = "MPI_Allgatherv, then one product"


class _Sum(CollectiveSum[Operands], ParallelProduct):
    def _prepare(self) -> None:
        super()._prepare()
        self.path = f"one product, then MPI_{'Allreduce' if self.everywhere else 'Reduce_scatter'}"


class _Output(CollectiveOutput[Operands], ParallelProduct):
    path = "one product, then MPI_Allgatherv"


class CollectiveMethod(TensorMethod):
    """By MPI's collectives."""

    name = "mpi"

    def refusal(
        self, engine: Engine, problem: ParallelProblem, options: Options, operands: Operands | None
    ) -> str:
        """Return why MPI's collectives cannot be used, or an empty string. Local."""
        p = problem
        if engine.transport.collectives is None:
            return "the ranks do not communicate by MPI"
        widest = max(sum(p.tokens) * p.inputs[0], max(p.tokens) * sum(p.outputs))
        if widest * max(p.dtype.itemsize, accumulation_dtype(p.out_dtype).itemsize) > _LONGEST:
            return f"MPI's collectives count no more than {_LONGEST} bytes"
        return MESSAGES.refusal(engine, p, options, operands)

    def cost(self, engine: Engine, problem: ParallelProblem, options: Options) -> float:
        return 5.5  # shared memory or overlap is faster

    def prepare(
        self, engine: Engine, problem: ParallelProblem, options: Options, operands: Operands
    ) -> ParallelProduct:
        kinds = {"allgather_matmul": _Gather, "matmul_allgather": _Output}
        product: ParallelProduct = kinds.get(problem.form, _Sum)(engine, problem, options)
        product.sent_bytes = product._sent()
        return product


METHODS = (CollectiveMethod(),)
