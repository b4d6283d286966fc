# SPDX-License-Identifier: Apache-2.0
"""The scripts and commands in docs/ run on 4 ranks and print what the pages show."""

import contextlib
import io
import os
import re
import subprocess
import sys

import pytest

from pblasmp.launch import Job, interpreter
from tests.helpers.command_line import kept_ranks, run_here
from tests.helpers.docs import DOCS, PAGES, blocks, occurs
from tests.helpers.mpi import run_on_one_node, starts_ranks

SCRIPTS = [page.stem for page in PAGES if blocks(page, "python")]
COMMANDS = [page for page in PAGES if blocks(page, "console")]

pytestmark = starts_ranks

MY_LAYOUT = """\
title = "A mistake"
grid = "2x2"
m = 4
n = 6
k = 4
block = 2
b = { block = [2, 3] }
"""


@pytest.fixture
def directory(tmp_path):
    """Return a directory with the files that the pages work on: matrices, as the quickstart makes them."""
    make = [
        line
        for block in blocks(DOCS / "quickstart.md", "sh")
        for line in block.splitlines()
        if "np.save" in line
    ]
    assert len(make) == 1
    subprocess.run(["sh", "-c", make[0].replace("python", sys.executable, 1)], cwd=tmp_path, check=True)
    (tmp_path / "my_layout.toml").write_text(MY_LAYOUT)
    return tmp_path


def run_scripts(comm, directory):
    """Run the Python blocks of every page, those of a page as one script; say what is shown but not printed."""
    os.chdir(directory)
    for name in SCRIPTS:
        page = DOCS / f"{name}.md"
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("\n".join(blocks(page, "python")), str(page), "exec"), {"__name__": "__main__"})
        printed = out.getvalue()
        missing = [text for text in blocks(page, "text") if comm.rank == 0 and not occurs(text, printed)]
        assert not missing, f"{name} prints {printed}"


def test_scripts(directory):
    run_on_one_node(run_scripts, 4, directory=str(directory))


def test_the_quickstart_works_as_typed(directory, monkeypatch):
    """Its script in a file of the name that it gives, below mpirun, prints what the page shows."""
    page = DOCS / "quickstart.md"
    (script,), (shown,) = blocks(page, "python"), blocks(page, "text")
    assert "Saved as `product.py`" in page.read_text()
    (run,) = (block.split() for block in blocks(page, "sh") if block.startswith("mpirun"))
    assert run == ["mpirun", "-n", "4", "python", "product.py"]
    (directory / "product.py").write_text(script)
    monkeypatch.chdir(directory)
    with Job([*interpreter(), "product.py"], int(run[2]), directory / "output") as job:
        status = job.wait(60)
    printed = (directory / "output").read_text()
    assert (status, occurs(shown, printed)) == (0, True), printed


@pytest.mark.parametrize("page", COMMANDS, ids=lambda page: page.stem)
def test_commands(page, directory, monkeypatch, capsys):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("pblasmp.cli.ranks.Job", kept_ranks)
    monkeypatch.chdir(directory)
    for block in blocks(page, "console"):
        for command, shown in re.findall(r"^\$ pblasmp (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            done = run_here(command.split(), monkeypatch, capsys)
            printed = done.stdout + done.stderr
            assert occurs(shown, printed), f"pblasmp {command} printed\n{printed}"
            assert done.returncode == (2 if "\npblasmp: " in "\n" + shown else 0)
