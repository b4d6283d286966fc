# SPDX-License-Identifier: Apache-2.0
"""Programs that end badly: ``python -m tests.helpers.faults NAME`` on each rank; tests/mpi/test_faults.py runs them."""

from __future__ import annotations

import sys
import time

import numpy as np
from mpi4py import MPI

import pblasmp as pb
import pblasmp.context

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


def matrix(ctx):
    return ctx.from_function(
        lambda i, j: i + j, pb.MatrixDescriptor((8, 8), (2, 2), pb.Grid.squarest(ctx.size))
    )


def one_while_others_multiply():
    with pb.Context(engine="host") as ctx:
        a = matrix(ctx)
        if RANK == 1:
            raise ValueError("my own")
        a @ a


def one_while_others_wait_in_mpi():
    with pb.Context(engine="host"):
        if RANK == 1:
            raise ValueError("my own")
        WORLD.Barrier()


def one_while_others_close():
    with pb.Context(engine="host"):
        if RANK == SIZE - 1:
            raise ValueError("my own")


def one_while_others_run_a_plan():
    with pb.Context(engine="host") as ctx:
        a = matrix(ctx)
        plan = pb.plan_matmul(a, a)
        for turn in range(100):
            plan()
            if RANK == 1 and turn == 50:
                raise ValueError("my own")


def all_the_same():
    with pb.Context(engine="host"):
        raise ValueError("my own")


def all_different():
    with pb.Context(engine="host"):
        raise ValueError(f"of rank {RANK}")


def two_of_them():
    with pb.Context(engine="host") as ctx:
        a = matrix(ctx)
        if RANK in (1, 2):
            raise ValueError("my own")
        a @ a


def without_with():
    ctx = pb.Context(engine="host")
    a = matrix(ctx)
    if RANK == 1:
        raise ValueError("my own")
    a @ a


def no_such_engine():
    if RANK == 1:
        time.sleep(0.3)
    with pb.Context(engine="none"):
        pass


def in_the_making():
    if RANK == 1:
        pblasmp.context.choose_engine = lambda *args: 1 / 0
    with pb.Context(engine="host"):
        pass


def bad_input():
    with pb.Context(engine="host") as ctx:
        ctx.scatter(np.ones((3, 3)), pb.MatrixDescriptor((8, 8 + (RANK == 1)), (2, 2), pb.Grid(1, 1)))


def one_leaves_early():
    with pb.Context(engine="host") as ctx:
        a = matrix(ctx)
        if RANK != 1:
            a @ a


def exits(status):
    with pb.Context(engine="host") as ctx:
        a = matrix(ctx)
        if RANK == 1:
            sys.exit(status)
        a @ a


def exits_with_2():
    exits(2)


def exits_with_a_text():
    exits("good bye")


def exits_with_0():
    exits(0)


def exits_while_others_wait_in_mpi():
    with pb.Context(engine="host"):
        if RANK == 1:
            sys.exit(5)
        WORLD.Barrier()


def all_exit_with_0():
    with pb.Context(engine="host"):
        sys.exit(0)


def interrupted():
    with pb.Context(engine="host") as ctx:
        a = matrix(ctx)
        if RANK == 1:
            raise KeyboardInterrupt
        a @ a


def in_a_part_of_the_ranks():
    """Two contexts within one over all ranks: the exception of one part must reach the other."""
    half = WORLD.Split(RANK % 2, RANK)
    with pb.Context(engine="host") as world, pb.Context(half, engine="host") as ctx:
        a = matrix(ctx)
        if RANK == 1:
            raise ValueError("my own")
        a @ a
        matrix(world)


def in_a_part_on_its_own():
    half = WORLD.Split(RANK % 2, RANK)
    with pb.Context(half, engine="host") as ctx:
        a = matrix(ctx)
        if RANK == 1:
            raise ValueError("my own")
        a @ a


def caught():
    """An agreed error is an exception like any other: the program goes on."""
    with pb.Context(engine="host") as ctx:
        a = matrix(ctx)
        try:
            pb.matmul(a, a, alpha=RANK)
        except pb.RankMismatchError:
            b = a @ a
            whole = b.gather()
            if RANK == 0:
                print("went on", int(whole[0, 0]), flush=True)


def never_closed():
    ctx = pb.Context(engine="host")
    matrix(ctx)
    del ctx


def closed_after_an_exception():
    try:
        with pb.Context(engine="host") as ctx:
            if RANK == 1:
                raise ValueError("my own")
            matrix(ctx)
    except ValueError:
        pass
    ctx = pb.Context(engine="host")
    ctx.close()
    del ctx


if __name__ == "__main__":
    globals()[sys.argv[1]]()
