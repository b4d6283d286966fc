# SPDX-License-Identifier: Apache-2.0
"""What the GPU benchmark times is what a plan calls."""

from __future__ import annotations

import os
from typing import Any

import pblasmp as pb
from benchmarks.gpu_devices import c_call, gpu_machine
from tests.helpers.machine import machine
from tests.helpers.mpi import on_ranks

D = pb.MatrixDescriptor((6, 6), (2, 2), pb.Grid(1, 1))


def test_the_benchmark_makes_the_same_call(ctx, lib):
    """The bare call that benchmarks/gpu_matmul.py times next to a plan is the plan's."""
    with pb.plan(pb.matmul, ctx.empty(D), ctx.empty(D)) as plan:
        plan()
        c_call(plan)()
        planned, *bare = (call.arguments for call in lib.of("Matmul"))
        assert bare == [planned, planned]


@on_ranks(2)
def test_what_results_say_of_the_machine(comm: Any, path: str) -> None:
    """Two GPUs of one host are on one host, and a rank that is bound to a core is on a machine of more."""
    everything = os.sched_getaffinity(0)
    with machine(path, comm=comm), pb.Context(comm, engine="cublasmp") as ctx:
        os.sched_setaffinity(0, {min(everything)})
        try:
            found = gpu_machine(ctx)
        finally:
            os.sched_setaffinity(0, everything)
    assert found["hosts"] == 1, "hosts"
    assert not found.get("shared"), "GPUs of their own"
    assert found["cores"] == len(os.sched_getaffinity(1)), "cores"
