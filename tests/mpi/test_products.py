# SPDX-License-Identifier: Apache-2.0
"""Products on ranks: every op, memory order, type and path, operands and results of every kind."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.host.operations import HostOperations
from tests.helpers.cases import (
    OPS,
    TYPES,
    exact,
    first,
    grids,
    layout,
    misplaced,
    misplaced_view,
    numbers,
    pick,
    product,
    scattered,
    short_messages,
)
from tests.helpers.mpi import run_mpi
from tests.helpers.slow import draws, in_turn, only_long

PATHS = ("shared", "gathered", "panels", "stationary")
ORDERS = tuple(map("".join, itertools.product("CF", repeat=3)))
OP_PAIRS = tuple(map("".join, itertools.product("NTC", repeat=2)))
SCALARS = (1, 1, 2, -1, 0.5, 0)


@dataclass
class Operand:
    """A matrix of a product: maybe the part ``window`` of a larger one, whose values are ``whole``."""

    matrix: pb.DistributedMatrix
    parent: pb.DistributedMatrix
    whole: np.ndarray
    window: tuple[slice, slice]

    @property
    def values(self):
        return self.whole[self.window]

    def changed(self):
        """What is wrong unless every value is as ``whole`` says, also around the window."""
        return misplaced(self.parent, self.whole)


def operand(ctx, rng, shape, block, grid, dtype, order, *, nan=False, like=None):
    """An operand of a layout as random as it may be: any source, padding, part of a larger matrix, turned grid.

    With ``like`` (a descriptor) it is on the same ranks with the same blocks and sources.
    """
    if like is None and rng.integers(3) == 0:
        grid = grid.T
    before = [int(x) for x in rng.integers(0, 3, 2)] if rng.integers(3) == 0 else [0, 0]
    after = [int(x) for x in rng.integers(0, 4, 2)] if any(before) else [0, 0]
    if like is not None:
        before, after = [0, 0], [0, 0]
    starts = [count * size for count, size in zip(before, block, strict=True)]
    whole = tuple(at + extent + more for at, extent, more in zip(starts, shape, after, strict=True))
    window = tuple(slice(at, at + extent) for at, extent in zip(starts, shape, strict=True))
    d = layout(rng, whole, ctx.size, grid=grid, block=block, dtype=dtype, order=order)
    if like is not None:
        d = pb.MatrixDescriptor(like.shape, like.block, like.grid, like.source, dtype, order)
    values = numbers(rng, whole, dtype)
    if nan:
        values[window] = np.nan
    parent = scattered(ctx, d, values)
    return Operand(parent[window] if any(before) or any(after) else parent, parent, values, window)


def c_and_out(ctx, rng, asks, beta, lies):
    """What is given for C and for out; NaN where nothing may be read. ``lies`` are the arguments of an operand."""
    if asks == "new":
        return None, None
    if asks == "new and c":
        return operand(ctx, rng, *lies, nan=beta == 0), None
    out = operand(ctx, rng, *lies, nan=asks != "out is c" or beta == 0)
    if asks == "out and c":
        like = out.matrix.descriptor
        return operand(ctx, rng, *lies[:-1], pick(rng, "CF"), nan=beta == 0, like=like), out
    return (out if asks == "out is c" else None), out


def multiplied(ctx, rng, ops, orders, dtype, algo, sizes, blocks):
    """Multiply what is drawn and return what is wrong with the result, with operands or with the values around them."""
    grid = pick(rng, grids(ctx.size))
    (op_a, op_b), (m, n, k), (mb, nb, kb) = ops, sizes, blocks
    alpha, beta = pick(rng, SCALARS), pick(rng, SCALARS)
    if dtype.startswith("complex"):
        alpha, beta = alpha * (1 + 2j), beta * (2 - 1j)
    asks = pick(rng, ("new", "new and c", "out", "out and c", "out is c"))
    if asks in ("new", "out"):
        beta = 0
    out_type = "float32" if dtype in ("float16", "bfloat16") and asks != "new" and rng.integers(2) else dtype

    def stored(op, x, y):
        return (x, y) if op == "N" else (y, x)

    unread = alpha == 0
    a = operand(ctx, rng, stored(op_a, m, k), stored(op_a, mb, kb), grid, dtype, orders[0], nan=unread)
    b = operand(ctx, rng, stored(op_b, k, n), stored(op_b, kb, nb), grid, dtype, orders[1], nan=unread)
    c, out = c_and_out(ctx, rng, asks, beta, ((m, n), (mb, nb), grid, out_type, orders[2]))
    expected = product(
        a.values, b.values, c and c.values,
        alpha=alpha, beta=beta, op_a=op_a, op_b=op_b, dtype=pb.dtypes.as_dtype(out_type),
    )  # fmt: skip
    result = pb.matmul(
        a.matrix, b.matrix, c and c.matrix, out=out and out.matrix,
        alpha=alpha, beta=beta, op_a=op_a, op_b=op_b, algo=algo,
    )  # fmt: skip
    if out is not None:
        out.whole[out.window] = expected
    same = out is None or result is out.matrix
    wrong = first(
        misplaced_view(result, expected),
        None if same else "the result is not out",
        *(x.changed() for x in (a, b, c, out) if x is not None and not np.isnan(exact(x.values)).any()),
    )
    return wrong and f"{asks}, {alpha=}, {beta=}, {a.matrix}, {b.matrix}, {result}: {wrong}"


def _sizes(rng):
    return [int(x) for x in rng.integers(1, 25, 3)], [int(x) for x in rng.integers(1, 9, 3)]


def _small_panels(width):
    HostOperations.panel = width


def ops_and_orders(comm, part, parts):
    _small_panels(7)
    rng = np.random.default_rng(31)
    cases = list(itertools.product(OP_PAIRS, ORDERS, PATHS))
    chosen = rng.permutation(len(cases))[part::parts]
    with pb.Context(comm, engine="host") as ctx:
        for i in chosen.tolist():
            ops, orders, algo = cases[i]
            dtype = pick(rng, TYPES)
            with short_messages(pick(rng, (64, 1000, 1 << 22))):
                yield (
                    f"{ops} {orders} {dtype} {algo}",
                    multiplied(ctx, rng, ops, orders, dtype, algo, *_sizes(rng)),
                )


def types_and_ops(comm):
    _small_panels(5)
    rng = np.random.default_rng(32)
    with pb.Context(comm, engine="host") as ctx:
        for dtype, ops, algo in in_turn(TYPES, OP_PAIRS, (*PATHS, "auto"), keep=5):
            orders = pick(rng, ORDERS)
            yield f"{dtype} {ops} {algo}", multiplied(ctx, rng, ops, orders, dtype, algo, *_sizes(rng))


def extents(comm):
    """No rows, no columns, nothing to sum over; fewer blocks than ranks; one block for everything."""
    _small_panels(5)
    rng = np.random.default_rng(33)
    with pb.Context(comm, engine="host") as ctx:
        cases = [(sizes, (3, 2, 4)) for sizes in itertools.product((0, 11), repeat=3)]
        cases += (
            ((3, 2, 4), (16, 16, 16)),
            ((1, 1, 9), (1, 1, 1)),
            ((9, 8, 1), (8, 8, 8)),
            ((5, 5, 40), (5, 5, 2)),
        )
        for (sizes, blocks), algo in in_turn(cases, (*PATHS, "auto"), keep=2):
            ops, orders, dtype = pick(rng, OP_PAIRS), pick(rng, ORDERS), pick(rng, TYPES)
            wrong = multiplied(ctx, rng, ops, orders, dtype, algo, sizes, blocks)
            yield f"{sizes} in {blocks} {ops} {orders} {dtype} {algo}", wrong


def in_place(comm):
    """Operands that are already where they are multiplied are left there: nothing is copied or sent."""
    rng = np.random.default_rng(34)
    with pb.Context(comm, engine="host") as ctx:
        size = comm.size
        for op_a, op_b, algo in itertools.product("NT", "NT", ("shared", "gathered", "panels", "auto")):
            column = pb.Grid(size, 1)
            x, y = numbers(rng, (24, 10), "float64"), numbers(rng, (10, 8), "float64")
            if op_a == "T":
                da = pb.MatrixDescriptor((10, 24), (10, 4), column.T, order=pick(rng, "CF"))
            else:
                da = pb.MatrixDescriptor((24, 10), (4, 10), column, order=pick(rng, "CF"))
            db = pb.MatrixDescriptor(
                (8, 10) if op_b == "T" else (10, 8), (8, 10) if op_b == "T" else (10, 8),
                column.T if op_b == "T" and size > 1 else column,
            )  # fmt: skip
            dd = pb.MatrixDescriptor((24, 8), (4, 8), column, order=pick(rng, "CF"))
            a = scattered(ctx, da, OPS[op_a](x))
            b = scattered(ctx, db, OPS[op_b](y))
            out = ctx.empty(dd)
            with pb.plan(pb.matmul, a, b, out=out, op_a=op_a, op_b=op_b, algo=algo) as plan:
                plan()
                report = plan.report()
                moved = report.bytes_moved
            expected = 0 if size == 1 else None
            wrong = None
            if size == 1 and moved != expected:
                wrong = f"{moved} bytes are moved, expected none"
            elif size > 1 and sum(comm.allgather(moved)) > size * y.nbytes:
                wrong = "more than B is moved"
            if size == 1 and algo == "auto" and "in place" not in str(report):
                wrong = str(report)
            yield f"{op_a}{op_b} {algo}", first(wrong, misplaced(out, x @ y))


@pytest.mark.parametrize(("nranks", "parts"), [(1, 4), (2, 6), (3, 6), (4, 6), *only_long((6, 18))])
def test_every_op_in_every_mix_of_orders_on_every_path(nranks, parts):
    """On 2, 3 and 4 ranks together half of them."""
    parts = draws(parts, long=1 if nranks == 4 else parts // 2)
    run_mpi(ops_and_orders, nranks, part=nranks % parts, parts=parts)


def test_every_type_with_every_op():
    run_mpi(types_and_ops, 2)


@pytest.mark.parametrize("nranks", [1, 3, *only_long(6)])
def test_extents(nranks):
    run_mpi(extents, nranks)


@pytest.mark.parametrize("nranks", [1, 3])
def test_operands_that_need_not_move(nranks):
    run_mpi(in_place, nranks)


@pytest.mark.parametrize(("nranks", "per_node"), [(2, 1), (3, 2), (4, 2), *only_long((6, 4), (6, 1))])
def test_several_nodes(nranks, per_node, monkeypatch):
    monkeypatch.setenv("PBLASMP_RANKS_PER_NODE", str(per_node))
    run_mpi(ops_and_orders, nranks, part=nranks + per_node, parts=draws(12, long=4))
