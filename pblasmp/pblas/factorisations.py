# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK's factorizations and solves under their own names: functions made from a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..comm import agree_after
from ..engines.direct import FAMILIES
from ..errors import FactorizationError, short_repr
from ..linalg import cho_solve, cholesky, lu_solve, qr, solve_triangular
from ..linalg.general import lu_with_info
from ..linalg.least_squares import lstsq_in_place
from ..linalg.orthogonal import apply_q, form_q
from ..linalg.systems import Assume, inverse_of, solve_keeping
from ..matrix import DistributedMatrix
from .arguments import Faults, as_routine, bound, signature_of
from .direct import DirectForm
from .grids import ProcessGrid
from .operands import PblasOperand, check_grid, check_sharing, entries, one_grid_of
from .routines import DTYPE, docstring, number_place, size_text, takes_number

__all__ = ["BESIDE", "ROUTINES", "SIZES", "WANTED", "FactorCall", "ScalapackRoutine", "factoriser"]

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
        fault: what INFO > 0 means, in words; "" if it is always 0.
        letters: the types that have it.
        adjoint: ``trans`` takes, besides "N", only what is the adjoint: "T" of real matrices, "C" of complex ones.
    """

    arguments: str
    shapes: dict[str, str]
    written: Sequence[str]
    compute: Compute
    text: str
    fault: str = ""
    letters: str = "sdcz"
    adjoint: bool = False

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

    @property
    def lower(self) -> bool:
        """Whether the lower triangle is meant."""
        return bool(self["uplo"] == "L")

    @property
    def unit(self) -> bool:
        """Whether the diagonal is taken as ones."""
        return bool(self["diag"] == "U")


def _potrf(call: FactorCall) -> None:
    cholesky(call.a, call.lower, out=call.a)


def _potrs(call: FactorCall) -> None:
    cho_solve((call.a, call.lower), call.b, out=call.b)


def _posv(call: FactorCall) -> None:
    solve_keeping(call.a, call.b, call.a, lower=call.lower, out=call.b)


def _potri(call: FactorCall) -> None:
    inverse_of(call.a, None, "pos", lower=call.lower, out=call.a)


def _getrf(call: FactorCall) -> None:
    _, pivots, info = lu_with_info(call.a, out=call.a)
    _give_pivots(call, pivots)
    if info:
        raise FactorizationError.at(info - 1, "U has a zero on its diagonal")


def _getrs(call: FactorCall) -> None:
    lu_solve((call.a, _take_pivots(call)), call.b, call["trans"], out=call.b)


def _gesv(call: FactorCall) -> None:
    _getrf(call)
    lu_solve((call.a, _take_pivots(call)), call.b, out=call.b)


def _getri(call: FactorCall) -> None:
    pivots = _take_pivots(call)
    inverse_of(call.a, pivots, out=call.a)


def _trtri(call: FactorCall) -> None:
    kind: Assume = "lower triangular" if call.lower else "upper triangular"
    inverse_of(call.a, None, kind, unit_diagonal=call.unit, out=call.a)


def _trtrs(call: FactorCall) -> None:
    solve_triangular(call.a, call.b, call["trans"], call.lower, call.unit, out=call.b)


def _geqrf(call: FactorCall) -> None:
    found = qr(call.a, out=call.a)
    mine, places = _here(call, 1, len(found.tau))
    call["tau"].reshape(-1)[places] = found.tau[mine]


def _reflectors(call: FactorCall) -> tuple[DistributedMatrix, NDArray[Any]]:
    """Return the reflectors of sub(A), as many as count, and their factors. Collective."""
    return call.a[:, : call["k"]], _whole(call, call["tau"], 1, call["k"])


def _orgqr(call: FactorCall) -> None:
    reflectors, tau = _reflectors(call)
    form_q(reflectors, tau, call["n"], out=call.a)


def _ormqr(call: FactorCall) -> None:
    reflectors, tau = _reflectors(call)
    c, op = call.matrices["c"], "N" if call["trans"] == "N" else "C"
    apply_q(reflectors, tau, c, op, call["side"], out=c)


def _gels(call: FactorCall) -> None:
    lstsq_in_place(call.a, call.b, call["trans"])


def _here(call: FactorCall, axis: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which of the first ``count`` rows of sub(A) this process has, and their places among its rows of A.

    Or columns, with axis 1.
    """
    part, whole = call.a.descriptor, call.a.place.whole.descriptor
    process = call.grid.grid.coords(call.grid.context.rank)[axis]
    mine = (part.rows, part.cols)[axis].globals(process)
    before = (whole.rows, whole.cols)[axis].local_window(process, 0, call["ij"[axis] + "a"] - 1).stop
    mine = mine[mine < count]
    return mine, before + np.arange(len(mine))


def _whole(call: FactorCall, array: NDArray[Any], axis: int, count: int) -> NDArray[Any]:
    """Return the first ``count`` elements of an array, of which each process has those of its rows of sub(A).

    Or of its columns, with axis 1. Collective.
    """
    mine, places = _here(call, axis, count)
    known = array.reshape(-1)[places]
    whole = np.zeros(count, known.dtype)
    for indices, values in call.grid.context.comm.allgather((mine, known)):
        whole[indices] = values
    return whole


def _give_pivots(call: FactorCall, pivots: NDArray[np.int64]) -> None:
    """Write the pivots of this process's rows to IPIV: rows of A, from 1."""
    mine, places = _here(call, 0, len(pivots))
    call["ipiv"].reshape(-1)[places] = pivots[mine] + call["ia"]


def _take_pivots(call: FactorCall) -> NDArray[np.int64]:
    """Return all pivots of sub(A), from 0, of which each process has those of its rows in IPIV. Collective."""
    pivots: NDArray[np.int64] = _whole(call, call["ipiv"], 0, call["n"]).astype(np.int64) - call["ia"]
    return pivots


_MINOR = "the leading minor of order i of sub(A) is not positive"
_ZERO = "the diagonal element i, from 1, of the triangular factor is exactly zero"
_SQUARE = {"a": "n n"}
_BESIDE = {"a": "n n", "b": "n nrhs"}

ROUTINES = {
    "potrf": ScalapackRoutine(
        "uplo n A", _SQUARE, "a", _potrf, "Replace a triangle of sub(A) by its Cholesky factor",
        _MINOR,
    ),
    "potrs": ScalapackRoutine(
        "uplo n nrhs A B", _BESIDE, "b", _potrs,
        "Replace sub(B) by the solution of sub(A) X = sub(B), with sub(A) as potrf has left it",
    ),
    "posv": ScalapackRoutine(
        "uplo n nrhs A B", _BESIDE, "ab", _posv,
        "Replace a triangle of sub(A) by its Cholesky factor, and sub(B) by the solution of sub(A) X = sub(B)",
        _MINOR,
    ),
    "potri": ScalapackRoutine(
        "uplo n A", _SQUARE, "a", _potri, "Replace a triangle of sub(A), as potrf has left it, by that of the inverse",
        _ZERO,
    ),
    "getrf": ScalapackRoutine(
        "m n A ipiv", {"a": "m n"}, "a", _getrf, "Replace sub(A) by its LU factors with partial pivoting",
        _ZERO,
    ),
    "getrs": ScalapackRoutine(
        "trans n nrhs A ipiv B", _BESIDE, "b", _getrs,
        "Replace sub(B) by the solution of op(sub(A)) X = sub(B), with sub(A) as getrf has left it",
    ),
    "gesv": ScalapackRoutine(
        "n nrhs A ipiv B", _BESIDE, "ab", _gesv,
        "Replace sub(A) by its LU factors, and sub(B) by the solution of sub(A) X = sub(B)",
        _ZERO,
    ),
    "getri": ScalapackRoutine(
        "n A ipiv work lwork iwork liwork", _SQUARE, "a", _getri,
        "Replace sub(A), as getrf has left it, by the inverse",
        _ZERO,
    ),
    "trtri": ScalapackRoutine(
        "uplo diag n A", _SQUARE, "a", _trtri, "Replace the triangle of sub(A) by its inverse",
        _ZERO,
    ),
    "trtrs": ScalapackRoutine(
        "uplo trans diag n nrhs A B", _BESIDE, "b", _trtrs,
        "Replace sub(B) by the solution of op(sub(A)) X = sub(B) for a triangular sub(A)",
        _ZERO,
    ),
    "geqrf": ScalapackRoutine(
        "m n A tau work lwork", {"a": "m n"}, "a", _geqrf, "Replace sub(A) by R and the reflectors of Q",
    ),
    "gels": ScalapackRoutine(
        "trans m n nrhs A B work lwork", {"a": "m n", "b": "longer nrhs"}, "ab", _gels,
        "Replace sub(B) by the solution of op(sub(A)) X = sub(B) in the sense of least squares, or the least solution",
        f"{_ZERO}; that an element is zero up to rounding is no fault here, but is one for ``pblasmp.linalg.lstsq``",
        adjoint=True,
    ),
    **{
        name: ScalapackRoutine(
            "m n k A tau work lwork", {"a": "m n"}, "a", _orgqr,
            "Replace k reflectors in sub(A), as geqrf has left them, by the first n columns of Q", letters=letters,
        )
        for name, letters in (("orgqr", "sd"), ("ungqr", "cz"))
    },
    **{
        name: ScalapackRoutine(
            "side trans m n k A tau C work lwork", {"a": "order k", "c": "m n"}, "c", _ormqr,
            "Replace sub(C) by op(Q) sub(C) or sub(C) op(Q), with the k reflectors of Q in sub(A)", letters=letters,
            adjoint=True,
        )
        for name, letters in (("ormqr", "sd"), ("unmqr", "cz"))
    },
}  # fmt: skip
"""The routines by name, without p and the letter of the type."""

_OPTIONS = {
    "uplo": "UL",
    "diag": "NU",
    "trans": "NTC",
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
    "work": "is written only if a size is asked for, to 1; None: it is not",
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
    "ifail": "integers, which become 0; None: they are not written",
    "iclustr": "is not written",
    "gap": "is not written",
    "info": "a writeable array of one integer to which INFO is written; None: it is only returned",
}
_EXTENTS = {"longer": "max(m, n)", "least": "min(m, n)", "order": '(m if side is "L", n if it is "R")'}

BESIDE = {"ipiv": 0, "tau": 1}
"""The arrays of one element for each local row of A (0), or for each local column (1)."""

SIZES = ("lwork", "lrwork", "liwork")
"""The arguments that ask for the size of a workspace if they are -1."""

WANTED = {"z": "jobz", "u": "jobu", "vt": "jobvt"}
"""The matrices that are only looked at if an option is "V"."""

_WORKS = ("work", "rwork", "iwork")
_LEFT_OUT = {*_WORKS, *SIZES, "ifail", "iclustr", "gap", "info"}
_OUTPUTS = ("m", "nz")  # of eigenvalues
_REALS = ("vl", "vu")


def factoriser(name: str, letter: str, routine: ScalapackRoutine) -> Callable[..., int]:
    """Return a routine for one type, as a function with ScaLAPACK's signature. Local."""
    full, dtype = f"p{letter}{name}", DTYPE[letter]
    annotations = {each: _annotation(each, routine) for each in routine.names}
    signature = signature_of(annotations, "int", _LEFT_OUT)
    direct = _direct_form(name, full, dtype, routine)

    def function(*args: Any, **kwargs: Any) -> int:
        given = bound(full, signature, args, kwargs)
        info = None
        if direct is not None and takes_number(given["info"]) and not _asks(given):
            info = direct.run(tuple(given.values())[: direct.count])
        if info is None or info is False:
            info = _run(full, routine, dtype, given, voted=info is False)
        if given["info"] is not None:
            given["info"][...] = info
        return info

    return as_routine(function, full, signature, _docstring(routine, full, dtype))


def _direct_form(name: str, full: str, dtype: np.dtype, routine: ScalapackRoutine) -> DirectForm | None:
    """Return a routine as a direct call, None if it is none."""
    if name not in FAMILIES or len(routine.written) > 1:  # direct solves keep A
        return None
    names = [each for each in routine.names if each not in _LEFT_OUT]
    allowed = {each: _OPTIONS[each] for each in names if each in _OPTIONS}
    passes = {each: each for each in routine.shapes} | {"d": routine.written[0]}
    return DirectForm(
        full, name, names, routine.shapes, passes, routine.written[0], (), dtype, allowed, {}, ""
    )


def _run(full: str, routine: ScalapackRoutine, dtype: np.dtype, given: Values, *, voted: bool) -> int:
    """Check the arguments, agree on them, compute, and return INFO. Collective over the grid.

    Args:
        full: the routine's name.
        routine, dtype: the routine, for one type.
        given: its arguments.
        voted: whether this rank has tried a direct call, on which the ranks did not agree.
    """
    grid = one_grid_of(Faults(full, routine.names, of_pblas=False), routine.shapes, given)
    asks = _asks(given)
    works = {name: given[name] for name in _WORKS if given.get(name) is not None}

    def read(facts: Values) -> tuple[Values, dict[str, DistributedMatrix]]:
        faults = Faults(full, routine.names, of_pblas=False)
        number_place(faults, "info", given["info"])
        facts["sizes of workspaces"] = "asked for" if asks else "not asked for"
        if asks:
            for name, work in works.items():
                real = np.empty(0, dtype).real.dtype
                _check_array(faults, name, work, {"iwork": np.dtype("i4"), "rwork": real}.get(name, dtype))
            faults.check()
            return {}, {}
        values = _options(routine, faults, given, dtype)
        matrices = _matrices(routine, faults, given, values, grid, dtype, facts)
        faults.check()
        facts.update(values)
        return values, matrices

    values, matrices = agree_after(voted, partial(grid.context.agreement, full), read)
    if asks:
        for work in works.values():
            work[:1] = 1
        return 0
    written = [matrices[name] for name in routine.written if name in matrices]
    if (written and not any(x.size for x in written)) or (values.get("k") == 0 and "side" in values):
        return 0
    with grid.context.running(full):  # IPIV and TAU are gathered before the first vote of what is computed
        try:
            routine.compute(FactorCall(grid, {**given, **values}, matrices))
        except FactorizationError as error:  # every rank's: it ends the call, it does not break the context
            return error.index + 1
    return 0


def _asks(given: Values) -> bool:
    """Return whether a call asks for the sizes of workspaces. Local."""
    return any(isinstance(given.get(name), (int, np.integer)) and given[name] == -1 for name in SIZES)


def _options(routine: ScalapackRoutine, faults: Faults, given: Values, dtype: np.dtype) -> Values:
    """Return the options and sizes, each in a standard form; note what is wrong with them."""
    values: Values = {}
    for name in routine.names:
        if name in ("ipiv", "tau"):
            _check_array(faults, name, given[name], np.dtype("i4") if name == "ipiv" else dtype)
        elif name == "trans" and routine.adjoint:
            values[name] = faults.letter(name, given[name], "NC" if dtype.kind == "c" else "NT")
        elif name in _OPTIONS:
            values[name] = faults.letter(name, given[name], _OPTIONS[name])
        elif name in _OUTPUTS and "w" in routine.names:
            number_place(faults, name, given[name])
        elif name in _SIZES:
            values[name] = faults.integer(name, given[name], 0)
    if "k" in values:
        most = values["n"] if "side" not in values else values["m" if values["side"] == "L" else "n"]
        if values["k"] > most:
            faults.add("k", f"expected at most {most}, got {values['k']}")
            values["k"] = most
    if "w" in routine.names or "s" in routine.names:
        _spectral_options(routine, faults, given, values, dtype)
    return values


def _spectral_options(
    routine: ScalapackRoutine, faults: Faults, given: Values, values: Values, dtype: np.dtype
) -> None:
    """Add the options that only eigenvalues and singular values have; note what is wrong with them."""
    name = "w" if "w" in routine.names else "s"
    _check_array(faults, name, given[name], np.empty(0, dtype).real.dtype)
    least = values["n"] if name == "w" else min(values["m"], values["n"])
    _check_length(faults, name, given[name], least, "numbers")
    if "ibtype" in routine.names and faults.integer("ibtype", given["ibtype"]) != 1:
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
    operands: dict[str, PblasOperand] = {}
    for name, shape in routine.shapes.items():
        if values.get(WANTED.get(name, "")) == "N":
            continue
        i, j = (faults.integer(each, given[each], 1) for each in (f"i{name}", f"j{name}"))
        desc = entries(faults, f"desc{name}", given[f"desc{name}"])
        down, across = (_size(values, each) for each in shape.split())
        extents = values[down], values[across]
        operands[name] = operand = PblasOperand(name, given[name], i, j, desc, extents, (down, across))
        facts[name] = i, j, desc[2:8]
        if not desc or check_grid(faults, name, desc, grid):
            operand.check(faults, grid)
    if faults:
        return {}
    for name, operand in operands.items():
        matrix = operand.matrix(faults, grid, dtype, written=name in routine.written)
        if matrix is not None:
            matrices[name] = matrix
    for name in routine.written:
        if name in matrices:
            check_sharing(faults, matrices, (name,))
    of_a, rank = operands["a"].descriptor(grid.grid, dtype), grid.context.rank
    if "ipiv" in routine.names:
        _check_length(faults, "ipiv", given["ipiv"], of_a.local_shape(rank)[0], "integers, one for each row")
    if "tau" in routine.names:
        count = values["k"] if "k" in values else min(values["m"], values["n"])
        end = min(operands["a"].j - 1 + count, of_a.shape[1])
        here = of_a.cols.local_window(grid.grid.coords(rank)[1], 0, end).stop
        _check_length(faults, "tau", given["tau"], here, "numbers, one for each column that has a reflector,")
    return matrices


def _check_length(faults: Faults, name: str, array: Any, least: int, what: str) -> None:
    """Note that IPIV or TAU is too short on this process."""
    if isinstance(array, np.ndarray) and array.size < least:
        faults.add(name, f"expected at least {least} {what} here, got {array.size}")


def _annotation(name: str, routine: ScalapackRoutine) -> str:
    if name in _OPTIONS:
        return "str"
    if name.startswith("desc"):
        return "Sequence[int]"
    if name in (*_REALS, "abstol", "orfac"):
        return "float"
    spectral = name in ("w", "s") or (name in _OUTPUTS and "w" in routine.names)
    return "Any" if name in routine.shapes or name in _LEFT_OUT or name in BESIDE or spectral else "int"


def _docstring(routine: ScalapackRoutine, full: str, dtype: np.dtype) -> str:
    """Return the text that help() shows."""
    note = (
        "Collective over the grid. Indices are 1-based. Local arrays are in Fortran order, or have one dimension, "
        "column after column; they are written in place."
    )
    meanings = {name: f"{_meaning(routine, name)}." for name in routine.names}
    returns = f"INFO: 0{routine.fault and f', or i > 0: {routine.fault}'}."
    return docstring(
        f"{routine.text}, in {dtype.name}.", note, meanings, returns, f"ScaLAPACK, {full.upper()}"
    )


def _meaning(routine: ScalapackRoutine, name: str) -> str:
    if name == "trans" and routine.adjoint:
        return '"N", or the adjoint: "T" for real matrices, "C" for complex ones'
    if name == "m" and "w" in routine.names:
        return (
            "a writeable array of one integer to which the number of eigenvalues is written; None: it is not"
        )
    if name in _MEANINGS:
        return _MEANINGS[name]
    x = "VT" if name.endswith("vt") else name[-1].upper()
    if name.startswith("desc"):
        return f"nine integers that describe {x}, see ``descinit``; eleven if ``DTYPE_`` is 2"
    if name in _SIZES:
        return f"{size_text(name, routine.shapes, routine.written)}, at least 0"
    if name in routine.shapes:
        rows, cols = routine.shapes[name].split()
        return f"local array of {x}; sub({x}) is {_EXTENTS.get(rows, rows)} x {cols}"
    return f"{'row' if name[0] == 'i' else 'column'} of {x}, from 1, where sub({x}) begins"
