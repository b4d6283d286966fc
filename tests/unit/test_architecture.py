# SPDX-License-Identifier: Apache-2.0
"""What holds the package together: imports point one way and are light; names and docstrings are whole."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pblasmp as pb

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pblasmp"

# From the bottom up: what a part of the package may import of the package, besides itself.
BOTTOM = {"errors", "dtypes"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "dtypes": {"errors"},
    "layout": BOTTOM,
    "epilogue": BOTTOM | {"layout"},
    "scales": BOTTOM | {"layout"},
    "comm": BOTTOM | {"layout"},
    "memory": BOTTOM | {"layout"},
    "bindings": BOTTOM | {"layout"},
    "engines": BOTTOM | {"layout", "epilogue", "scales", "comm", "memory", "bindings"},
    "drawing": BOTTOM | {"layout"},
    "launch": {"errors"},
    "scalapack": BOTTOM | {"layout"},
}
RUNNING = {"context", "matrix", "npy", "report", "standins", "plans", "products", "level3", "level3_plan"}
RUNNING |= {"arrays", "tensor_parallel", "pblas"}
MAY_IMPORT |= {part: set(MAY_IMPORT) | RUNNING for part in RUNNING}
MAY_IMPORT["torch"] = {"errors", "layout", "comm", "context", "tensor_parallel"}
MAY_IMPORT["info"] = BOTTOM | {"bindings", "launch", ""}
MAY_IMPORT |= {part: {*MAY_IMPORT, "cli", ""} for part in ("cli", "__main__")}
MAY_IMPORT[""] = set(MAY_IMPORT)  # pblasmp/__init__.py

LAYOUT_MAY_IMPORT = {
    *("__future__", "bisect", "collections", "dataclasses", "difflib", "enum", "functools", "importlib"),
    *("itertools", "json", "math", "operator", "pathlib", "re", "sys", "types", "typing", "tomllib", "tomli"),
    *("numpy", "ml_dtypes", "pblasmp", "os.PathLike"),
}

# The contract with users: these names, no others without a word here.
PUBLIC = {
    *("Grid", "MatrixDescriptor", "MatmulProblem", "Level3Problem", "numroc"),
    *("Context", "DistributedMatrix", "Epilogue", "Scales", "matmul", "plan_matmul", "plan"),
    *("trsm", "trmm", "symm", "hemm", "syrk", "herk", "syr2k", "her2k", "syrkx", "herkx", "geadd", "tradd"),
    *("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather"),
    *("PblasmpError", "LayoutError", "RankMismatchError", "UnsupportedError"),
    *("LibraryNotFoundError", "StatusError", "ClosedError", "__version__"),
}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """Every module that the file imports, anywhere in it, by its absolute name."""
    package = path.parent.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join([*base, *([node.module] if node.module else [])])
            if name == "pblasmp":
                yield from (f"{name}.{a.name}" if a.name in MAY_IMPORT else name for a in node.names)
            elif name == "os":
                yield from (f"os.{alias.name}" for alias in node.names)
            else:
                yield name


def part_of(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_point_down(path):
    part = part_of(module_of(path))
    assert part in MAY_IMPORT, f"say in this test which layer pblasmp.{part} belongs to"
    used = {part_of(m) for m in imports_of(path) if m.partition(".")[0] == "pblasmp"}
    assert used <= MAY_IMPORT[part] | {part}


@pytest.mark.parametrize("path", sorted((PACKAGE / "layout").rglob("*.py")), ids=module_of)
def test_layout_is_pure(path):
    used = {m if m.startswith("os.") else m.partition(".")[0] for m in imports_of(path)}
    assert used <= LAYOUT_MAY_IMPORT


def run_python(script: str) -> str:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_importing_is_light():
    script = """
import sys, numpy
def libraries():
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if ".so" in line and "/lib-dynload/" not in line}
before, loaded = libraries(), set(sys.modules)
import pblasmp
new = {name.partition(".")[0] for name in set(sys.modules) - loaded}
heavy = {"mpi4py", "cupy", "torch", "scipy", "cuda", "nccl", "nvshmem", "rich", "click"}
print(sorted(libraries() - before), sorted(new & heavy))
"""
    assert run_python(script) == "[] []\n"


def test_layouts_need_no_mpi():
    script = """
import sys
import pblasmp as pb
pb.MatrixDescriptor((5, 5), (2, 2), pb.Grid(1, 2)).local_shape(0)
print("mpi4py" in sys.modules, "scipy" in sys.modules)
"""
    assert run_python(script) == "False False\n"


def test_public_names_are_the_contract():
    assert set(pb.__all__) == PUBLIC
    assert set(dir(pb)) >= PUBLIC


def test_public_names_survive_the_import_of_every_module():
    """A module called like a public name hides it, if nobody has asked for the name before."""
    script = """
import importlib, inspect, pkgutil
import pblasmp as pb
for module in pkgutil.walk_packages(pb.__path__, "pblasmp."):
    if module.name != "pblasmp.__main__":
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
print([name for name in pb.__all__ if inspect.ismodule(getattr(pb, name))])
"""
    assert run_python(script) == "[]\n"


def public_callables() -> Iterator[tuple[str, str]]:
    for name in sorted(PUBLIC - {"__version__"}):
        value = getattr(pb, name)
        if inspect.isclass(value) and issubclass(value, Exception):
            continue
        yield f"pb.{name}", value.__doc__ or ""
        if inspect.isclass(value):
            for attribute, member in vars(value).items():
                function = getattr(member, "__func__", member)
                if not attribute.startswith("_") and inspect.isfunction(function):
                    yield f"pb.{name}.{attribute}", function.__doc__ or ""


def test_public_callables_say_who_must_call_them():
    silent = [
        name for name, text in public_callables() if "Local" not in text and "Collective over" not in text
    ]
    assert not silent


def test_every_file_names_its_licence():
    files = [p for d in ("pblasmp", "tests", "examples", "benchmarks") for p in (ROOT / d).rglob("*.py")]
    missing = [p for p in files if not p.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")]
    assert not missing
