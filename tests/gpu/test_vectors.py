# SPDX-License-Identifier: Apache-2.0
"""Levels 1 and 2 on GPUs: the table of calls, numbers, and a gemv that leaves A where it is."""

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers.calls import DTYPES, WRITERS, called, legal_options, of_level_1
from tests.helpers.gpu.products import everywhere
from tests.helpers.slow import fewer


@pytest.mark.parametrize("routine", WRITERS)
def test_every_option(ctx, routine):
    rng = np.random.default_rng(81)
    faults = [
        fault
        for number, options in enumerate(legal_options(routine))
        for turn, dtype in enumerate(DTYPES)
        for way in fewer(("auto", "often", "plan"), number + turn)
        if (fault := everywhere(ctx, called(ctx, rng, routine, options, dtype, way, (37, 29)) or ""))
    ]
    assert not faults, "\n".join(faults[:5])


def test_numbers(ctx):
    rng = np.random.default_rng(82)
    found = [
        (case, everywhere(ctx, wrong or ""))
        for dtype in DTYPES
        for case, wrong in of_level_1(ctx, rng, dtype, 1000)
    ]
    assert not [each for each in found if each[1]]


def test_a_gemv_sends_vectors_only(ctx):
    d = pb.MatrixDescriptor((4096, 4096), (256, 256), pb.Grid.squarest(ctx.size))
    a, x = ctx.zeros(d), ctx.zeros(pb.MatrixDescriptor((4096, 1), (256, 1), d.grid))
    with pb.plan(pb.matmul, a, x) as plan:
        report = plan.report()
    assert ctx.size == 1 or report.algorithm == "stationary"
    assert report.sent_bytes <= 4 * 8 * 4096
