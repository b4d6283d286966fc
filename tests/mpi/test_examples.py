# SPDX-License-Identifier: Apache-2.0
"""The examples run as their headers say, and print what their docstrings say."""

import ast
import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from pblasmp import launch
from pblasmp.launch import Job
from tests.helpers.mpi import run_mpi, starts_ranks
from tests.helpers.slow import only_long

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
HEADER = re.compile(
    r"# Run: (?:mpirun -n (?P<ranks>\d+) )?python (?P<pytest>-m pytest )?examples/(?P<name>\S+)"
)

pytestmark = starts_ranks


def header_of(path):
    line = path.read_text().splitlines()[1]
    header = HEADER.fullmatch(line)
    assert header, f"{path.name}, line 2: expected '# Run: [mpirun -n N ]python examples/NAME', got {line!r}"
    assert header["name"] == path.name
    return header


def promised(path):
    """Return the lines that the example prints, maybe among others, as its docstring has them."""
    _, _, block = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\nPrints:\n")
    lines = [line[4:] for line in block.splitlines()]
    assert lines, f"{path.name}: the docstring says nothing under 'Prints:'"
    return lines


def run(path, directory, more=0):
    """Run the example in a new directory, on ``more`` ranks than it says; return its status and output."""
    header = header_of(path)
    how = "-W error"
    if header[
        "pytest"
    ]:  # where pyproject.toml says so; the fork has imported plugins before pytest could change them
        how = "-m pytest -W ignore::pytest.PytestAssertRewriteWarning"
    command = [*launch.interpreter(), *how.split(), str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if header["ranks"] is None:
        done = subprocess.run(
            command, cwd=directory, env=environment, timeout=60, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        return done.returncode, done.stdout
    command = ["env", "-C", str(directory), *command]
    with Job(command, int(header["ranks"]) + more, directory / "output", environ=environment) as job:
        return job.wait(60), job.output.read_text()


def needs(path):
    """The library that pblasmp does without, but the example does not."""
    return next((name for name in ("torch", "jax") if f"\nimport {name}\n" in path.read_text()), None)


def needs_ranks(path):
    return header_of(path)["ranks"] is not None and not needs(path)


ON_RANKS = list(filter(needs_ranks, EXAMPLES))
OUTSIDE = ROOT / "examples" / "scalapack_port.py"
"""The example that one more rank starts, outside its grid."""


@pytest.mark.parametrize(
    "path",
    [path for path in EXAMPLES if path not in ON_RANKS or path.stem == "gemm" or only_long(path)],
    ids=lambda path: path.stem,
)
def test_example(path, tmp_path):
    if extra := needs(path):
        pytest.importorskip(extra, reason=f"it is not installed: pip install 'pblasmp[{extra}]'")
    check(path, *run(path, tmp_path))


def printed_by(comm, path):
    """What an example prints on this rank."""
    sys.argv = [path]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name="__main__")
    return out.getvalue()


@pytest.mark.parametrize(
    "path", [path for path in ON_RANKS if path != OUTSIDE or only_long(path)], ids=lambda path: path.stem
)
def test_example_on_kept_ranks(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(path, 0, "".join(run_mpi(printed_by, int(header_of(path)["ranks"]), path=str(path))))


def test_ranks_outside_the_grid_end_too(tmp_path):
    check(OUTSIDE, *run(OUTSIDE, tmp_path, more=1))


def check(path, status, output):
    """Fail unless the example ended well and printed what it promises."""
    assert status == 0, f"ended with {status}:\n{output}"
    printed = iter(output.splitlines())
    for line in promised(path):
        assert any(line in each for each in printed), f"{line!r} was not printed in its place:\n{output}"


def test_examples_are_found():
    assert {"layout_only", "gemm", "test_my_layout"} <= {path.stem for path in EXAMPLES}
