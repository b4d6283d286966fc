# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/schemes.py
"""The 1D layouts of tensor parallelism, with the sizes of the worked examples in NVIDIA's cuBLASMp documentation.

Prints:
    allgather_matmul: A 2x8 and B 2x4 give D 8x4; a rank holds 2x2 of A, 2x1 of B, 2x4 of D
    matmul_reduce_scatter: A 8x2 and B 8x4 give D 2x4; a rank holds 2x2 of A, 2x4 of B, 2x1 of D
    matmul_allreduce: A 8x2 and B 8x4 give D 2x4; a rank holds 2x2 of A, 2x4 of B, 2x4 of D
    Y = X W^T: a rank holds 2x16 of X, 3x16 of W, 8x3 of Y
"""

from __future__ import annotations

import numpy as np

import pblasmp as pb


def f(i, j):
    return (i + 2 * j) % 3 - 1


def g(i, j):
    return (3 * i + j) % 4 - 2


def size(shape):
    return f"{shape[0]}x{shape[1]}"


def multiply(ctx, problem):
    """Return the result of a problem's product with A = f and B = g on rank 0, None elsewhere."""
    a = ctx.from_function(f, problem.a)
    b = ctx.from_function(g, problem.b)
    d = pb.matmul(a, b, op_a=problem.op_a, op_b=problem.op_b, scheme=problem.scheme)
    assert d.descriptor == problem.d
    return d.gather()


with pb.Context() as ctx:
    for problem in (
        pb.MatmulProblem.allgather_matmul(m=8, n=4, k=2, nranks=ctx.size, order="F"),
        pb.MatmulProblem.matmul_reduce_scatter(m=2, n=4, k=8, nranks=ctx.size, order="F"),
        pb.MatmulProblem.matmul_allreduce(m=2, n=4, k=8, nranks=ctx.size, order="F"),
    ):
        whole = multiply(ctx, problem)
        if ctx.rank == 0:
            a, b = np.fromfunction(f, problem.a.shape), np.fromfunction(g, problem.b.shape)
            # After AllReduce every rank has all of D: gather() returns these copies side by side.
            copies = ctx.size if problem.scheme == "matmul_allreduce" else 1
            assert np.array_equal(whole, np.tile(a.T @ b, (1, copies)))
            local = [size(x.local_shape(0)) for x in (problem.a, problem.b, problem.d)]
            print(
                f"{problem.scheme}: A {size(a.shape)} and B {size(b.shape)} give D {problem.m}x{problem.n}; "
                f"a rank holds {local[0]} of A, {local[1]} of B, {local[2]} of D"
            )

    # In C order, as in torch.nn: 8 tokens, 12 outputs and 16 inputs; X and W are split by rows, and X is gathered.
    layer = pb.MatmulProblem.allgather_matmul(m=8, n=12, k=16, nranks=ctx.size)
    y = multiply(ctx, layer)
    if ctx.rank == 0:
        assert np.array_equal(y, np.fromfunction(f, (8, 16)) @ np.fromfunction(g, (12, 16)).T)
        local = [size(x.local_shape(0)) for x in (layer.a, layer.b, layer.d)]
        print(f"Y = X W^T: a rank holds {local[0]} of X, {local[1]} of W, {local[2]} of Y")
