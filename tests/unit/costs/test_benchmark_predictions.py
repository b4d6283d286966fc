# SPDX-License-Identifier: Apache-2.0
"""The bands of predictions, held against stored runs of the benchmark, which are predicted again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

import pblasmp as pb
from benchmarks import predict as benchmark
from benchmarks import results
from pblasmp.costs.machines import load_machine

RUNS = sorted((Path(__file__).parents[3] / "benchmarks/results").glob("predict*.json"))
assert RUNS


@pytest.mark.parametrize(
    "file", [pytest.param(each, id=each.stem) for each in RUNS if "-1-" not in each.name]
)
def test_measured_runs_are_within_the_bands(file):
    """Stored runs, predicted again: all within a factor of two, of measured products four of five within 25 %."""
    run = results.load(file)
    where = load_machine(Path(run.options["machine"]).stem)
    where = replace(where, ranks_per_node=max(run.ranks, where.ranks_per_node))
    problems = dict(benchmark.problems("gpu" if run.gpus else "host", run.ranks))
    within, other = [], []
    for row in run.rows:
        found = pb.predict(problems[row["case"]["what"]], where, nranks=run.ranks)
        took = median(row["seconds"]["measured"])
        assert found.seconds / 2 <= took <= found.seconds * 2, row["case"]
        narrow = found.high < 1.5 * found.seconds
        (within if narrow else other).append(found.low <= took <= found.high)
    assert len(within) >= 20
    assert sum(within) >= 0.8 * len(within), f"{sum(within)} of {len(within)}"
    assert len(other) >= 5
