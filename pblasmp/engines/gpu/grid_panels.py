# SPDX-License-Identifier: Apache-2.0
"""Panels of factorizations on GPUs: a rank's own, queued, and those that the ranks of a process column share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

import numpy as np

from ..dense.factor_panels import OwnPanels
from ..dense.panel_shape import PanelShape
from ..operations import Operations
from ..protocol import Engine
from .kernels.views import leading
from .runtime.inbox import Deliveries
from .session import session_of

Array = Any

_LANE = "ahead"
BUFFERS = Deliveries.count  # one is read by the update, one by the panel ahead, one arrives
TOGETHER = 2  # panels that update others at once: products over more columns read and write these less often
LARGE_PANEL = 64 << 20  # bytes of a panel that copy engines deliver, at least: they begin later than NCCL


class QueuedPanels(OwnPanels):
    """A GPU's own panels, which all others get. Nothing waits on the host. Making one is local.

    Copy engines deliver large ones if all GPUs reach each other; NCCL broadcasts the others.

    Two streams work at the same time. On "ahead", of the highest priority, a panel is updated, factored and broadcast;
    on the caller's stream the rest is updated with the panel before. Events order them.
    """

    def __init__(self, engine: Engine, array: Array, *about: Any, given: bool = False) -> None:
        super().__init__(engine, array, *about, given=given)
        session = session_of(engine)
        self._cuda, self._nccl, self._gpu = session.runtime.cupy.cuda, session.nccl, session.gpu
        self._operations: Any = engine.operations  # GpuFactorOperations, which makes these
        self._workers = self.shape.workers
        self._main: Any = None
        self._updated: Any = None  # an event: the panel after the next may be worked on
        self._ready: dict[int, Any] = {}  # events by buffer: the panel has arrived
        self._free: dict[int, Any] = {}  # events by buffer: the panel in it has been used
        self._reads: int | None = None  # the buffer that the caller's stream reads
        self._buffers: list[Array] = []  # flat
        self._together = 1  # panels side by side in a buffer
        self._deliveries = None
        if not self._gpu.why_no_windows and 1 < self._workers == self._gpu.size:
            self._deliveries = Deliveries(self._gpu, "panel")

    @staticmethod
    def extra_bytes(
        shape: PanelShape, dtype: np.dtype, rank: int, carried: Sequence[int], *, delays: bool | None
    ) -> int:
        """See ``FactorPanels``: panels that travel, and one for what solves and updates keep. Local."""
        del rank
        nbytes = _elements(shape, shape.group) * dtype.itemsize
        if shape.workers > 1 and delays is not None:
            panels = _elements(shape, TOGETHER if delays else 1) * dtype.itemsize
            nbytes += BUFFERS * Deliveries.size(panels, carried)
        return nbytes

    def _stream(self) -> Any:
        return self._gpu.stream(_LANE)

    def _event(self, stream: Any) -> Any:
        event = self._cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def begin(self, *, delays: bool = False) -> None:
        """Begin on CuPy's current stream: work ahead waits for what it has so far. Collective the first time.

        With ``delays`` most panels are updated with two others at a time, and read two at a time.
        """
        together = TOGETHER if delays else 1
        if self._workers > 1 and (not self._buffers or together > self._together):
            self._together = together
            self._buffers = self._made()
        self._together = together
        self._main = self._cuda.get_current_stream()
        self._ready, self._free, self._reads, self._updated = {}, {}, None, None
        self._stream().wait_event(self._event(self._main))

    def _made(self) -> list[Array]:
        """Return the buffers of panels that are sent, as they are in memory."""
        count, deliveries = _elements(self.shape, self._together), self._deliveries
        if deliveries is None:
            scratch = self._operations.scratch
            return [scratch(f"panel {i}", (1, count), self.dtype)[0] for i in range(BUFFERS)]
        xp, nbytes = self._operations.xp, count * self.dtype.itemsize
        about = self.about(0) if self.shape.panels else []
        deliveries.reserve(deliveries.size(nbytes, [each.nbytes for each in about]))
        memory = [xp.cuda.UnownedMemory(deliveries.address(i), nbytes, deliveries) for i in range(BUFFERS)]
        return [xp.ndarray(count, self.dtype, xp.cuda.MemoryPointer(each, 0)) for each in memory]

    def ahead(self) -> AbstractContextManager[None]:
        """Return a context for work on the panel after the next, on the stream "ahead". Local."""
        if self._updated is not None:
            self._stream().wait_event(self._updated)
        return self._beside()

    def later(self, k: int) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield panel ``k + 1`` if it is this rank's, then ``k + 2``, then all others together. Local.

        The others come only when all panels that are side by side with ``k`` are there.
        """
        rest, first = [j for j in self.mine if j > k], self._first(k)
        for j in (k + 1, k + 2):
            if rest and rest[0] == j:
                yield k if j == k + 1 else first, (rest.pop(0),)
            if j == k + 2:
                self._updated = self._event(self._main)
        if rest and k + 1 - first == self._together:
            yield first, rest

    def joined(self, first: int, k: int) -> Array:
        return self._side_by_side(first, k, self.shape.bounds(first)[0], self.shape.rows)

    def _side_by_side(self, first: int, k: int, top: int, stop: int) -> Array:
        """Return rows of panels ``first`` to ``k``, from their buffer, if they have traveled."""
        if self._workers == 1:
            return self.run(range(first, k + 1))[top:stop]
        rows, cols = stop - top, self.shape.bounds(k)[1] - self.shape.bounds(first)[0]
        return self._buffers[self._slot(k)][: rows * cols].reshape(cols, rows).T

    def subtract(self, operations: Any, panel: Any, k: int, blocks: Sequence[Sequence[int]]) -> None:
        """Queue the updates of panels on a few streams, by addresses: views take most of the host's time. Local."""
        at, ld = place_of(panel)
        top, item, depth = k * self.shape.width, self.dtype.itemsize, panel.shape[1]
        products = []
        for numbers in blocks:
            first, stop = numbers[0] * self.shape.width, self.shape.bounds(numbers[-1])[1]
            rows = at + (first - top) * item
            updated = self.address(numbers[0], first)
            sizes = self.shape.rows - first, stop - first, depth
            products.append((sizes, (rows, ld, rows, ld, *updated)))
        operations.subtract(products, self.dtype)

    def address(self, k: int, row: int) -> tuple[int, int]:
        """Return where a row of panel ``k`` begins, one of this rank's, and its leading dimension."""
        at, ld = place_of(self.array)
        group, across = self.shape.group, self.shape.across
        column = (k // group // across * group + k % group) * self.shape.width
        return at + (column * ld + row) * self.dtype.itemsize, ld

    def _first(self, k: int) -> int:
        """Return the first of the panels that are side by side with ``k``."""
        return k - k % self._together

    def _slot(self, k: int) -> int:
        return k // self._together % BUFFERS

    def _top(self, k: int) -> int:
        """Return the row from which on panel ``k`` is sent."""
        return self.shape.bounds(self._first(k))[0]

    def exchanged(self) -> Iterator[tuple[Array, int, int]]:
        """Yield all panels before each later one, together, with its pivots: few kernels exchange rows. Local."""
        shape = self.shape
        for k in range(1, shape.steps):
            left = [j for j in self.mine if j < k]
            if left:
                first, stop = shape.bounds(k)
                yield self.run(left), first, min(stop, shape.rows)

    def failed(self, k: int) -> bool:
        """Return False: what was found is on the GPU, and is read at the end. Local."""
        return False

    def publish(self, k: int) -> None:
        """Queue the broadcast of panel ``k`` after what CuPy's current stream has. Local."""
        self._send(k, self.own(k)[self._top(k) :])

    def _send(self, k: int, panel: Array) -> None:
        if self._workers > 1:
            self._broadcast(k, panel)
        self._ready[self._slot(k)] = self._event(self._cuda.get_current_stream())

    def _broadcast(self, k: int, panel: Array) -> None:
        """Queue a broadcast on CuPy's current stream; ``panel`` is the owner's, or only has the shape."""
        slot, owner, stream = self._slot(k), self.shape.owner(k), self._cuda.get_current_stream()
        if slot in self._free:
            stream.wait_event(self._free.pop(slot))
        buffer, about = self._buffer(k, len(panel)), self.about(k)
        if owner == self.rank:
            self._operations.copy_panel(buffer, panel)
        if self._deliveries is not None and buffer.nbytes >= LARGE_PANEL:
            beside = [(int(each.data.ptr), each.nbytes) for each in about]
            start = int(buffer.data.ptr) - self._deliveries.address(slot)
            self._deliveries.deliver(_LANE, slot, owner, buffer.nbytes, beside, start=start)
        else:
            self._nccl.broadcast(int(stream.ptr), [each for each in (buffer, *about) if each.size], owner)

    def _buffer(self, k: int, rows: int) -> Array:
        first, stop = self.shape.bounds(k)
        at = rows * (first - self._top(k))
        return self._buffers[self._slot(k)][at : at + rows * (stop - first)].reshape(stop - first, rows).T

    def fetch(self, k: int) -> Array:
        top = self._top(k)
        return self._fetched(k, top, self.shape.rows)[self.shape.bounds(k)[0] - top :]

    def _fetched(self, k: int, first: int, stop: int) -> Array:
        buffer = None if self._workers == 1 else self._buffer(k, stop - first)
        self._arrived(k, buffer)
        return self.own(k)[first:stop] if buffer is None else buffer

    def _arrived(self, k: int, buffer: Array = None) -> None:
        """Let the caller's stream wait until panel ``k`` is there: in ``buffer``, if it is another rank's."""
        slot = self._slot(k)
        if self._reads not in (None, slot):
            self._free[self._reads] = self._event(self._main)
        if not self.has(k):
            with self._beside():
                self._send(k, buffer)
        self._main.wait_event(self._ready[slot])
        self._reads = slot

    def _beside(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._operations.beside(_LANE)
        return context

    def again(self, k: int, rows: slice) -> Array:
        """Return rows of panel ``k``, which alone travel. Local to queue, collective to run."""
        first, stop, _ = rows.indices(self.shape.rows)
        if self.has(k):
            with self._beside():
                self._send(k, self.own(k)[first:stop])
        return self._fetched(k, first, stop)

    def strips(self) -> Iterator[tuple[int, ...]]:
        """Yield the numbers of panels that come side by side in a buffer. Local."""
        for first in range(0, self.shape.panels, self._together):
            yield tuple(range(first, min(first + self._together, self.shape.panels)))

    def strip(self, numbers: Sequence[int], rows: slice) -> Array:
        for k in numbers:
            self.again(k, rows)
        first, stop, _ = rows.indices(self.shape.rows)
        return self._side_by_side(numbers[0], numbers[-1], first, stop)

    def above_kept(self) -> AbstractContextManager[None]:
        return self._with_squares() if self.given else contextlib.nullcontext()

    @contextlib.contextmanager
    def _with_squares(self) -> Iterator[None]:
        operations, squares = self._operations, self._squares()
        width = self.shape.width * self.shape.group
        room = operations.scratch("above", (width, width * len(squares)), self.dtype, "F")
        kept = [room[: len(square), i * width :][:, : len(square)] for i, square in enumerate(squares)]
        for square, copy in zip(squares, kept, strict=True):
            operations.copy_panel(copy, square)
        yield
        above = operations.xp.tri(width, k=-1, dtype=bool).T
        for square, copy in zip(squares, kept, strict=True):
            operations.copy_where(square, copy, above[: len(square), : len(square)])

    def _squares(self) -> list[Array]:
        """Return this rank's squares on the diagonal, of adjacent panels, which are updated together."""
        runs, bounds = (
            [list(run) for _, run in groupby(self.mine, lambda k: k // self.shape.group)],
            self.shape.bounds,
        )
        return [self.run(run)[bounds(run[0])[0] : bounds(run[-1])[1]] for run in runs]

    def settle(self) -> None:
        """Let CuPy's current stream wait for the work ahead. Local."""
        if self._main is not None:
            self._main.wait_event(self._event(self._stream()))


def _elements(shape: PanelShape, together: int) -> int:
    """Return how many elements a buffer has for so many panels side by side."""
    return max(1, shape.rows) * max(1, shape.width) * together


def place_of(array: Array) -> tuple[int, int]:
    """Return the address of an array in F order, and its leading dimension."""
    return int(array.data.ptr), leading(array)


Parts = list[Array]
"""A panel, or several side by side: the rows of each process row, one after another, in F order."""


class GridPanels(QueuedPanels):
    """The panels of a positive definite matrix on a grid, block-cyclic in both directions. Making one is local.

    A panel is in one process column. The rank with its diagonal block factors that and sends it to the others of the
    column; each solves for the rows that it has, and sends them to all ranks. So a panel takes as much less time as
    there are process rows, and all links are busy at once.
    """

    routines = ("cholesky",)

    def __init__(self, *about: Any, given: bool = False) -> None:
        super().__init__(*about, given=given)
        assert self.shape.grid is not None
        self._grid, rows = self.shape.grid, self.shape.described(self.dtype).rows
        self._row, self._col = self._grid.coords(self.rank)
        self._square: Array = None
        ends = [0, *(self.shape.bounds(k)[1] for k in range(self.shape.panels))]
        # where each process row has the first row of each panel's diagonal, and its end
        self._starts = [
            [rows.local_window(row, 0, end).stop for end in ends] for row in range(self._grid.nprow)
        ]

    def _head(self, k: int) -> int:
        """Return the process row that has the diagonal block of panel ``k``."""
        return k // self.shape.group % self._grid.nprow

    def _made(self) -> list[Array]:
        shape, scratch = self.shape, self._operations.scratch
        self._square = scratch("square", (shape.width, shape.width), self.dtype, "F")
        count = _elements(shape, self._together)
        return [scratch(f"panel {i}", (1, count), self.dtype)[0] for i in range(BUFFERS)]

    def potrf(self, operations: Operations, k: int) -> None:
        """Factor panel ``k``, together with the other ranks of its process column. Local to queue."""
        first, stop = self.shape.bounds(k)
        own, square, head = self.own(k), self._square[: stop - first, : stop - first], self._head(k)
        starts = self._starts[self._row]
        if self._row == head:
            diagonal = own[starts[k] : starts[k + 1]]
            operations.potrf(diagonal, self.info[k : k + 1], first)
            self._operations.copy_panel(square, diagonal)
        self._share(stop - first, head)
        below = own[starts[k + 1] :]
        left = square.conj() if self.dtype.kind == "c" else square
        operations.trsm(1, left, below.T, lower=True, unit=False)

    def _share(self, cols: int, head: int) -> None:
        """Queue the sending of a factored diagonal block in this process column. Collective over its ranks."""
        ranks, square = self._ranks(self._col), self._square[:, :cols]
        root, others = ranks[head], [rank for rank in ranks if rank != self.rank]
        sends = [(square, rank) for rank in others] if self.rank == root else []
        receives = [] if self.rank == root else [(square, root)]
        self._nccl.exchange(int(self._cuda.get_current_stream().ptr), sends, receives)

    def _ranks(self, col: int) -> list[int]:
        """Return the ranks of a process column."""
        return [self._grid.rank(row, col) for row in range(self._grid.nprow)]

    def publish(self, k: int) -> None:
        """Queue the sending of this rank's rows of panel ``k`` after what CuPy's current stream has. Local."""
        self._send(k, self.own(k)[self._starts[self._row][self._first(k)] :])

    def _broadcast(self, k: int, panel: Array) -> None:
        """Queue the exchange of a panel on CuPy's current stream; ``panel`` is this rank's part, if it has one."""
        slot, stream = self._slot(k), self._cuda.get_current_stream()
        if slot in self._free:
            stream.wait_event(self._free.pop(slot))
        parts, owners = self._parts(k, k), self._ranks(self.shape.column(k))
        sends = []
        if self.rank in owners:
            own = parts[self._row]
            self._operations.copy_panel(own, panel)
            sends = [(own, rank) for rank in range(self._grid.size) if rank != self.rank and own.size]
        receives = [
            (part, rank) for part, rank in zip(parts, owners, strict=True) if rank != self.rank and part.size
        ]
        self._nccl.exchange(int(stream.ptr), sends, receives)

    def settle(self) -> None:
        """Let all ranks know what was found, and CuPy's current stream wait for the work ahead. Collective."""
        super().settle()
        self.engine.transport.sum_ranks(self.info)  # only the rank of a diagonal block wrote to it

    def _parts(self, first: int, k: int) -> Parts:
        """Return panels ``first`` to ``k``, from the row on from which they are sent, in their buffer."""
        begin, width, end = self._first(k), self.shape.width, self.shape.bounds(k)[1]
        cols, before = end - first * width, (first - begin) * width
        buffer, parts, at = self._buffers[self._slot(k)], [], 0
        for starts in self._starts:
            rows = starts[-1] - starts[begin]
            part = buffer[at + rows * before : at + rows * (before + cols)]
            parts.append(part.reshape(cols, rows).T)
            at += rows * width * self._together
        return parts

    def fetch(self, k: int) -> Parts:
        self._arrived(k)
        parts, begin = self._parts(k, k), self._first(k)
        return [part[starts[k] - starts[begin] :] for part, starts in zip(parts, self._starts, strict=True)]

    def joined(self, first: int, k: int) -> Parts:
        return self._parts(first, k)

    def subtract(self, operations: Any, panel: Parts, k: int, blocks: Sequence[Sequence[int]]) -> None:
        """Queue the updates of panels; the rows of their columns are in the part of one process row. Local."""
        parts, own, item = [place_of(part) for part in panel], self._starts[self._row], self.dtype.itemsize
        at, ld = parts[self._row]
        products, depth = [], panel[0].shape[1]
        for numbers in blocks:
            first, end, head = numbers[0], numbers[-1] + 1, self._head(numbers[0])
            (of, ldo), other = parts[head], self._starts[head]
            sizes = own[-1] - own[first], other[end] - other[first], depth
            if 0 not in sizes:
                left, right = at + (own[first] - own[k]) * item, of + (other[first] - other[k]) * item
                products.append((sizes, (left, ld, right, ldo, *self.address(first, own[first]))))
        operations.subtract(products, self.dtype)

    def _squares(self) -> list[Array]:
        starts, blocks = self._starts[self._row], groupby(self.mine, lambda k: k // self.shape.group)
        runs = [list(run) for block, run in blocks if block % self._grid.nprow == self._row]
        return [self.run(run)[starts[run[0]] : starts[run[-1] + 1]] for run in runs]
