# SPDX-License-Identifier: Apache-2.0
"""Grids of ranks: coordinates, transposes, and the squarest of a size."""

import numpy as np
import pytest
from hypothesis import given

from pblasmp.errors import ArgumentError
from pblasmp.layout import Grid, as_block, as_grid
from pblasmp.layout.grid import integer
from tests.helpers.oracle import grids, number


@given(grids)
def test_ranks_and_coordinates(grid):
    cells = number(grid)
    assert grid.size == len(cells)
    for (prow, pcol), rank in cells.items():
        assert grid.rank(prow, pcol) == rank
        assert grid.coords(rank) == (prow, pcol)


@given(grids)
def test_the_transpose_swaps_the_coordinates_of_every_rank(grid):
    assert grid.T.shape == grid.shape[::-1]
    assert grid == grid.T.T
    for rank in range(grid.size):
        assert grid.T.coords(rank) == grid.coords(rank)[::-1]


@given(grids, grids)
def test_same_ranks(one, other):
    assert one.same_ranks(other) == (number(one) == number(other))


@pytest.mark.parametrize("order", ["row", "col"])
def test_squarest(order, subtests):
    for nranks in range(1, 65):
        with subtests.test(nranks=nranks):
            grid = Grid.squarest(nranks, order)
            pairs = [(p, q) for p in range(1, nranks + 1) for q in range(p, nranks + 1) if p * q == nranks]
            assert grid.shape == min(pairs, key=lambda pair: pair[1] - pair[0])
            assert grid.order == order


@pytest.mark.parametrize(
    ("value", "grid"),
    [
        (Grid(3, 1, "col"), Grid(3, 1, "col")),
        ((2, 3), Grid(2, 3)),
        ([7, 9], Grid(7, 9)),
        (np.array([2, 3]), Grid(2, 3)),
        ("2x3", Grid(2, 3)),
        ("2x3-row", Grid(2, 3)),
        ("12x10-col", Grid(12, 10, "col")),
    ],
    ids=repr,
)
def test_ways_to_say_a_grid(value, grid):
    assert as_grid(value) == grid
    assert as_grid(grid.label) == grid
    assert repr(eval(repr(grid))) == repr(grid)


def test_ways_to_say_a_block():
    assert as_block(64) == as_block((64, 64)) == as_block([64, 64]) == as_block(np.int32(64)) == (64, 64)
    assert as_block(np.array([2, 3])) == (2, 3)


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [10**5000, -(10**5000), nested(100_000), "x" * 10**6], ids=type)
def test_messages_take_any_value(value):
    for call in (
        as_grid,
        as_block,
        lambda x: integer(x, "n", 0),
        lambda x: Grid(x, 1),
        lambda x: Grid(1, 1, x),
    ):
        with pytest.raises(ArgumentError) as error:
            call(value)
        assert len(str(error.value)) < 500
