# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin as users meet it: their tests, in their folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pblasmp import launch
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

def test_ranks_stay(run_mpi):
    print("same ranks:", run_mpi(pid, 2) == run_mpi(pid, 2))

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
    result.stdout.fnmatch_lines(["*same ranks: True*", "*test_layouts:cases on 2 ranks (*) failed after *"])
    text = result.stdout.str()
    assert "--- rank 0 did not finish (after case 'n=1')" in text
    assert "--- rank 1 FAILED (after case 'n=1')" in text
    assert re.search(r"E +ValueError: my mistake", text)


def test_cases_by_their_names_on_fresh_ranks(session):
    names = ["test_layouts.py::test_cases[9]", "test_layouts.py::test_ranks_stay"]
    result = session("-s", "--import-mode=importlib", "--fresh-ranks", *names)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*same ranks: False*"])


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
