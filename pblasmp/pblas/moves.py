# SPDX-License-Identifier: Apache-2.0
"""p?gemr2d and p?trmr2d: copy a matrix, or a trapezoid of it, from one grid to another."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..comm import Cell, Cells, Exchange, Side, agree_after
from ..engines.direct import Moved, Part
from ..errors import RankMismatchError
from ..layout import Grid, MatrixDescriptor, Trapezoid
from ..layout.grid import one_of
from ..layout.pieces import write_inside
from ..matrix.distributed import DistributedMatrix
from .arguments import Faults
from .direct import part_of
from .grids import meant, of_number
from .operands import PblasOperand, check_sharing, entries, staged
from .routine_functions import PblasRoutine, Values, functions_of

Described = tuple[Grid, tuple[int, ...], int, int]  # a grid, M_ to CSRC_, the first row and column


@dataclass(frozen=True, slots=True)
class MoveRoutine(PblasRoutine):
    """p?gemr2d or p?trmr2d, whose matrices may be on two grids."""

    def form(self, full: str, dtype: np.dtype) -> Callable[[Sequence[Any]], Any]:
        """Return what computes calls with legal arguments at once; see ``PblasRoutine``. Local."""
        names = self.names
        return lambda args: _move_at_once(full, dtype, dict(zip(names, args, strict=True)))

    def run(self, full: str, dtype: np.dtype, given: Values, *, voted: bool) -> None:
        """Check the arguments, agree on them, move. Collective over the grid of ictxt."""
        move_planned(full, self.names, dtype, given, voted=voted)


def _move_at_once(full: str, dtype: np.dtype, given: dict[str, Any]) -> bool | None:
    """Move if a glance at the arguments shows that they are legal. Collective over the grid of ictxt.

    Return True if it is done. None: nothing has happened. False: the ranks have voted and did not agree.
    """
    everybody, m, n = of_number(given["ictxt"]), given["m"], given["n"]
    if everybody is None or type(m) is not int or type(n) is not int or min(m, n) < 1:
        return None
    uplo, diag = given.get("uplo", "L"), given.get("diag", "N")
    if not (one_of(uplo, "UuLl") and one_of(diag, "NnUu")):
        return None
    ctx = everybody.context
    direct = ctx.direct_on_host
    if direct is None:
        return None
    found = [_described(given, x, (m, n), dtype) for x in "ab"]
    if found[0] is None or found[1] is None:
        return None
    (a, of_a), (b, of_b) = found[0], found[1]
    if a and b and a[0].address < b[0].end and b[0].address < a[0].end:
        return None
    part = Trapezoid.of_shape((m, n), uplo.upper(), diag.upper()) if "uplo" in given else None
    return direct.move(ctx.control, Moved(full, f"{part}", (m, n), dtype.itemsize, a, b, of_a, of_b, part))


def _described(
    given: dict[str, Any], x: str, shape: tuple[int, int], dtype: np.dtype
) -> tuple[Part | None, tuple[int, int, int] | None] | None:
    """Return a part of a matrix, and what ``Moved`` says of it; None if there is something to say about it. Local."""
    desc = given[f"desc{x}"]
    if _is_outside(desc):
        return None, None
    place = given[x], given[f"i{x}"], given[f"j{x}"], desc
    found = part_of(*place, shape, dtype, written=x == "b")
    if found is None:
        return None
    grid, part = found
    return part, (_number(part), grid.grid.size, grid.context.rank)


def _is_outside(desc: Any) -> bool:
    """Return whether this process is outside a matrix's grid. Local."""
    try:
        return bool(desc[1] == -1)
    except Exception:  # noqa: BLE001 (a descriptor of any kind)
        return False


def _number(part: Part) -> int:
    """Return a number below 2^53 of what all processes of its grid must say of a sub-matrix. Local."""
    held, i, j, _, _, _ = part
    digest = hashlib.blake2b(held.pattern.digest + struct.pack("=2q", i, j), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 11


def move_planned(full: str, names: list[str], dtype: np.dtype, given: dict[str, Any], *, voted: bool) -> None:
    """Check the arguments, agree on them, move. Collective over the grid of ictxt."""
    faults = Faults(full, names)
    everybody = of_number(given["ictxt"])
    if everybody is None:
        faults.no_context("ictxt", given["ictxt"])
        everybody = meant(full, [given["ictxt"]])
        if everybody is None:
            raise faults.error()
    ctx = everybody.context
    with ctx.running(full):
        m, n, trapezoid, mine, described, on_one_grid = agree_after(
            voted, partial(ctx.agreement, full), partial(_read, full, names, dtype, given, ctx)
        )
        faults = Faults(full, names)
        if 0 in (m, n):
            return
        part = Trapezoid.of_shape((m, n), *trapezoid) if trapezoid else None
        if on_one_grid:
            with staged(mine, "b") as used:
                used["a"].move_to(used["b"], part)
            return
        places = {
            name: (described[name], x.descriptor.grid.coords(x.context.rank)) for name, x in mine.items()
        }
        everyone = ctx.comm.allgather(places)
        with ctx.agreement(f"{full}: layouts"):
            source, target = (
                _side(faults, name, [each.get(name) for each in everyone], (m, n), dtype) for name in "ab"
            )
        a, b = mine.get("a"), mine.get("b")
        arrived = None if b is None else np.empty(b.local.shape, dtype, order="F")
        from_a = _in_cells(source, ctx.rank, None if a is None else _on_host(a))
        Exchange(ctx.comm, source, target, dtype).run(from_a, _in_cells(target, ctx.rank, arrived))
        if b is not None and arrived is not None:
            _write(b, arrived, part)


def _read(
    full: str,
    names: list[str],
    dtype: np.dtype,
    given: dict[str, Any],
    ctx: Any,
    facts: dict[str, Any],
) -> tuple[int, int, list[str], dict[str, DistributedMatrix], dict[str, Described], bool]:
    """Return the arguments, and this process's matrices; add what must be equal to ``facts``. Local."""
    faults = Faults(full, names)
    if of_number(given["ictxt"]) is None:
        faults.no_context("ictxt", given["ictxt"])
    m, n = (faults.integer(name, given[name], 0) for name in "mn")
    trapezoid = [
        faults.letter(name, given[name], allowed)
        for name, allowed in (("uplo", "UL"), ("diag", "NU"))
        if name in names
    ]
    mine: dict[str, DistributedMatrix] = {}
    described: dict[str, Described] = {}
    for name in "ab":
        operand = _operand(faults, name, given, (m, n))
        grid = of_number(operand.desc[1]) if operand and operand.desc else None
        if not operand or grid is None:
            continue
        operand.check(faults, grid)
        matrix = None if faults else operand.matrix(faults, grid, dtype, written=name == "b")
        if matrix is not None:
            mine[name] = matrix
            described[name] = (grid.grid, operand.desc[2:8], operand.i, operand.j)
    check_sharing(faults, mine, "b")
    faults.check()
    on_one_grid = len(mine) == 2 and all(x.context is ctx for x in mine.values())
    facts.update(m=m, n=n, trapezoid=trapezoid, matrices=described if on_one_grid else None)
    return m, n, trapezoid, mine, described, on_one_grid


def _operand(faults: Faults, name: str, given: dict[str, Any], shape: tuple[int, int]) -> PblasOperand | None:
    """Return A or B as this process describes it; None if the process has no part of it."""
    desc = given[f"desc{name}"]
    if _is_outside(desc):
        return None
    values = entries(faults, f"desc{name}", desc)
    if values and of_number(values[1]) is None:
        faults.add(f"desc{name}", f"{values[1]} is not a context of this process, nor -1", 2)
    i, j = (faults.integer(each, given[each], 1) for each in (f"i{name}", f"j{name}"))
    return PblasOperand(name, given[name], i, j, values, shape)


def _side(
    faults: Faults,
    name: str,
    places: list[tuple[Described, tuple[int, int]] | None],
    shape: tuple[int, int],
    dtype: np.dtype,
) -> Side:
    """Return sub(A) or sub(B) as an exchange sees it, with the place in its grid that each process has given."""
    found = {place[1]: rank for rank, place in enumerate(places) if place is not None}
    descriptions = {place[0] for place in places if place is not None}
    if not descriptions:
        faults.add(f"desc{name}", f"is -1 on every process: none has a part of {name.upper()}", 2)
        faults.check()
    if len(descriptions) != 1:
        raise RankMismatchError(
            f"{name.upper()}: its processes describe it in {len(descriptions)} ways, expected one"
        )
    ((grid, (m, n, mb, nb, rsrc, csrc), i, j),) = descriptions
    if len(found) != grid.size:
        raise RankMismatchError(
            f"{name.upper()}: {len(found)} of the {grid.size} processes of its grid take part, expected all of them"
        )
    whole = MatrixDescriptor((m, n), (mb, nb), grid, (rsrc, csrc), dtype, "F")
    part = whole[i - 1 : i - 1 + shape[0], j - 1 : j - 1 + shape[1]]
    cells = Cells.of([Cell(coords, (found[coords],)) for coords in map(grid.coords, range(grid.size))])
    return replace(Side.of(part), cells=cells)


def _in_cells(side: Side, rank: int, array: NDArray[Any] | None) -> dict[int, NDArray[Any]]:
    mine = side.cells.owned_by(rank)
    return {} if mine is None or array is None else {mine: array}


def _on_host(x: DistributedMatrix) -> NDArray[Any]:
    """Return a local array as NumPy's. Local."""
    array: NDArray[Any] = x.local if isinstance(x.local, np.ndarray) else x.on_host()
    return array


def _write(b: DistributedMatrix, arrived: NDArray[Any], part: Trapezoid | None) -> None:
    """Put what has arrived, or ``part`` of it, into sub(B). Local."""
    host = _on_host(b)
    write_inside(host, arrived.__getitem__, part, *b.descriptor.global_indices(b.context.rank))
    if host is not b.local:
        b.context.engine.from_host(b.local, host)


_NOTE = (
    "A process outside A's grid gives a descriptor whose context is -1; its other arguments for A are not read. The "
    "same goes for B. "
)
_MEANINGS = {
    "uplo": '"U" or "L": which trapezoid; the rest of sub(B) keeps its values.',
    "diag": '"N", or "U": without its diagonal.',
    "ictxt": "a context of all the processes that have a part of A or B.",
}

FUNCTIONS = functions_of(
    MoveRoutine(
        name, "sdcz", f"{options}m n A B ictxt", {"a": "m n", "b": "m n"},
        f"Copy {what} of sub(A) to sub(B), which may be on another grid", DistributedMatrix.redistribute,
        "ScaLAPACK REDIST, {}; here ``DistributedMatrix.redistribute``", written="b", note=_NOTE, meanings=_MEANINGS,
        callers="Collective over the grid of ``ictxt``.",
    )
    for name, options, what in (("gemr2d", "", "all"), ("trmr2d", "uplo diag ", "a trapezoid"))
)  # fmt: skip
"""The functions by their full names."""
