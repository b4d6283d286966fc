# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of this process: a communicator without MPI."""

from __future__ import annotations

import pickle
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np

from pblasmp.comm.communicator import bytes_of
from pblasmp.comm.locations import Location
from pblasmp.comm.notes import Meeting
from pblasmp.comm.side_channel import SideChannel

LIMIT = 10.0  # seconds that a rank waits for others


class Group:
    """What the ranks of one communicator share: a blackboard for each collective call, and a mailbox for each pair.

    Attributes:
        failed: a rank has ended, and no other need wait.
    """

    def __init__(self, size: int, parent: Group | None = None) -> None:
        self.size = size
        self.parent = parent
        self.failed = False
        self.mail: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
        self.parts: dict[tuple[int, int], Group] = {}
        self.lock = threading.Condition()
        self.notes: list[tuple[int, int | None, bytes]] = []
        self.boards: dict[int, dict[int, Any]] = {}

    def part(self, turn: int, color: int, size: int) -> Group:
        """The group that ranks which split this one in the same call share."""
        with self.lock:
            return self.parts.setdefault((turn, color), Group(size, self))

    def alive(self, since: float) -> None:
        """Raise if what has been waited for since then will not come."""
        if self.failed:
            raise Aborted(1)
        if self.parent is not None:
            self.parent.alive(since)
        elif time.monotonic() > since + LIMIT:
            raise TimeoutError("a rank waits in vain")


class Notes:
    """Notes by way of the group's board."""

    any_thread = True

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank, self.read = group, rank, 0

    def send(self, note: bytes, to: int | None = None) -> None:
        self.group.notes.append((self.rank, to, note))

    def arrived(self) -> list[bytes]:
        new, self.read = self.group.notes[self.read :], len(self.group.notes)
        return [note for rank, to, note in new if (rank != self.rank if to is None else to == self.rank)]


class Aborted(BaseException):
    """The job was aborted with this status."""


class Request:
    """A collective call in progress."""

    def __init__(self, comm: ThreadComm, turn: int, out: np.ndarray) -> None:
        self.comm, self.turn, self.out, self.since = comm, turn, out, time.monotonic()

    def Test(self) -> bool:  # noqa: N802 - as in mpi4py
        board = self.comm.group.boards[self.turn]
        self.comm.group.alive(self.since)
        if len(board) < self.comm.size:
            return False
        self.out[...] = np.max(list(board.values()), axis=0)
        return True


class Transfer:
    """A message of a pair of ranks: the ``number``-th, which is taken when it is there."""

    def __init__(
        self, group: Group, pair: tuple[int, int], number: int, out: np.ndarray | None = None
    ) -> None:
        self.group, self.pair, self.number, self.out = group, pair, number, out
        self.since = time.monotonic()

    def __bool__(self) -> bool:
        return self.out is not None

    def Test(self) -> bool:  # noqa: N802 - as in mpi4py
        mail = self.group.mail[self.pair]
        if self.out is not None and len(mail) > self.number:
            bytes_of(self.out)[...], self.out = mail[self.number], None
        if self.out is not None:
            self.group.alive(self.since)
        return self.out is None


class ThreadComm:
    """One rank's communicator. Calls and messages are matched in order, as MPI does."""

    def __init__(self, group: Group, rank: int, channel: SideChannel | None = None) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self.owns_channel = channel is None
        if channel is None:
            channel = SideChannel(rank, tuple(range(group.size)))
            channel.index = 0  # of one process they would all be different
            channel.connect(Notes(group, rank))
        self.channel = channel
        self.board: Any = None
        self.node: Any = None
        self.turn = 0
        self.received: dict[int, int] = defaultdict(int)

    patient = property(lambda self: True, lambda self, patient: None)  # a thread that spins stops the others

    def _post(self, value: Any) -> int:
        turn, self.turn = self.turn, self.turn + 1
        with self.group.lock:
            self.group.boards.setdefault(turn, {})[self.rank] = value
        return turn

    def all_of(self, turn: int) -> list[Any]:
        board, since = self.group.boards[turn], time.monotonic()

        def done() -> bool:
            self.group.alive(since)
            return len(board) == self.size

        self.channel.until(done, patient=True)
        return [board[rank] for rank in range(self.size)]

    def imax(self, values: np.ndarray, out: np.ndarray) -> Request:
        return Request(self, self._post(values.copy()), out)

    def allgather(self, value: Any) -> list[Any]:
        return [pickle.loads(each) for each in self.all_of(self._post(pickle.dumps(value)))]

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value)[root]

    def barrier(self) -> None:
        self.allgather(None)

    def sum_into(self, array: np.ndarray) -> None:
        array[...] = np.sum(self.all_of(self._post(array.copy())), axis=0, dtype=array.dtype)

    def bcast_into(self, array: np.ndarray, root: int) -> None:
        array[...] = self.all_of(self._post(array.copy()))[root]

    def wait(self, request: Any, place: Meeting | None = None) -> None:
        since = time.monotonic()

        def done() -> bool:
            if request.Test():
                return True
            self.group.alive(since)  # a board does not look
            return False

        self.channel.until(done, patient=True, place=place)

    def wait_some(self, requests: Sequence[Any]) -> list[int]:
        self.channel.until(lambda: self.test_some(requests), patient=True)
        return [i for i, request in enumerate(requests) if not request]

    def test_some(self, requests: Sequence[Any]) -> list[int]:
        return [i for i, request in enumerate(requests) if request.Test()]

    def isend(self, array: np.ndarray, dest: int) -> list[Any]:
        self.group.mail[self.rank, dest].append(bytes_of(array).copy())
        return [self.channel.watch(Transfer(self.group, (self.rank, dest), 0))]

    def irecv(self, array: np.ndarray, source: int) -> list[Any]:
        number, self.received[source] = self.received[source], self.received[source] + 1
        transfer = Transfer(self.group, (source, self.rank), number, array)
        return [self.channel.watch(transfer, receives=True)]

    def locations(self) -> list[Location]:
        return [Location.here()] * self.size

    def split(self, groups: Sequence[Sequence[int]]) -> ThreadComm:
        color, ranks = next((i, list(each)) for i, each in enumerate(groups) if self.rank in each)
        return ThreadComm(self._part(color, len(ranks)), sorted(ranks).index(self.rank), self.channel)

    def duplicate(self) -> ThreadComm:
        return ThreadComm(self._part(0, self.size), self.rank)

    def _part(self, color: int, size: int) -> Group:
        turn = self._post(None)
        self.all_of(turn)
        return self.group.part(turn, color, size)

    def abort(self, code: int) -> NoReturn:
        self.group.failed = True
        raise Aborted(code)

    def gone(self) -> bool:
        return False

    def free(self) -> None:
        if self.owns_channel:
            self.channel.close()


def on_ranks(size: int, work: Callable[[ThreadComm], Any]) -> list[Any]:
    """Return what ``work`` returned on each rank, or the exception that it raised there."""
    group = Group(size)

    def one(rank: int) -> Any:
        try:
            return work(ThreadComm(group, rank))
        except BaseException as error:  # noqa: BLE001 - it is the result
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
