# SPDX-License-Identifier: Apache-2.0
"""geadd and tradd: op(A) is moved to where D is, and added there."""

from __future__ import annotations

from typing import Any

from ..comm import Cell, Exchange, Side
from ..comm.exchange import SLOTS
from ..comm.shared import aligned, carve
from ..layout import Level3Problem
from .algorithms import Algorithm
from .base import Engine, Operands, Options, Problem, QueuedProduct
from .local_part import LocalPart
from .slabs import type_refusal

__all__ = ["ALGORITHMS", "SumProduct"]

Array = Any


class SumProduct(QueuedProduct):
    """``D = alpha op(A) + beta C``. Making and running one is collective over the ranks.

    A part of op(A) is read where D needs it: in the rank's own A, in the copy of its A that another rank of the node
    shares, where that is distributed like D, or else in a buffer that it is moved to.
    """

    def __init__(self, engine: Engine, p: Level3Problem, options: Options) -> None:
        transport = engine.transport
        self._engine, self._p, self._options, self._rank = engine, p, options, transport.rank
        self._node = next(node for node in transport.nodes if self._rank in node)
        self._flip = p.op_a != "N"
        self._conjugate = p.op_a == "C" and p.d.dtype.kind == "c"
        self._exchange: Exchange | None = None
        self._shared = 0
        self._peer = self._rank  # the rank that has what this one needs, unless it is moved
        self._inside = self._rank < p.d.grid.size
        source = self._source = p.a.T if self._flip else p.a
        if not source.same_places(p.d) and options.alpha != 0:
            self._share()
            if self._shared and self._reaches():
                if self._inside:
                    self._peer = source.grid.rank(*p.d.grid.coords(self._rank))
                self.copied_bytes = self._shared if self._peer != self._rank else 0
            else:
                self._exchange = self._moves()
                self.sent_bytes, self.copied_bytes = self._exchange.sent_bytes, self._exchange.copied_bytes
        self.path = "shared" if self._shared else "in place" if self._exchange is None else "moved"
        self._straight = p.written is None and options.alpha == 1 and options.beta == 0
        shape = p.d.local_shape(self._rank) if self._inside else (0, 0)
        room = 0 if self._exchange is None or self._straight else shape[0] * shape[1] * p.d.dtype.itemsize
        self.workspace = engine.operations.workspace(room + self._shared * len(self._node))
        self._written: LocalPart | None = None  # what is written of this rank's D, None for all
        if p.written is not None and self._inside:
            self._written = LocalPart(p.written, *p.d.global_indices(self._rank))

    def _share(self) -> None:
        """Find out whether each node has room for its ranks' parts of A: ``_shared`` bytes a rank. Collective."""
        transport, source = self._engine.transport, self._source
        sizes = (rows * cols for rows, cols in map(source.local_shape, range(source.grid.size)))
        nbytes = aligned(max(sizes) * source.dtype.itemsize)
        most = max(map(len, transport.nodes))
        if most > 1 and not transport.why_not_shared and transport.fits(nbytes * most)[0]:
            self._shared = nbytes

    def _reaches(self) -> bool:
        """Return whether what each rank needs of op(A) is all that one rank of its node has."""
        source, d = self._source, self._p.d
        if (source.rows, source.cols) != (d.rows, d.cols):
            return False
        node = {rank: i for i, ranks in enumerate(self._engine.transport.nodes) for rank in ranks}
        return all(node[source.grid.rank(*d.grid.coords(rank))] == node[rank] for rank in range(d.grid.size))

    def _moves(self) -> Exchange:
        """Return the exchange that brings op(A) to where D is."""
        transport, side = self._engine.transport, Side.of(self._source)
        if self._shared:
            nodes = {rank: node for node in transport.nodes for rank in node}
            cells = (Cell(c.coords, (*c.ranks, *nodes[c.ranks[0]])) for c in side.cells)
            side = Side(side.rows, side.cols, tuple(cells), side.order)
        return transport.exchange(side, Side.of(self._p.d), self._p.d.dtype)

    def _queue(self, operands: Operands) -> None:
        """Compute D, which may be C."""
        a, c, d = operands.a, operands.c, operands.d
        x = a.T if self._flip else a
        known = self._copies(x) if self._shared else {self._rank: x}
        if self._exchange is not None:
            x = self._moved(known, d)
        elif self._peer != self._rank:
            x = known[self._peer]
        if not self._inside or x is d:
            return
        c = d if c is None else c
        options, conjugate = self._options, self._conjugate and self._exchange is None
        self._engine.operations.add(d, options.alpha, x, options.beta, c, self._written, conjugate=conjugate)

    def _copies(self, mine: Array) -> dict[int, Array]:
        """Return what the ranks of this node share of op(A), by rank. Collective over the ranks."""
        transport, x = self._engine.transport, self._source
        memory = transport.buffer("x", self._shared * len(self._node), shared=True)
        known = {
            rank: carve(memory, i * self._shared, x.local_shape(rank), x.dtype, x.order)
            for i, rank in enumerate(self._node)
            if rank < x.grid.size
        }
        if self._rank in known and (self._exchange is not None or self._peer != self._rank):
            copy, part = known[self._rank], self._p.written
            rows, cols = x.global_indices(self._rank)
            if x.order == "C":
                copy, mine, part, rows, cols = copy.T, mine.T, part and part.T, cols, rows
            everything = [(slice(None), slice(None), None)]
            for down, across, _ in everything if part is None else part.parts(rows, cols):
                copy[down, across] = mine[down, across]
        transport.fence()  # every rank's part is there
        return known

    def _moved(self, known: dict[int, Array], d: Array) -> Array:
        """Return op(A) as D is laid out: D itself where that is all there is to do. Collective over the ranks."""
        assert self._exchange is not None
        transport = self._engine.transport
        there: Array = d
        if not self._straight:
            memory = transport.buffer("sum", d.size * d.itemsize, shared=False)
            there = carve(memory, 0, d.shape, d.dtype, self._p.d.order)
        of = [known.get(i) for i in range(self._p.a.grid.size)]
        to = [there if i == self._rank else None for i in range(self._p.d.grid.size)]
        transport.start_exchange(self._exchange, of, to, conjugate=self._conjugate, slots=SLOTS).finish()
        return there


def _serves(problem: Problem) -> bool:
    return isinstance(problem, Level3Problem) and problem.traits.shape == "added"


def _prepare(engine: Engine, p: Level3Problem, options: Options, operands: Operands) -> SumProduct:  # noqa: ARG001
    return SumProduct(engine, p, options)


ALGORITHMS = (Algorithm("moved", _prepare, _serves, refusal=type_refusal, cost=lambda *_: 2.0),)
