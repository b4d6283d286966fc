# SPDX-License-Identifier: Apache-2.0
"""Votes and barriers of ranks that share memory: each rank writes its own line and reads all lines.

A reduction by messages takes several rounds, and in each of them a rank needs other ranks to run. If ranks outnumber
cores, the ranks that have finished begin to compute, and the others must wait for a core in each round. Here each rank
needs a core only once.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ClosedError
from . import futex
from .communicator import Communicator, nodes_of
from .shared import SharedMemory

__all__ = ["Board", "make_boards"]

_LINE = 8  # integers: a cache line for each rank
_ORDERED = ("x86_64", "AMD64")  # on other processors, ranks might see the count before the values
_BUSY_SECONDS = 1e-3  # that a wait only yields the core
_NAP_SECONDS = 0.01  # longest sleep of a rank that nobody wakes: notes may have to be read
_LOOK_SECONDS = 0.05  # between two checks that the other processes still run

Process = tuple[int, str]  # its number, and when it began: numbers are reused


class Board:
    """The lines of all ranks, in two sets: a rank may be one reduction ahead of ranks that still read the previous one.

    A rank begins a reduction when its previous one is done; a rank that gives up a reduction breaks the context.

    Args:
        lines: what the ranks share, of shape (2, ranks, 8) and zero at first.
        rank: this rank's number.
        processes: those of all ranks.
    """

    def __init__(self, lines: NDArray[np.int64], rank: int, processes: Sequence[Process]) -> None:
        self._lines, self._rank, self._processes = lines, rank, processes
        self._count = 0
        base, (half, line, _) = lines.ctypes.data, lines.strides
        self._words = [[base + i * half + rank * line for rank in range(lines.shape[1])] for i in (0, 1)]

    def imax(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> _Posted:
        """Start writing the element-wise maximum over the ranks of at most 7 values into ``out``. Collective."""
        return self._post(values, out)

    def gather(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> _Posted:
        """Start writing at most 7 values of each rank into the rows of ``out``. Collective."""
        return self._post(values, out)

    def _post(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> _Posted:
        self._count += 1
        lines = self._lines[self._count % 2]
        if values.size:
            lines[self._rank, 1 : 1 + values.size] = values
        lines[self._rank, 0] = self._count  # last: a rank that sees the count also sees the values
        words = self._words[self._count % 2]
        futex.wake(words[self._rank])
        return _Posted(lines, self._count, out, self._processes, words)


class _Posted:
    """A reduction that has begun, with the interface of the requests of mpi4py and of process groups."""

    def __init__(
        self,
        lines: NDArray[np.int64],
        count: int,
        out: NDArray[np.int64],
        processes: Sequence[Process],
        words: Sequence[int],
    ) -> None:
        self._words = words  # the addresses of the ranks' counts
        self._lines, self._count, self._out, self._processes = lines, count, out, processes
        self._here = 0  # how many ranks, counted from rank 0, have arrived
        self._done = False
        self._since = time.monotonic()
        self._next_look = _LOOK_SECONDS

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        while self._here < len(self._lines) and self._lines[self._here, 0] == self._count:
            self._here += 1
        if not self._done and self._here == len(self._lines):
            if self._out.ndim == 2:
                self._out[...] = self._lines[:, 1 : 1 + self._out.shape[1]]
            elif self._out.size:
                np.maximum.reduce(self._lines[:, 1 : 1 + self._out.size], axis=0, out=self._out)
            self._done = True
        return self._done

    def sleep(self) -> None:
        """Sleep until another rank arrives, but not for long."""
        if self._here < len(self._lines):
            last = int(self._lines[self._here, 0])
            if last != self._count:
                futex.sleep_while(self._words[self._here], last, _NAP_SECONDS)

    def pause(self) -> None:
        """Yield the core, and sleep if the wait is long. Notice ranks that have ended, in case no launcher does.

        Raises:
            ClosedError: a rank has ended before it arrived.
        """
        waited = time.monotonic() - self._since
        if waited < _BUSY_SECONDS:
            os.sched_yield()
        else:
            self.sleep()
        if waited < self._next_look:
            return
        self._next_look = waited + _LOOK_SECONDS
        for rank, (number, began) in enumerate(self._processes):
            if _began(number) != began and self._lines[rank, 0] != self._count:  # it may arrive and then end
                raise ClosedError(f"rank {rank} has ended")

    def __bool__(self) -> bool:
        return not self._done


def make_boards(comm: Communicator, number: int) -> list[Board] | list[None]:
    """Return ``number`` boards of the ranks of ``comm``, each None if they cannot share memory. Collective."""
    if comm.size == 1:
        return [None] * number
    able = len(nodes_of(comm)) == 1 and platform.machine() in _ORDERED
    me = os.getpid(), _began(os.getpid())
    everyones: list[tuple[bool, Process]] = comm.allgather((able, me))
    if not all(able for able, _ in everyones):
        return [None] * number
    shape = number, 2, comm.size, _LINE
    nbytes = 8 * math.prod(shape)
    memory = SharedMemory(comm, nbytes)
    if memory.why_not:
        return [None] * number
    processes = [process for _, process in everyones]
    return [
        Board(lines, comm.rank, processes) for lines in memory.array(nbytes).view(np.int64).reshape(shape)
    ]


def _began(process: int) -> str:
    """Return when a process of this machine began, in ticks of its clock; empty if it has ended."""
    try:
        state, *rest = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]
