# SPDX-License-Identifier: Apache-2.0
"""geadd and tradd: op(A) is moved to where D is, and added there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np

from ...comm import Cells, Exchange, Side
from ...comm.exchange import SLOTS
from ...comm.shared_memory import aligned, carve
from ...layout import Level3Problem
from ...layout.pieces import FINEST, LocalPart, pieces
from ..composite import QueuedProduct
from ..method import ArrayMethod
from ..protocol import Engine
from ..request import AnyProblem, Operands, Options

# Bytes: the smallest part of D on a rank that is moved in stripes, and the largest stripe.
_LEAST, _MOST = 32 << 20, 128 << 20

Array = Any


@dataclass(frozen=True)
class _Stripe:
    """Some columns of D: how op(A) gets there, where they are in op(A) and D here, and which elements are written."""

    exchange: Exchange
    source: slice
    columns: slice
    written: LocalPart | None


class SumProduct(QueuedProduct):
    """``D = alpha op(A) + beta C``. Making and running one is collective over the ranks.

    The part of op(A) that a rank needs is read from the rank's own A; from the copy of A that another rank of the node
    shares, if that has just this part; or else from a buffer to which it is moved. If transfers are queued, it is
    moved in stripes: one is added while the rest are under way.
    """

    def __init__(self, engine: Engine, p: Level3Problem, options: Options, _: Operands) -> None:
        transport = engine.transport
        self._engine, self._p, self._options, self._rank = engine, p, options, transport.rank
        self._node = next(node for node in transport.nodes if self._rank in node)
        self._flip = p.op_a != "N"
        self._conjugate = p.op_a == "C" and p.d.dtype.kind == "c"
        self._stripes: list[_Stripe] = []
        self._shared = 0
        self._peer = self._rank  # the rank that has the part that this one needs, unless it is moved
        self._inside = self._rank < p.d.grid.size
        source = self._source = p.a.T if self._flip else p.a
        if not source.same_places(p.d) and options.alpha != 0:
            self._share()
            if self._shared and self._reaches():
                if self._inside:
                    self._peer = source.grid.rank(*p.d.grid.coords(self._rank))
                self.copied_bytes = self._shared if self._peer != self._rank else 0
            else:
                self._stripes = list(self._moves())
        exchanges = [stripe.exchange for stripe in self._stripes]
        if exchanges:
            self.sent_bytes = sum(each.sent_bytes for each in exchanges)
            self.copied_bytes = sum(each.copied_bytes for each in exchanges)
        self.path = "shared" if self._shared else "moved" if exchanges else "in place"
        self._straight = p.written is None and options.alpha == 1 and options.beta == 0
        self._ahead = min(len(exchanges), engine.operations.stripes)  # how many stripes are under way
        rows = p.d.local_shape(self._rank)[0] if self._inside else 0
        widths = [stripe.columns.stop - (stripe.columns.start or 0) for stripe in self._stripes]
        self._temporary_bytes = (
            0 if self._straight else aligned(rows * max(widths, default=0) * p.d.dtype.itemsize)
        )
        messages = max(map(transport.message_bytes, exchanges), default=0)
        nbytes = self._ahead * (self._temporary_bytes + messages) + self._shared * len(self._node)
        self.workspace = engine.operations.workspace(nbytes)
        self._written = None if exchanges else self._part(slice(None))  # in this rank's D, None for all

    def _part(self, columns: slice) -> LocalPart | None:
        """Return which elements are written in some columns of this rank's D, None for all."""
        if self._p.written is None or not self._inside:
            return None
        rows, cols = self._p.d.global_indices(self._rank)
        return LocalPart(self._p.written, rows, cols[columns])

    def _share(self) -> None:
        """Find out whether each node has room for its ranks' parts of A, ``_shared`` bytes per rank. Collective."""
        transport, source = self._engine.transport, self._source
        nbytes = aligned(max(source.rows.counts()) * max(source.cols.counts()) * source.dtype.itemsize)
        most = max(map(len, transport.nodes))
        if most > 1 and not transport.why_not_shared and transport.fits(nbytes * most)[0]:
            self._shared = nbytes

    def _reaches(self) -> bool:
        """Return whether the part of op(A) that each rank needs is exactly what one rank of its node has."""
        source, d = self._source, self._p.d
        if (source.rows, source.cols) != (d.rows, d.cols):
            return False
        nodes = self._engine.transport.nodes
        if len(nodes) == 1:
            return True
        node = {rank: i for i, ranks in enumerate(nodes) for rank in ranks}
        return all(node[source.grid.rank(*d.grid.coords(rank))] == node[rank] for rank in range(d.grid.size))

    def _moves(self) -> Iterator[_Stripe]:
        """Yield the exchanges that bring op(A) to where D is."""
        transport, of, to = self._engine.transport, Side.of(self._source), Side.of(self._p.d)
        if self._shared:
            of = replace(of, cells=Cells(of.cells.coords, of.cells.owners, transport.nodes))
        for start, stop in self._cuts():
            here, there = (replace(side, cols=side.cols.window(start, stop)) for side in (of, to))
            source, columns = (
                slice(0)
                if self._rank >= x.grid.size
                else x.cols.local_window(x.grid.coords(self._rank)[1], start, stop)
                for x in (self._source, self._p.d)
            )
            exchange = transport.exchange(here, there, self._p.d.dtype)
            yield _Stripe(exchange, source, columns, self._part(columns))

    def _cuts(self) -> list[tuple[int, int]]:
        """Return where the stripes begin and end; every process column has a part of each. The same on every rank."""
        d, count = self._p.d, self._engine.operations.stripes
        if count == 1 or self._shared:
            return [(0, d.cols.extent)]
        nbytes = max(rows * cols for rows, cols in map(d.local_shape, range(d.grid.size))) * d.dtype.itemsize
        count = 1 if nbytes < _LEAST else max(count, -(-nbytes // _MOST))
        unit = d.cols.block * d.cols.nprocs
        width = max(1, -(-d.cols.extent // (count * unit)) * unit)
        return [(at, min(at + width, d.cols.extent)) for at in range(0, max(1, d.cols.extent), width)]

    def _queue(self, operands: Operands) -> None:
        a, c, d = operands.a, operands.c, operands.d
        x = a.T if self._flip else a
        known = self._copies(x) if self._shared else {self._rank: x}
        c = d if c is None else c
        if self._stripes:
            self._move_and_add(known, c, d)
        elif self._inside:
            x = x if self._peer == self._rank else known[self._peer]
            self._add(d, x, c, self._written, conjugate=self._conjugate)

    def _add(self, d: Array, x: Array, c: Array, written: LocalPart | None, *, conjugate: bool) -> None:
        alpha, beta = self._options.alpha, self._options.beta
        self._engine.operations.add(d, alpha, x, beta, c, written, conjugate=conjugate)

    def _copies(self, mine: Array) -> dict[int, Array]:
        """Return the parts of op(A) that the ranks of this node share, by rank. Collective over the ranks."""
        transport, x = self._engine.transport, self._source
        memory = transport.buffer("x", self._shared * len(self._node), shared=True)
        known = {
            rank: carve(memory, i * self._shared, x.local_shape(rank), x.dtype, x.order)
            for i, rank in enumerate(self._node)
            if rank < x.grid.size
        }
        if self._rank in known and (self._stripes or self._peer != self._rank):
            copy, part = known[self._rank], self._p.written
            rows, cols = x.global_indices(self._rank)
            if x.order == "C":
                copy, mine, part, rows, cols = copy.T, mine.T, part and part.T, cols, rows
            for piece in pieces(part, rows, cols, finest=FINEST):
                copy[piece.here] = mine[piece.here]
        transport.fence()  # wait until every rank's part has been written
        return known

    def _move_and_add(self, known: dict[int, Array], c: Array, d: Array) -> None:
        """Move op(A) to where D is and add it, or straight into D if nothing is added. Collective over the ranks."""
        under_way: deque[tuple[_Stripe, Array, Any]] = deque()

        def end() -> None:
            stripe, there, transfer = under_way.popleft()
            transfer.finish()
            if self._inside and not self._straight:
                part = np.s_[:, stripe.columns]
                self._add(d[part], there, c[part], stripe.written, conjugate=False)

        temporaries = None if self._straight else self._temporaries()
        for stripe in self._stripes:
            if len(under_way) == self._ahead:
                end()
            there = d[:, stripe.columns]
            if temporaries is not None:
                there = carve(next(temporaries), 0, there.shape, d.dtype, self._p.d.order)
            under_way.append((stripe, there, self._start(stripe, known, there)))
        while under_way:
            end()

    def _start(self, stripe: _Stripe, known: dict[int, Array], there: Array) -> Any:
        """Start moving a stripe to an array of this rank."""
        of = known if self._shared else {i: x[:, stripe.source] for i, x in known.items()}
        to = {self._rank: there}
        return self._engine.transport.start_exchange(
            stripe.exchange, of, to, conjugate=self._conjugate, slots=SLOTS if self._ahead == 1 else None
        )

    def _temporaries(self) -> Iterator[Array]:
        """Yield the memory of one stripe after the other, as many as are under way in turn."""
        memory = self._engine.transport.buffer("sum", self._ahead * self._temporary_bytes, shared=False)
        return cycle(
            memory[i * self._temporary_bytes : (i + 1) * self._temporary_bytes] for i in range(self._ahead)
        )


class AddMethod(ArrayMethod):
    """Sums of matrices: op(A) moves to where D is."""

    name, least, product = "moved", 2.0, SumProduct

    def serves(self, problem: AnyProblem) -> bool:
        return isinstance(problem, Level3Problem) and problem.traits.shape == "added"


METHODS = (AddMethod(),)
