# SPDX-License-Identifier: Apache-2.0
"""Votes and barriers of ranks that share memory: each rank writes its own line and reads all lines.

A reduction by messages takes several rounds, and in each of them a rank needs other ranks to run. If ranks outnumber
cores, the ranks that have finished begin to compute, and the others must wait for a core in each round. Here each rank
needs a core only once.
"""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ClosedError
from . import futex
from .communicator import Communicator
from .futex import BUSY_SECONDS, NAP_SECONDS, POLLS
from .locations import began, nodes_of
from .shared_memory import SharedMemory

__all__ = ["Board", "make_boards"]

_LINE = 8  # integers: a cache line for each rank
_TOLD = 4  # where in a line the values begin that a vote tells
_ORDERED = ("x86_64", "AMD64")  # on other processors, ranks might see the count before the values
_SPINS = 1000  # polls of a wait that keeps the core, some 40 us: a rank that has more to do than others is awaited so
_LOOK_SECONDS = 0.05  # between two checks that the other processes still run

_READ = [struct.Struct(f"={count}d").unpack_from for count in range(_LINE - _TOLD + 1)]
"""By how many values a rank tells: returns those that begin at a byte."""

Process = tuple[int, str]  # its number, and when it began: numbers are reused


class _Set(NamedTuple):
    """Where the lines of a set are.

    Attributes:
        first, last: the first integer of the first line, and of the last one, which is not a rank's.
        others: the first integers of the lines of other ranks.
        told: of each rank, the first byte of the values that it tells with a vote.
        mine: the integers of this rank's line.
        mine_told: the same bytes as reals.
    """

    first: int
    last: int
    others: list[int]
    told: list[int]
    mine: Any
    mine_told: Any

    @classmethod
    def of(cls, lines: NDArray[np.int64], i: int, rank: int) -> _Set:
        """Return those of set ``i``."""
        first, size = i * lines.shape[1] * _LINE, lines.shape[1] - 1
        last = first + size * _LINE
        at = list(range(first, last, _LINE))
        told = [8 * (line + _TOLD) for line in at]
        mine = lines[i, rank]
        return cls(first, last, at[:rank] + at[rank + 1 :], told, mine.data, mine.view(np.float64).data)


class Board:
    """The lines of all ranks, in two sets: a rank may be one reduction ahead of ranks that still read the previous one.

    A rank begins a reduction when its previous one is done; a rank that gives up a reduction breaks the context.

    Args:
        lines: what the ranks share, of shape (2, ranks + 1, 8) and zero at first. The last line of a set is not a
            rank's: it says in which reduction ranks sleep.
        rank: this rank's number.
        processes: those of all ranks.
    """

    def __init__(self, lines: NDArray[np.int64], rank: int, processes: Sequence[Process]) -> None:
        self._lines, self._rank, self._processes = lines, rank, processes
        self._size = lines.shape[1] - 1
        self._count = 0
        base, (half, line, _) = lines.ctypes.data, lines.strides
        self._words = [[base + i * half + rank * line for rank in range(self._size)] for i in (0, 1)]
        self._numbers = lines.reshape(-1).data  # the same integers; faster for one at a time
        self._bytes = lines.reshape(-1).view(np.uint8).data
        self._sets = [_Set.of(lines, i, rank) for i in (0, 1)]

    def imax(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> _Posted:
        """Start writing the element-wise maximum over the ranks of at most 7 values into ``out``. Collective."""
        return self._post(values, out)

    def gather(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> _Posted:
        """Start writing at most 7 values of each rank into the rows of ``out``. Collective."""
        return self._post(values, out)

    def arrive(self) -> None:
        """Come to a meeting of all ranks without waiting for the others. Local."""
        self._count = count = self._count + 1
        of = self._sets[count & 1]
        of.mine[0] = count  # last: a rank that sees it also sees the values
        # A rank that falls asleep at this moment may be missed: it wakes up after a nap.
        if self._numbers[of.last] == count:
            futex.wake(self._words[count & 1][self._rank])

    def meet(self, *, patient: bool) -> bool:
        """Come to a meeting of all ranks; return whether all come within a moment, else ``latest`` waits. Collective.

        With ``patient`` this rank leaves the core to other processes meanwhile.
        """
        self.arrive()
        return self._are_here(patient)

    def vote(
        self, number: int, values: Sequence[float] = (), *, patient: bool = False
    ) -> list[tuple[float, ...]] | None:
        """Vote for a number, and wait for a moment; each rank tells at most 4 values with its vote. Collective.

        It is the reduction ``imax`` of ``~number``, ``number`` and 0.

        Returns:
            The values of each rank, if all have voted for this number. None: some have not, or not yet; ``latest()`` is
            done when all have come, and knows more.
        """
        _, _, others, places, mine, told = self._sets[(self._count + 1) & 1]
        mine[1], mine[2], mine[3] = ~number, number, 0
        at = _TOLD
        for value in values:
            told[at] = value
            at += 1
        self.arrive()
        if not self._are_here(patient):
            return None
        numbers = self._numbers
        for at in others:
            if numbers[at + 2] != number or numbers[at + 3]:
                return None
        if not values:
            return []
        read, memory = _READ[len(values)], self._bytes
        return [read(memory, at) for at in places]

    def latest(self) -> _Posted:
        """Return the reduction that this rank has begun last. Local."""
        return self._posted(None)

    def _are_here(self, patient: bool) -> bool:
        """Return whether all ranks have begun the reduction that this one has, perhaps after a moment."""
        numbers, count, polls = self._numbers, self._count, POLLS if patient else _SPINS
        for at in self._sets[count & 1].others:
            while numbers[at] != count:
                if not polls:
                    return False
                polls -= 1
                if patient:
                    os.sched_yield()
        return True

    def _post(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> _Posted:
        lines = self._lines[(self._count + 1) % 2]
        if values.size:
            lines[self._rank, 1 : 1 + values.size] = values
        self.arrive()
        return self._posted(out)

    def _posted(self, out: NDArray[np.int64] | None) -> _Posted:
        return _Posted(self, self._sets[self._count & 1].first, self._count, out)


class _Posted:
    """A reduction that has begun, with the interface of the requests of mpi4py and of process groups."""

    __slots__ = ("_at", "_board", "_count", "_done", "_end", "_first", "_next_look", "_out", "_since")

    def __init__(self, board: Board, first: int, count: int, out: NDArray[np.int64] | None) -> None:
        self._board, self._first, self._count, self._out = board, first, count, out
        self._at = first  # where the count is of the first rank that has not arrived
        self._end = first + board._size * _LINE
        self._done = False
        self._since = 0.0
        self._next_look = _LOOK_SECONDS

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        at, end, numbers, count = self._at, self._end, self._board._numbers, self._count
        while at < end and numbers[at] == count:
            at += _LINE
        self._at = at
        if at == end and not self._done:
            if self._out is not None:
                self.write(self._out)
            self._done = True
        return self._done

    def write(self, out: NDArray[np.int64]) -> None:
        """Write the result, once it is done."""
        lines = self._board._lines[self._count % 2, :-1]
        if out.ndim == 2:
            out[...] = lines[:, 1 : 1 + out.shape[1]]
        elif out.size:
            np.maximum.reduce(lines[:, 1 : 1 + out.size], axis=0, out=out)

    def told(self, number: int, count: int) -> list[tuple[float, ...]] | None:
        """Return what ``Board.vote`` does for this number and so many values, once the vote is done."""
        numbers = self._board._numbers
        votes = numbers[self._first + 2 : self._end : _LINE].tolist()
        if votes.count(number) < len(votes) or any(numbers[self._first + 3 : self._end : _LINE]):
            return None
        read, board = _READ[count], self._board
        return [read(board._bytes, at) for at in board._sets[self._count & 1].told if count]

    def sleep(self) -> None:
        """Sleep until another rank arrives, but not for long."""
        if self._at < self._end:
            board = self._board
            board._numbers[self._end] = self._count
            last = board._numbers[self._at]
            if last != self._count:
                word = board._words[self._count % 2][(self._at - self._first) // _LINE]
                futex.sleep_while(word, last, NAP_SECONDS)

    def pause(self) -> None:
        """Yield the core, and sleep if the wait is long. Notice ranks that have ended, in case no launcher does.

        Raises:
            ClosedError: a rank has ended before it arrived.
        """
        now = time.monotonic()
        self._since = self._since or now
        waited = now - self._since
        if waited < BUSY_SECONDS:
            os.sched_yield()
        else:
            self.sleep()
        if waited < self._next_look:
            return
        self._next_look = waited + _LOOK_SECONDS
        board = self._board
        for rank, (number, since) in enumerate(board._processes):
            at = self._first + rank * _LINE
            if board._numbers[at] == self._count or began(number) == since:
                continue
            if board._numbers[at] != self._count:  # it has not arrived and then ended
                raise ClosedError(f"rank {rank} has ended")

    def __bool__(self) -> bool:
        return not self._done


def make_boards(comm: Communicator, number: int) -> list[Board] | list[None]:
    """Return ``number`` boards of the ranks of ``comm``, each None if they cannot share memory. Collective."""
    if comm.size == 1:
        return [None] * number
    locations = comm.locations()
    if len(nodes_of(locations)) > 1 or any(each.architecture not in _ORDERED for each in locations):
        return [None] * number
    shape = number, 2, comm.size + 1, _LINE
    nbytes = 8 * math.prod(shape)
    memory = SharedMemory(comm, nbytes)
    if memory.why_not:
        return [None] * number
    processes = [(each.process, each.began) for each in locations]
    return [
        Board(lines, comm.rank, processes) for lines in memory.array(nbytes).view(np.int64).reshape(shape)
    ]
