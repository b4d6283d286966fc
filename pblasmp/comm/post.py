# SPDX-License-Identifier: Apache-2.0
"""Messages between nodes: each rank sends one to each other node: what it brings to a meeting and what goes with that.

Who receives it writes its line on the board that the ranks of the node share. So a vote takes one exchange, whatever
travels with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _core
from .communicator import Parcel, Request
from .mpi_communicator import MpiCommunicator

__all__ = ["LARGEST", "Post"]

LARGEST = 4 << 20  # bytes that go with what a rank brings, at most
_HEAD_BYTES = 8 * (_core.VALUES + 1)  # before them, integers: what it brings, and how many bytes follow


class Post:
    """The messages of one rank. Making one is local.

    Args:
        comm: the ranks, whose messages no other object sends or receives.
        nodes: those of each node.

    Attributes:
        node_of: the node of each rank.
    """

    def __init__(self, comm: MpiCommunicator, nodes: Sequence[tuple[int, ...]]) -> None:
        self._comm = comm
        self.node_of = np.empty(comm.size, np.int64)
        for node, ranks in enumerate(nodes):
            self.node_of[list(ranks)] = node
        here = nodes[self.node_of[comm.rank]]
        place = here.index(comm.rank)
        self._letters = [
            (node, _Sheet(ranks[place % len(ranks)])) for node, ranks in enumerate(nodes) if ranks != here
        ]
        self._boxes = [
            _Sheet(rank)
            for ranks in nodes
            if ranks != here
            for at, rank in enumerate(ranks)
            if here[at % len(here)] == comm.rank
        ]
        self._awaited: list[tuple[_Sheet, Request]] = []
        self._sent: list[Request] = []
        self._number = 0
        self._parcel: Parcel | None = None

    def send(self, values: memoryview, parcel: Parcel | None) -> None:
        """Send other nodes what this rank brings to a meeting: ``arrived`` receives what others bring. Local."""
        comm = self._comm
        self._parcel, self._number = parcel, values[1]
        self._awaited = [(box, comm.irecv_at_most(box.all, box.rank)) for box in self._boxes]
        self._sent = []
        for node, letter in self._letters:
            nbytes = 0 if parcel is None else parcel.pack(node, letter.address + _HEAD_BYTES)
            letter.head[:-1], letter.head[-1] = values, nbytes
            self._sent.append(comm.isend_whole(letter.all[: _HEAD_BYTES + nbytes], letter.rank))

    def arrived(self, deliver: Callable[[int, int], Any]) -> bool:
        """Deliver what has arrived; return whether that is all, and everything has been sent. Local.

        Args:
            deliver: is given a rank, and the address of what it brings; what goes with that has been taken, if both
                vote for the same.
        """
        awaited = []
        for box, request in self._awaited:
            if not request.Test():
                awaited.append((box, request))
                continue
            if self._parcel is not None and box.head[1] == self._number and not box.head[2]:
                taken = self._parcel.unpack(box.rank, box.address + _HEAD_BYTES)
                assert taken == box.head[-1]
            deliver(box.rank, box.address)
        self._awaited = awaited
        if self._sent:
            self._sent = [each for each in self._sent if not each.Test()]
        return not (awaited or self._sent)

    def exchange(self, parcel: Parcel) -> None:
        """See ``Votes``. Collective."""
        requests, receives = [], []
        for box in self._boxes:
            nbytes = parcel.unpack(box.rank, 0)
            if nbytes:
                receives.append((box, self._comm.irecv_at_most(box.all[:nbytes], box.rank)))
        for node, letter in self._letters:
            nbytes = parcel.pack(node, letter.address)
            if nbytes:
                requests.append(self._comm.isend_whole(letter.all[:nbytes], letter.rank))
        for box, request in receives:
            self._comm.wait(request)
            parcel.unpack(box.rank, box.address)
        for request in requests:
            self._comm.wait(request)


class _Sheet:
    """Room for what goes to a rank, or comes from it: a head, and at most so many bytes. Most is never touched."""

    def __init__(self, rank: int) -> None:
        self.rank, self.all = rank, np.empty(_HEAD_BYTES + LARGEST, np.uint8)
        self.head = self.all[:_HEAD_BYTES].view(np.int64).data
        self.address = self.all.ctypes.data
