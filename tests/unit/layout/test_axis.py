# SPDX-License-Identifier: Apache-2.0
"""One dimension dealt out in blocks: counts, owners and places of indices, beside lists of all of them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pblasmp.errors import LayoutError
from pblasmp.layout import Axis, numroc
from tests.helpers.oracle import axes, deal, owned
from tests.helpers.slow import draws

few = settings(max_examples=draws(30, long=100))


@few
@given(axes())
def test_blocks_are_the_runs_between_block_boundaries(axis):
    for process in range(axis.nprocs):
        starts, stops = axis.blocks(process)
        assert starts.dtype == stops.dtype == np.int64
        assert [i for a, b in zip(starts, stops, strict=True) for i in range(a, b)] == owned(axis, process)
        for a, b in zip(starts.tolist(), stops.tolist(), strict=True):
            assert a == 0 or (a + axis.lead) % axis.block == 0
            assert b == axis.extent or (b + axis.lead) % axis.block == 0
            assert 0 < b - a <= axis.block


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_the_same_places(nprocs):
    """Every pair of small axes: the answer is what a comparison of all indices says."""
    for extent in range(6):
        dealt = [
            (axis, deal(axis))
            for block in range(1, 6)
            for lead in range(block)
            for source in range(nprocs)
            for axis in [Axis(extent, block, source, nprocs, lead)]
        ]
        for (one, here), (other, there) in itertools.product(dealt, dealt):
            assert one.same_places(other) == (here == there), (one, other)
    assert not Axis(4, 2, 0, nprocs).same_places(Axis(5, 2, 0, nprocs))
    assert not Axis(1, 2, 0, nprocs).same_places(Axis(1, 2, 0, nprocs + 1))


@few
@given(st.integers(0, 50), st.integers(1, 60), st.integers(1, 6), st.data())
def test_numroc(n, nb, nprocs, data):
    source = data.draw(st.integers(0, nprocs - 1))
    counts = [numroc(n, nb, p, source, nprocs) for p in range(nprocs)]
    assert counts == [len(owned(Axis(n, nb, source, nprocs), p)) for p in range(nprocs)]


@pytest.mark.parametrize("block", [2**63 - 1, 2**63, 10**30])
def test_a_block_may_be_larger_than_any_machine_integer(block):
    axis = Axis(5, block, 1, 2)
    assert [axis.count(p) for p in (0, 1)] == [0, 5]
    assert axis.globals(1).tolist() == [0, 1, 2, 3, 4]
    assert axis.globals(0).tolist() == []
    assert axis.local(4) == (1, 4)


def test_extents_beyond_64_bits_are_exact():
    axis = Axis(10**30, 7, 2, 5)
    process, local = axis.local(10**30 - 1)
    assert axis.to_global(process, local) == 10**30 - 1
    assert sum(axis.count(p) for p in range(5)) == 10**30


@few
@given(st.integers(0, 50), st.integers(1, 9))
def test_an_even_split(extent, nprocs):
    axis = Axis.even(extent, nprocs)
    counts = axis.counts()
    assert sum(counts) == extent
    assert counts == [len(axis.globals(process)) for process in range(nprocs)]
    assert all(count == axis.block for count in counts[: extent // axis.block])
    assert axis.block == max(1, -(-extent // nprocs))


def test_an_even_split_of_nothing_and_among_nobody():
    assert Axis.even(0, 3).counts() == [0, 0, 0]
    for args, fault in (((-1, 2), "extent: expected at least 0"), ((4, 0), "nprocs: expected at least 1")):
        with pytest.raises(LayoutError, match=fault):
            Axis.even(*args)
