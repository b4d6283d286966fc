# SPDX-License-Identifier: Apache-2.0
"""How GPU ranks exchange data: by copy engines if they reach each other's memory, otherwise by NCCL's messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...comm import Agreement, CellArrays, Exchange, Side
from ...comm.communicator import flat
from ...dtypes import is_float8, real_dtype
from ...layout.intersection import Piece, both_views
from ..protocol import SHARE, Transfer, Transport
from .gpu_operations import GpuOperations
from .kernels.views import View, moves, transposing_moves
from .runtime.inbox import Inbox
from .session import Session
from .types import carried, stored_dtype

if TYPE_CHECKING:
    from ..protocol import Engine

Array = Any

_MOVES = "ahead, moves"  # a stream of high priority
_BEFORE = "before moves"  # the mark of what it waits for


class GpuTransport(Transport):
    """See ``engines.protocol.Transport``. Making one is local.

    Args:
        session: whose communicators, streams and peers are used.
        operations: the operations whose buffers are used.
    """

    why_not_shared = "GPUs share no memory: each needs its own slabs"

    def __init__(self, session: Session, operations: GpuOperations) -> None:
        self._session, self._runtime = session, session.runtime
        runtime = session.runtime
        self.comm = runtime.comm
        self._cupy, self.nccl, self._operations = runtime.cupy, session.nccl, operations
        self.rank, self.size = runtime.rank, runtime.size
        self.nodes = tuple((rank,) for rank in range(self.size))  # no memory shared
        self._stream = runtime.cupy.cuda.Stream(non_blocking=True)
        windows = session.gpu.windows
        self.near = frozenset(windows.members if windows is not None else ())
        self.inbox = None if windows is None else Inbox(session.gpu)

    @property
    def domains(self) -> Sequence[tuple[int, ...]]:
        return self._session.domains

    @property
    def one_stream(self) -> bool:
        """Whether no copy engines push: they have a stream of their own."""
        return self.inbox is None

    def message_bytes(self, exchange: Exchange) -> int:
        """Return how many bytes the packed messages of an exchange take, here and at the receivers. Local."""
        return 2 * self.size * exchange.largest_bytes if self.pushes(exchange) else 0

    def pushes(self, exchange: Exchange) -> bool:
        """Return whether messages to ranks whose memory this GPU reaches are pushed by copy engines. Local."""
        largest = exchange.largest_bytes
        fits = self.inbox is not None and largest > 0 and self.inbox.takes(largest)
        return fits and not self.by_all_gather(exchange)

    def gathers(self, src: Side, dst: Side, dtype: np.dtype) -> bool:
        return self.by_all_gather(self.exchange(src, dst, dtype))

    def by_all_gather(self, exchange: Exchange) -> bool:
        """Return whether NCCL's AllGather does an exchange: it sends to each node once, in larger chunks. Local."""
        return len(self.domains) > 1 and exchange.gathers

    def start(self, sends: Sequence[tuple[Array, int]], receives: Sequence[tuple[Array, int]]) -> Transfer:
        """Queue messages, as one group, after what CuPy's current stream has so far. Local."""
        arrays = [array for array, _ in (*sends, *receives)]
        return self.beside(lambda stream: self.nccl.exchange(stream, sends, receives), arrays)

    def beside(self, queue: Callable[[int], None], arrays: list[Array]) -> Transfer:
        """Queue NCCL's work on a separate stream, after what is on CuPy's current stream so far. Local."""
        cupy = self._cupy
        self._runtime.follow_stream()
        event = cupy.cuda.Event(disable_timing=True)
        event.record(cupy.cuda.get_current_stream())
        self._stream.wait_event(event)
        queue(self._stream.ptr)
        done = cupy.cuda.Event(disable_timing=True)
        done.record(self._stream)
        return _NcclMessages(cupy, done, arrays)

    def start_exchange(
        self,
        exchange: Exchange,
        src: CellArrays,
        dst: CellArrays,
        *,
        conjugate: bool = False,
        slots: int | None = None,
    ) -> Transfer:
        """Queue an exchange: messages are packed and sent, and ``finish`` unpacks those received. Collective."""
        self._runtime.follow_stream()  # all exchanges share boxes and flags
        under_way = _QueuedExchange(self, self._cupy, exchange, src, dst, conjugate, alone=slots is not None)
        under_way.start()
        return under_way

    @contextmanager
    def ahead(self, *, follows: bool = False) -> Iterator[Callable[[], None]]:
        """Return a context whose moves run beside what the caller's stream has since the last one. Local."""
        gpu, caller = self._session.gpu, self._cupy.cuda.get_current_stream()

        def join() -> None:
            with self._runtime.on(caller):
                gpu.use_current_stream()
                gpu.follow("main", _MOVES)
                gpu.mark(_BEFORE, "main")
            gpu.use_current_stream()

        self._runtime.follow_stream()
        gpu.use_current_stream()
        if follows:
            gpu.mark(_BEFORE, "main")
        gpu.await_mark(_MOVES, _BEFORE)
        with self._runtime.on(gpu.stream(_MOVES)):
            yield join
        gpu.use_current_stream()

    def copy_piece(self, dst: Array, src: Array, piece: Piece, *, conjugate: bool = False) -> None:
        """Queue the copy of a piece of one local array to where it belongs in another, converting the type. Local.

        Kernels copy at the speed of memory; CuPy copies what is converted.
        """
        conjugate = conjugate and src.dtype.kind == "c"
        gpu, minor = self._session.gpu, _contiguous(dst, src)
        if dst.dtype != src.dtype or (conjugate and not _aligned(dst, src)):
            _copy_values(dst, src, piece, conjugate)
            return
        stream = self._cupy.cuda.get_current_stream()
        if minor is None:
            if dst.strides[0] != dst.itemsize:
                dst, src, piece = dst.T, src.T, piece.T
            if not _turns(dst, src):
                _copy_values(dst, src, piece, conjugate)
                return
            for turned in transposing_moves(dst, src, piece):
                gpu.kernels.transpose(stream, *turned, dst.itemsize, conjugate=conjugate)
            return
        by_rows = minor == 1
        to, of = (View.of(array if by_rows else array.T) for array in (dst, src))
        lines, runs = (piece.rows, piece.cols) if by_rows else (piece.cols, piece.rows)
        gpu.kernels.move(stream, moves(to, of, lines, runs), conjugate=dst.itemsize if conjugate else 0)

    def sum_ranks(self, array: Array) -> None:
        if self.size == 1 or array.size == 0:
            return
        self._runtime.follow_stream()
        self.nccl.add_up(flat(array).view(real_dtype(array.dtype)))

    def fence(self) -> None:
        """Do nothing: GPUs share no buffers. Local."""

    def buffer(self, name: str, nbytes: int, *, shared: bool) -> Array:
        return self._operations.bytes(name, nbytes, "transport")

    def _available(self) -> int:
        return int(self._runtime.available_bytes * SHARE) + self._runtime.arena.held("transport")

    def carries(self, dtype: np.dtype, asked: np.dtype | None) -> np.dtype:
        """Return the type asked for, by default the result's, or bfloat16 if that has 8 bits. Local."""
        return carried(dtype, asked)


class _NcclMessages:
    """Messages under way, with the arrays that they need."""

    def __init__(self, cupy: Any, done: Any, arrays: list[Array]) -> None:
        self._cupy, self._done, self._arrays = cupy, done, arrays

    def done(self) -> bool:
        """Return False: whether they have ended is not asked. Local."""
        return False

    def finish(self) -> None:
        """Let CuPy's current stream wait for the messages. Local."""
        self._cupy.cuda.get_current_stream().wait_event(self._done)
        self._arrays = []


class _QueuedExchange:
    """An exchange under way: messages to ranks whose memory this GPU reaches are pushed, others are NCCL's.

    If it is ``alone``, nothing is queued before it is finished, and NCCL's are on CuPy's current stream.
    """

    def __init__(
        self,
        transport: GpuTransport,
        cupy: Any,
        exchange: Exchange,
        src: CellArrays,
        dst: CellArrays,
        conjugate: bool,
        *,
        alone: bool,
    ) -> None:
        self._transport, self._cupy, self._exchange, self._alone = transport, cupy, exchange, alone
        self._src, self._dst = src, dst
        self._order, self._kind = exchange.order, stored_dtype(exchange.dtype)
        self._conjugate = conjugate and self._kind.kind == "c"
        self._near = transport.near if transport.pushes(exchange) else frozenset()
        self._arriving: list[tuple[Any, Array]] = []
        self._end: Callable[[Mapping[int, Callable[[int], None]]], None] | None = None
        self._messages: Transfer | None = None

    def start(self) -> None:
        """Queue what this rank sends and keeps. Collective."""
        exchange, near, transport = self._exchange, self._near, self._transport
        if near:
            assert transport.inbox is not None
            messages = {
                rank: (self._nbytes(exchange.sends[rank]), partial(self._pack, exchange.sends[rank]))
                for rank in {*exchange.alike.values()}
            }
            packs = {rank: messages[same] for rank, same in exchange.alike.items() if rank in near}
            self._end = transport.inbox.start(packs, exchange.largest_bytes)
        sends, receives = [], []
        gathers = transport.by_all_gather(exchange)
        for rank in () if gathers else sorted({*exchange.sends, *exchange.receives} - near):
            sends += [(self._message(part), rank) for part in exchange.sends.get(rank, ())]
            receives += [(self._place(part), rank) for part in exchange.receives.get(rank, ())]
        if gathers:
            self._gather()
        elif sends or receives:
            arrays = [array for array, _ in (*sends, *receives)]
            self._send(lambda stream: transport.nccl.exchange(stream, sends, receives), arrays)
        for part in exchange.copies:
            of, to = self._src[part.src], self._dst[part.dst]
            transport.copy_piece(to, of, part.piece, conjugate=self._conjugate)

    def _send(self, queue: Callable[[int], None], arrays: list[Array]) -> None:
        """Queue NCCL's work on arrays."""
        if self._alone:
            queue(self._cupy.cuda.get_current_stream().ptr)
        else:
            self._messages = self._transport.beside(queue, arrays)

    def _gather(self) -> None:
        """Queue an AllGather of all ranks' parts, which are unpacked when they have come."""
        mine = self._message(next(iter(self._exchange.sends.values()))[0])
        everyones = self._cupy.empty((self._transport.size, mine.size), self._kind)
        for rank, (part,) in self._exchange.receives.items():
            shape = part.piece.shape if self._order == "C" else part.piece.shape[::-1]
            there = everyones[rank].reshape(shape)
            self._arriving.append((part, there if self._order == "C" else there.T))
        places = int(mine.data.ptr), int(everyones.data.ptr), mine.nbytes
        self._send(lambda stream: self._transport.nccl.gather_at(stream, *places), [mine, everyones])

    def _message(self, part: Any) -> Array:
        """Return the contiguous entries of a message to NCCL: in the local array, or packed."""
        source, message = self._src[part.src], None
        if source.dtype == self._kind and not self._conjugate:
            message = part.piece.region(source, self._order, source=True)
        if message is None:
            message = _empty(self._cupy, part.piece.shape, self._kind, self._order)
            self._transport.copy_piece(message, source, part.piece.packed(), conjugate=self._conjugate)
        return _flat(message, self._order)

    def _place(self, part: Any) -> Array:
        """Return where a message from NCCL arrives: in the local array, or where it is unpacked from."""
        target, place = self._dst[part.dst], None
        if target.dtype == self._kind:
            place = part.piece.region(target, self._order, source=False)
        if place is None:
            place = _empty(self._cupy, part.piece.shape, self._kind, self._order)
            self._arriving.append((part, place))
        return _flat(place, self._order)

    def finish(self) -> None:
        """Let CuPy's current stream wait for the messages, and unpack them. Local."""
        if self._end is not None:
            pushed = {rank: parts for rank, parts in self._exchange.receives.items() if rank in self._near}
            self._end({rank: partial(self._unpack, parts) for rank, parts in pushed.items()})
            self._end = None
        if self._messages is not None:
            self._messages.finish()
            self._messages = None
        self._read(self._arriving)
        self._arriving = []

    def _nbytes(self, parts: Sequence[Any]) -> int:
        return int(sum(part.piece.size for part in parts) * self._kind.itemsize)

    def _pack(self, parts: Sequence[Any], at: int) -> None:
        """Queue the writing of a message at an address."""
        for part, message in self._views(parts, at):
            source = self._src[part.src]
            self._transport.copy_piece(message, source, part.piece.packed(), conjugate=self._conjugate)

    def _unpack(self, parts: Sequence[Any], at: int) -> None:
        """Queue the reading of a message at an address."""
        self._read(self._views(parts, at))

    def _read(self, messages: Iterable[tuple[Any, Array]]) -> None:
        for part, message in messages:
            self._transport.copy_piece(self._dst[part.dst], message, part.piece.unpacked())

    def _views(self, parts: Sequence[Any], at: int) -> Iterator[tuple[Any, Array]]:
        """Yield each part of a message with the memory that it is in, from an address on."""
        cuda = self._cupy.cuda
        for part in parts:
            nbytes = self._nbytes([part])
            memory = cuda.MemoryPointer(cuda.UnownedMemory(at, nbytes, self._transport.inbox), 0)
            shape = part.piece.shape if self._order == "C" else part.piece.shape[::-1]
            array = self._cupy.ndarray(shape, self._kind, memory)
            yield part, array if self._order == "C" else array.T
            at += nbytes


def _contiguous(dst: Array, src: Array) -> int | None:
    """Return the dimension along which both arrays are contiguous, None if there is none."""
    both = zip(dst.strides, src.strides, strict=True)
    found = [i for i, pair in enumerate(both) if set(pair) == {src.itemsize}]
    return found[-1] if found else None


def _turns(dst: Array, src: Array) -> bool:
    """Return whether rows of one array and columns of the other are contiguous, and all entries are aligned."""
    return dst.strides[0] == dst.itemsize == src.strides[1] and _aligned(dst, src)


def _aligned(dst: Array, src: Array) -> bool:
    """Return whether all entries are at multiples of their size."""
    places = (int(dst.data.ptr), int(src.data.ptr), *dst.strides, *src.strides)
    return not any(place % dst.itemsize for place in places)


def _copy_values(dst: Array, src: Array, piece: Piece, conjugate: bool) -> None:
    for to, of in both_views(dst, src, piece):
        to[...] = of.conj() if conjugate else of


def _empty(cupy: Any, shape: tuple[int, int], dtype: np.dtype, order: str) -> Array:
    return cupy.empty(shape, dtype) if order == "C" else cupy.empty(shape[::-1], dtype).T


def _flat(array: Array, order: str) -> Array:
    """Return the elements of a contiguous array in memory order."""
    return (array if order == "C" else array.T).reshape(-1)


PANEL_BYTES = 64 << 20  # that a rank stages at once, about


def put(
    engine: Engine, src: Side, values: CellArrays, dst: Side, arrays: CellArrays, dtype: np.dtype
) -> None:
    """Queue the move of arrays on the host to GPUs, converting their type: see ``Engine.put``. Collective."""
    if src.order == "F":
        src, dst, values, arrays = src.T, dst.T, _turned(values), _turned(arrays)
    for panel, staged in _panels(engine, src, values, dtype):
        given = src.lines(values, *panel)
        with Agreement(engine.transport.comm, "staging"):  # copies take memory, too
            for i, lines in given.items():
                engine.from_host(staged[i], lines.astype(dtype, copy=False) if is_float8(dtype) else lines)
        _move(engine, src.band(*panel), staged, dst.band(*panel), dst.lines(arrays, *panel), dtype)


def get(
    engine: Engine, src: Side, arrays: CellArrays, dst: Side, values: CellArrays, dtype: np.dtype
) -> None:
    """Move arrays on GPUs to arrays on the host of the same type: see ``Engine.get``. Collective."""
    if dst.order == "F":
        src, dst, values, arrays = src.T, dst.T, _turned(values), _turned(arrays)
    for panel, staged in _panels(engine, dst, values, dtype):
        wanted = dst.lines(values, *panel)
        _move(engine, src.band(*panel), src.lines(arrays, *panel), dst.band(*panel), staged, dtype)
        for i, lines in wanted.items():
            engine.to_host(staged[i], lines)


def _move(engine: Engine, src: Side, of: CellArrays, dst: Side, to: CellArrays, dtype: np.dtype) -> None:
    transport = engine.transport
    transport.start_exchange(transport.exchange(src, dst, dtype), of, to).finish()


def _turned(arrays: CellArrays) -> CellArrays:
    return {i: array.T for i, array in arrays.items()}


def _panels(
    engine: Engine, side: Side, values: CellArrays, dtype: np.dtype
) -> Iterator[tuple[tuple[int, int], CellArrays]]:
    """Yield the rows of each panel, and where each cell of the host's ``side`` is staged. Collective."""
    rows, step = side.rows.extent, max(1, PANEL_BYTES // max(1, max(side.cols.counts()) * dtype.itemsize))
    if rows == 0 or side.cols.extent == 0:
        return
    with Agreement(engine.transport.comm, "staging"):
        room = {
            i: engine.empty((min(step, rows), array.shape[1]), dtype, "C", array.shape[1])
            for i, array in values.items()
        }
    for start in range(0, rows, step):
        panel = start, min(rows, start + step)
        part = side.rows.window(*panel)
        yield panel, {i: array[: part.count(side.cells[i].coords[0])] for i, array in room.items()}
