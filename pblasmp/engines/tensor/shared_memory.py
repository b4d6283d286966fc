# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products in which the ranks of one node gather or add in shared memory.

Every rank writes its part of X, or its GEMM's result, into shared memory. Then the ranks multiply everything that was
written; or they add or copy it, in pieces that stay in the caches, and write each element of the result once. The ranks
have agreed since the previous run, so that no rank still reads what is overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ...dtypes import accumulation_dtype
from ...layout import ParallelProblem
from ...layout.axis import Axis
from ..protocol import Engine
from ..request import Operands, Options
from .base import ParallelProduct, TensorMethod, parts_of
from .messages import MESSAGES

__all__ = ["METHODS"]

Array = Any

_PIECE_BYTES = 128 << 10  # of each part at a time: a few pieces fit into a core's own cache


class _Shared(ParallelProduct):
    def _matrices(self, name: str, shape: tuple[int, int], dtype: np.dtype, count: int = 1) -> Array:
        """Return ``count`` matrices that all ranks share. Collective over the ranks."""
        nbytes = count * shape[0] * shape[1] * dtype.itemsize
        memory = self._transport.buffer(name, nbytes, shared=True)
        return memory[:nbytes].view(dtype).reshape(count, *shape)


class SharedInput(_Shared):
    """AllGather + GEMM: every rank copies its tokens to shared memory, and multiplies all of them in one GEMM."""

    path = "every rank's part of X copied to memory that the ranks share, then one product"

    def __init__(self, engine: Engine, p: ParallelProblem, options: Options) -> None:
        super().__init__(engine, p, options)
        self._multiplied = self._operations.multiplies(p.dtype)
        self._mine = p.slices("tokens")[self._transport.rank]
        self.copied_bytes = p.tokens[self._transport.rank] * p.inputs[0] * self._multiplied.itemsize

    def _run(self, x: Array, w: Array, c: Array | None, d: Array, gathered: Array | None) -> None:
        tokens, _, inputs = self._p.sizes
        everything = self._matrices("x", (tokens, inputs), self._multiplied)[0]
        everything[self._mine] = x
        self._transport.fence()
        if gathered is not None:
            gathered[...] = everything
        self._multiply(everything, self._weights(w), c, d, slice(0, d.shape[1]))


class SharedSums(_Shared):
    """GEMM + ReduceScatter or AllReduce: every rank adds its rows of all partial products, in the order of the ranks.

    With AllReduce these rows are then copied by the others.
    """

    _everything = False  # every rank adds all rows for itself

    def __init__(self, engine: Engine, p: ParallelProblem, options: Options) -> None:
        super().__init__(engine, p, options)
        self._exact = accumulation_dtype(p.out_dtype)
        self._everywhere = p.form == "matmul_allreduce"
        tokens, outputs = p.tokens[0], p.outputs[0]
        counts = Axis.even(tokens, p.size).counts() if self._everywhere else p.rows
        stops = np.cumsum(counts)
        self._bounds = [(int(stop - count), int(stop)) for stop, count in zip(stops, counts, strict=True)]
        self._mine = (0, tokens) if self._everything else self._bounds[self._transport.rank]
        self._copies = self._everywhere and not self._everything
        self.path = "partial products in memory that the ranks share, added by the rank that owns their rows"
        if self._everything:
            self.path = "partial products in memory that the ranks share, all added by every rank"
        self.copied_bytes = (self._mine[1] - self._mine[0]) * outputs * self._exact.itemsize * (p.size - 1)

    def _run(self, x: Array, w: Array, c: Array | None, d: Array, gathered: Array | None) -> None:
        x, w = self._tokens(x), self._weights(w)
        transport, (start, stop) = self._transport, self._mine
        parts = self._matrices("parts", (x.shape[0], d.shape[1]), self._exact, self._p.size)
        self._sum(x, w, None, parts[transport.rank])
        sums = self._matrices("sums", d.shape, d.dtype)[0] if self._copies else None
        transport.fence()
        first = 0 if self._everywhere else start  # the row of D at which this rank's rows begin
        for at in self._pieces(start, stop, d.shape[1]):
            there = slice(at.start - first, at.stop - first)
            self._add([part[at] for part in parts], *parts_of(c, d, there))
            if sums is not None:
                sums[at] = d[there]
        if sums is None:
            return
        transport.fence()
        for rank, (start, stop) in enumerate(self._bounds):
            if rank != transport.rank:
                d[start:stop] = sums[start:stop]
        self._share_amax()

    def _pieces(self, start: int, stop: int, width: int) -> list[slice]:
        step = max(1, _PIECE_BYTES // max(1, width * self._exact.itemsize))
        return [slice(at, min(at + step, stop)) for at in range(start, stop, step)]

    def _add(self, parts: list[Array], c: Array | None, d: Array) -> None:
        """Write the sum of ``parts`` and C, after the epilogue, into ``d``, rounded once."""
        beta = self._options.beta if c is not None else 0
        straight = d.dtype == self._exact and beta == 0
        total = d if straight else self._operations.scratch("piece", d.shape, self._exact)
        if len(parts) == 1:
            total[...] = parts[0]
        else:
            np.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total += part
        if beta != 0 and c is not None:
            total += self._exact.type(beta) * c.astype(self._exact, copy=False)
        self._finish(total, slice(0, d.shape[1]))
        if total is not d:
            d[...] = total


class WholeSums(SharedSums):
    """GEMM + AllReduce: every rank adds all rows of all partial products."""

    _everything = True


class RingSums(_Shared):
    """GEMM + ReduceScatter or AllReduce: every rank's GEMM adds in turn to a sum that the ranks share.

    In each of P steps every rank adds to different rows of the sum, in the last step to those that it owns.
    """

    def __init__(self, engine: Engine, p: ParallelProblem, options: Options) -> None:
        super().__init__(engine, p, options)
        self._exact = accumulation_dtype(p.out_dtype)
        self._everywhere = p.form == "matmul_allreduce"
        counts = Axis.even(p.tokens[0], p.size).counts() if self._everywhere else p.rows
        stops = np.cumsum(counts).tolist()
        self._bounds = [slice(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]
        self.path = "partial products added in turn to a sum that the ranks share"
        nbytes = p.tokens[0] * p.outputs[0] * self._exact.itemsize
        self.copied_bytes = nbytes if self._everywhere else nbytes // p.size

    def _run(self, x: Array, w: Array, c: Array | None, d: Array, gathered: Array | None) -> None:
        x, w = self._tokens(x), self._weights(w)
        transport, beta = self._transport, self._options.beta
        rank, size = transport.rank, self._p.size
        total = self._matrices("total", (x.shape[0], d.shape[1]), self._exact)[0]
        for step in range(size):
            rows = self._bounds[(rank + 1 + step) % size]
            if step == 0:
                self._sum(x[rows], w, None, total[rows])
            else:
                transport.fence()
                self._add(x[rows], w, total[rows])
        mine = self._bounds[rank]
        own = total[mine]
        if c is not None and beta != 0:
            there = c[mine] if self._everywhere else c
            own += self._exact.type(beta) * there.astype(self._exact, copy=False)
        self._finish(own, slice(0, d.shape[1]))
        if not self._everywhere:
            d[...] = own
            return
        transport.fence()
        d[...] = total
        self._share_amax()

    def _add(self, x: Array, w: Array, target: Array) -> None:
        """Compute ``target += alpha x w``."""
        if self._float8:
            part = self._operations.scratch("piece", target.shape, self._exact)
            self._sum(x, w, None, part)
            target += part
        else:
            self._operations.gemm(self._options.alpha, x, w, 1, target, self._options.compute)


class SharedOutput(_Shared):
    """GEMM + AllGather of the output: every rank computes its columns into shared memory, and copies the others."""

    path = "every rank's columns in memory that the ranks share, copied by each to its result"

    def __init__(self, engine: Engine, p: ParallelProblem, options: Options) -> None:
        super().__init__(engine, p, options)
        self._columns = p.slices("outputs")
        self.copied_bytes = p.tokens[0] * sum(p.outputs) * p.out_dtype.itemsize

    def _run(self, x: Array, w: Array, c: Array | None, d: Array, gathered: Array | None) -> None:
        x, w = self._tokens(x), self._weights(w)
        transport, tokens = self._transport, x.shape[0]
        flat = self._matrices("parts", (1, tokens * d.shape[1]), d.dtype)[0, 0]
        panels = [
            flat[tokens * columns.start : tokens * columns.stop].reshape(tokens, columns.stop - columns.start)
            for columns in self._columns
        ]
        mine = self._columns[transport.rank]
        local = slice(0, mine.stop - mine.start)
        self._multiply(x, w, None if c is None else c[:, mine], panels[transport.rank], local)
        transport.fence()
        for columns, panel in zip(self._columns, panels, strict=True):
            d[:, columns] = panel
        self._share_amax()


# -- the rows of the registry


_ALONE = 9.0  # one rank has nothing to share
_WORTH_A_TURN = 1 << 20  # bytes of a rank's rows of the sum from which on "ring" is the fastest


class SharedMemoryMethod(TensorMethod):
    """A tensor-parallel product on the ranks of one node.

    Attributes:
        kinds: its products by form.
    """

    kinds: ClassVar[Mapping[str, type[ParallelProduct]]]

    def __init__(self) -> None:
        self.forms = tuple(self.kinds)

    def shared_bytes(self, p: ParallelProblem) -> int:
        """Return how many bytes the ranks share. Local."""
        tokens, outputs, inputs = p.sizes
        if p.gathers:
            return tokens * inputs * accumulation_dtype(p.dtype).itemsize
        if not p.sums:
            return tokens * outputs * p.out_dtype.itemsize
        return p.size * _sum_bytes(p)

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
        needed = self.shared_bytes(problem)
        fits, limit = transport.fits(needed)
        return "" if fits else f"{needed} bytes of shared memory are needed, {limit} are available"

    def cost(self, engine: Engine, problem: ParallelProblem, options: Options) -> float:
        return 1.5 if problem.size > 1 else _ALONE

    def prepare(
        self, engine: Engine, problem: ParallelProblem, options: Options, operands: Operands
    ) -> ParallelProduct:
        product = self.kinds[problem.form](engine, problem, options)
        product.workspace = engine.operations.workspace(self.shared_bytes(problem))
        return product


class PullMethod(SharedMemoryMethod):
    """Every rank reads what it needs from the memory of the others."""

    name = "pull"
    kinds: ClassVar = {
        "allgather_matmul": SharedInput, "matmul_reduce_scatter": SharedSums, "matmul_allgather": SharedOutput,
    }  # fmt: skip


class OneShotMethod(SharedMemoryMethod):
    """Every rank adds up all of the result."""

    name = "one_shot"
    kinds: ClassVar = {"matmul_allreduce": WholeSums}

    def cost(self, engine: Engine, problem: ParallelProblem, options: Options) -> float:
        return 1.6 if problem.size > 1 else _ALONE


class TwoShotMethod(SharedMemoryMethod):
    """Every rank adds up its rows of the result, and reads the others'."""

    name = "two_shot"
    kinds: ClassVar = {"matmul_allreduce": SharedSums}

    def shared_bytes(self, p: ParallelProblem) -> int:
        return super().shared_bytes(p) + p.sizes[0] * p.sizes[1] * p.out_dtype.itemsize


class RingMethod(SharedMemoryMethod):
    """Every rank adds its contribution to one sum after the other."""

    name = "ring"
    kinds: ClassVar = {"matmul_reduce_scatter": RingSums, "matmul_allreduce": RingSums}

    def shared_bytes(self, p: ParallelProblem) -> int:
        return _sum_bytes(p)

    def cost(self, engine: Engine, problem: ParallelProblem, options: Options) -> float:
        if problem.size == 1:
            return _ALONE
        return 1.4 if _sum_bytes(problem) // problem.size >= _WORTH_A_TURN else 1.7


def _sum_bytes(p: ParallelProblem) -> int:
    tokens, outputs, _ = p.sizes
    return tokens * outputs * accumulation_dtype(p.out_dtype).itemsize


METHODS = (PullMethod(), OneShotMethod(), TwoShotMethod(), RingMethod())
