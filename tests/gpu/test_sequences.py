# SPDX-License-Identifier: Apache-2.0
"""Random sequences of public calls on one context: a short form of ``python -m tests.chaos.sequences``."""

from __future__ import annotations

import pytest

from tests.helpers.sequences import Gpu, Sequence, replay, search
from tests.helpers.slow import thinned

SMALL_THEN_LARGE = """
state = Sequence()
matrices_0 = state.begin(layouts=[MatrixDescriptor((400, 500), (64, 64), Grid(1, 1))], panels=0)
state.random_numbers(layout=MatrixDescriptor((3000, 3000), (256, 256), Grid(1, 1)), root=0, seed=3)
state.teardown()
"""
"""Copies to the host of one pinned buffer, then of more than three: once wrong."""


@pytest.fixture(scope="module")
def comm(ctx):
    """The ranks, in mpi4py."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


@pytest.fixture(scope="module")
def gpu(ctx):
    """This rank's GPU and its streams."""
    return Gpu(ctx.engine.device.index)


def test_sequences(comm, gpu):
    fault = search(comm, lambda: Sequence(comm, gpu), thinned(12))
    assert not fault, fault


def test_a_small_copy_then_a_large_one(comm, gpu):
    replay(Sequence(comm, gpu), SMALL_THEN_LARGE)
