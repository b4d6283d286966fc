# SPDX-License-Identifier: Apache-2.0
"""Votes and barriers of ranks that share memory: each writes its own line, and reads all.

A reduction by messages takes rounds, and in each of them a rank needs others to run. Where ranks outnumber cores, those
that are through begin to compute, and those that are not wait for a core, a round at a time. Here a rank needs a core
once.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .communicator import Communicator, nodes_of
from .shared import SharedMemory
from .side_channel import yield_core

__all__ = ["Board", "make_board"]

_LINE = 8  # integers: a cache line for each rank
_ORDERED = ("x86_64", "AMD64")  # other processors may show other ranks the count before the values


class Board:
    """The lines of all ranks, twice: a rank may be one reduction ahead of those that still read the one before.

    A rank begins a reduction when its one before is done. Collective to make.

    Args:
        memory: as it was made, shared by the ranks.
        rank, size: this rank's number, and how many there are.
    """

    def __init__(self, memory: SharedMemory, rank: int, size: int) -> None:
        self._lines = memory.array(2 * size * _LINE * 8).view(np.int64).reshape(2, size, _LINE)
        self._rank, self._count = rank, 0

    def imax(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> _Posted:
        """Start writing the element-wise maximum over the ranks of at most 7 values into ``out``. Collective."""
        self._count += 1
        lines = self._lines[self._count % 2]
        lines[self._rank, 1 : 1 + len(values)] = values
        lines[self._rank, 0] = self._count  # last: who sees it sees the values
        return _Posted(lines, self._count, out)


class _Posted:
    """A reduction that has begun, with what mpi4py's requests have."""

    def __init__(self, lines: NDArray[np.int64], count: int, out: NDArray[np.int64]) -> None:
        self._lines, self._count, self._out = lines, count, out
        self._done = False
        self._polls = 0

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        if not self._done and bool((self._lines[:, 0] == self._count).all()):
            np.max(self._lines[:, 1 : 1 + len(self._out)], axis=0, out=self._out)
            self._done = True
        return self._done

    def pause(self) -> None:
        """Leave the core to others for a moment."""
        self._polls += 1
        yield_core(self._polls)

    def __bool__(self) -> bool:
        return not self._done


def make_board(comm: Communicator) -> Board | None:
    """Return a board of the ranks of ``comm``, None where they cannot share one. Collective over ``comm``."""
    machines: list[Any] = comm.allgather(platform.machine())
    if comm.size == 1 or len(nodes_of(comm)) > 1 or not set(machines) <= set(_ORDERED):
        return None
    memory = SharedMemory(comm)
    return None if memory.why_not else Board(memory, comm.rank, comm.size)
