# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/cholesky.py
"""Solve a symmetric positive definite system: a blocked Cholesky factorization with sub-matrices, in place.

The arguments are the order and the block size, by default 600 and 64; 20000 and 1024 keep four GPUs busy.

Prints:
    the residual is below 1e-12
"""

from __future__ import annotations

import sys

import numpy as np

import pblasmp as pb


def factor(ctx: pb.Context, a: pb.DistributedMatrix, algo: str = "auto") -> None:
    """Replace the lower triangle of A by L with A = L L^T. The upper one is neither read nor written."""
    order, nb, xp = a.shape[0], a.descriptor.block[0], ctx.engine.xp
    for start in range(0, order, nb):
        stop = min(start + nb, order)
        l11, l21 = a[start:stop, start:stop], a[stop:, start:stop]
        if l11.local.size:  # only one rank has this block
            l11.local[...] = xp.linalg.cholesky(xp.tril(l11.local) + xp.tril(l11.local, -1).T)
        if stop < order:
            pb.blas.trsm(l11, l21, side="R", uplo="L", op_a="T", out=l21, algo=algo)  # L21 = A21 L11^-T
            a22 = a[stop:, stop:]
            pb.blas.syrk(l21, a22, uplo="L", alpha=-1, beta=1, out=a22, algo=algo)  # A22 -= L21 L21^T


def solve(a: pb.DistributedMatrix, b: pb.DistributedMatrix) -> None:
    """Replace B by X with L L^T X = B: forward substitution block by block, then backward in one call."""
    order, nb = a.shape[0], a.descriptor.block[0]
    for start in range(0, order, nb):
        stop = min(start + nb, order)
        x1, b2 = b[start:stop, :], b[stop:, :]
        pb.blas.trsm(a[start:stop, start:stop], x1, uplo="L", out=x1)  # X1 = L11^-1 B1
        if stop < order:
            pb.matmul(a[stop:, start:stop], x1, b2, alpha=-1, beta=1, out=b2)  # B2 -= L21 X1
    pb.blas.trsm(a, b, uplo="L", op_a="T", out=b)  # X = L^-T X


if __name__ == "__main__":
    n, nb = (int(x) for x in sys.argv[1:3]) if len(sys.argv) > 2 else (600, 64)
    with pb.Context() as ctx:
        grid = pb.Grid.squarest(ctx.size)
        square = pb.MatrixDescriptor((n, n), (nb, nb), grid)
        right = pb.MatrixDescriptor((n, 100), (nb, 16), grid)

        a = ctx.from_function(lambda i, j: np.exp(-abs(i - j) / 50) + (i == j), square)
        b = ctx.from_function(lambda i, j: np.cos(i + j), right)
        lower, x = a.redistribute(square, uplo="L"), b.redistribute(right)
        factor(ctx, lower)
        solve(lower, x)

        residual, solution = pb.blas.symm(a, x, b, uplo="L", alpha=-1, beta=1).gather(), x.gather()  # B - A X
        if ctx.rank == 0:
            relative = abs(residual).max() / abs(solution).max()
            print(f"order {n} in blocks of {nb} on {grid}, engine {ctx.engine.name}")
            print(f"the residual is {'below 1e-12' if relative < 1e-12 else relative}")
