# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/gemm.py
"""D = alpha A B^T + beta C on a 2 x 2 grid, first as a single call, then as a plan that runs twice.

Prints:
    D is right
    float64 NT product of 60 x 50 x 40
    D is right again after B has changed
"""

from __future__ import annotations

import numpy as np

import pblasmp as pb


def numbers(seed):
    """Return a function of index arrays: element (i, j) of a matrix of small integers."""
    return lambda i, j: (seed * i + 3 * j) % 7 - 3


def on_one_rank(seed, rows, cols):
    return np.fromfunction(numbers(seed), (rows, cols))


m, n, k = 60, 50, 40
with pb.Context() as ctx:
    grid = pb.Grid.squarest(ctx.size)
    a = ctx.from_function(numbers(1), pb.MatrixDescriptor((m, k), (16, 8), grid))
    b = ctx.from_function(numbers(2), pb.MatrixDescriptor((n, k), (10, 8), grid))
    c = ctx.from_function(numbers(4), pb.MatrixDescriptor((m, n), (16, 10), grid))

    # A is in blocks of 16 x 8 and B^T in blocks of 8 x 10, so D is in blocks of 16 x 10, and C must be too.
    d = pb.matmul(a, b, c, alpha=2, beta=-1, op_b="T").gather()
    product = on_one_rank(1, m, k) @ on_one_rank(2, n, k).T
    if ctx.rank == 0:
        assert np.array_equal(d, 2 * product - on_one_rank(4, m, n))
        print("D is right")

    with pb.plan(pb.matmul, a, b, c, alpha=2, beta=-1, op_b="T") as plan:
        if ctx.rank == 0:
            print(plan.report())
        plan()
        b.local[...] *= 2  # local arrays may be written in place
        d = plan().gather()
        if ctx.rank == 0:
            assert np.array_equal(d, 4 * product - on_one_rank(4, m, n))
            print("D is right again after B has changed")
