# SPDX-License-Identifier: Apache-2.0
"""What ran on which GPUs is kept: the newest outcome of each suite, by GPUs and version."""

import json

import pytest

from tests.helpers import gpu_runs

RUN = {
    "date": "2026-11-25", "commit": "abc", "gpu": "H", "gpus": 2, "ranks": 2, "cuBLASMp": "0.10.0", "NCCL": "2",
    "suites": {"test_plans": "3 passed", "test_moves": "1 passed"},
}  # fmt: skip


def test_the_stored_runs_are_complete():
    runs = json.loads(gpu_runs.RUNS.read_text())
    assert len(runs) >= 8
    for run in runs:
        gpu_runs.check(run)


def test_outcomes_are_counted_by_file():
    outcomes = [
        ("tests/gpu/test_b.py::x[1]", "passed"),
        ("tests/gpu/test_a.py::y", "failed"),
        ("tests/gpu/test_b.py::z", "passed"),
    ]
    assert gpu_runs.suites_of(outcomes) == {"test_a": "1 failed", "test_b": "2 passed"}


def test_a_newer_outcome_replaces_the_older_one(tmp_path):
    path = tmp_path / "runs.json"
    gpu_runs.add(path, RUN)
    gpu_runs.add(path, RUN | {"commit": "def", "suites": {"test_plans": "1 failed"}})
    gpu_runs.add(path, RUN | {"gpus": 1, "commit": "ghi"})
    gpu_runs.add(path, RUN | {"hosts": 2, "commit": "jkl"})
    gpu_runs.add(path, RUN | {"hosts": 2, "commit": "jkl", "suites": {"test_arena": "6 passed"}})
    found = [(run["commit"], run["gpus"], run["suites"]) for run in json.loads(path.read_text())]
    assert found == [
        ("abc", 2, {"test_moves": "1 passed"}),
        ("def", 2, {"test_plans": "1 failed"}),
        ("ghi", 1, RUN["suites"]),
        ("jkl", 2, {"test_arena": "6 passed", **RUN["suites"]}),
    ]


@pytest.mark.parametrize("change", [{"suites": {}}, {"gpus": 3}, {"gpus": 0}, {"more": 1}])
def test_incomplete_runs_are_refused(tmp_path, change):
    with pytest.raises(ValueError, match="expected date, commit"):
        gpu_runs.add(tmp_path / "runs.json", RUN | change)
    assert not list(tmp_path.iterdir())
