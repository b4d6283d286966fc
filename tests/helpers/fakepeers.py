# SPDX-License-Identifier: Apache-2.0
"""GPUs that reach each other, as the overlapped algorithms see them: streams, events, flags and barriers as a model.

peers = Peers(3)
peers.products(lambda gpu: ...)   # every rank queues its products on its own gpu
peers.run(seed=1)                 # in some order that the streams, events, flags and barriers allow

The model computes on NumPy's memory, and it keeps vector clocks: two accesses to a byte, one of them a write, that no
chain of streams, events, flags and barriers orders are a fault, whether or not the numbers came out right. So is a flag
that is raised before the last one was seen, a flag that nobody waits for, and a product that never ends.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
from ml_dtypes import finfo

from pblasmp.dtypes import DTYPES, accumulation_dtype, is_float8
from pblasmp.engines.gpu.kernels.compiler import stood_for
from pblasmp.engines.gpu.kernels.kernels import check_added
from pblasmp.engines.gpu.kernels.lt_product import PLAIN, Batch
from pblasmp.engines.gpu.kernels.one_kernel import parts_in_boxes
from pblasmp.engines.gpu.kernels.views import Blocks, Move, View
from pblasmp.engines.gpu.runtime.gpu import Gpu
from pblasmp.engines.gpu.runtime.nccl import NCCL_SUM, NCCL_TYPES
from pblasmp.engines.gpu.runtime.windows import ONE_KERNEL_INBOXES, SLOTS
from tests.helpers.fakecublas import Cublas
from tests.helpers.hardware import SHARED_MEMORY, is_legal, why_no_room, why_not_8_bits, why_not_pitches

ROOM = 1 << 16  # bytes of each rank
_OPS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "N": lambda x: x,
    "T": np.transpose,
    "C": lambda x: x.conj().T,
}
_STREAMS = 12
_BYTE = np.dtype(np.uint8)
_NCCL = {number: np.dtype(DTYPES[name]) for name, number in reversed(NCCL_TYPES.items()) if name in DTYPES}
"""Types by NCCL's numbers; those of complex ones are their parts'."""


class Fault(AssertionError):  # noqa: N818
    """What the model found."""


@dataclass
class Op:
    """Something queued: what it needs, what it does, what it reads and writes."""

    name: str
    stream: tuple[int, str]
    ready: Callable[[], bool]
    do: Callable[[np.ndarray], None]  # is given its clock, which it may join with others'
    reads: Sequence[View] = ()
    writes: Sequence[View] = ()


@dataclass
class Flag:
    up: bool = False
    raised: np.ndarray | None = None
    lowered: np.ndarray | None = None


class Array:
    """A CuPy array of the model."""

    def __init__(self, view: View, values: np.ndarray) -> None:
        self.dtype, self.shape, self.ndim, self.size = values.dtype, values.shape, values.ndim, values.size
        self.strides, self.itemsize, self.values = values.strides, values.itemsize, values
        self.data = SimpleNamespace(ptr=view.address)
        self._view = view

    def reshape(self, *shape: int) -> Array:
        return Array(self._view, self.values.reshape(*shape))

    def fill(self, value: float) -> None:
        self.values.fill(value)


class Peers:
    """``size`` GPUs.

    Args:
        size: ranks.
        skip: the synchronization to leave out: ``(rank, number)``, counted as they are queued.
        multiprocessors: of each, which decide how many pieces a product is cut into.
        domains: the ranks that reach each other's memory; by default all.
        capability: of each: 90 for 9.0.
    """

    def __init__(
        self,
        size: int,
        skip: tuple[int, int] | None = None,
        multiprocessors: int = 2,
        domains: Sequence[tuple[int, ...]] = (),
        capability: int = 90,
    ) -> None:
        self.size, self.skip = size, skip
        self.domains = list(domains) or [tuple(range(size))]
        self.freed: list[tuple[int, int]] = []
        self.memory = np.zeros((size, ROOM), np.uint8)
        self.used = [64] * size
        self.queues: dict[tuple[int, str], list[Op]] = defaultdict(list)
        self.program: list[list[Op]] = [[] for _ in range(size)]
        self.flags: dict[tuple[int, int, int], Flag] = defaultdict(Flag)  # of rank, from rank, number
        clocks = size * _STREAMS
        new_clock = partial(np.zeros, clocks, np.int16)  # new pages of memory take longer than all that runs
        for rank, other, box in itertools.product(
            range(size), range(size), range(SLOTS.count)
        ):  # free at first
            self.flags[rank, other, SLOTS.at(box)] = Flag(True, new_clock())
        self.arrivals: dict[tuple[int, str], list[np.ndarray]] = {
            (rank, "end"): [new_clock()] for rank in range(size)
        }
        self.clocks: dict[tuple[int, str], np.ndarray] = defaultdict(new_clock)
        self.joined: dict[tuple[int, str], np.ndarray] = defaultdict(new_clock)
        self.numbers: dict[tuple[int, str], int] = {}
        self.written = np.zeros((size, 2, ROOM), np.int16)  # by whom, and when
        self.read = np.zeros((size, clocks, ROOM), np.int16)
        self.meetings: dict[tuple[str, int], dict[int, Any]] = defaultdict(dict)
        # by sender and receiver, what is under way
        self.messages: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
        self.gpus = [FakePeer(self, rank, multiprocessors, capability=capability) for rank in range(size)]

    # -- memory

    def allocate(self, rank: int, nbytes: int) -> int:
        at = self.used[rank]
        self.used[rank] += -(-nbytes // 16) * 16
        assert self.used[rank] <= ROOM, "the model's memory is full"
        self.memory[rank, at : self.used[rank]] = 0xFF  # NaN in every type
        return ((rank + 1) << 32) + at

    def array(self, rank: int, values: np.ndarray, *, ld: int = 0) -> Array:
        """Return a rank's array with these values; rows ``ld`` entries apart."""
        rows, cols = values.shape
        ld = ld or cols
        view = View(self.allocate(rank, rows * ld * values.itemsize), rows, cols, max(1, ld), values.dtype)
        if values.size:
            self.of(view)[...] = values
        return Array(view, self.of(view))

    def of(self, view: View) -> np.ndarray:
        """Return the memory of a view."""
        if not view.rows * view.cols:
            return np.empty((view.rows, view.cols), view.dtype)
        rank, at = self._place(view)
        size = view.dtype.itemsize
        end = at + ((view.rows - 1) * view.ld + view.cols) * size
        if not 0 <= at <= end <= self.used[rank]:
            raise Fault(f"rank {rank}: {view} is outside of its memory")
        return np.ndarray(
            (view.rows, view.cols), view.dtype, self.memory[rank].data, at, (view.ld * size, size)
        )

    @staticmethod
    def _place(view: View) -> tuple[int, int]:
        return (view.address >> 32) - 1, view.address & 0xFFFFFFFF

    def _marks(self, kept: np.ndarray, view: View) -> np.ndarray:
        """Return what is ``kept`` of every byte of its rank, for a view: lines × rows × bytes of a row."""
        rank, at = self._place(view)
        lines, size = kept[rank], view.dtype.itemsize
        line, byte = lines.strides
        shape = len(lines), view.rows, view.cols * size
        return np.ndarray(shape, lines.dtype, lines, at * byte, (line, view.ld * size * byte, byte))

    # -- queueing

    def queue(self, op: Op, *, synchronizes: bool = False) -> None:
        rank = op.stream[0]
        if synchronizes:
            number = self.gpus[rank].synchronizations
            self.gpus[rank].synchronizations += 1
            self.gpus[rank].names.append(op.name)
            if self.skip == (rank, number):
                return
        for view in (*op.reads, *op.writes):
            owner = self._place(view)[0]
            if not any({rank, owner} <= {*ranks} for ranks in self.domains):
                raise Fault(f"{op.name}: rank {rank} does not reach the memory of rank {owner}")
        self.queues[op.stream].append(op)
        self.program[rank].append(op)

    # -- running

    def run(self, seed: int | None = None) -> None:
        """Run all that is queued: in an order by chance, or, without a seed, each rank in the order it was queued.

        Flags of free slots are up at the end: what follows would wait for them.
        """
        chance = random.Random(seed)
        lines = list(self.program) if seed is None else list(self.queues.values())
        while any(lines):
            able = [line for line in lines if line and line[0].ready()]
            if not able:
                waiting = [line[0].name for line in lines if line]
                raise Fault(f"deadlock: {waiting}")
            line = chance.choice(able)
            self._run(line.pop(0))
        self.queues.clear()
        free = {SLOTS.at(box) for box in range(SLOTS.count)}
        up = [key for key, flag in self.flags.items() if flag.up and key[2] not in free]
        if up:
            raise Fault(f"flags that nobody waited for: {up}")

    def _run(self, op: Op) -> None:
        number = self.numbers.setdefault(op.stream, len(self.numbers))
        clock = self.clocks[op.stream]
        clock[number] += 1
        now = self.joined[op.stream][number] = clock[number]
        assert now > 0, "the model's clocks are full"
        known = len(self.numbers)  # no other stream has read anything
        for view in op.reads:
            by, when = self._marks(self.written, view)
            if (when > clock[by]).any():
                raise Fault(f"{op.name} on {op.stream} reads what is being written")
            self._marks(self.read, view)[number] = now
        for view in op.writes:
            by, when = written = self._marks(self.written, view)
            read = self._marks(self.read, view)[:known]
            if (when > clock[by]).any() or (read > clock[:known, None, None]).any():
                raise Fault(f"{op.name} on {op.stream} writes what is being used")
            written[0], written[1] = number, now
        op.do(clock)


def join(clock: np.ndarray, other: np.ndarray) -> None:
    np.maximum(clock, other, out=clock)


class Launch:
    """Parts of matrices that a kernel works on, some of whose entries are addresses."""

    def __init__(self, queue: Callable[[list[Any]], Any], parts: list[Any], addresses: Sequence[int]) -> None:
        self._queue, self._parts, self._addresses = queue, parts, addresses

    def __call__(self, stream: Any) -> None:
        self._queue(self._parts)

    def at(self, bases: dict[int, int], stream: Any) -> None:
        self.placed(bases)(stream)

    def placed(self, bases: dict[int, int]) -> Launch:
        parts = []
        for part in self._parts:
            entries = list(part)
            for i, number, offset in stood_for((i, part[i]) for i in self._addresses):
                entries[i] = bases[number] + offset
            parts.append(part._make(entries) if hasattr(part, "_make") else tuple(entries))
        return Launch(self._queue, parts, self._addresses)


class Made(dict[str, Any]):
    """Objects by name, created on first use."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Any:
        self[name] = made = self._make(name)
        return made


class Event:
    """CuPy's."""

    def __init__(self, gpu: FakePeer, name: str) -> None:
        self._gpu, self.name = gpu, name
        self.seen: list[np.ndarray] = []

    def record(self, stream: Stream) -> None:
        seen, joined = [], self._gpu.joined(stream.ptr)
        self.seen = seen
        self._gpu.queue("record", stream.ptr, lambda clock: seen.extend((clock.copy(), joined.copy())))


class Stream:
    """CuPy's."""

    def __init__(self, gpu: FakePeer, name: str) -> None:
        self._gpu, self.ptr = gpu, name

    def wait_event(self, event: Event) -> None:
        seen, joined = event.seen, self._gpu.joined(self.ptr)

        def wait(clock: np.ndarray) -> None:
            join(clock, seen[0])
            join(joined, seen[1])

        name = f"{self.ptr} follows {event.name}"
        self._gpu.queue(name, self.ptr, wait, ready=lambda: bool(seen), synchronizes=not self._gpu.forks)


class Reached:
    """``windows.Windows``: symmetric memory, barriers and flags of a GPU's domain."""

    def __init__(self, gpu: FakePeer) -> None:
        self._gpu, self._peers, self.rank, self.domains = gpu, gpu.peers, gpu.rank, gpu.domains
        self.members = next(ranks for ranks in self.domains if self.rank in ranks)
        self.size = len(self.members)
        self._epochs = {"end": 0, "between": 0}

    def buffer(self, name: str) -> Any:
        everyone = self._peers.meetings["reserve " + name, 0]
        peers = {rank: everyone[rank][0] for rank in self.members if rank in everyone}
        return SimpleNamespace(peers=peers, nbytes=everyone.get(self.rank, (0, 0))[1], captured=False)

    def reserve(self, name: str, nbytes: int) -> None:
        if self.buffer(name).nbytes < nbytes:
            self._gpu.arena.generation += 1
            at = self._peers.allocate(self.rank, nbytes)
            self._peers.meetings["reserve " + name, 0][self.rank] = at, nbytes
            if name == ONE_KERNEL_INBOXES:  # all new memory is zero, but nothing else needs it
                self._peers.memory[self.rank][at & 0xFFFFFFFF :][:nbytes] = 0

    def arrive(self, stream: Stream, kind: str = "end") -> None:
        came = self._peers.arrivals.setdefault((self.rank, kind), [])
        self._gpu.queue(
            "arrive", stream.ptr, lambda clock: came.append(clock.copy()), synchronizes=kind == "end"
        )

    def await_all(self, stream: Stream, kind: str = "end") -> None:
        epoch = self._epochs[kind]
        self._epochs[kind] += 1
        everyone = [self._peers.arrivals.setdefault((rank, kind), []) for rank in self.members]
        self._gpu.queue(
            "await all" if kind == "end" else "meet", stream.ptr,
            lambda clock: [join(clock, came[epoch]) for came in everyone],
            ready=lambda: all(len(came) > epoch for came in everyone), synchronizes=True,
        )  # fmt: skip

    def meet(self, stream: Stream) -> None:
        self.arrive(stream, "between")
        self.await_all(stream, "between")

    def raise_flag(self, stream: Stream, rank: int, number: int) -> None:
        flag, me = self._peers.flags[rank, self.rank, number], self.rank

        def do(clock: np.ndarray) -> None:
            if flag.up or (flag.lowered is not None and (flag.lowered > clock).any()):
                raise Fault(f"rank {me} raises flag {number} of rank {rank} that was not seen yet")
            flag.up, flag.raised = True, clock.copy()

        self._gpu.queue(f"raise {number} of {rank}", stream.ptr, do, synchronizes=True)

    def raise_flags(self, stream: Stream, flags: Iterable[tuple[int, int]]) -> None:
        assert stream.ptr == "main", "a GEMM may run next to other streams"
        for rank, number in flags:
            self.raise_flag(stream, rank, number)

    def await_flag(self, stream: Stream, rank: int, number: int) -> None:
        flag = self._peers.flags[self.rank, rank, number]

        def do(clock: np.ndarray) -> None:
            join(clock, flag.raised)
            flag.up, flag.lowered = False, clock.copy()

        name = f"await {number} of {rank}"
        self._gpu.queue(name, stream.ptr, do, ready=lambda: flag.up, synchronizes=True)

    def await_flags(self, stream: Stream, flags: Iterable[tuple[int, int]]) -> None:
        assert stream.ptr == "main", "a GEMM may run next to other streams"
        for rank, number in flags:
            self.await_flag(stream, rank, number)


class Copies:
    """cupy.cuda.runtime, as far as it copies: from and to any GPU's memory."""

    memcpyDefault = 4  # noqa: N815

    def __init__(self, gpu: FakePeer) -> None:
        self._queue, self._of = gpu.queue, gpu.peers.of

    def memsetAsync(self, at: int, value: int, nbytes: int, stream: str) -> None:  # noqa: N802
        memory = View.of_bytes(at, nbytes)
        self._queue("clear", stream, lambda _: self._of(memory).fill(value), [], [memory])

    def memcpyAsync(self, to: int, of: int, nbytes: int, kind: int, stream: str) -> None:  # noqa: N802
        self.memcpy2DAsync(to, nbytes, of, nbytes, nbytes, 1, kind, stream)

    def memcpy2DAsync(  # noqa: N802
        self, to: int, to_pitch: int, of: int, of_pitch: int, width: int, height: int, kind: int, stream: str
    ) -> None:
        assert kind == self.memcpyDefault
        if why_not := why_not_pitches(width, height, (to_pitch, of_pitch)):
            raise Fault(why_not)
        there, here = (View(at, height, width, ld, _BYTE) for at, ld in ((to, to_pitch), (of, of_pitch)))

        def do(_: np.ndarray) -> None:
            self._of(there)[...] = self._of(here)

        self._queue("copy", stream, do, [here], [there])


class PeerKernels:
    """``Kernels``."""

    def __init__(self, gpu: FakePeer) -> None:
        self._gpu, self._queue, self._of = gpu, gpu.queue, gpu.peers.of

    def copy(self, stream: Any, to: View, of: View) -> None:
        assert (to.rows, to.cols, to.dtype) == (of.rows, of.cols, of.dtype)

        def do(_: np.ndarray) -> None:
            self._of(to)[...] = self._of(of)

        self._queue("copy", stream.ptr, do, [of], [to])

    def move(self, stream: Any, moves: Iterable[Move], *, conjugate: int = 0) -> None:
        byte = np.dtype(np.uint8)
        pairs = [
            tuple(
                View(
                    base + sum(i * s for i, s in zip(at, strides[:-1], strict=True)),
                    rows,
                    run,
                    strides[-1],
                    byte,
                )
                for base, strides in ((to, there), (of, here))
            )
            for to, there, of, here, (*counts, rows, run) in moves
            for at in itertools.product(*map(range, counts))
        ]

        def do(_: np.ndarray) -> None:
            for target, source in pairs:
                found = self._of(source)
                if conjugate and found.size:
                    found = np.conj(np.ascontiguousarray(found).view(f"c{conjugate}")).view(byte)
                self._of(target)[...] = found

        self._queue("move", stream.ptr, do, [of for _, of in pairs], [to for to, _ in pairs])

    def add(self, stream: Any, parts: Sequence[View], outs: Sequence[View], *, beta: complex = 0,
            c: View | None = None, bias: View | None = None, activation: str | None = None, scale: int = 0,
            amax: int = 0, blocks: int = 0) -> None:  # fmt: skip
        c = c if beta != 0 else None
        check_added(parts, outs, c, bias)
        exact = accumulation_dtype((*parts, *outs)[0].dtype)
        raised, scales = _number(amax), _number(scale)

        def do(_: np.ndarray) -> None:
            y = np.zeros((outs[0].rows, outs[0].cols), exact)
            y = sum((self._of(part).astype(exact) for part in parts), y)
            if beta != 0:
                y = y + exact.type(beta) * self._of(c).astype(exact)
            if bias:
                y = y + self._of(bias).astype(exact)
            y = np.maximum(y, 0) if activation == "relu" else y
            for largest in raised:
                self._of(largest)[...] = max(self._of(largest)[0, 0], abs(y).max())
            for factor in scales:
                y = y * self._of(factor)
            for out in outs:
                self._of(out)[...] = y

        reads = [*parts, *([c] if c else []), *([bias] if bias else []), *scales]
        self._queue("add", stream.ptr, do, reads, [*outs, *raised])

    def moves(self, moves: Iterable[Move]) -> list[Launch]:
        moves = list(moves)
        return [Launch(partial(self.move, self._gpu.stream("main")), moves, (0, 2))] if moves else []

    def sum(
        self, dtype: np.dtype, tiles: Sequence[Any], d: Any, x: Any, c: Any, alpha: complex, beta: complex, *,
        conjugate: bool = False, uplo: str = "", real: bool = False, deals: Any = None,
    ) -> list[Launch]:  # fmt: skip
        def stored(at: int, by_columns: bool, ld: int, rows: int, cols: int) -> tuple[View, bool]:
            return View(at, *((cols, rows) if by_columns else (rows, cols)), ld, dtype), by_columns

        def get(view: View, by_columns: bool) -> np.ndarray:
            found = self._of(view)
            return found.T if by_columns else found

        def launch(tile: Any) -> None:
            to, of, old = (
                stored(at, *how, tile.rows, tile.cols) for at, how in zip(tile[:3], (d, x, c), strict=True)
            )

            def do(_: np.ndarray) -> None:
                kind = np.conj if conjugate else np.positive
                added = alpha * kind(get(*of)) + (beta * get(*old) if beta else 0)
                inside = np.ones(added.shape, bool)
                if uplo:
                    r, q = (
                        (at // y.block * y.nprocs + y.turn) * y.block + at % y.block - y.lead
                        for at, y in (
                            (tile.i + np.arange(tile.rows) + deals[0].skipped, deals[0]),
                            (tile.j + np.arange(tile.cols) + deals[1].skipped, deals[1]),
                        )
                    )
                    r, q = r[:, None], q[None, :]
                    inside = r >= q if uplo == "L" else r <= q
                    added = np.where(r == q, added.real, added) if real else added
                np.copyto(get(*to), added, where=inside)

            self._queue("sum", "main", do, [of[0], *([old[0]] if beta else [])], [to[0]])

        return [Launch(lambda tiles: [launch(tile) for tile in tiles], list(tiles), (0, 1, 2))]


class Collectives:
    """nccl.bindings.nccl: every rank's part is there when the last one comes. Communicators are tuples of ranks."""

    def __init__(self, gpu: FakePeer) -> None:
        self._gpu, self._rank, self._of = gpu, gpu.rank, gpu.peers.of
        self._calls: dict[Any, int] = defaultdict(int)

    def group_start(self) -> None: ...

    group_end = group_start

    def collective(
        self, name: str, comm: tuple[int, ...], stream: str, of: View,
        takes: Sequence[tuple[View, Callable[[list[np.ndarray]], Any]]],
    ) -> None:  # fmt: skip
        """Queue a call: what becomes, of what all have sent, of each matrix that this rank receives."""
        came = [self._gpu.peers.arrivals.setdefault((rank, stream, comm), []) for rank in comm]
        here, number = came[comm.index(self._rank)], self._calls[stream, comm]
        self._calls[stream, comm] += 1

        def receive(clock: np.ndarray) -> None:
            for each in came:
                join(clock, each[number][0])
            for to, made in takes:
                self._of(to)[...] = made([each[number][1] for each in came])

        send = lambda clock: here.append((clock.copy(), self._of(of).copy()))  # noqa: E731
        self._gpu.queue("arrive", stream, send, [of])
        ready = lambda: all(len(each) > number for each in came)  # noqa: E731
        self._gpu.queue(name, stream, receive, [], [to for to, _ in takes], ready=ready)

    def send(self, at: int, nbytes: int, kind: int, rank: int, comm: tuple[int, ...], stream: str) -> None:
        of, box = View.of_bytes(at, nbytes), self._gpu.peers.messages[self._rank, comm[rank]]
        self._gpu.queue("send", stream, lambda clock: box.append((self._of(of).copy(), clock.copy())), [of])

    def recv(self, at: int, nbytes: int, kind: int, rank: int, comm: tuple[int, ...], stream: str) -> None:
        to, box = View.of_bytes(at, nbytes), self._gpu.peers.messages[comm[rank], self._rank]

        def do(clock: np.ndarray) -> None:
            values, sent = box.pop(0)
            join(clock, sent)
            assert values.nbytes == nbytes, "a message of another length"
            self._of(to)[...] = values

        ready = lambda: bool(box)  # noqa: E731
        self._gpu.queue("receive", stream, do, [], [to], ready=ready, synchronizes=True)

    def _sum(self, name: str, of: int, to: int, count: int, kind: int, op: int, comm: tuple[int, ...], stream: str,
             sent: int, start: int = 0, *, takes: bool = True) -> None:  # fmt: skip
        assert op == NCCL_SUM
        dtype = _NCCL[kind]
        added = lambda parts: sum(part.astype(accumulation_dtype(dtype)) for part in parts)  # noqa: E731
        mine = [(View.at(to, (1, count), dtype), lambda parts: added(parts)[:, start : start + count])]
        self.collective(name, comm, stream, View.at(of, (1, sent), dtype), mine if takes else ())

    def reduce_scatter(
        self, of: int, to: int, count: int, kind: int, op: int, comm: tuple[int, ...], stream: str
    ) -> None:
        start = comm.index(self._rank) * count
        self._sum("reduce scatter", of, to, count, kind, op, comm, stream, len(comm) * count, start)

    def reduce(
        self, of: int, to: int, count: int, kind: int, op: int, root: int, comm: tuple[int, ...], stream: str
    ) -> None:
        is_root = comm.index(self._rank) == root
        self._sum("reduce", of, to, count, kind, op, comm, stream, count, takes=is_root)

    def all_reduce(
        self, of: int, to: int, count: int, kind: int, op: int, comm: tuple[int, ...], stream: str
    ) -> None:
        self._sum("all reduce", of, to, count, kind, op, comm, stream, count)

    def all_gather(self, of: int, to: int, count: int, kind: int, comm: tuple[int, ...], stream: str) -> None:
        assert kind == 1
        parts = [View.of_bytes(to + i * count, count) for i in range(len(comm))]
        takes = [(part, itemgetter(i)) for i, part in enumerate(parts) if part.address != of]
        self.collective("all gather", comm, stream, View.of_bytes(of, count), takes)

    def broadcast(
        self, of: int, to: int, count: int, kind: int, root: int, comm: tuple[int, ...], stream: str
    ) -> None:
        assert kind == 1
        is_root = comm.index(self._rank) == root
        sent = View.of_bytes(of, count if is_root else 0)
        takes = [] if is_root and to == of else [(View.of_bytes(to, count), itemgetter(root))]
        self.collective("broadcast", comm, stream, sent, takes)


class FakePeer(Gpu):
    """``Gpu`` on one rank, on what is played of CuPy, NCCL, windows and kernels.

    Attributes:
        forks: whether streams begin to follow the main one: no signal that could be left out, but what a graph needs.
        synchronizations, names: how many and which signals this rank has queued.
    """

    def __init__(self, peers: Peers, rank: int, multiprocessors: int, capability: int = 90) -> None:
        self.peers, self.rank, self.size = peers, rank, peers.size
        self.multiprocessors, self.capability, self.domains = multiprocessors, capability, peers.domains
        self.why_no_windows, self.shared_gpus, self.forks = "", False, False
        self.synchronizations, self._calls = 0, 0
        self.names: list[str] = []
        self.scratches: dict[str, tuple[int, int]] = {}
        self._streams, self._events = Made(partial(Stream, self)), Made(partial(Event, self))
        self._cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: self._streams["main"]))
        self.arena = SimpleNamespace(generation=0, captured=False)
        self.windows, self.kernels = Reached(self), PeerKernels(self)
        self._runtime, self._nccl = Copies(self), Collectives(self)
        place = self.windows.members.index(rank)
        self._comm = tuple(range(self.size))
        self._rail = tuple(sorted(ranks[place] for ranks in self.domains if place < len(ranks)))
        cublas = Cublas(peers.of, lambda name, sizes, *queued: self.queue(name, "main", *queued))
        self.products = SimpleNamespace(cublas=cublas, solver=lambda stream: 1, multiply=self._product)
        self.agreement = lambda what, **_: nullcontext()

    def scratch(self, name: str, nbytes: int) -> int:
        if name not in self.scratches or self.scratches[name][1] < nbytes:
            if name in self.scratches:  # whoever has the old address must ask again
                at, nbytes_before = self.scratches[name]
                self.peers.freed.append((at, at + nbytes_before))
            self.scratches[name] = self.peers.allocate(self.rank, max(1, nbytes)), nbytes
        return self.scratches[name][0]

    def queue(self, name: str, stream: str, do: Any, reads: Any = (), writes: Any = (), *,
              ready: Callable[[], bool] = lambda: True, synchronizes: bool = False) -> None:  # fmt: skip
        reads, writes = ([v for v in views if v.rows * v.cols] for views in (reads, writes))
        for view in (*reads, *writes):
            if any(first <= view.address < last for first, last in self.peers.freed):
                raise Fault(f"{name}: {view} is in memory that was given back")
        op = Op(name, (self.rank, stream), ready, do, reads, writes)
        self.peers.queue(op, synchronizes=synchronizes)

    def joined(self, stream: str) -> np.ndarray:
        return self.peers.joined[self.rank, stream]

    def begin(self, *names: str) -> None:
        self.forks = True
        super().begin(*names)
        self.forks = False

    def one_kernel(self, kernel: Any, job: Any, blocks: int) -> None:
        # A block takes a multiprocessor, and waits for what others send: all must be there at once.
        if blocks > self.multiprocessors:
            raise Fault(f"one_kernel: {blocks} blocks on {self.multiprocessors} multiprocessors")
        tiles, types = kernel.tiles, (job.x.dtype, job.w.dtype, job.d.dtype)
        if why_not := why_no_room(tiles.shared_bytes, SHARED_MEMORY[self.capability]):
            raise Fault(f"one_kernel: {why_not}")
        if not tiles.mma and self.capability != 90:
            raise Fault(f"one_kernel: Hopper's instructions on {self.capability}")
        if tiles.mma and any(is_float8(dtype) for dtype in types):
            raise Fault(f"one_kernel: {types} by mma.sync")
        self._calls += 1
        Call(self, kernel, job, self._calls).queue()

    def _product(
        self, at: int, x: View, w: View, d: View, *, op_w: str, op_x: str = "N", alpha: complex = 1,
        beta: complex = 0, c: View | None = None, finish: Any = PLAIN, compute: Any = None,
        batch: Batch | None = None, lane: str = "main", once: bool = False,
    ) -> None:  # fmt: skip
        assert 0 not in (x.rows, x.cols, d.rows, d.cols), "cuBLASLt takes no empty matrices"
        for i in range(1, batch.size if batch else 1):
            assert batch is not None
            self._product(
                at, x.shifted(i * batch.x), w.shifted(i * batch.w), d.shifted(i * batch.d), op_w=op_w, op_x=op_x,
                alpha=alpha, beta=beta, c=None if c is None else c.shifted(i * batch.c), finish=finish, lane=lane,
            )  # fmt: skip
        m, k = (x.rows, x.cols) if op_x == "N" else (x.cols, x.rows)
        assert (m, d.cols) == (d.rows, w.cols if op_w == "N" else w.rows)
        assert k == (w.rows if op_w == "N" else w.cols)
        if is_float8(x.dtype) or is_float8(w.dtype):  # to cuBLASLt, W is A
            pitches = [view.ld * view.dtype.itemsize for view in (w, x, d)]
            aligned, ops = (
                [*pitches, *(view.address for view in (w, x, d))],
                (int(op_w == "T"), int(op_x != "N")),
            )
            if why_not := why_not_8_bits(self.capability, (w.dtype, x.dtype), ops, aligned):
                raise Fault(f"multiply: {why_not}")
        c = d if c is None else c
        bias = _row(finish.bias, d.cols, finish.bias_dtype or d.dtype)

        def do(_: np.ndarray) -> None:
            get = self.peers.of
            wide = np.complex128 if d.dtype.kind == "c" else np.float64
            y = alpha * (_OPS[op_x](get(x)).astype(wide) @ _OPS[op_w](get(w)).astype(wide))
            if beta != 0:
                y = y + beta * get(c).astype(wide)
            if bias:
                y = y + get(bias).astype(wide)
            y = np.maximum(y, 0) if finish.activation == "relu" else y
            get(d)[...] = y
            for largest in amax:  # overwritten, as by cuBLASLt
                get(largest)[...] = abs(y).max()

        amax = _number(finish.amax)
        reads = [x, w, *([c] if beta else []), *([bias] if bias else [])]
        self.queue("multiply", lane, do, reads, [d, *amax])

    def push(self, stream: str, to: View, of: View, *args: Any) -> None:
        assert (to.rows, to.cols, to.dtype) == (of.rows, of.cols, of.dtype)
        super().push(stream, to, of, *args)

    def _copy_3d(self, b: Blocks, stream: str) -> None:
        if not is_legal(b):
            raise Fault(f"no command copies {b}")
        for k in range(b.depth):
            places = (
                (at + k * step, ld) for at, step, ld in zip((b.to, b.of), b.slices, b.pitches, strict=True)
            )
            (to, of), kind = places, self._runtime.memcpyDefault
            self._runtime.memcpy2DAsync(*to, *of, b.width, b.height, kind, stream)

    def use(self, *arrays: Array) -> None:
        """Queue what the caller does between products: it rewrites its arrays, or ends a graph's recording."""
        views = [View.of(array) for array in arrays]

        def do(_: np.ndarray) -> None:
            seen = self.peers.joined[self.rank, "main"]
            for stream, number in self.peers.numbers.items():
                if stream[0] == self.rank and self.peers.clocks[stream][number] > seen[number]:
                    raise Fault(f"stream {stream} is not joined: no graph can record this")

        self.queue("the caller", "main", do, views, views)


def _row(address: int, cols: int, dtype: np.dtype) -> View | None:
    return View(address, 1, cols, cols, dtype) if address else None


def _number(address: int) -> list[View]:
    return [View(address, 1, 1, 1, np.dtype(np.float32))] if address else []


class Call:
    """What ``one_kernel.cu`` does, in two or three steps, each of which waits for all ranks' one before.

    A box holds a rank's tiles as one matrix. So does an inbox, which is empty again once it was read.
    """

    def __init__(self, gpu: FakePeer, kernel: Any, job: Any, epoch: int) -> None:
        self.gpu, self.kernel, self.job = gpu, kernel, job
        self.boxes, self.inboxes, self.at = job.boxes[epoch & 1], job.inboxes[epoch & 1], gpu.peers.of
        self.others = [rank for rank in range(gpu.size) if rank != gpu.rank]
        self.travels = DTYPES["bfloat16"] if is_float8(job.d.dtype) else job.d.dtype
        self.operands = [job.x, job.w, *_number(job.scale_x), *_number(job.scale_w), *_number(job.scale_d)]
        arrivals = gpu.peers.arrivals
        self.done = [arrivals.setdefault((rank, f"one_kernel {epoch}"), []) for rank in range(gpu.size)]

    def box(self, rank: int, source: int, like: View, boxes: Sequence[int] = ()) -> View:
        tiles = self.kernel.tiles
        if not (boxes or parts_in_boxes(tiles.parts, sums=self.kernel.sums)):
            source = 0
        at = (boxes or self.boxes)[rank] + source * tiles.count * tiles.image_bytes
        return View(at, like.rows, like.cols, like.cols, like.dtype)

    def product(self, rows: slice) -> np.ndarray:
        x, w = (self.at(view).astype(float) for view in (self.job.x, self.job.w))
        return self.job.alpha * self.scale("x") * self.scale("w") * (x[rows] @ w.T)

    def scale(self, of: str) -> float:
        return float(sum(self.at(view)[0, 0] for view in _number(getattr(self.job, f"scale_{of}"))) or 1)

    def finished(self, v: np.ndarray) -> np.ndarray:
        v = v if self.job.bias is None else v + self.at(self.job.bias).astype(float)
        v = np.maximum(v, 0) if self.job.activation == "relu" else v
        for largest in _number(self.job.amax):
            self.at(largest)[...] = max(self.at(largest)[0, 0], abs(v).max())
        if is_float8(self.job.d.dtype):
            most = float(finfo(self.job.d.dtype).max)
            v = np.clip(self.scale("d") * v, -most, most)
        return v

    def put(self, views: Iterable[View], v: np.ndarray) -> None:
        for view in views:
            self.at(view)[...] = v.astype(view.dtype)

    def step(self, name: str, do: Callable[[], Any], reads: Sequence[View], writes: Sequence[View]) -> None:
        """Queue a step, after every rank's step before it."""
        done, me = self.done, self.gpu.rank
        number = self.steps = getattr(self, "steps", -1) + 1

        def wait(clock: np.ndarray) -> None:
            for came in done:
                for other in came[:number]:
                    join(clock, other)

        def run(clock: np.ndarray) -> None:
            do()
            done[me].append(clock.copy())

        ready = lambda: all(len(came) >= number for came in done)  # noqa: E731
        self.gpu.queue(f"one_kernel {name}: flags", "main", wait, ready=ready)
        self.gpu.queue(f"one_kernel {name}", "main", run, reads=reads, writes=writes)

    def queue(self) -> None:
        """Queue all steps."""
        job, me = self.job, self.gpu.rank
        gives = self.kernel.gives
        behind = self.gpu.size * self.kernel.sums  # results lie behind the parts
        box = lambda to, of, like: self.box(to, behind + of, like, self.inboxes)  # noqa: E731
        outs = [job.d, *([self.box(me, me, job.d)] if job.copies and not gives else [])]
        outs += [box(rank, me, job.d) for rank in self.others if gives]
        if self.kernel.tiles.parts == "exchanged":
            self._queue_exchange()
        elif self.kernel.sums:
            self._queue_sums(outs)
        else:
            everything = slice(None)
            self.step(
                "stores",
                lambda: self.put(outs, self.finished(self.product(everything))),
                self.operands,
                [*outs, *_number(job.amax)],
            )
        if job.copies:
            place = (
                (lambda rank, like: box(me, rank, like))
                if gives
                else lambda rank, like: self.box(rank, rank, like)
            )
            pairs = [(job.copies[rank], place(rank, job.copies[rank])) for rank in self.others]
            take = self.take if gives else lambda view: self.at(view).astype(float)
            self.step(
                "copies",
                lambda: [self.put([to], take(of)) for to, of in pairs],
                [of for _, of in pairs],
                [each for to, of in pairs for each in ((to, of) if gives else (to,))],
            )

    def _queue_sums(self, outs: list[View]) -> None:
        job, me = self.job, self.gpu.rank
        share = [slice(*job.starts[rank : rank + 2]) for rank in range(self.gpu.size)]
        like = {
            rank: View(0, share[rank].stop - share[rank].start, job.d.cols, 0, self.travels)
            for rank in self.others
        }
        own = View(0, job.d.rows, job.d.cols, 0, self.travels)
        way = self.kernel.tiles.parts
        boxes = self.inboxes if way == "stored" else self.boxes
        # fetched parts are in the boxes of the rank that has computed them
        box = lambda to, of, like: self.box(*((of, to) if way == "fetched" else (to, of)), like, boxes)  # noqa: E731
        parts = {rank: box(rank, me, like[rank]) for rank in self.others}
        self.step(
            "sends",
            lambda: [self.send(view, self.product(share[rank])) for rank, view in parts.items()],
            self.operands,
            list(parts.values()),
        )
        mine = [box(me, rank, own) for rank in self.others]
        take = self.take if way == "stored" else lambda view: self.at(view).astype(float)
        self.step(
            "sums",
            lambda: self.put(outs, self.finished(self.product(share[me]) + sum(map(take, mine)))),
            [*self.operands, *mine],
            [*outs, *_number(job.amax), *(mine if way == "stored" else [])],
        )

    def _queue_exchange(self) -> None:
        """Every rank stores its part of everything into the inboxes of all others, and adds all."""
        job, me, everything = self.job, self.gpu.rank, slice(None)
        like = View(0, job.d.rows, job.d.cols, 0, self.travels)
        inbox = lambda to, of: self.box(to, of, like, self.inboxes)  # noqa: E731
        theirs, mine = ([inbox(*pair) for pair in pairs] for pairs in (
            [(rank, me) for rank in self.others], [(me, rank) for rank in self.others],
        ))  # fmt: skip
        self.step(
            "sends",
            lambda: [self.send(view, self.product(everything)) for view in theirs],
            self.operands,
            theirs,
        )
        self.step(
            "sums",
            lambda: self.put([job.d], self.finished(self.product(everything) + sum(map(self.take, mine)))),
            [*self.operands, *mine],
            [job.d, *_number(job.amax), *mine],
        )

    def send(self, view: View, part: np.ndarray) -> None:
        """Store a part; into an inbox only if it is empty."""
        if self.kernel.tiles.parts in ("stored", "exchanged") and self.at(view).astype(float).any():
            raise Fault(f"rank {self.gpu.rank} stores a part into an inbox that was not emptied")
        self.put([view], part)

    def take(self, view: View) -> np.ndarray:
        """Return a part from this rank's inbox, and empty it."""
        part = self.at(view).astype(float)
        self.put([view], np.zeros_like(part))
        return part
