# SPDX-License-Identifier: Apache-2.0
"""Volumes of factorizations in two dimensions, by the formulas of the benchmark that prints them."""

import itertools

import pytest

import pblasmp as pb
from benchmarks.volumes import ROUTINES, grids, received, volume
from pblasmp.costs.traffic import traffic
from pblasmp.layout import FactorProblem
from tests.helpers.slow import only_long


@pytest.mark.parametrize("routine", ROUTINES)
def test_factorizations_receive_and_keep_what_they_do_in_two_dimensions(routine):
    """What a rank receives and needs falls with the square root of their number: docs/internals/calls.md has 1,024."""
    n, memory = 4096, []
    for side in (4, 8):
        d = pb.MatrixDescriptor((n, n), (64, 64), pb.Grid(side, side), order="F")
        found = FactorProblem(routine, a=d, c=d).traffic(ranks_per_node=1)
        assert found.received_bytes.max() <= 1.2 * volume(routine, n, side**2, 64)
        memory.append(found.memory_bytes.max() - 2 * 8 * n * n / side**2)
    assert memory[1] <= 0.48 * memory[0]


@pytest.mark.parametrize("routine", ROUTINES)
@pytest.mark.parametrize(
    ("n", "block", "side", "gpus"),
    [
        (50_000, 512, 8, True),
        (40_960, 256, 4, True),
        (50_000, 128, 16, True),
        *only_long(*itertools.product([50_000], [64, 128, 256], [4, 8, 16, 32], [False, True])),
    ],
)
def test_ranks_of_large_matrices_receive_no_more(routine, n, block, side, gpus):
    """Of each grid a few ranks are counted: the first, which has most, among them."""
    d = pb.MatrixDescriptor((n, n), (block, block), pb.Grid(side, side), order="F")
    found = traffic(FactorProblem(routine, a=d, c=d), ranks_per_node=1, gpus=gpus, most=4)
    assert found.received_bytes.max() <= 1.2 * volume(routine, n, side**2, block)


@pytest.mark.parametrize("nodes", [4, 64])
def test_products_receive_no_more_than_by_summa(nodes):
    """On every grid, with the ranks of a node along process rows and along process columns."""
    over = {str(grid): received(51_200, 128, grid)[1] for grid in grids(8 * nodes)}
    assert max(over.values()) <= 1, over
