# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/allgather_matmul.py
"""AllGather + GEMM: each rank has some tokens and the weights of some outputs, which it computes for all tokens.

The sizes are those of NVIDIA's worked example, in column-major order A 2x8, B 2x4 and D 8x4: X = B^T, W = A^T,
Y = D^T.

Prints:
    4x2 tokens by 8x2 weights: a rank holds x (1, 2) and w (2, 2), and gets y (4, 2)
"""

import numpy as np

import pblasmp as pb

X, W = np.arange(8.0).reshape(4, 2), np.arange(16.0).reshape(8, 2)  # tokens x inputs, outputs x inputs

with pb.Context(engine="host") as ctx:  # on GPUs use CuPy arrays or PyTorch tensors; nothing else changes
    tokens, outputs = (pb.tensor_parallel.shard(n, ctx.size, ctx.rank) for n in (4, 8))
    x, w = X[tokens], W[outputs]
    y = pb.allgather_matmul(x, w, ctx)
    assert np.array_equal(y, (X @ W.T)[:, outputs])
    if ctx.rank == 0:
        print(f"4x2 tokens by 8x2 weights: a rank holds x {x.shape} and w {w.shape}, and gets y {y.shape}")
