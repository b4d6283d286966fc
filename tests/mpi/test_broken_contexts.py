# SPDX-License-Identifier: Apache-2.0
"""Communicators of broken contexts are freed when the same ranks make the next context, unless messages may be left."""

import contextlib
import ctypes

import numpy as np
import pytest
from mpi4py import MPI

import pblasmp as pb
from pblasmp import _core
from tests.helpers import inside
from tests.helpers.cases import check_matrix
from tests.helpers.mpi import on_ranks, run_on_one_node

_REFUSES = ctypes.CFUNCTYPE(ctypes.c_int)
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


@on_ranks(2, runner=run_on_one_node)
def test_communicators_of_broken_contexts(comm):
    values = np.arange(36.0).reshape(6, 6)
    first = message = None
    for count in range(MANY):
        ctx = pb.Context(comm, engine="host")
        a = ctx.scatter(values + count, block=2)
        check_matrix(a @ a, (values + count) @ (values + count), f"product {count}")
        moved = ctx.comm.allgather(count)  # by messages
        assert moved == [count] * comm.size, f"told {count}"
        if count == 0 and comm.rank == 0:
            message = ctx.comm.isend(np.ones(3), comm.size - 1)  # that nobody receives
        break_(ctx, a)
        if count == 0:
            sends = ctx
        elif count == 1:
            first = ctx
    assert inside.is_freed(first), "freed: not yet"
    assert not inside.is_freed(sends), "a message is left"
    with pytest.raises(pb.ClosedError):
        first.comm.allgather(1)
    del message


@pytest.mark.skipif(_core.load() is None, reason="there is no core")
@on_ranks(2, on_nodes="blocks:2")
def test_messages_of_the_core_between_nodes(comm):
    """What the core has sent, and nobody will receive, keeps a communicator; what has arrived does not."""
    values, kept = np.arange(36.0).reshape(6, 6), []
    for count in range(MANY):
        ctx = pb.Context(comm, engine="host")
        a = ctx.scatter(values, block=2)
        check_matrix(a @ a, values @ values, f"product {count}")
        if count > 1 and comm.rank < comm.size - 1:  # hears of it before it sends anything
            with contextlib.suppress(pb.ClosedError):
                while True:
                    ctx.control.channel.check()
        begun = inside.of_the_core(ctx).meetings
        break_(ctx, a)
        tally = inside.messages(ctx, 1 - comm.rank)
        assert min(tally) >= begun > 2, f"counted {count}: {tally}, of the core {begun}"
        kept.append(ctx)
    freed = [all(comm.allgather(inside.is_freed(ctx))) for ctx in kept]
    with pb.Context(comm, engine="host") as ctx:
        a = ctx.scatter(values, block=2)
        refuses = _REFUSES(lambda *_: 1)
        if comm.rank == 0:
            inside.of_the_core(ctx).isend = ctypes.cast(refuses, ctypes.c_void_p).value
        try:
            a @ a
            found = "nothing"
        except (MPI.Exception, pb.ClosedError) as error:
            found = type(error)
        expected = MPI.Exception if comm.rank == 0 else pb.ClosedError
        assert found is expected, "MPI refuses to send"
    assert freed[:3] == [False, False, True], "freed"
