# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK's factorisations and solves under their own names: functions made from a table."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import factorisations
from ..errors import FactorisationError
from ..matrix import DistributedMatrix
from .arguments import Faults
from .grids import ProcessGrid
from .operands import Operand, check_sharing, entries, grid_of
from .routines import DTYPE

__all__ = ["ROUTINES", "factoriser"]

Values = dict[str, Any]
Compute = Callable[["FactorCall"], None]


@dataclass(frozen=True, slots=True)
class ScalapackRoutine:
    """A routine as ScaLAPACK has it.

    Attributes:
        arguments: in ScaLAPACK's order, but for INFO; "A" stands for a, ia, ja and desca; so do B and C for theirs.
        shapes: by matrix, its rows and columns.
        written: the matrices that are written.
        compute: what it does.
        text: what it does, in words.
        letters: the types that have it.
    """

    arguments: str
    shapes: dict[str, str]
    written: str
    compute: Compute
    text: str
    letters: str = "sdcz"

    @property
    def names(self) -> list[str]:
        """The arguments' names, in ScaLAPACK's order."""
        out: list[str] = []
        for word in self.arguments.split():
            x = word.lower()
            out += [x, f"i{x}", f"j{x}", f"desc{x}"] if word.isupper() else [x]
        return [*out, "info"]


@dataclass(frozen=True, slots=True)
class FactorCall:
    """A call of a routine, checked and agreed on: its options and sizes, and its matrices by letter."""

    grid: ProcessGrid
    values: Values
    matrices: dict[str, DistributedMatrix]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def a(self) -> DistributedMatrix:
        """sub(A)."""
        return self.matrices["a"]

    @property
    def b(self) -> DistributedMatrix:
        """sub(B)."""
        return self.matrices["b"]


def _potrf(call: FactorCall) -> None:
    factorisations.cholesky(call.a, call["uplo"], out=call.a)


def _potrs(call: FactorCall) -> None:
    factorisations.cho_solve(call.a, call.b, call["uplo"], out=call.b)


def _posv(call: FactorCall) -> None:
    factorisations.solve(call.a, call.b, "pos", uplo=call["uplo"], factor=call.a, out=call.b)


ROUTINES = {
    "potrf": ScalapackRoutine(
        "uplo n A", {"a": "n n"}, "a", _potrf, "Replace a triangle of sub(A) by its Cholesky factor",
    ),
    "potrs": ScalapackRoutine(
        "uplo n nrhs A B", {"a": "n n", "b": "n nrhs"}, "b", _potrs,
        "Replace sub(B) by the solution of sub(A) X = sub(B), with sub(A) as potrf has left it",
    ),
    "posv": ScalapackRoutine(
        "uplo n nrhs A B", {"a": "n n", "b": "n nrhs"}, "ab", _posv,
        "Replace a triangle of sub(A) by its Cholesky factor, and sub(B) by the solution of sub(A) X = sub(B)",
    ),
}  # fmt: skip
"""The routines by name, without p and the letter of the type."""

_OPTIONS = {"uplo": "UL", "diag": "NU", "trans": "NTC", "side": "LR"}
_SIZES = ("m", "n", "k", "nrhs")
_MEANINGS = {
    "uplo": '"U" or "L": which triangle of sub(A) is used; the other is neither read nor written',
    "n": "a size, at least 0: see the matrices",
    "nrhs": "the number of right-hand sides, at least 0",
    "info": "an array of one integer to which INFO is written; None: it is only returned",
}
_LEFT_OUT = {"info"}


def factoriser(name: str, letter: str) -> Callable[..., int]:
    """Return a routine for one type, as a function with ScaLAPACK's signature. Local."""
    routine, full, dtype = ROUTINES[name], f"p{letter}{name}", DTYPE[letter]
    signature = inspect.Signature(
        [
            inspect.Parameter(
                each,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=None if each in _LEFT_OUT else inspect.Parameter.empty,
                annotation=_annotation(each, routine),
            )
            for each in routine.names
        ],
        return_annotation="int",
    )

    def function(*args: Any, **kwargs: Any) -> int:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        info = _run(full, routine, dtype, bound.arguments)
        if bound.arguments["info"] is not None:
            bound.arguments["info"][...] = info
        return info

    function.__name__ = function.__qualname__ = full
    function.__module__ = __name__.rpartition(".")[0]
    function.__doc__ = _docstring(routine, full, dtype)
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _run(full: str, routine: ScalapackRoutine, dtype: np.dtype, given: Values) -> int:
    """Check the arguments, agree on them, compute, and return INFO. Collective over the grid."""
    faults = Faults(full, routine.names)
    grid = grid_of([given[f"desc{x}"] for x in routine.shapes])
    if grid is None:
        for x in routine.shapes:
            desc = entries(faults, f"desc{x}", given[f"desc{x}"])
            if desc:
                faults.add(f"desc{x}", f"{desc[1]} is not a context of this process", 2)
        raise faults.error()
    with grid.context.agreement(full) as facts:
        values = _options(routine, faults, given)
        matrices = _matrices(routine, faults, given, values, grid, dtype, facts)
        faults.check()
        facts.update(values)
    if values["n"] == 0:
        return 0
    try:
        routine.compute(FactorCall(grid, {**given, **values}, matrices))
    except FactorisationError as error:
        return error.index + 1
    return 0


def _options(routine: ScalapackRoutine, faults: Faults, given: Values) -> Values:
    """Return the options and sizes, each in a standard form; note what is wrong with them."""
    values: Values = {}
    for name in routine.names:
        if name in _OPTIONS:
            values[name] = faults.letter(name, given[name], _OPTIONS[name])
        elif name in _SIZES:
            values[name] = faults.integer(name, given[name], 0)
    return values


def _matrices(
    routine: ScalapackRoutine,
    faults: Faults,
    given: Values,
    values: Values,
    grid: ProcessGrid,
    dtype: np.dtype,
    facts: Values,
) -> dict[str, DistributedMatrix]:
    """Return the matrices by letter; note what is wrong with them, and the facts that must be equal on all ranks."""
    matrices: dict[str, DistributedMatrix] = {}
    operands: dict[str, Operand] = {}
    for name, shape in routine.shapes.items():
        i, j = (faults.integer(each, given[each], 1) for each in (f"i{name}", f"j{name}"))
        desc = entries(faults, f"desc{name}", given[f"desc{name}"])
        rows, cols = (values[each] for each in shape.split())
        operands[name] = operand = Operand(name, given[name], i, j, desc, (rows, cols))
        facts[name] = i, j, desc[2:8]
        if desc and grid_of([desc]) is not grid:
            faults.add(f"desc{name}", f"{desc[1]} is not the context of the other matrices", 2)
        else:
            operand.check(faults, grid)
    if faults:
        return {}
    for name, operand in operands.items():
        matrix = operand.matrix(faults, grid, dtype, written=name in routine.written)
        if matrix is not None:
            matrices[name] = matrix
    for name in routine.written:
        check_sharing(faults, matrices, name)
    return matrices


def _annotation(name: str, routine: ScalapackRoutine) -> str:
    if name in _OPTIONS:
        return "str"
    if name.startswith("desc"):
        return "Sequence[int]"
    return "Any" if name in routine.shapes or name in _LEFT_OUT else "int"


def _docstring(routine: ScalapackRoutine, full: str, dtype: np.dtype) -> str:
    """Return the text that help() shows."""
    lines = [
        f"{routine.text}, in {dtype.name}.",
        "",
        (
            "Collective over the grid. Indices are 1-based. Local arrays are in Fortran order, or have one dimension, "
            "column after column; they are written in place."
        ),
        "",
        "Args:",
        *(f"    {name}: {_meaning(routine, name)}." for name in routine.names),
        "",
        "Returns:",
        "    INFO: 0, or i > 0 if the factor's diagonal element i (from 1) shows that there is no solution.",
        "",
        "Raises:",
        "    ParameterError: an argument is illegal, on every process; its ``info`` says which.",
        "    RankMismatchError: the processes gave different arguments.",
        "",
        f"Source: ScaLAPACK, {full.upper()}.",
    ]
    return "\n".join(
        part
        for line in lines
        for part in textwrap.wrap(line, 100, subsequent_indent=" " * (8 if line.startswith("    ") else 0))
        or [""]
    )


def _meaning(routine: ScalapackRoutine, name: str) -> str:
    if name in _MEANINGS:
        return _MEANINGS[name]
    x = name[-1].upper()
    if name.startswith("desc"):
        return f"nine integers that describe {x}, see ``descinit``"
    if name in routine.shapes:
        return f"local array of {x}; sub({x}) is {' x '.join(routine.shapes[name].split())}"
    return f"{'row' if name[0] == 'i' else 'column'} of {x}, from 1, where sub({x}) begins"
