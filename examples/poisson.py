# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/poisson.py
"""Solve Poisson's equation on a square: the five-point matrix is positive definite, so Cholesky factors it once.

Two right-hand sides are solved one after the other with one factor, as a simulation would at each time step.

Prints:
    source 1: the residual is below 1e-12
    source 2: the residual is below 1e-12
"""

from __future__ import annotations

import numpy as np

import pblasmp as pb

side = 24  # points of the mesh in each direction
n = side * side

with pb.Context() as ctx:
    grid = pb.Grid.squarest(ctx.size)
    layout = pb.MatrixDescriptor((n, n), (64, 64), grid)
    column = pb.MatrixDescriptor((n, 1), (64, 1), grid)

    def laplacian(i, j):
        apart = abs(i // side - j // side) + abs(i % side - j % side)
        return 4.0 * (i == j) - 1.0 * (apart == 1)

    a = ctx.from_function(laplacian, layout)
    lower = pb.linalg.cholesky(a)
    for source in (1, 2):
        b = ctx.from_function(lambda i, j, s=source: np.sin(s * (i % side) / side) + 0 * j, column)
        u = pb.linalg.cho_solve((lower, True), b)
        residual = float((pb.matmul(a, u) - b).norm("max"))
        if ctx.rank == 0:
            print(f"source {source}: the residual is {'below 1e-12' if residual < 1e-12 else residual}")
