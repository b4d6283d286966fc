# SPDX-License-Identifier: Apache-2.0
"""Process grids with context numbers, as in BLACS: gridinit, gridinfo, gridexit."""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..comm import CLOSING, Agreement, Communicator, this_process, wrap
from ..comm.mpi_communicator import mpi
from ..context import Context
from ..errors import ArgumentError, short_repr
from ..launchers import surroundings
from ..layout import Grid
from .arguments import Faults

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..engines.choose import EngineName


@dataclass(frozen=True, slots=True, eq=False)
class ProcessGrid:
    """What a context's number refers to: a pblasmp Context of exactly the grid's ranks, and the grid.

    Attributes:
        number: the one that gridinit returned.
        context: the ranks, in the order of the grid's.
        grid: how they are arranged.
        parent: the Context that gridinit was given, which closes this when it closes.
        info: what gridinfo returns.
        key: of a grid made of a communicator: equal to that of each one that can take its place, on every process.
        layouts: what direct calls know of descriptors, and of arrays with them.
    """

    number: int
    context: Context
    grid: Grid
    parent: Context | None
    info: tuple[int, int, int, int]
    key: Any = None
    layouts: dict[Any, Any] = field(default_factory=dict, repr=False)

    def close(self) -> None:
        """Close the context if gridinit made it, or let it idle, and forget the number. Collective over the grid."""
        if self.context is not self.parent:
            wanted = self.key is not None and sum(map(len, idle_grids.values())) < MOST_IDLE
            if self.context.idle(wanted=wanted):
                idle_grids.setdefault(self.key, []).append(self)
        _known[self.number] = None


class _Outside:
    """The entry, on ranks outside a grid, in a context's list of children, where the ranks inside have the grid."""

    def close(self) -> None:
        pass


PATIENCE = 1.0
"""For how many seconds a process whose arguments are illegal waits to learn whether others wait for it."""

_known: dict[int, ProcessGrid | None] = {}  # by number; None if it is closed
idle_grids: dict[Any, list[ProcessGrid]] = {}  # by key; the last one that was closed is last
MOST_IDLE = 32
_numbers = itertools.count()


def blacs_get(ictxt: int, what: int) -> int:
    """Return 0, the default system context, which ``gridinit`` takes for COMM_WORLD. Local.

    Args:
        ictxt: not used, -1 in most programs.
        what: 0. Of what else BLACS tells and sets there is nothing here.

    Raises:
        ParameterError: ``what`` is not 0.

    Source: BLACS, BLACS_GET.
    """
    faults = Faults("blacs_get", ["ictxt", "what"])
    if faults.integer("ictxt", ictxt) == ictxt and faults.integer("what", what) != 0:
        faults.add("what", f"expected 0, the default system context, got {short_repr(what)}")
    faults.check()
    return 0


def gridinit(
    context: Context | MPI.Comm | int | None,
    order: str,
    nprow: int,
    npcol: int,
    *,
    engine: EngineName = "auto",
) -> int:
    """Make a grid of the first ``nprow * npcol`` processes and return the number of its BLACS context.

    Collective over the processes of ``context``. Those that are not in the grid get -1, as in BLACS, and take no part
    in calls on it. A grid over a Context is freed with the Context at the latest. On the host engine, a grid of the
    same shape and processes as one that ``gridexit`` has freed may get that one's number and what it held.

    Args:
        context: the processes: a pblasmp Context, an mpi4py communicator, or None or ``blacs_get``'s 0 for COMM_WORLD.
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
    comm = _processes("gridinit", context)
    try:
        return _made(comm, None, order, nprow, npcol, engine)
    finally:
        comm.free()


def _processes(call: str, context: Any) -> Communicator:
    """Return the processes of a communicator, or all of them for None or ``blacs_get``'s 0. Collective over them."""
    try:
        return wrap(None if type(context) is int and context == 0 else context)
    except ArgumentError as error:
        _refuse(call, error)


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
        # all that a context depends on, apart from its ranks
        settings = repr(engine), *sorted(x for x in os.environ.items() if x[0].startswith("PBLASMP_"))
    if context is not None and grid.size == comm.size:
        return _numbered(context, grid, context)
    inside = comm.rank < grid.size
    key = None
    if context is None:
        key = grid, tuple(comm.allgather((this_process(), settings))[: grid.size])
        if all(comm.allgather(not inside or key in idle_grids)):
            return _woken(key) if inside else -1
    groups = [range(grid.size), range(grid.size, comm.size)]
    part = comm.split([group for group in groups if group])
    try:
        if inside:
            return _numbered(Context(part, engine), grid, context, key)
    finally:
        part.free()
    if context is not None:
        context.take_over(_Outside())
    return -1


def _woken(key: Any) -> int:
    """Return the number of a grid that idles. Collective over the grid."""
    found = idle_grids[key].pop()
    if not idle_grids[key]:
        del idle_grids[key]
    found.context.resume()
    _known[found.number] = found
    return found.number


def _numbered(ranks: Context, grid: Grid, parent: Context | None, key: Any = None) -> int:
    made = ProcessGrid(next(_numbers), ranks, grid, parent, (*grid.shape, *grid.coords(ranks.rank)), key)
    _known[made.number] = made
    if parent is not None:
        parent.take_over(made)
    return made.number


def of_number(number: Any) -> ProcessGrid | None:
    """Return the grid that a context's number refers to, None if there is none. Local."""
    try:
        return _known.get(operator.index(number))
    except Exception:  # noqa: BLE001 (whatever it is, it is no number)
        return None


def meant(call: str, numbers: Iterable[Any], limit: float = math.inf) -> ProcessGrid | None:
    """Return the grid of a call's contexts, or whose processes can agree that they are wrong; None if that is unknown.

    If they are of several grids or of none, it is that in which the other processes make the call. With -1, the context
    of processes outside a grid, or that of a grid that is closed, these need not make it: it is unknown if none of them
    waits within a second. Local if they are of one grid, else collective over that grid, of which other processes must
    wait within ``limit`` seconds.
    """
    numbers = list(numbers)
    given = [grid for grid in map(of_number, numbers) if grid is not None]
    if len({id(grid.context) for grid in given}) == 1:
        return given[0]
    if not given and any(isinstance(x, (int, np.integer)) and (x == -1 or x in _known) for x in numbers):
        limit = min(limit, PATIENCE)
    grids = [*given, *(grid for grid in _known.values() if grid is not None)]
    contexts = [grid.context for grid in grids]
    found = Context.where_others_call(call, contexts[0] if given else None, contexts, limit)
    return next((grid for grid in grids if grid.context is found), None)


def peers(grid: ProcessGrid, scope: str) -> list[int]:
    """Return the ranks of the other processes in this process's row ("R") or column ("C") of a grid. Local."""
    of, rank = grid.grid, grid.context.rank
    row, col = of.coords(rank)
    everyone = [of.rank(row, j) for j in range(of.npcol)] if scope == "R" else [
        of.rank(i, col) for i in range(of.nprow)
    ]  # fmt: skip
    return [peer for peer in everyone if peer != rank]


def exchanged(ctx: Context, call: str, others: Sequence[int], told: NDArray[Any]) -> NDArray[Any]:
    """Send an array to some ranks, and return what each of them has sent. Collective over these ranks.

    ClosedError if one of them makes another call: the context is broken.
    """
    heard = np.zeros((len(others), *told.shape), told.dtype)
    with ctx.running(call):
        requests = []
        for peer, place in zip(others, heard, strict=True):
            requests += [*ctx.comm.irecv(place, peer), *ctx.comm.isend(told, peer)]
        ctx.control.channel.until(
            lambda: all(each.Test() for each in requests), patient=ctx.comm.patient, peers=others
        )
        ctx.control.channel.ask_no_longer()
    return heard


def gridinfo(ictxt: int) -> tuple[int, int, int, int]:
    """Return ``(nprow, npcol, myrow, mycol)``: the grid, and this process's place in it. Local.

    All four are -1 if ``ictxt`` is not a context of this process. Coordinates count from 0.

    Source: BLACS, BLACS_GRIDINFO.
    """
    found = of_number(ictxt)
    return (-1, -1, -1, -1) if found is None else found.info


def gridexit(ictxt: int) -> None:
    """Free a grid; its number is not a context any more. Collective over the grid.

    On the host engine a process keeps up to 32 grids that were made of communicators and hold little memory, for the
    next ``gridinit`` of the same, until it ends.

    On processes outside the grid (``ictxt`` is -1) nothing happens.

    Raises:
        ParameterError: ``ictxt`` is neither -1 nor a context.

    Source: BLACS, BLACS_GRIDEXIT.
    """
    found = of_number(ictxt)
    if found is not None:
        found.close()
        if found.parent is not None:
            found.parent.release(found)
    elif ictxt != -1:
        faults = Faults("gridexit", ["ictxt"])
        faults.no_context("ictxt", ictxt)
        _refuse(CLOSING, faults.error())


def _refuse(call: str, error: ArgumentError) -> NoReturn:
    """Raise what is wrong with a call that has no context together with the ranks that wait in it, else alone."""
    found = Context.where_others_call(call, limit=PATIENCE)
    if found is not None and found.size > 1:
        with found.agreement(call):
            raise error
    raise error


def blacs_exit(cont: int = 0) -> None:  # noqa: ARG001
    """Free all grids that this process is in. Collective over the processes of each.

    MPI goes on: mpi4py ends it with the process.

    Args:
        cont: not used.

    Source: BLACS, BLACS_EXIT.
    """
    for number in sorted((each for each, grid in _known.items() if grid is not None), reverse=True):
        gridexit(number)


blacs_gridinit, blacs_gridinfo, blacs_gridexit = gridinit, gridinfo, gridexit


def blacs_pinfo() -> tuple[int, int]:
    """Return ``(mypnum, nprocs)``: this process's number in COMM_WORLD, and how many there are. Local.

    Without an MPI launcher it is 0 of 1.

    Source: BLACS, BLACS_PINFO.
    """
    if surroundings() is None:
        return 0, 1
    world = mpi().COMM_WORLD
    return world.rank, world.size


def blacs_pnum(ictxt: int, prow: int, pcol: int) -> int:
    """Return the number, from 0, of a process in the communicator of a grid; -1 outside it. Local.

    Args:
        ictxt: the grid's context.
        prow: its process row.
        pcol: its process column.

    Source: BLACS, BLACS_PNUM.
    """
    found = of_number(ictxt)
    if found is None or not (0 <= prow < found.grid.nprow and 0 <= pcol < found.grid.npcol):
        return -1
    return found.grid.rank(prow, pcol)


def blacs_pcoord(ictxt: int, pnum: int) -> tuple[int, int]:
    """Return ``(prow, pcol)`` of the process that ``blacs_pnum`` gives this number; both -1 outside the grid. Local.

    Args:
        ictxt: the grid's context.
        pnum: the number.

    Source: BLACS, BLACS_PCOORD.
    """
    found = of_number(ictxt)
    if found is None or not 0 <= pnum < found.grid.size:
        return -1, -1
    return found.grid.coords(pnum)


def blacs_gridmap(
    context: MPI.Comm | int | None,
    usermap: ArrayLike,
    ldumap: int | None = None,
    nprow: int | None = None,
    npcol: int | None = None,
    *,
    engine: EngineName = "auto",
) -> int:
    """Make a grid of chosen processes and return the number of its BLACS context. Collective over ``context``.

    Processes that are not in the map get -1, as in ``gridinit``.

    Args:
        context: an mpi4py communicator, or None or ``blacs_get``'s 0 for COMM_WORLD.
        usermap: the numbers in ``context`` of the processes, ``nprow`` × ``npcol``: two-dimensional, or flat, column
            after column, as Fortran has it.
        ldumap: of a flat map: distance between its columns.
        nprow: process rows of the grid; by default the map's.
        npcol: process columns; by default the map's.
        engine: as in ``pblasmp.Context``.

    Raises:
        ParameterError: an argument is illegal.
        RankMismatchError: the processes gave different maps.

    Source: BLACS, BLACS_GRIDMAP.
    """
    comm = _processes("blacs_gridmap", context)
    world: Any = mpi().COMM_WORLD if context is None or type(context) is int else context
    try:
        with Agreement(comm, "blacs_gridmap") as facts:
            faults = Faults("blacs_gridmap", ["context", "usermap", "ldumap", "nprow", "npcol"])
            numbers = _map(faults, usermap, ldumap, nprow, npcol)
            if not faults and (
                len({*numbers.flat}) < numbers.size or not (0 <= numbers.min() <= numbers.max() < comm.size)
            ):
                faults.add(
                    "usermap",
                    f"expected different processes from 0 to {comm.size - 1}, got {numbers.tolist()}",
                )
            faults.check()
            facts.update(usermap=numbers.tolist())
        order = numbers.reshape(-1).tolist()
        inside = comm.rank in order
        part = world.Split(0 if inside else 1, order.index(comm.rank) if inside else comm.rank)
    finally:
        comm.free()
    try:
        return gridinit(part, "Row", *numbers.shape, engine=engine) if inside else -1
    finally:
        part.Free()


def _map(
    faults: Faults, usermap: ArrayLike, ldumap: int | None, nprow: int | None, npcol: int | None
) -> NDArray[np.int64]:
    """Return the numbers of a map by process row and column; note what is wrong with it. Local."""
    none = np.zeros((1, 1), np.int64)
    try:
        given = np.asarray(usermap)
        if given.dtype.kind not in "iu" or given.ndim not in (1, 2) or not given.size:
            raise ValueError(f"{given.dtype} of {given.ndim} dimensions")
    except ValueError as error:
        faults.add("usermap", f"expected integers in one or two dimensions, got {error}")
        return none
    rows = given.shape[0] if given.ndim == 2 else None
    wanted = faults.integer("nprow", rows if nprow is None else nprow, 1)
    across = faults.integer(
        "npcol",
        given.shape[-1] // wanted
        if npcol is None and rows is None
        else given.shape[-1]
        if npcol is None
        else npcol,
        1,
    )
    if faults:
        return none
    if given.ndim == 1:
        apart = faults.integer("ldumap", wanted if ldumap is None else ldumap, wanted)
        if apart * (across - 1) + wanted > given.size:
            faults.add(
                "usermap", f"holds {given.size} numbers, expected {across} columns of {wanted}, {apart} apart"
            )
            return none
        columns = [given[j * apart : j * apart + wanted] for j in range(across)]
        return np.stack(columns, axis=1).astype(np.int64)
    if given.shape[0] < wanted or given.shape[1] < across:
        faults.add(
            "usermap", f"is {given.shape[0]} x {given.shape[1]}, expected at least {wanted} x {across}"
        )
        return none
    return given[:wanted, :across].astype(np.int64)


def blacs_barrier(ictxt: int, scope: str) -> None:
    """Wait until every process of the scope has called it. Collective over the scope.

    Args:
        ictxt: the grid's context.
        scope: "All", "Row" or "Column", the first letter counts: the grid, or this process's row or column of it.

    Raises:
        ParameterError: an argument is illegal.

    Source: BLACS, BLACS_BARRIER.
    """
    faults = Faults("blacs_barrier", ["ictxt", "scope"])
    found = of_number(ictxt)
    if found is None:
        faults.no_context("ictxt", ictxt)
    letter = faults.letter("scope", scope, "ARC")
    if faults:
        found = found or meant("blacs_barrier", [ictxt], PATIENCE)
        if found is not None and found.context.is_awaited("blacs_barrier", PATIENCE):
            with found.context.agreement("blacs_barrier"):
                faults.check()
    faults.check()
    assert found is not None
    if letter == "A":
        with found.context.agreement("blacs_barrier"):
            return
    exchanged(found.context, "blacs_barrier", peers(found, letter), np.zeros(1))
