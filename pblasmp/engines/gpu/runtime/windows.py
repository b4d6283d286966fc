# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory through NCCL's windows: growing buffers that plans share, peers' addresses, flags and barriers.

How ranks signal each other follows from measurements on NVLink. While a GEMM holds all multiprocessors, a kernel that
signals or waits is not scheduled before the GEMM ends. So a flag is a copy of 4 bytes after the data, in the same
stream. Where there is no data and no GEMM either, a kernel raises flags: a copy would wait for larger ones that the
copy engines have begun. A stream waits for flags in this GPU's own memory: next to a GEMM by stream memory operations,
otherwise by a kernel, which sees a flag about 15 us sooner. Barriers are kernels: at the start and at the end of a
product, and between its GEMMs and its sums.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from ....comm import machines_of
from ....errors import StatusError, UnsupportedError
from ..kernels.compiler import check_driver
from ..kernels.kernels import Kernels
from .gpu_runtime import GpuRuntime
from .health import nccl_handle
from .nccl import Nccl
from .symmetric_memory import roomy


@dataclass(frozen=True, slots=True)
class FlagRange:
    """Consecutive flags for things that are counted from 0.

    Attributes:
        what: what each signals.
        first: the first flag.
        count: how many there are.
    """

    what: str
    first: int
    count: int

    def at(self, i: int) -> int:
        """Return the number of the flag of thing ``i``. Local.

        Raises:
            IndexError: there are not so many.
        """
        if not 0 <= i < self.count:
            raise IndexError(f"flags: {self.what} {i}: there are {self.count}")
        return self.first + i


_COUNTS = {
    "chunk of A": 8, "chunk of B": 8, "piece of a tensor-parallel product": 16, "message in box": 16,
    "free slot of box": 16, "chunk of a delivery": 12, "free buffer of deliveries": 3,
}  # fmt: skip
RANGES = [
    FlagRange(what, end - count, count)
    for (what, count), end in zip(_COUNTS.items(), accumulate(_COUNTS.values()), strict=True)
]
*PUSHED, PIECES, MESSAGES, SLOTS, CHUNKS, ROOMS = RANGES
FLAGS = sum(_COUNTS.values())
"""How many flags every rank has from every other one."""

ONE_KERNEL_FLAGS = "one_kernel flags"
"""The symmetric buffer of the flags of ``one_kernel.cu``."""

ONE_KERNEL_CONTROL = 256
"""Bytes at the start of that buffer, before the flags: this rank's count of calls."""

ONE_KERNEL_INBOXES = "one_kernel inboxes"
"""That of its inboxes, whose words are 0 until they have come."""

KINDS = "end", "between"
"""Barriers: of one product and the next; within a product."""

_UP = 1
_ROUNDED = 512 << 20  # bytes, at most, that NCCL adds to an allocation, for multicast
_MOST_RANKS = 64  # that barriers take
_FAR = 0x3F3F3F3F  # larger than any real count of products
_RAISED_AT_ONCE = 1 << 20  # bytes of flags that one copy raises


class NullWindowError(UnsupportedError):
    """NCCL registers no memory of these ranks: nobody's, also not that of libraries which use the same communicator."""


class Buffer:
    """Symmetric memory under a name. Its addresses change when it grows: ask for them in every run.

    Attributes:
        peers: the address of each member's buffer, as this rank sees it, by its rank in the context.
        nbytes: its size.
        captured: a graph that a user has captured holds its addresses.
    """

    __slots__ = ("_memory", "_window", "captured", "nbytes", "peers")

    def __init__(self) -> None:
        self.peers: dict[int, int] = {}
        self.nbytes = 0
        self.captured = False
        self._memory: Any = None
        self._window: Any = None


class Windows:
    """The symmetric memory of ranks that reach each other's GPUs: of an NVLink domain. Use ``open_windows``.

    The ranks of all domains make, grow and close theirs together; a rank that is alone in its domain needs no NCCL for
    that.

    Args:
        communicator: nccl4py's, of the members.
        domains: the ranks of each, in the communicators' order. Buffers are as large in all of them.

    Attributes:
        members: the ranks of this rank's domain.
        arrive: queues on a stream: signal every rank that this rank's product has ended. This and the next two are
            kernels, for times when no GEMM runs.
        await_all: waits until every rank's previous product has ended.
        meet: a barrier within a product: after it, every rank sees what was stored before it.
    """

    def __init__(
        self, runtime: GpuRuntime, communicator: Any, domains: Sequence[tuple[int, ...]], kernels: Kernels
    ) -> None:
        import nccl.core
        from cuda.bindings import driver

        self.domains = domains
        self.members = members = next(ranks for ranks in domains if runtime.rank in ranks)
        self.rank, self.size, largest = runtime.rank, len(members), max(map(len, domains))
        self._index = {rank: i for i, rank in enumerate(members)}
        self._runtime, self._communicator, self._kernels = runtime, communicator, kernels
        self._core, self._driver = nccl.core, driver
        self._awaiting: dict[int, list[Any]] = {}  # batched operations on a flag, by its address
        self._cuda = runtime.cupy.cuda.runtime
        self._buffers = defaultdict[str, Buffer](Buffer)
        self._retired: list[tuple[str, Buffer]] = []  # replaced, but still in graphs that users have captured
        with runtime.agreement("symmetric memory"):
            stream = runtime.cupy.cuda.Stream(non_blocking=True)
            self._up = runtime.cupy.full(FLAGS * self.size, _UP, np.uint32)
            self._up_at = int(self._up.data.ptr)
            self._raised = _pinned(runtime.cupy, FLAGS * self.size, _UP)
            self._far = _pinned(runtime.cupy, _RAISED_AT_ONCE // 4, _FAR)
        words = len(KINDS) * (largest + 2) + FLAGS * largest
        self._flags = self.reserve("flags", 4 * words)
        self._first = 4 * len(KINDS) * (self.size + 2)
        addresses = [self._flags.peers[rank] for rank in members]
        try:
            with runtime.agreement("symmetric memory: barriers"):
                self.arrive, self.await_all, self.meet = (
                    kernels.signal(what, addresses, self._index[self.rank], kind, len(KINDS))
                    for what, kind in (("arrive", 0), ("await", 0), ("meet", 1))
                )
                free, copy = self._offset(SLOTS.first, self.members[0]), self._cuda.memcpyDefault
                at = self._flags.peers[self.rank]
                self._cuda.memcpyAsync(at + free, self._up_at, 4 * SLOTS.count * self.size, copy, stream.ptr)
                self.arrive(stream)  # there is no product before the first one to wait for
                runtime.wait(stream)
        except BaseException:
            self._release(self._flags)
            raise

    # -- memory

    def buffer(self, name: str) -> Buffer:
        """Return the buffer of that name, empty until it is reserved. Local."""
        return self._buffers[name]

    def reserve(self, name: str, nbytes: int) -> Buffer:
        """Return a buffer of at least ``nbytes``, the same number on every rank. Collective if it must grow.

        Waits for all work in flight before a buffer is replaced. New memory is zero. If a rank fails, the buffer stays
        as it was, on every rank. If a user's graph holds the addresses of the old memory, that is kept.

        Raises:
            MemoryError: a rank has no room; raised on every rank.
            StatusError: NCCL fails on a rank; raised on every rank.
            UnsupportedError: a rank does not reach another one's memory; raised on every rank. A NullWindowError if
                NCCL has registered nothing.
        """
        buffer = self.buffer(name)
        if nbytes <= buffer.nbytes:
            return buffer
        nbytes, runtime = roomy(nbytes), self._runtime
        what = f"{nbytes} bytes of symmetric memory for {name!r}"
        with ExitStack() as new:  # is given back if a rank fails
            with self._runtime.agreement(what):
                runtime.synchronize()
                memory = self._allocated(nbytes, what)
                new.callback(memory.close)
                self._cuda.memset(int(memory.handle), 0, nbytes)
                self._cuda.deviceSynchronize()
            with self._runtime.agreement(what, blocks=True):
                window, peers = None, {self.rank: int(memory.handle)}
                if self.size > 1:
                    # Communicator.register_window imports PyTorch, if it is there, to ask it what an array is: 3 s
                    register, flags = self._core.RegisteredWindowHandle, self._core.WindowFlag.COLL_SYMMETRIC
                    window = register(nccl_handle(self._communicator), int(memory.handle), nbytes, flags)
                    if not window.handle:  # a success to NCCL
                        raise NullWindowError(f"NCCL gave rank {self.rank} a null window{_switched_off()}")
                    new.callback(window.close)
                    peers = {rank: window.get_peer_device_pointer(i) for rank, i in self._index.items()}
                missing = [rank for rank, address in peers.items() if not address]
                if missing:
                    raise UnsupportedError(f"rank {self.rank} cannot reach rank {missing[0]}'s GPU memory")
            new.pop_all()
        old = copy(buffer)
        buffer._memory, buffer._window, buffer.nbytes, buffer.captured = memory, window, nbytes, False
        buffer.peers = {rank: int(address) for rank, address in peers.items()}
        buffer.peers[self.rank] = int(memory.handle)
        if old.nbytes:
            runtime.arena.replaced()
            if any(runtime.comm.allgather(old.captured)):
                self._retired.append((name, old))
            else:
                self._release(old)  # all ranks have agreed, and so are idle
        return buffer

    def _allocated(self, nbytes: int, what: str) -> Any:
        """Return new memory; if little is free, what others can do without is freed first."""
        free, _ = self._cuda.memGetInfo()
        if free < 2 * nbytes:
            self._runtime.cupy.get_default_memory_pool().free_all_blocks()
            free, _ = self._cuda.memGetInfo()
        if free < nbytes + _ROUNDED:
            self._runtime.arena.give_up()
        try:
            return self._core.mem_alloc(nbytes, self._runtime.device.index)
        except Exception as error:
            free, _ = self._cuda.memGetInfo()
            if free < nbytes + _ROUNDED:  # NCCL does not tell why
                raise MemoryError(f"{what}: the GPU has {free} free: {error}") from error
            raise StatusError(f"{what}: {type(error).__name__}: {error}") from error

    def _release(self, buffer: Buffer) -> None:
        """Free a buffer's memory. Collective if it has any."""
        window, memory = buffer._window, buffer._memory
        buffer._window = buffer._memory = None
        buffer.peers, buffer.nbytes = {}, 0
        with ExitStack() as last_first:
            if memory is not None:
                last_first.callback(memory.close)
            if window is not None:
                last_first.callback(window.close)

    # -- flags

    def raise_flag(self, stream: Any, rank: int, number: int) -> None:
        """Queue: signal ``rank`` that all earlier work on this stream is done. Once for each wait there. Local."""
        at = self._flags.peers[rank] + self._offset(number, self.rank)
        self._cuda.memcpyAsync(at, self._up_at, 4, self._cuda.memcpyDefault, stream.ptr)

    def raise_flags(self, stream: Any, flags: Iterable[tuple[int, int]]) -> None:
        """Queue: signal ranks likewise, each with a number, by a kernel. Local."""
        peers, mine = self._flags.peers, self.rank
        self._kernels.raise_flags(
            stream, [peers[rank] + self._offset(number, mine) for rank, number in flags]
        )

    def await_flag(self, stream: Any, rank: int, number: int) -> None:
        """Queue: wait for the flag ``number`` of ``rank`` next to a GEMM, and lower it again. Local.

        One batch of two operations, and so one graph node: launching a graph takes host time for each node.
        """
        at = self._flags.peers[self.rank] + self._offset(number, rank)
        operations = self._awaiting.get(at)
        if operations is None:
            self._awaiting[at] = operations = self._wait_and_lower(at)
        check_driver(self._driver.cuStreamBatchMemOp(stream.ptr, len(operations), operations, 0))

    def await_flags(self, stream: Any, flags: Iterable[tuple[int, int]]) -> None:
        """Queue: wait for flags, each a rank and a number, by a kernel, and lower them again. Local."""
        at = self._flags.peers[self.rank]
        self._kernels.await_flags(stream, [at + self._offset(number, rank) for rank, number in flags])

    def _wait_and_lower(self, at: int) -> list[Any]:
        """Return the operations on the flag at an address; the GPU does them in this order."""
        driver, kinds = self._driver, self._driver.CUstreamBatchMemOpType
        wait, lower = driver.CUstreamBatchMemOpParams(), driver.CUstreamBatchMemOpParams()
        wait.waitValue.operation = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
        wait.waitValue.address, wait.waitValue.value = at, _UP
        wait.waitValue.flags = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
        lower.writeValue.operation = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
        lower.writeValue.address, lower.writeValue.value = at, 0
        return [wait, lower]

    def raise_own(self, stream: Any) -> None:
        """Queue: raise all flags that this rank waits for, as if other ranks had. Repeat this until it no longer waits.

        For a broken context: the work that follows reads whatever is in its buffers. By copies from the host, for which
        no multiprocessor must be free: kernels that wait may have them all. Local.
        """
        at = self._flags.peers[self.rank]
        self._fill(at, self._far, 4 * len(KINDS) * self.size, stream)
        self._fill(at + self._first, self._raised, 4 * FLAGS * self.size, stream)
        # the next call queued counts on from the control word, and must find its flags raised, too
        for name, start in ((ONE_KERNEL_FLAGS, ONE_KERNEL_CONTROL), (ONE_KERNEL_INBOXES, 0)):
            retired = (buffer for of, buffer in self._retired if of == name)
            for awaited in (self.buffer(name), *retired):
                if awaited.nbytes:
                    self._fill(awaited.peers[self.rank] + start, self._far, awaited.nbytes - start, stream)

    def _fill(self, at: int, words: Any, nbytes: int, stream: Any) -> None:
        """Queue copies of a host array, one behind the other, over so many bytes of this GPU's memory."""
        for first in range(0, nbytes, words.nbytes):
            some = min(words.nbytes, nbytes - first)
            self._cuda.memcpyAsync(at + first, words.ctypes.data, some, self._cuda.memcpyDefault, stream.ptr)

    def _offset(self, number: int, source: int) -> int:
        if not 0 <= number < FLAGS:
            raise UnsupportedError(f"flag {number} of {FLAGS}")
        return int(self._first + 4 * (number * self.size + self._index[source]))

    def let_go(self) -> None:
        """Free this GPU's memory, but what a user's graph holds, in a broken context whose work has ended. Local.

        The communicator has been aborted, and the windows with it. Peers that still write have mappings of their own,
        with which the memory lasts.
        """
        for buffer in self._buffers.values():
            if buffer is not self._flags and buffer.nbytes and not buffer.captured:
                buffer._memory.close()

    def close(self) -> None:
        """Free all memory, last made first, every step even if one fails. Collective."""
        with ExitStack() as last_first:
            for buffer in (*(buffer for _, buffer in self._retired), *self._buffers.values()):
                last_first.callback(self._release, buffer)
            with self._runtime.agreement("symmetric memory: closing"):
                self._cuda.deviceSynchronize()


def open_windows(runtime: GpuRuntime, nccl: Nccl, kernels: Kernels) -> Windows | str:
    """Return this rank's symmetric memory, or why there is none; the same outcome on every rank. Collective.

    It is shared by all ranks if NCCL gives them each other's addresses, otherwise by those of each node, which are then
    the NVLink domains; also if PBLASMP_RANKS_PER_NODE divides a machine into several nodes.
    """
    from nccl import core

    handle = getattr(core, "RegisteredWindowHandle", None)
    if not hasattr(handle, "get_peer_device_pointer"):
        return "nccl4py 0.4 or later is needed for peers' addresses: pip install -U nccl4py"
    if runtime.size == 1:
        return "one rank has no peers"
    if why_deaf := _why_deaf(runtime):
        runtime.why_unregistered = why_deaf
        return why_deaf
    everyone, nodes = tuple(range(runtime.size)), runtime.nodes
    divided = len(nodes) > 1
    whole = not divided or machines_of(runtime.comm.locations()) == nodes
    why = []
    for domains in ([(everyone,)] if whole else []) + ([tuple(nodes)] if divided else []):
        which = next(i for i, members in enumerate(domains) if runtime.rank in members)
        largest = max(map(len, domains))
        if largest > _MOST_RANKS:
            why.append(f"barriers take {_MOST_RANKS} ranks, not {largest}")
        elif largest == 1:
            why.append("every rank is alone on its node")
        else:
            communicator = nccl.all if len(domains) == 1 else nccl.split(which)
            try:
                return Windows(runtime, communicator, domains, kernels)
            except UnsupportedError as error:
                over = "all ranks" if len(domains) == 1 else "the ranks of each node"
                why.append(f"NCCL has no window over {over}: {error}")
                if isinstance(error, NullWindowError):
                    runtime.why_unregistered = why[-1]
    return "; ".join(why)


def _switched_off() -> str:
    """Return which variables keep NCCL from registering windows, "" if none does. Local.

    Source: NCCL's user guide, environment variables.
    """
    off = [f"{name}=0" for name in ("NCCL_WIN_ENABLE", "NCCL_CUMEM_ENABLE") if os.environ.get(name) == "0"]
    return f", as {' and '.join(off)} asks for" if off else ""


def _why_deaf(runtime: GpuRuntime) -> str:
    """Return why a GPU cannot reach another one of its machine, "" if all can; the same on every rank. Collective.

    Of GPUs that a process does not see CUDA says nothing: then NCCL's windows tell.
    """
    device, cuda, found = runtime.device, runtime.cupy.cuda.runtime, ""
    places = runtime.comm.allgather(device.place)
    with runtime.agreement("symmetric memory: peers"):
        for rank, (bus, machine) in enumerate(places):
            peer = device.index
            if machine == device.place[1]:
                with suppress(cuda.CUDARuntimeError):
                    peer = cuda.deviceGetByPCIBusId(bus)
            if peer != device.index and not cuda.deviceCanAccessPeer(device.index, peer):
                found = f"rank {runtime.rank}'s GPU cannot reach rank {rank}'s (no peer access)"
    return next((each for each in runtime.comm.allgather(found) if each), "")


def _pinned(cupy: Any, count: int, value: int) -> Any:
    """Return an array of the host that copy engines read, filled with one number. Local."""
    words = np.frombuffer(cupy.cuda.alloc_pinned_memory(4 * count), np.uint32, count)
    words[:] = value
    return words
