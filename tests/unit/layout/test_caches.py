# SPDX-License-Identifier: Apache-2.0
"""Caches of results whose memory is bounded."""

import pblasmp as pb
from pblasmp.layout.axis import Axis
from pblasmp.layout.caches import MOST_BYTES, limit_caches, sized_cache
from pblasmp.layout.intersection import common_counts, intersect
from pblasmp.runtime import runtime


def test_results_are_remembered_until_they_take_too_much():
    made = []

    @sized_cache(len, 10)
    def text(n):
        made.append(n)
        return "x" * n

    assert [len(text(n)) for n in (4, 5, 4, 5)] == [4, 5, 4, 5]
    assert made == [4, 5]
    assert (text(6), made) == ("x" * 6, [4, 5, 6])  # 15 in total: all but the newest are forgotten
    text(6)
    text(4)
    assert made == [4, 5, 6, 4]
    assert len(text(100)) == len(text(100)) == 100  # one that alone is too large is remembered, too
    assert made == [4, 5, 6, 4, 100]


def test_what_many_large_grids_share_takes_little_memory():
    """40 pairs of axes over 400 processes: tables of 1.3 MB each, of which lru_cache would keep all."""
    for extent in range(1000, 1040):
        found = common_counts(Axis(extent, 1, 0, 400, 0), Axis(extent, 2, 0, 400, 0))
        assert found.sum() == extent
    assert 1 <= common_counts.cache_info().currsize * found.nbytes <= 18 << 20
    for length in range(100_000, 100_040):
        stretches = intersect(Axis(length, 3, 0, 2, 0), 0, Axis(length, 7, 0, 3, 0), 0)
    assert stretches
    assert intersect.cache_info().currsize * 300 * len(stretches) <= 18 << 20


def test_ranks_of_a_large_machine_keep_less(monkeypatch):
    """What a rank's caches hold follows the number of ranks of the machine, counted when a context is made."""
    made = []

    @sized_cache(lambda found: found << 20)
    def mebibytes(n):
        made.append(n)
        return n

    try:
        for ranks, expected in ((2, [3, 4]), (256, [3, 4, 3])):  # 16 MiB, and 2
            monkeypatch.setattr(runtime, "most_ranks", lambda _, ranks=ranks: ranks)
            with pb.Context(engine="host"):
                mebibytes.cache_clear()
                made.clear()
                assert [mebibytes(n) for n in (3, 4, 3)] == [3, 4, 3]
                assert made == expected
    finally:
        limit_caches(MOST_BYTES)
