# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products from local GEMMs and messages: one part travels while the next one is multiplied.

They take any sizes, even ones that differ from rank to rank. D[T, N] = alpha X W + beta C, all C-ordered; X is tokens ×
inputs, W inputs × outputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...dtypes import accumulation_dtype
from ...layout import ParallelProblem
from ...layout.axis import Axis
from ..protocol import Engine, Transfer
from ..request import Operands, Options
from .base import ParallelProduct, TensorMethod, parts_of

__all__ = ["MESSAGES", "METHODS", "MessageMethod"]

Array = Any
_PANELS = 4
_PANEL = 256  # columns; narrower panels slow GEMM down


class MessageGather(ParallelProduct):
    """AllGather + GEMM: each rank's tokens are multiplied as they arrive."""

    path = "push: every rank's part of X is multiplied as it arrives"

    def __init__(self, engine: Engine, p: ParallelProblem, options: Options) -> None:
        super().__init__(engine, p, options)
        self._parts = p.slices("tokens")
        row = p.inputs[0] * p.dtype.itemsize
        self.sent_bytes = p.tokens[self._transport.rank] * row * (p.size - 1)
        needed = p.size > 1 and not p.return_gathered
        self.workspace = self._operations.workspace(sum(p.tokens) * row if needed else 0)

    def _run(self, x: Array, w: Array, c: Array | None, d: Array, gathered: Array | None) -> None:
        p, parts, transport = self._p, self._parts, self._transport
        mine, total = parts[transport.rank], gathered
        if total is not None:
            total[mine] = x
        else:
            shape = (parts[-1].stop if p.size > 1 else 0, p.inputs[0])
            total = self._operations.scratch("gathered", shape, x.dtype)
        if p.size > 1 and not x.flags.c_contiguous:  # messages must be contiguous
            total[mine] = x
            x = total[mine]
        transfers = []
        for to, source in self._turns():
            arriving = total[parts[source]]
            transfers.append((source, arriving, transport.start(_some(x, to), _some(arriving, source))))
        w, columns = self._weights(w), slice(0, d.shape[1])
        self._multiply(self._tokens(x), w, *parts_of(c, d, mine), columns)
        for source, arrived, transfer in transfers:
            transfer.finish()
            self._multiply(self._tokens(arrived), w, *parts_of(c, d, parts[source]), columns)


class MessageSum(ParallelProduct):
    """GEMM + ReduceScatter, or + AllReduce: each rank receives its rows of all partial products and sums them."""

    def __init__(self, engine: Engine, p: ParallelProblem, options: Options) -> None:
        super().__init__(engine, p, options)
        self._everywhere = p.form == "matmul_allreduce"
        if self._everywhere:  # each rank sums some rows, and gathers the other rows
            p = replace(p, rows=tuple(Axis.even(p.tokens[0], p.size).counts()))
        self._parts = p.slices("rows")
        self._travels = self._transport.carries(p.out_dtype, options.comm_dtype)
        self.path = "push: partial products are summed by the rank that owns their rows"
        mine, outputs, size = p.rows[self._transport.rank], p.outputs[0], p.size
        row = outputs * self._travels.itemsize
        self.sent_bytes = (sum(p.rows) - mine) * row
        if self._everywhere:
            self.path += ", and gathered"
            self.sent_bytes += mine * outputs * p.out_dtype.itemsize * (size - 1)
        nbytes = (sum(p.rows) + (size - 1) * mine) * row if size > 1 else 0
        self.workspace = self._operations.workspace(nbytes)

    def _run(self, x: Array, w: Array, c: Array | None, d: Array, gathered: Array | None) -> None:
        transport, parts, scratch = self._transport, self._parts, self._operations.scratch
        mine = parts[transport.rank]
        count, width = mine.stop - mine.start, d.shape[1]
        x, w = self._tokens(x), self._weights(w)
        transfers = []
        if transport.size > 1:
            outgoing = scratch("outgoing", (parts[-1].stop, width), self._travels)
            incoming = scratch("incoming", ((transport.size - 1) * count, width), self._travels)
        for turn, (to, source) in enumerate(self._turns()):
            part, arriving = outgoing[parts[to]], incoming[turn * count : (turn + 1) * count]
            self._sum(x[parts[to]], w, None, part)
            transfers.append((arriving, transport.start(_some(part, to), _some(arriving, source))))
        c, own = parts_of(c, d, mine if self._everywhere else slice(None))
        exact = accumulation_dtype(self._p.out_dtype)
        target = own if exact == own.dtype else scratch("sum", own.shape, exact)
        self._sum(x[mine], w, c, target)
        for arrived, transfer in transfers:
            transfer.finish()
            target += arrived if arrived.dtype == target.dtype else arrived.astype(target.dtype)
        self._finish(target, slice(0, width))
        if target is not own:
            self._operations.store(own, target, self._p.out_dtype)
        if self._everywhere and transport.size > 1:
            self._gather(d)
            self._share_amax()

    def _gather(self, d: Array) -> None:
        """Send this rank's rows of D to all ranks, and receive theirs."""
        parts, rank = self._parts, self._transport.rank
        total = d
        if not d.flags.c_contiguous:
            total = self._operations.scratch("outgoing", d.shape, d.dtype)
            total[parts[rank]] = d[parts[rank]]
        _exchange_parts(self, total[parts[rank]], lambda source: total[parts[source]]).finish()
        if total is not d:
            d[...] = total


class MessageOutput(ParallelProduct):
    """GEMM + AllGather of the output, in panels of its columns: one is gathered while the next one is multiplied."""

    def __init__(self, engine: Engine, p: ParallelProblem, options: Options) -> None:
        super().__init__(engine, p, options)
        self._parts = p.slices("outputs")
        tokens, widest = p.tokens[0], max(p.outputs)
        worth = int(2 * tokens * widest * p.inputs[0] / self._operations.panel_flops)
        self._panels = max(1, min(_PANELS, widest // _PANEL, worth))
        self.path = f"push: panels of columns, each gathered while the next one is multiplied: {self._panels}"
        column, rank = tokens * p.out_dtype.itemsize, self._transport.rank
        self.sent_bytes = p.outputs[rank] * column * (p.size - 1)
        panel = -(-sum(p.outputs) // self._panels) + p.size
        nbytes = min(2, self._panels) * panel * column if p.size > 1 else 0
        self.workspace = self._operations.workspace(nbytes)

    def _run(self, x: Array, w: Array, c: Array | None, d: Array, gathered: Array | None) -> None:
        transport = self._transport
        x, w = self._tokens(x), self._weights(w)
        if transport.size == 1:
            self._multiply(x, w, c, d, slice(0, d.shape[1]))
            return
        first = self._parts[transport.rank].start
        under_way: list[tuple[Transfer, list[tuple[Array, slice]]]] = []
        for panel in range(self._panels):
            parts = {rank: self._panel(rank, panel, d) for rank in range(transport.size)}
            part, columns = parts.pop(transport.rank)
            here = slice(columns.start - first, columns.stop - first)
            self._multiply(x, w[:, here], None if c is None else c[:, columns], part, here)
            transfer = _exchange_parts(self, part, lambda source, parts=parts: parts[source][0])
            under_way.append((transfer, [(part, columns), *parts.values()]))
            if panel:
                self._place(*under_way.pop(0), d)
        self._place(*under_way.pop(), d)
        self._share_amax()

    def _panel(self, rank: int, panel: int, d: Array) -> tuple[Array, slice]:
        """Return the buffer for what ``rank`` computes of a panel, and which columns of D these are."""
        start, stop = self._parts[rank].start, self._parts[rank].stop
        cuts = [start + (stop - start) * i // self._panels for i in (panel, panel + 1)]
        shape = d.shape[0], cuts[1] - cuts[0]
        return self._operations.scratch(f"panel{panel % 2}.{rank}", shape, d.dtype), slice(*cuts)

    @staticmethod
    def _place(transfer: Transfer, parts: list[tuple[Array, slice]], d: Array) -> None:
        """Write a panel that has arrived to its place in the result."""
        transfer.finish()
        for array, columns in parts:
            d[:, columns] = array


def _exchange_parts(product: ParallelProduct, mine: Array, theirs: Any) -> Transfer:
    """Start sending this rank's part to all ranks, and receiving their parts into ``theirs(rank)``."""
    turns = product._turns()
    return product._transport.start(
        [each for to, _ in turns for each in _some(mine, to)],
        [each for _, source in turns for each in _some(theirs(source), source)],
    )


def _some(array: Array, peer: int) -> list[tuple[Array, int]]:
    """Return a list of one message, or an empty list if the message would be empty."""
    return [(array, peer)] if array.size else []


# -- the rows of the registry


class MessageMethod(TensorMethod):
    """By messages between all ranks, which overlap local products."""

    name = "push"

    def refusal(
        self, engine: Engine, problem: ParallelProblem, options: Options, operands: Operands | None
    ) -> str:
        """Return why the products here cannot be taken, or an empty string. Local."""
        size = engine.transport.size
        if problem.size != size:
            return f"the operands are on {problem.size} ranks; this algorithm needs all {size}"
        e = None if operands is None else operands.epilogue
        if e is not None and (set(e.given) - {"bias"} or e.activation in ("drelu", "dgelu")):
            return f"epilogue {e.name!r}: only a bias and an activation follow it"
        if e is not None and e.fused:
            return "its epilogue runs after the product, but fused=True asks for a fused one"
        if operands is not None and operands.scales is not None and operands.scales.mode != "tensor":
            return f"scales of mode {operands.scales.mode!r} are for cuBLASMp on Blackwell GPUs"
        return engine.operations.refusal(problem.dtype, options.compute)

    def cost(self, engine: Engine, problem: ParallelProblem, options: Options) -> float:
        """Return less than the cost of gathering if messages travel on their own while a queued product runs."""
        return 2.5 if engine.traits.overlaps_messages else 5.0

    def prepare(
        self, engine: Engine, problem: ParallelProblem, options: Options, operands: Operands
    ) -> ParallelProduct:
        """Return the product by messages. Local."""
        kinds = {"allgather_matmul": MessageGather, "matmul_allgather": MessageOutput}
        return kinds.get(problem.form, MessageSum)(engine, problem, options)


MESSAGES = MessageMethod()
METHODS = (MESSAGES,)
