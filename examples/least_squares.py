# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/least_squares.py
"""Fit a polynomial to many samples: least squares by QR.

Prints:
    the coefficients are found
"""

from __future__ import annotations

import numpy as np

import pblasmp as pb

samples, degree = 3000, 7
coefficients = np.array([1.0, -2, 0, 3, 0, 0, -1, 0.5])

with pb.Context() as ctx:
    grid = pb.Grid(ctx.size, 1)  # tall matrices: each rank has some of the rows
    tall = pb.MatrixDescriptor((samples, degree + 1), (64, degree + 1), grid)
    column = pb.MatrixDescriptor((samples, 1), (64, 1), grid)

    def at(i):
        return 2 * i / (samples - 1) - 1

    powers = ctx.from_function(lambda i, j: at(i) ** j, tall)
    noise = ctx.from_function(lambda i, j: 1e-4 * np.sin(1e4 * i + j), column)
    values = ctx.from_function(
        lambda i, j: np.polynomial.polynomial.polyval(at(i) + 0 * j, coefficients), column
    )

    found = pb.linalg.lstsq(powers, values + noise).allgather()[:, 0]
    if ctx.rank == 0:
        worst = abs(found - coefficients).max()
        print("the coefficients are found" if worst < 1e-3 else f"the coefficients are off by {worst}")
