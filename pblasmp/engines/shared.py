# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products through memory that the ranks of one node share: partial sums are added where they are.

Every rank's GEMM writes into shared memory. Then ranks add, or copy, in pieces that stay in the caches, and write each
number of the result once. Buffers alternate between two: whoever writes the one has passed the fence of the product
that used the other, and so has everybody else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..dtypes import accumulation_dtype
from ..layout import ParallelProblem
from ..layout.axis import Axis
from . import overlapped
from .algorithms import Algorithm
from .base import Engine, Product
from .options import Operands, Options
from .overlapped import ParallelProduct, parts_of

__all__ = ["ALGORITHMS"]

Array = Any

_PIECE_BYTES = 128 << 10  # of each part, at a time: a few of them fit into a core's own cache


class _Shared(ParallelProduct):
    def _matrices(self, name: str, shape: tuple[int, int], dtype: np.dtype, count: int = 1) -> Array:
        """Return ``count`` matrices that all ranks share. Collective over the ranks."""
        nbytes = count * shape[0] * shape[1] * dtype.itemsize
        memory = self._transport.buffer(f"{name} {self._turn}", nbytes, shared=True)
        return memory[:nbytes].view(dtype).reshape(count, *shape)

    def _run(self, x: Array, w: Array, c: Array | None, d: Array, gathered: Array | None) -> None:  # noqa: ARG002
        self._turn = self._transport.alternate()
        self._share(self._tokens(x), self._weights(w), c, d)

    def _share(self, x: Array, w: Array, c: Array | None, d: Array) -> None:
        raise NotImplementedError


class SharedSums(_Shared):
    """GEMM + ReduceScatter or AllReduce: every rank adds its rows of all partial products, in the order of the ranks.

    Args:
        engine, p, options: as for ``ParallelProduct``.
        everything: every rank adds all rows for itself; else those that it owns, which AllReduce then copies.
    """

    def __init__(
        self, engine: Engine, p: ParallelProblem, options: Options, *, everything: bool = False
    ) -> None:
        super().__init__(engine, p, options)
        self._exact = accumulation_dtype(p.out_dtype)
        self._everywhere = p.form == "matmul_allreduce"
        tokens, outputs = p.tokens[0], p.outputs[0]
        counts = Axis.even(tokens, p.size).counts() if self._everywhere else p.rows
        stops = np.cumsum(counts)
        self._bounds = [(int(stop - count), int(stop)) for stop, count in zip(stops, counts, strict=True)]
        self._mine = (0, tokens) if everything else self._bounds[self._transport.rank]
        self._copies = self._everywhere and not everything
        self.path = "partial products in memory that the ranks share, added by the rank that owns their rows"
        if everything:
            self.path = "partial products in memory that the ranks share, all added by every rank"
        parts = 2 * p.size * tokens * outputs * self._exact.itemsize
        self.workspace = self._operations.workspace(parts // p.size)
        self.copied_bytes = (self._mine[1] - self._mine[0]) * outputs * self._exact.itemsize * (p.size - 1)

    def _share(self, x: Array, w: Array, c: Array | None, d: Array) -> None:
        transport, (start, stop) = self._transport, self._mine
        parts = self._matrices("parts", (x.shape[0], d.shape[1]), self._exact, self._p.size)
        self._sum(x, w, None, parts[transport.rank])
        sums = self._matrices("sums", d.shape, d.dtype)[0] if self._copies else None
        transport.fence()
        first = 0 if self._everywhere else start  # the row of D that this rank's rows begin at
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
        """Write the sum of ``parts``, C, and what follows into ``d``, rounded once."""
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


class RingSums(_Shared):
    """GEMM + ReduceScatter or AllReduce: in turn, every rank's GEMM adds to a sum that the ranks share.

    In each of P steps every rank is at other rows of the sum, in the last one at those that it owns.
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
        self.workspace = self._operations.workspace(2 * nbytes)
        self.copied_bytes = nbytes if self._everywhere else nbytes // p.size

    def _share(self, x: Array, w: Array, c: Array | None, d: Array) -> None:
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
    """GEMM + AllGather of the output: every rank computes its columns into shared memory, and copies the others'."""

    path = "every rank's columns in memory that the ranks share, copied by each to its result"

    def __init__(self, engine: Engine, p: ParallelProblem, options: Options) -> None:
        super().__init__(engine, p, options)
        self._columns = p.slices("outputs")
        own = p.tokens[0] * p.outputs[self._transport.rank] * p.out_dtype.itemsize
        self.workspace = self._operations.workspace(2 * own)
        self.copied_bytes = p.tokens[0] * sum(p.outputs) * p.out_dtype.itemsize

    def _share(self, x: Array, w: Array, c: Array | None, d: Array) -> None:
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


def _refusal(
    engine: Engine, p: ParallelProblem, options: Options, operands: Operands | None, copies: int
) -> str:
    """Return why shared memory cannot be used, or an empty string. Collective over the ranks.

    Args:
        engine, p, options, operands: as for any refusal.
        copies: how many matrices of all tokens and outputs the ranks share at a time.
    """
    transport = engine.transport
    if transport.why_not_shared:
        return transport.why_not_shared
    if len(transport.nodes) > 1:
        return f"the ranks are on {len(transport.nodes)} nodes, which share no memory"
    why = overlapped.refusal(engine, p, options, operands)
    if why:
        return why
    tokens, outputs, _ = p.sizes
    needed = 2 * copies * tokens * outputs * accumulation_dtype(p.out_dtype).itemsize
    fits, limit = transport.fits(needed)
    return "" if fits else f"{needed} bytes of shared memory are needed, {limit} are available"


_KINDS: dict[str, Callable[..., Product]] = {
    "one_shot": partial(SharedSums, everything=True),
    "two_shot": SharedSums,
    "ring": RingSums,
}


def _row(name: str, form: str, cost: Any) -> Algorithm:
    gathers = form == "matmul_allgather"

    def refusal(engine: Engine, p: ParallelProblem, options: Options, operands: Operands | None) -> str:
        return _refusal(engine, p, options, operands, 2 if gathers or name == "ring" else p.size + 1)

    def prepare(engine: Engine, p: ParallelProblem, options: Options, operands: Operands) -> Product:  # noqa: ARG001
        if gathers:
            return SharedOutput(engine, p, options)
        return _KINDS.get(name, SharedSums)(engine, p, options)

    return Algorithm(name, prepare, overlapped.serves(form), overlapped.view, refusal, cost)


_ALONE = 9.0  # one rank has nothing to share
_WORTH_A_TURN = (
    1 << 20
)  # bytes of a rank's rows of the sum, from which on "ring" is the fastest on 4 ranks, too


def _cost(engine: Engine, p: ParallelProblem, options: Options) -> float:  # noqa: ARG001
    return 1.5 if p.size > 1 else _ALONE


def _one_shot_cost(engine: Engine, p: ParallelProblem, options: Options) -> float:  # noqa: ARG001
    return 1.6 if p.size > 1 else _ALONE


def _ring_cost(engine: Engine, p: ParallelProblem, options: Options) -> float:  # noqa: ARG001
    tokens, outputs, _ = p.sizes
    turn = tokens * outputs * accumulation_dtype(p.out_dtype).itemsize // p.size
    return {1: _ALONE, 2: 1.4}.get(p.size, 1.4 if turn >= _WORTH_A_TURN else 1.7)


ALGORITHMS = (
    _row("pull", "matmul_reduce_scatter", _cost),
    _row("ring", "matmul_reduce_scatter", _ring_cost),
    _row("one_shot", "matmul_allreduce", _one_shot_cost),
    _row("two_shot", "matmul_allreduce", _cost),
    _row("ring", "matmul_allreduce", _ring_cost),
    _row("pull", "matmul_allgather", _cost),
)
