# SPDX-License-Identifier: Apache-2.0
"""Process grids with context numbers, as in BLACS: gridinit, gridinfo, gridexit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..comm import Agreement, Communicator, wrap
from ..context import Context
from ..layout import Grid
from .arguments import Faults

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..engines.choice import EngineName

__all__ = ["ProcessGrid", "gridexit", "gridinfo", "gridinit", "of_number"]


@dataclass(frozen=True, slots=True, eq=False)
class ProcessGrid:
    """What a context's number refers to: a pblasmp Context of exactly the grid's ranks, and the grid.

    Attributes:
        number: the one that gridinit returned.
        context: the ranks, in the order of the grid's.
        grid: how they are arranged.
        parent: the Context that gridinit was given, which closes this when it closes.
        layouts: what direct calls know of descriptors.
    """

    number: int
    context: Context
    grid: Grid
    parent: Context | None
    layouts: dict[Any, Any] = field(default_factory=dict, repr=False)

    def close(self) -> None:
        """Forget the number, and close the context if gridinit made it. Collective over the grid."""
        _known.pop(self.number, None)
        if self.context is not self.parent:
            self.context.close()


class _Outside:
    """The entry, on ranks outside a grid, in a context's list of children, where the ranks inside have the grid."""

    def close(self) -> None:
        pass


_known: dict[int, ProcessGrid] = {}
_numbers = itertools.count()


def gridinit(
    context: Context | MPI.Comm | None,
    order: str,
    nprow: int,
    npcol: int,
    *,
    engine: EngineName = "auto",
) -> int:
    """Make a grid of the first ``nprow * npcol`` processes and return the number of its BLACS context.

    Collective over the processes of ``context``. Those that are not in the grid get -1, as in BLACS, and take no part
    in calls on it. A grid over a Context is freed with the Context at the latest.

    Args:
        context: the processes: a pblasmp Context, an mpi4py communicator, or None for COMM_WORLD.
        order: "Row" or "Col", the first letter counts: how the processes are numbered on the grid.
        nprow: process rows.
        npcol: process columns.
        engine: as in ``pblasmp.Context``; with a Context, its engine.

    Raises:
        ParameterError: an argument is illegal, or the grid has more processes than there are.
        LibraryNotFoundError: a library that the engine needs is missing.

    Source: BLACS, BLACS_GRIDINIT.
    """
    if isinstance(context, Context):
        return _made(context.comm, context, order, nprow, npcol, context.engine.name)
    comm = wrap(context)
    try:
        return _made(comm, None, order, nprow, npcol, engine)
    finally:
        comm.free()


def _made(
    comm: Communicator, context: Context | None, order: str, nprow: int, npcol: int, engine: Any
) -> int:
    with Agreement(comm, "gridinit") if context is None else context.agreement("gridinit") as facts:
        faults = Faults("gridinit", ["context", "order", "nprow", "npcol"])
        letter = faults.letter("order", order, "RC")
        nprow, npcol = faults.integer("nprow", nprow, 1), faults.integer("npcol", npcol, 1)
        if not faults and nprow * npcol > comm.size:
            faults.add(
                "nprow", f"a grid of {nprow} x {npcol} needs {nprow * npcol} processes, got {comm.size}"
            )
        faults.check()
        grid = Grid(nprow, npcol, "row" if letter == "R" else "col")
        facts.update(grid=grid)
    if context is not None and grid.size == comm.size:
        return _numbered(context, grid, context)
    groups = [range(grid.size), range(grid.size, comm.size)]
    part = comm.split([group for group in groups if group])
    try:
        if comm.rank < grid.size:
            return _numbered(Context(part, engine), grid, context)
    finally:
        part.free()
    if context is not None:
        context.adopt(_Outside())
    return -1


def _numbered(ranks: Context, grid: Grid, parent: Context | None) -> int:
    made = ProcessGrid(next(_numbers), ranks, grid, parent)
    _known[made.number] = made
    if parent is not None:
        parent.adopt(made)
    return made.number


def of_number(number: Any) -> ProcessGrid | None:
    """Return the grid that a context's number refers to, None if there is none. Local."""
    try:
        return _known.get(int(number))
    except (TypeError, ValueError):
        return None


def gridinfo(ictxt: int) -> tuple[int, int, int, int]:
    """Return ``(nprow, npcol, myrow, mycol)``: the grid, and this process's place in it. Local.

    All four are -1 if ``ictxt`` is not a context of this process. Coordinates count from 0.

    Source: BLACS, BLACS_GRIDINFO.
    """
    found = of_number(ictxt)
    if found is None:
        return -1, -1, -1, -1
    return (*found.grid.shape, *found.grid.coords(found.context.rank))


def gridexit(ictxt: int) -> None:
    """Free a grid; its number is not a context any more. Collective over the grid.

    On processes outside the grid (``ictxt`` is -1) nothing happens.

    Raises:
        ParameterError: ``ictxt`` is neither -1 nor a context.

    Source: BLACS, BLACS_GRIDEXIT.
    """
    found = of_number(ictxt)
    if found is not None:
        if found.parent is not None:
            found.parent.release(found)
        found.close()
    elif ictxt != -1:
        faults = Faults("gridexit", ["ictxt"])
        faults.add("ictxt", f"{ictxt!r} is not a context of this process")
        raise faults.error()
