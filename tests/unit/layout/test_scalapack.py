# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK's 9-integer descriptors: DTYPE, CTXT, M, N, MB, NB, RSRC, CSRC, LLD."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pblasmp.errors import ArgumentError, LayoutError
from pblasmp.layout import Grid, MatrixDescriptor
from tests.helpers.oracle import descriptors, local_indices
from tests.helpers.slow import draws

few = settings(max_examples=draws(30, long=100))


@few
@given(descriptors(lead=False), st.integers(-1, 5))
def test_the_nine_integers(d, context):
    d = d if d.order == "F" else d.T
    for rank, (rows, _) in enumerate(local_indices(d)):
        desc = d.to_scalapack(rank, context=context)
        assert desc.dtype == np.int32
        lld = d.ld or max(1, len(rows))
        assert desc.tolist() == [1, context, *d.shape, *d.block, *d.source, lld]


@few
@given(descriptors(lead=False))
def test_the_round_trip_of_tight_arrays(d):
    d = replace(d if d.order == "F" else d.T, ld=None)
    for rank in range(d.grid.size):
        assert MatrixDescriptor.from_scalapack(d.to_scalapack(rank), d.grid, d.dtype) == d


@few
@given(descriptors(lead=False, dtype="bfloat16"), st.integers(1, 3))
def test_the_round_trip_of_padded_arrays(d, padding):
    d = d if d.order == "F" else d.T
    d = replace(d, ld=max(1, *(len(rows) for rows, _ in local_indices(d))) + padding)
    for rank in range(d.grid.size):
        assert MatrixDescriptor.from_scalapack(d.to_scalapack(rank), d.grid, d.dtype) == d


def test_one_that_descinit_makes():
    """From (1, 2): process row 1 has the rows 0, 1, 4, 5, 8, process row 0 the others."""
    grid = Grid(2, 3)
    d = MatrixDescriptor.from_scalapack([1, 0, 9, 8, 2, 3, 1, 2, 5], grid)
    assert d == MatrixDescriptor((9, 8), (2, 3), grid, (1, 2), "float64", "F")
    assert d.to_scalapack(grid.rank(1, 0)).tolist() == [1, 0, 9, 8, 2, 3, 1, 2, 5]
    assert d.to_scalapack(grid.rank(0, 1), context=3).tolist() == [1, 3, 9, 8, 2, 3, 1, 2, 4]


def test_c_order_is_refused_and_its_transpose_is_not():
    d = MatrixDescriptor((9, 8), (2, 3), Grid(2, 3))
    with pytest.raises(LayoutError, match=r"ScaLAPACK knows only F order: use \.T\.to_scalapack\(rank\)"):
        d.to_scalapack(0)
    assert d.T.to_scalapack(0).tolist() == [1, 0, 8, 9, 3, 2, 0, 0, 3]


def test_a_start_inside_a_block_is_refused():
    d = MatrixDescriptor((9, 8), (2, 3), Grid(2, 3), order="F")
    assert d[2:, 3:].to_scalapack(0)[6:8].tolist() == [1, 1]
    with pytest.raises(LayoutError, match=r"starts at a block boundary, got a start \(1, 0\) into a block"):
        d[3:, 3:].to_scalapack(0)


@pytest.mark.parametrize(
    "huge",
    [
        {"shape": (2**31, 1)},
        {"shape": (1, 2**31)},
        {"block": (2**31, 1)},
        {"block": (1, 2**31)},
        {"ld": 2**31},
    ],
)
def test_what_needs_more_than_32_bits_is_refused(huge):
    d = replace(MatrixDescriptor((5, 5), (1, 1), Grid(1, 1), order="F"), **huge)
    with pytest.raises(LayoutError, match=r"a ScaLAPACK descriptor holds 32-bit integers, got 2147483648"):
        d.to_scalapack(0)


@pytest.mark.parametrize(
    ("desc", "message"),
    [
        ([1, 0, 9, 8, 2, 3, 0, 0], "a ScaLAPACK descriptor has 9 integers, got 8"),
        ([1, 0, 9, 8, 2, 3, 0, 0, 5, 0], "a ScaLAPACK descriptor has 9 integers, got 10"),
        ([501, 0, 9, 8, 2, 3, 0, 0, 5], "desc[0]: expected 1 (a dense block-cyclic matrix), got 501"),
        ([1, 0, -1, 8, 2, 3, 0, 0, 5], "shape[0]: expected at least 0, got -1"),
        ([1, 0, 9, -1, 2, 3, 0, 0, 5], "shape[1]: expected at least 0, got -1"),
        ([1, 0, 9, 8, 0, 3, 0, 0, 5], "block[0]: expected at least 1, got 0"),
        ([1, 0, 9, 8, 2, 0, 0, 0, 5], "block[1]: expected at least 1, got 0"),
        (
            [1, 0, 9, 8, 2, 3, 2, 0, 5],
            "source: process (2, 0) is not in a grid of 2x3 processes in row order",
        ),
        ([1, 0, 9, 8, 2, 3, 0, -1, 5], "source[1]: expected at least 0, got -1"),
        ([1, 0, 9, 8, 2, 3, 0, 0, 0], "ld: expected at least 1, got 0"),
        ([1, 0, 9, 8, 2, 3, 0, 0, 3], "ld: 3 is too small: the local arrays are up to 5 rows high"),
        (7, "desc: expected 9 integers, got 7"),
        ([1, 0, 9.0, 8, 2, 3, 0, 0, 5], "desc[2]: expected an integer, got 9.0"),
    ],
)
def test_descriptors_that_contradict_themselves(desc, message):
    with pytest.raises(ArgumentError) as error:
        MatrixDescriptor.from_scalapack(desc, Grid(2, 3))
    assert str(error.value) == message
