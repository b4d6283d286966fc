# SPDX-License-Identifier: Apache-2.0
"""Products of any layouts: blocks, sources, sub-matrices, memory orders, a grid for each matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

import pblasmp as pb

Window = tuple[slice, slice]


def random_window(
    rng: np.random.Generator, shape: tuple[int, int], size: int, **how: Any
) -> tuple[pb.MatrixDescriptor, Window]:
    """Return a matrix on up to ``size`` ranks, and where in it a sub-matrix of this shape is."""
    nprow = int(rng.integers(1, size + 1))
    grid = pb.Grid(nprow, int(rng.integers(1, size // nprow + 1)), str(rng.choice(["row", "col"])))
    source = (int(rng.integers(grid.nprow)), int(rng.integers(grid.npcol)))
    block = (int(rng.integers(1, 9)), int(rng.integers(1, 9)))
    before = (int(rng.integers(0, 7)), int(rng.integers(0, 7)))
    around = (shape[0] + before[0], shape[1] + before[1])
    whole = pb.MatrixDescriptor(around, block, grid, source, order=str(rng.choice(["C", "F"])), **how)
    return whole, (slice(before[0], None), slice(before[1], None))


def random_product(
    rng: np.random.Generator, size: int, most: int = 40, **how: Any
) -> tuple[pb.MatmulProblem, dict[str, tuple[pb.MatrixDescriptor, Window]]]:
    """Return a product, and by name the matrices that its operands are sub-matrices of."""
    m, n, k = (int(x) for x in rng.integers(1, most, 3))
    op_a, op_b = (str(rng.choice(["N", "T", "C"])) for _ in range(2))
    wholes = {
        "a": random_window(rng, (m, k) if op_a == "N" else (k, m), size, **how),
        "b": random_window(rng, (k, n) if op_b == "N" else (n, k), size, **how),
        "d": random_window(rng, (m, n), size, **how),
    }
    a, b, d = (whole[window] for whole, window in wholes.values())
    return pb.MatmulProblem(a, b, d, op_a, op_b), wholes
