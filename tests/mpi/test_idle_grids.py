# SPDX-License-Identifier: Apache-2.0
"""Grids that gridexit has freed and gridinit makes again: the same number, and nothing of the caller's is kept."""

import gc
import os
import weakref
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import launch, pblas
from pblasmp.engines.host import host_engine as host
from pblasmp.launch import Job
from pblasmp.pblas import grids
from tests.helpers import inside
from tests.helpers.mpi import ROOT, on_ranks, starts_ranks

SHAPE = 1, 3


@contextmanager
def none_idle():
    """Begin without grids that rest; close those that do at the end."""
    with mock.patch.object(grids, "idle_grids", {}) as found:
        yield found
        for each in found.values():
            for grid in each:
                grid.context.close()


def made(comm, shape=SHAPE, order="Row"):
    return pblas.gridinit(comm, order, *shape, engine="host")


def freed(comm, shape=SHAPE, order="Row"):
    """Make a grid, free it and return its number."""
    number = made(comm, shape, order)
    pblas.gridexit(number)
    return number


def product(ictxt, value):
    """Multiply on a grid of three ranks; return the arrays."""
    if ictxt == -1:
        return []
    a, b, c = (np.full((2, 2), value, order="F") for _ in range(3))
    desc = pblas.descinit(2, 6, 2, 2, 0, 0, ictxt, 2)
    pblas.pdgemm("T", "N", 2, 6, 2, 1.0, a, 1, 1, desc, b, 1, 1, desc, 0.0, c, 1, 1, desc)
    assert (c == 2.0 * value * value).all()
    return [a, b, c]


@on_ranks(4)
def test_again(comm):
    """One that is made, freed and made again, of three of four ranks."""
    with none_idle():
        first = made(comm)
        product(first, 2.0)
        arrays = product(first, 3.0)
        left = [weakref.ref(each) for each in arrays]
        inside = grids.of_number(first)
        pblas.gridexit(first)
        del arrays
        gc.collect()
        assert not any(each() for each in left), "memory: arrays are kept"
        assert pblas.gridinfo(first) == (-1,) * 4, "freed: still a context"
        open_ = inside and (inside.context in pb.Context.all_open() or "closed" not in repr(inside.context))
        assert not open_, "its context"
        second = made(comm)
        assert second == first, f"number: {first}, then {second}"
        place = (*SHAPE, 0, comm.rank) if inside else (-1,) * 4
        assert pblas.gridinfo(second) == place, "place"
        product(second, 4.0)
        both = made(comm)
        assert first == -1 or both != second, "two at once"
        pblas.gridexit(both)
        pblas.gridexit(second)
        numbers = [made(comm), made(comm)]
        assert numbers == [second, both], "both again"
        for number in numbers:
            pblas.gridexit(number)


@on_ranks(4)
def test_others(comm):
    """What is no grid that idles: another shape, order, engine, setting or number of processes; one over a Context."""
    with none_idle():
        inside = comm.rank < 3
        number = freed(comm)
        for shape, order in (((3, 1), "Row"), ((1, 3), "Col"), ((1, 2), "Row")):
            found = freed(comm, shape, order)
            assert found == -1 or found != number, f"{order} {shape}"
        with mock.patch.dict(os.environ, {"PBLASMP_BLAS": "scipy"} if comm.rank == 1 else {}):
            found = freed(comm)
        assert not inside or found != number, "another setting on rank 1"
        found = pblas.gridinit(comm, "Row", *SHAPE, engine="auto")
        pblas.gridexit(found)
        assert not inside or found != number, "another engine asked for"
        backwards = comm.Split(0, -comm.rank)
        found = freed(backwards)
        assert found == -1 or found != number, "other processes"
        with pb.Context(comm, engine="host") as ctx:
            over = pblas.gridinit(ctx, "Row", *SHAPE)
            assert not inside or over != number, "over a Context"
            pblas.gridexit(over)
        backwards.Free()
        assert freed(comm) == number, "the same: another"


@on_ranks(4)
def test_refusals(comm):
    """Grids that don't rest: one rank cannot, or they hold much memory."""
    with none_idle() as idle:
        with mock.patch.object(grids, "MOST_IDLE", 0 if comm.rank == 2 else 9):
            freed(comm)
        assert not idle, "one rank keeps none"
        with mock.patch.object(host, "LITTLE", -1):
            freed(comm)
        assert not idle, "memory"


@on_ranks(4, on_nodes="interleaved:2")
def test_grids_that_rest_between_nodes(comm):
    """Of the memory of calls between nodes counts what they have used: it is large from the start."""
    test_again.on_rank(comm)
    with none_idle() as idle, mock.patch.object(host, "LITTLE", 63):
        freed(comm)
        assert idle or comm.rank == 3, "not used: it does not rest"
    with none_idle() as idle, mock.patch.object(host, "LITTLE", 63):
        number = made(comm)
        product(number, 2.0)
        pblas.gridexit(number)
        assert not idle, "memory"


@on_ranks(4)
def test_state(comm):
    """What a grid that idles has given back, and reads again."""
    with none_idle(), mock.patch.object(host.blas, "threads_set_by_user", return_value=set()):
        number = made(comm)
        grid = grids.of_number(number)
        engine = grid.context.engine if grid else None
        measured = engine and engine.measured
        assert not grid or inside.limits_blas(engine), "limits"
        pblas.gridexit(number)
        assert not grid or not inside.limits_blas(engine), "idle"
        made(comm)
        assert not grid or inside.limits_blas(engine), "awake"
        assert not grid or engine.measured is not measured, "measured"
        found = not grid or pb.Context.named(grid.context.name) is grid.context
        assert found, "name: not found"
        pblas.gridexit(number)


class Unprintable:
    def __repr__(self):
        raise OverflowError("no text")


@on_ranks(4)
def test_failures(comm):
    """One rank fails while a grid is made again: no other waits for it, and the next one is a new grid."""
    with none_idle():
        number = freed(comm)
        how = {"side_effect": MemoryError("no room")} if comm.rank == 1 else {"wraps": lambda: None}
        with mock.patch.object(host.HostEngine, "resume", **how):
            try:
                told = made(comm)
            except (MemoryError, pb.ClosedError) as error:
                told = type(error)
        expected = -1 if comm.rank == 3 else MemoryError if comm.rank == 1 else pb.ClosedError
        assert told == expected, "of one rank"
        found = made(comm)
        product(found, 2.0)
        assert found == -1 or found != number, "the next"
        pblas.gridexit(found)
        engine = Unprintable() if comm.rank == 2 else "host"
        try:
            told = pblas.gridinit(comm, "Row", *SHAPE, engine=engine)
        except Exception as error:  # noqa: BLE001 - compared
            told = str(error)
        assert "no text" in str(told), "an engine without a text"


END = """
from mpi4py import MPI
from pblasmp import pblas
world = MPI.COMM_WORLD
for shape in ((1, 2), (1, 1), (2, 1), (1, 2)):
    if (number := pblas.gridinit(world, "Row", *shape, engine="host")) != -1:
        pblas.gridexit(number)
print("end", flush=True)
"""


@starts_ranks
@pytest.mark.parametrize("last", ["", "MPI.Finalize()"])
def test_a_process_ends_with_grids_that_rest(last, tmp_path):
    arguments = [*launch.interpreter(), "-W", "error", "-c", END + last]
    with Job(arguments, 2, tmp_path / "output", environ={**os.environ, "PYTHONPATH": str(ROOT)}) as job:
        status = job.wait(60)
        printed = job.tail(50)
    assert (status, printed.replace("\n", "")) == (0, "endend"), printed
