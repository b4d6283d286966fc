# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/gram.py
"""Fit a linear model to a tall .npy file: syrk computes and moves only one triangle of the Gram matrix.

Prints:
    a Gram matrix of 40 x 40 from 20000 samples
    the coefficients are those the samples were made with
"""

from __future__ import annotations

import numpy as np

import pblasmp as pb

samples, features = 20_000, 40

with pb.Context() as ctx:
    rows = pb.Grid(ctx.size, 1)  # each rank has some of the samples, with all features

    # Make the file, and the coefficients to be found.
    layout = pb.MatrixDescriptor((samples, features), (500, features), rows)
    ctx.from_function(lambda i, j: np.sin((i + 1) * (j + 1) * 0.7) + (i % features == j), layout).save(
        "X.npy"
    )
    wanted = np.arange(features) - 10.0

    x = ctx.load("X.npy", grid=rows, block=(500, features))
    column = pb.MatrixDescriptor((features, 1), (features, 1), rows)
    y = pb.matmul(x, ctx.from_function(lambda i, j: wanted[i] + 0 * j, column))

    gram = pb.blas.syrk(x, uplo="L", op_a="T")  # the lower triangle of X^T X
    moments = pb.matmul(x, y, op_a="T")
    g, m = gram.gather(), moments.gather()
    if ctx.rank == 0:
        print(f"a Gram matrix of {g.shape[0]} x {g.shape[1]} from {samples} samples")
        found = np.linalg.solve(g + np.tril(g, -1).T, m)[:, 0]
        assert np.allclose(found, wanted, rtol=0, atol=1e-8), abs(found - wanted).max()
        print("the coefficients are those the samples were made with")
