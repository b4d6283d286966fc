# SPDX-License-Identifier: Apache-2.0
"""ScaLAPACK's auxiliary routines on whole sub-matrices: norms, copies, constants, scaling, traces, elements."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..blas.level3 import geadd, tradd
from ..blas.vector_calls import as_number
from ..dtypes import element_type, real_dtype
from ..engines.direct import Asked, Part
from ..errors import RankMismatchError
from ..layout import MatrixDescriptor, Trapezoid
from ..matrix.distributed import DistributedMatrix
from ..runtime.reading import number
from .arguments import Faults, give, takes_number
from .direct import part_of
from .grids import PATIENCE, ProcessGrid, exchanged, of_number, peers
from .operands import OwnElements, element_place, entries, filled, with_same_places
from .routine_functions import PblasFunction, PblasRoutine, Values, functions_of, names_of

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
_SCOPES = {"R": "process row", "C": "process column"}
_SMALL = 1 << 18  # elements of a matrix whose norm is made at once
_PLACE = ("a", "ia", "ja", "desca", "work")
_NORM_ARGUMENTS = {
    "all": ("norm", "m", "n", *_PLACE),
    "symmetric": ("norm", "uplo", "n", *_PLACE),
    "hermitian": ("norm", "uplo", "n", *_PLACE),
    "triangular": ("norm", "uplo", "diag", "m", "n", *_PLACE),
}
_TRAPEZOIDS = {"L": Trapezoid("L"), "U": Trapezoid("U"), "H": Trapezoid("U", -1)}
_EVERYTHING = '"U" or "L" (that triangle, with the diagonal), or another letter (everything)'


@dataclass(frozen=True, slots=True)
class AuxiliaryRoutine(PblasRoutine):
    """An auxiliary routine as ScaLAPACK has it.

    Attributes:
        at_once: computes calls with legal arguments faster; see ``form``, after name and type.
        local: whether a call is local, as ``is_local`` says; True: always.

    ``python`` computes it from the values of its arguments and its matrices.
    """

    at_once: Callable[[str, np.dtype, Sequence[Any]], Any] | None = None
    local: Callable[[Values, ProcessGrid], bool | None] | bool = False

    def is_local(self, given: Values, grid: ProcessGrid) -> bool | None:
        """Return whether a call is computed without the grid's other processes; None if illegal arguments hide it.

        Local.
        """
        return self.local if isinstance(self.local, bool) else self.local(given, grid)

    @property
    def patience(self) -> float:
        """For how many seconds a process whose arguments hide it waits to learn what call others make."""
        if isinstance(self.local, bool):
            return 0.0 if self.local else math.inf
        return PATIENCE

    def form(self, full: str, dtype: np.dtype) -> Callable[[Sequence[Any]], Any] | None:
        """Return ``at_once`` for one type. Local."""
        return None if self.at_once is None else partial(self.at_once, full, dtype)

    def changes_nothing(self, values: Values) -> bool:  # noqa: ARG002
        """Return False: also of nothing there is a norm. Local."""
        return False

    def check(self, faults: Faults, values: Values, grid: ProcessGrid) -> None:
        """Note a division by 0, and a process that there is not. Local."""
        if values.get("cfrom") == 0 or math.isnan(values.get("cfrom", 1)):
            faults.add("cfrom", f"expected a number other than 0, got {values['cfrom']}")
        for name, extent in zip(("irprnt", "icprnt"), grid.grid.shape, strict=True):
            if values.get(name, 0) >= extent:
                faults.add(name, f"expected less than {extent}, got {values[name]}")

    def compute(self, values: Values, matrices: dict[str, DistributedMatrix]) -> Any:
        """Compute it. Collective over the grid."""
        return self.python(values, matrices)


def _norm(values: Values, matrices: dict[str, DistributedMatrix], kind: str | None = None) -> Any:
    a = matrices["a"]
    which: Any = _KINDS[values["norm"]]
    if kind is None:
        found = a.norm(which)
    else:
        found = a.norm(which, uplo=values["uplo"], diag=values.get("diag", "N"), kind=kind)  # type: ignore[arg-type]
    return a.dtype.type(found).real


def _measured(kind: str, full: str, dtype: np.dtype, args: Sequence[Any]) -> Any:
    """Return a norm in one meeting of the ranks. Collective over the grid."""
    given = dict(zip(_NORM_ARGUMENTS[kind], args, strict=True))
    norm, uplo, diag, n = given["norm"], given.get("uplo", "L"), given.get("diag", "N"), given["n"]
    if not type(norm) is type(uplo) is type(diag) is str:
        return None
    which, uplo, diag = _KINDS.get(norm.upper()), uplo.upper(), diag.upper()
    if which is None or uplo not in ("U", "L") or diag not in ("U", "N"):
        return None
    shape = given.get("m", n), n
    return _summed(
        f"{kind}: norm {which}", shape, full, dtype, given, uplo, diag, lambda x: dtype.type(x).real
    )


def _traced(full: str, dtype: np.dtype, args: Sequence[Any]) -> Any:
    """Return a trace in one meeting of the ranks. Collective over the grid."""
    given = dict(zip(("n", "a", "ia", "ja", "desca"), args, strict=True))
    return _summed(
        "diagonal: sum", (given["n"],) * 2, full, dtype, given, "L", "N", partial(as_number, dtype)
    )


def _summed(
    routine: str, shape: tuple[Any, Any], full: str, dtype: np.dtype, given: Values, uplo: str, diag: str,
    typed: Callable[[Any], Any],
) -> Any:  # fmt: skip
    """Return a number that the ranks make of a small matrix; None or False as ``DirectForm.run``. Collective."""
    if not _are_sizes(*shape) or shape[0] * shape[1] > _SMALL:
        return None
    found = part_of(given["a"], given["ia"], given["ja"], given["desca"], shape, dtype, written=False)
    told = None if found is None else _told(full, routine, *found, uplo, diag)
    return told if told is None or told is False else typed(told)


def _told(full: str, routine: str, grid: ProcessGrid, part: Part, uplo: str = "L", diag: str = "N") -> Any:
    """Return a number that the ranks make of a sub-matrix; None or False as ``DirectForm.run``. Collective."""
    ctx = grid.context
    direct = ctx.direct_on_host
    if direct is None:
        return None
    asked = Asked(full, routine, part, None, None, part, False, uplo=uplo, diag=diag)
    return direct.reduce(ctx.control, asked)


def _are_sizes(m: Any, n: Any) -> bool:
    return type(m) is int and type(n) is int and m > 0 and n > 0


# -- local routines: of what each process has


def _trapezoid(letter: str) -> Trapezoid | None:
    """Return the part that an option names; None: all."""
    return _TRAPEZOIDS.get(letter[:1].upper())


def _lacpy(values: Values, matrices: dict[str, DistributedMatrix]) -> None:
    a, b, uplo = matrices["a"], matrices["b"], values["uplo"]
    if not b.size:
        return
    if a.descriptor.same_places(b.descriptor):
        source, target = OwnElements.of(a), OwnElements.of(b)
        if source is not None and target is not None:
            target.write(source.local.__getitem__, _trapezoid(uplo))
    elif uplo == "A":
        geadd(a, b, beta=0, out=b)
    else:
        tradd(a, b, uplo=uplo, beta=0, out=b)


def _copies_in_place(given: Values, grid: ProcessGrid) -> bool | None:
    """Return whether each process has the same elements of sub(A) and sub(B). Local.

    So it is for any sizes, legal or not, if both begin alike in one layout. Of other illegal descriptors, places and
    sizes it is unknown: None.
    """
    try:
        layouts = [[int(value) for value in given[f"desc{x}"]] for x in "ab"]
        begins = [[operator.index(given[f"{at}{x}"]) for at in "ij"] for x in "ab"]
        alike = all(len(each) == 9 and of_number(each[1]) is grid for each in layouts)
        if alike and layouts[0][2:8] == layouts[1][2:8] and begins[0] == begins[1]:
            return True
        m, n = operator.index(given["m"]), operator.index(given["n"])
        parts = []
        for x in "ab":
            faults = Faults("p?lacpy", [f"desc{x}"])
            desc = entries(faults, f"desc{x}", given[f"desc{x}"])
            if faults or of_number(desc[1]) is not grid:
                return None
            i, j = operator.index(given[f"i{x}"]) - 1, operator.index(given[f"j{x}"]) - 1
            whole = MatrixDescriptor(desc[2:4], desc[4:6], grid.grid, desc[6:8], np.dtype("f8"), "F")
            if min(i, j, m, n) < 0 or i + m > whole.shape[0] or j + n > whole.shape[1]:
                return None if min(m, n) else False
            parts.append(whole[i : i + m, j : j + n])
    except Exception:  # noqa: BLE001 (a descriptor of any kind)
        return None
    return parts[0].same_places(parts[1])


def _copied_at_once(full: str, dtype: np.dtype, args: Sequence[Any]) -> Any:  # noqa: ARG001
    uplo, m, n, a, ia, ja, desca, b, ib, jb, descb = args
    if type(uplo) is not str or not _are_sizes(m, n):
        return None
    of_a = part_of(a, ia, ja, desca, (m, n), dtype, written=False)
    of_b = part_of(b, ib, jb, descb, (m, n), dtype, written=True)
    if of_a is None or of_b is None or of_a[0] is not of_b[0] or not with_same_places(of_a[1], of_b[1]):
        return None
    source, target = OwnElements.of_part(of_a[1]), OwnElements.of_part(of_b[1])
    if source is not None and target is not None:
        target.write(source.local.__getitem__, _trapezoid(uplo))
    return True


def _laset(values: Values, matrices: dict[str, DistributedMatrix]) -> None:
    piece = OwnElements.of(matrices["a"])
    if piece is not None:
        filled(piece, _trapezoid(values["uplo"]), values["alpha"], values["beta"])


def _filled_at_once(full: str, dtype: np.dtype, args: Sequence[Any]) -> Any:  # noqa: ARG001
    uplo, m, n, alpha, beta, a, i, j, desc = args
    alpha, beta = (number(each, element_type(dtype).blas, False) for each in (alpha, beta))
    if type(uplo) is not str or not _are_sizes(m, n) or alpha is None or beta is None:
        return None
    found = part_of(a, i, j, desc, (m, n), dtype, written=True)
    if found is None:
        return None
    piece = OwnElements.of_part(found[1])
    if piece is not None:
        filled(piece, _trapezoid(uplo), alpha, beta)
    return True


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
    piece = OwnElements.of(matrices["a"])
    return _scaled(piece, values["type"], values["cfrom"], values["cto"], values["info"])


def _scaled_at_once(full: str, dtype: np.dtype, args: Sequence[Any]) -> Any:  # noqa: ARG001
    kind, cfrom, cto, m, n, a, i, j, desc, info = args
    cfrom, cto = (number(each, element_type(dtype).blas, True) for each in (cfrom, cto))
    legal = type(kind) is str and kind[:1].upper() in ("G", "L", "U", "H") and takes_number(info)
    if not legal or not _are_sizes(m, n) or cto is None or not cfrom or math.isnan(cfrom.real):
        return None
    found = part_of(a, i, j, desc, (m, n), dtype, written=True)
    return None if found is None else _scaled(OwnElements.of_part(found[1]), kind, cfrom.real, cto.real, info)


def _scaled(piece: OwnElements | None, kind: str, cfrom: float, cto: float, info: Any) -> int:
    """Multiply by ``cto / cfrom``, and return INFO. Local."""
    if piece is not None:
        dtype = piece.local.dtype
        with np.errstate(all="ignore"):
            for factor in _factors(dtype, cfrom, cto):
                piece.scale(real_dtype(dtype).type(factor), _trapezoid(kind))
    give(info, 0)
    return 0


def _elset(values: Values, matrices: dict[str, DistributedMatrix]) -> None:
    piece = OwnElements.of(matrices["a"])
    if piece is not None:
        piece.local[...] = values["alpha"]


def _set_at_once(full: str, dtype: np.dtype, args: Sequence[Any]) -> Any:  # noqa: ARG001
    a, i, j, desc, alpha = args
    found = part_of(a, _index(i), _index(j), desc, (1, 1), dtype, written=True)
    alpha = number(alpha, element_type(dtype).blas, False)
    if found is None or alpha is None:
        return None
    grid, part = found
    process, place = element_place(part)
    if process == grid.info[2:]:
        part[0].array[place] = alpha
    return True


def _is_of_some(given: Values, _: ProcessGrid) -> bool | None:
    """Return whether p?elget is not a call of the whole grid; None if the scope is illegal. Local."""
    scope = given["scope"][:1].upper() if isinstance(given["scope"], str) else ""
    return scope != "A" if scope and scope in "ARC " else None


def _elget(values: Values, matrices: dict[str, DistributedMatrix]) -> Any:
    a, scope = matrices["a"], values["scope"]
    if scope == "A":
        return give(values["alpha"], a.allgather()[0, 0])
    d, ctx = a.descriptor, a.context
    ctx.engine.synchronize()
    mine = a.on_host()[0, 0] if a.local.size else a.dtype.type(0)
    grid = of_number(values["a"].desc[1])
    assert grid is not None
    owner, place = (d.rows.owner(0), d.cols.owner(0)), (values["a"].i, values["a"].j)
    return give(values["alpha"], _sent(grid, scope, owner, place, mine))


def _got_at_once(full: str, dtype: np.dtype, args: Sequence[Any]) -> Any:
    scope, _, alpha, a, i, j, desc = args
    if type(scope) is not str or not takes_number(alpha):
        return None
    scope = scope[:1].upper()
    found = part_of(a, _index(i), _index(j), desc, (1, 1), dtype, written=False)
    if not scope or scope not in "ARC " or found is None:
        return None
    grid, part = found
    if scope == "A" and grid.grid.size > 1:
        told = _told(full, "all: element", grid, part)
        return told if told is None or told is False else give(alpha, as_number(dtype, told))
    process, place = element_place(part)
    mine = part[0].array[place] if process == grid.info[2:] else dtype.type(0)
    return give(alpha, _sent(grid, scope, process, (_index(i), _index(j)), mine))


def _index(i: Any) -> Any:
    """Return an index of ``indxl2g``'s arrays as an int, others as they are. Local."""
    return int(i) if isinstance(i, np.integer) else i


def _sent(grid: ProcessGrid, scope: str, owner: tuple[int, int], place: tuple[int, int], mine: Any) -> Any:
    """Return the element of a process in its process row ("R") or column ("C"), ``mine`` elsewhere.

    Collective over that process row or column: each of its processes tells all others which element it asks for.
    RankMismatchError if they ask for different ones.
    """
    axis = {"R": 0, "C": 1}.get(scope)
    here, ctx = grid.info[2:], grid.context
    if axis is None or here[axis] != owner[axis] or grid.grid.shape[1 - axis] == 1:
        return mine
    others, at = peers(grid, scope), grid.grid.rank(*owner)
    told = np.array([*place, mine.real, mine.imag])
    heard = exchanged(ctx, "p?elget", others, told)
    places = {tuple(int(i) for i in each[:2]) for each in (told, *heard)}
    if len(places) > 1:
        raise RankMismatchError(f"p?elget: the processes of a {_SCOPES[scope]} ask for {sorted(places)}")
    real, imag = (heard[others.index(at)] if at in others else told)[2:]
    return mine.dtype.type(complex(real, imag) if mine.dtype.kind == "c" else real)


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
    name: str, letters: str, arguments: str, shapes: dict[str, str], summary: str, run: Callable[..., Any], here: str,
    **more: Any,
) -> AuxiliaryRoutine:  # fmt: skip
    legal, names = more.pop("legal", {}), names_of(arguments)
    words = {each: f"{text}." for each, text in _WORDS.items()}
    if legal.get("uplo") == "ULA":
        words["uplo"] = f"{_EVERYTHING}."
    if name == "elget":
        words["alpha"] = "an array of one element to which the number is written, or None."
    numbers = tuple(each for each in names if each == "info" or (each == "alpha" and name == "elget"))
    return AuxiliaryRoutine(
        name, letters, arguments, shapes, summary, run, f"ScaLAPACK TOOLS, {{}}; here ``{here}``", legal=legal,
        meanings=words, numbers=numbers, answer=" and ".join(numbers) or "the result",
        unread=("work", "top", "cmatnm", "nout"), **more,
    )  # fmt: skip


_SQUARE, _WHOLE = {"a": "n n"}, {"a": "m n"}
_NORMS, _UPLO, _DIAG = {"norm": "M1OIFE"}, {"uplo": "UL"}, {"diag": "NU"}

_ROUTINES = (
    _row("lange", "sdcz", "norm m n A work", _WHOLE, "Return a norm of sub(A)", _norm, "A.norm(ord)",
         returns="Any", written="", legal=_NORMS, at_once=partial(_measured, "all")),
    _row("lansy", "sdcz", "norm uplo n A work", _SQUARE, "Return a norm of sub(A), which is symmetric",
         lambda v, x: _norm(v, x, "symmetric"), 'A.norm(ord, uplo="L", kind="symmetric")',
         returns="Any", written="", legal=_NORMS | _UPLO, at_once=partial(_measured, "symmetric")),
    _row("lanhe", "cz", "norm uplo n A work", _SQUARE, "Return a norm of sub(A), which is Hermitian",
         lambda v, x: _norm(v, x, "hermitian"), 'A.norm(ord, uplo="L", kind="hermitian")',
         returns="Any", written="", legal=_NORMS | _UPLO, at_once=partial(_measured, "hermitian")),
    _row("lantr", "sdcz", "norm uplo diag m n A work", _WHOLE,
         "Return a norm of sub(A), which is triangular or trapezoidal",
         lambda v, x: _norm(v, x, "triangular"), 'A.norm(ord, uplo="L")',
         returns="Any", written="", legal=_NORMS | _UPLO | _DIAG, at_once=partial(_measured, "triangular")),
    _row("lacpy", "sdcz", "uplo m n A B", {"a": "m n", "b": "m n"}, "Copy sub(A) to sub(B)", _lacpy,
         "B[...] = A", written="b", legal={"uplo": "ULA"}, at_once=_copied_at_once, local=_copies_in_place,
         callers="Local. If processes do not have the same elements of sub(A) and sub(B), which ScaLAPACK requires, "
         "collective over the grid."),
    _row("laset", "sdcz", "uplo m n alpha beta A", _WHOLE,
         "Set sub(A) to beta on its diagonal and to alpha off it", _laset, "A[...] = alpha", written="a",
         legal={"uplo": "ULA"}, at_once=_filled_at_once, local=True, callers="Local."),
    _row("lascl", "sdcz", "type cfrom cto m n A info", _WHOLE, "Multiply sub(A) by cto / cfrom", _lascl,
         "A *= cto / cfrom", returns="int", written="a", legal={"type": "GLUH"}, real="cfrom cto",
         at_once=_scaled_at_once, local=True, callers="Local."),
    _row("latra", "sdcz", "n A", _SQUARE, "Return the trace of sub(A)",
         lambda _, matrices: matrices["a"].trace(), "A.trace()", returns="Any", written="", at_once=_traced),
    _row("elset", "sdcz", "A alpha", {"a": "1 1"}, "Set A(ia, ja) to alpha", _elset, "A[i, j] = alpha", written="a",
         at_once=_set_at_once, local=True, callers="Local."),
    _row("elget", "sdcz", "scope top alpha A", {"a": "1 1"}, "Return A(ia, ja)", _elget, "A[i, j]",
         returns="Any", written="", legal={"scope": "ARC "}, at_once=_got_at_once,
         local=_is_of_some,
         callers='Local. With scope "R" or "C" collective over the process row or column that has the element, with '
         '"A" over the grid.'),
    _row("laprnt", "sdcz", "m n A irprnt icprnt cmatnm nout work", _WHOLE, "Print the elements of sub(A)", _laprnt,
         "print(A.gather())", written=""),
)  # fmt: skip

FUNCTIONS: dict[str, PblasFunction] = functions_of(_ROUTINES)
"""The auxiliary routines by their full names."""
