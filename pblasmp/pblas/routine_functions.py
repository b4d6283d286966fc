# SPDX-License-Identifier: Apache-2.0
"""The level-3 PBLAS: functions made from the table of routines, with PBLAS's arguments in their order."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ..blas import level3
from ..comm import agree_after
from ..dtypes import ELEMENT_TYPES, real_dtype, scalar
from ..engines.direct import FAMILIES
from ..errors import ArgumentError, short_repr
from ..layout.routines import GEMM, Routine
from ..layout.routines import ROUTINES as LEVEL3
from ..matrix.distributed import DistributedMatrix
from ..matrix.products import matmul
from .arguments import Faults, as_routine, bound, number_place, signature_of
from .direct import DirectForm
from .grids import ProcessGrid
from .operands import PblasOperand, check_grid, check_sharing, entries, one_grid_of, staged

PblasFunction = Callable[..., Any]
Values = dict[str, Any]

DTYPE = {row.blas: row.dtype for row in ELEMENT_TYPES.values() if row.blas}
"""Element types by PBLAS's letters."""

_LEGAL = {"side": "LR", "uplo": "UL", "diag": "NU"}
_MEANINGS = {
    "side": '"L" or "R": sub(A) is on the left or on the right.',
    "uplo": '"U" or "L": which triangle of it is used; the other is neither read nor written.',
    "diag": '"N", or "U": its diagonal is taken as ones and not read.',
}

VECTORS = ("x", "y")
"""The letters of vectors: rows or columns of matrices, which their increments tell apart."""

_SCALARS = ("alpha", "beta", "cfrom", "cto")
_REALS = ("vl", "vu", "abstol", "orfac")
_PYTHON = {"trans": "op_a", "transa": "op_a", "transb": "op_b"}
_KEPT = {*_LEGAL, *_PYTHON, "alpha", "beta"}


def names_of(arguments: str) -> list[str]:
    """Return the names of arguments; a matrix stands for four of them, a vector for five. Local."""
    out: list[str] = []
    for word in arguments.split():
        x = word.lower()
        out += [x, f"i{x}", f"j{x}", f"desc{x}"] if word.isupper() else [x]
        out += [f"inc{x}"] if x in VECTORS else []
    return out


@dataclass(frozen=True, slots=True)
class PblasRoutine:
    """A routine of level 3 as PBLAS has it, and how its arguments are read; other kinds of routines derive from it.

    Attributes:
        name: without p and the letter of the type.
        letters: the types that have it.
        arguments: in PBLAS's order; "A" stands for a, ia, ja and desca; so do B and C for theirs. "X" and "Y" are
            vectors: "X" stands for x, ix, jx, descx and incx.
        shapes: by matrix, its size as ``layout.sizes`` has it. By vector, its length, and perhaps its length otherwise
            and the option that exchanges them.
        summary: what it does, in words.
        python: the function of pblasmp that computes it.
        source: the library that it is from, with a place for its name, and what it is called here.
        direct: what engines call it; by their operands, "d" among them, its matrices; and options that never change.
        trans: the letters that its trans may have, for real and for complex types.
        legal: those of its other options.
        sizes: the arguments that are sizes.
        real: scalars that are real for every type.
        written: the matrices that are written, mostly one.
        numbers: the arguments to which numbers are written.
        unread: those that are taken as they are and may differ from process to process.
        optional: those that are None if they are left out; they come last.
        note: more about the matrices, one sentence.
        meanings: what the arguments are that only this kind of routine has, in words.
        beta: what the result is scaled by before the product is added, if that is no argument.
        returns, answer: what it returns, as an annotation and in words.
        callers: the processes that must make a call, in words.
        of_pblas: entries of descriptors are counted as in PBLAS, not as in ScaLAPACK.
        stages: whether GPUs compute with copies of arrays on the host.
    """

    name: str
    letters: str
    arguments: str
    shapes: dict[str, str]
    summary: str
    python: Callable[..., object]
    source: str
    direct: tuple[str, dict[str, str], Values] = ("", {}, {})
    trans: tuple[str, str] = ("NTC", "NTC")
    legal: Mapping[str, str] = field(default_factory=lambda: _LEGAL)
    sizes: tuple[str, ...] = ("m", "n", "k")
    real: str = ""
    written: str | tuple[str, ...] = "c"
    numbers: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    note: str = ""
    meanings: Mapping[str, str] = field(default_factory=dict)
    beta: complex | None = None
    returns: str = "None"
    answer: str = "the result"
    callers: str = "Collective over the grid."
    of_pblas: bool = True
    stages: bool = True

    @property
    def names(self) -> list[str]:
        """The arguments' names, in PBLAS's order."""
        return names_of(self.arguments)

    def options(self, values: Values) -> Values:
        """Return the options and scalars under pblasmp's names. Local."""
        given = {_PYTHON.get(name, name): value for name, value in values.items() if name in _KEPT}
        return given | self.direct[2]

    def compute(self, values: Values, matrices: dict[str, DistributedMatrix]) -> Any:
        """Write the result. Collective over the grid."""
        self.python(*matrices.values(), out=matrices[self.written[0]], **self.options(values))

    def is_local(self, given: Values, grid: ProcessGrid) -> bool | None:  # noqa: ARG002
        """Return whether a call is computed without the grid's other processes; None if illegal arguments hide it.

        Local.
        """
        return False

    @property
    def patience(self) -> float:
        """For how many seconds a process whose arguments hide it waits to learn what call others make."""
        return math.inf

    def form(self, full: str, dtype: np.dtype) -> Callable[[Sequence[Any]], Any] | None:
        """Return what computes calls if a glance at all of their arguments shows that they are legal. Local.

        It returns the result, or True if there is none; None and False as ``DirectForm.run`` does. None: there is no
        such form.
        """
        return DirectForm(self, full, dtype).run if self.direct[0] in FAMILIES else None

    def run(self, full: str, dtype: np.dtype, given: Values, *, voted: bool) -> Any:
        """Check the arguments, agree on them, compute. Collective over the grid, unless the call is local.

        ``voted``: this rank has tried a direct call, on which the ranks did not agree.
        """
        grid = one_grid_of(self.faults(full), self.shapes, given, self.patience)
        read = partial(_read, self, full, dtype, given, grid)
        local = self.is_local(given, grid)
        if local is None:  # others are told if they wait for it; if they have gone on, they never will
            local = not grid.context.is_awaited(full, self.patience)
        if local:
            values, matrices = read({})
        else:
            values, matrices = agree_after(voted, partial(grid.context.agreement, full), read)
        if self.asks(given) or self.changes_nothing(values):
            return self.nothing(given)
        with grid.context.engine.on_device():
            if not self.stages:
                return self.compute(values, matrices)
            with staged(matrices, self.written) as used:
                return self.compute(values, used)

    def letters_of(self, name: str, dtype: np.dtype) -> str:
        """Return the letters that an option may have; empty if ``name`` is no option. Local."""
        if name == "trans":
            return self.trans[dtype.kind == "c"]
        return self.legal.get(name, "NTC" if name.startswith("trans") else "")

    def faults(self, full: str) -> Faults:
        """Return the faults of a call, none yet. Local."""
        return Faults(full, self.names, of_pblas=self.of_pblas)

    def check_values(self, faults: Faults, given: Values, values: Values, dtype: np.dtype) -> None:
        """Note what else is wrong with what are no matrices, and add it to ``values``. Local."""

    def check(self, faults: Faults, values: Values, grid: ProcessGrid) -> None:
        """Note what else is wrong with the arguments. Local."""

    def asks(self, given: Values) -> bool:  # noqa: ARG002
        """Return whether a call only asks how large workspaces must be. Local."""
        return False

    def read(self, values: Values) -> Sequence[str]:  # noqa: ARG002
        """Return the matrices that are looked at. Local."""
        return [*self.shapes]

    def beyond(self, matrix: str, values: Values) -> tuple[str, str] | None:  # noqa: ARG002
        """Return the arguments that are at fault if a matrix's part is larger than the matrix; see ``PblasOperand``."""
        return None

    def nothing(self, given: Values) -> Any:  # noqa: ARG002
        """Return what a call returns that computes nothing. Local."""
        return None

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
    trans = ("NTC", "NTC")
    if row.shape == "updated":
        trans = ("", "NC") if row.hermitian else ("NTC", "NT")
    note = f"sub(A) is {row.kind}. " if row.shape == "sided" else ""
    if row.triangle == "d":
        note = f"Only one {'triangle' if row.shape == 'updated' else 'trapezoid'} of sub(C) is used. "
    words = {option: word for word, option in _PYTHON.items() if word in row.pblas.split()}
    shapes = {x: re.sub(r"op_\w", lambda found: words[found[0]], row.sizes.texts[x]) for x in row.operands}
    python, called = (matmul, "matmul") if row is GEMM else (getattr(level3, name), name)
    return PblasRoutine(
        name, "cz" if row.hermitian else "sdcz", row.pblas, shapes, f"Compute {_formula(row)}", python,
        f"PBLAS, {{}}; here ``pblasmp.{'' if row is GEMM else 'blas.'}{called}``",
        (called, {**{x: x for x in shapes}, "d": row.in_place}, {}),
        trans=trans, real=" ".join(row.real), written=row.in_place, note=note,
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
        shapes={"a": "n m", "c": "m n"}, summary=geadd.summary.replace("op(sub(A))", f"sub(A)^{op.replace('C', 'H')}"),
        direct=(*geadd.direct[:2], {"op_a": op}),
    )  # fmt: skip


ROUTINES = {name: _of_row(name, row) for name, row in {"gemm": GEMM, **LEVEL3}.items() if row.pblas}
"""The level-3 routines by name."""

ROUTINES |= {
    routine.name: routine
    for routine in (
        _transposed("tran", "sd", "T"),
        _transposed("tranu", "cz", "T"),
        _transposed("tranc", "cz", "C"),
    )
}


def functions_of(routines: Iterable[PblasRoutine]) -> dict[str, PblasFunction]:
    """Return routines for all their types, as functions by their full names. Local."""
    return {
        f"p{letter}{each.name}": function_of(each, f"p{letter}{each.name}", DTYPE[letter])
        for each in routines
        for letter in each.letters
    }


def function_of(routine: PblasRoutine, full: str, dtype: np.dtype) -> PblasFunction:
    """Return a routine for one type under its full name, as a function with PBLAS's signature."""
    annotations = {each: _annotation(each, routine, dtype) for each in routine.names}
    signature = signature_of(annotations, routine.returns, routine.optional)
    names, form, tells = routine.names, routine.form(full, dtype), routine.returns != "None"
    count, least = len(names), len(names) - len(routine.optional)

    def function(*args: Any, **kwargs: Any) -> Any:
        if kwargs or not least <= len(args) <= count:
            args = tuple(bound(full, signature, args, kwargs).values())
        elif len(args) < count:
            args += (None,) * (count - len(args))
        done = None if form is None else form(args)
        if done is not None and done is not False:
            return done if tells else None
        return routine.run(full, dtype, dict(zip(names, args, strict=True)), voted=done is False)

    return as_routine(function, full, signature, _docstring(routine, full, dtype))


def _read(
    routine: PblasRoutine, full: str, dtype: np.dtype, given: Values, grid: ProcessGrid, facts: dict[str, Any]
) -> tuple[Values, dict[str, DistributedMatrix]]:
    """Return the arguments in a standard form, and the matrices; add what must be equal to ``facts``. Local."""
    faults, matrices = routine.faults(full), {}
    asks = routine.asks(given)
    if routine.optional:
        facts["sizes of workspaces"] = "requested" if asks else "not requested"
    if asks:
        routine.check_values(faults, given, {}, dtype)
        faults.check()
        return {}, {}
    values = _checked(routine, faults, given, dtype)
    for name in routine.read(values):
        operand = values[name] = _operand(routine, faults, name, given, values)
        if not operand.desc or check_grid(faults, name, operand.desc, grid):
            operand.check(faults, grid)
    if not faults:
        for name in routine.read(values):
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
        elif name in routine.sizes:
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
    routine.check_values(faults, given, values, dtype)
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
    shape, beyond = routine.shape(name, values), routine.beyond(name, values)
    return PblasOperand(name, given[name], i, j, desc, shape, beyond)


def _fact(value: Any) -> Any:
    """Return what must be equal on every process: for a matrix, all but its context's number and its local array."""
    return (value.i, value.j, value.desc[2:8]) if isinstance(value, PblasOperand) else value


def _annotation(name: str, routine: PblasRoutine, dtype: np.dtype) -> str:
    if name in _REALS:
        return "float"
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
    returns = f"{routine.answer}." if routine.returns != "None" else ""
    source = routine.source.format(full.upper())
    raises = _RAISED[routine.callers.startswith("Local")]
    summary = f"{routine.summary}, in {dtype.name}."
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


def _meaning(routine: PblasRoutine, name: str, dtype: np.dtype) -> str:
    x = (
        name.removeprefix("desc") if name[:4] == "desc" else name[1:] if name not in routine.shapes else name
    ).upper()
    if name in routine.meanings:
        return routine.meanings[name]
    if name == "trans":
        words = {"N": '"N"', "T": '"T" (transpose)', "C": '"C" (conjugate transpose)'}
        return " or ".join(words[letter] for letter in routine.trans[dtype.kind == "c"]) + "."
    if name.startswith("trans"):
        return '"N", "T" (transpose) or "C" (conjugate transpose).'
    if name in _MEANINGS:
        return _MEANINGS[name]
    if name in routine.sizes:
        return f"{_size_text(name, routine.shapes, routine.written)}, at least 0."
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
        x = name[3:].upper()
        return f"1: sub({x}) is a column; ``M_`` of desc{x.lower()}: it is a row."
    if name in VECTORS:
        first, *rest = routine.shapes[name].split()
        other = f', {rest[0]} unless {rest[1]} is "N"' if rest else ""
        return f"local array of {x}; sub({x}) is a vector of {first} elements{other}."
    if name in routine.shapes:
        return f"local array of {x}; sub({x}) is {_shape_text(routine.shapes[name].split())}."
    return f"{'row' if name[0] == 'i' else 'column'} of {x}, from 1, where sub({x}) begins."


def _size_text(name: str, shapes: Mapping[str, str], written: Container[str]) -> str:
    """Return what a size is, such as "rows of sub(C)". Local.

    Matrices that are ``written`` are named rather than others.
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
    kind = real_dtype(dtype) if name in ("norm2", "asum") else dtype
    return f"an array of one element, in {kind.name}, to which the result is written"


_EXTENTS = {"longer": "max(m, n)", "least": "min(m, n)", "order": '(m if side is "L", n if it is "R")'}
"""Extents that only ScaLAPACK's routines have, in words."""


def _shape_text(words: list[str]) -> str:
    if words == ["side"]:
        return 'm x m if side is "L", n x n if it is "R"'
    rows, cols, *option = (_EXTENTS.get(word, word) for word in words)
    swapped = f', {cols} x {rows} unless {option[0]} is "N"' if option else ""
    return f"{rows} x {cols}{swapped}"


MISSING = {
    "agemv, asymv, ahemv, atrmv": "products of absolute values: `abs(A)` first",
    "blacs_set, blacs_setup, blacs_abort, blacs_freebuff": "nothing to set: `gridexit` ends a grid",
    "sl_init": '`gridinit(None, "Row", nprow, npcol)`',
    "sl_gridreshape": "`blacs_gridmap`",
    "sys2blacs_handle, blacs2sys_handle, free_blacs_system_handle": "`gridinit` takes an mpi4py communicator",
    "slboot, slenable, sldisable, sltimer, slcombine, slinquire, dwalltime00, dcputime00": (
        "`time.perf_counter`, `time.process_time`, mpi4py's reductions"
    ),
    "gesd2d, gerv2d, trsd2d, trrv2d, gebs2d, gebr2d, trbs2d, trbr2d, gsum2d, gamx2d, gamn2d": "mpi4py's own calls",
    "pb_topget, pb_topset, pilaenv, pjlaenv": "nothing to tune: `algo=` takes another algorithm",
    "chk1mat, pchk1mat, pchk2mat, pxerbla": "every call here checks its arguments on all processes",
    "pielset, pielget, pigemr2d, pitrmr2d, pilaprnt": "integers: in float64 they are exact up to 2^53",
    "lamch": "`numpy.finfo`",
    "laread, lawrite": "`ctx.load`, `A.save`",
    "matadd": "`geadd`",
    "rscl, srscl, drscl": "`scal`",
    "elset2": "`elget`, then `elset`",
    "lanhs": "`lange`, with zeros below the subdiagonal",
    "lassq, lacon, laqge, laqsy, lacgv": "`A.norm()`; of the others ScaLAPACK's own",
    "gecon, pocon, trcon": "`pb.linalg.cond_estimate(a)`",
    "gesvx, posvx, gerfs, porfs, geequ, poequ": (
        "`pb.linalg.solve`, with refinement as in the example; ScaLAPACK's own"
    ),
    "gelqf, geqlf, gerqf, geqpf, tzrzf, ggqrf, ggrqf": "`pb.linalg.qr`, of `a` or `a.T`; others ScaLAPACK's own",
    "orglq, orgql, orgrq, unglq, ungql, ungrq": "with those: ScaLAPACK's own",
    "ormlq, ormql, ormrq, ormrz, ormbr, ormhr, ormtr, unmlq, unmql, unmrq, unmrz, unmbr, unmhr, unmtr": (
        "with those, and with reductions: ScaLAPACK's own"
    ),
    "lapiv, lapv2, laswp": "`pb.linalg.lu_solve((lu, piv), b)` exchanges rows itself",
    "gbtrf, gbtrs, gbsv, pbtrf, pbtrs, pbsv, dbtrf, dbtrs, dbsv, dttrf, dttrs, dtsv, pttrf, pttrs, ptsv": (
        "band matrices: ScaLAPACK's own"
    ),
    "gebrd, gehrd, gebal, sytrd, syntrd, syttrd, hetrd, hentrd, hettrd, sygst, syngst, hegst, hengst": (
        "reductions: ScaLAPACK's own"
    ),
    "hseqr, stebz, stedc, stein, trevc, trord, trsen": "eigenvalues of reduced matrices: ScaLAPACK's own",
}
"""Names of ScaLAPACK that are not here, without P and the letter of the type, and what to use."""

_PAGE = 'see "Porting from ScaLAPACK" (docs/porting.md)'


def instead_of(name: str) -> str:
    """Return what an error says of a name, in lower case, that is not here; "" if it is none of ScaLAPACK's. Local."""
    routine = re.fullmatch("p[sdcz]([a-z][a-z0-9]+)", name)
    message = re.fullmatch("[sdczi]([a-z]+2d)", name)  # of BLACS
    forms = {name, *(found[1] for found in (routine, message) if found)}
    for names, text in MISSING.items():
        if forms & {*names.split(", ")}:
            return f": {text.replace('`', '')}; {_PAGE}"
    return f": if ScaLAPACK has it, call ScaLAPACK's own on the same memory; {_PAGE}" if routine else ""
