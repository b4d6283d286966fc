# SPDX-License-Identifier: Apache-2.0
"""A factorization, a solve or a driver as ScaLAPACK has it: its arguments, how they are checked, how a call goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dtypes import element_type, real_dtype
from ..engines.direct import FAMILIES
from ..errors import FactorizationError, short_repr
from ..matrix.distributed import DistributedMatrix
from .arguments import Faults, give, number_place, takes_number
from .direct import DirectForm
from .grids import ProcessGrid
from .operands import PblasOperand
from .routine_functions import PblasRoutine, Values, names_of


@dataclass(frozen=True, slots=True)
class FactorCall:
    """A call of a routine, checked and agreed on: its arguments, and its matrices by letter."""

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

    @property
    def lower(self) -> bool:
        """Whether the lower triangle is meant."""
        return bool(self["uplo"] == "L")

    @property
    def unit(self) -> bool:
        """Whether the diagonal is taken as ones."""
        return bool(self["diag"] == "U")


@dataclass(frozen=True, slots=True)
class ScalapackRoutine(PblasRoutine):
    """A factorization, a solve or a driver as ScaLAPACK has it.

    ``python`` does it to a ``FactorCall``.
    """

    def form(self, full: str, dtype: np.dtype) -> Callable[[Sequence[Any]], Any] | None:
        """Return what computes calls with legal arguments as direct calls; see ``PblasRoutine``. Local."""
        if self.direct[0] not in FAMILIES or self.name in ("gesv", "posv"):  # as direct calls these keep A
            return None
        direct, names = DirectForm(self, full, dtype), self.names

        def run(args: Sequence[Any]) -> Any:
            if not takes_number(args[-1]) or (
                len(names) > direct.count + 1 and self.asks(dict(zip(names, args, strict=True)))
            ):
                return None
            info = direct.run(args[: direct.count])
            return info if info is None or info is False else give(args[-1], info)

        return run

    def asks(self, given: Values) -> bool:
        """Return whether a call only asks how large workspaces must be. Local."""
        return any(isinstance(given.get(name), (int, np.integer)) and given[name] == -1 for name in SIZES)

    def nothing(self, given: Values) -> int:
        """Return INFO of a call that only asks how large workspaces must be. Local."""
        for name in _WORKS:
            if given.get(name) is not None:
                given[name][:1] = 1
        return int(give(given["info"], 0))

    def changes_nothing(self, values: Values) -> bool:  # noqa: ARG002
        """Return False: ``compute`` looks at the matrices. Local."""
        return False

    def read(self, values: Values) -> list[str]:
        """Return the matrices that are looked at. Local."""
        return [name for name in self.shapes if values.get(WANTED.get(name, "")) != "N"]

    def shape(self, matrix: str, values: Values) -> tuple[int, int]:
        """Return rows and columns of a matrix's part. Local."""
        down, across = self.beyond(matrix, values)
        return values[down], values[across]

    def beyond(self, matrix: str, values: Values) -> tuple[str, str]:
        """Return the arguments that are the rows and columns of a matrix's part. Local."""
        down, across = (_size(values, each) for each in self.shapes[matrix].split())
        return down, across

    def check_values(self, faults: Faults, given: Values, values: Values, dtype: np.dtype) -> None:
        """Note what else is wrong with what are no matrices, and add it to ``values``. Local."""
        number_place(faults, "info", given["info"])
        real = real_dtype(dtype)
        if self.asks(given):
            for name in _WORKS:
                if given.get(name) is not None:
                    kind = {"iwork": np.dtype("i4"), "rwork": real}.get(name, dtype)
                    _check_array(faults, name, given[name], kind)
            return
        for name in BESIDE:
            if name in given:
                _check_array(faults, name, given[name], np.dtype("i4") if name == "ipiv" else dtype)
        if given.get("ifail") is not None:
            _check_array(faults, "ifail", given["ifail"], np.dtype("i4"))
        for name in _OUTPUTS:
            if name in self.unread:
                number_place(faults, name, given[name])
        if "k" in values:
            most = values["n"] if "side" not in values else values["m" if values["side"] == "L" else "n"]
            if values["k"] > most:
                faults.add("k", f"expected at most {most}, got {values['k']}")
                values["k"] = most
        if "w" in given or "s" in given:
            _spectral_options(faults, given, values, real)

    def check(self, faults: Faults, values: Values, grid: ProcessGrid) -> None:
        """Note that IPIV or TAU is too short, or that pivots which are read are not rows of sub(A). Local."""
        if faults:
            return
        a: PblasOperand = values["a"]
        of_a, rank = a.descriptor(grid.grid, np.dtype("f8")), grid.context.rank
        if "ipiv" in values:
            rows = of_a.local_shape(rank)[0]
            _check_length(faults, "ipiv", values["ipiv"], rows, "integers, one for each row")
            if not faults and self.name in _PIVOTS_READ:
                last = a.i + values["n"] - 1
                here = of_a.rows.local_window(grid.grid.coords(rank)[0], a.i - 1, last)
                pivots = values["ipiv"].reshape(-1)[here]
                if (wrong := pivots[(pivots < a.i) | (pivots > last)]).size:
                    faults.add("ipiv", f"expected numbers of rows of A from {a.i} to {last}, got {wrong[0]}")
        if "tau" in values:
            count = values["k"] if "k" in values else min(values["m"], values["n"])
            end = min(a.j - 1 + count, of_a.shape[1])
            here = of_a.cols.local_window(grid.grid.coords(rank)[1], 0, end).stop
            what = "numbers, one for each column that has a reflector,"
            _check_length(faults, "tau", values["tau"], here, what)

    def compute(self, values: Values, matrices: dict[str, DistributedMatrix]) -> int:
        """Compute, and return INFO. Collective over the grid."""
        written, info = [matrices[name] for name in self.written if name in matrices], 0
        ctx = matrices["a"].context
        nothing = not any(x.size for x in written) and "m" not in self.unread  # else M, 0 then, is written
        if not (written and nothing) and not (values.get("k") == 0 and "side" in values):
            letter = element_type(matrices["a"].dtype).blas
            with ctx.running(
                f"p{letter}{self.name}"
            ):  # IPIV and TAU are gathered before the first vote on the result
                try:
                    self.python(FactorCall(values, matrices))
                except (
                    FactorizationError
                ) as error:  # every rank's: it ends the call, it does not break the context
                    info = error.index + 1
        return int(give(values["info"], info))


_OPTIONS = {
    "uplo": "UL",
    "diag": "NU",
    "side": "LR",
    "jobz": "NV",
    "jobu": "NV",
    "jobvt": "NV",
    "range": "AIV",
}


_SIZES = ("m", "n", "k", "nrhs")

_MEANINGS = {
    "uplo": '"U" or "L": which triangle of sub(A) is used; the other is neither read nor written',
    "nrhs": "the number of right-hand sides, at least 0",
    "trans": '"N", "T" (transpose) or "C" (conjugate transpose)',
    "side": '"L" or "R": Q is on the left or on the right',
    "k": "the number of reflectors, at least 0",
    "tau": "an array of the factors of the reflectors: one for each of this process's columns of A",
    "diag": '"N", or "U": the diagonal is taken as ones and not read',
    "ipiv": (
        "an array of int32 for each of this process's rows of A and a block more: row i of A was exchanged with row "
        "ipiv[l], counted from 1, l being i's place here, from 0"
    ),
    "work": "is written only if a size is requested, to 1; None: it is not",
    "lwork": "-1 asks for the size of ``work``; otherwise not read",
    "iwork": "as ``work``",
    "liwork": "as ``lwork``",
    "rwork": "as ``work``",
    "lrwork": "as ``lwork``",
    "jobz": '"V": eigenvectors are wanted, too; "N": the eigenvalues alone, and Z is not looked at',
    "jobu": '"V": U is wanted; "N": it is not, and is not looked at',
    "jobvt": '"V": V^H is wanted; "N": it is not, and is not looked at',
    "range": '"A": all eigenvalues; "I": those from ``il`` to ``iu``; "V": those above ``vl``, up to ``vu``',
    "vl": "with ``range`` V: the eigenvalues wanted are larger than this",
    "vu": "with ``range`` V: the largest eigenvalue that may be wanted",
    "il": "with ``range`` I: the number of the first eigenvalue wanted, from 1",
    "iu": "with ``range`` I: the number of the last eigenvalue wanted",
    "ibtype": "1: other problems than A x = lambda B x are not offered",
    "abstol": "is not read",
    "orfac": "is not read: eigenvectors are always orthogonal",
    "nz": "a writeable array of one integer to which the number of eigenvectors is written; None: it is not",
    "w": "a real array of n numbers to which the eigenvalues are written, ascending, on every process",
    "s": "a real array of min(m, n) numbers to which the singular values are written, descending, on every process",
    "ifail": (
        "integers, which become 0; if INFO is 16, the first alone is written, the order of a minor of sub(B) that is "
        "not positive; None: they are not written"
    ),
    "iclustr": "is not written",
    "gap": "is not written",
    "info": "a writeable array of one integer to which INFO is written; None: it is only returned",
}


BESIDE = {"ipiv": 0, "tau": 1}
"""The arrays of one element for each local row of A (0), or for each local column (1)."""

SIZES = ("lwork", "lrwork", "liwork")
"""The arguments that ask for the size of a workspace if they are -1."""

WANTED = {"z": "jobz", "u": "jobu", "vt": "jobvt"}
"""The matrices that are only looked at if an option is "V"."""

_PIVOTS_READ = ("getrs", "getri")  # routines that use IPIV, and do not write it

_OUTPUTS = ("m", "nz")  # of eigenvalues

_WORKS = ("work", "rwork", "iwork")

_LEFT_OUT = {*_WORKS, *SIZES, "ifail", "iclustr", "gap", "info"}

_REAL_NAMES = {"ungqr": "orgqr", "unmqr": "ormqr"}


def routine(
    name: str, arguments: str, shapes: dict[str, str], written: str | tuple[str, ...],
    compute: Callable[[FactorCall], object], text: str, fault: str = "", letters: str = "sdcz", *,
    adjoint: bool = False,
) -> ScalapackRoutine:  # fmt: skip
    """Return a routine as ScaLAPACK has it. Local.

    Args:
        name, letters, shapes, written: as ``PblasRoutine`` has them.
        arguments: without INFO.
        compute: what it does.
        text: what it does, in words.
        fault: what INFO > 0 means, in words; "" if it is always 0.
        adjoint: ``trans`` takes, besides "N", only what is the adjoint: "T" of real matrices, "C" of complex ones.
    """
    names, meanings = names_of(f"{arguments} info"), {each: f"{words}." for each, words in _MEANINGS.items()}
    outputs = _OUTPUTS if "w" in names else ()
    if adjoint:
        meanings["trans"] = '"N", or the adjoint: "T" for real matrices, "C" for complex ones.'
    if outputs:
        meanings["m"] = meanings["nz"].replace("eigenvectors", "eigenvalues")
    apart = (*_LEFT_OUT, *BESIDE, *outputs, "w", "s", "abstol", "orfac")
    return ScalapackRoutine(
        name, letters, f"{arguments} info", shapes, text, compute, "ScaLAPACK, {}",
        (_REAL_NAMES.get(name, name), dict(zip("ab", shapes, strict=False)) | {"d": written[-1]}, {}),
        trans=("NT", "NC") if adjoint else ("NTC", "NTC"), legal=_OPTIONS, written=written, meanings=meanings,
        sizes=tuple(each for each in _SIZES if each not in outputs),
        unread=tuple(each for each in names if each in apart),
        optional=tuple(each for each in names if each in _LEFT_OUT), returns="int",
        answer=f"INFO: 0{fault and f', or i > 0: {fault}'}", of_pblas=False, stages=False,
    )  # fmt: skip


def _spectral_options(faults: Faults, given: Values, values: Values, real: np.dtype) -> None:
    """Add the options that only eigenvalues and singular values have; note what is wrong with them."""
    name = "w" if "w" in given else "s"
    _check_array(faults, name, given[name], real)
    least = values["n"] if name == "w" else min(values["m"], values["n"])
    _check_length(faults, name, given[name], least, "numbers")
    if "ibtype" in given and faults.integer("ibtype", given["ibtype"]) != 1:
        faults.add("ibtype", f"expected 1, got {short_repr(given['ibtype'])}")
    kind, n = values.get("range"), values["n"]
    if kind == "I" and n:
        first, last = (faults.integer(each, given[each], 1, 1) for each in ("il", "iu"))
        for each, number, low in (("il", first, 1), ("iu", last, first)):
            if not low <= number <= n:
                faults.add(each, f"expected {low} to {n}, got {number}")
        values.update(il=first, iu=last)
    elif kind == "V":
        for each in ("vl", "vu"):
            if isinstance(given[each], (int, float, np.number)) and not isinstance(
                given[each], np.complexfloating
            ):
                values[each] = float(given[each])
            else:
                faults.add(each, f"expected a real number, got {short_repr(given[each])}")
        if "vl" in values and "vu" in values and not values["vl"] < values["vu"]:
            faults.add("vu", f"expected more than vl, {values['vl']}, got {values['vu']}")


def _size(values: Values, name: str) -> str:
    """Return the argument that is a size: "order" is Q's, "longer" that of the longer side of A."""
    if name == "least":
        return "m" if values["m"] <= values["n"] else "n"
    if name == "longer":
        return "m" if values["m"] >= values["n"] else "n"
    if name == "order":
        return "m" if values["side"] == "L" else "n"
    return name


def _check_array(faults: Faults, name: str, array: Any, dtype: np.dtype) -> None:
    """Note that IPIV, TAU or a workspace is not an array of its type, or cannot be written."""
    wrong = not isinstance(array, np.ndarray) or not array.flags.writeable
    if wrong or (array.dtype.kind != "i" if dtype.kind == "i" else array.dtype != dtype):
        what = "integers" if dtype.kind == "i" else dtype.name
        faults.add(name, f"expected a writeable array of {what}, got {type(array).__name__}")


def _check_length(faults: Faults, name: str, array: Any, least: int, what: str) -> None:
    """Note that IPIV or TAU is too short on this process."""
    if isinstance(array, np.ndarray) and array.size < least:
        faults.add(name, f"expected at least {least} {what} here, got {array.size}")
