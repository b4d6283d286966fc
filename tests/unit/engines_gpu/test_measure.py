# SPDX-License-Identifier: Apache-2.0
"""Measuring simulated GPUs: every number that predictions of factorizations read is there, and they read it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np

import pblasmp as pb
from pblasmp.costs.machines import machine_from
from pblasmp.layout.factor_problem import FactorProblem
from pblasmp.tuning import speeds, timing
from tests.helpers.machine import Multiplying, machine
from tests.helpers.mpi import on_ranks

SMALL = {
    "SIZES": {"gpu": (8, 16)}, "COPIED": {"gpu": 1 << 12}, "SENT": {"gpu": 1 << 10},
    "PANEL": {"gpu": (16, 8)}, "ROUNDS": 1, "QUEUED": 1,
}  # fmt: skip


def seconds(run: Any, _: Any = None) -> float:
    run()
    return 1e-3


@on_ranks(2)
def test_measure(comm: Any, path: str) -> None:
    with (
        machine(path, Multiplying, comm=comm),
        mock.patch.multiple(speeds, **SMALL),
        mock.patch.object(timing, "device_seconds", seconds),
        pb.Context(comm, engine="cublasmp") as ctx,
    ):
        square = pb.MatrixDescriptor((32, 32), (8, 8), pb.Grid(1, ctx.size))
        a = ctx.eye(square)
        product = pb.plan(pb.matmul, a, a)
        entry = speeds.measure_ranks(ctx.engine, ctx.comm, product, lambda _: None)
        calls = [(each.problem, each) for each in (product, pb.plan("lu", a))]
        entry["calls"] = speeds.measure_calls(ctx.engine, ctx.comm, entry, calls)
        slow = {**entry, "launch_seconds": 1e6}  # then all of a call's time is that of its launches
        assert speeds.measure_calls(ctx.engine, ctx.comm, slow, calls[:1]) == {"product": 0}
        about = {"title": "two", "engine": "gpu", "measured": True, "ranks_per_node": ctx.size}
        here = machine_from({**about, "ranks": [entry]}, "here")
        assert {*entry["columns"]} == {"trsm", "potrf", "getrf", "geqrt"}
        assert {*entry["calls"]} == {"product", "lu"}
        lu = FactorProblem("lu", a=square, c=square)
        found = pb.predict(lu, here)
        assert np.isfinite(found.seconds)
        assert not found.extrapolated
        slow = machine_from({**about, "ranks": [{**entry, "launch_seconds": 1.0}]}, "slow")
        assert pb.predict(lu, slow).seconds > 0.9, "the host's time does not count"
