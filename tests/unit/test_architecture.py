# SPDX-License-Identifier: Apache-2.0
"""What holds the package (pblasmp/__init__.py) together: imports are light and go one way; names are whole."""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pblasmp as pb
from tests.helpers.fresh import run_fresh
from tests.helpers.sources import ROOT, source

PACKAGE = ROOT / "pblasmp"

LAYOUT_MAY_IMPORT = {
    "__future__", "bisect", "collections", "dataclasses", "enum", "functools", "itertools", "math",
    "operator", "re", "types", "typing", "typing_extensions", "numpy", "ml_dtypes", "pblasmp",
}  # fmt: skip

# The contract with users: these names, no others without a word here.
PUBLIC = {
    "Grid", "MatrixDescriptor", "MatmulProblem", "Level3Problem", "ParallelProblem", "FactorProblem",
    "numroc", "load_problem", "draw", "Context", "DistributedMatrix", "Epilogue", "Scales", "matmul", "plan",
    "verify", "Verification", "Plan", "Report", "Verdict", "algorithms", "allclose", "tune", "predict",
    "advise", "allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather",
    "PblasmpError", "ArgumentError", "ArgumentTypeError", "LayoutError", "RankMismatchError",
    "UnsupportedError", "FactorizationError", "LibraryNotFoundError", "StatusError", "ClosedError",
    "__version__",
}  # fmt: skip
BLAS = {
    "trsm", "trmm", "symm", "hemm", "syrk", "herk", "syr2k", "her2k", "syrkx", "herkx", "geadd", "tradd",
    "gemv", "symv", "hemv", "trmv", "trsv", "ger", "gerc", "syr", "her", "syr2", "her2", "dot", "dotc",
    "nrm2", "asum", "amax", "axpy", "scal", "copy", "swap",
}  # fmt: skip
LINALG = {
    "solve", "solve_triangular", "cholesky", "cho_factor", "cho_solve", "lu_factor", "lu_solve", "qr",
    "lstsq", "inv", "det", "slogdet", "norm", "cond", "cond_estimate", "matrix_rank", "pinv", "eigh", "eigvalsh",
    "svd", "svdvals", "LinAlgError", "LstsqResult", "QrFactors", "Refinement", "SvdResult",
}  # fmt: skip


SOURCES, BENCHMARKS = (sorted(folder.rglob("*.py")) for folder in (PACKAGE, ROOT / "benchmarks"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """Every module that the file imports, anywhere in it, by its absolute name."""
    for module, name in source(path).imports:
        within = f"{module}.{name}"
        yield within if within in MODULES or (module == "os" and name) else module


MODULES = {module_of(path): path for path in SOURCES}


def test_imports_go_one_way():
    """As the contracts in pyproject.toml have it."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_no_module_imports_itself_through_others():
    """Neither under TYPE_CHECKING nor within functions."""
    graph = {
        module: {each for each in imports_of(path) if each in MODULES and each != module}
        for module, path in MODULES.items()
    }
    graph["pblasmp"] = set()  # whose names are imported when they are first used
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_layout_is_pure():
    used = {
        m if m.startswith("os.") else m.partition(".")[0]
        for path in (PACKAGE / "layout").rglob("*.py")
        for m in imports_of(path)
    }
    assert used <= LAYOUT_MAY_IMPORT


def run_python(script: str) -> str:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_no_module_uses_private_names_of_contexts_and_matrices():
    """Modules below the public faces have those of Runtime and Handle."""
    private = re.compile(r"\b(?:ctx|context|Context|matrix)\._[a-z]\w*")
    others = MODULES.keys() - {"pblasmp.runtime.runtime"}
    found = {module: private.findall(MODULES[module].read_text()) for module in others}
    assert {module: names for module, names in found.items() if names} == {}


# Private names of other libraries that tests need.
OTHERS_PRIVATE = {
    "_core", "_C", "_add", "_apply", "_dynamo", "_exit", "_fields_", "_functorch", "_get_default_store",
    "_inductor", "_replace", "_repr_html_", "_sleep",
}  # fmt: skip


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def private_names(path):
    """The private names of other modules and objects that a file has: attributes, imports, and names in strings."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") not in ("self", "cls"):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call):
            if len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                yield str(node.args[1].value)  # of patch.object(where, name), setattr(where, name)
            yield from (each.arg for each in node.keywords if each.arg)  # of patch.multiple(where, name=...)


@pytest.mark.parametrize(
    "files", ["mpi/**/*.py", "gpu/*.py", "chaos/*.py", "helpers/gpu/*.py", "helpers/sequences/*.py",
              "helpers/*cases.py", "helpers/calls.py", "helpers/table.py"],
)  # fmt: skip
def test_tests_of_whole_calls_have_public_names(files):
    """What they need to look at inside is in tests/helpers/inside.py; tests of one module have the module's names."""
    private = re.compile("_[a-zA-Z]\\w*")
    found = {
        path.name: names
        for path in (ROOT / "tests").glob(files)
        if (names := {x for x in private_names(path) if private.fullmatch(x)} - OTHERS_PRIVATE)
    }
    assert found == {}


def defined(path):
    """The names of functions and classes, and all that is assigned, in a file."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield getattr(node, "attr", getattr(node, "id", ""))


def module_named(path):
    """The module that a test file is about: its first line names a file, or it is called as the module is."""
    line = re.search(r'^"""(.*)', path.read_text(encoding="utf-8"), re.MULTILINE)
    named = re.search(r"[\w/]+\.py\b", line[1]) if line else None
    name = named[0] if named else path.name.removeprefix("test_")
    return next((each for each in (*SOURCES, *BENCHMARKS) if f"{each}".endswith(f"/{name}")), None)


def private_elsewhere(path, of_package):
    """The package's private names in a test file that are not those of the module that it is about."""
    module, tree = module_named(path), tree_of(path)
    mine = {*defined(path), *(defined(module) if module else ())}
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    names = {*private_names(path), *(text.rpartition(".")[2] for text in texts if isinstance(text, str))}
    return names & (of_package - OTHERS_PRIVATE - mine)


def test_private_names_are_read_in_tests_of_their_module_alone(tmp_path):
    """Also in texts, but for the numbers of the docs, and the names below."""
    of_package = {name for path in SOURCES for name in defined(path) if re.match("_[a-zA-Z]", name)}
    folder = ROOT / "tests" / "unit"
    found = {path.name: private_elsewhere(path, of_package) for path in folder.rglob("test_*.py")}
    del found["test_doc_numbers.py"], found["test_architecture.py"]
    assert {name: names for name, names in found.items() if names} == {}

    other = tmp_path / "test_board.py"
    other.write_text(
        "from pblasmp.comm.agreement import _mark\nmine._state, mine._lines\nsetattr(x, '_watched', 1)"
    )
    assert private_elsewhere(other, of_package) == {"_mark", "_watched"}
    other.write_text('"""Votes (failures.py)."""\n' + other.read_text())
    assert private_elsewhere(other, of_package) == {"_mark", "_state", "_lines"}


def test_every_step_is_light():
    """One process imports pblasmp, lays out, gets ready to multiply for the command line, and is a rank without GPUs.

    Where CuPy is not installed, "auto" needs no module for GPUs to say so.
    """
    script = """
import sys, numpy
def libraries():
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if ".so" in line and "/lib-dynload/" not in line}
before, loaded = libraries(), set(sys.modules)
import pblasmp as pb
new = {name.partition(".")[0] for name in set(sys.modules) - loaded}
heavy = {"mpi4py", "cupy", "torch", "scipy", "cuda", "nccl", "nvshmem", "rich", "click"}
print("pblasmp", sorted(libraries() - before), sorted(new & heavy))

pb.MatrixDescriptor((5, 5), (2, 2), pb.Grid(1, 2)).local_shape(0)
print("layouts", sorted({"mpi4py", "scipy", "pydantic"} & sys.modules.keys()))

import pblasmp.cli.matmul, pblasmp.cli.reports  # ranks draw nothing, start nothing and list no versions
heavy = {"rich", "importlib.metadata", "statistics", "pydantic", "mpi4py", "scipy", "pblasmp.bindings"}
print("command line", sorted(heavy & sys.modules.keys()))

heavy = ("cupy", "cuda", "nccl", "nvshmem", "torch", "pblasmp.engines.gpu", "pblasmp.bindings")
for engine in ("host", "auto"):
    with pb.Context(engine=engine) as ctx:
        d = pb.MatrixDescriptor((8, 8), (2, 2), pb.Grid(1, 1))
        a = ctx.zeros(d)
        pb.plan("matmul", a, a).report()
        pb.blas.trsm(a, a, alpha=0)
        pb.allgather_matmul(a.local, a.local, ctx)
        found = [name for name in sys.modules if name.startswith(heavy)]
        print(engine, ctx.engine.name, ctx.engine.device, found)
"""
    assert run_python(script).splitlines() == [
        "pblasmp [] []",
        "layouts []",
        "command line []",
        "host host None []",
        "auto host None []",
    ]


def test_no_two_classes_have_one_name():
    """So that a search for the name finds the class; an underscore makes no other name."""
    named = Counter(name.lstrip("_") for path in SOURCES for name in source(path).classes)
    assert {name for name, count in named.items() if count > 1} == set()


def test_no_class_is_only_the_base_of_one_other():
    """It is the upper half of that class. One that is made somewhere, or is the type of something, is more."""
    derived = Counter(base for path in SOURCES for base in source(path).bases)
    classes = {name for path in SOURCES for name in source(path).classes if derived[name] == 1}
    for path in SOURCES:
        text = path.read_text()
        if any(name in text for name in classes):
            tree = ast.parse(text)
            bases = {each for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in node.bases}
            bases |= {each.value for each in bases if isinstance(each, ast.Subscript)}
            nodes = (each for each in ast.walk(tree) if isinstance(each, (ast.Name, ast.Attribute)))
            classes -= {getattr(each, "attr", getattr(each, "id", "")) for each in nodes if each not in bases}
    assert classes == set()


def test_no_two_modules_have_one_name():
    """So that a search for the name finds the module."""
    named = Counter(path.name for path in SOURCES if path.name != "__init__.py")
    assert {name for name, count in named.items() if count > 1} == set()


def test_public_names_are_the_contract():
    assert set(pb.__all__) == PUBLIC
    assert set(pb.blas.__all__) == set(dir(pb.blas)) == BLAS
    assert set(pb.linalg.__all__) == set(dir(pb.linalg)) == LINALG
    modules = {"blas", "layout", "linalg", "pblas", "tensor_parallel", "testing", "torch"}
    assert {name for name in dir(pb) if not name.startswith("__")} == PUBLIC - {"__version__"} | modules


def test_only_what_users_import_lists_its_names():
    """Elsewhere an underscore says what is private; a list would say it again. pb.blas takes over two lists."""
    listing = {
        name
        for name, path in MODULES.items()
        if path.name != "__init__.py" and "\n__all__ " in path.read_text()
    }
    users = "errors", "launch", "problems.files", "scalapack", "testing"
    assert listing == {f"pblasmp.{x}" for x in (*users, "blas.level3", "blas.vectors")}


def test_type_checkers_find_what_users_find():
    """The imports under TYPE_CHECKING are the names that ``__getattr__`` imports when they are first used."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname or alias.name: node.module for node in imports for alias in node.names}
    assert {name: seen.get(name) for name in pb._HOME} == pb._HOME


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
    done = run_fresh(script)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def public_callables() -> Iterator[tuple[str, str]]:
    names = [
        *sorted(PUBLIC - {"__version__"}),
        *(f"blas.{x}" for x in BLAS),
        *(f"linalg.{x}" for x in LINALG),
    ]
    for name in names:
        value = operator.attrgetter(name)(pb)
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


def test_every_file_names_its_license():
    files = [p for d in ("pblasmp", "tests", "examples", "benchmarks") for p in (ROOT / d).rglob("*.py")]
    missing = [p for p in files if not p.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")]
    assert not missing
