# SPDX-License-Identifier: Apache-2.0
"""The command that installs an extra works where pblasmp came from: a clone, a local wheel, an index."""

import importlib.metadata
import json

import pytest

from pblasmp import errors
from pblasmp.errors import LibraryNotFoundError
from tests.helpers.fresh import run_fresh
from tests.helpers.mpi import ROOT


def test_in_a_clone():
    assert errors.install("cu13") == f"pip install -e '{ROOT}[cu13]' (the extra pblasmp[cu13])"


class Installed:
    """A distribution as pip leaves it."""

    def __init__(self, url):
        self.url = url

    def read_text(self, name):
        assert name == "direct_url.json"
        return self.url and json.dumps({"url": self.url})


@pytest.mark.parametrize("kind", ["index", "local", "gone", "git", "none"])
def test_elsewhere(monkeypatch, tmp_path, kind):
    source = tmp_path / "a clone"
    source.mkdir()
    url = {
        "local": source.as_uri(),
        "gone": (tmp_path / "gone").as_uri(),
        "git": "https://x.org/pblasmp",
    }.get(kind)

    def distribution(name):
        if kind == "none":
            raise importlib.metadata.PackageNotFoundError(name)
        return Installed(url)

    monkeypatch.setattr(errors, "__file__", str(tmp_path / "site-packages" / "pblasmp" / "errors.py"))
    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    expected = (
        f"pip install '{source}[mpi]' (the extra pblasmp[mpi])"
        if kind == "local"
        else "pip install 'pblasmp[mpi]'"
    )
    assert errors.install("mpi") == expected


ALONE = """
import importlib.metadata, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Finder())
import pblasmp as pb
"""
OTHERS = {
    "click",
    "mpi4py",
    "pydantic",
    "rich",
    "scipy",
    "threadpoolctl",
    "tomli",
    "tomli_w",
    "typing_extensions",
}
"""What only extras install."""


def alone(script, absent=OTHERS):
    """Run Python without some packages; return the status and what it printed."""
    done = run_fresh(ALONE.format(absent=sorted(absent)) + script, forgotten=tuple(absent))
    return done.returncode, done.stdout + done.stderr


def test_layouts_need_no_extra():
    status, text = alone(
        """
grid = pb.Grid.squarest(4)
d = pb.MatrixDescriptor((100, 80), 16, grid)
problem = pb.MatmulProblem.gemm(100, 80, 60, grid, (16, 16, 16))
problem.validate()
pb.Level3Problem("trsm", problem.a[:60, :60], problem.b, problem.b, side="L").validate()
print(d[3], d.local_shape(3), d.to_scalapack is not None, pb.numroc(5, 2, 0, 0, 2), problem.faults())
print(len(pb.draw(d).svg) > 1000)
print(sorted(OTHERS & sys.modules.keys()))
""".replace("OTHERS", repr(OTHERS))
    )
    assert (status, text.splitlines()[-1:]) == (0, ["[]"]), text


@pytest.mark.parametrize(
    ("script", "absent", "missing", "extra"),
    [
        ("pb.load_problem('x.toml')", OTHERS, "pydantic", "cli"),
        ("pb.MatrixDescriptor((5, 5), 2, (1, 1)).to_toml()", OTHERS, "pydantic", "cli"),
        ("from pblasmp.cli import main; main()", OTHERS, "click", "cli"),
        ("pb.Context()", OTHERS, "threadpoolctl", "run"),
        ("pb.matmul", OTHERS, "threadpoolctl", "run"),
        ("pb.Context()", {"scipy"}, "scipy", "run"),
        (
            "import os; os.environ.update(PMI_RANK='0', PMI_SIZE='2'); pb.Context()",
            {"mpi4py"},
            "mpi4py",
            "mpi",
        ),
    ],
)
def test_what_is_missing_is_named_with_its_extra(script, absent, missing, extra):
    status, text = alone(script, absent)
    last = text.splitlines()[-1]
    assert status == 1
    assert missing in last
    assert f"pip install -e '{ROOT}[{extra}]'" in last


def test_errors_of_other_modules_pass():
    with pytest.raises(ZeroDivisionError), errors.required("tests", "cli"):
        print(1 / 0)
    with (
        pytest.raises(LibraryNotFoundError, match=r"tests need no_such_module: .*\[cli\]"),
        errors.required("tests", "cli"),
    ):
        import no_such_module  # noqa: F401
