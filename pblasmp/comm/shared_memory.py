# SPDX-License-Identifier: Apache-2.0
"""Memory that the ranks of a node share, and what they do there: meet at boards, and wait for flags.

It is an anonymous file, mapped by each of them: a memfd is not bounded by the size of /dev/shm, which is 64 MiB in many
containers. A flag says that something is ready: one rank raises it, the others wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from .board import BUSY_SECONDS, LINE, NAP_SECONDS, YIELDS, Board
from .communicator import Communicator, allgather_alike
from .locations import nodes_of
from .post import Carrier, Partners, Post

_MOST_NODES, _MOST_RANKS = 8, 64  # that vote by messages to each node: of more, a reduction takes less time


class SharedMemory:
    """One growing buffer shared by the ranks of a node. Every method is collective over ``node``.

    Args:
        node: the ranks.
        nbytes: its size at first.

    Attributes:
        why_not: empty, or why the ranks of this node cannot share memory.
    """

    def __init__(self, node: Communicator, nbytes: int = mmap.PAGESIZE) -> None:
        self._node = node
        self._map: mmap.mmap | None = None
        self._size = 0
        self.why_not = self._grow(nbytes)

    def array(self, nbytes: int) -> NDArray[np.uint8]:
        """Return ``nbytes`` of the buffer, growing it if needed, which loses its contents."""
        if nbytes > self._size:
            why_not = self._grow(nbytes)
            if why_not:
                raise MemoryError(why_not)
        assert self._map is not None
        return np.frombuffer(self._map, np.uint8, nbytes)

    @property
    def nbytes(self) -> int:
        """The buffer's size. Local."""
        return self._size

    def close(self) -> None:
        """Unmap the buffer; arrays that were handed out keep their memory as long as they exist."""
        self._map = None
        self._size = 0

    def _grow(self, nbytes: int) -> str:
        self.close()
        file: io.FileIO | None = None
        mapped = None
        path, inode, why_not = "", 0, ""
        if self._node.rank == 0:
            try:
                file = _opened(os.memfd_create, "pblasmp", os.MFD_CLOEXEC)
                os.ftruncate(file.fileno(), nbytes)
                path, inode = f"/proc/{os.getpid()}/fd/{file.fileno()}", os.fstat(file.fileno()).st_ino
            except (AttributeError, OSError, OverflowError) as error:
                why_not = f"cannot create an anonymous file of {nbytes} bytes: {error}"
        try:
            path, inode = self._node.bcast((path, inode))
            if path:
                try:
                    if self._node.rank != 0:
                        file = _opened(os.open, path, os.O_RDWR | os.O_CLOEXEC)
                        if os.fstat(file.fileno()).st_ino != inode:  # containers number processes separately
                            raise OSError("the ranks do not see each other's processes")
                    assert file is not None
                    mapped = mmap.mmap(file.fileno(), nbytes)
                except (OSError, ValueError, OverflowError, MemoryError) as error:
                    why_not = f"cannot open the memory shared by the ranks of this node: {error}"
            # Nothing can fail from here on. Rank 0's descriptor has stayed open until all ranks had opened the file.
            reasons = [reason for reason in allgather_alike(self._node, why_not) if reason]
        finally:
            if file is not None:
                file.close()
        if not reasons:
            self._map, self._size = mapped, nbytes
            if mapped is not None and hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # huge pages are faster, if the kernel has them
                    mapped.madvise(mmap.MADV_HUGEPAGE)
        return reasons[0] if reasons else ""


def _opened(opener: Callable[[str, int], int], path: str, flags: int) -> io.FileIO:
    """Return an open file that is closed with its object: a signal's handler may raise anywhere but within ``map``."""
    return next(map(io.FileIO, map(opener, [path], [flags]), ["r+b"]))


def aligned(nbytes: int, boundary: int = 4096) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``boundary``. Local."""
    return -(-nbytes // boundary) * boundary


def carve(
    memory: NDArray[np.uint8], at: int, shape: tuple[int, int], dtype: np.dtype, order: Any
) -> NDArray[Any]:
    """Return a 2D array ``at`` bytes into ``memory``. Local."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    return memory[at : at + nbytes].view(dtype).reshape(shape, order=order)


def make_boards(comm: Communicator, number: int) -> list[Board] | list[None]:
    """Return ``number`` boards of the ranks of ``comm``; each None if one has no core, or they share no memory.

    Collective.
    """
    if comm.size == 1:
        return [None] * number
    locations = comm.locations()
    core = _core.load()
    if core is None or len({each.core for each in locations}) > 1 or len(nodes_of(locations)) > 1:
        return [None] * number
    shape = number, 2, comm.size + 1, LINE
    nbytes = 8 * math.prod(shape)
    memory = SharedMemory(comm, nbytes)
    if memory.why_not:
        return [None] * number
    processes = [(each.process, each.began) for each in locations]
    return [
        Board(core, lines, comm.rank, processes)
        for lines in memory.array(nbytes).view(np.int64).reshape(shape)
    ]


def open_boards(comm: Communicator, control: Communicator) -> None:
    """Let the same ranks of two communicators meet by boards, those of ``control`` also between nodes. Collective."""
    comm.board, control.board = make_boards(comm, 2)
    if control.board is not None:
        control.board.here = comm.board
    elif isinstance(control, Carrier):
        control.board = _between_nodes(comm, control)


def _between_nodes(comm: Communicator, control: Carrier) -> Board | None:
    """Return the board of the ranks of several nodes; None if one has no core, or they are too many. Collective."""
    locations = comm.locations()
    nodes, core = nodes_of(locations), _core.load()
    few = 1 < len(nodes) <= _MOST_NODES and comm.size <= _MOST_RANKS
    if core is None or len({each.core for each in locations}) > 1 or not few:
        return None
    here = next(ranks for ranks in nodes if comm.rank in ranks)
    shapes = (2, comm.size + 1, LINE), (2, len(here) + 1, LINE)
    sizes = [8 * math.prod(shape) for shape in shapes]
    node = comm.node or comm.split(nodes)
    memory = SharedMemory(node, sum(sizes))
    if node is not comm.node:
        node.free()
    functions, post = control.for_core(Partners(comm.rank, nodes).ranks), None
    with contextlib.suppress(MemoryError, OSError):
        post = Post(control, functions, nodes) if functions else None
    refused = any(allgather_alike(comm, memory.why_not or post is None))
    if refused or post is None:
        return None
    control.channel.posts.append(post)
    both = memory.array(sum(sizes)).view(np.int64)
    lines, lines_here = both[: sizes[0] // 8].reshape(shapes[0]), both[sizes[0] // 8 :].reshape(shapes[1])
    processes = [(each.process, each.began) for each in locations]
    mine = [process if rank in here else None for rank, process in enumerate(processes)]
    board = Board(core, lines, comm.rank, mine, post)
    if len(here) > 1:
        board.here = Board(core, lines_here, here.index(comm.rank), [processes[rank] for rank in here])
    return board


class Progress:
    """Numbered things, each of which one rank makes and all ranks may wait for. Making one is local.

    The ranks have a board; ``flags`` has an int64 for each thing, in shared memory and 0 at first.
    """

    def __init__(self, comm: Communicator, flags: NDArray[np.int64]) -> None:
        core = _core.load()
        assert core is not None
        self._comm, self._core = comm, core
        self._flags = flags  # they stay as long as there is an address of theirs
        self._at = ctypes.c_void_p(flags.ctypes.data)

    def done(self, i: int) -> None:
        """Say that thing ``i`` is ready. Local."""
        self._core.flag_raise(self._at, i)

    def wait(self, i: int) -> None:
        """Wait until thing ``i`` is ready. Local."""
        if not self._core.flag_await(self._at, i, YIELDS if self._comm.patient else 0):
            self._comm.wait(_Awaited(self._core, self._at, i))


def await_flag(comm: Communicator, address: int) -> None:
    """Wait until the flag at an address is up. Local."""
    core = _core.load()
    assert core is not None
    comm.wait(_Awaited(core, ctypes.c_void_p(address), 0))


class _Awaited:
    """The wait for one thing, with the interface of the requests of mpi4py and of process groups."""

    def __init__(self, core: _core.Core, at: ctypes.c_void_p, i: int) -> None:
        self._core, self._at, self._i = core, at, i
        self._since = time.monotonic()

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        return bool(self._core.flag_is_up(self._at, self._i))

    def sleep(self) -> None:
        """Sleep until it is ready, but not for long."""
        self._core.flag_sleep(self._at, self._i, int(1e6 * NAP_SECONDS))

    def pause(self) -> None:
        """Yield the core, and sleep if the wait is long."""
        if time.monotonic() - self._since < BUSY_SECONDS:
            os.sched_yield()
        else:
            self.sleep()
