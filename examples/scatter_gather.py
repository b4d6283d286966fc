# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/scatter_gather.py
"""Scatter a NumPy array from one rank, look at a part, change the layout, gather it again.

Prints:
    scattered: 9x11 float64 in blocks of 2x3 on 2x2 processes in row order, C order
    A[2:6, 3:9] has 4 x 6 elements
    redistributed: 9x11 float64 in blocks of 4x4 on 4x1 processes in row order, F order
    every value is where it was
"""

from __future__ import annotations

import numpy as np

import pblasmp as pb

with pb.Context() as ctx:
    descriptor = pb.MatrixDescriptor((9, 11), (2, 3), pb.Grid.squarest(ctx.size))
    array = np.arange(99.0).reshape(9, 11) if ctx.rank == 0 else None

    a = ctx.scatter(array, descriptor)
    part = a[2:6, 3:9]  # a view: nothing moves
    other = pb.MatrixDescriptor((9, 11), (4, 4), pb.Grid(ctx.size, 1), order="F")
    b = a.redistribute(other)

    whole, window, moved = a.gather(), part.gather(), b.gather()
    if ctx.rank == 0:
        print("scattered:", a.descriptor)
        print(f"A[2:6, 3:9] has {window.shape[0]} x {window.shape[1]} elements")
        print("redistributed:", b.descriptor)
        assert np.array_equal(whole, array)
        assert np.array_equal(window, array[2:6, 3:9])
        assert np.array_equal(moved, array)
        print("every value is where it was")
