# SPDX-License-Identifier: Apache-2.0
"""Descriptor files: problems as TOML, and layers of models. descriptors/README.md explains the format. 0-based.

Loading a file checks its structure and its values. Whether the problem is legal is a separate question, which the
problem's ``validate`` answers.
"""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Any, TypeAlias

from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    LayoutError,
    LibraryNotFoundError,
    faults_text,
    required,
    short_repr,
)
from ..layout.descriptor import MatrixDescriptor
from ..layout.factor_problem import FactorProblem
from ..layout.grid import Grid, as_grid
from ..layout.level3_problem import Level3Problem
from ..layout.parallel import ParallelProblem
from ..layout.problem import MatmulProblem
from ..layout.schemes import Form
from .schema import GridTable, Table, kind_of, problem_faults, table_faults
from .tables import Window, operands_in

__all__ = [
    "MOST_BYTES",
    "Layer",
    "ProblemFile",
    "check",
    "excess",
    "find",
    "load_grid",
    "load_model",
    "load_problem",
    "load_problem_file",
    "load_table",
    "root",
    "to_toml",
]

with required("descriptor files", "cli"):
    tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    import tomli_w

Source: TypeAlias = "str | PathLike[str] | IO[str] | IO[bytes]"
Text: TypeAlias = "str | bytes"

AnyProblem: TypeAlias = MatmulProblem | Level3Problem | FactorProblem | ParallelProblem


@dataclass(frozen=True, slots=True)
class ProblemFile:
    """A problem as a descriptor file has it. Local.

    Attributes:
        path: the file that was read.
        title, description: what it shows.
        problem: a product, a routine, a factorization or a tensor-parallel product; an operand with a window is the
            sub-matrix.
        parents: by operand ("a", "b", "c", "d"), the whole matrix; without a window, the operand itself. A
            tensor-parallel product has none.
        windows: by operand, the part that is used: ``parents[x][windows[x]]`` is the operand.
        alpha, beta: the scalars of a product, ``D = alpha op(A) op(B) + beta C``; complex only for complex matrices.
    """

    path: Path
    title: str
    description: str
    problem: Any
    parents: Mapping[str, MatrixDescriptor]
    windows: Mapping[str, Window]
    alpha: complex = 1
    beta: complex = 0

    @property
    def nranks(self) -> int:
        """Number of ranks that it is for, or that its grids need."""
        if isinstance(self.problem, ParallelProblem):
            return self.problem.size
        return max(parent.grid.size for parent in self.parents.values())


def root() -> Path:
    """Return the directory of the descriptor files that come with pblasmp, or raise LibraryNotFoundError. Local."""
    package = Path(__file__).parents[1]
    for place in (package / "descriptors", package.parent / "descriptors"):  # in a wheel, in a checkout
        if (place / "problem.schema.json").is_file():
            return place
    raise LibraryNotFoundError(
        f"the descriptor files are neither in {package} nor next to it: install pblasmp again"
    )


def find(kind: str) -> list[Path]:
    """Return the files that come with pblasmp, sorted: "problems", "grids", "models" or "machines". Local.

    Raises:
        LayoutError: there is no such kind.
    """
    kinds = "problems", "grids", "models", "machines"
    if kind not in kinds:
        raise ArgumentError(
            f"descriptors: expected one of {', '.join(map(repr, kinds))}, got {short_repr(kind)}"
        )
    return sorted((root() / kind).glob("*.toml"))


def load_problem(file: Source) -> AnyProblem:
    """Return the problem written in a descriptor file: one that ``to_toml`` or you have written. Local.

    Whether a product of matrices, a level-3 routine or a factorization is legal is a separate question: call its
    ``validate``.

    Args:
        file: a path; the name of a file that comes with pblasmp; "-" for standard input; or an open file.

    Raises:
        LayoutError: the file cannot be read or holds no problem; the message names the file and every fault.

    Example:
        >>> pb.load_problem("grid-2x2").d.grid.shape
        (2, 2)

    See Also:
        MatmulProblem.gemm, to make one of sizes.
    """
    problem: AnyProblem = load_problem_file(file).problem
    return problem


def load_problem_file(file: Source) -> ProblemFile:
    """Return the problem written in a descriptor file, with its title, windows and scalars. Local.

    Args:
        file: as ``load_problem`` takes it.

    Raises:
        LayoutError: the file cannot be read or holds no problem; the message names the file and every fault.
    """
    return problem_in(*_read(file))


def load_grid(file: Source) -> Grid:
    """Return the process grid written in ``file``, a path or the name of one that comes with pblasmp. Local.

    Raises:
        LayoutError: the file cannot be read or is not a grid; the message names the file and every fault.
    """
    path, text, fault = _read(file, "grids")
    data, faults = _parsed(text, fault)
    if faults := faults or table_faults(data, GridTable):
        raise _error(path, faults)
    return as_grid(data)


def check(file: Source) -> list[str]:
    """Return everything that is wrong with a problem or grid file; empty if nothing is. Local."""
    return faults_in(*_read(file)[1:])


def faults_in(text: Text, fault: str = "") -> list[str]:
    """Return everything that is wrong with the text of a problem or grid, unless a ``fault`` is known. Local."""
    data, faults = _parsed(text, fault)
    if faults:
        return faults
    if "nprow" in data or "npcol" in data:
        return table_faults(data, GridTable)
    kind = kind_of(data)
    if faults := problem_faults(data, kind):
        return faults
    made = operands_in(kind, data)
    return made.faults or made.problem.faults()


def load_table(file: str | PathLike[str]) -> Table:
    """Return the contents of a file; ArgumentError if it cannot be read, or is not a TOML file. Local."""
    table, faults = _parsed(*_read(Path(file))[1:])
    if faults:
        raise ArgumentError(f"{file}: {faults[0]}")
    return table


def _error(path: Path, faults: list[str]) -> LayoutError:
    """Return the error that names a file and all its faults. Local."""
    return LayoutError(faults_text(str(path), faults))


def read_text(file: Source) -> Text:
    """Return what is in a problem's file; LayoutError if it cannot be read. Local."""
    path, text, fault = _read(file)
    if fault:
        raise _error(path, [fault])
    return text


def _read(file: Source, kind: str = "problems") -> tuple[Path, Text, str]:
    """Return a file's name, what is in it, not much more than a descriptor file can have, and why it cannot be read."""
    opened: Any = file
    path: Path | None = None
    if isinstance(file, str) and file == "-":
        name, opened = "<stdin>", getattr(sys.stdin, "buffer", sys.stdin)
    elif isinstance(file, (str, PathLike)) and str(file):
        path, shipped = Path(file), root() / kind / f"{file}.toml"
        if path.name == str(file) and not path.exists() and shipped.is_file():
            path = shipped
        name = str(path)
    else:
        if not hasattr(opened, "read"):
            raise ArgumentTypeError(f"file: expected a path, '-' or an open file, got {short_repr(file)}")
        given = getattr(opened, "name", None)
        name = given if isinstance(given, str) else f"<{type(file).__name__}>"
    text: Text = b""
    fault = ""
    try:
        with nullcontext(opened) if path is None else path.open("rb") as opened:
            text = opened.read(MOST_BYTES + 1)
    except OSError as error:
        fault = f"cannot be read: {error.strerror or error}"
        near = difflib.get_close_matches(str(file), [each.stem for each in find("problems")], 1)
        if near and isinstance(error, FileNotFoundError):
            fault += f": did you mean {near[0]!r}?"
    except ValueError as error:  # a path with a zero byte, text that is not UTF-8
        fault = f"cannot be read: {error}"
    if len(text) > MOST_BYTES:
        fault = f"not a descriptor file: longer than {MOST_BYTES >> 20} MiB"
    return Path(name), text, fault


def _parsed(text: Text, fault: str = "") -> tuple[Table, list[str]]:
    """Return the table in a text, or its faults: that which is known, or why it is none. Local."""
    try:
        text = text if isinstance(text, str) else text.decode()
        if not fault and (more := excess(text)):
            fault = f"not a descriptor file: {more}"
        return ({}, [fault]) if fault else (tomllib.loads(text), [])
    except RecursionError:
        return {}, ["not a TOML file: its lists or tables are nested too deeply"]
    except ValueError as error:  # also UTF-8, integers of thousands of digits
        return {}, [f"not a TOML file: {error}"]


def problem_in(path: Path, text: Text, fault: str = "") -> ProblemFile:
    """Return the problem in the text of a file. Local.

    LayoutError if there is a ``fault`` already, or the text holds no problem; it names the file and every fault.
    """
    data, faults = _parsed(text, fault)
    kind = kind_of(data)
    if faults := faults or problem_faults(data, kind):
        raise _error(path, faults)
    made = operands_in(kind, data)
    if made.faults:
        raise _error(path, made.faults)
    title, description = data["title"], data.get("description", "").strip()
    return ProblemFile(path, title, description, made.problem, made.parents, made.windows, **made.scalars)


def to_toml(data: Mapping[str, Any]) -> str:
    """Return a table of plain values as the text of a file. Local."""
    return tomli_w.dumps(data)


@dataclass(frozen=True, slots=True)
class Layer:
    """One linear layer that is split over ranks.

    Attributes:
        name: its name in the model.
        product: the tensor-parallel product that it is, by its name in ``FORMS``.
        outputs, inputs: sizes of the whole layer.
    """

    name: str
    product: Form
    outputs: int
    inputs: int

    def shape(self, tokens: int, ranks: int) -> tuple[int, int, int]:
        """Return tokens, outputs (per rank if these are split) and inputs. Local.

        LayoutError if outputs or inputs cannot be split evenly over the ranks.
        """
        splits = self.product in ("allgather_matmul", "matmul_allgather")
        extent = self.outputs if splits else self.inputs
        if extent % ranks:
            what = "outputs" if splits else "inputs"
            raise LayoutError(f"{self.name}: {extent} {what} cannot be split evenly over {ranks} ranks")
        return tokens, self.outputs // ranks if splits else self.outputs, self.inputs


def load_model(name: str) -> list[Layer]:
    """Return the layers of a model that comes with pblasmp; ArgumentError if there is no such model. Local."""
    files = {path.stem: path for path in find("models")}
    if name not in files:
        raise ArgumentError(f"model: expected one of {', '.join(files)}, got {short_repr(name)}")
    return [Layer(**layer) for layer in load_table(files[name])["layers"]]


# The memory and the time of reading a TOML file are to be within a small multiple of its size. Python's tomllib keeps
# every beginning of a dotted key, about a kilobyte for each table, and reads numbers with a regular expression that
# remembers each digit. So what no descriptor file has is refused before it is parsed.
MOST_BYTES = 1 << 22
_MOST_PARTS = 8  # of a dotted key
_MOST_KEYS = 4000
_MOST_LISTS = 100_000
_LONGEST_WORD = 10_000  # characters

_ESCAPES = re.compile(r'\\["\\]')  # outside of a string there are none, and in '...' they do not matter
# An end that is missing is a fault that tomllib finds; here a string then goes to the end of the line or text, so that
# no character is looked at twice.
_STRINGS = re.compile(
    r'"""[\s\S]*?(?:"{3,5}|\Z)'
    r"|'''[\s\S]*?(?:'{3,5}|\Z)"
    r'|"[^"\n]*"?'
    r"|'[^'\n]*'?"
    r"|\#[^\n]*|[ \t\r]+"
)
_WORDS = re.compile(r"[^\n,=\[\]{}]+")
_HEADERS = re.compile(r"^\[[^,\n]*$", re.MULTILINE)


def excess(text: str) -> str:
    """Return what a TOML text has more of than any descriptor file; an empty string if nothing. Local."""
    text = _ESCAPES.sub("", text)
    bare = _STRINGS.sub(lambda found: "s" if found[0][0] in "\"'" else "", text)
    keys = bare.count("=") + sum(1 for _ in _HEADERS.finditer(bare))
    if keys > _MOST_KEYS:
        return f"it has {keys} keys, expected at most {_MOST_KEYS}"
    lists = bare.count("[") + bare.count("{")
    if lists > _MOST_LISTS:
        return f"it has {lists} lists and tables, expected at most {_MOST_LISTS}"
    for found in _WORDS.finditer(bare):
        word = found[0]
        if word.count(".") >= _MOST_PARTS:
            return f"a dotted key has {word.count('.') + 1} parts, expected at most {_MOST_PARTS}"
        if len(word) > _LONGEST_WORD:
            return f"a key or a number has {len(word)} characters, expected at most {_LONGEST_WORD}"
    return ""
