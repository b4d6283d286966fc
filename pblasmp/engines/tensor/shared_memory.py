# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products in which the ranks gather or add in memory that all of them reach.

Every rank writes its part of X, or its GEMM's result, into shared memory. Then the ranks multiply everything that was
written; or they add or copy it, in pieces that stay in the caches, and write each element of the result once. The ranks
have agreed since the previous run, so that no rank still reads what is overwritten.
"""

from __future__ import annotations

from typing import Any

from ...dtypes import accumulation_dtype
from ...layout import ParallelProblem
from ..protocol import Engine
from ..request import Operands, Options
from .base import Memory, OperandsT, ParallelProduct, TensorMethod, TensorProduct
from .messages import MESSAGES

__all__ = ["METHODS", "PulledSum"]

Array = Any


class PulledSum(TensorProduct[OperandsT]):
    """GEMM + ReduceScatter or AllReduce: every rank adds its rows of all partial products, in the order of the ranks.

    With AllReduce the others then copy these rows.
    """

    def _prepare(self) -> None:
        p = self.p
        shape = p.tokens[0], p.outputs[0]
        self.shared["parts"] = Memory(self.travels, [shape] * p.size)
        self._rows = [self.rows_of(rank) for rank in range(self.size)]
        if self.everywhere:
            self.shared["sums"] = Memory(p.out_dtype, [shape] * p.size, disjoint=True)

    def _multiply(self, operands: OperandsT) -> None:
        parts, c, out = self.everyones("parts"), operands.c, operands.d
        self.part(operands, operands.a, parts[self.rank])
        sums = self.everyones("sums") if self.everywhere else []
        self.meet()
        mine = self._rows[self.rank]
        parts = [part[mine] for part in parts]
        if not sums:
            self.add(operands, parts, [out], c)
            return
        self.add(operands, parts, [out[mine], sums[self.rank][mine]], None if c is None else c[mine])
        self.meet()
        for rank in self.peers:
            self.copy(operands.d[self._rows[rank]], sums[rank][self._rows[rank]])


class _SharedSum(PulledSum[Operands], ParallelProduct):
    path = "partial products in memory that the ranks share, added by the rank that owns their rows"

    def _prepare(self) -> None:
        super()._prepare()
        mine = self._rows[self.rank]
        row = self.p.outputs[0] * self.travels.itemsize
        self.copied_bytes = (mine.stop - mine.start) * row * (self.size - 1)


class SharedInput(ParallelProduct):
    """AllGather + GEMM: every rank copies its tokens to shared memory, and multiplies all of them in one GEMM."""

    path = "every rank's part of X copied to memory that the ranks share, then one product"

    def _prepare(self) -> None:
        p, multiplied = self.p, self._operations.multiplies(self.p.dtype)
        self.shared["x"] = Memory(multiplied, [(sum(p.tokens), p.inputs[0])], disjoint=True)
        self.copied_bytes = p.tokens[self.rank] * p.inputs[0] * multiplied.itemsize

    def _multiply(self, operands: Operands) -> None:
        everything = self.everyones("x")[self.rank]
        everything[self.p.slices("tokens")[self.rank]] = operands.a
        self.meet()
        if operands.gathered is not None:
            operands.gathered[...] = everything
        self.whole(operands, everything, operands.c, operands.d)


class RingSum(ParallelProduct):
    """GEMM + ReduceScatter or AllReduce: every rank's GEMM adds in turn to a sum that the ranks share.

    In each of P steps every rank adds to different rows of the sum, in the last step to those that it owns.
    """

    path = "partial products added in turn to a sum that the ranks share"

    def _prepare(self) -> None:
        p = self.p
        self.shared["total"] = memory = Memory(self.travels, [(p.tokens[0], p.outputs[0])], disjoint=True)
        self.copied_bytes = memory.nbytes if self.everywhere else memory.nbytes // p.size

    def _multiply(self, operands: Operands) -> None:
        x, c, exact = operands.a, operands.c, self.travels
        total = self.everyones("total")[self.rank]
        for step in range(self.size):
            rows = self.rows_of((self.rank + 1 + step) % self.size)
            if step == 0:
                self.part(operands, x[rows], total[rows])
            else:
                self.meet()
                self._accumulate(operands, x[rows], total[rows])
        mine = self.rows_of(self.rank)
        own = total[mine]
        if c is not None:
            there = c[mine] if self.everywhere else c
            own += exact.type(self.options.beta) * there.astype(exact, copy=False)
        self._finish(operands, own, slice(None))
        if not self.everywhere:
            operands.d[...] = own
            return
        self.meet()
        operands.d[...] = total

    def _accumulate(self, operands: Operands, x: Array, target: Array) -> None:
        """Compute ``target += alpha x w``."""
        if self._float8:
            part = self._operations.scratch("piece", target.shape, target.dtype)
            self.part(operands, x, part)
            target += part
        else:
            self._operations.gemm(
                self.options.alpha, self._tokens(x), operands.b, 1, target, self.options.compute
            )


class SharedOutput(ParallelProduct):
    """GEMM + AllGather of the output: every rank computes its columns into shared memory, and copies the others."""

    path = "every rank's columns in memory that the ranks share, copied by each to its result"

    def _prepare(self) -> None:
        p = self.p
        shapes = [(p.tokens[0], outputs) for outputs in p.outputs]
        self.shared["panels"] = memory = Memory(p.out_dtype, shapes)
        self.copied_bytes = memory.nbytes

    def _multiply(self, operands: Operands) -> None:
        panels, columns = self.everyones("panels"), self.p.slices("outputs")
        mine = columns[self.rank]
        self.whole(
            operands, operands.a, None if operands.c is None else operands.c[:, mine], panels[self.rank]
        )
        self.meet()
        for place, panel in zip(columns, panels, strict=True):
            operands.d[:, place] = panel


# -- the rows of the registry


_ALONE = 9.0  # one rank has nothing to share
_WORTH_A_TURN = 1 << 20  # bytes of a rank's rows of the sum from which on "ring" is the fastest


class SharedMemoryMethod(TensorMethod):
    """A tensor-parallel product on the ranks of one node.

    Args:
        name: the algorithm.
        kinds: its products by form.
    """

    def __init__(self, name: str, **kinds: type[ParallelProduct]) -> None:
        self.name, self.forms, self._kinds = name, tuple(kinds), kinds

    def refusal(
        self, engine: Engine, problem: ParallelProblem, options: Options, operands: Operands | None
    ) -> str:
        """Return why shared memory cannot be used, or an empty string. Collective over the ranks."""
        transport = engine.transport
        if transport.why_not_shared:
            return transport.why_not_shared
        if len(transport.nodes) > 1:
            return f"the ranks are on {len(transport.nodes)} nodes, which share no memory"
        why = MESSAGES.refusal(engine, problem, options, operands)
        if why:
            return why
        product = self._kinds[problem.form](engine, problem, options)
        needed = sum(each.nbytes for each in product.shared.values())
        fits, limit = transport.fits(needed)
        return "" if fits else f"{needed} bytes of shared memory are needed, {limit} are available"

    def cost(self, engine: Engine, problem: ParallelProblem, options: Options) -> float:
        return 1.5 if problem.size > 1 else _ALONE

    def prepare(
        self, engine: Engine, problem: ParallelProblem, options: Options, operands: Operands
    ) -> ParallelProduct:
        return self._kinds[problem.form](engine, problem, options)


class RingMethod(SharedMemoryMethod):
    """Every rank adds its contribution to one sum after the other."""

    def cost(self, engine: Engine, problem: ParallelProblem, options: Options) -> float:
        """Return less than that of the others if a rank adds many bytes. Local."""
        if problem.size == 1:
            return _ALONE
        tokens, outputs, _ = problem.sizes
        mine = tokens * outputs * accumulation_dtype(problem.out_dtype).itemsize // problem.size
        return 1.4 if mine >= _WORTH_A_TURN else 1.7


METHODS = (
    SharedMemoryMethod(
        "pull", allgather_matmul=SharedInput, matmul_reduce_scatter=_SharedSum, matmul_allgather=SharedOutput
    ),
    SharedMemoryMethod("two_shot", matmul_allreduce=_SharedSum),
    RingMethod("ring", matmul_reduce_scatter=RingSum, matmul_allreduce=RingSum),
)
