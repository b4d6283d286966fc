# SPDX-License-Identifier: Apache-2.0
"""Freivalds' test as ``--check`` uses it: right products pass in every type, wrong ones do not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.cli.verify import verify_product
from tests.helpers.mpi import run_mpi

DTYPES = ("float64", "float32", "complex128", "complex64", "float16", "bfloat16")
SHAPES = ((40, 50, 300), (1, 1, 1), (30, 20, 0), (0, 5, 5), (5, 0, 5))


def matrix(ctx, seed, rows, cols, op, grid, dtype, order, positive):
    shape = (rows, cols) if op == "N" else (cols, rows)
    random = np.random.default_rng([seed, ctx.rank])

    def numbers(i, j):
        values = random.uniform(0.0 if positive else -1.0, 1.0, (i.size, j.size))
        return values * (1 + 0.5j) if dtype.startswith("complex") else values

    return ctx.from_function(numbers, pb.MatrixDescriptor(shape, (7, 7), grid, (0, 0), dtype, order))


def verdicts(comm, grid):
    """Every type and op; each product is right, and then wrong in one element."""
    with pb.Context(comm) as ctx:
        for number, (dtype, (m, n, k)) in enumerate(itertools.product(DTYPES, SHAPES)):
            op_a, op_b = "NTC"[number % 3], "NTC"[number // 3 % 3]
            scalars = {"alpha": 1.5, "beta": -0.5, "op_a": op_a, "op_b": op_b}
            make = (pb.Grid(*grid), dtype)
            a = matrix(ctx, 1, m, k, op_a, *make, "C", positive=number % 2 == 0)
            b = matrix(ctx, 2, k, n, op_b, *make, "F", positive=number % 2 == 0)
            c = matrix(ctx, 3, m, n, "N", *make, "C", positive=True)
            d = pb.matmul(a, b, c, **scalars)
            good = verify_product(a, b, c, d, **scalars)
            name = f"{dtype} {op_a}{op_b} {m} {n} {k}"
            yield f"{name} right", None if good.good else f"{good} though D is right"
            if m * n == 0:
                continue
            for value, expected in ((1.0, "wrong"), (np.nan, "NaN")):
                if d.local.size and ctx.rank == 0:
                    d.local[0, 0] = d.local[0, 0] + np.asarray(value * (k + 1)).astype(d.dtype)
                bad = verify_product(a, b, c, d, **scalars)
                yield f"{name} {expected}", f"{bad} though D is {expected}" if bad.good else None


@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (1, 3)])
def test_verdicts(grid):
    run_mpi(verdicts, max(2, grid[0] * grid[1]), grid=grid)
