# SPDX-License-Identifier: Apache-2.0
"""Direct calls of several ranks in one process: each rank is a thread that calls the compiled core."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from pblasmp import _core
from pblasmp.engines.direct import Held, host_address, pattern_of
from pblasmp.engines.host import blas
from pblasmp.engines.host.direct import calls
from pblasmp.engines.host.direct.limits import LIMITS

SET = 1 << 20  # bytes of slabs
ALIGNED = 64


def aligned(nbytes):
    """Zeroed memory, and its address; what is written after its end is noticed by a sanitizer."""
    memory = np.zeros(nbytes + ALIGNED, np.uint8)
    start = -host_address(memory) % ALIGNED
    return memory, host_address(memory) + start


class CoreRanks:
    """Ranks that share a set of slabs and two boards."""

    def __init__(self, size):
        self.core, self.size = _core.load(), size
        self._shared = [aligned(nbytes) for nbytes in (SET, 2 * (size + 1) * 64, 2 * (size + 1) * 64)]
        self._ranks = [self._rank(rank) for rank in range(size)]

    def _rank(self, rank):
        (_, slabs), *boards = self._shared
        room = ctypes.create_string_buffer(self.core.call_size())
        state = _core.CallState.from_buffer(room)
        found = np.zeros(_core.VALUES * self.size, np.int64)
        meetings = [_core.BoardState(at, host_address(found), 0, self.size, rank) for _, at in boards]
        scratch, at = aligned(_core.SCRATCH)
        state.ranks, state.rank, state.workers, state.alike, state.scratch = self.size, rank, self.size, 1, at
        state.memory, state.capacity, state.most, state.limits = slabs, SET, SET, ctypes.addressof(LIMITS)
        state.votes, state.meets = map(ctypes.addressof, meetings)
        waits = state.waits = _core.WAIT(self._wait)
        for row, letter in zip(state.functions, "sdcz", strict=True):
            others = calls._REAL if letter in "sd" else calls._COMPLEX
            row[:] = [
                blas.address("scipy", "d" if name in ("dot", "asum") else letter, others.get(name, name))
                for name in _core.BLAS
            ]
        return state, room, meetings, (found, scratch, waits)

    def _wait(self, flag):
        while not self.core.flag_await(ctypes.c_void_p(flag), 0, 10):
            pass
        return 0

    def run(self, routine, parts, words="LLNNN", alpha=1.0, beta=0.0, new=False):
        """Have all ranks make a call; return how it ended on each.

        Args:
            routine: its name.
            parts: what each rank gives: the parts A, B, C and D.
            words, alpha, beta, new: the other arguments.
        """
        ended = [None] * self.size

        def compute(rank):
            state, room, meetings, _ = self._ranks[rank]
            _core.pack_request(
                room, 0, _core.ROUTINES.index(routine), 0, new, words.encode(), alpha.real, alpha.imag, beta.real,
                beta.imag, *(each for part in parts[rank] for each in part or calls._ABSENT), *calls._ABSENT, 0, 10,
            )  # fmt: skip
            status = self.core.call_start(ctypes.c_void_p(ctypes.addressof(state)))
            waits = {"AWAIT_VOTE": 0, "AWAIT_OTHERS": 1}
            while (name := _core.STATUSES[status]) in waits:
                board = ctypes.c_void_p(ctypes.addressof(meetings[waits[name]]))
                count = ctypes.c_int64(meetings[waits[name]].count)
                while self.core.board_absent(board, count, 0) < self.size:
                    pass
                if name == "AWAIT_VOTE" and self.core.board_voted(board, count, state.told) != 1:
                    name = "UNLIKE"
                    break
                status = self.core.call_go_on(ctypes.c_void_p(ctypes.addressof(state)))
            ended[rank] = name

        threads = [threading.Thread(target=compute, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ended

    def told(self, rank):
        """What a rank has told in the last call."""
        state = self._ranks[rank][0]
        return state.tells[: state.told]

    def info(self, rank):
        """What LAPACK said on a rank in the last call."""
        return self._ranks[rank][0].info


class Spread:
    """A matrix whose parts all ranks have in this process.

    Args:
        values: all of it.
        descriptor: how it is dealt out; its shape is that of ``values``.
    """

    def __init__(self, values, descriptor):
        self.descriptor = descriptor
        self.places = [
            np.ix_(*descriptor.global_indices(rank)) if rank < descriptor.grid.size else None
            for rank in range(descriptor.grid.size)
        ]
        self.locals = [
            np.array(values[place], descriptor.dtype, order=descriptor.order) for place in self.places
        ]

    def part(self, rank, at=None):
        """What direct calls take of it, or of a sub-matrix: i, j, m, n, transposed."""
        pattern = pattern_of(self.descriptor, rank)
        local = self.locals[rank] if rank < len(self.locals) else np.empty((0, 0), self.descriptor.dtype)
        return (Held.of(pattern, local), *(at or (0, 0, *self.descriptor.shape, False)))

    def whole(self):
        """All of it."""
        values = np.zeros(self.descriptor.shape, self.descriptor.dtype)
        for place, local in zip(self.places, self.locals, strict=True):
            values[place] = local
        return values
