# SPDX-License-Identifier: Apache-2.0
"""Results of benchmarks: every file can be read, and a faulty run is refused before it is written."""

import argparse
from dataclasses import asdict, replace

import pytest

from benchmarks import exchange_plans, results, whole_problems
from benchmarks.results import Run
from pblasmp.layout import Grid

RUN = Run(
    benchmark="gemm", date="2026-11-25", commit="abc", ranks=2, gpus=2, machine={"gpu": "H"}, versions={},
    options={}, reference="gemm", sample="all",
    rows=[{"case": {"n": 8}, "seconds": {"pblasmp": [2.0, 1.0, 3.0]}, "ratios": {"pblasmp": 0.5}}],
)  # fmt: skip


def test_every_stored_run_can_be_read():
    found = results.runs()
    assert len(found) > 50
    assert {run.name for run in found.values()} == set(found)


def test_a_run_is_written_and_read_back(tmp_path):
    path = results.save(RUN, tmp_path / "new")
    assert path.name == "gemm-2-gpus.json"
    assert results.runs(tmp_path / "new") == {"gemm-2-gpus": RUN}
    results.save(replace(RUN, date="2026-11-26"), tmp_path / "new")  # takes the place of the older one
    assert [run.date for run in results.runs(tmp_path / "new").values()] == ["2026-11-26"]


def test_portions_of_one_commit_are_put_together(tmp_path):
    def portion(n, seconds, **changes):
        return replace(RUN, rows=[{"case": {"n": n}, "seconds": {"x": [seconds]}}], **changes)

    def stored(run):
        results.save(results.with_earlier(run, tmp_path), tmp_path)
        return {
            row["case"]["n"]: row["seconds"]["x"][0] for row in results.runs(tmp_path)["gemm-2-gpus"].rows
        }

    assert stored(portion(8, 1.0)) == {8: 1.0}
    assert stored(portion(16, 2.0)) == {8: 1.0, 16: 2.0}
    assert stored(portion(8, 3.0)) == {16: 2.0, 8: 3.0}
    assert stored(portion(8, 4.0, options={"pairs": 3})) == {8: 4.0}
    assert stored(portion(16, 5.0, options={"pairs": 3}, commit="def")) == {16: 5.0}


def test_a_run_says_where_it_ran():
    assert RUN.where == "2 × H"
    assert replace(RUN, machine={"gpu": "H", "shared": 2}).where == "1 × H, shared by 2 ranks"
    few = replace(RUN, gpus=0, machine={"cpu": "C", "cores": 2})
    assert (few.name, few.where) == ("gemm-2-ranks", "2 ranks on 2 cores (C)")


def test_the_median_of_all_times_counts():
    assert results.middle(RUN.rows[0], "pblasmp") == 2.0
    assert results.middle(RUN.rows[0], "mkl") is None


BAD = [
    ({"date": "yesterday"}, "date: expected a date such as 2026-11-25, got 'yesterday'"),
    ({"commit": ""}, "commit: expected text, got ''"),
    ({"ranks": 0, "gpus": 0}, "ranks, gpus: expected at least one rank and no more GPUs, got 0, 0"),
    ({"gpus": 3}, "ranks, gpus: expected at least one rank and no more GPUs, got 2, 3"),
    ({"gpus": 0}, "machine: expected the GPU, or the processor and its cores"),
    ({"versions": None}, "versions: expected a dictionary"),
    ({"rows": []}, "rows: there are none"),
    ({"rows": [{"seconds": {"x": [1.0]}}]}, "row 0: expected a case"),
    ({"rows": [*RUN.rows, *RUN.rows]}, "row 1: {'n': 8} again"),
    ({"rows": [{"case": {"n": 1}}]}, "row 0: nothing was measured"),
    (
        {"rows": [{"case": {"n": 1}, "seconds": {"x": []}}]},
        "row 0: seconds of x: expected positive numbers, got []",
    ),
    (
        {"rows": [{"case": {"n": 1}, "seconds": {"x": [float("nan")]}}]},
        "row 0: seconds of x: expected positive numbers, got [nan]",
    ),
    (
        {"rows": [{"case": {"n": 1}, "errors": {"x": -1}}]},
        "row 0: errors of x: expected a positive number, got -1",
    ),
    ({"rows": [{"case": {"n": 1}, "time": 3}]}, "row 0: unknown keys time"),
    ({"reference": ""}, "row 0: ratios without a reference"),
]


@pytest.mark.parametrize(("change", "fault"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_wrong_with_a_run_is_found(tmp_path, change, fault):
    run = replace(RUN, **change)
    assert fault in results.faults(asdict(run))
    with pytest.raises(ValueError, match="gemm"):
        results.save(run, tmp_path)
    assert not list(tmp_path.iterdir())


def test_files_that_no_script_has_written_are_refused(tmp_path):
    results.save(RUN, tmp_path).rename(tmp_path / "other-2-gpus.json")
    with pytest.raises(ValueError, match=r"is called other-2-gpus\.json, expected gemm-2-gpus\.json"):
        results.runs(tmp_path)
    (tmp_path / "other-2-gpus.json").write_text("{}")
    with pytest.raises(ValueError, match="expected the keys benchmark, date"):
        results.runs(tmp_path)


def test_a_quick_run_writes_nothing_unless_asked_to(tmp_path):
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    results.add_option(parser)
    directories = [results.directory_of(parser.parse_args(given)) for given in ([], ["--quick"])]
    assert directories == [results.DIRECTORY, None]
    options = parser.parse_args(["--quick", "--results", str(tmp_path)])
    assert results.directory_of(options) == tmp_path
    assert results.options_of(options) == {"quick": True}


def test_exchange_plans(capsys, monkeypatch):
    """A rank copies a panel that it has and sends it to the other rank of its row or column, or it receives it."""
    assert exchange_plans.planned(Grid(1, 1), 64, 0, 3, 64, 0)[1] == 2 * 3
    assert exchange_plans.planned(Grid(2, 2), 64, 0, 3, 64, 0)[1] == 2 * (2 + 1 + 2)
    monkeypatch.setattr("sys.argv", ["exchange_plans", "--grid", "2", "2", "--panels", "3", "--width", "64"])
    exchange_plans.main()
    assert "s of processor time for A and B, 9 messages and copies" in capsys.readouterr().out


@pytest.mark.parametrize("problem", whole_problems.PROBLEMS)
def test_examples_of_whole_problems_say_how_they_run_at_a_large_size(problem):
    nranks, arguments = whole_problems.large(problem)
    assert nranks >= 2
    assert all(
        name.startswith("--") and float(value)
        for name, value in zip(arguments[::2], arguments[1::2], strict=True)
    )


def test_times_that_examples_print():
    printed = "9 points: log likelihood 3.5, gradient 1.5, 2\nlikelihood 1.25 s, gradient 0.50 s\n"
    printed += "4 cycles, energy 1.5; the last eigh took 0.236 s"
    assert whole_problems.times(printed) == {"likelihood": [1.25], "gradient": [0.5], "last eigh": [0.236]}
    assert whole_problems.times("loss 2.0 to 1.0; the last step of Muon took 720.5 ms") == {
        "last step of Muon": [0.7205]
    }


def test_a_copy_without_gits_data_is_told_its_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "DIRECTORY", tmp_path / "results")
    assert results.this_commit() == "unknown"
    monkeypatch.setenv("PBLASMP_COMMIT", "0123abcd")
    assert results.this_commit() == "0123abcd"
