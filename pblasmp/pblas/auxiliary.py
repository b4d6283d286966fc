# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK's auxiliary routines on whole sub-matrices: norms, copies, constants, scaling, traces, elements."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..layout import Trapezoid
from ..level3 import geadd, tradd
from ..matrix import DistributedMatrix
from .arguments import Faults
from .grids import ProcessGrid
from .routines import DTYPE, PblasFunction, PblasRoutine, Values, function_of

__all__ = ["FUNCTIONS"]

_KINDS = {"M": "max", "1": 1, "O": 1, "I": "inf", "F": "fro", "E": "fro"}
_WORDS = {
    "norm": '"M" (largest absolute value), "1" or "O" (largest column sum), "I" (largest row sum) or "F" or "E" '
    "(Frobenius)",
    "uplo": '"U" or "L": which triangle is used',
    "diag": '"N", or "U": its diagonal is taken as ones and not read',
    "type": '"G" (all), "L" or "U" (only this triangle is scaled) or "H" ("U" and the diagonal below it)',
    "work": "not used, and may be None",
    "info": "an array of one integer to which 0 is written, or None",
    "cfrom": "what sub(A) is divided by; not 0",
    "cto": "what sub(A) is multiplied by",
    "scope": '"A": every process gets the number; "R" or "C": those of the process row or column that has the '
    'element; " ": the process that has it. The others get 0',
    "top": "not used",
    "irprnt": "process row that prints",
    "icprnt": "process column that prints",
    "cmatnm": "the matrix's name",
    "nout": "0 (standard error), a file to write to, or any other number (standard output)",
}
_EVERYTHING = '"U" or "L" (that triangle, with the diagonal), or another letter (everything)'


@dataclass(frozen=True, slots=True)
class AuxiliaryRoutine(PblasRoutine):
    """An auxiliary routine as ScaLAPACK has it.

    Attributes:
        run: computes it from the values of its arguments and its matrices.
        result: the annotation of what it returns.
        here: what it is called with pblasmp's matrices.
        legal: the letters that its options may have.

    ``formula`` says in words what it does.
    """

    run: Callable[[Values, dict[str, DistributedMatrix]], Any] = lambda _values, _matrices: None
    result: str = "None"
    here: str = ""
    legal: dict[str, str] = field(default_factory=dict)

    @property
    def returns(self) -> str:
        """The annotation of what it returns."""
        return self.result

    @property
    def summary(self) -> str:
        """What it does, in words."""
        return self.formula

    @property
    def source(self) -> str:
        """The library that it is from, and what it is called here."""
        return f"ScaLAPACK TOOLS, {{}}; here ``{self.here}``"

    def changes_nothing(self, values: Values) -> bool:  # noqa: ARG002
        """Return False: also of nothing there is a norm. Local."""
        return False

    def letters_of(self, name: str, dtype: np.dtype) -> str:  # noqa: ARG002
        """Return the letters that an option may have; empty if ``name`` is no option. Local."""
        return self.legal.get(name, "")

    @property
    def numbers(self) -> tuple[str, ...]:
        """The arguments to which numbers are written."""
        return tuple(
            each for each in self.names if each == "info" or (each == "alpha" and self.name == "elget")
        )

    @property
    def unread(self) -> tuple[str, ...]:
        """The arguments that are taken as they are and may differ from process to process."""
        return ("work", "top", "cmatnm", "nout")

    @property
    def meanings(self) -> dict[str, str]:
        """What the arguments are that only these routines have, in words."""
        words = {name: f"{text}." for name, text in _WORDS.items()}
        if self.legal.get("uplo") == "ULA":
            words["uplo"] = f"{_EVERYTHING}."
        if self.name == "elget":
            words["alpha"] = "an array of one element to which the number is written, or None."
        return words

    def check(self, faults: Faults, values: Values, grid: ProcessGrid) -> None:
        """Note a division by 0, and a process that there is not. Local."""
        if values.get("cfrom") == 0 or math.isnan(values.get("cfrom", 1)):
            faults.add("cfrom", f"expected a number other than 0, got {values['cfrom']}")
        for name, extent in zip(("irprnt", "icprnt"), grid.grid.shape, strict=True):
            if values.get(name, 0) >= extent:
                faults.add(name, f"expected less than {extent}, got {values[name]}")

    def compute(self, values: Values, matrices: dict[str, DistributedMatrix]) -> Any:
        """Compute it. Collective over the grid."""
        return self.run(values, matrices)


def _norm(values: Values, matrices: dict[str, DistributedMatrix], kind: str | None = None) -> Any:
    a = matrices["a"]
    which: Any = _KINDS[values["norm"]]
    if kind is None:
        found = a.norm(which)
    else:
        found = a.norm(which, uplo=values["uplo"], diag=values.get("diag", "N"), kind=kind)  # type: ignore[arg-type]
    return a.dtype.type(found).real


def _lacpy(values: Values, matrices: dict[str, DistributedMatrix]) -> None:
    a, b, uplo = matrices["a"], matrices["b"], values["uplo"]
    if not b.size:
        return
    if uplo == "A":
        geadd(a, b, beta=0, out=b)
    else:
        tradd(a, b, uplo=uplo, beta=0, out=b)


def _blocks(x: DistributedMatrix, part: Trapezoid | None) -> Iterator[tuple[Any, Any, Any]]:
    """Yield parts of the local array with which elements count (None: all), and how far they are right of the diagonal.

    Local.
    """
    ctx, d = x.context, x.descriptor
    if ctx.coords(d) is None or not x.local.size:
        return
    xp = ctx.engine.xp
    rows, cols = (xp.asarray(each) for each in d.global_indices(ctx.rank))
    step = max(1, (1 << 18) // len(rows))
    for at in range(0, len(cols), step):
        apart = cols[None, at : at + step] - rows[:, None]
        inside = (
            None if part is None else apart >= part.diagonal if part.uplo == "U" else apart <= part.diagonal
        )
        yield x.local[:, at : at + step], inside, apart


def _laset(values: Values, matrices: dict[str, DistributedMatrix]) -> None:
    a = matrices["a"]
    part = None if values["uplo"] == "A" else Trapezoid(values["uplo"])
    xp = a.context.engine.xp
    for local, inside, apart in _blocks(a, part):
        numbers = xp.where(apart == 0, a.dtype.type(values["beta"]), a.dtype.type(values["alpha"]))
        local[...] = numbers if inside is None else xp.where(inside, numbers, local)


def _factors(dtype: np.dtype, cfrom: float, cto: float) -> Iterator[float]:
    """Yield factors whose product is ``cto / cfrom``, of which no partial product over- or underflows needlessly.

    Source: LAPACK, ?LASCL.
    """
    small = float(np.finfo(dtype).tiny)
    while True:
        less, more = cfrom * small, cto * small
        if less == cfrom or more == cto:  # infinite
            yield cto / cfrom
            return
        if abs(less) > abs(cto) and cto != 0:
            cfrom = less
            yield small
        elif abs(more) > abs(cfrom):
            cto = more
            yield 1 / small
        else:
            yield cto / cfrom
            return


def _lascl(values: Values, matrices: dict[str, DistributedMatrix]) -> int:
    a = matrices["a"]
    part = {"G": None, "L": Trapezoid("L"), "U": Trapezoid("U"), "H": Trapezoid("U", -1)}[values["type"]]
    xp = a.context.engine.xp
    with np.errstate(all="ignore"):
        for factor in _factors(a.dtype, values["cfrom"], values["cto"]):
            number = a.dtype.type(0).real.dtype.type(factor)
            for local, inside, _ in _blocks(a, part):
                local[...] = local * number if inside is None else xp.where(inside, local * number, local)
    if values["info"] is not None:
        values["info"][...] = 0
    return 0


def _latra(_values: Values, matrices: dict[str, DistributedMatrix]) -> Any:
    return matrices["a"].trace()


def _elset(values: Values, matrices: dict[str, DistributedMatrix]) -> None:
    for local, _, _ in _blocks(matrices["a"], None):
        local[...] = matrices["a"].dtype.type(values["alpha"])


def _elget(values: Values, matrices: dict[str, DistributedMatrix]) -> Any:
    a = matrices["a"]
    found = a.allgather()[0, 0]
    d = a.descriptor
    row, col = d.grid.coords(a.context.rank)
    in_row, in_col = row == d.rows.owner(0), col == d.cols.owner(0)
    has = {"A": True, "R": in_row, "C": in_col, " ": in_row and in_col}[values["scope"]]
    number = found if has else a.dtype.type(0)
    if values["alpha"] is not None:
        values["alpha"][...] = number
    return number


def _laprnt(values: Values, matrices: dict[str, DistributedMatrix]) -> None:
    a, operand = matrices["a"], values["a"]
    root = a.descriptor.grid.rank(values["irprnt"], values["icprnt"])
    whole = a.gather(root)
    if whole is None:
        return
    nout = values["nout"]
    out = nout if hasattr(nout, "write") else sys.stderr if nout == 0 else sys.stdout
    lines = []
    for j in range(whole.shape[1]):
        for i in range(whole.shape[0]):
            x = whole[i, j]
            parts = (x.real, x.imag) if whole.dtype.kind == "c" else (x,)
            text = "+i*(".join(f"{float(part):30.18E}" for part in parts) + (")" if len(parts) > 1 else "")
            lines.append(f"{values['cmatnm']}({operand.i + i:6d},{operand.j + j:6d})={text}\n")
    out.write("".join(lines))


def _row(
    name: str, letters: str, arguments: str, shapes: dict[str, str], formula: str, run: Callable[..., Any], here: str,
    **more: Any,
) -> AuxiliaryRoutine:  # fmt: skip
    return AuxiliaryRoutine(name, letters, arguments, shapes, formula, run, run=run, here=here, **more)


_SQUARE, _WHOLE = {"a": "n n"}, {"a": "m n"}
_NORMS, _UPLO, _DIAG = {"norm": "M1OIFE"}, {"uplo": "UL"}, {"diag": "NU"}

_ROUTINES = (
    _row("lange", "sdcz", "norm m n A work", _WHOLE, "Return a norm of sub(A)", _norm, "A.norm(ord)",
         result="Any", written="", legal=_NORMS),
    _row("lansy", "sdcz", "norm uplo n A work", _SQUARE, "Return a norm of sub(A), which is symmetric",
         lambda v, x: _norm(v, x, "symmetric"), 'A.norm(ord, uplo="L", kind="symmetric")',
         result="Any", written="", legal=_NORMS | _UPLO),
    _row("lanhe", "cz", "norm uplo n A work", _SQUARE, "Return a norm of sub(A), which is Hermitian",
         lambda v, x: _norm(v, x, "hermitian"), 'A.norm(ord, uplo="L", kind="hermitian")',
         result="Any", written="", legal=_NORMS | _UPLO),
    _row("lantr", "sdcz", "norm uplo diag m n A work", _WHOLE,
         "Return a norm of sub(A), which is triangular or trapezoidal",
         lambda v, x: _norm(v, x, "triangular"), 'A.norm(ord, uplo="L")',
         result="Any", written="", legal=_NORMS | _UPLO | _DIAG),
    _row("lacpy", "sdcz", "uplo m n A B", {"a": "m n", "b": "m n"}, "Copy sub(A) to sub(B)", _lacpy,
         "B[...] = A", written="b", legal={"uplo": "ULA"}),
    _row("laset", "sdcz", "uplo m n alpha beta A", _WHOLE,
         "Set sub(A) to beta on its diagonal and to alpha off it", _laset, "A[...] = alpha", written="a",
         legal={"uplo": "ULA"}),
    _row("lascl", "sdcz", "type cfrom cto m n A info", _WHOLE, "Multiply sub(A) by cto / cfrom", _lascl,
         "A *= cto / cfrom", result="int", written="a", legal={"type": "GLUH"}, real="cfrom cto"),
    _row("latra", "sdcz", "n A", _SQUARE, "Return the trace of sub(A)", _latra, "A.trace()", result="Any", written=""),
    _row("elset", "sdcz", "A alpha", {"a": "1 1"}, "Set A(ia, ja) to alpha", _elset, "A[i, j] = alpha", written="a"),
    _row("elget", "sdcz", "scope top alpha A", {"a": "1 1"}, "Return A(ia, ja)", _elget, "A[i, j]",
         result="Any", written="", legal={"scope": "ARC "}),
    _row("laprnt", "sdcz", "m n A irprnt icprnt cmatnm nout work", _WHOLE, "Print the elements of sub(A)", _laprnt,
         "print(A.gather())", written=""),
)  # fmt: skip

FUNCTIONS: dict[str, PblasFunction] = {
    f"p{letter}{row.name}": function_of(row, f"p{letter}{row.name}", DTYPE[letter])
    for row in _ROUTINES
    for letter in row.letters
}
"""The auxiliary routines by their full names."""
