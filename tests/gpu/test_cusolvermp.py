# SPDX-License-Identifier: Apache-2.0
"""``algo="cusolvermp"`` on GPUs, where it is installed: every routine and type, sizes that were wrong once, faults."""

from __future__ import annotations

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.gpu.cusolvermp.library import solver_of
from pblasmp.engines.gpu.session import session_of
from tests.helpers import solver_cases
from tests.helpers.factor_cases import least_squares_at_the_ends, without_full_rank
from tests.helpers.gpu.products import everywhere

ALGO = {"algo": "cusolvermp"}


@pytest.fixture(autouse=True)
def installed(ctx):
    solver = solver_of(session_of(ctx.engine))
    if isinstance(solver, str):
        pytest.skip(solver)


@pytest.mark.parametrize("case", solver_cases.CASES, ids=lambda case: case.__name__)
def test_every_type_in_layouts_at_random(ctx, case):
    rng = np.random.default_rng(91)
    faults = []
    for dtype in solver_cases.TYPES:
        for n in (0, 0, 150):
            name, wrong = case(ctx, rng, dtype, n)
            faults += [f"{name}: {each}"] if (each := everywhere(ctx, wrong or "")) else []
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("dtype", solver_cases.TYPES)
def test_the_ends_of_the_range_equal_eigenvalues_and_no_full_rank(ctx, dtype):
    rng = np.random.default_rng(93)
    outcomes = [
        *(each for n in (12, 155) for each in solver_cases.eigh_at_the_ends(ctx, rng, dtype, n)),
        *least_squares_at_the_ends(ctx, rng, dtype, **ALGO),
        *without_full_rank(ctx, rng, dtype, **ALGO),
    ]
    faults = [f"{name}: {each}" for name, wrong in outcomes if (each := everywhere(ctx, wrong or ""))]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(("rows", "cols"), [(600, 300), (1000, 500), (4096, 2048)])
def test_qr_of_sizes_that_earlier_versions_had_wrong(ctx, rows, cols):
    rng = np.random.default_rng(92)
    whole = rng.standard_normal((rows, cols))
    for grid in (pb.Grid(1, ctx.size), pb.Grid(ctx.size, 1)):
        a = ctx.scatter(whole, pb.MatrixDescriptor(whole.shape, (64, 64), grid, order="F"))
        found = pb.linalg.qr(a, **ALGO)
        q, r = found.q(**ALGO).allgather(), found.r().allgather()
        error = np.linalg.norm(q @ r - whole) / np.linalg.norm(whole) / rows / np.finfo(float).eps
        assert error < 30
        assert np.linalg.norm(q.T @ q - np.eye(cols)) / rows / np.finfo(float).eps < 30


def test_blocks_of_one_and_grids_of_some_ranks_are_moved(ctx):
    whole = np.diag(np.arange(1.0, 41)) + 0.01
    for block, grid in (((1, 1), pb.Grid(1, ctx.size)), ((8, 8), pb.Grid(1, 1))):
        a = ctx.scatter(whole, pb.MatrixDescriptor(whole.shape, block, grid, order="F"))
        b = ctx.scatter(np.ones((40, 2)), pb.MatrixDescriptor((40, 2), block, grid, order="F"))
        x = pb.linalg.cho_solve((pb.linalg.cholesky(a, **ALGO), True), b, **ALGO).allgather()
        assert np.allclose(whole @ x, 1)


def test_singular_indefinite_and_nan(ctx):
    d = pb.MatrixDescriptor((100, 100), (16, 16), pb.Grid.squarest(ctx.size), order="F")
    whole = np.eye(100) * 4
    whole[50] = 0
    for function, args in ((pb.linalg.lu_factor, ()), (pb.linalg.lstsq, (ctx.eye(100),))):
        with pytest.raises(pb.FactorizationError) as caught:
            function(ctx.scatter(whole, d), *args, **ALGO)
        assert caught.value.index == 50
    whole[50, 50] = -1
    with pytest.raises(pb.FactorizationError) as caught:
        pb.linalg.cholesky(ctx.scatter(whole, d), **ALGO)
    assert caught.value.index == 50
    assert np.array_equal(pb.linalg.cholesky(4 * ctx.eye(100), **ALGO).allgather(), 2 * np.eye(100))
    whole[50, 50] = np.nan
    a = ctx.scatter(whole, d)
    assert np.isnan(pb.linalg.cholesky(a, **ALGO).allgather()[50:, 50]).all()
    assert np.isnan(pb.linalg.lu_factor(a, **ALGO)[0].allgather()).any()
    assert np.isnan(pb.linalg.qr(a, **ALGO).factors.allgather()).any()
