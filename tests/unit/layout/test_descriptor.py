# SPDX-License-Identifier: Apache-2.0
"""Descriptors of distributed matrices: places of elements, transposes, sub-matrices and leading dimensions."""

import copy
import pickle
import tracemalloc
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pblasmp.dtypes import DTYPES
from pblasmp.errors import LayoutError
from pblasmp.layout import Grid, MatrixDescriptor
from tests.helpers.oracle import descriptors, empty, local_indices, places, read, write
from tests.helpers.slow import draws

few = settings(max_examples=draws(30, long=100))


@few
@given(descriptors())
def test_every_element(d):
    for (i, j), place in places(d).items():
        assert d.owner(i, j) == place[0]
        assert d.to_local(i, j) == place
        assert d.to_global(*place) == (i, j)


@few
@given(descriptors())
def test_every_rank(d):
    shortest = d.ld or 1
    for rank, (rows, cols) in enumerate(local_indices(d)):
        assert d.local_shape(rank) == (len(rows), len(cols))
        assert d.lld(rank) == max(shortest, 1, len(cols) if d.order == "C" else len(rows))
        found = d.global_indices(rank)
        assert [x.dtype for x in found] == [np.int64, np.int64]
        assert [x.tolist() for x in found] == [rows, cols]
    assert d.nbytes == 8 * d.shape[0] * d.shape[1]


@few
@given(descriptors())
def test_the_transpose_is_the_same_memory(d):
    assert d == d.T.T
    assert d.T.order != d.order
    flipped = {(j, i): (rank, lj, li) for (i, j), (rank, li, lj) in places(d).items()}
    assert places(d.T) == flipped
    matrix = np.arange(d.shape[0] * d.shape[1], dtype=float).reshape(d.shape)
    memory = write(empty(d), d, matrix)
    assert np.array_equal(read(memory, d.T), matrix.T)
    assert [d.T.lld(r) for r in range(d.grid.size)] == [d.lld(r) for r in range(d.grid.size)]


def ranges(extent):
    return st.tuples(st.integers(0, extent), st.integers(0, extent)).map(sorted)


def origin(d, i0, j0):
    """Return where in each rank's local array the rows and columns from (i0, j0) begin."""
    return [(sum(i < i0 for i in rows), sum(j < j0 for j in cols)) for rows, cols in local_indices(d)]


@few
@given(descriptors(), st.data())
def test_a_sub_matrix_leaves_every_element_where_it_is(d, data):
    (i0, i1), (j0, j1) = (data.draw(ranges(extent)) for extent in d.shape)
    part = d[i0:i1, j0:j1]
    assert part.shape == (i1 - i0, j1 - j0)
    assert (part.block, part.grid, part.order, part.dtype) == (d.block, d.grid, d.order, d.dtype)
    whole, starts = places(d), origin(d, i0, j0)
    for (i, j), (rank, li, lj) in places(part).items():
        row, col = starts[rank]
        assert (rank, row + li, col + lj) == whole[i0 + i, j0 + j]
        assert part.to_local(i, j) == (rank, li, lj)


@few
@given(descriptors(), st.data())
def test_a_sub_matrix_of_a_sub_matrix(d, data):
    (i0, i1), (j0, j1) = (data.draw(ranges(extent)) for extent in d.shape)
    part = d[i0:i1, j0:j1]
    (a0, a1), (b0, b1) = (data.draw(ranges(extent)) for extent in part.shape)
    assert part[a0:a1, b0:b1] == d[i0 + a0 : i0 + a1, j0 + b0 : j0 + b1]
    assert part.T[b0:b1, a0:a1] == part[a0:a1, b0:b1].T


def test_slices_mean_what_they_mean_in_numpy():
    d = MatrixDescriptor((10, 20), (3, 4), Grid(2, 2))
    everything = d[:, :]
    assert everything == d
    assert d[2:-2, -5:] == d[2:8, 15:20]
    assert d[4:100, 7:3].shape == (6, 0)
    assert d.ranges((slice(None, -1), slice(30, 40))) == ((0, 9), (20, 20))


def test_integers_and_shorter_indices():
    d = MatrixDescriptor((10, 20), (3, 4), Grid(2, 2))
    assert d[3] == d[-7] == d[3, :] == d[3:4, :]
    assert d[:, -1] == d[:, 19:20]
    assert d[3, 4] == d[np.int64(3), 4] == d[3:4, 4:5]
    assert d[:5] == d[:5,] == d[0:5, 0:20]
    assert d[...] == d[()] == d[..., :] == d[:, :, ...] == d
    assert d[..., 3] == d[:, 3:4]
    assert d[3, ...] == d[3:4, :]
    assert d[..., 3, 4] == d[3, ..., 4] == d[3, 4, ...] == d[3:4, 4:5]


@few
@given(st.data())
def test_same_places(data):
    one = data.draw(descriptors(most=6))
    other = data.draw(descriptors(shape=one.shape, most=6))
    alike = places(one) == places(other)
    if one.same_places(other):
        assert alike
    elif all(one.shape) and one.grid.same_ranks(other.grid):
        assert not alike
    for like in (replace(one, order="C", ld=None), replace(one, dtype="complex64"), one.T.T):
        assert one.same_places(like)
    cut = replace(one, shape=(one.shape[0] + 1, one.shape[1]), ld=None)
    assert not one.same_places(cut)


def test_a_huge_matrix_answers_at_once():
    """Sizes, owners and single indices take constant memory, and so constant time."""
    n = 10**9
    tracemalloc.start()
    d = MatrixDescriptor((n, n), (96, 80), Grid(1000, 1000), (7, 999))
    last = d.grid.size - 1
    for x in (d, d.T, d[123_456_789:, 5 : n - 5]):
        rank, li, lj = x.to_local(x.shape[0] - 1, x.shape[1] // 2)
        assert x.owner(x.shape[0] - 1, x.shape[1] // 2) == rank
        assert x.to_global(rank, li, lj) == (x.shape[0] - 1, x.shape[1] // 2)
        assert x.lld(last) == x.local_shape(last)[1 if x.order == "C" else 0]
        assert sum(x.rows.count(p) for p in range(1000)) == x.shape[0]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
    # 10^9 rows are 10416666 blocks of 96 and 64 rows more; each process row gets 10416 blocks, the first
    # 666 from the source one more, and the next has the ragged one.
    assert [d.rows.count((7 + turn) % 1000) for turn in (0, 665, 666, 667)] == [
        10417 * 96,
        10417 * 96,
        10416 * 96 + 64,
        10416 * 96,
    ]
    assert d.owner(0, 0) == 7 * 1000 + 999
    assert d.nbytes == 8 * n * n


@few
@given(descriptors())
def test_the_padding_must_hold_every_local_array(d):
    widest = max(len(x[1 if d.order == "C" else 0]) for x in local_indices(d))
    assert replace(d, ld=max(1, widest)).ld == max(1, widest)
    if widest > 1:
        with pytest.raises(
            LayoutError, match=f"ld: {widest - 1} is too small: the local arrays are up to {widest} "
        ):
            replace(d, ld=widest - 1)


@pytest.mark.parametrize("name", DTYPES)
def test_a_descriptor_is_a_value(name):
    d = MatrixDescriptor([np.int64(10), 20], [3, 4], Grid(2, 2), [1, 0], name, "F", [1, 2], np.int32(9))
    same = MatrixDescriptor((10, 20), (3, 4), Grid(2, 2), (1, 0), DTYPES[name], "F", (1, 2), 9)
    assert d == same
    assert hash(d) == hash(same)
    assert (d.shape, d.block, d.source, d.lead, d.ld) == ((10, 20), (3, 4), (1, 0), (1, 2), 9)
    assert {type(x) for x in (*d.shape, *d.block, *d.source, *d.lead, d.ld)} == {int}
    assert d.dtype is DTYPES[name]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(d, protocol)) == d
    assert copy.deepcopy(d) == d
    assert hash(pickle.loads(pickle.dumps(d))) == hash(d)
    with pytest.raises(FrozenInstanceError):
        d.shape = (1, 1)


@few
@given(descriptors())
def test_repr_makes_an_equal_one(d):
    assert eval(repr(d)) == d
    assert "\n" not in repr(d)


def test_text():
    d = MatrixDescriptor((10, 20), (3, 4), Grid(2, 1), dtype="bfloat16")
    assert str(d) == "10x20 bfloat16 in blocks of 3x4 on 2x1 processes in row order, C order"
    assert str(replace(d, source=(1, 0), order="F")) == (
        "10x20 bfloat16 in blocks of 3x4 on 2x1 processes in row order from (1, 0), F order"
    )
