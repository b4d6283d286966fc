# SPDX-License-Identifier: Apache-2.0
"""The wheel carries the descriptor files that users take, which it finds there, and machine code; no test data."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from pblasmp.problems import files
from tests.helpers.fresh import run_fresh

ROOT = Path(__file__).parents[3]


def test_wheel_contains_and_finds_the_descriptors(tmp_path):
    """And what ``.ci/kernels.py`` has compiled, which git ignores."""
    tree = tmp_path / "tree"
    for folder in ("pblasmp", "descriptors"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", "shipped"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    shipped = tree / "pblasmp/engines/gpu/kernels/shipped/sm_90.zip"
    shipped.parent.mkdir()
    shipped.write_bytes(b"machine code")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=tree, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(str(shipped.relative_to(tree))) == b"machine code"
        names = {name for name in archive.namelist() if name.startswith("pblasmp/descriptors/")}
        archive.extractall(tmp_path / "site")
    there = {
        path.relative_to(files.root())
        for kind in ("problems", "grids", "models", "machines")
        for path in files.find(kind)
    }
    there |= {
        Path("README.md"),
        *(Path(f"{name}.schema.json") for name in ("problem", "routine", "factorization", "parallel")),
    }
    assert names == {f"pblasmp/descriptors/{path.as_posix()}" for path in there}
    site = str(tmp_path / "site")
    done = run_fresh(
        f"sys.path.insert(0, {site!r})\n"
        "from pblasmp.problems import files; print(files.root(), len(files.find('problems')))"
    )
    assert done.stderr == ""
    assert done.stdout.strip() == f"{site}/pblasmp/descriptors {len(files.find('problems'))}"


def test_metadata_have_no_links_that_lead_nowhere(tmp_path):
    """A package index shows the README without the files around it."""
    command = [sys.executable, "-m", "hatchling", "metadata", "readme"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    links = re.findall(r"\]\\?\(([^)]+)\)", done.stdout)
    assert "docs/quickstart.md" in done.stdout
    assert all(link.startswith("https://") for link in links)
