# SPDX-License-Identifier: Apache-2.0
"""What README.md shows: two commands of one line first, and Python that does what it says."""

from __future__ import annotations

import os
import re

import numpy as np

from tests.helpers.mpi import ROOT, run_mpi

TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def shown(comm, code, directory):
    os.chdir(directory)
    variables = {}
    exec(compile(code, "README.md", "exec"), variables)
    return variables["d"].local.shape


def test_it_opens_with_two_commands_of_one_line():
    assert [kind for kind, _ in BLOCKS[:2]] == ["sh", "sh"]
    assert all(code.count("\n") == 1 and code.startswith("python3 -m venv") for _, code in BLOCKS[:2])
    assert re.fullmatch(r"# pblasmp\n\n[^\n]+\.\n\n", TEXT[: TEXT.index("```")])
    assert TEXT.index(BLOCKS[1][1]) - TEXT.index(BLOCKS[0][1]) == len(BLOCKS[0][1]) + len("```\n\n```sh\n")


def test_the_product(tmp_path):
    a, b = np.ones((600, 300)), np.ones((600, 500))
    np.save(tmp_path / "A.npy", a)
    np.save(tmp_path / "B.npy", b)
    code = next(code for kind, code in BLOCKS if kind == "python" and "Context" in code)
    assert run_mpi(shown, 4, code=code, directory=str(tmp_path)) == [
        [256, 256],
        [256, 244],
        [44, 256],
        [44, 244],
    ]
    np.testing.assert_array_equal(np.load(tmp_path / "D.npy"), 2 * a.T @ b)


def test_the_layouts():
    code = next(code for kind, code in BLOCKS if kind == "python" and "MatrixDescriptor" in code)
    variables = {}
    exec(compile(code, "README.md", "exec"), variables)
    checked = 0
    for expression, answer in re.findall(r"^(d\.\S.*?)  # (\S.*)$", code, re.MULTILINE):
        assert str(eval(expression, variables)) == answer
        checked += 1
    assert checked == 2
