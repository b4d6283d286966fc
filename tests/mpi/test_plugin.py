# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin as users meet it: their tests, in their folder."""

import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import launch, testing
from tests.helpers.mpi import ROOT, starts_ranks
from tests.helpers.slow import only_long

pytestmark = starts_ranks

TESTS = """
import os
import pytest
import pblasmp as pb

def owner(comm, shape, grid):
    d = pb.MatrixDescriptor(shape, (2, 2), pb.Grid(*grid))
    return [comm.size, *d.local_shape(comm.rank)]

@pytest.mark.parametrize("grid", [(1, 2), (2, 1)], ids=str)
def test_local_shapes(run_mpi, grid):
    rows, cols = [4, 4] if grid[0] == 1 else [2, 4], [4, 2] if grid[0] == 1 else [4, 4]
    whole = run_mpi(owner, 2, shape=[4, 4], grid=list(grid))
    assert whole == ([[2, 4, 2]] * 2 if grid[0] == 1 else [[2, 2, 4]] * 2)

def pid(comm):
    return os.getpid()

def test_ranks_are_new(run_mpi):
    assert not set(run_mpi(pid, 2)) & set(run_mpi(pid, 2))

def cases(comm, worst):
    for n in range(4):
        if n == worst and comm.rank == 1:
            raise ValueError("my mistake")
        comm.Barrier()
        yield f"n={n}", None

@pytest.mark.parametrize("worst", [2, 9])
def test_cases(run_mpi, worst):
    run_mpi(cases, 2, worst=worst)
"""


@pytest.fixture
def session(pytester, monkeypatch):
    """Run pytest on TESTS with these arguments, in a new process, and return the result."""
    pytester.makepyfile(test_layouts=TESTS)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest('pytest_plugins = ["pblasmp.pytest_plugin"]')
    monkeypatch.setenv("PBLASMP_TEST_SESSION", str(pytester.path))

    def run(*arguments):
        options = [
            "--basetemp",
            str(pytester.path / "temporary"),
            "-p",
            "no:pblasmp",
            "-p",
            "no:cacheprovider",
        ]
        result = pytester.run(*launch.interpreter(), "-m", "pytest", *options, *arguments)
        assert not _left(str(pytester.path)), "ranks outlive the session"
        return result

    return run


def _left(mark):
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            environ = (directory / "environ").read_bytes()
        except OSError:
            continue
        if f"PBLASMP_TEST_SESSION={mark}".encode() in environ:
            found.append((directory / "cmdline").read_bytes())
    return found


@pytest.mark.parametrize("mode", ["prepend", *only_long("importlib")])
def test_a_session(session, mode):
    result = session("-v", "-s", f"--import-mode={mode}")
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(["*test_layouts:cases on 2 ranks (*) failed after *"])
    text = result.stdout.str()
    assert "--- rank 0 did not finish (after case 'n=1')" in text
    assert "--- rank 1 FAILED (after case 'n=1')" in text
    assert re.search(r"E +ValueError: my mistake", text)


def test_a_case_by_its_name(session):
    session("--import-mode=importlib", "test_layouts.py::test_cases[9]").assert_outcomes(passed=1)


def rank_of(comm, offset):
    return {"rank": comm.rank + offset, "row": np.arange(2), "total": np.int64(comm.size)}


def leaves(comm):
    if comm.rank == 1:
        os._exit(0)
    comm.Barrier()


def never_ends(comm):
    while True:
        time.sleep(0.01)


def leaves_a_context_open(comm):
    pb.Context(comm, engine="host")


def cases(comm, error):
    yield "a", None
    yield "b", {"text": "", "error": ValueError(), "none": False}[error]


def test_results_of_users_ranks():
    row = {"row": [0, 1], "total": 2}
    assert testing.run_mpi(rank_of, 2, offset=3) == [{"rank": 3, **row}, {"rank": 4, **row}]
    with pytest.raises(pb.ArgumentError, match="function: expected one at the top level of a module"):
        testing.run_mpi(lambda comm: comm.rank, 2)
    assert testing.run_mpi(cases, np.int64(1), error="none")
    for error, words in (("text", "b, rank 0: an empty text"), ("error", r"b, rank 0: ValueError\(\)")):
        with pytest.raises(testing.RanksFailedError, match=words):
            testing.run_mpi(cases, 1, error=error)
    with pytest.raises(
        pb.ArgumentError, match="error: arguments travel to the ranks as JSON: Object of type set"
    ):
        testing.run_mpi(cases, 1, error={1})
    for timeout in (0, "1", math.nan):
        with pytest.raises(pb.ArgumentError, match=r"timeout: expected seconds, more than 0, got"):
            testing.run_mpi(cases, 1, error="none", timeout=timeout)


@pytest.mark.parametrize(
    ("function", "timeout", "words"),
    [
        (leaves, 60.0, ["rank 1 did not finish\nno report"]),
        (never_ends, 5.0, ["did not end in 5 s", "in never_ends"]),
        (leaves_a_context_open, 60.0, ["rank 0 FAILED\n", "ResourceWarning"]),
    ],
)
def test_failures_of_users_ranks(function, timeout, words):
    start = time.monotonic()
    with pytest.raises(testing.RanksFailedError) as caught:
        testing.run_mpi(function, 2, timeout=timeout)
    assert all(each in str(caught.value) for each in words), caught.value
    assert time.monotonic() - start < 15


def test_only_projects_that_ask_for_it_get_the_plugin(pytester):
    """Nothing of it is in the test runs of others who have pblasmp installed."""
    assert "pytest11" not in (ROOT / "pyproject.toml").read_text()
    pytester.makepyfile("def test_it(run_mpi): pass")
    result = pytester.run(*launch.interpreter(), "-m", "pytest", "-p", "no:pblasmp")
    result.stdout.fnmatch_lines(["*fixture 'run_mpi' not found*"])


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("pblasmp", ["pytest", "pblasmp.testing"]),
        ("pblasmp.testing", ["pytest", "mpi4py", "torch"]),
        ("pblasmp.pytest_plugin", ["numpy", "mpi4py", "pblasmp.testing"]),
    ],
)
def test_importing_is_light(module, absent):
    script = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
