# SPDX-License-Identifier: Apache-2.0
"""What README.md shows: two commands of one line first, and blocks that run from top to bottom as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.mpi import ROOT, run_mpi, starts_ranks

TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SCRIPTS = [code for kind, code in BLOCKS if kind == "python"]


def shown(comm, code, directory):
    os.chdir(directory)
    variables = {}
    exec(compile(code, "README.md", "exec"), variables)
    return variables["d"].local.shape


def test_it_opens_with_two_commands_of_one_line():
    assert [kind for kind, _ in BLOCKS[:2]] == ["sh", "sh"]
    assert all(code.count("\n") == 1 and code.startswith("python3 -m venv") for _, code in BLOCKS[:2])
    assert re.fullmatch(r"# pblasmp\n\n[^\n]+(\n[^\n]+)?\.\n\n", TEXT[: TEXT.index("```")])
    assert TEXT.index(BLOCKS[1][1]) - TEXT.index(BLOCKS[0][1]) == len(BLOCKS[0][1]) + len("```\n\n```sh\n")


@starts_ranks
def test_it_pastes_through(tmp_path):
    """Every block but the two commands that install, in order, in one directory that is empty at first."""
    bin_directory = tmp_path / ".venv" / "bin"  # as the first command leaves it
    bin_directory.mkdir(parents=True)
    (bin_directory / "activate").write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    for kind, code in BLOCKS[2:]:
        command = ["bash", "-e", "-c", code] if kind == "sh" else [sys.executable, "-c", code]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{code}\n{done.stdout}"
    a, b = np.load(tmp_path / "A.npy"), np.load(tmp_path / "B.npy")
    np.testing.assert_allclose(np.load(tmp_path / "D.npy"), 2 * a.T @ b)


def test_the_product(tmp_path):
    a, b = np.ones((600, 300)), np.ones((600, 500))
    np.save(tmp_path / "A.npy", a)
    np.save(tmp_path / "B.npy", b)
    code = next(code for code in SCRIPTS if "ctx.load" in code)
    assert run_mpi(shown, 4, code=code, directory=str(tmp_path)) == [
        [256, 256],
        [256, 244],
        [44, 256],
        [44, 244],
    ]
    np.testing.assert_array_equal(np.load(tmp_path / "D.npy"), 2 * a.T @ b)


def test_the_layouts():
    code = next(code for code in SCRIPTS if "MatrixDescriptor" in code)
    variables = {}
    exec(compile(code, "README.md", "exec"), variables)
    checked = 0
    for expression, answer in re.findall(r"^(d\.\S.*?)  # (\S.*)$", code, re.MULTILINE):
        assert str(eval(expression, variables)) == answer
        checked += 1
    assert checked == 2


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)]+)\)", TEXT))
def test_links_lead_somewhere(link):
    assert link.startswith("https://") or (ROOT / link).exists()
