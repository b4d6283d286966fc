# SPDX-License-Identifier: Apache-2.0
"""How long several ranks take together."""

import time
from types import SimpleNamespace

import pytest

from pblasmp.tuning import timing

LATER = 0.5  # seconds


@pytest.mark.parametrize(("nodes", "counted"), [([(0, 1)], LATER), ([(0,), (1,)], 0.0)])
def test_ranks_that_share_a_core_take_as_long_as_all_of_them(nodes, counted):
    """The other rank does as this one, but later: only on one node is it known that it began later."""

    def allgather(mine):
        return [mine, [(start + LATER, end + LATER) for start, end in mine]]

    engine = SimpleNamespace(
        traits=SimpleNamespace(queues=False), transport=SimpleNamespace(nodes=nodes), synchronize=lambda: None
    )
    comm = SimpleNamespace(barrier=lambda: None, allgather=allgather)
    before = []
    found = timing.samples(engine, comm, lambda: time.sleep(0.01), 3, lambda: before.append(0))
    assert len(found) == len(before) == 3
    assert all(counted + 0.01 <= each < counted + 0.4 for each in found), found


def test_what_only_the_first_two_runs_do_is_not_timed(monkeypatch):
    """On GPUs a plan's second run records a graph."""
    engine = SimpleNamespace(
        traits=SimpleNamespace(queues=False),
        transport=SimpleNamespace(nodes=[(0,)]),
        synchronize=lambda: None,
    )
    comm = SimpleNamespace(barrier=lambda: None, allgather=lambda mine: [mine])
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    for count, least in ((1, 0.0), (3, 0.0), (1, 0.02)):
        runs = iter([0.3, 0.3])

        def run(runs=runs):
            now[0] += next(runs, 0.01)

        found = timing.repeated(engine, comm, run, count, least)
        assert found == pytest.approx([0.01] * count)
