# SPDX-License-Identifier: Apache-2.0
"""Direct calls of several ranks in one process: each rank is a thread that calls the compiled core."""

from __future__ import annotations

import ctypes
import queue
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
    """Ranks that share a set of slabs and two boards, or those of each node do.

    Args:
        size: how many there are.
        nodes: the node of each rank; None if they are on one.
    """

    def __init__(self, size, nodes=None):
        self.core, self.size = _core.load(), size
        self.nodes = np.array(nodes or [0] * size, np.int64)
        rooms = SET, 2 * (size + 1) * 64, 2 * (size + 1) * 64
        self._shared = [[aligned(nbytes) for nbytes in rooms] for _ in range(self.nodes.max() + 1)]
        self._ranks = [self._rank(rank) for rank in range(size)]
        self._sent = {(of, to): queue.SimpleQueue() for of in range(size) for to in range(size)}

    def _rank(self, rank):
        node = int(self.nodes[rank])
        (_, slabs), *boards = self._shared[node]
        here = np.flatnonzero(self.nodes == node).tolist()
        room = ctypes.create_string_buffer(self.core.call_size())
        state = _core.CallState.from_buffer(room)
        found = np.zeros(_core.VALUES * self.size, np.int64)
        places = (self.size, rank), (len(here), here.index(rank))
        meetings = [
            _core.BoardState(at, host_address(found), 0, *place)
            for (_, at), place in zip(boards, places, strict=True)
        ]
        scratch, at = aligned(_core.SCRATCH)
        state.ranks, state.rank, state.workers, state.alike, state.scratch = self.size, rank, self.size, 1, at
        state.nodes, state.node, state.node_of = len(self._shared), node, host_address(self.nodes)
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

    def _exchange(self, rank, values):
        """Send other nodes what a call packs for them, after ``values``, and unpack what they send.

        The first rank of a node receives all of it.
        """
        state, _, meetings, _ = self._ranks[rank]
        call, node = ctypes.c_void_p(ctypes.addressof(state)), int(self.nodes[rank])
        firsts = [int(np.flatnonzero(self.nodes == each)[0]) for each in range(len(self._shared))]
        for other, first in enumerate(firsts):
            if other != node:
                sent = np.zeros(self.core.call_pack(call, ctypes.c_int64(other), None), np.uint8)
                self.core.call_pack(call, ctypes.c_int64(other), ctypes.c_void_p(host_address(sent)))
                self._sent[rank, first].put((values, sent))
        if rank != firsts[node]:
            return
        for other in np.flatnonzero(self.nodes != node).tolist():
            told, sent = self._sent[other, rank].get()
            if told == values == [] or told[:2] == values[:2]:
                at = ctypes.c_void_p(host_address(sent))
                assert self.core.call_unpack(call, ctypes.c_int64(other), at) == sent.size
            if told:
                line = (ctypes.c_int64 * _core.VALUES)(*told)
                self.core.board_deliver(ctypes.c_void_p(ctypes.addressof(meetings[0])), other, line)

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
        for (slabs, _), *_ in self._shared:
            slabs.fill(255)  # NaN: nothing is left of earlier calls

        def compute(rank):
            state, room, meetings, _ = self._ranks[rank]
            _core.pack_request(
                room, 0, _core.ROUTINES.index(routine), 0, new, words.encode(), alpha.real, alpha.imag, beta.real,
                beta.imag, *(each for part in parts[rank] for each in part or calls._ABSENT), *calls._ABSENT, 0, 10,
            )  # fmt: skip
            status = self.core.call_start(ctypes.c_void_p(ctypes.addressof(state)))
            waits = {"AWAIT_VOTE": 0, "AWAIT_OTHERS": 1, "SEND_AND_VOTE": 0, "SEND_SUMS": 1}
            while (name := _core.STATUSES[status]) in waits:
                if name == "SEND_SUMS":
                    self._exchange(rank, [])
                    status = self.core.call_go_on(ctypes.c_void_p(ctypes.addressof(state)))
                    continue
                if name == "SEND_AND_VOTE":
                    mine = meetings[0].mine
                    mine[0], mine[2] = ~mine[1], 0
                    self.core.board_bring(ctypes.c_void_p(ctypes.addressof(meetings[0])), _core.VALUES)
                    self._exchange(rank, list(mine))
                    name = "AWAIT_VOTE"
                board = ctypes.c_void_p(ctypes.addressof(meetings[waits[name]]))
                count = ctypes.c_int64(meetings[waits[name]].count)
                while self.core.board_absent(board, count, 0) < meetings[waits[name]].size:
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
