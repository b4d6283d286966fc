# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory through NCCL's windows: growing buffers that plans share, peers' addresses, flags and barriers.

How ranks signal each other follows from measurements on NVLink. While a GEMM holds all multiprocessors, a kernel that
signals or waits is not scheduled before the GEMM ends. So a flag is a copy of 4 bytes after the data, in the same
stream. A stream waits for flags in this GPU's own memory: next to a GEMM by stream memory operations, otherwise by a
kernel, which sees a flag about 15 us sooner. Barriers are kernels: at the start and at the end of a product, and
between its GEMMs and its sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np

from ....errors import StatusError, UnsupportedError
from ....memory.workspace import roomy
from ..kernels.kernels import Kernels
from .flags import FLAGS, SLOTS

__all__ = ["ONE_KERNEL_FLAGS", "Buffer", "Windows", "check_driver", "nccl_handle", "open_windows"]

ONE_KERNEL_FLAGS = "one_kernel flags"
"""The symmetric buffer of the flags of ``one_kernel.cu``."""

KINDS = "end", "between"
"""Barriers: of one product and the next; within a product."""

_UP = 1
_ROUNDED = 512 << 20  # bytes, at most, that NCCL adds to an allocation, for multicast
_FAR = 0x3F  # fill byte: larger than any real count of products


class Buffer:
    """Symmetric memory under a name. Its addresses change when it grows: ask for them in every run.

    Attributes:
        peers: the addresses of every rank's buffer, as this rank sees them.
        nbytes: its size.
    """

    __slots__ = ("_memory", "_window", "nbytes", "peers")

    def __init__(self) -> None:
        self.peers: list[int] = []
        self.nbytes = 0
        self._memory: Any = None
        self._window: Any = None


class Windows:
    """The symmetric memory of a communicator whose ranks reach each other's GPUs. Use ``open_windows``.

    Args:
        session: ``rank``, ``size``, ``device`` (its index), ``nccl`` (nccl4py's communicator), ``cupy``, ``agreement``,
            ``synchronize``, ``wait``, ``arena`` (see ``Session``).
        kernels: for the barriers.
    """

    def __init__(self, session: Any, kernels: Kernels) -> None:
        import nccl.core
        from cuda.bindings import driver

        self.rank, self.size = session.rank, session.size
        self._session, self._kernels = session, kernels
        self._core, self._driver = nccl.core, driver
        self._awaiting: dict[int, list[Any]] = {}  # batched operations on a flag, by its address
        self._cupy = session.cupy
        self._runtime = session.cupy.cuda.runtime
        self._agreement = session.agreement
        self._buffers: dict[str, Buffer] = {}
        with self._agreement("symmetric memory"):
            stream = session.cupy.cuda.Stream(non_blocking=True)
            self._up = session.cupy.full(FLAGS * self.size, _UP, np.uint32)
        words = len(KINDS) * (self.size + 2) + FLAGS * self.size
        self._flags = self.reserve("flags", 4 * words)
        self._first = 4 * len(KINDS) * (self.size + 2)
        try:
            with self._agreement("symmetric memory: barriers"):
                free, copy = self._offset(SLOTS.first, 0), self._runtime.memcpyDefault
                at, ups = self._flags.peers[self.rank], int(self._up.data.ptr)
                self._runtime.memcpyAsync(at + free, ups, 4 * SLOTS.count * self.size, copy, stream.ptr)
                self.arrive(stream)  # there is no product before the first one to wait for
                session.wait(stream)
        except BaseException:
            self._release(self._flags)
            raise

    # -- memory

    def buffer(self, name: str) -> Buffer:
        """Return the buffer of that name, empty until it is reserved. Local."""
        return self._buffers.setdefault(name, Buffer())

    def reserve(self, name: str, nbytes: int) -> Buffer:
        """Return a buffer of at least ``nbytes``, the same number on every rank. Collective if it must grow.

        Waits for all work in flight before a buffer is replaced. New memory is zero. If a rank fails, the buffer stays
        as it was, on every rank.

        Raises:
            MemoryError: a rank has no room; raised on every rank.
            StatusError: NCCL fails on a rank; raised on every rank.
            UnsupportedError: a rank does not reach another one's memory; raised on every rank.
        """
        buffer = self.buffer(name)
        if nbytes <= buffer.nbytes:
            return buffer
        nbytes = roomy(nbytes)
        what = f"{nbytes} bytes of symmetric memory for {name!r}"
        with ExitStack() as new:  # is given back if a rank fails
            with self._agreement(what):
                self._session.synchronize()
                memory = self._allocated(nbytes, what)
                new.callback(memory.close)
                self._runtime.memset(int(memory.handle), 0, nbytes)
                self._runtime.deviceSynchronize()
                pointer = self._cupy.cuda.MemoryPointer(
                    self._cupy.cuda.UnownedMemory(int(memory.handle), nbytes, memory, self._session.device), 0
                )
                array = self._cupy.ndarray(nbytes, np.uint8, pointer)
            with self._agreement(what, blocks=True):
                flags = self._core.WindowFlag.COLL_SYMMETRIC
                window = self._session.nccl.register_window(array, flags=flags)
                new.callback(window.close)
                peers = [window.get_peer_device_pointer(rank) for rank in range(self.size)]
                missing = [rank for rank, address in enumerate(peers) if not address]
                if missing:
                    raise UnsupportedError(f"rank {self.rank} cannot reach rank {missing[0]}'s GPU memory")
            new.pop_all()
        if buffer.nbytes:
            self._session.arena.replaced()
        try:
            self._release(buffer)  # all ranks have agreed, and so are idle
        finally:
            buffer._memory, buffer._window, buffer.nbytes = memory, window, nbytes
            buffer.peers = [int(address) for address in peers]
            buffer.peers[self.rank] = int(memory.handle)
        return buffer

    def _allocated(self, nbytes: int, what: str) -> Any:
        """Return new memory; if little is free, memory that CuPy keeps for later arrays is freed first."""
        free, _ = self._runtime.memGetInfo()
        if free < 2 * nbytes:
            self._cupy.get_default_memory_pool().free_all_blocks()
        try:
            return self._core.mem_alloc(nbytes, self._session.device)
        except Exception as error:
            free, _ = self._runtime.memGetInfo()
            if free < nbytes + _ROUNDED:  # NCCL does not tell why
                raise MemoryError(f"{what}: the GPU has {free} free: {error}") from error
            raise StatusError(f"{what}: {type(error).__name__}: {error}") from error

    def _release(self, buffer: Buffer) -> None:
        """Free a buffer's memory. Collective if it has any."""
        window, memory = buffer._window, buffer._memory
        buffer._window = buffer._memory = None
        buffer.peers, buffer.nbytes = [], 0
        with ExitStack() as last_first:
            if memory is not None:
                last_first.callback(memory.close)
            if window is not None:
                last_first.callback(window.close)

    # -- barriers: kernels, for times when no GEMM runs

    def arrive(self, stream: Any) -> None:
        """Queue: signal every rank that this rank's product has ended. Local."""
        self._signal("arrive", stream, 0)

    def await_all(self, stream: Any) -> None:
        """Queue: wait until every rank's previous product has ended. Local."""
        self._signal("await", stream, 0)

    def meet(self, stream: Any) -> None:
        """Queue a barrier within a product: after it, every rank sees what was stored before it. Local."""
        self._signal("meet", stream, 1)

    def _signal(self, what: str, stream: Any, kind: int) -> None:
        self._kernels.signal(what, stream, self._flags.peers, self.rank, kind, len(KINDS))

    # -- flags: copies of 4 bytes

    def raise_flag(self, stream: Any, rank: int, number: int) -> None:
        """Queue: signal ``rank`` that all earlier work on this stream is done. Once for each wait there. Local."""
        at = self._flags.peers[rank] + self._offset(number, self.rank)
        self._runtime.memcpyAsync(at, int(self._up.data.ptr), 4, self._runtime.memcpyDefault, stream.ptr)

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

        For a broken context: the work that follows reads whatever is in its buffers. Local.
        """
        at, copy = self._flags.peers[self.rank], self._runtime.memcpyDefault
        self._runtime.memsetAsync(at, _FAR, 4 * len(KINDS) * self.size, stream.ptr)
        ups = int(self._up.data.ptr)
        self._runtime.memcpyAsync(at + self._first, ups, 4 * FLAGS * self.size, copy, stream.ptr)
        counts = self.buffer(ONE_KERNEL_FLAGS)
        if counts.nbytes:
            self._runtime.memsetAsync(counts.peers[self.rank], _FAR, counts.nbytes, stream.ptr)

    def _offset(self, number: int, source: int) -> int:
        if not 0 <= number < FLAGS:
            raise UnsupportedError(f"flag {number} of {FLAGS}")
        return int(self._first + 4 * (number * self.size + source))

    def close(self) -> None:
        """Free all memory, last made first, every step even if one fails. Collective."""
        with ExitStack() as last_first:
            for buffer in self._buffers.values():
                last_first.callback(self._release, buffer)
            with self._agreement("symmetric memory: closing"):
                self._runtime.deviceSynchronize()


def open_windows(session: Any, kernels: Kernels) -> Windows | str:
    """Return the ranks' symmetric memory, or why there is none; the same outcome on every rank. Collective.

    Args:
        session: as for ``Windows``.
        kernels: for the barriers.
    """
    import nccl.core

    handle = getattr(nccl.core, "RegisteredWindowHandle", None)
    if not hasattr(session.nccl, "register_window") or not hasattr(handle, "get_peer_device_pointer"):
        return "nccl4py 0.4 or later is needed for peers' addresses: pip install -U nccl4py"
    if session.size == 1:
        return "one rank has no peers"
    try:
        return Windows(session, kernels)
    except UnsupportedError as error:
        return f"NCCL has no window over all ranks: {error}"


def nccl_handle(communicator: Any) -> Any:
    """Return what nccl4py's bindings take for its communicator: an object, or before 0.6 an address. Local."""
    from nccl.bindings import nccl

    return getattr(nccl, "Comm", int)(communicator.ptr)


def check_driver(result: tuple[Any, ...]) -> None:
    """Raise StatusError if a call of CUDA's driver reports an error. Local."""
    status = result[0]
    if status:
        raise StatusError(f"CUDA driver: {status.name}")
