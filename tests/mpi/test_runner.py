# SPDX-License-Identifier: Apache-2.0
"""The runner of MPI tests: every way in which a rank can fail is reported, nothing hangs or stays behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.mpi import RanksFailedError, run_mpi, starts_ranks


def identity(comm, offset):
    return {"rank": comm.rank + offset, "total": np.int64(comm.size), "row": np.arange(2)}


def one_raises_the_others_wait(comm):
    if comm.rank == 2:
        raise ZeroDivisionError("only here")
    comm.Barrier()


def all_raise(comm):
    raise ZeroDivisionError(f"here on {comm.rank}")


def one_leaves(comm):
    if comm.rank == 1:
        os._exit(0)
    comm.Barrier()


def one_is_killed(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.Barrier()


def one_loops_for_ever(comm):
    while comm.rank == 1:
        pass
    comm.Barrier()


def warns(comm):
    import warnings

    warnings.warn("careful", UserWarning, stacklevel=1)


def many_cases(comm):
    for n in range(3):
        yield f"case {n}", "odd" if comm.rank == 1 and n == 1 else None


def no_case(comm):
    yield from ()


def other_cases(comm):
    yield f"case of rank {comm.rank}", None


def case_that_raises(comm):
    yield "first", None
    if comm.rank == 1:
        raise ZeroDivisionError("in the second")
    comm.Barrier()
    yield "second", None


def failure(function, nranks=4, **options):
    start = time.monotonic()
    with pytest.raises(RanksFailedError) as caught:
        run_mpi(function, nranks, **options)
    assert not _processes_of(function), "a rank is still there"
    return str(caught.value), time.monotonic() - start


def _processes_of(function):
    """The processes that run a rank of a test: there is none once a test is done."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            command = (directory / "cmdline").read_bytes()
            parent_job = (directory / "environ").read_bytes()
        except OSError:
            continue
        if b"tests.helpers.rank" in command and f"TEST_OF={os.getpid()}".encode() in parent_job:
            found.append(directory.name)
    return found


@pytest.fixture(autouse=True)
def _marked(monkeypatch):
    monkeypatch.setenv("TEST_OF", str(os.getpid()))


@pytest.mark.parametrize("nranks", [1, 3])
def test_results_come_back_by_rank(nranks):
    results = run_mpi(identity, nranks, offset=5)
    assert results == [{"rank": r + 5, "total": nranks, "row": [0, 1]} for r in range(nranks)]


@starts_ranks
def test_one_rank_raises_while_the_others_wait():
    message, seconds = failure(one_raises_the_others_wait)
    assert "rank 2 FAILED" in message
    assert "ZeroDivisionError: only here" in message
    for rank in (0, 1, 3):
        after = message.split(f"--- rank {rank} did not finish")[1].split("---")[0]
        assert "one_raises_the_others_wait" in after, "it must say where the rank stood"
    assert seconds < 15


@starts_ranks
def test_all_ranks_raise():
    message, _ = failure(all_raise, 2)
    assert all(f"here on {rank}" in message for rank in range(2))


@starts_ranks
@pytest.mark.parametrize("function", [one_leaves, one_is_killed])
def test_a_rank_disappears(function):
    message, seconds = failure(function)
    assert "rank 1 did not finish\nit left no word" in message
    assert seconds < 15


@starts_ranks
def test_endless_loop_ends_at_the_limit():
    message, seconds = failure(one_loops_for_ever, 3, timeout=3)
    assert "did not end in 3 s" in message
    assert "while comm.rank == 1" not in message
    assert message.count("in one_loops_for_ever") == 3
    assert seconds < 10


@starts_ranks
def test_warnings_are_errors_on_ranks_too():
    message, _ = failure(warns, 1)
    assert "UserWarning: careful" in message


@starts_ranks
def test_each_case_is_reported():
    message, _ = failure(many_cases, 2)
    assert message.endswith("case 1, rank 1: odd")


@starts_ranks
def test_ranks_must_run_the_same_cases_and_at_least_one():
    assert "at least one" in failure(no_case, 1)[0]
    assert "the same cases" in failure(other_cases, 2)[0]


@starts_ranks
def test_an_exception_names_the_case_before():
    message, _ = failure(case_that_raises, 2)
    assert "rank 1 FAILED (after case 'first')" in message


@starts_ranks
def test_no_launcher_is_a_failure(monkeypatch, tmp_path):
    from pblasmp.errors import LibraryNotFoundError

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LibraryNotFoundError, match=r"pip install 'pblasmp\[mpi\]'"):
        run_mpi(identity, 1, offset=0)
