# SPDX-License-Identifier: Apache-2.0
"""``algo="cusolvermp"`` on GPUs, where it is installed: every type, the ends of the range, layouts that are moved."""

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.gpu.cusolvermp import solver_of
from pblasmp.engines.gpu.session import session_of
from tests.helpers.factor_cases import TYPES
from tests.helpers.spectral_cases import eigh, eigh_at_the_ends

ALGO = {"algo": "cusolvermp"}


@pytest.fixture(autouse=True)
def installed(ctx):
    solver = solver_of(session_of(ctx.engine))
    if isinstance(solver, str):
        pytest.skip(solver)


@pytest.mark.parametrize("dtype", TYPES)
def test_layouts_at_random_the_ends_of_the_range_and_equal_eigenvalues(ctx, dtype):
    rng = np.random.default_rng(93)
    for n in (0, 19, 150):
        eigh(ctx, rng, dtype, n, "cusolvermp", kind="all")
    for n in (12, 155):
        eigh_at_the_ends(ctx, rng, dtype, n)


def test_blocks_of_one_and_grids_of_some_ranks_are_moved(ctx):
    whole = np.diag(np.arange(1.0, 41)) + 0.01
    for block, grid in (((1, 1), pb.Grid(1, ctx.size)), ((8, 8), pb.Grid(1, 1))):
        a = ctx.scatter(whole, pb.MatrixDescriptor(whole.shape, block, grid, order="F"))
        w, v = pb.linalg.eigh(a, **ALGO)
        found = v.allgather()
        assert np.allclose(w, np.linalg.eigvalsh(whole))
        assert np.allclose(whole @ found, found * w)
