# SPDX-License-Identifier: Apache-2.0
"""The level-3 PBLAS: functions made from the table of routines, with PBLAS's arguments in their order."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import level3
from ..comm import agree_after
from ..dtypes import ELEMENT_TYPES, scalar
from ..engines.direct import FAMILIES
from ..errors import ArgumentError, short_repr
from ..layout.routines import ROUTINES as LEVEL3
from ..layout.routines import Routine
from ..matrix import DistributedMatrix
from ..products import matmul
from .arguments import Faults, as_routine, bound, signature_of
from .direct import DirectForm
from .grids import ProcessGrid
from .operands import PblasOperand, check_grid, check_sharing, entries, one_grid_of, staged

__all__ = [
    "DTYPE",
    "ROUTINES",
    "VECTORS",
    "PblasFunction",
    "PblasRoutine",
    "docstring",
    "function_of",
    "number_place",
    "takes_number",
    "variant",
]

PblasFunction = Callable[..., Any]
Values = dict[str, Any]

DTYPE = {row.blas: row.dtype for row in ELEMENT_TYPES.values() if row.blas}
"""Element types by PBLAS's letters."""

_OPTIONS = {
    "side": ("LR", '"L" or "R": sub(A) is on the left or on the right'),
    "uplo": ("UL", '"U" or "L": which triangle of it is used; the other is neither read nor written'),
    "diag": ("NU", '"N", or "U": its diagonal is taken as ones and not read'),
    "trans": ("NTC", '"N", "T" (transpose) or "C" (conjugate transpose)'),
}

VECTORS = ("x", "y")
"""The letters of vectors: rows or columns of matrices, which their increments tell apart."""

_SCALARS = ("alpha", "beta", "cfrom", "cto")
_PYTHON = {"trans": "op_a", "transa": "op_a", "transb": "op_b"}
_KEPT = {*_OPTIONS, "transa", "transb", "alpha", "beta"}


@dataclass(frozen=True, slots=True)
class PblasRoutine:
    """A level-3 routine as PBLAS has it.

    Attributes:
        name: without p and the letter of the type.
        letters: the types that have it.
        arguments: in PBLAS's order; "A" stands for a, ia, ja and desca; so do B and C for theirs. "X" and "Y" are
            vectors: "X" stands for x, ix, jx, descx and incx.
        shapes: by matrix, rows and columns and perhaps the option that, unless it is "N", exchanges them; or "side":
            square, of m rows for "L" and n for "R". By vector, its length, and perhaps its length otherwise and that
            option.
        formula: what it computes.
        python: the function of pblasmp that computes it.
        fixed: arguments that are the same in every call.
        trans: the letters that its trans may have, for real and for complex types.
        real: scalars that are real for every type.
        written: the matrices that are written, mostly one.
        note: more about the matrices, one sentence.
        beta: what the result is scaled by before the product is added, if that is no argument.
    """

    name: str
    letters: str
    arguments: str
    shapes: dict[str, str]
    formula: str
    python: Callable[..., object]
    fixed: Values = field(default_factory=dict)
    trans: tuple[str, str] = ("NTC", "NTC")
    real: str = ""
    written: str = "c"
    note: str = ""
    beta: complex | None = None

    @property
    def names(self) -> list[str]:
        """The arguments' names, in PBLAS's order."""
        out: list[str] = []
        for word in self.arguments.split():
            x = word.lower()
            out += [x, f"i{x}", f"j{x}", f"desc{x}"] if word.isupper() else [x]
            out += [f"inc{x}"] if x in VECTORS else []
        return out

    def options(self, values: Values) -> Values:
        """Return the options and scalars under pblasmp's names. Local."""
        return {
            _PYTHON.get(name, name): value for name, value in values.items() if name in _KEPT
        } | self.fixed

    def compute(self, values: Values, matrices: dict[str, DistributedMatrix]) -> None:
        """Write the result. Collective over the grid."""
        self.python(*matrices.values(), out=matrices[self.written], **self.options(values))

    @property
    def direct(self) -> tuple[str, dict[str, str], Values]:
        """What engines call it; by their operands, "d" among them, its matrices; and options that never change."""
        return self.python.__name__, {**{x: x for x in self.shapes}, "d": self.written}, self.fixed

    @property
    def numbers(self) -> tuple[str, ...]:
        """The arguments to which numbers are written."""
        return ()

    @property
    def returns(self) -> str:
        """The annotation of what it returns."""
        return "None"

    @property
    def callers(self) -> str:
        """The processes that must make a call, in words."""
        return "Collective over the grid."

    def is_local(self, values: Values, grid: ProcessGrid) -> bool:  # noqa: ARG002
        """Return whether a call, given its arguments, is computed without the grid's other processes. Local."""
        return False

    def form(self, full: str, dtype: np.dtype) -> Callable[[Sequence[Any]], Any] | None:
        """Return what computes calls if a glance at all of their arguments shows that they are legal. Local.

        It returns the result, or True if there is none; None and False as ``DirectForm.run`` does. None: there is no
        such form.
        """
        return _direct_form(self, full, dtype)

    @property
    def summary(self) -> str:
        """What it does, in words."""
        return f"Compute {self.formula}"

    @property
    def source(self) -> str:
        """The library that it is from, with a place for its name, and what it is called here."""
        name = self.python.__name__
        return f"PBLAS, {{}}; here ``pblasmp.{'' if name == 'matmul' else 'blas.'}{name}``"

    @property
    def unread(self) -> tuple[str, ...]:
        """The arguments that are taken as they are and may differ from process to process."""
        return ()

    def letters_of(self, name: str, dtype: np.dtype) -> str:
        """Return the letters that an option may have; empty if ``name`` is no option. Local."""
        if name == "trans":
            return self.trans[dtype.kind == "c"]
        return _OPTIONS[name][0] if name in _OPTIONS else "NTC" if name.startswith("trans") else ""

    @property
    def meanings(self) -> dict[str, str]:
        """What the arguments are that only this kind of routine has, in words."""
        return {}

    def check(self, faults: Faults, values: Values, grid: ProcessGrid) -> None:
        """Note what else is wrong with the arguments. Local."""

    def changes_nothing(self, values: Values) -> bool:
        """Return whether it leaves everything as it is, even the imaginary parts of a Hermitian diagonal. Local."""
        adds_nothing = values.get("alpha") == 0 or values.get("k") == 0
        return 0 in (values.get("m", 1), values["n"]) or (adds_nothing and values.get("beta", self.beta) == 1)

    def shape(self, matrix: str, values: Values) -> tuple[int, int]:
        """Return rows and columns of a matrix's part."""
        words = self.shapes[matrix].split()
        if matrix in VECTORS:
            length = values[words[0] if len(words) == 1 or values[words[2]] == "N" else words[1]]
            return (1, length) if values[f"is_row_{matrix}"] else (length, 1)
        if words == ["side"]:
            words = ["m", "m"] if values["side"] == "L" else ["n", "n"]
        rows, cols = (int(word) if word.isdigit() else values[word] for word in words[:2])
        return (cols, rows) if len(words) > 2 and values[words[2]] != "N" else (rows, cols)


def _of_row(name: str, row: Routine) -> PblasRoutine:
    """Return a routine of PBLAS as the table of routines says it is."""
    if row.shape == "sided":
        shapes, trans = {"a": "side", "b": "m n", "c": "m n"}, ("NTC", "NTC")
    elif row.shape == "updated":
        shapes = {"a": "n k trans", "b": "n k trans", "c": "n n"}
        trans = ("", "NC") if row.hermitian else ("NTC", "NT")
    else:
        shapes, trans = {"a": "m n trans", "c": "m n"}, ("NTC", "NTC")
    kind = "triangular" if row.triangular else "Hermitian" if row.hermitian else "symmetric"
    note = f"sub(A) is {kind}. " if row.shape == "sided" else ""
    if row.triangle == "d":
        note = f"Only one {'triangle' if row.shape == 'updated' else 'trapezoid'} of sub(C) is used. "
    return PblasRoutine(
        name, "cz" if row.hermitian else "sdcz", row.pblas, {x: shapes[x] for x in row.operands}, _formula(row),
        getattr(level3, name), trans=trans, real=" ".join(row.real), written=row.in_place, note=note,
    )  # fmt: skip


def _formula(row: Routine) -> str:
    """Return the definition in terms of PBLAS's sub-matrices; the result takes the place of B or C."""
    written = f"sub({row.in_place.upper()})"
    text = re.sub(r"\b[ABC]\b", r"sub(\g<0>)", row.formula)
    return f"{written} = X, with {text.replace('D', 'X')}" if row.solves else text.replace("D", written)


def _transposed(name: str, letters: str, op: str) -> PblasRoutine:
    """Return geadd for one transposition, which in PBLAS is a separate routine."""
    geadd = ROUTINES["geadd"]
    return replace(
        geadd, name=name, letters=letters, arguments=geadd.arguments.removeprefix("trans "),
        shapes={"a": "n m", "c": "m n"}, formula=geadd.formula.replace("op(sub(A))", f"sub(A)^{op.replace('C', 'H')}"),
        fixed={"op_a": op},
    )  # fmt: skip


_GEMM = PblasRoutine(
    "gemm", "sdcz", "transa transb m n k alpha A B beta C", {"a": "m k transa", "b": "k n transb", "c": "m n"},
    "sub(C) = alpha op(sub(A)) op(sub(B)) + beta sub(C)", matmul,
)  # fmt: skip

ROUTINES = {"gemm": _GEMM, **{name: _of_row(name, row) for name, row in LEVEL3.items() if row.pblas}}
"""The level-3 routines by name."""

ROUTINES |= {
    routine.name: routine
    for routine in (
        _transposed("tran", "sd", "T"),
        _transposed("tranu", "cz", "T"),
        _transposed("tranc", "cz", "C"),
    )
}


def variant(name: str, letter: str) -> PblasFunction:
    """Return the routine for one type, as a function with PBLAS's signature."""
    return function_of(ROUTINES[name], f"p{letter}{name}", DTYPE[letter])


def function_of(routine: PblasRoutine, full: str, dtype: np.dtype) -> PblasFunction:
    """Return a routine for one type under its full name, as a function with PBLAS's signature."""
    annotations = {each: _annotation(each, routine, dtype) for each in routine.names}
    signature = signature_of(annotations, routine.returns)
    names, form, tells = routine.names, routine.form(full, dtype), routine.returns != "None"
    count = len(names)

    def function(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != count:
            args = tuple(bound(full, signature, args, kwargs).values())
        done = None if form is None else form(args)
        if done is not None and done is not False:
            return done if tells else None
        return _run(routine, full, dtype, dict(zip(names, args, strict=True)), voted=done is False)

    return as_routine(function, full, signature, _docstring(routine, full, dtype))


def _direct_form(routine: PblasRoutine, full: str, dtype: np.dtype) -> Callable[[Sequence[Any]], Any] | None:
    """Return what runs the routine as a direct call, None if it is none."""
    name, passes, fixed = routine.direct
    if name not in FAMILIES:
        return None
    options = (each for each in routine.names if each in _OPTIONS or each.startswith("trans"))
    allowed = {each: routine.letters_of(each, dtype) for each in options}
    beta = 0.0 if routine.beta is None else routine.beta.real
    return DirectForm(
        full, name, routine.names, routine.shapes, passes, routine.written, routine.numbers, dtype, allowed, fixed,
        routine.real, beta,
    ).run  # fmt: skip


def _run(routine: PblasRoutine, full: str, dtype: np.dtype, given: Values, *, voted: bool) -> Any:
    """Check the arguments, agree on them, compute. Collective over the grid, unless the call is local."""
    faults = Faults(full, routine.names)
    grid = one_grid_of(faults, routine.shapes, given)
    read = partial(_read, routine, full, dtype, given, grid)
    if routine.is_local(given, grid):
        values, matrices = read({})
    else:
        values, matrices = agree_after(voted, partial(grid.context.agreement, full), read)
    if routine.changes_nothing(values):
        return None
    with grid.context.engine.on_device(), staged(matrices, routine.written) as used:
        return routine.compute(values, used)


def _read(
    routine: PblasRoutine, full: str, dtype: np.dtype, given: Values, grid: ProcessGrid, facts: dict[str, Any]
) -> tuple[Values, dict[str, DistributedMatrix]]:
    """Return the arguments in a standard form, and the matrices; add what must be equal to ``facts``. Local."""
    faults = Faults(full, routine.names)
    values = _checked(routine, faults, given, dtype)
    matrices = {}
    for name in routine.shapes:
        operand = values[name] = _operand(routine, faults, name, given, values)
        if not operand.desc or check_grid(faults, name, operand.desc, grid):
            operand.check(faults, grid)
    if not faults:
        for name in routine.shapes:
            matrix = values[name].matrix(faults, grid, dtype, written=name in routine.written)
            if matrix is not None:
                matrices[name] = matrix
        check_sharing(faults, matrices, routine.written)
    routine.check(faults, values, grid)
    faults.check()
    apart = (*routine.numbers, *routine.unread)
    facts.update({name: _fact(value) for name, value in values.items() if name not in apart})
    return values, matrices


def _checked(routine: PblasRoutine, faults: Faults, given: Values, dtype: np.dtype) -> Values:
    """Return the options, sizes and scalars, each in a standard form; note what is wrong with them."""
    values: Values = {}
    for name in routine.names:
        value = given[name]
        if name in routine.unread:
            values[name] = value
        elif allowed := routine.letters_of(name, dtype):
            everything = allowed == "ULA" and isinstance(value, str) and value[:1].upper() not in ("U", "L")
            values[name] = "A" if everything else faults.letter(name, value, allowed)
        elif name in ("m", "n", "k"):
            values[name] = faults.integer(name, value, 0)
        elif name in routine.numbers:
            values[name] = number_place(faults, name, value)
        elif name in ("irprnt", "icprnt"):
            values[name] = faults.integer(name, value, 0)
        elif name in _SCALARS:
            is_real = dtype.kind == "c" and name in routine.real.split()
            try:
                number = scalar(value, dtype, name)
                values[name] = number.real if is_real else number
                if is_real and number.imag != 0:
                    faults.add(name, f"expected a real number, got {short_repr(value)}")
            except ArgumentError as error:
                faults.add(name, str(error).partition(": ")[2])
    return values


def _operand(routine: PblasRoutine, faults: Faults, name: str, given: Values, values: Values) -> PblasOperand:
    i, j = (faults.integer(each, given[each], 1) for each in (f"i{name}", f"j{name}"))
    desc = entries(faults, f"desc{name}", given[f"desc{name}"])
    if name in VECTORS:
        increment = faults.integer(f"inc{name}", given[f"inc{name}"], instead=1)
        rows = desc[2] if desc else increment
        values[f"is_row_{name}"] = increment == rows
        if increment not in (1, rows):
            faults.add(f"inc{name}", f"expected 1 (a column), or M_ (a row), here {rows}, got {increment}")
    return PblasOperand(name, given[name], i, j, desc, routine.shape(name, values))


def takes_number(value: Any) -> bool:
    """Return whether a number can be written to an argument, or is only returned: None. Local."""
    return value is None or (isinstance(value, np.ndarray) and value.size == 1 and value.flags.writeable)


def number_place(faults: Faults, name: str, value: Any) -> NDArray[Any] | None:
    """Return the array to which a number is written; None if it is only returned. Local."""
    if takes_number(value):
        place: NDArray[Any] | None = value
        return place
    faults.add(name, f"expected a writeable NumPy array of one element, or None, got {short_repr(value)}")
    return None


def _fact(value: Any) -> Any:
    """Return what must be equal on every process: for a matrix, all but its context's number and its local array."""
    return (value.i, value.j, value.desc[2:8]) if isinstance(value, PblasOperand) else value


def _annotation(name: str, routine: PblasRoutine, dtype: np.dtype) -> str:
    if name in routine.numbers:
        return "NDArray[Any] | None"
    if name in routine.unread:
        return "Any"
    if routine.letters_of(name, dtype):
        return "str"
    if name in _SCALARS:
        return "complex" if dtype.kind == "c" and name not in routine.real.split() else "float"
    if name.startswith("desc"):
        return "Sequence[int]"
    return "Any" if name in routine.shapes else "int"


def _docstring(routine: PblasRoutine, full: str, dtype: np.dtype) -> str:
    """Return the text that help() shows."""
    written = " and ".join(f"sub({x.upper()})" for x in routine.written)
    tail = f" {written} {'are' if len(routine.written) > 1 else 'is'} written in place." if written else ""
    note = (
        f"{routine.callers} {routine.note}Indices are 1-based. Local arrays are in Fortran order, or have "
        f"one dimension, column after column.{tail}"
    )
    meanings = {name: _meaning(routine, name, dtype) for name in routine.names}
    returns = f"{' and '.join(routine.numbers) or 'the result'}." if routine.returns != "None" else ""
    source = routine.source.format(full.upper())
    raises = _RAISED[routine.callers.startswith("Local")]
    return docstring(f"{routine.summary}, in {dtype.name}.", note, meanings, returns, source, raises)


_RAISED = (
    (
        "ParameterError: an argument is illegal, on every process; its ``info`` says which.",
        "RankMismatchError: the processes gave different arguments.",
    ),
    (
        "ParameterError: an argument is illegal, on this process if the call is local; its ``info`` says which.",
    ),
)
"""What collective and local routines raise."""


def docstring(
    summary: str, note: str, meanings: Mapping[str, str], returns: str, source: str,
    raises: Sequence[str] = _RAISED[0],
) -> str:  # fmt: skip
    """Return the text that help() shows of a routine. Local.

    Args:
        summary: the first line.
        note: a paragraph.
        meanings: of the arguments, by name.
        returns: what it returns; "" for nothing.
        source: where the routine is documented.
        raises: what it raises, each with the reason.
    """
    lines = [summary, "", note, "", "Args:", *(f"    {name}: {text}" for name, text in meanings.items())]
    if returns:
        lines += ["", "Returns:", f"    {returns}"]
    lines += ["", "Raises:", *(f"    {each}" for each in raises), "", f"Source: {source}."]
    return "\n".join(
        part
        for line in lines
        for part in textwrap.wrap(line, 100, subsequent_indent=" " * (8 if line.startswith("    ") else 0))
        or [""]
    )


def _meaning(routine: PblasRoutine, name: str, dtype: np.dtype) -> str:
    x = name[-1].upper()
    if name in routine.meanings:
        return routine.meanings[name]
    if name == "trans":
        words = {"N": '"N"', "T": '"T" (transpose)', "C": '"C" (conjugate transpose)'}
        return " or ".join(words[letter] for letter in routine.trans[dtype.kind == "c"]) + "."
    if name in _OPTIONS or name.startswith("trans"):
        return f"{_OPTIONS.get(name, _OPTIONS['trans'])[1]}."
    if name in ("m", "n", "k"):
        return f"{size_text(name, routine.shapes, routine.written)}, at least 0."
    if name in ("alpha", "beta"):
        return f"a{' real' * (dtype.kind != 'c' or name in routine.real.split())} number."
    if name.startswith("desc"):
        return f"nine integers that describe {x}, see ``descinit``; eleven if ``DTYPE_`` is 2."
    if name in routine.numbers:
        return (
            f"{_number_text(name, dtype)}, or None. Processes that have no part of the process row or column of a "
            "vector get 0."
        )
    if name[:3] == "inc":
        return f"1: sub({x}) is a column; ``M_`` of desc{x.lower()}: it is a row."
    if name in VECTORS:
        first, *rest = routine.shapes[name].split()
        other = f', {rest[0]} unless {rest[1]} is "N"' if rest else ""
        return f"local array of {x}; sub({x}) is a vector of {first} elements{other}."
    if name in routine.shapes:
        return f"local array of {x}; sub({x}) is {_shape_text(routine.shapes[name].split())}."
    return f"{'row' if name[0] == 'i' else 'column'} of {x}, from 1, where sub({x}) begins."


def size_text(name: str, shapes: Mapping[str, str], written: Container[str]) -> str:
    """Return what a size is, such as "rows of sub(C)". Local.

    Args:
        name: the size's.
        shapes: as routines have them.
        written: the matrices that are written, which are named rather than others.
    """
    words = {x: shape.split() for x, shape in shapes.items()}

    def key(x: str) -> tuple[bool, ...]:
        return x in VECTORS, len(words[x]) > 2, words[x][:2] != [name, name], x not in written

    for x in sorted(words, key=key):
        if name in words[x][:2]:
            part = f"op(sub({x.upper()}))" if len(words[x]) > 2 and x not in VECTORS else f"sub({x.upper()})"
            if x in VECTORS:
                return f"elements of {part}"
            square = words[x][:2] == [name, name]
            return f"{'rows and columns' if square else ('rows', 'columns')[words[x].index(name)]} of {part}"
    raise AssertionError(f"{name} is not in {shapes}")


def _number_text(name: str, dtype: np.dtype) -> str:
    """Return what the array is to which a number is written."""
    if name == "indx":
        return (
            "an array of one integer, to which the index in all of X is written, from 1: of a row, or of a column if "
            "sub(X) is a row"
        )
    kind = np.empty(0, dtype).real.dtype if name in ("norm2", "asum") else dtype
    return f"an array of one element, in {kind.name}, to which the result is written"


def _shape_text(words: list[str]) -> str:
    if words == ["side"]:
        return 'm x m if side is "L", n x n if it is "R"'
    rows, cols, *option = words
    swapped = f', {cols} x {rows} unless {option[0]} is "N"' if option else ""
    return f"{rows} x {cols}{swapped}"
