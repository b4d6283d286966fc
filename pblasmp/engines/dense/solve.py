# SPDX-License-Identifier: Apache-2.0
"""trsm: every rank can read A, the right-hand sides are dealt out evenly, and each rank does one local solve.

If A is to the right of X, everything is transposed, so that A is always to the left. With panels of A, the equations of
one panel are solved, and their contribution to the other equations is subtracted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...comm import Exchange, NodeCells, Side
from ...comm.exchange import SLOTS
from ...comm.shared_memory import aligned, carve
from ...layout import Level3Problem
from ...layout.axis import Axis
from ..arrays import same_memory
from ..composite import QueuedProduct
from ..local.slab_terms import triangle_of
from ..method import type_refusal
from ..moving.panels import FOLLOWS, Operand, Panels, domain_of, domains, everyone, memory_refusal
from ..protocol import Engine, Method
from ..request import AnyProblem, Operands, Options

_EVEN = 1.25  # most columns of a rank, relative to the average, that D's own layout may have

Array = Any


class SolveProduct(QueuedProduct):
    """X of ``op(A) X = alpha B``. Making and running one is collective over the ranks."""

    def __init__(
        self, engine: Engine, p: Level3Problem, options: Options, way: str, operands: Operands
    ) -> None:
        assert p.b is not None
        rank, size = engine.transport.rank, engine.transport.size
        self.path = way
        self._engine, self._options, self._unit = engine, options, p.diag == "U"
        self._turned, self._shared = p.side == "R", way == "shared"
        self._lower = triangle_of(p)[2] == "L"
        self._a = _triangle(p, engine)
        source, target = (Side.of(x).T if self._turned else Side.of(x) for x in (p.b, p.d))
        order = source.rows.extent
        self._in_d = _solves_in_d(p, size)
        self._may_stay = self._in_d and p.b.same_places(p.d)
        if self._in_d:
            self.notes += ("the equations are solved in the memory of the result",)
        self._bytes = _slab_bytes(p, size)
        groups = domains(engine, way)
        self._domain = groups[domain_of(groups)[rank]]
        dealt = Axis.even(source.cols.extent, size)
        self._shapes = order, dealt
        slabs = target
        if not self._in_d:
            ranks = np.arange(size)
            cells = NodeCells(np.column_stack((np.zeros_like(ranks), ranks)), ranks, groups)
            slabs = Side(Axis.whole(order), dealt, cells, source.order)
        self._dtype, self._order = p.d.dtype, source.order
        exchange = engine.transport.exchange
        self._in = exchange(source, slabs, p.d.dtype)
        self._out = None if self._in_d else exchange(slabs, target, p.d.dtype)
        k = order if options.alpha != 0 else 0
        self._panels = Panels(
            engine, way, [self._a], k, backwards=not self._lower, lead=engine.operations.lead
        )
        nbytes = 0
        if self._panels.panels:
            moves: list[Exchange | Panels] = [self._panels]
            if not self._stays(operands.b, operands.d):
                moves.append(self._in)
            if self._out is not None:
                moves.append(self._out)
            self.sent_bytes = sum(move.sent_bytes for move in moves)
            self.copied_bytes = sum(move.copied_bytes for move in moves)
            nbytes = self._panels.nbytes + self._bytes
            if engine.traits.queues and not self._in_d:
                self._carved()  # the ranks agree now, but not in a run
        self.workspace = engine.operations.workspace(nbytes)

    def _stays(self, b: Array, d: Array) -> bool:
        """Return whether the right-hand sides are where the equations are solved. Local."""
        return self._may_stay and same_memory(b, d)

    def _queue(self, operands: Operands) -> None:
        """Solve for D, which may be B."""
        b, d = operands.b, operands.d
        if not self._panels.panels:
            d[...] = 0
            return
        assert b is not None
        if self._turned:
            b, d = b.T, d.T
        transport = self._engine.transport
        rank = transport.rank
        given, wanted = {rank: b}, {rank: d}
        slabs = wanted if self._in_d else self._carved()
        arriving = self._panels.arrive({"a": operands.a}) if self._engine.traits.queues else None
        if not self._stays(b, d):
            transport.start_exchange(self._in, given, slabs, slots=SLOTS).finish()
        mine = slabs.get(rank)
        if self._shared and not self._panels.fenced:
            transport.fence()  # wait until the right-hand sides of the node have been written
        if arriving is None:  # ranks that share memory first agree that they have read the last call's panels
            arriving = self._panels.arrive({"a": operands.a})
        for i, (start, stop, (panel,)) in enumerate(arriving):
            if mine is not None and mine.size:
                self._solve(panel[0] if isinstance(panel, dict) else panel, mine, start, stop, first=i == 0)
        if self._out is not None:
            if self._shared:
                transport.fence()  # wait until every slab of the node has been solved for
            transport.start_exchange(self._out, slabs, wanted, slots=SLOTS).finish()

    def _solve(self, panel: Array, x: Array, start: int, stop: int, *, first: bool) -> None:
        """Solve the equations ``start`` to ``stop`` and subtract their contribution to those that follow."""
        operations = self._engine.operations
        rest = slice(stop, None) if self._lower else slice(0, start)
        alpha = self._options.alpha if first else 1
        operations.trsm(alpha, panel[start:stop], x[start:stop], lower=self._lower, unit=self._unit)
        if x[rest].size:
            operations.gemm(-1, panel[rest], x[start:stop], alpha, x[rest])

    def _carved(self) -> dict[int, Array]:
        """Return the slabs of right-hand sides that this rank can write, by rank."""
        memory = self._engine.transport.buffer("x", self._bytes * len(self._domain), shared=self._shared)
        order, dealt = self._shapes
        return {
            rank: carve(memory, self._bytes * i, (order, dealt.count(rank)), self._dtype, self._order)
            for i, rank in enumerate(self._domain)
        }


def _triangle(p: Level3Problem, engine: Engine) -> Operand:
    """Return A as an operand that every rank needs as a whole."""
    flip, conjugate, _ = triangle_of(p)
    side = Side.of(p.a).T if flip else Side.of(p.a)
    rows, order = side.rows, p.a.shape[0]
    outer = rows if rows.nprocs == 1 else Axis.whole(order)
    dtype = engine.operations.slab_dtype(p.a.dtype)
    return Operand(p.a, flip, conjugate, everyone(engine.transport.size), outer, dtype, "a")


def _solves_in_d(p: Level3Problem, size: int) -> bool:
    """Return whether D's own layout deals the right-hand sides out evenly enough."""
    target = Side.of(p.d).T if p.side == "R" else Side.of(p.d)
    return target.rows.nprocs == 1 and max(target.cols.counts()) * size <= _EVEN * target.cols.extent + size


def _slab_bytes(p: Level3Problem, size: int) -> int:
    """Return the bytes of a rank's right-hand sides outside D."""
    if _solves_in_d(p, size):
        return 0
    order, free = p.d.shape[::-1] if p.side == "R" else p.d.shape
    return aligned(order * max(Axis.even(free, size).counts()) * p.d.dtype.itemsize)


class SolveMethod(Method):
    """Solves by slabs of A.

    Args:
        name: which ranks share slabs, or "panels".
        cost: relative.
    """

    def __init__(self, name: str, cost: float) -> None:
        self.name, self._cost = name, cost

    def serves(self, problem: AnyProblem) -> bool:
        return isinstance(problem, Level3Problem) and problem.traits.solves

    def refusal(
        self, engine: Engine, problem: Level3Problem, options: Options, operands: Operands | None
    ) -> str:
        why = type_refusal(engine, problem, options, operands)
        if why:
            return why
        extra = _slab_bytes(problem, engine.transport.size)
        needs = lambda: ([_triangle(problem, engine)], problem.k)  # noqa: E731
        return memory_refusal(engine, self.name, needs, options, extra)

    def cost(self, engine: Engine, problem: Level3Problem, options: Options) -> float:
        """Return less than gathering costs if most of A arrives while the first equations are solved."""
        arrives = self.name == "panels" and engine.traits.queues
        return 2.9 if arrives and 0 < FOLLOWS * engine.operations.lead <= problem.k else self._cost

    def prepare(
        self, engine: Engine, problem: Level3Problem, options: Options, operands: Operands
    ) -> SolveProduct:
        return SolveProduct(engine, problem, options, self.name, operands)


METHODS = (SolveMethod("shared", 2.0), SolveMethod("gathered", 3.0), SolveMethod("panels", 4.0))
