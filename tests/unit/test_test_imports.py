# SPDX-License-Identifier: Apache-2.0
"""Test modules import helpers, never each other; benchmarks and tests share reference/ and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.sources import ROOT, source

PACKAGES = {"tests", "benchmarks", "reference", "pblasmp"}


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports_of(path: Path) -> list[str]:
    """Every module of this repository that the file imports, by its absolute name."""
    names = (f"{module}.{name}" if name else module for module, name in source(path).imports)
    return [name for name in names if name.partition(".")[0] in PACKAGES]


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_tests_import_helpers_only():
    wrong = {}
    for path in files("tests"):
        may = ["tests.helpers.", "reference.", "pblasmp"]
        if "benchmark" in path.name:  # tests of the benchmarks
            may.append("benchmarks")
        if path.parent.name == "chaos" or path.name == "test_cli_signals.py":  # they run those programs
            may.append("tests.chaos.")
        if label(path) == "tests/gpu/test_torch.py":  # the same cases on GPUs
            may.append("tests.mpi.torch.")
        wrong[label(path)] = [name for name in imports_of(path) if not name.startswith(tuple(may))]
    assert {path: names for path, names in wrong.items() if names} == {}


@pytest.mark.parametrize("folder", ["benchmarks", "reference"])
def test_benchmarks_import_no_tests(folder):
    may = ("pblasmp", "reference", folder)
    wrong = {
        label(path): [name for name in imports_of(path) if name.partition(".")[0] not in may]
        for path in files(folder)
    }
    assert {path: names for path, names in wrong.items() if names} == {}


@pytest.mark.parametrize("folder", ["unit", "mpi", "gpu"])
def test_folders_of_tests_hold_tests_only(folder):
    known = ("test_", "conftest.py", "__init__.py")
    assert [label(path) for path in files(f"tests/{folder}") if not path.name.startswith(known)] == []
