# SPDX-License-Identifier: Apache-2.0
"""Descriptor files: matrix products written down as TOML. descriptors/README.md explains the format. 0-based.

A file is checked in three steps, and each gathers every fault before it raises: the structure (keys, and the
kinds of their values), the values (do they make descriptors?) and the rules (is the product legal? That is
``MatmulProblem.validate``, and not part of loading).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..dtypes import scalar
from ..errors import LayoutError
from .descriptor import MatrixDescriptor
from .filekeys import Table, grid_faults, problem_faults
from .grid import Grid
from .problem import MatmulProblem

if TYPE_CHECKING:
    from os import PathLike

    from .problem import Op
    from .schemes import Scheme

__all__ = ["ProblemFile", "check", "find", "load_grid", "load_problem", "root"]

tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

Window = tuple[slice, slice]


@dataclass(frozen=True, slots=True)
class ProblemFile:
    """A matrix product as a descriptor file has it. Local.

    Attributes:
        path: where it was read.
        title, description: what it shows.
        problem: the product; an operand with a window is the sub-matrix.
        parents: by operand ("a", "b", "d" and maybe "c"), the whole matrix; with no window the operand.
        windows: by operand, the part that takes part: ``parents[x][windows[x]]`` is the operand.
        alpha, beta: the scalars of ``D = alpha op(A) op(B) + beta C``; complex only for complex matrices.
    """

    path: Path
    title: str
    description: str
    problem: MatmulProblem
    parents: Mapping[str, MatrixDescriptor]
    windows: Mapping[str, Window]
    alpha: complex
    beta: complex

    @property
    def nranks(self) -> int:
        """Ranks that the grids need."""
        return max(parent.grid.size for parent in self.parents.values())


def root() -> Path:
    """Return the directory of the descriptor files that come with pblasmp. Local.

    Raises:
        LayoutError: they are not there.
    """
    package = Path(__file__).parents[1]
    for place in (package / "descriptors", package.parent / "descriptors"):  # in a wheel, in a checkout
        if (place / "problem.schema.json").is_file():
            return place
    raise LayoutError(f"the descriptor files are neither in {package} nor beside it: install pblasmp again")


def find(kind: str) -> list[Path]:
    """Return the files that come with pblasmp, sorted: "problems", "invalid", "grids" or "sweeps". Local.

    Raises:
        LayoutError: there is no such kind.
    """
    if kind not in ("problems", "invalid", "grids", "sweeps"):
        raise LayoutError(f"descriptors: expected 'problems', 'invalid', 'grids' or 'sweeps', got {kind!r}")
    return sorted((root() / kind).glob("*.toml"))


def load_problem(file: str | PathLike[str]) -> ProblemFile:
    """Return the product written in ``file``: a path, or the name of one that comes with pblasmp. Local.

    Whether the product is legal is another question: ask ``.problem.validate()``.

    Raises:
        LayoutError: the file cannot be read or makes no problem; the message names the file and every fault.
    """
    path = path_of(file, "problems")
    found = _load(path)
    if isinstance(found, list):
        raise file_error(path, found)
    return found


def load_grid(file: str | PathLike[str]) -> Grid:
    """Return the process grid written in ``file``: a path, or the name of one that comes with pblasmp. Local.

    Raises:
        LayoutError: the file cannot be read or is no grid; the message names the file and every fault.
    """
    path = path_of(file, "grids")
    data, faults = read(path)
    faults = faults or grid_faults(data)
    if faults:
        raise file_error(path, faults)
    return _grid(data)


def check(file: str | PathLike[str]) -> list[str]:
    """Return everything that is wrong with a problem, grid or sweep file: no fault, no item. Local."""
    path = path_of(file, "problems")
    data, faults = read(path)
    if "grids" in data:
        from .sweeps import faults_of

        return faults_of(data)
    if faults or "nprow" in data or "npcol" in data:
        return faults or grid_faults(data)
    found = _load(path)
    return found if isinstance(found, list) else found.problem.faults()


def path_of(file: str | PathLike[str], kind: str) -> Path:
    """Return the path of a file, which may be the name of one of a ``kind`` that comes with pblasmp. Local."""
    path = Path(file)
    shipped = root() / kind / f"{file}.toml"
    return shipped if path.name == str(file) and not path.exists() and shipped.is_file() else path


def read(path: Path) -> tuple[Table, list[str]]:
    """Return what is in a file, or why it cannot be read. Local."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")), []
    except OSError as error:
        return {}, [f"cannot be read: {error.strerror}"]
    except RecursionError:
        return {}, ["not a TOML file: arrays or tables are nested too deep"]
    except ValueError as error:  # also integers of thousands of digits, which are no TOMLDecodeError
        return {}, [f"not a TOML file: {error}"]


def file_error(path: Path, faults: list[str]) -> LayoutError:
    """Return the error that names a file and all its faults. Local."""
    count = "a fault" if len(faults) == 1 else f"{len(faults)} faults"
    return LayoutError("\n  - ".join([f"{path}: {count} in this file:", *faults]))


def _load(path: Path) -> ProblemFile | list[str]:
    """Return the problem file, or every fault of its structure, or every fault of its values."""
    data, faults = read(path)
    faults = faults or problem_faults(data)
    if faults:
        return faults
    scheme: Scheme = data.get("scheme", "gemm")
    op_a, op_b = cast("tuple[Op, Op]", tuple(data.get("ops", "NN" if scheme == "gemm" else "TN")))
    made = _Operands(data)
    try:
        if scheme == "gemm":
            made.gemm(op_a, op_b)
        else:
            made.one_dimensional(scheme, op_a, op_b)
        if made.faults:
            return made.faults
        if "c" in data:
            made.put("c", _fields(made.parents["d"]), like="d")
        dtype = made.operands["d"].dtype
        alpha, beta = (
            _scalar(data.get(name, default), dtype, name) for name, default in (("alpha", 1), ("beta", 0))
        )
    except LayoutError as error:
        made.faults.append(str(error))
    if made.faults:
        return made.faults
    problem = MatmulProblem(**made.operands, op_a=op_a, op_b=op_b, scheme=scheme)
    title, description = data["title"], data.get("description", "").strip()
    return ProblemFile(path, title, description, problem, made.parents, made.windows, alpha, beta)


def _grid(value: str | Table) -> Grid:
    if isinstance(value, dict):
        return Grid(value["nprow"], value["npcol"], value.get("order", "row"))
    known = [path.stem for path in find("grids")]
    if value not in known:
        raise LayoutError(
            f"grid: expected one of {', '.join(known)}, or a table with nprow and npcol, got {value!r}"
        )
    return load_grid(value)


def _scalar(value: Any, dtype: Any, name: str) -> complex:
    return scalar(complex(*value) if isinstance(value, list) else value, dtype, name)


def _fields(descriptor: MatrixDescriptor) -> Table:
    return {field.name: getattr(descriptor, field.name) for field in fields(descriptor)}


def _stored(op: str, rows: int, cols: int) -> tuple[int, int]:
    """Return rows and columns of the stored matrix for those of op(matrix), and the other way round."""
    return (rows, cols) if op == "N" else (cols, rows)


class _Operands:
    """The operands of a problem file as they are made: an operand's own table goes before what all share."""

    def __init__(self, data: Table) -> None:
        self.data = data
        self.faults: list[str] = []
        self.parents: dict[str, MatrixDescriptor] = {}
        self.windows: dict[str, Window] = {}
        self.operands: dict[str, MatrixDescriptor] = {}

    def put(self, name: str, shared: Table, like: str = "") -> None:
        """Make operand ``name``, with the window of operand ``like`` if any, or note its faults."""
        own = dict(self.data.get(name, {}))
        ranges = own.pop("window", None)
        try:
            if "grid" in own:
                own["grid"] = _grid(own["grid"])
            parent = MatrixDescriptor(**{**shared, **own})
        except LayoutError as error:
            self.faults.append(f"{name}.{error}")
            return
        if ranges is None and like and "shape" not in own:
            window = self.windows[like]
        else:
            rows, cols = ranges or [[0, extent] for extent in parent.shape]
            for (start, stop), extent in ((rows, parent.shape[0]), (cols, parent.shape[1])):
                if not start <= stop <= extent:
                    self.faults.append(
                        f"{name}.window: expected a part of 0 to {extent}, got {start} to {stop}"
                    )
                    return
            window = slice(*rows), slice(*cols)
        self.parents[name], self.windows[name], self.operands[name] = parent, window, parent[window]

    def gemm(self, op_a: Op, op_b: Op) -> None:
        """Make A, B and D of a product on any layout; D follows A and B where nothing else says so."""
        data = self.data
        grid = _grid(data["grid"]) if "grid" in data else Grid.squarest(data["nranks"])
        orders = dict(zip("abd", data.get("order", "C") * 3, strict=False))
        shared = {"grid": grid, "source": data.get("source", (0, 0)), "dtype": data.get("dtype", "float64")}
        known: dict[str, Table] = {name: {**shared, "order": orders[name]} for name in "abd"}
        block = data.get("block")
        sizes = {
            "shape": [data[x] for x in "mnk"] if "m" in data else None,
            "block": [block] * 3 if isinstance(block, int) else block,
        }
        for key, size in sizes.items():
            if size is not None:
                m, n, k = size
                known["a"][key], known["b"][key], known["d"][key] = (
                    _stored(op_a, m, k),
                    _stored(op_b, k, n),
                    (m, n),
                )
        self.put("a", known["a"])
        self.put("b", known["b"])
        if self.faults:
            return
        a, b = self.operands["a"], self.operands["b"]
        for key in sizes:
            known["d"].setdefault(
                key, (_stored(op_a, *getattr(a, key))[0], _stored(op_b, *getattr(b, key))[1])
            )
        self.put("d", known["d"])

    def one_dimensional(self, scheme: Scheme, op_a: Op, op_b: Op) -> None:
        """Make A, B and D of a product in the layouts of a scheme, in any mix of memory orders."""
        data = self.data
        make = {
            "ag": MatmulProblem.allgather,
            "rs": MatmulProblem.reduce_scatter,
            "ar": MatmulProblem.allreduce,
        }
        orders = dict(zip("abd", data.get("order", "F") * 3, strict=False))
        turned = {name: orders[name] != orders["d"] for name in "abd"}  # made in D's order, then transposed
        flipped: dict[Op, Op] = {"N": "T", "T": "N", "C": "N"}
        p = make[scheme](
            data["m"],
            data["n"],
            data["k"],
            data["nranks"],
            flipped[op_a] if turned["a"] else op_a,
            flipped[op_b] if turned["b"] else op_b,
            dtype=data.get("dtype", "float32"),
            order=orders["d"],
        )
        for name, operand in (("a", p.a), ("b", p.b), ("d", p.d)):
            self.put(name, _fields(operand.T if turned[name] else operand))
