# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/npy_product.py
"""Multiply two .npy files: every rank reads and writes a share of each file, and no rank holds a whole matrix.

Prints:
    D.npy holds 300 x 200 float32 in C order
    D.npy is the product of A.npy and B.npy
"""

from __future__ import annotations

import numpy as np

import pblasmp as pb

with pb.Context() as ctx:
    grid = pb.Grid.squarest(ctx.size)

    # Make two files, B.npy in F order.
    shape_a, shape_b = (300, 250), (250, 200)
    a = pb.MatrixDescriptor(shape_a, (64, 64), grid, dtype="float32")
    b = pb.MatrixDescriptor(shape_b, (64, 64), grid, dtype="float32", order="F")
    ctx.from_function(lambda i, j: (i + j) % 5 - 2, a).save("A.npy")
    ctx.from_function(lambda i, j: (i - j) % 3 - 1, b).save("B.npy")

    a = ctx.load("A.npy", grid=grid, block=32)
    b = ctx.load("B.npy", grid=grid, block=32)
    (a @ b).save("D.npy")  # written under another name and renamed when complete

    if ctx.rank == 0:
        d = np.load("D.npy")
        order = "C" if d.flags.c_contiguous else "F"
        print(f"D.npy holds {d.shape[0]} x {d.shape[1]} {d.dtype} in {order} order")
        assert np.array_equal(d, np.load("A.npy") @ np.load("B.npy"))
        print("D.npy is the product of A.npy and B.npy")
