# SPDX-License-Identifier: Apache-2.0
"""What the GPU benchmark times is what a plan calls."""

from __future__ import annotations

import pblasmp as pb
from benchmarks.gpu_devices import c_call

D = pb.MatrixDescriptor((6, 6), (2, 2), pb.Grid(1, 1))


def test_the_benchmark_makes_the_same_call(ctx, lib):
    """The bare call that benchmarks/gpu_matmul.py times next to a plan is the plan's."""
    with pb.plan_matmul(ctx.empty(D), ctx.empty(D)) as plan:
        plan()
        c_call(plan)()
        planned, *bare = (call.arguments for call in lib.of("Matmul"))
        assert bare == [planned, planned]
