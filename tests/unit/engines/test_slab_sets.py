# SPDX-License-Identifier: Apache-2.0
"""The two sets of slabs of direct calls: how they grow, and what happens once there is no more room."""

from __future__ import annotations

from pblasmp.engines.direct.slab_sets import SlabSets


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
