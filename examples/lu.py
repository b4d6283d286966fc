# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/lu.py
"""Solve a diagonally dominant system: a blocked LU factorization without pivoting, in place.

The arguments are the order and the block size, by default 600 and 64.

Prints:
    the residual is below 1e-12
"""

from __future__ import annotations

import sys

import numpy as np

import pblasmp as pb


def factor(ctx: pb.Context, a: pb.DistributedMatrix) -> None:
    """Replace A by L below its diagonal, without the ones on it, and U, with A = L U."""
    order, nb, xp = a.shape[0], a.descriptor.block[0], ctx.engine.xp
    for start in range(0, order, nb):
        stop = min(start + nb, order)
        a11 = a[start:stop, start:stop]
        x = a11.local
        for i in range(min(x.shape)):  # only one rank has this block
            x[i + 1 :, i] /= x[i, i]
            x[i + 1 :, i + 1 :] -= xp.outer(x[i + 1 :, i], x[i, i + 1 :])
        if stop < order:
            a12, a21, a22 = a[start:stop, stop:], a[stop:, start:stop], a[stop:, stop:]
            pb.blas.trsm(a11, a12, uplo="L", diag="U", out=a12)  # U12 = L11^-1 A12
            pb.blas.trsm(a11, a21, side="R", uplo="U", out=a21)  # L21 = A21 U11^-1
            pb.matmul(a21, a12, a22, alpha=-1, beta=1, out=a22)  # A22 -= L21 U12


if __name__ == "__main__":
    n, nb = (int(x) for x in sys.argv[1:3]) if len(sys.argv) > 2 else (600, 64)
    with pb.Context() as ctx:
        grid = pb.Grid.squarest(ctx.size)
        square = pb.MatrixDescriptor((n, n), (nb, nb), grid)
        right = pb.MatrixDescriptor((n, 100), (nb, 16), grid)

        a = ctx.from_function(lambda i, j: np.sin(i + 2 * j) + 2 * n * (i == j), square)
        b = ctx.from_function(lambda i, j: np.cos(i + j), right)
        lu = a.redistribute(square)
        factor(ctx, lu)
        x = pb.blas.trsm(lu, pb.blas.trsm(lu, b, uplo="L", diag="U"), uplo="U")  # U^-1 L^-1 B

        residual, solution = pb.matmul(a, x, b, alpha=-1, beta=1).gather(), x.gather()  # B - A X
        if ctx.rank == 0:
            relative = abs(residual).max() / (2 * n * abs(solution).max())
            print(f"order {n} in blocks of {nb} on {grid}, engine {ctx.engine.name}")
            print(f"the residual is {'below 1e-12' if relative < 1e-12 else relative}")
