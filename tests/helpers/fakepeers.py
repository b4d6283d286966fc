# SPDX-License-Identifier: Apache-2.0
"""GPUs that reach each other, all in one process: what is queued on their streams runs in any order that these allow.

peers = Peers(3)
peers.products(lambda gpu: ...)   # every rank queues its products on its own gpu
peers.run(seed=1)                 # in some order that the streams, events, flags and barriers allow

Each rank has the engine's own ``Gpu``, on a ``FakeGpu``, as if in a process of its own. The model keeps vector clocks:
two accesses to a byte, one of them a write, that no chain of streams, events, flags, barriers and messages orders are a
fault, whether or not the numbers came out right. So is a flag that is raised before the last one was seen, a flag that
nobody waits for, and a product that never ends.
"""

from __future__ import annotations

import ctypes
import random
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import finfo

from pblasmp.comm.choice import Serial
from pblasmp.comm.locations import Location
from pblasmp.dtypes import DTYPES, is_float8
from pblasmp.engines.gpu.kernels.one_kernel import gives_results, parts_in_boxes
from pblasmp.engines.gpu.kernels.views import View
from pblasmp.engines.gpu.runtime.device import Device
from pblasmp.engines.gpu.runtime.gpu import Gpu
from pblasmp.engines.gpu.runtime.gpu_runtime import GpuRuntime
from pblasmp.engines.gpu.runtime.nccl import Nccl
from pblasmp.engines.gpu.runtime.windows import FLAGS, KINDS, ONE_KERNEL_FLAGS, ONE_KERNEL_INBOXES
from tests.helpers.fakegpu import FakeGpu
from tests.helpers.fakenccl import Takes
from tests.helpers.gpu_memory import AtOnce, Fault, Flag, Place, at, lines, place
from tests.helpers.hardware import SHARED_MEMORY, why_no_room

ROOM = 1 << 16  # bytes of each rank
_LARGE = 1 << 20  # of more bytes, which are workspaces, only the first ones are there
_STREAMS = 14
_ZERO = "flags", ONE_KERNEL_FLAGS, ONE_KERNEL_INBOXES
"""The symmetric buffers that rely on new memory's being zero, as all of it is."""
_NUMBERS = count(1000)  # of GPUs: contexts of other tests are not on them
_PROCESSES: weakref.WeakValueDictionary[int, Process] = weakref.WeakValueDictionary()  # by their GPUs
_MADE: weakref.WeakSet[Peers] = weakref.WeakSet()  # in this test
_CLEAN: dict[tuple[int, int], list[tuple[np.ndarray, ...]]] = defaultdict(list)
"""Marks of bytes that nobody uses, by ranks and their room: new pages of memory take longer than all that runs."""
_PATCHES: list[pytest.MonkeyPatch] = []  # the running test's


def installed(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a test's patches install the modules of its GPUs; undo them in turn with its own, then give memory back."""
    _PATCHES.append(patch)
    yield
    _PATCHES.remove(patch)
    patch.undo()
    for each in list(_MADE):
        each.forget()


def is_missed(
    attempt: Callable[[tuple[int, int], int], Any],
    skip: tuple[int, int],
    seeds: Iterable[int],
    also: tuple[type[Exception], ...] = (),
) -> bool:
    """Return whether anything is found wrong without a signal, in some of these orders.

    Args:
        attempt: makes ``Peers(..., skip)``, queues, runs in the order of a seed, and compares the results.
        skip: of which rank the signal is, and its number.
        seeds: of the orders.
        also: errors of what never came, besides those of assertions.
    """
    for seed in seeds:
        before = set(_MADE)
        try:
            attempt(skip, seed)
        except (AssertionError, *also):
            return True
        finally:
            for each in set(_MADE) - before:
                each.forget()
    return False


@dataclass
class Op:
    """Something queued: how many buffers had been given back by then, what it waits for, what it does."""

    name: str
    stream: tuple[int, int]
    freed: int
    ready: Callable[[], bool]
    do: Callable[[Any], None]


class Peers:
    """``size`` GPUs.

    Args:
        size: ranks.
        skip: the synchronization to leave out: ``(rank, number)``, counted as they are queued.
        multiprocessors: of each, which decide how many pieces a product is cut into.
        domains: the ranks that reach each other's memory, hosts; by default all.
        capability: of each: 90 for 9.0.

    Attributes:
        gpus: the ranks' ``Gpu``.
        program: by rank, what is queued.
        freed: buffers that were given back: first and last address.
    """

    def __init__(
        self,
        size: int,
        skip: tuple[int, int] | None = None,
        multiprocessors: int = 2,
        domains: Sequence[tuple[int, ...]] = (),
        capability: int = 90,
    ) -> None:
        self.size, self.domains = size, list(domains) or [tuple(range(size))]
        self._domain_of = {rank: tuple(sorted(ranks)) for ranks in self.domains for rank in ranks}
        self.skip: tuple[int, int] | None = None
        self.room = ROOM  # of a rank, in bytes
        whole = np.zeros(size * ROOM + 256, np.uint8)
        start = -whole.ctypes.data % 256
        self._whole, self.base = whole, whole.ctypes.data + start
        self.memory = whole[start : start + size * ROOM].reshape(size, ROOM)
        self.used, self.top = [64] * size, [ROOM] * size
        self.freed: list[tuple[int, int]] = []
        self.queues: dict[tuple[int, int], list[Op]] = defaultdict(list)
        self.program: list[list[Op]] = [[] for _ in range(size)]
        clocks = size * _STREAMS
        new_clock = partial(np.zeros, clocks, np.int16)
        self.clocks: dict[tuple[int, int], np.ndarray] = defaultdict(new_clock)
        self.joined: dict[tuple[int, int], np.ndarray] = defaultdict(new_clock)
        self.numbers: dict[tuple[int, int], int] = {}
        if not _CLEAN[size, ROOM]:
            _CLEAN[size, ROOM].append(tuple(np.zeros((size, lines, ROOM), np.int16) for lines in (2, clocks)))
        self.written, self.read = _CLEAN[
            size, ROOM
        ].pop()  # by whom, and when; when, by each of the rank's readers
        self.readers: list[list[int]] = [[] for _ in range(size)]  # streams' numbers
        self.flags: dict[
            int, int
        ] = {}  # by rank, where they are: in its first window, behind barriers' words
        self.assumed: list[tuple[Process, int, tuple[int, ...]]] = []  # whose windows some are
        self.groups: dict[Any, dict[int, Any]] = defaultdict(dict)  # of NCCL's ranks, by what was split
        self.windows: dict[Any, dict[int, int]] = defaultdict(dict)
        # by sender and receiver, what is under way; by communicator and rank, what came
        self.messages: dict[Any, list[Any]] = defaultdict(list)
        self.arrivals: dict[Any, list[Any]] = defaultdict(list)
        shared = AtOnce()
        self.streams = [PeerStreams(self, rank, shared) for rank in range(size)]
        self.gpus = [Peer(each, multiprocessors, capability) for each in self.streams]
        for process, comm, ranks in self.assumed:
            assert process.ranks(comm) == ranks
        self.run()
        self.settled = {stream: self.clocks[stream][number] for stream, number in self.numbers.items()}
        for each in self.streams:
            each.names.clear()
        self.skip = skip
        _MADE.add(self)

    # -- memory

    def forget(self) -> None:
        """Give all memory back, which cycles of references would keep for long."""
        for rank, readers in enumerate(self.readers):
            for part in (slice(self.used[rank]), slice(self.top[rank], self.room)):
                self.written[rank, :, part] = self.read[rank, : len(readers), part] = 0
        _CLEAN[self.size, self.room].append((self.written, self.read))
        _MADE.discard(self)
        for each in self.gpus:
            vars(each).clear()
        vars(self).clear()

    def allocate(self, rank: int, nbytes: int, *, symmetric: bool = False) -> int:
        """Return new memory, NaN in every type; what is symmetric is at the same place on every rank."""
        nbytes = -(-(nbytes if nbytes < _LARGE else 64) // 16) * 16
        if symmetric:
            self.top[rank] -= nbytes
        start = self.top[rank] if symmetric else self.used[rank]
        self.used[rank] += 0 if symmetric else nbytes
        assert self.used[rank] <= self.top[rank], "the model's memory is full"
        self.memory[rank, start : start + nbytes] = 0xFF
        return self.base + rank * ROOM + start

    def array(self, rank: int, values: np.ndarray, *, ld: int = 0) -> Any:
        """Return a rank's array with these values; rows ``ld`` entries apart."""
        (rows, cols), size = values.shape, values.itemsize
        ld = max(1, ld or cols)
        nbytes = rows * ld * size
        at = SimpleNamespace(ptr=self.allocate(rank, nbytes), mem=SimpleNamespace(size=nbytes))
        made = self.streams[rank].cupy.ndarray(values.shape, values.dtype, at, (ld * size, size))
        made.values[...] = values
        return made

    def where(self, address: int) -> tuple[int, int]:
        """Return whose memory an address is in, and where."""
        return divmod(address - self.base, ROOM)

    def marks(self, kept: np.ndarray, of: Place, first: int, count: int) -> np.ndarray:
        """Return so many lines of what is ``kept`` of every byte of its rank: lines × extents × bytes of an element."""
        rank, start = self.where(of.address)
        lines = kept[rank]
        line, byte = lines.strides
        strides = (line, *(s * byte for s in of.strides), byte)
        shape = (count, *of.extents, of.dtype.itemsize)
        return np.ndarray(shape, lines.dtype, lines, first * line + start * byte, strides)

    def domain_of(self, rank: int) -> tuple[int, ...]:
        return self._domain_of[rank]

    def flag_at(self, address: int) -> tuple[int, int, int] | None:
        """Return of which rank a flag is, its number, and from which rank it comes; None if there is no flag."""
        rank, _ = self.where(address)
        if rank not in self.flags:
            return None
        members = self.domain_of(rank)
        number, source = divmod((address - self.flags[rank]) // 4, len(members))
        return (rank, number, members[source]) if 0 <= number < FLAGS else None

    # -- running

    def run(self, seed: int | None = None) -> None:
        """Run all that is queued: in an order by chance, or, without a seed, each rank in the order it was queued.

        Flags of free slots are up at the end: what follows would wait for them.
        """
        chance = random.Random(seed)
        lines = [line for line in (self.program if seed is None else self.queues.values()) if line]
        while lines:
            for last in reversed(range(len(lines))):  # one of those that are not behind it, by chance
                pick = int(chance.random() * (last + 1))
                lines[pick], lines[last] = lines[last], lines[pick]
                if lines[last][0].ready():
                    break
            else:
                raise Fault(f"deadlock: {[line[0].name for line in lines]}")
            self.step(lines[last].pop(0))
            if not lines[last]:
                del lines[last]
        self.queues.clear()
        for each in self.program:
            each.clear()
        up = [at for at, flag in self.streams[0].flags.items() if flag.up and not flag.stays]
        if up:
            raise Fault(f"flags that nobody waited for: {[self.flag_at(at) for at in up]}")

    def step(self, op: Op) -> None:
        number = self.numbers.setdefault(op.stream, len(self.numbers))
        clock = self.clocks[op.stream]
        clock[number] += 1
        now = self.joined[op.stream][number] = clock[number]
        assert now > 0, "the model's clocks are full"
        op.do(Running(self, op, number, now))


class Running:
    """What runs: the memory that it reads and writes, and its place among all else."""

    def __init__(self, peers: Peers, op: Op, number: int, now: int) -> None:
        self._peers, self._op, self._number, self._now = peers, op, number, now
        self._clock, self._joined = peers.clocks[op.stream], peers.joined[op.stream]

    def _place(self, of: Place | View) -> Place:
        """Return a place that this rank reaches."""
        of, peers, name = place(of) if isinstance(of, View) else of, self._peers, self._op.name
        if 0 in of.extents:
            return of
        (owner, start), rank = peers.where(of.address), self._op.stream[0]
        end = start + of.nbytes
        if not (
            0 <= owner < peers.size and (end <= peers.used[owner] or peers.top[owner] <= start <= end <= ROOM)
        ):
            raise Fault(f"{name}: {of} is outside of the memory of rank {owner}")
        if owner not in peers.domain_of(rank):
            raise Fault(f"{name}: rank {rank} does not reach the memory of rank {owner}")
        if any(first <= of.address < last for first, last in peers.freed[: self._op.freed]):
            raise Fault(f"{name}: {of} is in memory that was given back")
        return of

    def read(self, of: Place | View) -> np.ndarray:
        of = self._place(of)
        if 0 not in of.extents:
            by, when = self._peers.marks(self._peers.written, of, 0, 2)
            if (when > self._clock[by]).any():
                raise Fault(f"{self._op.name} on {self._op.stream} reads what is being written")
            readers = self._peers.readers[self._peers.where(of.address)[0]]
            if self._number not in readers:
                readers.append(self._number)
            line = readers.index(self._number)
            self._peers.marks(self._peers.read, of, line, 1)[...] = self._now
        return at(of)

    def write(self, of: Place | View) -> np.ndarray:
        of = self._place(of)
        if 0 not in of.extents:
            by, when = written = self._peers.marks(self._peers.written, of, 0, 2)
            readers = self._peers.readers[self._peers.where(of.address)[0]]
            read = self._peers.marks(self._peers.read, of, 0, len(readers))
            mine = self._clock[readers].reshape(-1, *[1] * (read.ndim - 1))
            if (when > self._clock[by]).any() or (read > mine).any():
                raise Fault(f"{self._op.name} on {self._op.stream} writes what is being used")
            written[0], written[1] = self._number, self._now
        return at(of)

    def stamp(self) -> tuple[np.ndarray, np.ndarray]:
        return self._clock.copy(), self._joined.copy()

    def after(self, stamp: tuple[np.ndarray, np.ndarray], *, by_event: bool = False) -> None:
        np.maximum(self._clock, stamp[0], out=self._clock)
        if by_event:  # which a graph records, too
            np.maximum(self._joined, stamp[1], out=self._joined)

    def check_joined(self) -> None:
        """Raise a Fault if a stream of this rank's is not joined to the one that runs."""
        for stream, number in self._peers.numbers.items():
            seen = max(self._joined[number], self._peers.settled.get(stream, 0))
            if stream[0] == self._op.stream[0] and self._peers.clocks[stream][number] > seen:
                raise Fault(f"stream {stream} is not joined: no graph can record this")

    def is_later(self, stamp: tuple[np.ndarray, np.ndarray] | None) -> bool:
        return stamp is None or not (stamp[0] > self._clock).any()


class PeerStreams(AtOnce):
    """One rank's streams: what is queued runs when all of the ranks' run.

    Attributes:
        names: which signals this rank has queued, that a test may leave out.
        cupy: the module, as this rank sees it.
    """

    def __init__(self, peers: Peers, rank: int, shared: AtOnce) -> None:
        super().__init__()
        self.peers, self.rank, self.names = peers, rank, list[str]()
        self.cupy: Any = None
        self.flags, self.arrivals = shared.flags, shared.arrivals

    def queue(
        self, stream: int, name: str, do: Callable[[Any], None], *, ready: Callable[[], bool] = lambda: True,
        synchronizes: bool = False,
    ) -> None:  # fmt: skip
        if synchronizes:
            self.names.append(name)
            if self.peers.skip == (self.rank, len(self.names) - 1):
                return
        op = Op(name, (self.rank, stream), len(self.peers.freed), ready, do)
        self.peers.queues[op.stream].append(op)
        self.peers.program[self.rank].append(op)

    def is_done(self, stream: int) -> bool:
        """Run what the host waits for."""
        line = self.peers.queues[self.rank, stream]
        while line and line[0].ready():
            self.peers.program[self.rank].remove(line[0])
            self.peers.step(line.pop(0))
        if line:
            raise Fault(
                f"rank {self.rank}: the host waits for {line[0].name}, which other ranks have not queued"
            )
        return True

    def name_of(self, flag: int) -> str:
        found = self.peers.flag_at(flag)
        if found is None:
            return hex(flag)
        rank, number, source = found
        return f"{number} of {source if rank == self.rank else rank}"

    def copy(self, stream: int, to: Place, of: Place) -> None:
        """A copy over flags raises them."""
        if self.peers.flag_at(to.address) is None:
            super().copy(stream, to, of)
            return
        assert (at(of).view(np.uint32) == 1).all()
        if to.nbytes == 4:
            self.raise_flag(stream, to.address)
        else:  # at first, of free slots
            self.queue(
                stream, "raise flags", partial(self._raise_all, range(to.address, to.address + to.nbytes, 4))
            )

    def _raise_all(self, flags: Iterable[int], memory: Running) -> None:
        for address in flags:
            self.flags[address] = Flag(True, True, memory.stamp())


class _Alike(Serial):
    """The ranks of all GPUs, as one of them sees them: each does, and says, what this one does."""

    def __init__(self, rank: int, domains: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.rank, self.size = rank, sum(map(len, domains))
        hosts = {rank: i for i, ranks in enumerate(domains) for rank in ranks}
        here = Location(("", ""), "", 0, "", 0, 0, 0, 0)
        self._locations = [here._replace(machine=(f"host {hosts[rank]}", "")) for rank in range(self.size)]

    def allgather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def locations(self) -> list[Location]:
        return self._locations


class Process(FakeGpu):
    """What the process of a rank sees of CuPy, NCCL and all else; NCCL's ranks are in this process, too."""

    def __init__(self, streams: PeerStreams, multiprocessors: int, capability: int) -> None:
        super().__init__(
            queues=streams, capability=str(capability), multiprocessors=multiprocessors,
            shared_memory=SHARED_MEMORY[capability], current=next(_NUMBERS),
        )  # fmt: skip
        self.peers, self.rank, self.launches = streams.peers, streams.rank, 0
        _PROCESSES[self.current] = self
        self.stream = self._next = self.current << 16  # no other GPU's streams have these addresses
        self.windows, self.calls = defaultdict[int, int](int), defaultdict[int, int](int)

    def new_memory(self, nbytes: int) -> Any:
        """Memory of this rank's, which nobody may use once it was given back."""
        start = self.peers.allocate(self.rank, nbytes)
        memory = (ctypes.c_char * nbytes).from_address(start)
        weakref.finalize(memory, self.peers.freed.append, (start, start + nbytes))
        return memory

    def load(self, device: int, *kernel: Any) -> int:
        """Also of another GPU than that of the modules that were installed last."""
        return FakeGpu.load(_PROCESSES[device], device, *kernel)

    def copy_3d(self, copy: Any, stream: int) -> tuple[int]:
        return FakeGpu.copy_3d(_PROCESSES[stream >> 16], copy, stream)

    def _watch(self, content: Any, name: str = "") -> Any:
        return content

    def set_now(self, at: int, value: int, nbytes: int) -> None:
        ctypes.memset(at, value, nbytes)

    def _buffer(self, kind: str, nbytes: int) -> Any:
        start = self.peers.allocate(self.rank, nbytes, symmetric=True)
        return SimpleNamespace(handle=start, close=lambda: self.peers.freed.append((start, start + nbytes)))

    # -- NCCL: every rank's part is there when the last one comes

    def _nccl(self) -> SimpleNamespace:
        process = self

        class Communicator:
            """Ranks of this process; who they are shows when all have been asked."""

            def __init__(self, ptr: int) -> None:
                self.ptr, self.splits = ptr, count()

            @classmethod
            def init(
                cls, nranks: int, rank: int, unique_id: bytes, of: Any = (), color: int = 0
            ) -> Communicator:
                ptr = process._make("communicator", None)
                process.peers.groups[of][process.rank] = color
                process.communicators[ptr] = of, color
                return cls(ptr)

            def split(self, color: int, key: int) -> Communicator:
                return self.init(0, key, b"", (process.communicators[self.ptr], next(self.splits)), color)

            def destroy(self) -> None: ...

            def get_async_error(self) -> int:
                return 0

        self.communicators: dict[int, Any] = {}
        return SimpleNamespace(
            Communicator=Communicator, RegisteredWindowHandle=type("", (_Window,), {"process": self}),
            WindowFlag=SimpleNamespace(COLL_SYMMETRIC=1), get_unique_id=lambda: b"unique",
            mem_alloc=lambda nbytes, device: self._buffer("window", nbytes),
        )  # fmt: skip

    def ranks(self, comm: int) -> tuple[int, ...]:
        """Return the ranks of a communicator."""
        of, color = self.communicators[int(comm)]
        return tuple(rank for rank, said in sorted(self.peers.groups[of].items()) if said == color)

    def _group_end(self) -> None:
        self.group.pop()

    def _message(self, name: str, at: int, nbytes: int, kind: int, peer: int, comm: Any, stream: int) -> None:
        assert self.group, "a message outside a group waits for its other end"
        place, ends = lines(at, 1, nbytes, nbytes), (self.rank, self.ranks(comm)[peer])
        box = self.peers.messages[ends if name == "send" else ends[::-1]]

        def send(memory: Any) -> None:
            box.append((memory.read(place).copy(), memory.stamp()))

        def receive(memory: Any) -> None:
            values, sent = box.pop(0)
            memory.after(sent)
            assert values.nbytes == nbytes, "a message of another length"
            memory.write(place)[...] = values

        if name == "send":
            self.queues.queue(stream, "send", send)
        else:
            self.queues.queue(stream, "receive", receive, ready=lambda: bool(box), synchronizes=True)

    def place_in(self, comm: int) -> tuple[int, int]:
        ranks = self.ranks(comm)
        return ranks.index(self.rank), len(ranks)

    def collective(
        self, name: str, comm: int, stream: int, of: Place, takes: Takes, *, sends: bool = True
    ) -> None:
        ranks = self.ranks(comm)
        came = [self.peers.arrivals[self.communicators[comm], rank] for rank in ranks]
        here, number = came[ranks.index(self.rank)], self.calls[comm]
        self.calls[comm] += 1

        def send(memory: Any) -> None:
            here.append((memory.stamp(), memory.read(of).copy() if sends else None))

        def receive(memory: Any) -> None:
            for each in came:
                memory.after(each[number][0])
            for to, made in takes:
                memory.write(to)[...] = made([each[number][1] for each in came])

        self.queues.queue(stream, "arrive", send)
        self.queues.queue(stream, name, receive, ready=lambda: all(len(each) > number for each in came))


class _Window:
    """nccl.core.RegisteredWindowHandle: the same place on every rank, and nothing if not all reach each other."""

    process: Process

    def __init__(self, comm: int, address: int, nbytes: int, flags: int) -> None:
        process, peers = self.process, self.process.peers
        of_all = process.communicators[comm][0] == ()
        # of a part, only the first rank is there yet: it is taken for a domain, which ``Peers`` checks
        self._ranks = tuple(range(peers.size)) if of_all else peers.domain_of(process.rank)
        self._address, self.handle = address, int(not of_all or len(peers.domains) == 1)
        peers.assumed.append((process, comm, self._ranks))
        sizes = peers.windows[process.communicators[comm], process.windows[comm]]
        process.windows[comm] += 1
        sizes[process.rank] = nbytes
        if len({*sizes.values()}) > 1:
            raise Fault(f"windows of other sizes: {sizes} bytes")
        if self.handle:
            peers.flags.setdefault(process.rank, address + 4 * len(KINDS) * (len(self._ranks) + 2))

    def get_peer_device_pointer(self, i: int) -> int:
        return self._address + (self._ranks[i] - self.process.rank) * ROOM

    def close(self) -> None: ...


class Peer(Gpu):
    """A rank's ``Gpu``, which is told in which words signals are named, and what the caller does between products.

    Attributes:
        streams: what it queues, and its signals' names.
        process: what it sees of CuPy, NCCL and all else.
        scratches: address and bytes of each scratch buffer that was requested.
        reserved: bytes of each symmetric one.
    """

    def __init__(self, streams: PeerStreams, multiprocessors: int, capability: int) -> None:
        self.streams, self.peers = streams, streams.peers
        self.scratches: dict[str, tuple[int, int]] = {}
        self.reserved: dict[str, int] = {}
        self._forks = False
        self.process = process = Process(streams, multiprocessors, capability)
        process.install(_PATCHES[-1])
        streams.cupy = sys.modules["cupy"]
        comm = _Alike(streams.rank, self.peers.domains)
        runtime = GpuRuntime(comm, Device(process.current, f"GPU {comm.rank}", "here"))
        super().__init__(runtime, Nccl(runtime))

    @property
    def names(self) -> list[str]:
        """Which signals this rank has queued."""
        return self.streams.names

    @property
    def synchronizations(self) -> int:
        return len(self.streams.names)

    def scratch(self, name: str, nbytes: int) -> int:
        found = super().scratch(name, nbytes)
        self.scratches[name] = found, max(nbytes, self.scratches.get(name, (0, 0))[1])
        return found

    def reserve(self, name: str, nbytes: int) -> None:
        """Also poison new memory that nobody relies on."""
        assert self.windows is not None
        before = self.windows.buffer(name).nbytes
        super().reserve(name, nbytes)
        self.reserved[name] = max(nbytes, before)
        if nbytes > before and name not in _ZERO:
            ctypes.memset(self.windows.buffer(name).peers[self.rank], 0xFF, nbytes)

    def begin(self, *names: str) -> None:
        self._forks = True
        super().begin(*names)
        self._forks = False

    def follow(self, later: str, earlier: str) -> None:
        self.process.saying = "" if self._forks else f"{later} follows {earlier}"
        super().follow(later, earlier)
        self.process.saying = ""

    def await_mark(self, stream: str, name: str) -> None:
        self.process.saying = f"{stream} follows {name}"
        super().await_mark(stream, name)
        self.process.saying = ""

    def use(self, *arrays: Any) -> None:
        """Queue what the caller does between products: it rewrites its arrays, or ends a graph's recording."""
        views = [View.of(array) for array in arrays]

        def do(memory: Running) -> None:
            for view in views:
                memory.read(view)
                memory.write(view)
            memory.check_joined()

        self.streams.queue(self.process.stream, "the caller", do)


def _number(address: int) -> list[View]:
    return [View(address, 1, 1, 1, np.dtype(np.float32))] if address else []


class PlayedKernel:
    """``OneKernel``, played on the stream that it is launched on."""

    def __init__(self, form: str, types: Any, ranks: int, tiles: Any) -> None:
        self.tiles, self.sums = tiles, form != "matmul_allgather"
        self.gives = gives_results(form, tiles, types.d)

    def launch(self, job: Any, blocks: int, stream: Any) -> None:
        gpu, tiles, types = stream.machine, self.tiles, (job.x.dtype, job.w.dtype, job.d.dtype)
        # A block takes a multiprocessor, and waits for what others send: all must be there at once.
        if blocks > gpu.multiprocessors:
            raise Fault(f"one_kernel: {blocks} blocks on {gpu.multiprocessors} multiprocessors")
        if why_not := why_no_room(tiles.shared_bytes, gpu.shared_memory):
            raise Fault(f"one_kernel: {why_not}")
        if not tiles.mma and gpu.capability != "90":
            raise Fault(f"one_kernel: Hopper's instructions on {gpu.capability}")
        if tiles.mma and any(is_float8(dtype) for dtype in types):
            raise Fault(f"one_kernel: {types} by mma.sync")
        gpu.launches += 1
        Call(gpu, self, job, gpu.launches, stream.ptr).queue()


class Call:
    """What ``one_kernel.cu`` does, in two or three steps, each of which waits for all ranks' one before.

    A box holds a rank's tiles as one matrix. So does an inbox, which is empty again once it was read.
    """

    def __init__(self, gpu: Process, kernel: Any, job: Any, epoch: int, stream: int) -> None:
        self.gpu, self.kernel, self.job, self.stream, self.size = gpu, kernel, job, stream, gpu.peers.size
        self.boxes, self.inboxes, self.at = job.boxes[epoch & 1], job.inboxes[epoch & 1], at
        self.others = [rank for rank in range(self.size) if rank != gpu.rank]
        self.travels = DTYPES["bfloat16"] if is_float8(job.d.dtype) else job.d.dtype
        self.operands = [job.x, job.w, *_number(job.scale_x), *_number(job.scale_w), *_number(job.scale_d)]
        self.done = [gpu.peers.arrivals["one_kernel", epoch, rank] for rank in range(self.size)]

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

        def wait(memory: Any) -> None:
            for came in done:
                for other in came[:number]:
                    memory.after(other)

        def run(memory: Any) -> None:
            for view in reads:
                memory.read(view)
            for view in writes:
                memory.write(view)
            do()
            done[me].append(memory.stamp())

        ready = lambda: all(len(came) >= number for came in done)  # noqa: E731
        queue = partial(self.gpu.queues.queue, self.stream)
        queue(f"one_kernel {name}: flags", wait, ready=ready)
        queue(f"one_kernel {name}", run)

    def queue(self) -> None:
        """Queue all steps."""
        job, me = self.job, self.gpu.rank
        gives = self.kernel.gives
        behind = self.size * self.kernel.sums  # results lie behind the parts
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
        share = [slice(*job.starts[rank : rank + 2]) for rank in range(self.size)]
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
