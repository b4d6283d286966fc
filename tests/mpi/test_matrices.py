# SPDX-License-Identifier: Apache-2.0
"""Matrices in and out of layouts of every kind: scatter, gather, from_function, from_local, empty, zeros."""

import pickle

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers.cases import (
    TYPES,
    check_array,
    check_matrix,
    grids,
    layout,
    numbers,
    part,
    pick,
    refuses,
    short_messages,
)
from tests.helpers.mpi import on_ranks
from tests.helpers.slow import draws, only_long

SHAPES = ((0, 0), (0, 5), (5, 0), (1, 1), (1, 17), (13, 9), (20, 20))
BLOCKS = ((1, 1), (2, 3), (7, 4), (40, 50))

DISGUISES = {  # the same values in arrays of every kind
    "C": np.ascontiguousarray,
    "F": np.asfortranarray,
    "every other element": lambda x: np.repeat(np.repeat(x, 2, 0), 3, 1)[::2, ::3],
    "backwards": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    "part of a larger one": lambda x: np.pad(x, 2)[2:-2, 2:-2],
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")) if x.dtype.kind != "V" else x,
}


@on_ranks(1, *only_long(2), 3, 4, *only_long(6))
def test_there_and_back_in_every_layout(comm, ctx):
    rng = np.random.default_rng(1)
    kinds = list(DISGUISES)
    for count, grid in enumerate(grids(comm.size) * draws(max(1, 8 // comm.size), long=8 // comm.size + 1)):
        shape, block = SHAPES[count % 7], pick(rng, BLOCKS)
        d = layout(rng, shape, comm.size, grid=grid, block=block, dtype=pick(rng, TYPES))
        kind, root, other = kinds[count % 6], count % comm.size, -count % comm.size
        values = numbers(rng, d.shape, d.dtype)
        with short_messages(pick(rng, (40, 400, 1 << 22))):
            there_and_back(ctx, d, kind, root, other, values)
        made_here(ctx, d, values)


def there_and_back(ctx, d, kind, root, other, values):
    """Scatter a matrix and gather it again."""
    case = f"{d}, {kind} from {root} to {other}"
    a = ctx.scatter(DISGUISES[kind](values) if ctx.rank == root else None, d, root)
    whole, everywhere = a.gather(other), a.allgather()
    check_matrix(a, values, case)
    check_array(everywhere, values, f"{case}: allgather")
    if ctx.rank != other:
        assert whole is None, f"{case}: gather returned something on a rank other than root"
        return
    check_array(whole, values, f"{case}: gather")
    contiguous = whole.flags.c_contiguous if d.order == "C" else whole.flags.f_contiguous
    assert contiguous or min(d.shape) <= 1, f"{case}: gather's result is not in the matrix's memory order"


def made_here(ctx, d, values):
    """Matrices that each rank makes by itself."""
    f = ctx.from_function(lambda i, j: values[i, j] if values.size else np.empty((i.size, j.size)), d)
    zeros, empty = ctx.zeros(d), ctx.empty(d)
    empty.local[...] = 3
    rows, cols = f.local.shape
    room = np.full((rows + 3, cols + 2), 7, d.dtype, order=d.order)
    mine = room[:rows, :cols]
    mine[...] = f.local
    b = ctx.from_local(mine, d)
    assert ctx.rank >= d.grid.size or b.local is mine, f"{d}: from_local made a copy"
    check_array(b.local, part(values, d, ctx.rank), f"{d}: from_local")
    check_array(b.allgather(), values, f"{d}: from_local")
    check_matrix(f, values, "from_function")
    check_matrix(zeros, np.zeros(d.shape, d.dtype), "zeros")
    check_matrix(empty, np.full(d.shape, 3, d.dtype), "empty")


@on_ranks(1, 3)
def test_types_are_converted(comm, ctx):
    rng = np.random.default_rng(2)
    root = comm.size - 1
    for to in TYPES:
        for given in ("bool", "int8", "uint32", "int64", *TYPES):
            d = layout(rng, (11, 8), comm.size, dtype=to)
            values = np.abs(numbers(rng, d.shape, "float64")).astype(
                pb.dtypes.as_dtype(given) if given in TYPES else given
            )
            if values.dtype.kind == "c":
                values += 1j
            array = values if comm.rank == root else None
            case = f"{given} to {to}"
            if values.dtype.kind == "c" and d.dtype.kind != "c":
                words = [f"{given} does not convert to {to}"]
                refuses(ctx, pb.ArgumentError, words, ctx.scatter, array, d, root)
            else:
                check_matrix(ctx.scatter(array, d, root), values.astype(d.dtype), case)
    d = layout(rng, (3, 2), comm.size)
    check_matrix(ctx.scatter([[1, 2], [3, 4], [5, 6]], d), np.arange(1.0, 7).reshape(3, 2))
    once = ctx.from_function(lambda i, j: 4, d)
    check_matrix(once, np.full((3, 2), 4.0), "from_function broadcasts a number")
    once = ctx.from_function(lambda i, j: i, d)
    check_matrix(once, np.array([[0.0, 0], [1, 1], [2, 2]]), "from_function broadcasts a column")


@on_ranks(1, 4)
def test_any_communicator(comm):
    """Contexts over parts of the world, ranks in another order, several at once and one within another."""
    rng = np.random.default_rng(4)
    backwards = comm.Split(0, -comm.rank)
    halves = comm.Split(comm.rank % 2, -comm.rank)
    alone = comm.Split(comm.rank, 0)
    with pb.Context(comm, engine="host") as world, pb.Context(backwards, engine="host") as turned:
        assert turned.rank == comm.size - 1 - comm.rank, f"ranks turned round: rank {turned.rank}"
        d = layout(rng, (12, 10), comm.size, grid=pb.Grid.squarest(comm.size), block=(2, 3))
        values = numbers(rng, d.shape, d.dtype)
        a = turned.scatter(values if turned.rank == 0 else None, d)
        check_matrix(a, values, "scattered over ranks turned round")
        check_array((a @ a.T).allgather(), values @ values.T, "scattered over ranks turned round")
        with pb.Context(halves, engine="host") as half, pb.Context(alone, engine="host") as single:
            own = values + comm.rank % 2
            h = half.scatter(own if half.rank == 0 else None, layout(rng, d.shape, half.size, block=(3, 2)))
            s = single.scatter(own, layout(rng, d.shape, 1, block=(5, 5)))
            w = world.scatter(values if comm.rank == 0 else None, d)
            check_matrix(h, own, "three contexts at once")
            check_matrix(s, own, "three contexts at once")
            check_matrix(w, values, "three contexts at once")
            check_array((h @ h.T).allgather(), own @ own.T, "three contexts at once")
        check_array((a @ a.T).allgather(), values @ values.T, "outer contexts live on")
        null = type(comm)()
        refuses(world, pb.ArgumentError, ["COMM_NULL"], pb.Context, null, engine="host")
        if comm.size > 1:
            leader = max(rank for rank in range(comm.size) if rank % 2 != comm.rank % 2)
            between = halves.Create_intercomm(0, comm, leader, 5)
            words = ["got an intercommunicator"]
            refuses(world, pb.ArgumentError, words, pb.Context, between, engine="host")
            between.Free()
    for c in (backwards, halves, alone):
        c.Free()


@on_ranks(1)
def test_pickling_says_what_to_do_instead(ctx):
    a = ctx.zeros((4, 4), block=2)
    here = r"a Context cannot be pickled, nor can a matrix.*save\(\).*gather"
    for each, words in (
        (ctx, here),
        (a, here),
        (a.T, here),
        (pb.plan(pb.matmul, a, a), "Plan the call again"),
    ):
        with pytest.raises(TypeError, match=words):
            pickle.dumps(each)
