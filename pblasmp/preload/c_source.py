# SPDX-License-Identifier: Apache-2.0
"""The C library that is loaded into ScaLAPACK programs: ``library.c`` and a function for each routine of the tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

import numpy as np

from .. import pblas
from ..layout.routines import VECTOR_ROUTINES
from ..pblas.factorizations import ROUTINES as FACTORIZATIONS
from ..pblas.routine_functions import DTYPE, ROUTINES
from ..pblas.scalapack_routine import BESIDE, SIZES, ScalapackRoutine
from ..pblas.vector_functions import ROUTINES as VECTORS

_RESULTS = ("dot", "asum", "norm2", "amax", "indx", "info")  # one number each, which the routine writes


@dataclass(frozen=True, slots=True)
class Row:
    """A routine of the library.

    Attributes:
        arguments: their names, in the order of the routine's.
        matrices: those of the arguments that are local arrays of matrices or vectors.
        beside: the arrays beside A, of one element for each of its local rows (0) or columns (1).
        sizes: the arguments that ask for the size of a workspace if they are -1.
        real: scalars that are real for every type.
        dtype: of the matrices.
        volume: the number of multiplications in C, from the addresses a0, a1 and so on; 0 for a routine that moves at
            least as much as it computes; -1 for levels 1 and 2, which ScaLAPACK itself calls on a part of the grid.
        of_c: whether the library has the name that C calls, by which integers are passed as values. Fortran's calls it.
    """

    arguments: list[str]
    matrices: tuple[str, ...]
    beside: dict[str, int]
    sizes: tuple[str, ...]
    real: tuple[str, ...]
    dtype: np.dtype
    volume: str
    of_c: bool = False

    def kind(self, name: str) -> str:
        """Return what an argument is: a "letter" or "integer", whose value Python gets; else it gets the address.

        That of a "scalar", "result", "descriptor" or "array", of an array "beside" A, or "unused". Local.
        """
        if name in ("side", "uplo", "diag") or name.startswith("trans"):
            return "letter"
        if name in ("alpha", "beta"):
            return "scalar"
        if name.startswith("desc"):
            return "descriptor"
        if name in _RESULTS:
            return "result"
        if name in self.matrices:
            return "array"
        if name in self.beside:
            return "beside"
        return "unused" if name in ("work", "iwork") else "integer"


def _rows() -> Iterator[tuple[str, Row]]:
    for name, routine in ROUTINES.items():
        names, volume = routine.names, _volume(routine.names)
        for letter in routine.letters:
            real = tuple(routine.real.split())
            yield f"p{letter}{name}", Row(names, tuple(routine.shapes), {}, (), real, DTYPE[letter], volume)
    for name, row in FACTORIZATIONS.items():
        beside = {each: axis for each, axis in BESIDE.items() if each in row.names}
        sizes = tuple(each for each in row.names if each in SIZES)
        volume = _volume_of_factors(row)
        for letter in row.letters:
            dtype = DTYPE[letter]
            yield f"p{letter}{name}", Row(row.names, tuple(row.shapes), beside, sizes, (), dtype, volume)
    for vectors in VECTOR_ROUTINES.values():
        for name, letter in vectors.names.items():
            routine = VECTORS[name]
            real = tuple(routine.real.split())
            yield name, Row(routine.names, tuple(routine.shapes), {}, (), real, DTYPE[letter], "-1")
    for move in ("gemr2d", "trmr2d"):
        for letter in "sdcz":
            name = f"p{letter}{move}"
            names = list(signature(getattr(pblas, name)).parameters)
            yield name, Row(names, ("a", "b"), {}, (), (), DTYPE[letter], "0", of_c=True)


def _volume(arguments: list[str]) -> str:
    """Return the text for the multiplications of a product."""
    at = {each: f"INTEGER(a{arguments.index(each)})" for each in ("m", "n", "k") if each in arguments}
    if "k" in at:
        return f"{at.get('m', at['n'])} * {at['n']} * {at['k']}"
    if "side" in arguments:
        side = f"(LETTER(a{arguments.index('side')}) == 'L' ? {at['m']} : {at['n']})"
        return f"{at['m']} * {at['n']} * {side}"
    return "0"


def _volume_of_factors(routine: ScalapackRoutine) -> str:
    """Return the text for the multiplications of a factorization, an inverse, or a solve with a known factor."""
    at = {each: f"INTEGER(a{i})" for i, each in enumerate(routine.names)}
    third = at["k"] if "k" in at else at["nrhs"] if routine.written == "b" else at["n"]
    return f"{at.get('m', at['n'])} * {at['n']} * {third}"


ROWS = dict(_rows())
"""The routines of the library by name, in the order of the numbers by which it calls Python."""


def source() -> str:
    """Return the library's text. Local."""
    functions = [_function(number, name, row) for number, (name, row) in enumerate(ROWS.items())]
    return "\n".join([Path(__file__).with_name("library.c").read_text(), *functions])


def _function(number: int, name: str, row: Row) -> str:
    names = [f"a{i}" for i in range(len(row.arguments))]
    kinds = [row.kind(each) for each in row.arguments]
    types = ["int" if row.of_c and kind == "integer" else "void *" for kind in kinds]
    declared = ", ".join(f"{each} {name}" for each, name in zip(types, names, strict=True))
    passed, prototype = ", ".join(names), ", ".join(types)
    read = {"letter": "LETTER({})", "integer": "{}" if row.of_c else "*(int *){}"}
    values = ", ".join(
        read.get(kind, "(long){}").format(each) for kind, each in zip(kinds, names, strict=True)
    )
    asks = " || ".join(f"INTEGER(a{row.arguments.index(each)}) == -1" for each in row.sizes) or "0"
    symbol = f"C{name}" if row.of_c else f"{name}_"
    return f"""
void {symbol}({declared}) {{
    static void (*own)({prototype});
    int asks = {asks}, large = !asks && is_large({row.volume});
    Watch watch = start();
    if (large) {{
        long arguments[] = {{{values}}};
        if (serve({number}, arguments)) {{
            stop(&watch, &by_pblasmp);
            return;
        }}
    }}
    if (!own) own = (void (*)({prototype}))next("{symbol}");
    own({passed});
    stop(&watch, asks ? &questions : &by_library);
}}"""
