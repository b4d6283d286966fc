# SPDX-License-Identifier: Apache-2.0
"""The flags between two ranks: one thing each, and never more things than flags."""

from __future__ import annotations

from itertools import combinations

import pytest

import pblasmp as pb
from pblasmp.engines.gpu.peers import windows
from pblasmp.engines.gpu.push import plan
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


def test_a_push_plan_with_more_chunks_than_flags_is_an_error(monkeypatch):
    """More shares of an operand would otherwise raise the flags of the other one."""
    d = pb.MatrixDescriptor((65536, 65536), (16384, 65536), pb.Grid(4, 1))
    k = pb.MatrixDescriptor((65536, 65536), (65536, 16384), pb.Grid(1, 4))
    p = pb.MatmulProblem(a=k, b=d, d=d)

    def chunks() -> list[int]:
        made = plan.PushPlan(p, 4)
        return [len(made.chunks(which, rank)) for which in (0, 1) for rank in range(4)]

    assert max(chunks()) <= 8
    monkeypatch.setattr(plan, "_SHARES", ((0, (1,) * 9),))
    with pytest.raises(IndexError, match=r"push: \d+ chunks of [AB], there are 8 flags"):
        chunks()
