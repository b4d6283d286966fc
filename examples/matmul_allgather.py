# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/matmul_allgather.py
"""GEMM + AllGather of the output: each rank has all tokens, computes some outputs, and gets all of them.

Prints:
    4x2 tokens by 8x2 weights: a rank holds x (4, 2) and w (2, 2), and gets y (4, 8)
"""

import numpy as np

import pblasmp as pb

X, W = np.arange(8.0).reshape(4, 2), np.arange(16.0).reshape(8, 2)  # tokens x inputs, outputs x inputs

with pb.Context(engine="host") as ctx:  # on GPUs use CuPy arrays or PyTorch tensors; nothing else changes
    w = W[pb.tensor_parallel.shard(8, ctx.size, ctx.rank)]
    y = pb.matmul_allgather(X, w, ctx)
    assert np.array_equal(y, X @ W.T)
    if ctx.rank == 0:
        print(f"4x2 tokens by 8x2 weights: a rank holds x {X.shape} and w {w.shape}, and gets y {y.shape}")
