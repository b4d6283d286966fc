# SPDX-License-Identifier: Apache-2.0
"""Direct calls of several ranks in one process: each rank is a thread that calls the compiled core."""

import ctypes
import queue
import threading
from functools import partial

import numpy as np

from pblasmp import _core
from pblasmp.engines.direct import Held, host_address, pattern_of
from pblasmp.engines.host import blas
from pblasmp.engines.host.direct import calls
from pblasmp.engines.host.direct.calls import LIMITS

SET = 1 << 20  # bytes of slabs
ALIGNED = 64
ABSENT = (0,) * 6  # a sub-matrix

# Functions of MPI, whose communicator is here the number of the rank that calls.
_ADDRESS, _INT = ctypes.c_void_p, ctypes.c_int
_POSTS = ctypes.CFUNCTYPE(_INT, _ADDRESS, _INT, ctypes.c_int64, _INT, _INT, ctypes.c_int64, _ADDRESS)
_TEST = ctypes.CFUNCTYPE(_INT, _ADDRESS, ctypes.POINTER(_INT), _ADDRESS)


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
        self._sent = {(of, to): queue.SimpleQueue() for of in range(size) for to in range(size)}
        self._awaited = {}  # by request: where a message goes, and whence it comes
        self._mpi = _POSTS(self._isend), _POSTS(self._irecv), _TEST(self._test)
        self._ranks = [self._rank(rank) for rank in range(size)]

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
        post, kept = self._post(rank)
        if len(self._shared) > 1:
            meetings[0].post = ctypes.addressof(post)
        scratch, at = aligned(_core.SCRATCH)
        state.ranks, state.rank, state.alike, state.scratch = self.size, rank, 1, at
        state.small_kernels = 1
        state.yields, state.workers = 10, min(np.bincount(self.nodes))
        state.nodes, state.node, state.node_of = len(self._shared), node, host_address(self.nodes)
        state.memory, state.capacity, state.most, state.limits = slabs, SET, SET, ctypes.addressof(LIMITS)
        state.votes = ctypes.addressof(meetings[0])
        state.meets = ctypes.addressof(meetings[1]) if len(here) > 1 else None
        waits = state.waits = _core.WAIT(partial(self._wait, meetings[0]))
        for row, letter in zip(state.functions, "sdcz", strict=True):
            others = calls._REAL if letter in "sd" else calls._COMPLEX
            row[:] = [
                blas.address("scipy", "d" if name in ("dot", "asum") else letter, others.get(name, name))
                for name in _core.BLAS
            ]
        return state, room, meetings, (found, scratch, waits, post, kept)

    def _post(self, rank):
        """What a rank sends messages by: the first rank of a node receives all that are for it."""
        node, firsts = (
            int(self.nodes[rank]),
            [int(np.flatnonzero(self.nodes == each)[0]) for each in set(self.nodes)],
        )
        to = [(first, int(self.nodes[first])) for first in firsts if self.nodes[first] != node]
        of = np.flatnonzero(self.nodes != node).tolist() if rank in firsts else []
        sheets = [
            [self._sheet(*each) for each in to],
            [self._sheet(each, int(self.nodes[each])) for each in of],
        ]
        states = [(_core.SheetState * len(each))(*(state for state, _ in each)) for each in sheets]
        functions = [ctypes.cast(each, ctypes.c_void_p).value for each in self._mpi]
        post = _core.PostState(*functions, 0, rank, 0, SET, *states, len(to), len(of))
        return post, (sheets, states)

    def _sheet(self, rank, node):
        room, request = np.zeros(8 * (_core.VALUES + 1) + SET, np.uint8), np.zeros(1, np.int64)
        return _core.SheetState(rank, node, host_address(room), host_address(request)), (room, request)

    def _isend(self, data, count, _type, to, _tag, comm, _request):
        self._sent[comm, to].put(ctypes.string_at(data, count))
        return 0

    def _irecv(self, data, _count, _type, of, _tag, comm, request):
        self._awaited[request] = data, self._sent[of, comm]
        return 0

    def _test(self, request, done, _status):
        data, sent = self._awaited.get(request, (0, None))
        try:
            arrived = b"" if sent is None else sent.get_nowait()
        except queue.Empty:
            return 0
        ctypes.memmove(data, arrived, len(arrived))
        self._awaited.pop(request, None)
        done[0] = 1
        return 0

    def _wait(self, board, flag):
        """Wait for a flag, or for messages."""
        while not (
            self.core.flag_await(ctypes.c_void_p(flag), 0, 10)
            if flag
            else self.core.board_received(ctypes.c_void_p(ctypes.addressof(board)))
        ):
            pass
        return _core.COME

    def run(self, routine, parts, words="LLNNN", alpha=1.0, beta=0.0, new=False):
        """Have all ranks make a call; return how it ended on each.

        Args:
            routine: its name.
            parts: what each rank gives: the parts A, B, C and D, and perhaps TAU.
            words, alpha, beta, new: the other arguments.
        """
        ended = [None] * self.size
        for (slabs, _), *_ in self._shared:
            slabs.fill(255)  # NaN: nothing is left of earlier calls

        def compute(rank):
            state, room, meetings, _ = self._ranks[rank]
            _core.REQUEST.pack_into(
                room, 0, _core.ROUTINES.index(routine), 0, new, words.encode(), alpha.real, alpha.imag, beta.real,
                beta.imag, *(each for part in (*parts[rank], None)[:5] for each in part or ABSENT), 0,
            )  # fmt: skip
            status = self.core.call_start(ctypes.c_void_p(ctypes.addressof(state)))
            waits = {"AWAIT_VOTE": 0, "AWAIT_OTHERS": 1, "AWAIT_SUMS": 0}
            while (name := _core.STATUSES[status]) in waits:
                while not self.core.board_received(ctypes.c_void_p(ctypes.addressof(meetings[0]))):
                    pass
                board = ctypes.c_void_p(ctypes.addressof(meetings[waits[name]]))
                count = ctypes.c_int64(meetings[waits[name]].count)
                while (
                    name != "AWAIT_SUMS"
                    and self.core.board_absent(board, count, 0) < meetings[waits[name]].size
                ):
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

    def products(self, rank, name="gemm"):
        """A list to which a rank's products in float64, or solves, are added from now on, as rows and columns."""
        count, m = {"gemm": (13, 2), "trsm": (11, 4)}[name]
        seen, kind = [], ctypes.CFUNCTYPE(None, *[ctypes.POINTER(_INT)] * count)
        functions, at = self._ranks[rank][0].functions[1], _core.BLAS.index(name)
        do = kind(functions[at])
        self._counter = kind(lambda *given: seen.append((given[m][0], given[m + 1][0])) or do(*given))
        functions[at] = ctypes.cast(self._counter, _ADDRESS).value
        return seen

    def told(self, rank):
        """What a rank has told in the last call."""
        state = self._ranks[rank][0]
        return state.tells[: state.told]

    def exchanges(self):
        """How many messages that are no votes each rank of those that work has sent to another node."""
        return self._ranks[0][3][3].exchanges

    def info(self, rank):
        """What LAPACK said on a rank in the last call."""
        return self._ranks[rank][0].info

    def factor_ld(self, rank):
        """How many elements columns of the factor were apart on a rank in the last call."""
        return self._ranks[rank][0].factor_ld


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
