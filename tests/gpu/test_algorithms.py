# SPDX-License-Identifier: Apache-2.0
"""Random calls by every algorithm on GPUs against NumPy, in layouts of every kind.

PBLASMP_RANDOM_PRODUCTS says how many products of each algorithm there are, of everything else there are fewer in
proportion; PBLASMP_TRACE=1 says which one runs. Each test has its own time limit.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.layout.level3_problem import ROUTINES
from tests.helpers.gpu.algorithms import (
    EPILOGUES,
    KEPT,
    NOT_KEPT,
    PARALLEL,
    PRODUCTS,
    check_parallel,
    check_repeated_calls,
    check_scheme,
    every_epilogue,
    every_float8,
    small_panels,
)
from tests.helpers.gpu.calls import algorithms, check_random_call
from tests.helpers.slow import fewer, thinned

COUNT = int(os.environ.get("PBLASMP_RANDOM_PRODUCTS", thinned(200)))
BATCH = 50
BATCHES = range(max(1, COUNT // BATCH))
FEWER = max(4, COUNT // 8)

OF_CUBLASMP = "default", "no_overlap", "split_p2p"

CALLS = [(routine, algo) for routine in ROUTINES for algo in algorithms(routine)]


def all_right(
    check: Callable[..., None], ctx: pb.Context, *case: str, seeds: Iterable[int], **how: Any
) -> None:
    """Run every seed; cuBLASMp, as "split_p2p", does not have every type."""
    missing = [pb.StatusError] if "split_p2p" in case else []
    for seed in seeds:
        with contextlib.suppress(*missing):  # raised on every rank
            check(ctx, *case, seed, **how)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("algo", "layouts"),
    [
        *((algo, "any") for algo in (*algorithms("matmul"), "auto", "default")),
        ("default", "fits"),
        ("default", "sources"),
    ],
)
def test_products(ctx, algo, layouts, batch):
    seeds = range(batch * BATCH, batch * BATCH + min(BATCH, COUNT))
    with small_panels(ctx):
        all_right(check_random_call, ctx, "matmul", algo, seeds=seeds, layouts=layouts)


@pytest.mark.parametrize(("name", "how"), KEPT + NOT_KEPT)
def test_repeated_calls(ctx, name, how):
    check_repeated_calls(ctx, name, how)


@pytest.mark.parametrize(
    ("scheme", "algo"),
    [(s, algo) for s in PRODUCTS if s != "gemm" for algo in (*PRODUCTS[s], "auto", *OF_CUBLASMP)],
)
def test_schemes(ctx, scheme, algo):
    if algo == "no_overlap" and ctx.engine.version < 700:
        pytest.skip("newer versions have it")
    with small_panels(ctx):
        all_right(check_scheme, ctx, scheme, algo, seeds=range(FEWER))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("algo", EPILOGUES)
def test_epilogues(ctx, algo, dtype):
    for check in every_epilogue(ctx, algo, dtype, np.random.default_rng(81)):
        check()


@pytest.mark.parametrize("algo", EPILOGUES)
def test_float8(ctx, algo):
    for check in every_float8(ctx, algo, np.random.default_rng(82)):
        check()


@pytest.mark.parametrize(("routine", "algo"), CALLS)
def test_routines(ctx, routine, algo):
    with small_panels(ctx):
        all_right(check_random_call, ctx, routine, algo, seeds=range(FEWER))


@pytest.mark.parametrize(
    ("form", "algo"), [(form, algo) for form in PARALLEL for algo in (*PARALLEL[form], "auto")]
)
def test_tensor_parallel(ctx, form, algo):
    with small_panels(ctx):
        all_right(check_parallel, ctx, form, algo, seeds=range(FEWER))


def test_larger_ones(ctx):
    """Several panels of the real width are in flight while others are multiplied."""
    n, k = 600, 3 * ctx.engine.operations.panel // 2
    grid = pb.Grid.squarest(ctx.size)
    shapes = (n, k), (k, n)
    # NumPy multiplies integers without BLAS
    values = [np.random.default_rng(i).integers(-1, 2, shape).astype(float) for i, shape in enumerate(shapes)]
    matrices = []
    for x, block in zip(values, ((64, 100), (100, 32)), strict=True):
        d = pb.MatrixDescriptor(x.shape, block, grid, dtype="float32")
        matrices.append(ctx.scatter(x.astype(np.float32) if ctx.rank == 0 else None, d))
    expected = values[0] @ values[1]
    for algo in fewer(algorithms("matmul"), 1):
        with pb.plan(pb.matmul, *matrices, algo=algo) as plan:
            for _ in range(3):
                assert np.array_equal(plan().allgather(), expected), algo


@pytest.mark.parametrize("algo", ["gathered", "panels"])
def test_large_slabs(ctx: pb.Context, algo: str) -> None:
    """Between hosts of several GPUs they come once to each, and are passed on there."""
    found, rng = [], np.random.default_rng(66)
    grids = {(1, ctx.size), (ctx.size, 1), pb.Grid.squarest(ctx.size).shape}
    for (m, n, k), grid, order in itertools.product(
        ((1040, 780, 1300), (640, 640, 2047)), grids, ("row", "col")
    ):
        a, b = (rng.integers(-3, 4, shape).astype(float) for shape in ((m, k), (k, n)))
        x, y = (
            ctx.scatter(each, block=block, grid=pb.Grid(*grid, order=order))
            for each, block in ((a, (52, 40)), (b, (36, 44)))
        )
        with pb.plan(pb.matmul, x, y, algo=algo) as plan:
            for run in range(3):
                wrong = np.count_nonzero(plan().allgather() != a @ b)
                found += [f"{m}, {n}, {k} on {grid} by {order}, run {run}: {wrong}"] if wrong else []
    assert not found
