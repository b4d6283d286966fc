# SPDX-License-Identifier: Apache-2.0
"""What a rank that comes late costs the others."""

from __future__ import annotations

import time

import pblasmp as pb
from pblasmp.comm import mpi_communicator, side_channel
from tests.helpers.mpi import run_mpi


def notes_of_a_late_rank(comm):
    """Of two contexts one waits: each rank that does so tells one other rank, whichever is late.

    On a busy machine ranks also wait for each other once or twice besides.
    """
    side_channel._STALL_SECONDS = 0.1
    sent, send = [], mpi_communicator._Notes.send

    def counted(self, note, to=None):
        sent.extend(range(self._comm.size - 1) if to is None else [to])
        send(self, note, to)

    mpi_communicator._Notes.send = counted
    with pb.Context(comm, engine="host") as ctx, pb.Context(comm, engine="host"):
        for late in (0, comm.size - 1):
            comm.Barrier()
            sent.clear()
            if comm.rank == late:
                time.sleep(0.3)
            ctx.zeros((8, 8))
            total = sum(map(len, comm.allgather(sent)))
            others = comm.size - 1  # who all told each other, in each of the two contexts, before
            yield f"rank {late}", None if 0 < total <= 3 * others < 2 * others**2 else f"{total} notes"


def test_notes_of_a_late_rank():
    run_mpi(notes_of_a_late_rank, 4)
