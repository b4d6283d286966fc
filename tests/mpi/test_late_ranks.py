# SPDX-License-Identifier: Apache-2.0
"""What a rank that comes late costs the others."""

import time
from unittest import mock

import pytest

import pblasmp as pb
from pblasmp.comm import mpi_communicator, side_channel
from tests.helpers.mpi import on_ranks


@on_ranks(4)
def test_notes_of_a_late_rank(comm):
    """Of two contexts one waits: each rank that does so tells one other rank, whichever is late.

    On a busy machine ranks also wait for each other once or twice besides.
    """
    side_channel.STALL_SECONDS = 0.1
    sent, send = [], mpi_communicator.MpiNotes.send

    def counted(self, note, to=None):
        sent.extend(range(self._comm.size - 1) if to is None else [to])
        send(self, note, to)

    mpi_communicator.MpiNotes.send = counted
    with pb.Context(comm, engine="host") as ctx, pb.Context(comm, engine="host"):
        for late in (0, comm.size - 1):
            comm.Barrier()
            sent.clear()
            if comm.rank == late:
                time.sleep(0.3)
            ctx.zeros((8, 8))
            total = sum(map(len, comm.allgather(sent)))
            others = comm.size - 1  # who all told each other, in each of the two contexts, before
            assert 0 < total <= 3 * others < 2 * others**2, f"rank {late}: {total} notes"


@on_ranks(3, 4, timeout=20)
def test_matrices_of_two_contexts_in_calls_of_two_groups(comm):
    """All ranks ask in which context a call is made, and those of each group mean their own: none is left behind."""
    half = comm.Split(comm.rank % 2, comm.rank)
    with pb.Context(comm, engine="host") as ctx, pb.Context(half, engine="host") as pair:
        a, of_pair = ctx.zeros((4, 4), block=1), pair.zeros((4, 4), block=1)
        comm.Barrier()
        slow = mock.patch.object(side_channel, "nap", side_effect=lambda _: time.sleep(0.3))
        if comm.rank % 2 == 0 or comm.size == 3:
            with slow, pytest.raises(pb.ArgumentError, match="belongs to another context"):
                pb.blas.geadd(of_pair, a)
        else:
            time.sleep(0.1)
            with pytest.raises(pb.ArgumentError, match="belongs to another context"):
                pb.blas.geadd(of_pair, a)
        comm.Barrier()
        assert ctx.eye((4, 4), block=1).trace() == pair.eye((4, 4), block=1).trace() == 4
