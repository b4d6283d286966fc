# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/matmul_reduce_scatter.py
"""GEMM + ReduceScatter: each rank has some inputs of all tokens; the sum over the ranks is split by tokens.

The sizes are those of NVIDIA's worked example, in column-major order A 8x2, B 8x4 and D 2x4: X = B^T, W = A^T,
Y = D^T.

Prints:
    4x8 tokens by 2x8 weights: a rank holds x (4, 2) and w (2, 2), and gets y (1, 2)
"""

import numpy as np

import pblasmp as pb

X, W = np.arange(32.0).reshape(4, 8), np.arange(16.0).reshape(2, 8)  # tokens x inputs, outputs x inputs

with pb.Context(engine="host") as ctx:  # on GPUs use CuPy arrays or PyTorch tensors; nothing else changes
    tokens, inputs = (pb.tensor_parallel.shard(n, ctx.size, ctx.rank) for n in (4, 8))
    x, w = X[:, inputs], W[:, inputs]
    y = pb.matmul_reduce_scatter(x, w, ctx)
    assert np.array_equal(y, (X @ W.T)[tokens])
    if ctx.rank == 0:
        print(f"4x8 tokens by 2x8 weights: a rank holds x {x.shape} and w {w.shape}, and gets y {y.shape}")
