# SPDX-License-Identifier: Apache-2.0
"""Where ranks run: machines, nodes, cores."""

from __future__ import annotations

import os

import pytest

from pblasmp.comm import machines_of, most_ranks, nodes_of, share_of_cores
from pblasmp.comm.locations import Location, count_cores

HERE = Location.here()


def on(*machines: str) -> list[Location]:
    return [HERE._replace(machine=(name, "")) for name in machines]


def test_ranks_of_a_machine_need_not_be_neighbors():
    assert machines_of(on("a", "b", "a", "c", "b")) == [(0, 2), (1, 4), (3,)]


def test_machines_of_one_name_are_told_apart():
    assert machines_of([HERE, HERE._replace(machine=(HERE.machine[0], "another boot"))]) == [(0,), (1,)]


def test_a_machine_may_be_several_nodes(monkeypatch):
    ranks = on("a", "b", "a", "a")
    assert nodes_of(ranks) == [(0, 2, 3), (1,)]
    monkeypatch.setenv("PBLASMP_RANKS_PER_NODE", "2")
    assert nodes_of(ranks) == [(0, 2), (3,), (1,)]


def test_cores_that_ranks_share_count_once():
    assert count_cores([HERE._replace(cores=cores) for cores in (0b0011, 0b0110, 1 << 200)]) == 4


def test_the_machine_with_the_most_ranks():
    assert most_ranks([each._replace(job_ranks=0) for each in on("a", "b", "a")]) == 2
    assert most_ranks([each._replace(job_ranks=7) for each in on("a", "b", "a")]) == 7


@pytest.mark.parametrize(
    ("ranks", "given", "share"),
    [
        (4, {}, 1),
        (8, {}, 0.5),
        (2, {}, 2),
        (2, {"job_ranks": 4}, 1),  # a context of half of the job's ranks, none of which is bound
        (2, {"job_ranks": 8}, 0.5),
        (
            4,
            {"job_ranks": 8, "job_cores": 8},
            1,
        ),  # bound to one half of the cores; the others have the other half
        (2, {"job_ranks": 3, "job_cores": 8}, 2),  # more than half of the job on half of the cores
        (4, {"quota": 2.0}, 0.5),
        (2, {"quota": 2.0, "job_ranks": 4}, 0.5),
        (2, {"quota": 64.0}, 2),
    ],
)
def test_the_share_of_cores(ranks, given, share):
    here = HERE._replace(**{"cores": 0b1111, "job_cores": 4, "quota": 0, "job_ranks": 0, **given})
    assert share_of_cores([here] * ranks) == share


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_cores_are_those_that_this_process_may_run_on():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        assert Location.here().cores == 1 << max(cores)
    finally:
        os.sched_setaffinity(0, cores)
    assert count_cores([Location.here()]) == len(cores)
