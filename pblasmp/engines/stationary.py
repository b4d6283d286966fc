# SPDX-License-Identifier: Apache-2.0
"""Products with one operand much larger than the other and the result: the large one stays where it is.

Each rank multiplies its part of the large operand by the rows of the small one that go with it; the partial products
of a process row are then moved to where D is, and added up there. So a matrix times a few vectors moves the vectors.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ..comm import Cell, Exchange, Side
from ..comm.exchange import SLOTS
from ..comm.shared import aligned, carve
from ..dtypes import accumulation_dtype, is_float8
from ..layout import MatmulProblem
from ..layout.axis import Axis
from .algorithms import Algorithm, plain_refusal
from .base import Engine, QueuedProduct
from .operand import Operand
from .options import Operands, Options, Problem
from .slab_terms import matmul_slabs
from .slabs import Panels, type_refusal

__all__ = ["ALGORITHMS", "StationaryProduct"]

_LARGER = 2  # times as much would be moved to where D is, as is moved here: below, both take as long
_LEAST = (
    1 << 17
)  # elements that would be moved: below, there is one meeting of the ranks more than time saved

Array = Any


class StationaryProduct(QueuedProduct):
    """``D = alpha op(A) op(B) + beta C`` with A or B in place. Making and running one is collective over the ranks.

    Seen as outer × k times k × width: op(A) op(B), or its transpose where B stays.
    """

    path = "stationary"

    def __init__(self, engine: Engine, p: MatmulProblem, options: Options) -> None:
        transport, operations = engine.transport, engine.operations
        self._engine, self._p, self._options, self._rank = engine, p, options, transport.rank
        self._turned, (self._flip, self._conjugate) = _turned(p), _flipped(p)
        self._large, self._small, self._result = _seen(engine, p)
        self._dtype, self._width = accumulation_dtype(p.d.dtype), self._result.cols.extent
        self._shared = not transport.why_not_shared
        active = options.alpha != 0 and 0 not in (p.m, p.n, p.k)
        way = "shared" if self._shared else "gathered"
        self._panels = Panels(engine, way, [self._small], self._width if active else 0)
        self._node = next(ranks for ranks in transport.nodes if self._rank in ranks)
        self._room = aligned(max(self._large.rows.counts()) * self._width * self._dtype.itemsize)
        self._moves = self._find_moves() if active else []
        exchanges = [exchange for exchange, _ in self._moves]
        self.sent_bytes = self._panels.sent_bytes + sum(each.sent_bytes for each in exchanges)
        self.copied_bytes = self._panels.copied_bytes + sum(each.copied_bytes for each in exchanges)
        rows, cols = p.d.local_shape(self._rank) if self._rank < p.d.grid.size else (0, 0)
        self._shape = (
            (cols, rows) if self._turned else (rows, cols)
        )  # of this rank's part of D, as it is seen
        partials = self._room * (len(self._node) if self._shared else 1) * active
        parts = rows * cols * self._dtype.itemsize * max(1, len(exchanges))
        messages = max(map(transport.message_bytes, exchanges), default=0)
        self.workspace = operations.workspace(self._panels.nbytes + partials + parts + messages)
        if not engine.agrees:  # here the ranks agree, in a run they do not
            self._partials()
            self._parts()

    def _find_moves(self) -> list[tuple[Exchange, list[int]]]:
        """Return how the partial products of each part of k get to where D is, and which ranks have them."""
        transport, large, width = self._engine.transport, self._large, self._width
        reach = {rank: node for node in transport.nodes for rank in node} if self._shared else {}
        moves = []
        for part, count in enumerate(large.cols.counts()):
            if count:
                having = {cell.ranks[0]: cell.coords[0] for cell in large.cells if cell.coords[1] == part}
                cells = tuple(Cell((row, 0), (rank, *reach.get(rank, ()))) for rank, row in having.items())
                partial = Side(large.rows, Axis(width, max(1, width)), cells, large.order)
                moves.append((transport.exchange(partial, self._result, self._dtype), list(having)))
        return moves

    def _queue(self, operands: Operands) -> None:
        """Compute D from the local arrays. Collective over the ranks."""
        p, options, operations = self._p, self._options, self._engine.operations
        total = self._sum(operands)
        if self._rank >= p.d.grid.size:
            return
        total = total.T if self._turned else total
        if options.beta != 0 and operands.c is not None:
            total += options.beta * operands.c.astype(self._dtype)
        operations.store(operands.d, total, p.d.dtype)

    def _sum(self, operands: Operands) -> Array:
        """Return this rank's part of the product, as it is seen. Collective over the ranks."""
        transport, parts = self._engine.transport, self._parts()
        if not self._moves:
            parts[0][...] = 0
            return parts[0]
        partials = self._multiply(operands)
        if self._shared:
            transport.fence()  # every partial product of the node is written
        for (exchange, ranks), part in zip(self._moves, parts, strict=True):
            of = [partials.get(rank) for rank in ranks]
            to = [part if rank == self._rank else None for rank in range(len(self._result.cells))]
            transport.start_exchange(exchange, of, to, conjugate=self._conjugate, slots=SLOTS).finish()
        for part in parts[1:]:
            parts[0] += part
        return parts[0]

    def _multiply(self, operands: Operands) -> dict[int, Array]:
        """Return the partial products that this rank reaches, by rank; its own is computed. Collective."""
        operations, options, large = self._engine.operations, self._options, self._large
        partials = self._partials()
        ((_, _, (slabs,)),) = self._panels.arrive({"a": operands.a, "b": operands.b})
        mine = partials.get(self._rank)
        if mine is None or mine.size == 0:
            return partials
        stays = self._p.b if self._turned else self._p.a
        x: Array = operands.b if self._turned else operands.a
        slab = slabs[large.cells[self._rank].coords[1]] if isinstance(slabs, dict) else slabs
        left = operations.operand(x.T if self._flip else x, stays.dtype, "x")
        right = operations.operand(slab, self._small.dtype, "w")
        alpha = complex(options.alpha).conjugate() if self._conjugate else options.alpha
        with operations.computing():
            operations.gemm(alpha, left, right, 0, mine, options.compute)
        return partials

    def _partials(self) -> dict[int, Array]:
        """Return memory for the partial products of this rank, and of those that share it, by rank."""
        large, ranks = self._large, self._node if self._shared else (self._rank,)
        memory = self._engine.transport.buffer("partial", self._room * len(ranks), shared=self._shared)
        return {
            rank: carve(
                memory, i * self._room, (large.rows.count(large.cells[rank].coords[0]), self._width), self._dtype,
                large.order,  # the one that BLAS multiplies fastest
            )
            for i, rank in enumerate(ranks)
            if rank < len(large.cells)
        }  # fmt: skip

    def _parts(self) -> list[Array]:
        """Return memory for what each part of k adds to this rank's part of D."""
        count, (rows, cols), order = max(1, len(self._moves)), self._shape, self._result.order
        shape = (count * rows, cols) if order == "C" else (rows, count * cols)
        memory = self._engine.operations.scratch("parts", shape, self._dtype, order)
        if order == "C":
            return [memory[i * rows : (i + 1) * rows] for i in range(count)]
        return [memory[:, i * cols : (i + 1) * cols] for i in range(count)]


def _turned(p: MatmulProblem) -> bool:
    """Return whether B stays in place, and the product is seen transposed: where it is the larger one."""
    return p.n > p.m


def _flipped(p: MatmulProblem) -> tuple[bool, bool]:
    """Return whether the operand that stays is seen transposed, and whether conjugated."""
    op = p.op_b if _turned(p) else p.op_a
    return (op != "N") != _turned(p), op == "C" and p.d.dtype.kind == "c"


def _seen(engine: Engine, p: MatmulProblem) -> tuple[Side, Operand, Side]:
    """Return the operand that stays as outer × k, the one that comes to it as k × width, and the result.

    Where the first one is conjugated it is the others that are.
    """
    turned, (flip, conjugate) = _turned(p), _flipped(p)
    stays, comes, op = (p.b, p.a, p.op_a) if turned else (p.a, p.b, p.op_b)
    large, result = Side.of(stays), Side.of(p.d)
    large, result = large.T if flip else large, result.T if turned else result
    conjugated = (op == "C" and p.d.dtype.kind == "c") != conjugate
    needs = tuple(_needs(large, rank) for rank in range(engine.transport.size))
    dtype, source = engine.operations.slab_dtype(comes.dtype), "a" if turned else "b"
    return large, Operand(comes, (op != "N") != turned, conjugated, needs, large.cols, dtype, source), result


def _needs(large: Side, rank: int) -> tuple[int, ...]:
    """Return which part of k a rank multiplies: none where it has no part of the large operand."""
    if rank >= len(large.cells):
        return ()
    row, part = large.cells[rank].coords
    return (part,) if large.rows.count(row) else ()


def _serves(problem: Problem) -> bool:
    return isinstance(problem, MatmulProblem) and problem.scheme == "gemm"


def _refusal(engine: Engine, p: MatmulProblem, options: Options, operands: Operands | None) -> str:
    why = type_refusal(engine, p, options, operands)
    if not why and is_float8(p.a.dtype):
        why = "it takes no 8-bit floats"
    return why or plain_refusal(engine, p, replace(options, compute=None), operands)


def _prepare(engine: Engine, p: MatmulProblem, options: Options, operands: Operands) -> StationaryProduct:  # noqa: ARG001
    return StationaryProduct(engine, p, options)


def _cost(engine: Engine, p: MatmulProblem, options: Options) -> float:  # noqa: ARG001
    """Return less than slabs cost where these would move much more."""
    if not engine.agrees:  # not measured
        return 9.0
    large, small, _ = _seen(engine, p)
    here = p.m * p.n * large.cols.nprocs + (0 if small.in_place else math.prod(small.matrix.shape))
    there = sum(math.prod(x.matrix.shape) for x in matmul_slabs(p, 1, engine).operands if not x.in_place)
    return 1.5 if there >= max(_LARGER * here, _LEAST) else 9.0


ALGORITHMS = (Algorithm("stationary", _prepare, _serves, refusal=_refusal, cost=_cost),)
