# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from pblasmp.errors import ArgumentError, LayoutError
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
    ("arguments", "message"),
    [
        ((0, 1), "grid nprow: expected at least 1, got 0"),
        ((1, -2), "grid npcol: expected at least 1, got -2"),
        ((1.0, 1), "grid nprow: expected an integer, got 1.0"),
        ((1, 1, "C"), "grid order: expected 'row' or 'col', got 'C'"),
    ],
)
def test_illegal_grids(arguments, message):
    with pytest.raises(ArgumentError) as error:
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
    ],
)
def test_what_is_out_of_range_is_refused(call, message):
    with pytest.raises(ArgumentError) as error:
        call(Grid(2, 3))
    assert (error.type, str(error.value)) == (ArgumentError, message)


def test_a_grid_has_ranks():
    with pytest.raises(LayoutError, match=r"^nranks: expected at least 1, got 0$"):
        Grid.squarest(0)


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


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        *((value, "layout: expected a Grid, a pair like (2, 3) or a text like '2x3', got ")
          for value in ("2", "2x", "0x3", "2x3x4", "2x-3", " 2x3", "2x3-diag", "", 4, None, (2,), (1, 2, 3), b"23")),
        ((0, 1), "layout[0]: expected at least 1, got 0"),
        ((1, 2.5), "layout[1]: expected an integer, got 2.5"),
        (("2", "3"), "layout[0]: expected an integer, got '2'"),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_grid(value, fault):
    with pytest.raises(ArgumentError) as error:
        as_grid(value, "layout")
    assert str(error.value).startswith(fault)


def test_ways_to_say_a_block():
    assert as_block(64) == as_block((64, 64)) == as_block([64, 64]) == as_block(np.int32(64)) == (64, 64)
    assert as_block(np.array([2, 3])) == (2, 3)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (0, "nb: expected at least 1, got 0"),
        ((3, -1), "nb[1]: expected at least 1, got -1"),
        (2.5, "nb: expected an integer or a pair of integers, got 2.5"),
        ((1, 2, 3), "nb: expected an integer or a pair of integers, got (1, 2, 3)"),
        (("4", 4), "nb[0]: expected an integer, got '4'"),
        (None, "nb: expected an integer or a pair of integers, got None"),
    ],
)
def test_what_is_no_block(value, fault):
    with pytest.raises(ArgumentError) as error:
        as_block(value, "nb")
    assert str(error.value) == fault


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
