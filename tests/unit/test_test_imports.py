# SPDX-License-Identifier: Apache-2.0
"""Test modules import helpers, never each other; benchmarks and tests share reference/ and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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


def names_of(path: Path) -> set[str]:
    """What a module defines, or imports, at its top level."""
    found = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {each.asname or each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found


def taken_by(path: Path) -> Iterator[tuple[str, str]]:
    """The modules of tests that a file imports from, or as they are, and a name of theirs that it uses."""
    tree, modules = [*ast.walk(ast.parse(path.read_text()))], {}
    for node in tree:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests."):
            for each in node.names:
                modules[each.asname or each.name] = f"{node.module}.{each.name}"
                yield node.module, each.name
    for node in tree:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr


def test_what_tests_on_gpus_take_of_others_is_there():
    """Nothing else says so where there is no GPU."""
    missing = []
    for path in files("tests/gpu"):
        for module, name in taken_by(path):
            file = ROOT / f"{module.replace('.', '/')}.py"
            if file.exists() and name not in names_of(file):
                missing.append(f"{label(path)}: {module}.{name}")
    assert missing == []


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


def test_every_file_of_tests_says_what_it_is_about():
    silent = [label(path) for path in files("tests") if not ast.get_docstring(ast.parse(path.read_text()))]
    assert [name for name in silent if not name.endswith("__init__.py")] == []
