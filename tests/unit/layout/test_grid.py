# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given

from pblasmp.errors import LayoutError
from pblasmp.layout import Grid
from tests.helpers.oracle import grids, number


@given(grids)
def test_ranks_and_coordinates(grid):
    cells = number(grid)
    assert grid.size == len(cells)
    for (prow, pcol), rank in cells.items():
        assert grid.rank(prow, pcol) == rank
        assert grid.coords(rank) == (prow, pcol)


def test_the_two_rank_orders():
    assert [Grid(2, 3).coords(r) for r in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [Grid(2, 3, "col").coords(r) for r in range(6)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


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
@pytest.mark.parametrize("nranks", range(1, 65))
def test_squarest(nranks, order):
    grid = Grid.squarest(nranks, order)
    pairs = [(p, q) for p in range(1, nranks + 1) for q in range(p, nranks + 1) if p * q == nranks]
    assert grid.shape == min(pairs, key=lambda pair: pair[1] - pair[0])
    assert grid.order == order


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "grid nprow: expected at least 1, got 0"),
        ((1, -2), "grid npcol: expected at least 1, got -2"),
        ((1.0, 1), "grid nprow: expected an integer, got 1.0"),
        ((1, 1, "C"), "grid order: expected 'row' or 'col', got 'C'"),
    ],
)
def test_illegal_grids(arguments, message):
    with pytest.raises(LayoutError) as error:
        Grid(*arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.coords(6), "rank 6 is not in a grid of 2x3 processes in row order: expected 0 to 5"),
        (lambda g: g.coords(-1), "rank: expected at least 0, got -1"),
        (lambda g: g.rank(2, 0), "process (2, 0) is not in a grid of 2x3 processes in row order"),
        (lambda g: g.rank(0, 3), "process (0, 3) is not in a grid of 2x3 processes in row order"),
        (lambda g: g.rank(0, -1), "pcol: expected at least 0, got -1"),
        (lambda g: Grid.squarest(0), "nranks: expected at least 1, got 0"),
    ],
)
def test_what_is_out_of_range_is_refused(call, message):
    with pytest.raises(LayoutError) as error:
        call(Grid(2, 3))
    assert str(error.value) == message


def test_a_grid_is_a_value():
    grid = Grid(2, 3)
    assert grid == Grid(2, 3, "row") != Grid(2, 3, "col")
    assert len({grid, Grid(2, 3), Grid(3, 2)}) == 2
    assert pickle.loads(pickle.dumps(grid)) == copy.deepcopy(grid) == grid
    with pytest.raises(FrozenInstanceError):
        grid.nprow = 3
