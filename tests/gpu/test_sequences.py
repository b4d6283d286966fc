# SPDX-License-Identifier: Apache-2.0
"""Random sequences of public calls on one context: a short form of ``python -m tests.chaos.sequences``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.sequences import Gpu, replay, search, sequences, steps_of
from tests.helpers.slow import thinned

COUNT = thinned(12)
LENGTH = 40

SMALL_THEN_LARGE = [
    ["from_function", {"to": 0, "a": 1, "b": 2, "layout": {
        "shape": [400, 500], "block": [64, 64], "grid": [1, 1, "row"], "source": [0, 0], "dtype": "float64",
        "order": "C", "pad": 0}}],
    ["random_numbers", {"seed": 3, "root": 0, "layout": {
        "shape": [3000, 3000], "block": [256, 256], "grid": [1, 1, "row"], "source": [0, 0], "dtype": "float64",
        "order": "C", "pad": 0}}],
]  # fmt: skip
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


def failure(comm, gpu, path: Path, steps):
    """Run a sequence on a context of its own; return what was wrong, the same on every rank."""
    outcome = replay(comm, gpu, Path(comm.bcast(str(path))), steps)
    if not outcome.faults:
        return ""
    return "\n".join(
        [f"step {outcome.at}", *outcome.faults, *(f"{step}," for step in steps[: outcome.at + 1])]
    )


def test_sequences(comm, gpu, tmp_path):
    drawn = sequences(comm.size, LENGTH, Gpu.large)
    fault = search(comm, drawn, COUNT, 0, lambda steps: failure(comm, gpu, tmp_path, steps))
    assert not fault, fault


def test_a_small_copy_then_a_large_one(comm, gpu, tmp_path):
    fault = failure(comm, gpu, tmp_path, steps_of(SMALL_THEN_LARGE))
    assert not fault, fault
