# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products from local GEMMs and messages: one part travels while the next one is multiplied.

They take any sizes, even ones that differ from rank to rank. D[T, N] = alpha X W + beta C, all C-ordered; X is tokens ×
inputs, W inputs × outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ...dtypes import accumulation_dtype, is_float8
from ...epilogue import Epilogue
from ...layout import MatmulProblem, ParallelProblem
from ...layout.axis import Axis
from ...scales import Scales
from ..local.epilogue import activate, store
from ..method import Algorithm
from ..product import Product
from ..protocol import Engine, Transfer
from ..request import Operands, Options, Problem

__all__ = [
    "ALGORITHMS",
    "ParallelProduct",
    "cost",
    "parts_of",
    "prepare",
    "refusal",
    "row_major",
    "serves",
    "view",
]

Array = Any
_NO_SCALES = Scales()
_PANELS = 4
_PANEL = 256  # columns; narrower panels slow GEMM down


def row_major(p: ParallelProblem, operands: Operands) -> tuple[Array, Array, Array | None, Array]:
    """Return X, W, C and D of a run as the product sees them: turned, transposed, conjugated. Local.

    C is D itself if the caller's C is D.
    """
    x, w, c, d = operands.a, operands.b, operands.c, operands.d
    assert w is not None
    if p.turned:
        same = c is d
        x, w, d = w.T, x.T, d.T
        c = d if same else None if c is None else c.T
    x, w = (each.T if name in p.transposed else each for name, each in (("x", x), ("w", w)))
    x, w = (each.conj() if name in p.conjugated else each for name, each in (("x", x), ("w", w)))
    return x, w, c, d


class ParallelProduct(Product):
    """The common part of the products here.

    Args:
        engine: where it runs.
        p: the product.
        options: alpha, beta, the type in which partial sums travel.
    """

    def __init__(self, engine: Engine, p: ParallelProblem, options: Options) -> None:
        self._engine, self._operations, self._transport = engine, engine.operations, engine.transport
        self._p, self._options = p, options
        self._float8 = is_float8(p.dtype)
        if self._float8:
            wide = self._operations.multiplies(p.dtype).name
            self.notes += (f"8-bit operands are multiplied in {wide}, which holds their values exactly",)

    def _queue(self, operands: Operands) -> None:
        x, w, c, d = row_major(self._p, operands)
        self._epilogue, self._scales = operands.epilogue, operands.scales or _NO_SCALES
        if self._scales.amax is not None:
            self._scales.amax[...] = 0
        try:
            self._run(x, w, c, d, operands.gathered)
        finally:
            self._epilogue = self._scales = None  # type: ignore[assignment]

    def _run(self, x: Array, w: Array, c: Array | None, d: Array, gathered: Array | None) -> None:
        raise NotImplementedError

    def _turns(self) -> list[tuple[int, int]]:
        """Return the pairs of ranks to send to and to receive from, in an order that spreads the receivers."""
        me, size = self._transport.rank, self._transport.size
        return [((me + step) % size, (me - step) % size) for step in range(1, size)]

    def _tokens(self, x: Array) -> Array:
        return self._operations.operand(x, self._p.dtype, "x")

    def _weights(self, w: Array) -> Array:
        w = self._operations.operand(w, self._p.w_dtype, "w")
        return w.T if self._p.outputs_first else w

    def _multiply(self, x: Array, w: Array, c: Array | None, d: Array, columns: slice) -> None:
        """Compute a part of D from W's ``columns``, and apply the epilogue; ``c`` may be ``d``."""
        exact = accumulation_dtype(self._p.out_dtype)
        late = (self._epilogue is not None or self._float8) and exact != d.dtype  # D is rounded at the end
        target = self._operations.scratch("sum", d.shape, exact) if late else d
        self._sum(x, w, c, target)
        self._finish(target, columns)
        if late:
            self._operations.store(d, target, self._p.out_dtype)

    def _finish(self, target: Array, columns: slice) -> None:
        """Add the bias of W's ``columns``, apply the activation and D's scale."""
        e: Epilogue | None = self._epilogue
        if e is not None:
            activate(self._engine.xp, e if e.bias is None else replace(e, bias=e.bias[columns]), target, None)
        store(self._engine.xp, self._scales, self._p.out_dtype, target)

    def _sum(self, x: Array, w: Array, c: Array | None, target: Array) -> None:
        """Compute ``target = alpha x w + beta c``."""
        alpha, beta = self._options.alpha, self._options.beta
        if self._float8:
            self._sum_scaled(x, w, c, target)
            return
        if beta == 0 or c is None:
            beta = 0
        elif c is not target:
            target[...] = c
        if alpha != 0 and x.size and w.size:
            self._operations.gemm(alpha, x, w, beta, target, self._options.compute)
        elif beta == 0:
            target[...] = 0
        else:
            target *= beta

    def _sum_scaled(self, x: Array, w: Array, c: Array | None, target: Array) -> None:
        """Compute ``target = alpha (a x) (b w) + beta c`` in float32, with the scales' current values."""
        options, exact = self._options, accumulation_dtype(self._p.dtype)
        scales = [scale for scale in (self._scales.a, self._scales.b) if scale is not None]
        numbers = [scale for scale in scales if isinstance(scale, (int, float))]
        separate = target.dtype != exact or c is target
        product = self._operations.scratch("product", target.shape, exact) if separate else target
        if options.alpha != 0 and x.size and w.size:
            self._operations.gemm(math.prod([options.alpha, *numbers]), x, w, 0, product, options.compute)
            for scale in scales:
                if not isinstance(scale, (int, float)):
                    product *= scale.reshape(())
        else:
            product[...] = 0
        if options.beta != 0 and c is not None:
            product += options.beta * c.astype(exact)
        if separate:
            target[...] = product

    def _share_amax(self) -> None:
        """Replace amax by the largest of all ranks, since every rank has all of D."""
        amax, transport = self._scales.amax, self._transport
        if amax is None or transport.size == 1:
            return
        found = self._operations.scratch("amax", (transport.size, 1), np.dtype(np.float32))
        found[transport.rank] = amax.reshape(1)
        turns = self._turns()
        mine, others = found[transport.rank], [(found[source], source) for _, source in turns]
        transport.start([(mine, to) for to, _ in turns], others).finish()
        amax[...] = found.max()


class GatheredInput(ParallelProduct):
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


class SummedOutput(ParallelProduct):
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

    def _run(self, x: Array, w: Array, c: Array | None, d: Array, gathered: Array | None) -> None:  # noqa: ARG002
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


class GatheredOutput(ParallelProduct):
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

    def _run(self, x: Array, w: Array, c: Array | None, d: Array, gathered: Array | None) -> None:  # noqa: ARG002
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


def parts_of(c: Array | None, d: Array, rows: slice) -> tuple[Array | None, Array]:
    """Return the same rows of C and of D, as one array if C is D."""
    part = d[rows]
    return (None if c is None else part if c is d else c[rows]), part


def _some(array: Array, peer: int) -> list[tuple[Array, int]]:
    """Return a list of one message, or an empty list if the message would be empty."""
    return [(array, peer)] if array.size else []


# -- the rows of the registry


def view(problem: Problem) -> Problem | str:
    """Return a problem as a tensor-parallel product, or why it is not one. Local."""
    return ParallelProblem.of_matmul(problem) if isinstance(problem, MatmulProblem) else problem


def refusal(engine: Engine, p: ParallelProblem, options: Options, operands: Operands | None) -> str:
    """Return why the products here cannot be taken, or an empty string. Local."""
    operations, size = engine.operations, engine.transport.size
    if p.size != size:
        return f"the operands are on {p.size} ranks; this algorithm needs all {size}"
    e = None if operands is None else operands.epilogue
    if e is not None and (set(e.given) - {"bias"} or e.activation in ("drelu", "dgelu")):
        return f"epilogue {e.name!r}: only a bias and an activation follow it"
    if e is not None and e.fused:
        return "its epilogue runs after the product, but fused=True asks for a fused one"
    if operands is not None and operands.scales is not None and operands.scales.mode != "tensor":
        return f"scales of mode {operands.scales.mode!r} are for cuBLASMp on Blackwell GPUs"
    return operations.refusal(p.dtype, options.compute)


def cost(engine: Engine, p: ParallelProblem, options: Options) -> float:  # noqa: ARG001
    """Return less than the cost of gathering if messages travel on their own while a queued product runs."""
    return 5.0 if engine.agrees else 2.5


def prepare(engine: Engine, p: ParallelProblem, options: Options) -> ParallelProduct:
    """Return the product by messages. Local."""
    kinds = {"allgather_matmul": GatheredInput, "matmul_allgather": GatheredOutput}
    return kinds.get(p.form, SummedOutput)(engine, p, options)


_FORMS = {
    "ag": "allgather_matmul", "rs": "matmul_reduce_scatter", "ar": "matmul_allreduce",
}  # fmt: skip


def serves(*forms: str) -> Callable[[Problem], bool]:
    """Return a function that says whether a problem is, or has, one of these forms. Local."""

    def is_one(problem: Problem) -> bool:
        if isinstance(problem, MatmulProblem):
            return _FORMS.get(problem.scheme) in forms
        return isinstance(problem, ParallelProblem) and problem.form in forms

    return is_one


def _prepare(engine: Engine, p: ParallelProblem, options: Options, operands: Operands) -> Product:  # noqa: ARG001
    return prepare(engine, p, options)


ALGORITHMS = (Algorithm("push", _prepare, serves(*_FORMS.values(), "matmul_allgather"), view, refusal, cost),)
