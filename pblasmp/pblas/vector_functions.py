# SPDX-License-Identifier: Apache-2.0
"""Levels 1 and 2 of the PBLAS, from the table of vector routines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..blas import vector_calls, vectors
from ..layout.routines import VECTOR_ROUTINES, VectorRoutine
from ..matrix.distributed import DistributedMatrix
from .operands import PblasOperand
from .routine_functions import DTYPE, VECTORS, PblasFunction, PblasRoutine, Values, function_of

_NUMBERS = ("dot", "norm2", "asum", "amax", "indx")


@dataclass(frozen=True, slots=True)
class VectorFunction(PblasRoutine):
    """A routine of level 1 or 2 as PBLAS has it."""

    def changes_nothing(self, values: Values) -> bool:
        """Return whether it leaves everything as it is, and returns no number. Local."""
        return not self.numbers and PblasRoutine.changes_nothing(self, values)

    def compute(self, values: Values, matrices: dict[str, DistributedMatrix]) -> Any:
        """Write the result, or return the numbers. Collective over the grid."""
        if not self.numbers:
            return self._write(values, matrices)
        found: Any = vector_calls.after_agreement(self.python.__name__, matrices)
        numbers: list[Any] = [*found] if isinstance(found, tuple) else [found]
        if "indx" in self.numbers:
            x: PblasOperand = values["x"]
            numbers[1] += x.j if values["is_row_x"] else x.i
        everywhere = (_in_scope(values[name], x, values) for name, x in matrices.items())
        if values["n"] == 0 or not any(everywhere):
            numbers = [type(number)(0) for number in numbers]
        for name, number in zip(self.numbers, numbers, strict=True):
            if values[name] is not None:
                values[name][...] = number
        return numbers[0] if len(numbers) == 1 else tuple(numbers)

    def options(self, values: Values) -> Values:
        """See ``PblasRoutine``; pblasmp's functions of vectors set themselves what never changes. Local."""
        fixed = self.direct[2]
        return {
            name: value for name, value in PblasRoutine.options(self, values).items() if name not in fixed
        }

    def _write(self, values: Values, matrices: dict[str, DistributedMatrix]) -> None:
        if self.name in ("scal", "swap"):
            vector_calls.after_agreement(self.name, matrices, values.get("alpha", 1))
            return
        read = [x for name, x in matrices.items() if name != "y" or self.name != "copy"]
        self.python(*read, out=matrices[self.written[0]], **self.options(values))


def _in_scope(operand: PblasOperand, x: DistributedMatrix, values: Values) -> bool:
    """Return whether this process is in the process row, or column, that has a vector. Local.

    Of a single element of a matrix of one row PBLAS cannot tell which it is: only the process that has it counts.
    """
    d = x.descriptor
    row, col = d.grid.coords(x.context.rank)
    in_row, in_col = row == d.rows.owner(0), col == d.cols.owner(0)
    if d.shape == (1, 1) and operand.desc[2] == 1:
        return in_row and in_col
    return in_row if values[f"is_row_{operand.name}"] else in_col


def _routine(name: str, row: VectorRoutine, *, real: str = "") -> VectorFunction:
    """Return a routine of PBLAS as the table of vector routines says it is."""
    shapes = {}
    for operand, sizes in row.sizes.items():
        words = sizes.split()
        trans = " trans" if operand in VECTORS and len(words) > 1 else ""
        shapes[operand] = sizes + trans
    formula = re.sub(r"\b[axyA]\b", lambda found: f"sub({found[0].upper()})", row.formula)
    triangle = "Only one triangle of sub(A) is used. " if "uplo" in row.options else ""
    numbers = tuple(word for word in row.pblas.split() if word in _NUMBERS)
    return VectorFunction(
        name, "", row.pblas, shapes, f"Compute {formula}", getattr(vectors, name),
        f"PBLAS, {{}}; here ``pblasmp.blas.{name}``", _direct(name, row), real=real or " ".join(row.real),
        written=row.written, numbers=numbers, note=triangle, beta=1 if row.adds else None,
        returns=("None", "Any", "tuple[Any, int]")[len(numbers)], answer=" and ".join(numbers),
    )  # fmt: skip


def _direct(name: str, row: VectorRoutine) -> tuple[str, dict[str, str], Values]:
    """Return what engines call it; by their operands, "d" among them, its operands; and options that never change."""
    if name in ("scal", "swap"):  # in place, which sums are not
        return name, {"a": "x", "d": row.written[-1]}, {}
    if not row.twin:
        return name, {"a": "x", "d": "x"} | ({"b": "y"} if "y" in row.sizes else {}), {}
    return "matmul" if row.twin == "gemm" else row.twin, {**row.passes, "d": row.written}, {**row.fixed}


ROUTINES: Mapping[str, VectorFunction] = {
    full: _routine(name, row, real="alpha" if full in ("pcsscal", "pzdscal") else "")
    for name, row in VECTOR_ROUTINES.items()
    for full in row.names
}
"""Every routine by its full name."""

FUNCTIONS: dict[str, PblasFunction] = {
    full: function_of(ROUTINES[full], full, DTYPE[letter])
    for row in VECTOR_ROUTINES.values()
    for full, letter in row.names.items()
}
"""The functions of levels 1 and 2."""
