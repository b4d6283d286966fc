# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/iterative_refinement.py
"""Solve in float64 with factors in float32: each step solves for the residual of the step before.

The factorization, which takes nearly all of the time, then runs at the speed and in the memory of float32.

Prints:
    after 0 steps the error is below 1e-4
    after 3 steps the error is below 1e-12
"""

from __future__ import annotations

import numpy as np

import pblasmp as pb

n = 500

with pb.Context() as ctx:
    grid = pb.Grid.squarest(ctx.size)
    layout = pb.MatrixDescriptor((n, n), (64, 64), grid)
    a = ctx.from_function(lambda i, j: np.cos(i * j + i) + 30.0 * (i == j), layout)
    exact = ctx.from_function(lambda i, j: np.sin(i) + 0.0 * j, pb.MatrixDescriptor((n, 1), (64, 1), grid))
    b = pb.matmul(a, exact)

    factors, pivots = pb.linalg.lu_factor(a.astype("float32"))
    x = pb.linalg.lu_solve((factors, pivots), b.astype("float32")).astype("float64")
    for step in range(4):
        error = float((x - exact).norm("max"))
        if ctx.rank == 0 and step in (0, 3):
            bound = 1e-4 if step == 0 else 1e-12
            words = f"below {bound:.0e}".replace("e-0", "e-") if error < bound else error
            print(f"after {step} steps the error is {words}")
        residual = pb.matmul(a, x, b, alpha=-1, beta=1)  # B - A X, in float64
        x += pb.linalg.lu_solve((factors, pivots), residual.astype("float32")).astype("float64")
