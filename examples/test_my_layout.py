# SPDX-License-Identifier: Apache-2.0
# Run: python -m pytest examples/test_my_layout.py
"""Test the layouts of your own code with pytest: no MPI, no GPU. Copy this file and fill in your numbers.

Prints:
    passed
"""

from __future__ import annotations

import numpy as np
import pytest

import pblasmp as pb

GRIDS = [pb.Grid(1, 1), pb.Grid(2, 2), pb.Grid(2, 3, "col"), pb.Grid(8, 16)]
M, N, K, BLOCK = 40_000, 30_000, 20_000, 256


def my_product(grid):
    """Return the product that my code computes: D = A^T B, A stored K x M."""
    return pb.MatmulProblem.gemm(M, N, K, grid, BLOCK, op_a="T")


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_product_is_legal(grid):
    my_product(grid).validate()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_local_parts_fit_into_memory_and_are_balanced(grid):
    problem = my_product(grid)
    local_bytes = [
        sum(x.dtype.itemsize * np.prod(x.local_shape(rank)) for x in (problem.a, problem.b, problem.d))
        for rank in range(grid.size)
    ]
    assert max(local_bytes) < 40e9
    assert max(local_bytes) <= 1.25 * sum(local_bytes) / grid.size


def test_every_element_has_one_place():
    d = pb.MatrixDescriptor((10, 13), (3, 4), pb.Grid(2, 2), source=(1, 0))
    places = {(i, j): d.to_local(i, j) for i in range(10) for j in range(13)}
    assert len(set(places.values())) == 130
    assert all(d.to_global(*place) == element for element, place in places.items())


def test_ranks_hold_what_my_input_files_hold():
    """One file per rank: the shape of each must be that of the rank's local array."""
    d = pb.MatrixDescriptor((M, N), (BLOCK, BLOCK), pb.Grid(2, 2))
    assert [d.local_shape(rank) for rank in range(4)] == [
        (20_032, 15_104),
        (20_032, 14_896),
        (19_968, 15_104),
        (19_968, 14_896),
    ]


def test_a_mistake_is_found_before_the_job_starts():
    good = my_product(pb.Grid(2, 2))
    b = pb.MatrixDescriptor(good.b.shape, (128, 256), good.b.grid)
    with pytest.raises(pb.LayoutError, match=r"b in blocks of \(256, 256\)"):
        pb.MatmulProblem(good.a, b, good.d, op_a="T").validate()
