# SPDX-License-Identifier: Apache-2.0
"""Levels 1 and 2 on GPUs: the table of calls, numbers, and a gemv that leaves A where it is."""

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers.calls import DTYPES, WRITERS, check_call, check_level_1, legal_options
from tests.helpers.slow import fewer


@pytest.mark.parametrize("routine", WRITERS)
def test_every_option(ctx, routine):
    rng = np.random.default_rng(81)
    for number, options in enumerate(legal_options(routine)):
        for turn, dtype in enumerate(DTYPES):
            for way in fewer(("auto", "often", "plan"), number + turn):
                check_call(ctx, rng, routine, options, dtype, way, (37, 29))


def test_numbers(ctx):
    rng = np.random.default_rng(82)
    for dtype in DTYPES:
        check_level_1(ctx, rng, dtype, 1000)


def test_a_gemv_sends_vectors_only(ctx):
    d = pb.MatrixDescriptor((4096, 4096), (256, 256), pb.Grid.squarest(ctx.size))
    a, x = ctx.zeros(d), ctx.zeros(pb.MatrixDescriptor((4096, 1), (256, 1), d.grid))
    with pb.plan(pb.matmul, a, x) as plan:
        report = plan.report()
    assert ctx.size == 1 or report.algorithm == "stationary"
    assert report.sent_bytes <= 4 * 8 * 4096
