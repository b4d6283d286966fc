# SPDX-License-Identifier: Apache-2.0
"""What README.md shows: two commands that .ci/run finds by their headings, and a script that runs as it is."""

import os
import re
import subprocess

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers.mpi import ROOT, run_mpi, starts_ranks

TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [code for kind, code in BLOCKS if kind == "sh"]
(SCRIPT,) = (code for kind, code in BLOCKS if kind == "python")


def shown(comm, code, directory):
    os.chdir(directory)
    variables = {}
    exec(compile(code, "README.md", "exec"), variables)
    return [variables["x"].local.size, variables["residual"]]


def run_of_ci(heading):
    """Return what .ci/run does with the command below a heading: its status, and the command that it runs."""
    functions = re.search(
        r"^readme_command\(\).*?^}\n.*?^run_readme\(\).*?^}\n",
        (ROOT / ".ci/run").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    recorder = 'bash() { shift; printf "%s\\n" "$@"; }\n'
    done = subprocess.run(
        ["bash", "-c", f'{recorder}{functions[0]}run_readme "$1"', "bash", heading],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_ci_finds_the_two_commands_by_their_headings():
    main, tests = COMMANDS
    assert all(code.count("\n") == 1 and code.startswith("python3 -m venv") for code in COMMANDS)
    assert "pblasmp matmul" in main
    assert "-m pytest" in tests
    assert run_of_ci("Install and multiply") == (0, main)
    assert run_of_ci("Tests") == (0, tests)
    assert set(re.findall(r'run_readme "(.*?)"$', (ROOT / ".ci/run").read_text(), re.MULTILINE)) == {
        "Install and multiply", "Tests",
    }  # fmt: skip


def test_ci_fails_without_a_command():
    status, output = run_of_ci("No such heading")
    assert (status != 0, output) == (True, "")


@starts_ranks
def test_the_script(tmp_path):
    assert len(SCRIPT.splitlines()) <= 10
    found = run_mpi(shown, 4, code=SCRIPT, directory=str(tmp_path))
    assert sum(size for size, _ in found) == 2000 * 8
    assert max(size for size, _ in found) < 2000 * 8  # no rank has all
    assert len({residual for _, residual in found}) == 1
    assert found[0][1] < 1e-9
    with pb.Context(engine="host") as ctx:
        a, b = (ctx.random(shape, seed=seed).gather() for shape, seed in (((2000, 2000), 1), ((2000, 8), 2)))
    np.testing.assert_allclose(a @ np.load(tmp_path / "X.npy"), b, atol=1e-9)


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)]+)\)", TEXT))
def test_links_lead_somewhere(link):
    headings = {"#" + each.lower().replace(" ", "-") for each in re.findall("^## (.*)$", TEXT, re.MULTILINE)}
    assert link.startswith("https://") or link in headings or (ROOT / link).exists()
