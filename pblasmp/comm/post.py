# SPDX-License-Identifier: Apache-2.0
"""Messages between nodes, sent by the compiled core: which rank sends to which, and the room for messages.

Each rank sends one message to each other node: what it brings to a meeting and what goes with that. See ``post.h``.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .. import _core
from .communicator import Communicator, Request

LARGEST = 20 << 20  # bytes that go with what a rank brings, at most
_HEAD_BYTES = 8 * (_core.VALUES + 1)  # before them, integers: what it brings, and how many bytes follow


@runtime_checkable
class Carrier(Communicator, Protocol):
    """A communicator by which the compiled core sends messages."""

    def for_core(self, ranks: Collection[int]) -> tuple[int | None, ...]:
        """Return what the core sends messages to these ranks by, and receives them from them. Collective.

        Three functions that do what MPI_Isend, MPI_Irecv and MPI_Test do, and what they take for the type of bytes, the
        communicator and a tag; nothing if there are none, on every rank.
        """

    def request(self) -> tuple[Request, int]:
        """Return a request of no message yet, and the address of its handle. Local."""

    def count_messages(self, rank: int, number: int, *, receives: bool) -> None:
        """Count messages that the core has begun to send to a rank, or to receive from it. Local."""

    def failure(self, code: int) -> Exception:
        """Return the error that a number stands for which one of the functions has returned. Local."""


class Partners:
    """With whom a rank exchanges messages. Making one is local.

    ``letters``: to whom this rank sends; ``boxes``: from whom it receives; each a node and a rank.
    """

    def __init__(self, rank: int, nodes: Sequence[tuple[int, ...]]) -> None:
        self.node = next(node for node, ranks in enumerate(nodes) if rank in ranks)
        here = nodes[self.node]
        place = here.index(rank)
        others = [(node, ranks) for node, ranks in enumerate(nodes) if node != self.node]
        self.letters = [(node, ranks[place % len(ranks)]) for node, ranks in others]
        self.boxes = [
            (node, other)
            for node, ranks in others
            for at, other in enumerate(ranks)
            if here[at % len(here)] == rank
        ]

    @property
    def ranks(self) -> set[int]:
        """All of them."""
        return {rank for _, rank in (*self.letters, *self.boxes)}


class Post:
    """The messages of one rank; ``state`` is what the compiled core knows of them. Making one is local."""

    def __init__(
        self, comm: Carrier, functions: Sequence[int | None], nodes: Sequence[tuple[int, ...]]
    ) -> None:
        self._comm = comm
        self.node_of = np.empty(comm.size, np.int64)
        for node, ranks in enumerate(nodes):
            self.node_of[list(ranks)] = node
        partners = Partners(comm.rank, nodes)
        self._letters, self._boxes = (
            [Sheet(comm, *each) for each in some] for some in (partners.letters, partners.boxes)
        )
        self._states = [_states(each) for each in (self._letters, self._boxes)]
        self.state = _core.PostState(*functions, LARGEST, *self._states, len(self._letters), len(self._boxes))

    def check(self) -> None:
        """Raise the error of a message, if there was one. Local."""
        if self.state.error:
            raise self._comm.failure(self.state.error)

    def under_way(self) -> list[tuple[Any, bool]]:
        """Return the messages that are under way, and whether they are received; count those that have begun. Local."""
        for states, receives in zip(self._states, (False, True), strict=True):
            for each in states:
                self._comm.count_messages(each.rank, each.begun, receives=receives)
                each.begun = 0
        sheets = [(each, False) for each in self._letters] + [(each, True) for each in self._boxes]
        return [each for each in sheets if each[0]]


class Sheet:
    """Room for what goes to a rank, or comes from it: a head, and at most so many bytes. Most is never touched.

    It has the interface of the request of its message.
    """

    def __init__(self, comm: Carrier, node: int, rank: int) -> None:
        self._request, self._address = comm.request()
        # not of the heap: NumPy asks for huge pages there, and what contexts have touched stays after them
        room = mmap.mmap(-1, _HEAD_BYTES + LARGEST, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.all = np.frombuffer(room, np.uint8)
        self._about = rank, node

    def state(self) -> _core.SheetState:
        """Return what the compiled core knows of it. Local."""
        return _core.SheetState(*self._about, self.all.ctypes.data, self._address)

    def __bool__(self) -> bool:
        return bool(self._request)

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Return whether its message is done. Local."""
        return bool(self._request.Test())

    def Cancel(self) -> None:  # noqa: N802
        """Receive nothing any more. Local."""
        self._request.Cancel()


def _states(sheets: Sequence[Sheet]) -> Any:
    return (_core.SheetState * len(sheets))(*(each.state() for each in sheets))
