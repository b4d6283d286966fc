# SPDX-License-Identifier: Apache-2.0
"""p?gemr2d and p?trmr2d: copy a matrix, or a trapezoid of it, from one grid to another."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..comm import Cell, Exchange, Side
from ..engines.arrays import overlap
from ..errors import RankMismatchError
from ..layout import Grid, MatrixDescriptor, Trapezoid
from ..layout.trapezoid import copy_part
from ..matrix import DistributedMatrix
from .arguments import Faults
from .direct import here
from .grids import meant, of_number
from .operands import PblasOperand, check_sharing, entries, staged
from .routines import DTYPE, PblasFunction

__all__ = ["mover"]

_GENERAL = ["m", "n", "a", "ia", "ja", "desca", "b", "ib", "jb", "descb", "ictxt"]
_ARGUMENTS = {"gemr2d": _GENERAL, "trmr2d": ["uplo", "diag", *_GENERAL]}
"""The arguments' names, in ScaLAPACK's order."""
_TEXT = """Copy {what} of sub(A) to sub(B), which may be on another grid, in {dtype}.

Collective over the grid of ``ictxt``. Indices are 1-based, local arrays are in Fortran order, or have one dimension,
column after column. A process outside A's grid gives a descriptor whose context is -1; its other arguments for A are
not read. The same goes for B.

Args:
{options}    m: rows of sub(A) and sub(B).
    n: columns of sub(A) and sub(B).
    a: local array of A.
    ia: row of A, from 1, where sub(A) begins.
    ja: column of A, from 1, where sub(A) begins.
    desca: nine integers that describe A, see ``descinit``.
    b: local array of B, which is written in place.
    ib: row of B, from 1, where sub(B) begins.
    jb: column of B, from 1, where sub(B) begins.
    descb: nine integers that describe B.
    ictxt: a context of all the processes that have a part of A or B.

Raises:
    ParameterError: an argument is illegal, on every process; its ``info`` says which.
    RankMismatchError: the processes gave different arguments.

Source: ScaLAPACK REDIST, {name}; here ``DistributedMatrix.redistribute``.
"""
_OPTIONS = """\
    uplo: "U" or "L": which trapezoid; the rest of sub(B) keeps its values.
    diag: "N", or "U": without its diagonal.
"""

Described = tuple[Grid, tuple[int, ...], int, int]  # a grid, M_ to CSRC_, the first row and column


def mover(name: str, letter: str) -> PblasFunction:
    """Return "gemr2d" or "trmr2d" for one type, as a function with ScaLAPACK's signature."""
    full, names = f"p{letter}{name}", _ARGUMENTS[name]
    kinds = {
        "uplo": "str",
        "diag": "str",
        "a": "Any",
        "b": "Any",
        "desca": "Sequence[int]",
        "descb": "Sequence[int]",
    }
    signature = inspect.Signature(
        [
            inspect.Parameter(x, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kinds.get(x, "int"))
            for x in names
        ],
        return_annotation="None",
    )

    def function(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        if not _move_here(full, DTYPE[letter], given):
            _move(full, names, DTYPE[letter], given)

    triangular = name == "trmr2d"
    function.__name__ = function.__qualname__ = full
    function.__module__ = __name__.rpartition(".")[0]
    function.__doc__ = _TEXT.format(
        what="a trapezoid" if triangular else "all",
        dtype=DTYPE[letter].name,
        options=_OPTIONS if triangular else "",
        name=full.upper(),
    )
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _move_here(full: str, dtype: np.dtype, given: dict[str, Any]) -> bool:
    """Move between grids of this process alone, if a glance at the arguments shows that they are legal. Local.

    Returns:
        Whether it is done; if not, nothing has happened.
    """
    everybody, m, n = of_number(given["ictxt"]), given["m"], given["n"]
    if everybody is None or everybody.grid.size > 1:
        return False
    if type(m) is not int or type(n) is not int or min(m, n) < 1:
        return False
    uplo, diag = given.get("uplo", "L"), given.get("diag", "N")
    if uplo not in ("U", "u", "L", "l") or diag not in ("N", "n", "U", "u"):
        return False
    a, b = (
        here(given[x], given[f"i{x}"], given[f"j{x}"], given[f"desc{x}"], (m, n), dtype, written=x == "b")
        for x in "ab"
    )
    if a is None or b is None or overlap(a, b):
        return False
    with everybody.context.running(full):
        if "uplo" in given:
            part = Trapezoid.of_shape((m, n), uplo.upper(), diag.upper())
            copy_part(b, a, part, np.arange(m), np.arange(n))
        else:
            np.copyto(b, a)
    return True


def _move(full: str, names: list[str], dtype: np.dtype, given: dict[str, Any]) -> None:
    """Check the arguments, agree on them, move. Collective over the grid of ictxt."""
    faults = Faults(full, names)
    everybody = of_number(given["ictxt"])
    if everybody is None:
        faults.add("ictxt", f"{given['ictxt']!r} is not a context of this process")
        everybody = meant([given["ictxt"]])
        if everybody is None:
            raise faults.error()
    ctx = everybody.context
    with ctx.running(full):
        mine: dict[str, DistributedMatrix] = {}
        described: dict[str, Described] = {}
        with ctx.agreement(full) as facts:
            m, n = (faults.integer(name, given[name], 0) for name in "mn")
            trapezoid = [
                faults.letter(name, given[name], allowed)
                for name, allowed in (("uplo", "UL"), ("diag", "NU"))
                if name in names
            ]
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


def _operand(faults: Faults, name: str, given: dict[str, Any], shape: tuple[int, int]) -> PblasOperand | None:
    """Return A or B as this process describes it; None if the process has no part of it."""
    desc = given[f"desc{name}"]
    try:
        number = int(desc[1])
    except (TypeError, ValueError, IndexError):
        number = 0
    if number == -1:
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
    cells = tuple(Cell(coords, (found[coords],)) for coords in map(grid.coords, range(grid.size)))
    return replace(Side.of(part), cells=cells)


def _in_cells(side: Side, rank: int, array: NDArray[Any] | None) -> list[NDArray[Any] | None]:
    return [array if rank in cell.ranks else None for cell in side.cells]


def _on_host(x: DistributedMatrix) -> NDArray[Any]:
    """Return a local array as NumPy's. Local."""
    array: NDArray[Any] = x.local if isinstance(x.local, np.ndarray) else x.on_host()
    return array


def _write(b: DistributedMatrix, arrived: NDArray[Any], part: Trapezoid | None) -> None:
    """Put what has arrived, or ``part`` of it, into sub(B). Local."""
    host = _on_host(b)
    if part is None:
        host[...] = arrived
    else:
        copy_part(host, arrived, part, *b.descriptor.global_indices(b.context.rank))
    if host is not b.local:
        b.context.engine.from_host(b.local, host)
