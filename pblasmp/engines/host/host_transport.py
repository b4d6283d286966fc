# SPDX-License-Identifier: Apache-2.0
"""How CPU ranks exchange data: through MPI messages, and memory that the ranks of a node share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm import Communicator, SharedMemory
from ...comm.shared_memory import Progress, await_flag
from ...logs import logger
from ...resources import available_bytes
from ..protocol import SHARE, Transfer, Transport


class Buffers:
    """Named buffers that all products of an engine use, one at a time; some are shared by the ranks of a node."""

    def __init__(self, node: Communicator) -> None:
        self.node = node
        self._shared: dict[str, SharedMemory] = {}
        self._private: dict[str, NDArray[np.uint8]] = {}

    def get(self, name: str, nbytes: int, *, shared: bool) -> NDArray[np.uint8]:
        """Return at least ``nbytes`` of buffer ``name``. With ``shared``: collective over the node."""
        if shared:
            nbytes = max(1, nbytes)
            if name not in self._shared:
                self._shared[name] = SharedMemory(self.node, nbytes)
            return self._shared[name].array(nbytes)
        if name not in self._private or self._private[name].size < nbytes:
            self._private[name] = np.empty(max(1, nbytes), np.uint8)
            logger.debug("buffer %s grown to %d bytes", name, nbytes)
        return self._private[name]

    def held(self, prefix: str) -> tuple[int, int]:
        """Return the bytes of private and of shared buffers whose names begin with ``prefix``. Local."""
        private = sum(array.size for name, array in self._private.items() if name.startswith(prefix))
        return private, sum(m.nbytes for name, m in self._shared.items() if name.startswith(prefix))

    def holds(self, name: str, nbytes: int) -> bool:
        """Return whether a shared buffer is that large. Local."""
        return name in self._shared and nbytes <= self._shared[name].nbytes

    def why_not_shared(self, name: str, nbytes: int) -> str:
        """Make a shared buffer; return an empty string, or why ranks cannot share memory. Collective over the node."""
        memory = self._shared[name] = SharedMemory(self.node, nbytes)
        return memory.why_not

    def close(self) -> None:
        """Free everything."""
        for memory in self._shared.values():
            memory.close()
        self._shared.clear()
        self._private.clear()


Array = NDArray[Any]

_FRESH_SECONDS = 1.0  # for so long what is available is not read again, which takes 22 files in a container


class HostTransport(Transport):
    """See ``engines.protocol.Transport``. Making one is local.

    Args:
        buffers: memory that all products use, one at a time.
        why_not_shared: empty, or why ranks cannot share memory.
    """

    def __init__(
        self, comm: Communicator, nodes: Sequence[tuple[int, ...]], buffers: Buffers, why_not_shared: str
    ) -> None:
        self.rank, self.size, self.nodes = comm.rank, comm.size, tuple(nodes)
        self.why_not_shared = why_not_shared
        self.comm, self._buffers = comm, buffers
        self._free = self._read_at = 0.0

    def start(self, sends: Sequence[tuple[Array, int]], receives: Sequence[tuple[Array, int]]) -> Transfer:
        requests = [request for array, rank in receives for request in self.comm.irecv(array, rank)]
        requests += [request for array, rank in sends for request in self.comm.isend(array, rank)]
        return _MpiMessages(self.comm, requests, [array for array, _ in (*sends, *receives)])

    def fence(self) -> None:
        """Wait until every rank of the node has written what they share. Collective over the node."""
        comm = self.comm.node or self.comm
        if comm.board is None:
            comm.barrier()
            return
        if not comm.board.meet(patient=comm.patient):
            comm.wait(comm.board.latest())

    def arrive(self) -> None:
        """Take part in a ``fence`` of the other ranks without waiting for them, if this one reads nothing. Local.

        The ranks vote by a board, and do so before any of them meets again.
        """
        assert self.comm.board is not None
        self.comm.board.arrive()

    def buffer(self, name: str, nbytes: int, *, shared: bool) -> NDArray[np.uint8]:
        return self._buffers.get(f"transport {name}", nbytes, shared=shared)

    def progress(self, flags: NDArray[np.int64]) -> Progress:
        """Return flags in shared memory. Local."""
        return Progress(self.comm, flags)

    def await_flag(self, address: int) -> None:
        """Wait until a flag in shared memory is up. Local."""
        await_flag(self.comm, address)

    def holds(self, name: str, nbytes: int) -> bool:
        return self._buffers.holds(f"transport {name}", nbytes)

    def _available(self) -> int:
        now = time.monotonic()
        if not self._read_at or now > self._read_at + _FRESH_SECONDS:
            self._free, self._read_at = available_bytes(), now
        mine = self._free, *self._buffers.held("transport ")
        memory: list[tuple[float, int, int]] = self._buffers.node.allgather(mine)
        free = min(each for each, *_ in memory)
        return int(free * SHARE) + sum(own for _, own, _ in memory) + max(shared for *_, shared in memory)


class _MpiMessages:
    """Messages in flight, with the arrays that they need."""

    def __init__(self, comm: Communicator, requests: list[Any], arrays: list[Array]) -> None:
        self._comm, self._requests, self._arrays = comm, requests, arrays

    def done(self) -> bool:
        """Return whether all messages have been sent and received. Local."""
        self._requests = [request for request in self._requests if not request.Test()]
        return not self._requests

    def finish(self) -> None:
        """Wait until all messages have been sent and received. Local."""
        for request in self._requests:
            self._comm.wait(request)
        self._requests, self._arrays = [], []
