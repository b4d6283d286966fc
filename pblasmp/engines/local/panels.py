# SPDX-License-Identifier: Apache-2.0
"""How operands reach the ranks that multiply them: in slabs, panel by panel, at the ranks that share them.

Each rank needs, of op(A), the rows of its process row of D, and of op(B) the columns of its process column, over the
whole of k: a *slab*. Both are treated here as outer × k (op(B) transposed), so that the same code serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm import Cells, Exchange, Side
from ...comm.exchange import SLOTS, filled_up
from ...comm.shared_memory import aligned, carve
from ...layout import Grid, MatrixDescriptor
from ...layout.axis import Axis
from ...layout.caches import Hashed
from ...layout.grid import coordinates
from ..method import ArrayMethod
from ..protocol import Engine, Transfer
from ..request import Operands, Options
from .passed import Passing, shares_of

Array = Any
Needs = tuple[tuple[int, ...], ...]  # for every rank, the slabs that it multiplies


def needs(d: MatrixDescriptor, size: int, axis: int) -> Needs:
    """Return for each of ``size`` ranks its process row (axis 0) or column (1) of D, if it has some of D. Local."""
    rows, cols = (tuple(map(bool, extent.counts())) for extent in (d.rows, d.cols))
    return _needs(d.grid, size, axis, rows, cols)


@lru_cache(64)
def everyone(size: int) -> Needs:
    """Return that each of ``size`` ranks multiplies the only slab. Local."""
    return Hashed(((0,),) * size)


@lru_cache(64)
def _needs(grid: Grid, size: int, axis: int, rows: tuple[bool, ...], cols: tuple[bool, ...]) -> Needs:
    """Return the same, told which process rows and columns have any of D."""
    of_process = [(process,) for process in range(grid.shape[axis])]
    of_rank = (of_process[at[axis]] if rows[at[0]] and cols[at[1]] else () for at in coordinates(grid))
    return Hashed((*of_rank, *[()] * (size - grid.size)))


@dataclass(frozen=True)
class Operand:
    """One operand of a product, as outer × k.

    Attributes:
        matrix: its descriptor.
        flip: whether its local arrays are transposed to be outer × k.
        conjugate: whether its values are conjugated on the way.
        needs: for every rank, which slabs (processes of ``outer``) it multiplies, ascending; none without a part of D.
        outer: the dimension that it shares with D, distributed as in D.
        dtype: the type of its slabs.
        source: "a" or "b": the operand whose local arrays these are.
        order: memory order of its slabs as outer × k; empty: that of the matrix.
        triangle: "L" or "U": of each panel only what is in this triangle's rows is needed; empty: all rows.
    """

    matrix: MatrixDescriptor
    flip: bool
    conjugate: bool
    needs: tuple[tuple[int, ...], ...]
    outer: Axis
    dtype: np.dtype
    source: str = "a"
    order: str = ""
    triangle: str = ""

    @cached_property
    def side(self) -> Side:
        """The operand as it is distributed, as outer × k."""
        return Side.of(self.matrix.T if self.flip else self.matrix)  # whose cells are made once

    @cached_property
    def _counts(self) -> list[int]:
        return self.outer.counts()

    def rows(self, start: int, stop: int) -> tuple[int, int]:
        """Return which indices of outer the panel from ``start`` to ``stop`` has, from and to."""
        return start if self.triangle == "L" else 0, stop if self.triangle == "U" else self.outer.extent

    def rows_of(self, process: int, start: int, stop: int) -> slice:
        """Return which rows of a whole slab the panel from ``start`` to ``stop`` has."""
        return self.outer.local_window(process, *self.rows(start, stop))

    def local(self, array: Array) -> Array:
        """Return a local array as outer × k."""
        return array.T if self.flip else array

    @cached_property
    def in_place(self) -> bool:
        """Whether every rank already holds the slab that it multiplies, ready for BLAS."""
        side = self.side
        holders = [process for process, count in enumerate(side.cols.counts()) if count] or [0]
        if (
            len(holders) > 1
            or (side.rows != self.outer and not side.rows.nprocs == self.outer.nprocs == 1)
            or self.dtype != self.matrix.dtype
            or self.conjugate
        ):
            return False
        coords, ranks = side.cells.coords, side.cells.ranks
        here = coords[:, 1] == holders[0]
        held = dict(zip(ranks[here, 0].tolist(), coords[here, 0].tolist(), strict=True))
        return all(held.get(rank) == need for rank, needs in enumerate(self.needs) for need in needs)

    def slab_bytes(self, process: int, width: int) -> int:
        """Return the bytes of a slab ``width`` indices of k wide."""
        return aligned(self._counts[process] * width * self.dtype.itemsize)

    def memory_bytes(self, ranks: tuple[int, ...], width: int) -> int:
        """Return the bytes that the slabs of ``ranks`` take if these ranks share them."""
        return sum(self.slab_bytes(process, width) for process in self.slabs(ranks))

    def slabs(self, ranks: tuple[int, ...]) -> list[int]:
        """Return the distinct slabs that ``ranks`` multiply, ascending."""
        return _needed(self.needs, ranks)


@lru_cache(1024)
def _needed(needs: Needs, ranks: tuple[int, ...]) -> list[int]:
    return sorted({process for rank in ranks for process in needs[rank]})


@lru_cache(16)  # operands with the same needs have the same slabs
def _slabs(needs: Needs, domains: tuple[tuple[int, ...], ...]) -> tuple[NDArray[np.int64], Cells]:
    """Return the domain of each slab, and the cells of the slabs in an exchange."""
    alone = domains == tuple(zip(range(len(needs))))
    slabs = needs if alone else [_needed(needs, ranks) for ranks in domains]
    of_domain = np.arange(len(slabs)).repeat(np.fromiter(map(len, slabs), np.int64, len(slabs)))
    coords = np.zeros((len(of_domain), 2), np.int64)
    coords[:, 0] = np.fromiter(chain.from_iterable(slabs), np.int64, len(coords))
    return of_domain, Cells(coords, filled_up(domains)[of_domain])


@lru_cache(16)
def domain_of(domains: tuple[tuple[int, ...], ...]) -> dict[int, int]:
    """Return by rank the index of the group that it is in. Local."""
    return {rank: i for i, ranks in enumerate(domains) for rank in ranks}


class Staging:
    """The moves that bring panels of k of an operand into slabs. Making one is local.

    Args:
        engine: where they are.
        operand: what they are slabs of.
        domains: groups of ranks that share slabs; every rank is in one.
        panels: the first index of k of each, and the one after the last.

    Attributes:
        sent_bytes, copied_bytes: bytes that this rank sends and copies for all panels.
        message_bytes: of each panel, what its messages take.
    """

    def __init__(
        self,
        engine: Engine,
        operand: Operand,
        domains: tuple[tuple[int, ...], ...],
        panels: Sequence[tuple[int, int]],
    ) -> None:
        transport, side = engine.transport, operand.side
        self._engine, self._operand = engine, operand
        of_domain, cells = _slabs(operand.needs, domains)
        shared = np.flatnonzero(of_domain == domain_of(domains)[transport.rank])
        # the slabs that this rank shares, and their processes
        self._shared = list(zip(shared.tolist(), cells.coords[shared, 0].tolist(), strict=True))
        self._holder = me = side.cells.owned_by(transport.rank)  # its cell of the operand, if it has one
        prow, pcol = (0, 0) if me is None else (int(each) for each in side.cells.coords[me])
        self._order = order = operand.order or side.order
        self._panels, self._moves = list[tuple[int, tuple[slice, slice]]](), list[Exchange | Passing]()
        self._rows: list[Axis] = []
        exchanges: list[tuple[Exchange, ...]] = []
        nodes = Hashed(map(tuple, transport.domains))
        apart = len(nodes) > 1 and domains != nodes
        for start, stop in panels:
            ends = operand.rows(start, stop)
            here = side.rows.local_window(prow, *ends), side.cols.local_window(pcol, start, stop)
            self._panels.append((stop - start, here))
            outer = operand.outer
            self._rows.append(Axis.whole(ends[1] - ends[0]) if outer.nprocs == 1 else outer.window(*ends))
            given = Side(side.rows.window(*ends), side.cols.window(start, stop), side.cells, side.order)
            wanted = Side(self._rows[-1], Axis.whole(stop - start), cells, order)
            dtypes = operand.matrix.dtype, operand.dtype
            about = side, outer, operand.needs, nodes, stop - start, operand.dtype.itemsize
            shares = shares_of(*about) if apart else None
            if shares is None or transport.gathers(given, wanted, dtypes[0]):
                exchange = transport.exchange(given, wanted, dtypes[0])
                self._moves.append(exchange)
                exchanges.append((exchange,))
            else:
                passing = Passing(transport, shares, given, self._rows[-1], order, dtypes)
                self._moves.append(passing)
                exchanges.append(passing.exchanges)
        self.sent_bytes = sum(each.sent_bytes for each in chain(*exchanges))
        self.copied_bytes = sum(each.copied_bytes for each in chain(*exchanges))
        self.message_bytes = [sum(map(transport.message_bytes, each)) for each in exchanges]

    def start(self, i: int, array: Array, memory: Array, *, ahead: bool) -> tuple[Transfer, dict[int, Array]]:
        """Start moving panel ``i`` of ``array`` into slabs laid out in ``memory``; return (transfer, slab by process).

        With ``ahead`` all messages are in flight when this returns; without, they have arrived, a few MiB at a time.
        """
        operand, at, mine = self._operand, 0, dict[int, Array]()
        moves, (width, here) = self._moves[i], self._panels[i]
        stored = self._engine.operations.stored(operand.dtype)
        for _, process in self._shared:
            mine[process] = carve(memory, at, (self._rows[i].count(process), width), stored, self._order)
            at += operand.slab_bytes(process, width)
        given = {} if self._holder is None else {self._holder: operand.local(array)[here]}
        how: Any = {"conjugate": operand.conjugate, "slots": None if ahead else SLOTS}
        if isinstance(moves, Passing):
            transfer = moves.start(given, mine, **how)
        else:
            slabs = {cell: mine[process] for cell, process in self._shared}
            transfer = self._engine.transport.start_exchange(moves, given, slabs, **how)
        if not ahead:
            transfer.finish()
        return transfer, mine


Arrived = list[Array | dict[int, Array]]
"""A panel of each operand: its slabs by process, or this rank's own array."""

_FOLLOWS = 4  # use a short first panel only if k is at least so many times as long


def domains(engine: Engine, way: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that share slabs. Local."""
    if way == "shared":
        return engine.transport.nodes
    return _alone(engine.transport.size)


@lru_cache(8)
def _alone(size: int) -> tuple[tuple[int, ...], ...]:
    return Hashed((rank,) for rank in range(size))


def cut(k: int, width: int, lead: int = 0, *, backwards: bool = False) -> list[tuple[int, int]]:
    """Return the panels of k of at most ``width`` indices, in order from either end. Local.

    Nothing is multiplied while the first one arrives: it has ``lead`` indices, if that is given and many more follow.
    Each later one has up to twice as many as the one that is multiplied while it arrives.
    """
    panels, at, wide = [], 0, lead if 0 < _FOLLOWS * lead <= k else width
    while at < k:
        stop = min(at + wide, k)
        if 2 * (k - stop) < wide and k - at <= width:
            stop = k  # rather than another short one
        panels.append((at, stop))
        at, wide = stop, min(2 * wide, width)
    return [(k - stop, k - start) for start, stop in panels] if backwards else panels


_LONG_PANELS = 2.9  # the cost of panels of which most arrive after a first one


class SlabsMethod(ArrayMethod):
    """An algorithm that multiplies slabs of its operands.

    Args:
        name: which ranks share slabs, "shared" or "gathered"; or "panels", those of panels of k.
        cost: each way is slower than the one before by about a copy of the operands.
    """

    def __init__(self, name: str, cost: float) -> None:
        self.name, self._cost = name, cost
        self.least = min(cost, _LONG_PANELS)

    def needs(self, engine: Engine, problem: Any, options: Options) -> tuple[Sequence[Operand], int, int]:
        """Return the operands, the extent of k, and the bytes that a rank needs besides the operands. Local."""
        raise NotImplementedError

    def overlaps(self, engine: Engine, problem: Any) -> bool:
        """Return whether the panels after a short first one arrive while it is multiplied. Local."""
        raise NotImplementedError

    def cost(self, engine: Engine, problem: Any, options: Options) -> float:
        """Return for panels a little less than gathering costs if most of a long k arrives after a first panel."""
        arrives = self.name == "panels" and self.overlaps(engine, problem)
        return _LONG_PANELS if arrives and 0 < _FOLLOWS * engine.operations.lead <= problem.k else self._cost

    def refusal(self, engine: Engine, problem: Any, options: Options, operands: Operands | None) -> str:
        why, transport = super().refusal(engine, problem, options, operands), engine.transport
        if not why and self.name == "shared":
            why = transport.why_not_shared
        if why or options.algo != "auto" or self.name == "panels":
            return why
        needed, k, extra = self.needs(engine, problem, options)
        moved = [x for x in needed if not x.in_place]
        if not moved and not extra:
            nothing = "all operands are multiplied in place: there is nothing to share"
            return nothing if self.name == "shared" else ""
        if self.name == "shared":
            nbytes = max(
                sum(x.memory_bytes(node, k) for x in moved) + extra * len(node) for node in transport.nodes
            )
            what = "a shared copy of the operands"
        else:
            nbytes = max(
                sum(x.memory_bytes((rank,), k) for x in moved for rank in node) + extra * len(node)
                for node in transport.nodes
            )
            what = "gathered operands"
        enough, limit = transport.fits(nbytes)
        return "" if enough else f"{what} would need {nbytes} bytes per node, only {limit} available"


class Panels:
    """Operands that arrive in slabs, panel by panel, with two or three panels in memory. Collective.

    Args:
        engine: where it runs.
        way: "shared", "gathered" or "panels".
        operands: the operands that arrive.
        k: the extent that is cut into panels.
        backwards: the last panel comes first.
        width: indices in a panel, if there are several; 0: the engine's.
        lead: indices in the first panel; 0: as many as in the others.
        ahead: what is queued meanwhile need not end before the panel after the next begins to arrive.

    Attributes:
        panels: (start, stop) of each.
        sent_bytes, copied_bytes: bytes that this rank sends and copies for all panels.
        nbytes: memory of the slabs on this rank.
        fenced: whether the ranks of a node wait for each other before they use a panel.
    """

    def __init__(
        self,
        engine: Engine,
        way: str,
        operands: Sequence[Operand],
        k: int,
        *,
        backwards: bool = False,
        width: int = 0,
        lead: int = 0,
        ahead: bool = False,
    ) -> None:
        self._engine, self._operands, self._shared = engine, operands, way == "shared"
        in_panels = way == "panels"
        width = (width or engine.operations.panel) if in_panels else max(1, k)
        self.panels = cut(k, width, lead if in_panels else 0, backwards=backwards)
        self._ahead = ahead and len(self.panels) > 1
        groups = domains(engine, way)
        domain = groups[domain_of(groups)[engine.transport.rank]]
        in_place = [x.in_place for x in operands]
        self._stagings = [
            None if still or not self.panels else Staging(engine, x, groups, self.panels)
            for x, still in zip(operands, in_place, strict=True)
        ]
        made = [staging for staging in self._stagings if staging is not None]
        self.sent_bytes = sum(staging.sent_bytes for staging in made)
        self.copied_bytes = sum(staging.copied_bytes for staging in made)
        # Whether the ranks wait for each other after writing slabs: the same on every rank, even an idle one.
        self.fenced = self._shared and not all(in_place)
        widths = [stop - start for start, stop in self.panels]
        # While a panel is multiplied the next one arrives; on GPUs the one before may still be multiplied, too.
        self._parts = 3 if engine.traits.queues else 2
        self._bytes = [
            [
                0 if still else x.memory_bytes(domain, max(widths[part :: self._parts], default=0))
                for x, still in zip(operands, in_place, strict=True)
            ]
            for part in range(self._parts)
        ]
        self.nbytes = sum(map(sum, self._bytes)) if made else 0
        # two panels are under way at once
        self.nbytes += sum(sum(sorted(staging.message_bytes)[-2:]) for staging in made)
        if engine.traits.queues:  # the ranks agree now, but not in a run
            for i in range(min(self._parts, len(self.panels))):
                for which, staging in enumerate(self._stagings):
                    if staging is not None:
                        self._buffer(which, i)

    def _buffer(self, which: int, i: int) -> Array:
        """Return the memory of an operand's slabs of panel ``i``."""
        part = i % self._parts
        name = f"{'abcd'[which]}{part}"
        return self._engine.transport.buffer(name, self._bytes[part][which], shared=self._shared)

    def arrive(
        self,
        arrays: dict[str, Array],
        prepare: Callable[[int, Arrived], Any] | None = None,
        beside: Callable[[int], None] | None = None,
    ) -> Iterator[tuple[int, int, Any]]:
        """Start moving the first panel; yield (start, stop, operands) of each in turn. Collective over the ranks.

        An operand is its slabs by process, each as outer × k, or this rank's own array if it stays in place. The ranks
        have agreed since the last run, so that no rank still multiplies what is overwritten here.

        Args:
            arrays: the operands' local arrays.
            prepare: what is yielded is what this function makes of a panel's number and its operands, perhaps while the
                one before is still multiplied.
            beside: starts moving what comes with a panel of this number.
        """
        start = partial(self._start, arrays, beside)
        return self._arriving(start(0), start, arrays, prepare)

    def _arriving(
        self,
        coming: list[Any],
        start_panel: Callable[[int], list[Any]],
        arrays: dict[str, Array],
        prepare: Callable[[int, Arrived], Any] | None,
    ) -> Iterator[tuple[int, int, Any]]:
        """Yield each panel when it is there, after the next one has been started."""
        transport, ahead = self._engine.transport, self._ahead
        for i, (start, stop) in enumerate(self.panels):
            following = [] if ahead else start_panel(i + 1)
            with transport.ahead(follows=i == 0) if ahead else nullcontext(lambda: None) as join:
                slabs = [self._arrived(part) for part in coming]
                if self.fenced:
                    transport.fence()  # wait until every slab of the node has been written
                found: Any = [
                    self._own(x, arrays[x.source], start, stop) if slab is None else slab
                    for x, slab in zip(self._operands, slabs, strict=True)
                ]
                if prepare is not None:
                    found = prepare(i, found)
                join()
                if (
                    ahead
                ):  # its messages are packed while the panel before this one is multiplied: kernels can begin
                    following = start_panel(i + 1)
            coming = following
            yield start, stop, found

    def _own(self, x: Operand, array: Array, start: int, stop: int) -> Array:
        """Return what this rank's own array of an operand has of a panel."""
        need = x.needs[self._engine.transport.rank]
        rows = x.rows_of(need[0], start, stop) if need else slice(0)
        return x.local(array)[rows, start:stop]

    def _start(self, arrays: dict[str, Array], beside: Callable[[int], None] | None, i: int) -> list[Any]:
        """Start moving panel ``i``, if there is one; panels take turns in parts of the buffers."""
        if i >= len(self.panels):
            return []
        ahead = len(self.panels) > 1
        started = [
            staging and staging.start(i, arrays[x.source], self._buffer(which, i), ahead=ahead)
            for which, (x, staging) in enumerate(zip(self._operands, self._stagings, strict=True))
        ]
        if beside is not None:
            beside(i)
        return started

    @staticmethod
    def _arrived(part: Any) -> dict[int, Array] | None:
        """Return the slabs of an operand by process, None for one that stays in place."""
        if part is None:
            return None
        transfer, slabs = part
        transfer.finish()
        found: dict[int, Array] = slabs
        return found
