# SPDX-License-Identifier: Apache-2.0
"""Refined solves, least squares of any rank, and warnings of ill-conditioned matrices, on CPU ranks."""

from __future__ import annotations

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers import solve_cases as cases
from tests.helpers.lengths import draws, only_long
from tests.helpers.mpi import run_mpi

RANKS = (1, 2, 3, *only_long(4, 5, 6))


def refined(comm, count):
    rng = np.random.default_rng(7 + comm.size)
    with pb.Context(comm, engine="host") as ctx:
        for i in range(count):
            yield cases.refined_case(ctx, rng, ("float64", "complex128")[i % 2])
        if ctx.size == 2:
            yield from cases.refinement_ends(ctx, rng)


@pytest.mark.parametrize("nranks", RANKS)
def test_refined(nranks):
    run_mpi(refined, nranks, count=draws(8, long=100))
