# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of this process: what agreement asks of a communicator, without MPI."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from pblasmp.comm.side_channel import SideChannel

LIMIT = 10.0  # seconds that a rank waits for others


class Group:
    """What the ranks of one communicator share: a blackboard for each collective call."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Condition()
        self.notes: list[tuple[int, bytes]] = []
        self.boards: dict[int, dict[int, Any]] = {}


class Notes:
    """Notes by way of the group's board."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank, self.read = group, rank, 0

    def send(self, note: bytes) -> None:
        self.group.notes.append((self.rank, note))

    def arrived(self) -> list[bytes]:
        new, self.read = self.group.notes[self.read :], len(self.group.notes)
        return [note for rank, note in new if rank != self.rank]


class Aborted(BaseException):
    """The job was aborted with this status."""


class Request:
    """A collective call in progress."""

    def __init__(self, comm: ThreadComm, turn: int, out: np.ndarray) -> None:
        self.comm, self.turn, self.out = comm, turn, out

    def Test(self) -> bool:  # noqa: N802 - as in mpi4py
        board = self.comm.group.boards[self.turn]
        if len(board) < self.comm.size:
            return False
        self.out[...] = np.max(list(board.values()), axis=0)
        return True

    def Wait(self) -> None:  # noqa: N802 - as in mpi4py
        self.comm.all_of(self.turn)
        assert self.Test()


class ThreadComm:
    """One rank's communicator. Calls are matched in order, as MPI does."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self.patient = True
        self.channel = SideChannel(rank, tuple(range(group.size)))
        self.channel._index = 0  # of one process they would all be different
        self.channel.connect(Notes(group, rank))
        self.turn = 0

    def _post(self, value: Any) -> int:
        turn, self.turn = self.turn, self.turn + 1
        with self.group.lock:
            self.group.boards.setdefault(turn, {})[self.rank] = value
            self.group.lock.notify_all()
        return turn

    def all_of(self, turn: int) -> list[Any]:
        with self.group.lock:
            board = self.group.boards[turn]
            if not self.group.lock.wait_for(lambda: len(board) == self.size, LIMIT):
                raise TimeoutError(f"rank {self.rank} waits for a message that never comes")
        return [board[rank] for rank in range(self.size)]

    def imax(self, values: np.ndarray, out: np.ndarray) -> Request:
        return Request(self, self._post(values.copy()), out)

    def allgather(self, value: Any) -> list[Any]:
        return [pickle.loads(each) for each in self.all_of(self._post(pickle.dumps(value)))]

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value)[root]

    def wait(self, request: Request) -> None:
        request.Wait()

    def barrier(self) -> None:
        self.allgather(None)

    def abort(self, code: int) -> None:
        raise Aborted(code)


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
