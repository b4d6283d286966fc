# SPDX-License-Identifier: Apache-2.0
"""Every sweep in descriptors/sweeps on the host engine: the problems of ScaLAPACK's PBLAS tester, and more sources."""

from __future__ import annotations

import pytest

import pblasmp as pb
from tests.helpers.mpi import run_mpi
from tests.helpers.slow import in_turn
from tests.helpers.sweeps import cases, fault, label, sweeps

SIZES = (2, 4, 6)


def run_sweeps(comm):
    with pb.Context(comm, engine="host") as ctx:
        for (case,) in in_turn(list(cases(comm.size)), keep=7, first=comm.size):
            yield label(*case), fault(ctx, *case) or None


@pytest.mark.parametrize("nranks", SIZES)
def test_sweeps(nranks):
    run_mpi(run_sweeps, nranks, timeout=120)


def test_every_grid_of_every_sweep_is_run():
    assert {grid.size for sweep in sweeps() for grid in sweep.grids.values()} == set(SIZES)
