# SPDX-License-Identifier: Apache-2.0
"""What engines ask of two arrays: whether they are one, and whether they share an element."""

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines import arrays


def test_the_same_memory_is_the_same_elements_at_the_same_place():
    a = np.zeros((4, 6))
    assert arrays.same_memory(a, a)
    assert arrays.same_memory(a[:1, :1], a[:1, :1])
    others = [a.copy(), a[:2], a[:, :3], a.T, a.view(np.int64), a.reshape(6, 4).T]
    assert not any(arrays.same_memory(a, other) for other in others)
    assert not arrays.same_memory(a[:2], a[2:])
    assert not arrays.same_memory(a[:0], a.copy()[:0])  # of nothing there is no place


def test_arrays_overlap_where_an_element_is_in_both():
    a = np.zeros((4, 6))
    assert arrays.overlap(a[:3], a[2:])
    assert not arrays.overlap(a[:2], a[2:])
    assert not arrays.overlap(a[:, ::2], a[:, 1::2])


def test_arrays_that_are_too_hard_to_tell_apart_overlap():
    """The problem is NP-complete: 20 dimensions with strides that have nothing in common."""
    steps = np.random.default_rng(0).integers(10**4, 10**6, (2, 20)) * 2
    memory = np.zeros(3, np.int8)  # of both: arrays that are far apart would be easy
    a, b = (np.lib.stride_tricks.as_strided(memory[2 * i :], (3,) * 20, each) for i, each in enumerate(steps))
    overlap = arrays.overlap(a, b)
    assert overlap, "and not of a and b, which would be printed, with 3**20 elements each"


@pytest.mark.parametrize(("beta", "result"), [(0, 0), (1, 3), (-2, -6)])
def test_what_is_scaled_by_zero_is_not_read(beta, result):
    array = np.full((2, 3), 3.0 if beta else np.nan)
    arrays.scale(array, beta)
    assert np.all(array == result)


@pytest.mark.parametrize("extent", [10**6, 10**11])  # more than there is, and more than an address counts
def test_what_does_not_fit_into_memory_is_said_to(extent):
    with pb.Context(engine="host") as ctx, pytest.raises(MemoryError, match=f"{extent}"):
        ctx.zeros((extent, extent))
