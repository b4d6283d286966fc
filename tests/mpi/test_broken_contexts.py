# SPDX-License-Identifier: Apache-2.0
"""Communicators of broken contexts are freed when the same ranks make the next context, unless messages may be left."""

from __future__ import annotations

import contextlib

import numpy as np

import pblasmp as pb
from tests.helpers.cases import misplaced
from tests.helpers.mpi import run_on_one_node

MANY = 6  # contexts: notes that the ranks send each other when one breaks may be late


def break_(ctx, a):
    """Break a context: an exception on the last rank, which the others hear of in their next call."""
    if ctx.rank == ctx.size - 1:
        with contextlib.suppress(ZeroDivisionError), ctx.running("mine"):
            raise ZeroDivisionError
    else:
        with contextlib.suppress(pb.ClosedError):
            a @ a
    ctx.close()


def is_freed(ctx):
    return not any(each._made for each in (ctx.comm, ctx.control))


def broken(comm):
    values = np.arange(36.0).reshape(6, 6)
    first = message = None
    for count in range(MANY):
        ctx = pb.Context(comm, engine="host")
        a = ctx.scatter(values + count, block=2)
        yield f"product {count}", misplaced(a @ a, (values + count) @ (values + count))
        moved = ctx.comm.allgather(count)  # by messages
        yield f"told {count}", None if moved == [count] * comm.size else f"{moved}"
        if count == 0 and comm.rank == 0:
            message = ctx.comm.isend(np.ones(3), comm.size - 1)  # that nobody receives
        break_(ctx, a)
        if count == 0:
            sends = ctx
        elif count == 1:
            first = ctx
    yield "freed", None if is_freed(first) else "not yet"
    yield "a message is left", "freed" if is_freed(sends) else None
    with contextlib.suppress(pb.ClosedError):
        first.comm.allgather(1)
        yield "after it", "no error"
    del message


def test_communicators_of_broken_contexts():
    run_on_one_node(broken, 2)
