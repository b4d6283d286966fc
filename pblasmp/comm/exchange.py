# SPDX-License-Identifier: Apache-2.0
"""Exchange: move a matrix from one layout to another, block by block.

All data that moves between ranks goes through here: scatter, gather, redistribution, and the operands of a product. A
rank copies data that it can write itself; the rest travels in messages of a few MiB, which the sender packs while the
receivers take the previous ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..layout.axis import Axis
from ..layout.descriptor import MatrixDescriptor
from ..layout.grid import Grid
from ..layout.intersection import Piece, common_counts, copy, intersect
from .communicator import Communicator, Request

Coords = tuple[int, int]
Numbers = NDArray[np.int64]


class Cell(NamedTuple):
    """One local array of a layout: its process coordinates, and the ranks that can access it (first its owner)."""

    coords: Coords
    ranks: tuple[int, ...]


class Cells(Sequence[Cell]):
    """The cells of a side: a sequence whose items are made once, when the first one is asked for. Local.

    Args:
        coords: the process row and column of each cell.
        ranks: see the property of that name; the owner of each cell, if there are ``nodes``.
        nodes: the ranks of each node, if every rank of their owner's node can access the cells.
    """

    def __init__(self, coords: Numbers, ranks: Numbers, nodes: Sequence[tuple[int, ...]] = ()) -> None:
        self.coords, self.nodes, self._given = coords, nodes, ranks

    def moved(self, coords: Numbers, kept: NDArray[np.bool_]) -> Cells:
        """Return the cells that are ``kept``, at other process coordinates."""
        return Cells(coords[kept], self._given[kept], self.nodes)

    @property
    def owners(self) -> Numbers:
        """The owner of each cell."""
        return self._given if self.nodes else self._given[:, 0]

    @cached_property
    def ranks(self) -> Numbers:
        """The ranks of each cell, its owner first; shorter rows are filled up with -1."""
        if not self.nodes:
            return self._given
        node = {rank: ranks for ranks in self.nodes for rank in ranks}
        return filled_up(
            [(each, *(rank for rank in node[each] if rank != each)) for each in self.owners.tolist()]
        )

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> Cells:
        """Return a sequence of cells as arrays."""
        if isinstance(cells, Cells):
            return cells
        coords = np.array([cell.coords for cell in cells], np.int64).reshape(-1, 2)
        return cls(coords, filled_up([cell.ranks for cell in cells]))

    @staticmethod
    @lru_cache(256)
    def of_grid(grid: Grid) -> Cells:
        """Return one cell for each process of a grid, in the order of its ranks."""
        ranks = np.arange(grid.size)
        lines = grid.npcol if grid.order == "row" else grid.nprow
        coords = np.column_stack(np.divmod(ranks, lines))
        return Cells(coords if grid.order == "row" else coords[:, ::-1], ranks[:, None])

    @cached_property
    def counts(self) -> Numbers:
        """How many ranks each cell has."""
        found: Numbers = np.count_nonzero(self.ranks >= 0, axis=1)
        return found

    @property
    def T(self) -> Cells:  # noqa: N802
        """The same cells with their coordinates exchanged."""
        return Cells(self.coords[:, ::-1], self._given, self.nodes)

    def owned_by(self, rank: int) -> int | None:
        """Return the index of the first cell whose owner is ``rank``, None if there is none."""
        found = np.flatnonzero(self.owners == rank)
        return int(found[0]) if found.size else None

    @cached_property
    def _made(self) -> tuple[Cell, ...]:
        every = zip(self.coords.tolist(), self.ranks.tolist(), self.counts.tolist(), strict=True)
        return tuple(Cell((row, col), tuple(ranks[:count])) for (row, col), ranks, count in every)

    def __len__(self) -> int:
        return len(self.coords)

    def __getitem__(self, index: Any) -> Any:
        return self._made[index]

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._made)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return self is other or self._made == tuple(other)

    def __hash__(self) -> int:
        return hash(self._made)


def filled_up(lists: Sequence[Sequence[int]]) -> Numbers:
    """Return lists of numbers as rows of equal length, filled up with -1. Local."""
    counts = np.fromiter(map(len, lists), np.int64, len(lists))
    found = np.full((len(lists), counts.max(initial=0)), -1)
    found[np.arange(found.shape[1]) < counts[:, None]] = np.fromiter(
        chain.from_iterable(lists), np.int64, int(counts.sum())
    )
    return found


MESSAGE_BYTES = 2 << 20
SLOTS = 4  # messages that a rank sends at once
_AWAITED = 16  # messages in buffers that it awaits at once, from however many ranks

Array = NDArray[Any]
CellArrays: TypeAlias = Mapping[int, Any]
"""Local arrays of some cells of a side, by their indices."""


@dataclass(frozen=True, slots=True)
class Side:
    """A layout as an exchange sees it: two axes, and which ranks hold which process coordinates. Local.

    ``order`` is the memory order of the local arrays. Several cells with the same coordinates are copies.
    """

    rows: Axis
    cols: Axis
    cells: Cells
    order: str

    @classmethod
    def of(cls, descriptor: MatrixDescriptor) -> Side:
        """Return the side of a matrix on the first ranks of the communicator."""
        return cls(descriptor.rows, descriptor.cols, Cells.of_grid(descriptor.grid), descriptor.order)

    @classmethod
    def on_rank(cls, rank: int, shape: tuple[int, int], order: str) -> Side:
        """Return the side of a matrix that one rank has all of, as its only cell."""
        rows, cols = map(Axis.whole, shape)
        return cls(rows, cols, Cells.of([Cell((0, 0), (rank,))]), order)

    def band(self, start: int, stop: int) -> Side:
        """Return the layout of the rows from ``start`` to ``stop``."""
        return Side(self.rows.window(start, stop), self.cols, self.cells, self.order)

    def lines(self, arrays: CellArrays, start: int, stop: int) -> CellArrays:
        """Return these rows of its arrays, by the indices of their cells."""
        return {
            i: array[self.rows.local_window(self.cells[i].coords[0], start, stop)]
            for i, array in arrays.items()
            if i < len(self.cells)
        }

    @property
    def T(self) -> Side:  # noqa: N802
        """The same arrays seen transposed."""
        return Side(self.cols, self.rows, self.cells.T, "C" if self.order == "F" else "F")


@dataclass(frozen=True, slots=True)
class _CellPair:
    """A piece between local source cell ``src`` and destination cell ``dst`` (indices into the sides' cells)."""

    src: int
    dst: int
    piece: Piece


class Exchange:
    """The moves between two sides that this rank has to make. Making one is local and needs no agreement.

    Args:
        comm: the ranks that the cells name.
        src: where the matrix is; one cell per coordinates.
        dst: where the matrix goes; any number of cells per coordinates.
        dtype: element type of what travels; local arrays of another type are converted.

    Attributes:
        copies, sends, receives: what this rank copies itself, sends by receiver, and receives by sender.
        sent_bytes: what this rank sends to others in one run.
        copied_bytes: what this rank copies itself in one run.
    """

    def __init__(self, comm: Communicator, src: Side, dst: Side, dtype: np.dtype) -> None:
        self._comm = comm
        self.dtype = dtype
        self.order = dst.order
        self.copies: list[_CellPair] = []
        self.sends: dict[int, list[_CellPair]] = {}
        self.receives: dict[int, list[_CellPair]] = {}
        me = comm.rank
        self._sides = src, dst
        for i, j in _pairs(me, src, dst):
            source, target = src.cells[i], dst.cells[j]
            owner, writer = ends(source.ranks, target.ranks)
            if me not in (owner, writer):
                continue
            part = _CellPair(i, j, piece_of(src, source, dst, target))
            if owner == writer:
                self.copies.append(part)
            elif me == owner:
                self.sends.setdefault(writer, []).append(part)
            else:
                self.receives.setdefault(owner, []).append(part)
        self.sent_bytes = dtype.itemsize * sum(
            part.piece.size for parts in self.sends.values() for part in parts
        )
        self.copied_bytes = dtype.itemsize * sum(part.piece.size for part in self.copies)
        self._limit = message_elements(dtype.itemsize)

    @cached_property
    def gathers(self) -> bool:
        """Whether every rank has a part of one size and gets all parts: the same on every rank."""
        src, dst = self._sides
        one, size = dst.rows.nprocs == dst.cols.nprocs == 1, self._comm.size
        each = [{*cells.ranks.flat} for cells in (src.cells, dst.cells) if cells.ranks.shape == (size, 1)]
        sizes = {*_sizes(src, dst).flat} if one and size > 1 and list(map(len, each)) == [size, size] else {0}
        return len(sizes) == 1 and sizes != {0}

    @cached_property
    def alike(self) -> dict[int, int]:
        """For each rank that this rank sends to, the first one that gets the same message."""
        first: dict[Any, int] = {}
        return {
            rank: first.setdefault(tuple((part.src, part.piece.packed()) for part in parts), rank)
            for rank, parts in self.sends.items()
        }

    @cached_property
    def largest_bytes(self) -> int:
        """The most bytes that any rank sends to another one: the same on every rank."""
        src, dst = self._sides
        if not (src.cells and dst.cells):
            return 0
        sizes = _sizes(src, dst)
        # Shorter rows are filled up with their owner.
        sources, targets = (
            np.where(each.ranks < 0, each.ranks[:, :1], each.ranks) for each in (src.cells, dst.cells)
        )
        crosses = ~(sources[:, None, :, None] == targets[None, :, None, :]).any(axis=(2, 3))
        owners = sources[:, 0]
        counts = dst.cells.counts
        writers = targets[np.arange(len(counts)), owners[:, None] % counts]
        between = np.zeros((sources.max() + 1, targets.max() + 1), np.int64)
        np.add.at(
            between,
            (np.broadcast_to(owners[:, None], crosses.shape)[crosses], writers[crosses]),
            sizes[crosses],
        )
        return int(between.max()) * self.dtype.itemsize

    def run(self, src: CellArrays, dst: CellArrays, *, conjugate: bool = False) -> None:
        """Move everything. Collective over the ranks that have something to send or receive.

        The local arrays are by the indices of the cells that this rank reads and writes.
        """
        self.start(src, dst, conjugate=conjugate, slots=SLOTS).finish()

    def start(
        self,
        src: CellArrays,
        dst: CellArrays,
        *,
        conjugate: bool = False,
        slots: int | None = None,
    ) -> _ExchangeTransfer:
        """Start moving; the arrays are in use until ``finish()``. Without ``slots`` all messages start at once."""
        return _ExchangeTransfer(self, src, dst, conjugate, slots)


def message_elements(itemsize: int) -> int:
    """Return how many elements there are in a message at most. Local."""
    return max(1, MESSAGE_BYTES // itemsize)


def piece_of(src: Side, source: Cell, dst: Side, target: Cell) -> Piece:
    """Return what a cell of ``src`` and one of ``dst`` share."""
    rows = intersect(src.rows, source.coords[0], dst.rows, target.coords[0])
    return Piece(rows, intersect(src.cols, source.coords[1], dst.cols, target.coords[1]))


def _pairs(me: int, src: Side, dst: Side) -> list[tuple[int, int]]:
    """Return the cells of ``src`` and of ``dst`` that share elements and of which rank ``me`` can access one.

    Each rank looks at the rows and columns of its own cells, not at all pairs of cells.
    """
    rows, cols = common_counts(src.rows, dst.rows), common_counts(src.cols, dst.cols)
    pairs: set[tuple[int, int]] = set()
    for i in _accessible(src, me):
        down, across = (
            counts[x].tolist() for counts, x in zip((rows, cols), src.cells[i].coords, strict=True)
        )
        pairs.update((i, j) for j in _within(dst, down, across))
    for j in _accessible(dst, me):
        down, across = (
            counts[:, x].tolist() for counts, x in zip((rows, cols), dst.cells[j].coords, strict=True)
        )
        pairs.update((i, j) for i in _within(src, down, across))
    return sorted(pairs)


def _accessible(side: Side, rank: int) -> list[int]:
    return [i for i, cell in enumerate(side.cells) if rank in cell.ranks]


def _within(side: Side, rows: Sequence[int], cols: Sequence[int]) -> list[int]:
    """Return the cells whose process row and process column are not 0 in ``rows`` and ``cols``."""
    return [i for i, cell in enumerate(side.cells) if rows[cell.coords[0]] and cols[cell.coords[1]]]


def _sizes(src: Side, dst: Side) -> NDArray[np.int64]:
    """Return how many elements each cell of ``src`` and each cell of ``dst`` share."""
    sources, targets = src.cells.coords, dst.cells.coords
    rows, cols = common_counts(src.rows, dst.rows), common_counts(src.cols, dst.cols)
    sizes: NDArray[np.int64] = (
        rows[sources[:, None, 0], targets[:, 0]] * cols[sources[:, None, 1], targets[:, 1]]
    )
    return sizes


def ends(source: tuple[int, ...], target: tuple[int, ...]) -> Coords:
    """Return the ranks that read and write what two cells share: the same rank if possible."""
    owner = source[0]
    if owner in target:
        return owner, owner
    both = [rank for rank in source[1:] if rank in target]
    if both:
        return both[owner % len(both)], both[owner % len(both)]
    return owner, target[owner % len(target)]


class _ExchangeTransfer:
    """An exchange in progress."""

    def __init__(
        self,
        exchange: Exchange,
        src: CellArrays,
        dst: CellArrays,
        conjugate: bool,
        slots: int | None,
    ) -> None:
        self._comm = exchange._comm
        self._src, self._dst = src, dst
        self._conjugate = conjugate
        self._order = exchange.order
        self._dtype = exchange.dtype
        limit = exchange._limit if slots is not None else 1 << 62
        queues = {rank: self._messages(parts, limit) for rank, parts in exchange.sends.items()}
        self._outgoing = deque(_in_turn(queues, self._comm.rank))
        queues = {rank: self._messages(parts, limit) for rank, parts in exchange.receives.items()}
        self._incoming = deque(_in_turn(queues, self._comm.rank, receives=True))
        self._own = deque(self._messages(exchange.copies, limit))
        self._spare: list[Array] = []
        sources = min(len(queues), _AWAITED)
        self._slots, self._weight = (1 << 62, 1) if slots is None else (slots * sources, slots)
        self._awaited = 0  # slots in use
        self._requests: list[Request] = []
        # With each request: source (-1 if this rank sends), part to unpack, the message, its flat buffer, and the
        # requests of the message's earlier chunks.
        self._after: list[tuple[int, _CellPair | None, Array, Array | None, list[Request]]] = []
        self._receive()
        self._free = len(self._outgoing) if slots is None else slots
        self._fill()
        while slots is None and self._own:
            self._copy_own()

    def _messages(self, parts: Sequence[_CellPair], limit: int) -> list[_CellPair]:
        """Cut parts into messages."""
        return [
            _CellPair(part.src, part.dst, piece)
            for part in parts
            for piece in part.piece.split(limit, self._order)
        ]

    def _copy_own(self) -> None:
        part = self._own.popleft()
        copy(
            self._dst[part.dst],
            self._src[part.src],
            part.piece,
            conjugate=self._conjugate,
        )

    def _fill(self) -> None:
        """Pack and send messages while there are free slots."""
        while self._free and self._outgoing:
            self._free -= 1
            rank, part = self._outgoing.popleft()
            source = self._src[part.src]
            message, flat = None, None
            if source.dtype == self._dtype and not self._conjugate:
                message = part.piece.region(source, self._order, source=True)
            if message is None:
                message, flat = self._buffer(part.piece)
                copy(message, source, part.piece.packed(), conjugate=self._conjugate)
            self._post(self._comm.isend(message, rank), -1, None, message, flat)

    def _receive(self) -> None:
        """Post the next receives; one that needs a buffer takes several slots.

        All ranks go through the messages in one order, that of turns, and the first of them that is not there yet is
        always both being sent and awaited: so it arrives.
        """
        while self._incoming and self._awaited < self._slots:
            rank, part = self._incoming.popleft()
            target = self._dst[part.dst]
            place = (
                part.piece.region(target, self._order, source=False) if target.dtype == self._dtype else None
            )
            if place is not None:
                self._awaited += 1
                self._post(self._comm.irecv(place, rank), rank, None, place, None)
                continue
            self._awaited += self._weight
            message, flat = self._buffer(part.piece)
            self._post(self._comm.irecv(message, rank), rank, part, message, flat)

    def _buffer(self, piece: Piece) -> tuple[Array, Array]:
        """Return a contiguous array for a piece, and the flat buffer that contains it."""
        fitting = next((i for i, spare in enumerate(self._spare) if spare.size >= piece.size), None)
        flat = np.empty(piece.size, self._dtype) if fitting is None else self._spare.pop(fitting)
        rows, cols = piece.shape
        part = flat[: piece.size]
        return (part.reshape(rows, cols) if self._order == "C" else part.reshape(cols, rows).T), flat

    def _post(
        self, requests: list[Request], rank: int, part: _CellPair | None, message: Array, flat: Array | None
    ) -> None:
        """Remember the requests of a message, and what to do when all of it has arrived."""
        self._requests.append(requests[-1])
        self._after.append((rank, part, message, flat, requests[:-1]))

    def finish(self) -> None:
        """Wait until everything that this rank sends and receives has reached its place."""
        while self._requests:
            if not self._own:
                self._go_on(self._comm.wait_some(self._requests))
            elif done := self._comm.test_some(self._requests):
                self._go_on(done)
            else:  # make own copies while nothing has arrived
                self._copy_own()
        while self._own:
            self._copy_own()

    def _go_on(self, done: Sequence[int]) -> None:
        """Take these messages out of the list, do what follows each, and start the next ones."""
        taken, gone = [self._after[i] for i in done], set(done)
        self._requests, self._after = (
            [x for i, x in enumerate(each) if i not in gone] for each in (self._requests, self._after)
        )
        for rank, part, message, flat, earlier in taken:
            for request in earlier:  # chunks arrive in any order
                self._comm.wait(request)
            if part is not None:
                copy(self._dst[part.dst], message, part.piece.unpacked())
            if flat is not None:
                self._spare.append(flat)
            if rank == -1:
                self._free += 1
                self._fill()
            else:
                self._awaited -= 1 if part is None else self._weight
                self._receive()


def _in_turn(
    queues: dict[int, list[_CellPair]], me: int, *, receives: bool = False
) -> list[tuple[int, _CellPair]]:
    """Return all messages, one for each rank in turn, so that all receivers are busy.

    In its first turn a rank sends to the one after it and receives from the one before it, and so on: both ends of a
    message have it in the same turn.
    """
    ranks = sorted(queues, key=lambda rank: (rank > me, -rank) if receives else (rank < me, rank))
    longest = max(map(len, queues.values()), default=0)
    return [(rank, queues[rank][i]) for i in range(longest) for rank in ranks if i < len(queues[rank])]
