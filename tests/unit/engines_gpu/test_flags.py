# SPDX-License-Identifier: Apache-2.0
"""The flags between two ranks: one thing each, and never more things than flags."""

from itertools import combinations

import pytest

from pblasmp.engines.gpu.runtime import windows
from pblasmp.engines.tensor.tensor_product import EVEN, HALVES, SMALL_LAST


def test_no_two_things_share_a_flag():
    for one, other in combinations(windows.RANGES, 2):
        numbers = [{each.at(i) for i in range(each.count)} for each in (one, other)]
        assert not numbers[0] & numbers[1], (one, other)
        assert max(numbers[0] | numbers[1]) < windows.FLAGS


@pytest.mark.parametrize("i", [-1, 16])
def test_a_thing_without_a_flag_is_an_error(i):
    with pytest.raises(IndexError, match=r"flags: piece of a tensor-parallel product -?\d+: there are 16"):
        windows.PIECES.at(i)


def test_pieces_and_their_sums_have_flags():
    for weights in (SMALL_LAST, EVEN, HALVES):
        assert 2 * max(len(split) for _, split in weights) <= windows.PIECES.count
