# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK's 9-integer descriptors: DTYPE, CTXT, M, N, MB, NB, RSRC, CSRC, LLD."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pblasmp.errors import LayoutError
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
