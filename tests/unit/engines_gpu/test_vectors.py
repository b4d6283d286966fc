# SPDX-License-Identifier: Apache-2.0
"""Levels 1 and 2 on simulated GPUs: every option, numbers on the host, and a gemv that leaves A where it is."""

from __future__ import annotations

from typing import Any

import numpy as np

import pblasmp as pb
from tests.helpers.calls import DTYPES, WRITERS, called, legal_options, of_level_1
from tests.helpers.machine import Multiplying, context
from tests.helpers.mpi import on_ranks


@on_ranks(4)
def test_every_option(comm: Any, path: str) -> Any:
    rng = np.random.default_rng(71)
    with context(path, Multiplying, comm=comm) as (ctx, _):
        for routine in WRITERS:
            for options in legal_options(routine):
                dtype = DTYPES[int(rng.integers(4))]
                yield f"{routine} {options} {dtype}", called(ctx, rng, routine, options, dtype)
        for dtype in DTYPES:
            yield from of_level_1(ctx, rng, dtype, 9)
        yield "algorithm", taken(ctx)


def taken(ctx: Any) -> str | None:
    """Say what is wrong unless a product with one vector, and with no more, leaves A in place."""
    d = pb.MatrixDescriptor((64, 64), (8, 8), pb.Grid.squarest(ctx.size))
    a = ctx.zeros(d)
    seen = []
    for columns in (1, 2):
        b = ctx.zeros(pb.MatrixDescriptor((64, columns), (8, 1), d.grid))
        with pb.plan(pb.matmul, a, b) as plan:
            seen.append(plan.report().algorithm == "stationary")
    return None if seen == [True, False] else f"{seen}"
