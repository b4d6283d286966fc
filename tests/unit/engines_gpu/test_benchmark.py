# SPDX-License-Identifier: Apache-2.0
"""What the GPU benchmark times is what a plan calls."""

from __future__ import annotations

import os
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pblasmp as pb
from benchmarks import gpu_factorizations
from benchmarks.gpu_devices import c_call, gpu_machine
from tests.helpers.factor_cases import panels_of
from tests.helpers.machine import machine
from tests.helpers.mpi import run_mpi, starts_ranks

D = pb.MatrixDescriptor((6, 6), (2, 2), pb.Grid(1, 1))


def test_the_benchmark_makes_the_same_call(ctx, lib):
    """The bare call that benchmarks/gpu_matmul.py times next to a plan is the plan's."""
    with pb.plan(pb.matmul, ctx.empty(D), ctx.empty(D)) as plan:
        plan()
        c_call(plan)()
        planned, *bare = (call.arguments for call in lib.of("Matmul"))
        assert bare == [planned, planned]


class Clock:
    """A CUDA event: it is a millisecond from one to the next."""

    now = 0

    def record(self, stream: Any = None) -> None:
        Clock.now += 1
        self.at = Clock.now

    def synchronize(self) -> None:
        pass


def test_the_time_line_of_a_factorization(ctx, lib):
    """Every step that is queued, by what contains it, and the time between."""
    d = pb.MatrixDescriptor((12, 12), (12, 12), pb.Grid(1, 1), order="F")
    a = ctx.from_function(lambda i, j: 4.0 * (i == j), d)
    timeline = gpu_factorizations.Timeline(ctx)
    timeline._cuda = SimpleNamespace(
        Event=Clock, get_current_stream=lambda: None, get_elapsed_time=lambda first, last: last.at - first.at
    )
    with panels_of(ctx, 4):
        rows = timeline.of(lambda: pb.linalg.cholesky(a, out=a))
    calls: Counter[str] = Counter()
    for row in rows:
        calls[row["step"]] += row["calls"]
    assert {step: calls[step] for step in ("potrf", "potrf > square", "gemm")} == {
        "potrf": 3, "potrf > square": 3, "gemm": 3,
    }  # fmt: skip
    assert calls["potrf > trsm"] == 2
    ms = {(row["stream"], row["step"]): row["ms"] for row in rows}
    assert ms["ahead", "potrf"] > ms["ahead", "potrf > square"] == 3
    for stream in ("ahead", "main"):
        outer = sum(ms.get((stream, step), 0) for step in ("potrf", "gemm", "copy"))
        assert ms[stream, "between these"] == Clock.now - 1 - outer
    assert not [name for name in ("gemm", "potrf") if name in vars(ctx.engine.operations)]  # as they were


def machine_of_two(comm: Any, path: str) -> Any:
    """Two GPUs of one host are on one host, and a rank that is bound to a core is on a machine of more."""
    everything = os.sched_getaffinity(0)
    with machine(path, comm=comm), pb.Context(comm, engine="cublasmp") as ctx:
        os.sched_setaffinity(0, {min(everything)})
        try:
            found = gpu_machine(ctx)
        finally:
            os.sched_setaffinity(0, everything)
    yield "hosts", None if found["hosts"] == 1 else found["hosts"]
    yield "GPUs of their own", found.get("shared")
    yield "cores", None if found["cores"] == len(os.sched_getaffinity(1)) else found["cores"]


@starts_ranks
def test_what_results_say_of_the_machine(stand_in):
    run_mpi(machine_of_two, 2, path=stand_in(1000))
