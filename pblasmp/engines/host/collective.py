# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products without overlap: one GEMM, and one MPI collective before or after it."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from ...comm.communicator import MpiCollectives
from ...dtypes import accumulation_dtype
from ...layout import ParallelProblem
from ..protocol import Engine
from ..request import Operands, Options
from ..tensor.base import ParallelProduct, TensorMethod
from ..tensor.messages import MESSAGES

__all__ = ["METHODS"]

Array = Any

_LONGEST = (1 << 31) - 1  # the largest count of an MPI 3 collective


class _Collective(ParallelProduct):
    """A product with one collective. Local to make.

    Args:
        engine, p, options: as for ``ParallelProduct``.
    """

    def __init__(self, engine: Engine, p: ParallelProblem, options: Options) -> None:
        super().__init__(engine, p, options)
        self._mpi: MpiCollectives = engine.transport.collectives  # type: ignore[attr-defined]  # the host's has them


class CollectiveGather(_Collective):
    """AllGather + GEMM: one product of all tokens."""

    path = "MPI_Allgatherv, then one product"

    def __init__(self, engine: Engine, p: ParallelProblem, options: Options) -> None:
        super().__init__(engine, p, options)
        row = p.inputs[0] * p.dtype.itemsize
        self.sent_bytes = p.tokens[self._transport.rank] * row * (p.size - 1)
        self.workspace = self._operations.workspace(0 if p.return_gathered else sum(p.tokens) * row)

    def _run(self, x: Array, w: Array, c: Array | None, d: Array, gathered: Array | None) -> None:
        p = self._p
        everything = (sum(p.tokens), p.inputs[0])
        total = (
            gathered if gathered is not None else self._operations.scratch("gathered", everything, x.dtype)
        )
        if not x.flags.c_contiguous:
            x = x.copy()
        self._mpi.gather_into(x, total, [tokens * p.inputs[0] for tokens in p.tokens])
        self._multiply(self._tokens(total), self._weights(w), c, d, slice(0, d.shape[1]))


class CollectiveSum(_Collective):
    """GEMM + ReduceScatter, or + AllReduce: one product, whose sum over the ranks goes to the owners of the rows."""

    def __init__(self, engine: Engine, p: ParallelProblem, options: Options) -> None:
        super().__init__(engine, p, options)
        self._exact = accumulation_dtype(p.out_dtype)
        self._everywhere = p.form == "matmul_allreduce"
        self.path = f"one product, then MPI_{'Allreduce' if self._everywhere else 'Reduce_scatter'}"
        rows = p.tokens[0] if self._everywhere else p.tokens[0] + p.rows[self._transport.rank]
        row = p.outputs[0] * self._exact.itemsize
        self.sent_bytes = p.tokens[0] * row
        self.workspace = self._operations.workspace(rows * row)

    def _run(self, x: Array, w: Array, c: Array | None, d: Array, gathered: Array | None) -> None:
        p, scratch = self._p, self._operations.scratch
        part = total = scratch("outgoing", (p.tokens[0], d.shape[1]), self._exact)
        self._sum(self._tokens(x), self._weights(w), None, part)
        if self._everywhere:
            self._mpi.sum_into(part)
        else:
            total = scratch("incoming", d.shape, self._exact)
            self._mpi.sum_scatter_into(part, total, [rows * d.shape[1] for rows in p.rows])
        if c is not None and self._options.beta != 0:
            total += self._exact.type(self._options.beta) * c.astype(self._exact, copy=False)
        self._finish(total, slice(0, d.shape[1]))
        d[...] = total


class CollectiveOutput(_Collective):
    """GEMM + AllGather of the output: one product of this rank's columns."""

    path = "one product, then MPI_Allgatherv"

    def __init__(self, engine: Engine, p: ParallelProblem, options: Options) -> None:
        super().__init__(engine, p, options)
        self._columns = p.slices("outputs")
        column = p.tokens[0] * p.out_dtype.itemsize
        mine = p.outputs[self._transport.rank]
        self.sent_bytes = mine * column * (p.size - 1)
        self.workspace = self._operations.workspace((sum(p.outputs) + mine) * column)

    def _run(self, x: Array, w: Array, c: Array | None, d: Array, gathered: Array | None) -> None:
        tokens, outputs, scratch = x.shape[0], self._p.outputs, self._operations.scratch
        mine = self._columns[self._transport.rank]
        part = scratch("outgoing", (tokens, mine.stop - mine.start), d.dtype)
        own = None if c is None else c[:, mine]
        self._multiply(self._tokens(x), self._weights(w), own, part, slice(0, part.shape[1]))
        counts = [tokens * each for each in outputs]
        panels = scratch("incoming", (1, sum(counts)), d.dtype)[0]
        self._mpi.gather_into(part, panels, counts)
        for columns, end, count in zip(self._columns, accumulate(counts), counts, strict=True):
            d[:, columns] = panels[end - count : end].reshape(tokens, columns.stop - columns.start)
        self._share_amax()


# -- the row of the registry


class CollectiveMethod(TensorMethod):
    """By MPI's collectives."""

    name = "mpi"

    def refusal(
        self, engine: Engine, problem: ParallelProblem, options: Options, operands: Operands | None
    ) -> str:
        """Return why MPI's collectives cannot be used, or an empty string. Local."""
        p = problem
        if engine.transport.collectives is None:  # type: ignore[attr-defined]
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
        kinds = {"allgather_matmul": CollectiveGather, "matmul_allgather": CollectiveOutput}
        return kinds.get(problem.form, CollectiveSum)(engine, problem, options)


METHODS = (CollectiveMethod(),)
