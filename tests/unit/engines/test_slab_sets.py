# SPDX-License-Identifier: Apache-2.0
"""The two sets of slabs of direct calls: how they grow, and what happens once there is no more room."""

from __future__ import annotations

from pblasmp.engines.direct.asked import SlabSets


def test_sets_grow_until_there_is_no_room():
    asked: list[int] = []

    def reserve(nbytes: int) -> None:
        asked.append(nbytes)
        if nbytes > 4096:
            raise MemoryError

    sets = SlabSets(reserve, least=512, most=1 << 20)
    assert sets.fit(0)
    assert not asked
    found = [sets.fit(nbytes) for nbytes in (1, 512, 513, 3000, 100, 5000, 4096)]
    assert found == [True, True, True, True, True, False, True]
    assert asked == [512, 1024, 4096, 8192]
    assert (sets.capacity, sets.most) == (4096, 4096)


def test_calls_take_turns():
    sets = SlabSets(lambda nbytes: None, least=1, most=1)
    halves = []
    for _ in range(3):
        halves.append(sets.half)
        sets.turn()
    assert halves == [0, 1, 0]


def test_calls_in_the_same_order_find_the_same_sets():
    """Whatever came before: after a call without slabs the next one has the first set."""
    sets = SlabSets(lambda nbytes: None, least=1, most=1)
    found = []
    for with_slabs in (True, False, True, True, False, True, False, False, True):
        found.append(sets.half)
        sets.turn() if with_slabs else sets.start_over()
    assert found == [0, 1, 0, 1, 0, 0, 1, 0, 0]
