# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/power_iteration.py
"""The largest eigenvalue of a symmetric matrix by power iteration: gemv, nrm2, dot and scal; the matrix stays in place.

Prints:
    converged after fewer than 100 products
    the largest eigenvalue is that of numpy.linalg.eigvalsh
"""

from __future__ import annotations

import numpy as np

import pblasmp as pb

n, block = 400, 32

with pb.Context() as ctx:
    grid = pb.Grid.squarest(ctx.size)
    square = pb.MatrixDescriptor((n, n), (block, block), grid)
    column = pb.MatrixDescriptor((n, 1), (block, 1), grid)
    a = ctx.from_function(lambda i, j: 1 / (1 + abs(i - j)) + 5 * (i == j) * (i == 7), square)
    x = ctx.from_function(lambda i, j: 1 + 0 * (i + j), column)
    y = ctx.empty(column)

    eigenvalue, before, products = 0.0, 1.0, 0
    while abs(eigenvalue - before) > 1e-14 * abs(eigenvalue) and products < 100:
        pb.blas.scal(x, alpha=1 / pb.blas.nrm2(x), out=x)
        pb.blas.gemv(a, x, out=y)
        before, eigenvalue = eigenvalue, pb.blas.dot(x, y)  # the same number on every rank
        pb.blas.swap(x, y)
        products += 1

    whole = a.gather()
    if ctx.rank == 0:
        assert products < 100, products
        print("converged after fewer than 100 products")
        expected = np.linalg.eigvalsh(whole)[-1]
        assert abs(eigenvalue / expected - 1) < 1e-10, (eigenvalue, expected)
        print("the largest eigenvalue is that of numpy.linalg.eigvalsh")
