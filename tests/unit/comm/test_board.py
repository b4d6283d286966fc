# SPDX-License-Identifier: Apache-2.0
"""Votes of ranks that share memory."""

import ctypes
import mmap
import os
import time
from functools import partial

import numpy as np
import pytest

from pblasmp import _core
from pblasmp.comm import board, locations
from pblasmp.comm.agreement import Agreement
from pblasmp.comm.board import Board
from pblasmp.comm.choice import Serial
from pblasmp.comm.shared_memory import make_boards
from pblasmp.errors import ClosedError
from tests.helpers.threads import on_ranks


def lines_of(size):
    """Lines that processes share."""
    return np.frombuffer(mmap.mmap(-1, 2 * (size + 1) * 64), np.int64).reshape(2, size + 1, 8)


def board_of(lines, rank=0, processes=()):
    return Board(_core.load(), lines, rank, processes)


def one_board(comm):
    [board] = make_boards(comm, 1)
    return board


def reduced(mine, values, out):
    request = mine.imax(np.array(values), out)
    while not request.Test():
        request.pause()
    return out.tolist()


def test_nobody_is_through_before_all_are_there():
    def work(comm):
        mine, nothing = one_board(comm), np.empty(0, np.int64)
        seen = []
        for late in (0, 1, 2):
            if comm.rank == late:
                time.sleep(0.05)
                request = mine.imax(nothing, nothing)
            else:
                request = mine.imax(nothing, nothing)
                seen.append(request.Test())
                assert request
            while not request.Test():
                time.sleep(0.001)
            assert not request
            comm.barrier()
        return any(seen)

    assert on_ranks(3, work) == [False] * 3


@pytest.mark.parametrize("yields", [1, 10**7])  # most votes are waited for, or all are seen at once
def test_votes_are_reductions(monkeypatch, yields):
    """A vote on a number is the reduction that an agreement makes of its facts and faults."""
    monkeypatch.setattr(board, "YIELDS", yields)

    def work(comm):
        mine, out = one_board(comm), np.empty(3, np.int64)

        def voted(number, values=()):
            at_once = mine.vote(number, values, patient=True)  # the ranks are threads
            request = mine.latest()
            while not request.Test():
                time.sleep(0.001)
            told = request.told(len(values))
            assert (yields == 1 and at_once is None) or told == at_once
            request.write(out)
            return told, out.tolist() == [~number, number, 0]

        numbers = (7, -(2**63), 2**63 - 1)
        found = [voted(number, [comm.rank, 0.5]) for number in numbers]
        found.append(voted(3, [comm.rank] * 4))
        found.append((voted(3)[0] is not None, True))
        for values in (
            [~7, 7, 0],
            [~8, 8, 0],
            [~6, 6, 0],
            [~7, 7, 1],
        ):  # of rank 2: alike, other facts, a fault
            if comm.rank == 2:
                reduced(mine, values, np.empty(3, np.int64))
                found.append(values)
                continue
            told, _ = voted(7, [1.0])
            found.append(
                (told is not None, out.tolist() == [max(~7, values[0]), max(7, values[1]), values[2]])
            )
        return found

    everyones = on_ranks(3, work)
    alike = [([(0, 0.5), (1, 0.5), (2, 0.5)], True)] * 3 + [
        ([(rank,) * 4 for rank in range(3)], True),
        (True, True),
    ]
    for found in everyones:
        assert found[:5] == alike
    for found in everyones[:2]:
        assert found[5:] == [(True, True), (False, True), (False, True), (False, True)]


def test_a_vote_tells_what_a_line_holds():
    mine = board_of(lines_of(1))
    assert mine.vote(5, [1, 2, 3, 4]) == [(1, 2, 3, 4)]
    with pytest.raises(IndexError):
        mine.vote(5, [1, 2, 3, 4, 5])


@pytest.mark.parametrize("wait", ["sleep", "pause"])
def test_who_sleeps_is_woken_by_the_last_that_comes(monkeypatch, wait):
    monkeypatch.setattr(board, "NAP_SECONDS", 300.0)

    def work(comm):
        mine, out = one_board(comm), np.empty(1, np.int64)
        if comm.rank == 1:
            time.sleep(0.1)
        began = time.monotonic()
        request = mine.imax(np.array([comm.rank]), out)
        while not request.Test():
            getattr(request, wait)()
        return out.item(), time.monotonic() - began < 60

    assert on_ranks(4, work) == [(3, True)] * 4


def test_who_sleeps_wakes_up_without_the_last_one(monkeypatch):
    """Notes that nobody comes may arrive meanwhile."""
    monkeypatch.setattr(board, "NAP_SECONDS", 0.01)

    def work(comm):
        mine, nothing = one_board(comm), np.empty(0, np.int64)
        if comm.rank == 1:
            comm.barrier()
            mine.imax(nothing, nothing)
            return 0
        request = mine.imax(nothing, nothing)
        for _ in range(3):
            request.sleep()
        comm.barrier()
        while not request.Test():
            request.sleep()
        return 3

    assert on_ranks(2, work) == [3, 0]


def test_a_rank_may_be_ahead_of_those_that_read():
    """The fast one begins the next reduction before the slow one has read this one."""

    def work(comm):
        mine, out = one_board(comm), [np.empty(1, np.int64) for _ in range(2)]
        first = mine.imax(np.array([comm.rank]), out[0])
        if comm.rank == 0:
            while not first.Test():
                time.sleep(0.001)
            second = mine.imax(np.array([10]), out[1])
            comm.barrier()
        else:
            comm.barrier()  # rank 0 has begun the second
            assert first.Test()
            second = mine.imax(np.array([20]), out[1])
        while not second.Test():
            time.sleep(0.001)
        return [each.item() for each in out]

    assert on_ranks(2, work) == [[1, 20]] * 2


def test_boards_of_the_same_ranks_are_apart():
    def work(comm):
        one, other = make_boards(comm, 2)
        out = np.empty(1, np.int64)
        first = one.imax(np.array([5]), out)
        comm.barrier()
        second = other.imax(np.array([7]), np.empty(1, np.int64)) if comm.rank == 0 else None
        assert first.Test()
        comm.barrier()
        return out.item(), second is not None and second.Test()

    assert on_ranks(2, work) == [(5, False)] * 2


@pytest.mark.parametrize("size", [2, 40])  # a page holds the lines of fewer
def test_lines_are_a_cache_line_each(size):
    def work(comm):
        [mine] = make_boards(comm, 1)
        assert mine._lines.ctypes.data % 64 == 0
        assert mine._lines.strides == ((size + 1) * 64, 64, 8)
        return reduced(mine, [comm.rank] * 7, np.empty(7, np.int64))

    assert on_ranks(size, work) == [[size - 1] * 7] * size


def test_more_values_than_a_line_holds_are_refused():
    mine = board_of(lines_of(1))
    with pytest.raises(ValueError, match="could not broadcast"):
        mine.imax(np.zeros(8, np.int64), np.empty(8, np.int64))


def test_counts_beyond_32_bits():
    mine = board_of(lines_of(1))
    mine._state.count = 2**32 - 2
    assert [reduced(mine, [turn], np.empty(1, np.int64)) for turn in range(4)] == [[0], [1], [2], [3]]


def agrees(comm):
    with Agreement(comm, "call"):
        pass


def meets(comm):
    comm.wait(comm.board.imax(np.empty(0, np.int64), np.empty(0, np.int64)))


def test_who_waits_there_hears_of_a_broken_context():
    waits_in = {0: agrees, 2: meets}

    def work(comm):
        comm.board = one_board(comm)
        if comm.rank == 1:
            time.sleep(0.1)  # the others are waiting by now
            comm.channel.break_(MemoryError("no room"), "matmul")
            return 0
        with pytest.raises(ClosedError, match="rank 1 left matmul with MemoryError: no room"):
            waits_in[comm.rank](comm)
        return time.monotonic()

    before = time.monotonic()
    assert all(each - before < 1 for each in on_ranks(3, work))


def pauses(request):
    """Wait until the request has looked at the other processes."""
    before = request._next_look
    while request._next_look == before:
        request.pause()


@pytest.mark.parametrize("reaped", [False, True])
def test_a_rank_that_has_ended_is_noticed(reaped, monkeypatch):
    """Rank 1 is a child that posts one reduction of two; it is noticed as soon as it has ended."""
    lines = lines_of(2)
    nothing = np.empty(0, np.int64)
    hold, let_go = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(let_go)
            board_of(lines, 1).imax(nothing, nothing)
            os.read(hold, 1)
        finally:
            os._exit(0)
    mine = board_of(lines, 0, [(process, locations.began(process)) for process in (os.getpid(), child)])
    request = mine.imax(nothing, nothing)
    while not request.Test():
        request.pause()
    later = mine.imax(nothing, nothing)
    asked = []
    monkeypatch.setattr(board, "began", lambda number: asked.append(number) or locations.began(number))
    pauses(later)  # it runs
    assert set(asked) == {child}  # this rank has arrived
    os.close(let_go)
    os.waitid(os.P_PID, child, os.WEXITED | (0 if reaped else os.WNOWAIT))
    pauses(request)  # it had come here
    with pytest.raises(ClosedError, match="rank 1 has ended"):
        pauses(later)
    if not reaped:
        os.waitpid(child, 0)


def test_a_look_is_only_at_ranks_that_have_not_arrived(monkeypatch):
    """With many ranks, each of which asks the kernel about all, looks alone would keep the cores busy."""
    lines, nothing = lines_of(4), np.empty(0, np.int64)
    processes = [(rank, "now") for rank in range(4)]
    for rank in (1, 3):
        board_of(lines, rank, processes).arrive()
    looked = []
    monkeypatch.setattr(board, "began", lambda process: looked.append(process) or "now")
    request = board_of(lines, 0, processes).imax(nothing, nothing)
    pauses(request)
    assert looked == [2]


def test_when_a_process_began():
    me = os.getpid()
    assert locations.began(me) == locations.began(me) != ""
    assert locations.began(1 << 22) == ""  # no process has this number


@pytest.mark.parametrize(
    "why",
    [
        "no core",
        "several nodes",
        "one has no core",
        "one has another processor",
        "no shared memory",
        "one cannot open it",
    ],
)
def test_ranks_that_cannot_share_a_board_vote_by_messages(why, monkeypatch):
    def work(comm):
        here = locations.Location.here()
        if why == "several nodes":
            comm.locations = lambda: [here, here._replace(machine=("another", ""))]
        if why.startswith("one has "):
            other = "" if why == "one has no core" else "another"
            comm.locations = lambda: [here, here._replace(core=other)]
        return make_boards(comm, 2)

    if why == "no core":
        monkeypatch.setenv("PBLASMP_CORE", "0")
    if why == "no shared memory":
        monkeypatch.delattr(os, "memfd_create")
    if why == "one cannot open it":

        def refuse(*_):
            raise PermissionError(13, "not yours")

        monkeypatch.setattr(os, "open", refuse)
    assert on_ranks(2, work) == [[None, None]] * 2


def test_one_rank_needs_none():
    assert make_boards(Serial(), 2) == [None, None]


def test_ranks_of_gpus_wait_for_votes_that_come_some_hundred_microseconds_later():
    queue = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: 0)
    ask = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))(
        lambda at: at.__setitem__(0, None) or 0
    )
    at = [ctypes.cast(each, ctypes.c_void_p).value for each in (ask, queue, queue)]
    state = _core.LaunchState(*at, None, None)
    launch = ctypes.c_void_p(ctypes.addressof(state))

    def work(comm, votes):
        mine, found = one_board(comm), []
        if mine is None:
            return "late"
        mine.wait_longer()
        for turn in range(40):
            if comm.rank:
                time.sleep(2e-4)
                found.append(votes(mine, turn))
            else:
                began = time.perf_counter()
                found.append(votes(mine, turn))
                if found[-1] in (_core.QUEUED, []) and time.perf_counter() - began > 1.5e-4:
                    found.append("waited")
            comm.barrier()
        return "waited" if "waited" in found or comm.rank else found

    for votes in (
        lambda mine, turn: mine.vote_to_launch(turn, launch, None, patient=False),
        lambda mine, turn: mine.vote(turn),
    ):
        assert on_ranks(2, partial(work, votes=votes))[0] == "waited"
