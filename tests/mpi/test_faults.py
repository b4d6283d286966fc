# SPDX-License-Identifier: Apache-2.0
"""Programs that end badly end at once, on every rank, with a status that says so, and show what happened once."""

from __future__ import annotations

import os
import sys
import time

import pytest

from pblasmp.launch import Job
from tests.helpers.mpi import ROOT, starts_ranks

LIMIT = 60.0
GRACE = 1.0  # seconds that a rank waits for others before it aborts them


def ends(name, tmp_path, nranks=4, options=()):
    """Run a program of faults.py; return its status, what was printed and how long the ranks took to end."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", *options, "-m", "tests.helpers.faults", name]
    start = time.monotonic()
    with Job(command, nranks, tmp_path / "output", environ=environ) as job:
        status = job.wait(LIMIT)
        printed = job.tail(200)
    seconds = time.monotonic() - start
    print(f"{name}: status {status} after {seconds:.1f} s")
    assert status is not None, f"hangs:\n{printed}"
    return status, printed, seconds


@starts_ranks
@pytest.mark.parametrize(
    "name",
    [
        "one_while_others_multiply",
        "one_while_others_wait_in_mpi",
        "one_while_others_close",
        "one_while_others_run_a_plan",
        "all_the_same",
        "two_of_them",
        "without_with",
        "in_a_part_of_the_ranks",
        "in_a_part_on_its_own",
    ],
)
def test_an_exception_ends_the_job_and_is_shown_once(name, tmp_path):
    status, printed, _ = ends(name, tmp_path)
    # Where ranks are aborted, MPICH ends with the status of the first it sees end: 1, or 9 of one that it killed.
    assert status in ((1, 9) if name == "one_while_others_wait_in_mpi" else (1,)), printed
    assert printed.count("ValueError: my own") == 1, printed
    assert printed.count("Traceback") == 1, printed
    assert "(on rank" not in printed, printed  # the exception itself, not its echo on other ranks


@starts_ranks
def test_different_exceptions_on_all_ranks_show_one(tmp_path):
    status, printed, _ = ends("all_different", tmp_path)
    assert status == 1, printed
    assert printed.count("Traceback") == 1, printed
    assert "ValueError: of rank 0" in printed, printed


@starts_ranks
@pytest.mark.parametrize(
    ("name", "last_line"),
    [
        ("no_such_engine", "pblasmp.errors.LayoutError: engine: expected one of auto, host, cublasmp, got 'none'"),
        ("in_the_making", "ZeroDivisionError: division by zero"),
        ("bad_input", "pblasmp.errors.LayoutError: array: shape is (3, 3), the descriptor's (8, 8) (on rank 0)"),
        ("one_leaves_early", "pblasmp.errors.RankMismatchError: the ranks made different calls:"),
        ("interrupted", "KeyboardInterrupt"),
    ],
)  # fmt: skip
def test_errors_are_shown_once(name, last_line, tmp_path):
    status, printed, _ = ends(name, tmp_path)
    assert status not in (0, None), printed
    assert printed.count("Traceback") == 1, printed
    assert printed.splitlines().count(last_line) == 1, printed


@starts_ranks
@pytest.mark.parametrize(
    ("name", "status", "shown"),
    [
        ("exits_with_2", 2, ""),
        ("exits_with_a_text", 1, "good bye"),
        ("exits_with_0", 1, "PblasmpError: SystemExit: 0 (on rank 1)"),
        ("exits_while_others_wait_in_mpi", 5, "SystemExit: 5"),
        ("all_exit_with_0", 0, ""),
    ],
)
def test_exit_statuses_are_kept(name, status, shown, tmp_path):
    found, printed, _ = ends(name, tmp_path)
    # Where ranks are aborted, MPICH ends with the status of the first it sees end: its own, or 9 of one that it killed.
    assert found in ((status, 9) if name == "exits_while_others_wait_in_mpi" else (status,)), printed
    if shown:
        assert printed.count(shown) == 1, printed
        assert printed.count("Traceback") == int("SystemExit" in shown), printed
    else:
        assert "Error" not in printed, printed
        assert "Traceback" not in printed, printed


@starts_ranks
def test_what_is_caught_is_over(tmp_path):
    status, printed, _ = ends("caught", tmp_path)
    assert (status, printed.strip()) == (0, "went on 140")


@starts_ranks
def test_a_context_that_is_never_closed_warns(tmp_path):
    status, printed, _ = ends("never_closed", tmp_path, 2, ["-W", "always::ResourceWarning"])
    assert status == 0, printed
    for rank in range(2):
        words = (
            f"ResourceWarning: Context(rank {rank} of 2, engine host) made at {ROOT}/tests/helpers/faults.py:"
        )
        assert printed.count(words) == 1, printed


@starts_ranks
@pytest.mark.parametrize("name", ["closed_after_an_exception", "all_exit_with_0"])
def test_a_context_that_is_closed_does_not(name, tmp_path):
    status, printed, _ = ends(name, tmp_path, 2, ["-W", "always::ResourceWarning"])
    assert (status, printed.strip()) == (0, "")


@starts_ranks
def test_ranks_that_do_not_listen_are_given_a_second(tmp_path):
    *_, with_others = ends("one_while_others_multiply", tmp_path)
    *_, alone = ends("one_while_others_wait_in_mpi", tmp_path)
    assert with_others < 10
    assert alone < 10 + GRACE
