# SPDX-License-Identifier: Apache-2.0
"""Test modules import helpers, never each other; benchmarks and tests share reference/ and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"tests", "benchmarks", "reference", "pblasmp"}


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports_of(path: Path) -> Iterator[str]:
    """Every module of this repository that the file imports, by its absolute name."""
    package = path.parent.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{start}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] in PACKAGES)


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", files("tests"), ids=label)
def test_tests_import_helpers_only(path):
    may = ["tests.helpers.", "reference.", "pblasmp"]
    if "benchmark" in path.name:  # tests of the benchmarks
        may.append("benchmarks")
    if path.parent.name == "chaos" or path.name == "test_cli_signals.py":  # they run those programs
        may.append("tests.chaos.")
    if label(path) == "tests/gpu/test_torch.py":  # the same cases on GPUs
        may.append("tests.mpi.torch.")
    wrong = [name for name in imports_of(path) if not name.startswith(tuple(may))]
    assert not wrong


@pytest.mark.parametrize("path", [*files("benchmarks"), *files("reference")], ids=label)
def test_benchmarks_import_no_tests(path):
    folder = path.relative_to(ROOT).parts[0]
    may = {"pblasmp", "reference", folder}
    assert {name.partition(".")[0] for name in imports_of(path)} <= may


@pytest.mark.parametrize("folder", ["unit", "mpi", "gpu"])
def test_folders_of_tests_hold_tests_only(folder):
    known = ("test_", "conftest.py", "__init__.py")
    assert [label(path) for path in files(f"tests/{folder}") if not path.name.startswith(known)] == []
