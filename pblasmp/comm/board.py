# SPDX-License-Identifier: Apache-2.0
"""Votes and barriers of ranks: each rank writes its own line in shared memory and reads all lines.

A reduction by messages takes several rounds, and in each of them a rank needs other ranks to run. If ranks outnumber
cores, the ranks that have finished begin to compute, and the others must wait for a core in each round. Here each rank
needs a core only once. Each node has such a board; lines of ranks of other nodes are written by who receives their
messages.

The work is done by the compiled core: see ``_core/meet.h``.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..errors import ClosedError
from .locations import began
from .polling import nap

YIELDS = 60  # of the core, before a wait also looks for notes of other ranks
BUSY_SECONDS = 1e-3  # that a wait only yields the core
NAP_SECONDS = 0.01  # longest sleep of a rank that nobody wakes: notes may have to be read

# Nanoseconds that a vote keeps the core: on one node, between nodes, and of ranks that only feed GPUs.
_MOMENT, _LONG_MOMENT, _MOMENT_OF_GPUS = 40_000, 200_000, 1_000_000

LINE = 8  # integers: a cache line for each rank
_LOOK_SECONDS = 0.05  # between two checks that the other processes still run

# By how many reals a rank tells.
_WRITE = [struct.Struct(f"={count}d").pack_into for count in range(_core.VALUES - _core.VOTE + 1)]
_READ = [struct.Struct(f"={count}d").iter_unpack for count in range(_core.VALUES - _core.VOTE + 1)]

Process = tuple[int, str]  # its number, and when it began: numbers are reused
Told = list[tuple[float, ...]]


class Board:
    """The lines of all ranks. A rank begins a reduction when its previous one is done.

    A rank that gives up a reduction breaks the context.

    Args:
        core: the compiled core.
        lines: what the ranks share, of shape (2, ranks + 1, 8), aligned to 64 bytes, and zero at first.
        rank: this rank's number.
        processes: those of all ranks; None for those of other nodes.
        post: a ``Post``, which sends messages to other nodes, if there are any.

    Attributes:
        address: of the core's ``board``.
        here: another board, of this node's ranks; None if this rank is alone there.
        node_of: the node of each rank; None if there is one.
    """

    def __init__(
        self,
        core: _core.Core,
        lines: NDArray[np.int64],
        rank: int,
        processes: Sequence[Process | None],
        post: Any = None,
    ) -> None:
        size: int = lines.shape[1] - 1
        assert lines.ctypes.data % (8 * LINE) == 0
        self._lines = lines  # they stay as long as there is an address of theirs
        self._found = np.empty(_core.VALUES * size, np.int64)
        self._state = _core.BoardState(lines.ctypes.data, self._found.ctypes.data, 0, size, rank)
        self._state.moment = _MOMENT
        if post is not None:
            self._state.post, self._state.moment = ctypes.addressof(post.state), _LONG_MOMENT
        self._at = ctypes.c_void_p(ctypes.addressof(self._state))
        self._size, self._processes, self._core = size, processes, core
        self._values = np.frombuffer(self._state.mine, np.int64)
        self._mine = self._values.data  # faster for one at a time
        self._told = self._values[_core.VOTE :].view(np.uint8).data
        bytes_found = self._found.data.cast("B")
        self._told_by_all = [bytes_found[: 8 * size * count] for count in range(len(_READ))]
        self._vote, self._meet, self._arrive = core.board_vote, core.board_meet, core.board_arrive
        self.address = ctypes.addressof(self._state)
        self.here: Board | None = None
        self.node_of: NDArray[np.int64] | None = None if post is None else post.node_of
        self._post = post

    def imax(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> _Posted:
        """Start writing the element-wise maximum over the ranks of at most 7 values into ``out``. Collective."""
        return self._begin(values, out)

    def gather(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> _Posted:
        """Start writing at most 7 values of each rank into the rows of ``out``. Collective."""
        return self._begin(values, out)

    def wait_longer(self) -> None:
        """Let votes wait in the core for a millisecond, as suits ranks that only feed GPUs. Local.

        They are some hundred microseconds apart, and a wait in Python makes a rank late for the next vote.
        """
        self._state.moment = _MOMENT_OF_GPUS

    def arrive(self) -> None:
        """Come to a meeting of all ranks without waiting for the others. Local."""
        self._arrive(self._at)

    def meet(self, *, patient: bool) -> bool:
        """Come to a meeting of all ranks; return whether all come within a moment, else ``latest`` waits. Collective.

        With ``patient`` this rank leaves the core to other processes meanwhile.
        """
        assert self._post is None
        return self._meet(self._at, YIELDS if patient else 0) == 1

    def vote(self, number: int, values: Sequence[float] = (), *, patient: bool = False) -> Told | None:
        """Vote for a number, and wait for a moment; each rank tells at most 4 values with its vote. Collective.

        It is the reduction ``imax`` of ``~number``, ``number`` and 0. Return the values of each rank, if all have voted
        for this number. None: some have not, or not yet; ``latest()`` is done when all have come, and knows more.
        """
        count = len(values)
        self._mine[1] = number
        if count:
            _WRITE[count](self._told, 0, *values)
        if self._vote(self._at, count, YIELDS if patient else 0) != 1:
            return None
        return self.rows(count) if count else []

    def vote_to_launch(self, number: int, launch: Any, stream: Any, *, patient: bool) -> int:
        """Vote for a number, and queue on a GPU what all ranks have ready; return what ``launch_again`` says.

        Collective. Each rank tells one value with its vote, whether it is ready. ``latest`` knows of a late vote.
        """
        self._mine[1] = number
        return self._core.launch_again(self._at, YIELDS if patient else 0, launch, stream)

    def _received(self) -> bool:
        """Write the lines of ranks whose messages have arrived; return whether no more are to come."""
        if self._core.board_received(self._at):
            return True
        assert self._post is not None
        self._post.check()
        return False

    def latest(self) -> _Posted:
        """Return the reduction that this rank has begun last. Local."""
        return _Posted(self, None)

    def messages(self) -> _Arrivals:
        """Return what other nodes send apart from a meeting, to wait for it. Local."""
        return _Arrivals(self._received)

    def _begin(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> _Posted:
        if values.size:
            self._values[: values.size] = values
        self._core.board_bring(self._at, values.size)
        return _Posted(self, out)

    def rows(self, count: int) -> Told:
        """Return the ``count`` reals that each rank has told in the vote that is over. Local."""
        return list(_READ[count](self._told_by_all[count]))


class _Arrivals(NamedTuple):
    """Messages of the compiled core, with the interface of mpi4py's requests."""

    Test: Callable[[], bool]


class _Posted:
    """A reduction that has begun, with the interface of the requests of mpi4py and of process groups."""

    __slots__ = ("_absent", "_board", "_count", "_next_look", "_out", "_received", "_since")

    def __init__(self, board: Board, out: NDArray[np.int64] | None) -> None:
        self._board, self._out = board, out
        self._count = ctypes.c_int64(board._state.count)
        self._absent = 0  # the first rank that has not arrived
        self._received = False  # all messages from other nodes
        self._since = 0.0
        self._next_look = _LOOK_SECONDS

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        if self and not self._received:
            self._received = self._board._received()
            if not self._received:
                return False
        if self:
            absent = self._next_absent(self._absent)
            if absent == self._board._size and self._out is not None:
                self.write(self._out)
            self._absent = absent
        return self._absent == self._board._size

    def write(self, out: NDArray[np.int64]) -> None:
        """Write the result, once it is done."""
        board, width = self._board, out.shape[-1]
        compute = board._core.board_gather if out.ndim == 2 else board._core.board_largest
        compute(board._at, self._count, width)
        out[...] = board._found[: out.size].reshape(out.shape)

    def told(self, count: int) -> Told | None:
        """Return what ``Board.vote`` does with so many values, once the vote is done."""
        board = self._board
        if board._core.board_voted(board._at, self._count, count) != 1:
            return None
        return board.rows(count) if count else []

    def sleep(self) -> None:
        """Sleep until another rank arrives, but not for long."""
        if not self._received:  # a message wakes nobody
            self._since = self._since or time.monotonic()
            nap(self._since)
        elif self:
            board = self._board
            board._core.board_sleep(board._at, self._count, self._absent, int(1e6 * NAP_SECONDS))

    def pause(self) -> None:
        """Yield the core, and sleep if the wait is long. ClosedError if a rank has ended that no launcher noticed."""
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
        rank, size = self._next_absent(0), self._board._size
        while rank < size:
            number, since = self._board._processes[rank] or (0, "")
            # it may arrive and then end
            if number and began(number) != since and self._next_absent(rank) == rank:
                raise ClosedError(f"rank {rank} has ended")
            rank = self._next_absent(rank + 1)

    def _next_absent(self, rank: int) -> int:
        """Return the first rank, from this one on, that has not arrived; their number if all have."""
        return self._board._core.board_absent(self._board._at, self._count, rank)

    def __bool__(self) -> bool:
        return self._absent < self._board._size
