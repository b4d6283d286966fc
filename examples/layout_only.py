# SPDX-License-Identifier: Apache-2.0
# Run: python examples/layout_only.py
"""Layouts are plain values: who owns what, and is this product legal? No MPI, no GPU, no launcher.

Prints:
    rank 0 is at (0, 0) and holds 6 x 5
    rank 5 is at (1, 2) and holds 4 x 4
    A[4, 12] is on rank 3 at [1, 4]
    A^T is 13x10 float64 in blocks of 2x3 on 3x2 processes in col order, F order
    A^T A is legal: 13 x 13 x 10
    this product: b: the rows of op(B) are in blocks of 2, expected 3 like the columns of op(A)
"""

from __future__ import annotations

import pblasmp as pb

grid = pb.Grid(2, 3)
a = pb.MatrixDescriptor((10, 13), (3, 2), grid)

for rank in (0, 5):
    rows, cols = a.local_shape(rank)
    print(f"rank {rank} is at {grid.coords(rank)} and holds {rows} x {cols}")

rank, i, j = a.to_local(4, 12)
print(f"A[4, 12] is on rank {rank} at [{i}, {j}]")
assert a.owner(4, 12) == rank
assert a.to_global(rank, i, j) == (4, 12)

# The transpose describes the same memory: every rank keeps its local array.
print("A^T is", a.T)

d = pb.MatrixDescriptor((13, 13), (2, 2), grid)
problem = pb.MatmulProblem(a, a, d, op_a="T")
problem.validate()
print(f"A^T A is legal: {problem.m} x {problem.n} x {problem.k}")

# B in other blocks than A along k: the error names every fault and the closest legal choice.
b = pb.MatrixDescriptor((10, 13), (2, 2), grid)
try:
    pb.MatmulProblem(a, b, d, op_a="T").validate()
except pb.LayoutError as error:
    print(error)
