# SPDX-License-Identifier: Apache-2.0
"""Votes of ranks that share memory."""

from __future__ import annotations

import os
import random
import time

import numpy as np
import pytest

from pblasmp.comm import board
from pblasmp.comm.agreement import Agreement
from pblasmp.comm.board import make_board
from pblasmp.comm.communicator import _Serial
from pblasmp.errors import LayoutError, RankMismatchError
from tests.helpers.threads import on_ranks


def reduced(mine, values, out):
    request = mine.imax(np.array(values), out)
    while not request.Test():
        request.pause()
    return out.tolist()


def test_every_rank_gets_the_largest_values_of_all():
    def work(comm):
        mine, found = make_board(comm), []
        late = random.Random(comm.rank)
        for turn in range(200):
            if late.random() < 0.1:
                time.sleep(0.001)
            values = [turn + comm.rank, -turn - comm.rank, (comm.rank + turn) % 3 == 0]
            found.append(reduced(mine, values, np.empty(3, np.int64)))
        return found

    assert on_ranks(4, work) == [[[turn + 3, -turn, 1] for turn in range(200)]] * 4


def test_nobody_is_through_before_all_are_there():
    def work(comm):
        mine, nothing = make_board(comm), np.empty(0, np.int64)
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


def test_a_rank_may_be_ahead_of_those_that_read():
    """The fast one begins the next reduction before the slow one has read this one."""

    def work(comm):
        mine, out = make_board(comm), [np.empty(1, np.int64) for _ in range(2)]
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


def blame(rank):
    if rank == 1:
        raise LayoutError("mine")


def test_agreement_votes_there():
    def work(comm):
        comm.board = make_board(comm)
        comm.imax = None  # nothing is voted by messages
        with pytest.raises(RankMismatchError), Agreement(comm, "call") as facts:
            facts["n"] = comm.rank
        with pytest.raises(LayoutError, match=r"mine.*\(on rank 1\)"), Agreement(comm, "call"):
            blame(comm.rank)
        with Agreement(comm, "call"):
            return "agreed"

    assert on_ranks(3, work) == ["agreed"] * 3


@pytest.mark.parametrize("why", ["another processor", "several nodes", "no shared memory"])
def test_ranks_that_cannot_share_a_board_vote_by_messages(why, monkeypatch):
    def work(comm):
        if why == "several nodes":
            comm.nodes = lambda: [(0,), (1,)]
        return make_board(comm)

    if why == "another processor":
        monkeypatch.setattr(board.platform, "machine", lambda: "aarch64")
    if why == "no shared memory":
        monkeypatch.delattr(os, "memfd_create")
    assert on_ranks(2, work) == [None, None]


def test_one_rank_needs_none():
    assert make_board(_Serial()) is None
