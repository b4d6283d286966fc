# SPDX-License-Identifier: Apache-2.0
"""trsm: every rank can read A, the right-hand sides are dealt out evenly, and each rank does one local solve.

If A is to the right of X, everything is transposed, so that A is always to the left. With panels of A, which have the
rows of some equations, the contribution of the unknowns that are known is subtracted from the right-hand sides of one
panel, and its equations are solved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm import CellArrays, Cells, Exchange, Side
from ...comm.exchange import SLOTS
from ...comm.shared_memory import aligned, carve
from ...layout import Level3Problem
from ...layout.axis import Axis
from ..arrays import same_memory
from ..composite import QueuedProduct
from ..local.panels import Arrived, Operand, Panels, SlabsMethod, domain_of, domains, everyone
from ..local.slab_terms import THIN, triangle_of
from ..protocol import Engine, Transfer
from ..request import AnyProblem, Operands, Options

# most columns of a rank, relative to the average, in D's own layout, and where process columns deal out their blocks
_EVEN, _AS_EVEN = 1.25, 1.05

Array = Any
Step = tuple[Array, Callable[[], None], Array]
"""Where the right-hand sides of a panel are to be, what solves then, and what is multiplied by known unknowns."""


class _Way:
    """Moves of bands of rows between layouts. Making one is local.

    Args:
        bands: rows, from and to.
    """

    def __init__(
        self, engine: Engine, of: Side, to: Side, bands: Sequence[tuple[int, int]], dtype: np.dtype
    ) -> None:
        self._transport, self._of, self._to, self._bands = engine.transport, of, to, bands
        self._slots = None if engine.traits.queues else SLOTS  # GPUs solve meanwhile
        self.exchanges = [self._transport.exchange(of.band(*rows), to.band(*rows), dtype) for rows in bands]

    def __len__(self) -> int:
        return len(self._bands)

    def start(self, i: int, x: CellArrays, y: CellArrays) -> Transfer:
        """Start the move of a band. Collective over the ranks."""
        rows = self._bands[i]
        of, to = self._of.lines(x, *rows), self._to.lines(y, *rows)
        return self._transport.start_exchange(self.exchanges[i], of, to, slots=self._slots)


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
        self._stays = self._in_d and p.b.same_places(p.d)  # right-hand sides are where they are solved for
        if self._in_d:
            self.notes += ("the equations are solved in the memory of the result",)
        self._bytes = _slab_bytes(p, size)
        groups = domains(engine, way)
        self._domain = groups[domain_of(groups)[rank]]
        self._dealt, self._parts = dealt, parts = _dealt(target, size)
        slabs = target
        if not self._in_d:
            cells = Cells(np.column_stack((np.zeros_like(parts), parts)), np.arange(size), groups)
            slabs = Side(Axis.whole(order), dealt, cells, source.order)
        self._dtype, self._order, self._rows = p.d.dtype, source.order, order
        k = order if options.alpha != 0 else 0
        width, lead = engine.operations.solved
        if engine.traits.queues and THIN * source.cols.extent <= order:  # large messages take less time
            width = 2 * width
        self._panels = Panels(
            engine, way, [self._a], k, backwards=not self._lower, width=width, lead=lead, ahead=True
        )
        nbytes = 0
        if self._panels.panels:
            # on GPUs right-hand sides arrive with the panel of their equations, and unknowns leave when they are found
            bands = self._panels.panels if engine.traits.queues else [(0, order)]
            self._in = _Way(engine, source, slabs, [] if self._stays else bands, p.d.dtype)
            self._out = _Way(engine, slabs, target, [] if self._in_d else bands, p.d.dtype)
            moves: list[Exchange | Panels] = [self._panels, *self._in.exchanges, *self._out.exchanges]
            self.sent_bytes = sum(move.sent_bytes for move in moves)
            self.copied_bytes = sum(move.copied_bytes for move in moves)
            nbytes = self._panels.nbytes + self._bytes
            if engine.traits.queues and not self._in_d:
                self._carved()  # the ranks agree now, but not in a run
        self.workspace = engine.operations.workspace(nbytes)

    def _queue(self, operands: Operands) -> None:
        b, d = operands.b, operands.d
        if not self._panels.panels:
            d[...] = 0
            return
        assert b is not None
        if self._turned:
            b, d = b.T, d.T
        transport = self._engine.transport
        given, wanted = {transport.rank: b}, {transport.rank: d}
        slabs = wanted if self._in_d else self._carved()
        x, coming, leaving = slabs.get(transport.rank), list[Transfer](), list[Transfer]()
        right = b if self._stays else x
        for i, (start, stop, step) in enumerate(self._arriving(operands.a, given, slabs, coming)):
            if 0 < i < len(self._out):
                with transport.ahead(follows=True):
                    leaving.append(self._out.start(i - 1, slabs, wanted))
                    if len(leaving) > SLOTS:
                        leaving.pop(0).finish()
            if step is not None:
                self._solve(step, right, x, start, stop)
        if self._shared and not self._in_d:
            transport.fence()  # wait until every slab of the node has been solved for
        with transport.ahead(follows=True) as join:
            if len(self._out):
                leaving.append(self._out.start(len(self._out) - 1, slabs, wanted))
            for each in leaving:
                each.finish()
            join()

    def _arriving(
        self, a: Array, given: CellArrays, slabs: dict[int, Array], coming: list[Transfer]
    ) -> Iterator[tuple[int, int, Step | None]]:
        """Yield (start, stop, step) of each panel, when its right-hand sides have come. Collective over the ranks."""
        transport = self._engine.transport
        x = slabs.get(transport.rank)

        def prepare(i: int, found: Arrived) -> Step | None:
            step = self._prepared(x, i, found) if x is not None and x.size else None
            if coming:  # triangles are inverted meanwhile
                coming.pop(0).finish()
            return step

        def start(i: int) -> None:
            if i < len(self._in):
                coming.append(self._in.start(i, given, slabs))

        if self._engine.traits.queues:
            return self._panels.arrive({"a": a}, prepare, start)
        start(0)
        if coming:
            coming.pop().finish()
        if self._shared and not self._panels.fenced:
            transport.fence()  # wait until the right-hand sides of the node have been written
        # ranks that share memory have agreed by now that they have read the last call's panels
        return self._panels.arrive({"a": a}, prepare)

    def _prepared(self, x: Array, i: int, found: Arrived) -> Step:
        """Return how the unknowns of panel ``i`` of ``x`` are found. Local."""
        (panel,), (start, stop) = found, self._panels.panels[i]
        panel = (panel[0] if isinstance(panel, dict) else panel).T
        first = self._a.rows(start, stop)[0]
        own = panel[:, start - first : stop - first]
        known = panel[:, slice(start) if self._lower else slice(stop - first, None)]
        solver = self._engine.operations.solver
        return *solver(own, x[start:stop], lower=self._lower, unit=self._unit, turn=i % 2), known

    def _solve(self, step: Step, right: Array, x: Array, start: int, stop: int) -> None:
        """Find the unknowns ``start`` to ``stop``: the others' contribution is subtracted from the right-hand sides."""
        operations, alpha = self._engine.operations, self._options.alpha
        rest, solve, factors = step
        old, known = right[start:stop], x[:start] if self._lower else x[stop:]
        stays = same_memory(old, rest)
        if known.size:
            operations.gemm(-1, factors, known, alpha, rest, c=None if stays else old)
        elif not (stays and alpha == 1):
            operations.add(rest, alpha, old, 0, rest, None, conjugate=False)
        solve()

    def _carved(self) -> dict[int, Array]:
        """Return the slabs of right-hand sides that this rank can write, by rank."""
        memory = self._engine.transport.buffer("x", self._bytes * len(self._domain), shared=self._shared)
        return {
            rank: carve(memory, self._bytes * i, self._shape(rank), self._dtype, self._order)
            for i, rank in enumerate(self._domain)
        }

    def _shape(self, rank: int) -> tuple[int, int]:
        """Return the shape of a rank's slab of right-hand sides."""
        return self._rows, self._dealt.count(int(self._parts[rank]))


def _triangle(p: Level3Problem, engine: Engine) -> Operand:
    """Return A, transposed, as an operand that every rank needs as a whole: a panel has the rows of some unknowns."""
    flip, conjugate, triangle = triangle_of(p)
    rows = (Side.of(p.a) if flip else Side.of(p.a).T).rows
    outer = rows if rows.nprocs == 1 else Axis.whole(p.a.shape[0])
    dtype, everywhere = engine.operations.slab_dtype(p.a.dtype), everyone(engine.transport.size)
    return Operand(
        p.a, not flip, conjugate, everywhere, outer, dtype, "a", triangle="U" if triangle == "L" else "L"
    )


def _solves_in_d(p: Level3Problem, size: int) -> bool:
    """Return whether D's own layout deals the right-hand sides out evenly enough."""
    target = _target(p)
    return target.rows.nprocs == 1 and max(target.cols.counts()) * size <= _EVEN * target.cols.extent + size


def _dealt(target: Side, size: int) -> tuple[Axis, NDArray[np.int64]]:
    """Return how right-hand sides are dealt out to ranks, and which part each rank has.

    Evenly: if it can be, in D's own blocks among the ranks of a process column, which then move to one another only.
    """
    cols, ranks = target.cols, np.arange(size)
    prows, pcols = target.rows.nprocs, cols.nprocs
    inside = Axis(cols.extent, cols.block, cols.source, prows * pcols, cols.lead)
    if pcols == 1 or prows * pcols < size or max(inside.counts()) * size > _AS_EVEN * cols.extent:
        return Axis.even(cols.extent, size), ranks
    coords = target.cells.coords
    parts = np.empty_like(ranks)
    parts[target.cells.owners] = coords[:, 0] * pcols + coords[:, 1]
    return inside, parts


def _slab_bytes(p: Level3Problem, size: int) -> int:
    """Return the bytes of a rank's right-hand sides outside D."""
    if _solves_in_d(p, size):
        return 0
    target = _target(p)
    dealt, _ = _dealt(target, size)
    return aligned(target.rows.extent * max(dealt.counts()) * p.d.dtype.itemsize)


def _target(p: Level3Problem) -> Side:
    """Return D, transposed if A is to the right of it."""
    return Side.of(p.d).T if p.side == "R" else Side.of(p.d)


class SolveMethod(SlabsMethod):
    """Solves by slabs of A."""

    def serves(self, problem: AnyProblem) -> bool:
        return isinstance(problem, Level3Problem) and problem.traits.solves

    def needs(
        self, engine: Engine, problem: Level3Problem, options: Options
    ) -> tuple[Sequence[Operand], int, int]:
        return [_triangle(problem, engine)], problem.k, _slab_bytes(problem, engine.transport.size)

    def overlaps(self, engine: Engine, problem: Level3Problem) -> bool:
        return engine.traits.queues

    def prepare(
        self, engine: Engine, problem: Level3Problem, options: Options, operands: Operands
    ) -> SolveProduct:
        return SolveProduct(engine, problem, options, self.name, operands)


METHODS = (SolveMethod("shared", 2.0), SolveMethod("gathered", 3.0), SolveMethod("panels", 4.0))
