# SPDX-License-Identifier: Apache-2.0
"""Programs that end badly: ``python -m tests.helpers.faults NAME...`` on each rank; tests/mpi/test_faults.py runs them.

Of several programs each says its name first.

Every rank of every program starts anew: this imports no more than it needs.
"""

import atexit
import contextlib
import gc
import mmap
import os
import signal
import sys
import threading
import time
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
from mpi4py import MPI

import pblasmp as pb
import pblasmp.comm.agreement
import pblasmp.comm.exchange
import pblasmp.comm.mpi_communicator
import pblasmp.comm.side_channel
import pblasmp.context
import pblasmp.engines.host.direct.calls
import pblasmp.engines.host.host_engine
import pblasmp.engines.host.host_operations
import pblasmp.runtime.plans
import pblasmp.runtime.runtime

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


def say(text):
    """Print a line in one write, so that the ranks' lines stay whole; Python without buffers writes the end apart."""
    print(f"{text}\n", end="", flush=True)


def wait_in_mpi():
    """Wait for a rank that does not come. MPI polls: other tests go first."""
    os.nice(19)
    WORLD.Barrier()


def in_time(seconds):
    """Have a rank that waits look so soon for what may be wrong."""
    pblasmp.comm.side_channel.STALL_SECONDS = seconds


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
    pblasmp.comm.agreement._GRACE_SECONDS = 0.3
    with pb.Context(engine="host"):
        if RANK == 1:
            raise ValueError("my own")
        wait_in_mpi()


def one_while_others_wait_in_a_library():
    pblasmp.comm.agreement.BLOCKED_SECONDS = 0.5

    def register(ctx, text):
        with pblasmp.comm.agreement.Agreement(ctx.control, "registering", blocks=True):
            if RANK == 1:
                raise ValueError(text)
            if text == "my own":
                time.sleep(3600)

    with pb.Context(engine="host") as ctx:
        with contextlib.suppress(ValueError):  # on all ranks
            register(ctx, "kept")
            os._exit(3)
        register(ctx, "my own")


def one_while_others_close():
    with pb.Context(engine="host"):
        if RANK == SIZE - 1:
            raise ValueError("my own")


def one_while_others_run_a_plan():
    with pb.Context(engine="host") as ctx:
        a = matrix(ctx)
        plan = pb.plan(pb.matmul, a, a)
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
        pblasmp.runtime.runtime.choose_engine = lambda *args: 1 / 0
    with pb.Context(engine="host"):
        pass


def bad_input():
    with pb.Context(engine="host") as ctx:
        ctx.scatter(np.ones((3, 3)), pb.MatrixDescriptor((8, 8), (2, 2), pb.Grid(1, 1)))


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


EXITS = {
    f"exits_with_{name}": partial(exits, status)
    for name, status in (("2", 2), ("a_text", "good bye"), ("0", 0))
}


def exits_while_others_wait_in_mpi():
    pblasmp.comm.agreement._GRACE_SECONDS = 0.3
    with pb.Context(engine="host"):
        if RANK == 1:
            sys.exit(5)
        wait_in_mpi()


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
    """An agreed error is an ordinary exception: the program can catch it and continue."""
    with pb.Context(engine="host") as ctx:
        a = matrix(ctx)
        try:
            pb.matmul(a, a, alpha=RANK)
        except pb.RankMismatchError:
            b = a @ a
            whole = b.gather()
            if RANK == 0:
                say(f"rank 0: went on {int(whole[0, 0])}")


def resource_warnings_are_shown():
    warnings.simplefilter("always", ResourceWarning)


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


# -- exceptions inside a collective call


class AlarmError(Exception):
    """What a signal handler raises."""


def moves(ctx, turns=1):
    """Of a type that BLAS lacks: others are copied by direct calls."""
    a = ctx.from_function(lambda i, j: 1.0 * i + j, replace(wide(ctx), dtype=np.float16))
    for _ in range(turns):
        b = a.redistribute(block=(20, 7), grid=(1, ctx.size))
    return b


def wide(ctx):
    return pb.MatrixDescriptor((300, 300), (7, 20), pb.Grid(ctx.size, 1))


def fails_on_rank_1(module, name, error, after=0):
    """Have the function ``name`` of a module raise ``error`` on rank 1, once it has been called ``after`` times."""
    function, calls = getattr(module, name), []

    def failing(*args, **kwargs):
        calls.append(name)
        if RANK == 1 and len(calls) > after:
            raise error
        return function(*args, **kwargs)

    setattr(module, name, failing)
    return function


def tells(work):
    """Print how ``work`` ends on each rank."""
    try:
        work()
        end = "returned"
    except Exception as error:  # noqa: BLE001 - it is printed
        end = f"{type(error).__name__}: {error}"
    say(f"rank {RANK}: {end}")


def caught_in(work, module, name, after=0):
    with pb.Context(engine="host") as ctx:
        a = matrix(ctx)
        function = fails_on_rank_1(module, name, MemoryError("no room"), after)
        tells(lambda: work(ctx, a))
        setattr(module, name, function)
        tells(lambda: a @ a)
        tells(lambda: moves(ctx))
    with pb.Context(engine="host") as ctx:  # another one works
        whole = (matrix(ctx) @ matrix(ctx)).gather()
        assert RANK or whole[0, 0] == 140


def one_run(_, a):
    """Rank 1 has agreed on the run of a plan, and does not compute."""
    plan = pb.plan(pb.matmul, a, a, algo="panels")
    function = fails_on_rank_1(pblasmp.runtime.plans.Plan, "_hold", MemoryError("no room"))
    try:
        plan()
    finally:
        pblasmp.runtime.plans.Plan._hold = function


def panels(_, a):
    pb.matmul(a, a, algo="panels")


CAUGHT = {
    "caught_in_a_move": (lambda ctx, _: moves(ctx), pblasmp.comm.exchange, "copy", 3),
    "caught_before_a_move": (lambda ctx, _: moves(ctx), pblasmp.engines.host.host_engine, "ExchangeMove"),
    "caught_in_scatter": (
        lambda ctx, _: ctx.scatter(np.ones((300, 300)), wide(ctx), root=1), pblasmp.comm.exchange, "copy", 2,
    ),
    "caught_in_gather": (lambda _, a: a.gather(), pblasmp.comm.mpi_communicator.MpiCommunicator, "isend"),
    "caught_in_a_product": (panels, pblasmp.engines.host.host_operations.HostOperations, "gemm"),
    "caught_in_a_vote": (lambda _, a: a @ a, pblasmp.engines.host.direct.calls.HostDirect, "_status"),
    "caught_between_two_parts": (panels, pblasmp.runtime.plans.Plan, "_log"),  # prepared, and not run
    "caught_between_two_parts_of_a_run": (one_run, pblasmp.runtime.plans.Plan, "_hold", 1),
}  # fmt: skip
"""What is called, and where rank 1 lacks memory."""


def caught_from_close():
    """The others close while one breaks the context, catch that error, and go on with what has no need of it."""
    pblasmp.comm.agreement._GRACE_SECONDS = 0.3
    ctx = pb.Context(engine="host")
    if RANK == 1:
        time.sleep(0.3)
        with ctx.running("redistribute"):
            raise ValueError("my own")
    try:
        ctx.close()
    except pb.ClosedError as error:
        say(f"rank {RANK}: ClosedError: {error}")
    time.sleep(0.6)  # longer than others wait for who must still hear of an error
    say(f"rank {RANK}: went on")


def caught_alarm():
    """A signal handler raises in the middle of moves, wherever that is."""

    def handler(*_):
        raise AlarmError

    signal.signal(signal.SIGALRM, handler)
    with pb.Context(engine="host") as ctx:
        moves(ctx)
        if RANK == 1:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            while True:
                moves(ctx, 10)
        except (AlarmError, pb.PblasmpError) as error:
            first = error
        tells(lambda: moves(ctx))
        assert isinstance(first, AlarmError) == (RANK == 1), first


def uncaught_in_a_move():
    with pb.Context(engine="host") as ctx:
        fails_on_rank_1(pblasmp.comm.exchange, "copy", ValueError("my own"), 1)
        moves(ctx)


def uncaught_where_others_catch():
    with pb.Context(engine="host") as ctx:
        fails_on_rank_1(pblasmp.comm.exchange, "copy", ValueError("my own"), 1)
        with contextlib.suppress(pb.ClosedError):
            moves(ctx)


def caught_where_others_do_not():
    with pb.Context(engine="host") as ctx:
        fails_on_rank_1(pblasmp.comm.exchange, "copy", ValueError("my own"), 1)
        with contextlib.suppress(ValueError if RANK == 1 else ()):
            moves(ctx)


def breaks_and_catches(ctx):
    """Rank 1 breaks the context and continues; the others use it once they could know."""
    if RANK == 1:
        time.sleep(0.2)  # the others may still be on their way out of what made the context
        with contextlib.suppress(ValueError), ctx.running("redistribute"):
            raise ValueError("my own")
    time.sleep(0.5)


def caught_before_others_close():
    with pb.Context(engine="host") as ctx:
        breaks_and_catches(ctx)
    say("went on")


def caught_before_others_end():
    globals()["kept"] = ctx = pb.Context(engine="host")
    breaks_and_catches(ctx)


class Unprintable:
    def __repr__(self):
        raise ValueError("my own")


class UnprintableError(Exception):
    def __str__(self):
        raise ValueError("of my own")


def unprintable():
    """What the user's code raises while it is shown is this rank's error; the context is as it was."""
    with pb.Context(engine="host") as ctx:

        def names():
            with ctx.agreement("names") as facts:
                facts["name"] = Unprintable() if RANK == 1 else 0

        def raises(i, j):
            if RANK == 1:
                raise UnprintableError
            return i + j

        tells(names)
        tells(lambda: ctx.from_function(raises, wide(ctx)))
        tells(lambda: moves(ctx))


def no_room_to_map():
    """One rank cannot map what its node shares: an error of all, and the context is as it was."""
    with pb.Context(engine="host") as ctx:
        a = matrix(ctx)
        mapped = fails_on_rank_1(mmap, "mmap", OSError(12, "Cannot allocate memory"))
        tells(lambda: pb.matmul(a, a, algo="shared"))
        mmap.mmap = mapped
        tells(lambda: a @ a)


# -- ranks that leave without closing


def end_without_closing():
    ctx = pb.Context(engine="host")
    atexit.unregister(pblasmp.comm.failures._close_all)
    atexit.register(lambda: say(ctx))
    atexit.register(pblasmp.comm.failures._close_all)
    keep.append((ctx, matrix(ctx)))


def exit_without_closing():
    end_without_closing()
    sys.exit(3)


def one_ends_while_others_multiply():
    ctx = pb.Context(engine="host")
    a = matrix(ctx)
    keep.append(ctx)
    if RANK != 1:
        a @ a


def one_is_killed_while_others_multiply():
    with pb.Context(engine="host") as ctx:
        a = matrix(ctx)
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        a @ a
    say("went on")


def one_exits_while_others_multiply():
    ctx = pb.Context(engine="host")
    a = matrix(ctx)
    keep.append(ctx)
    if RANK == 1:
        sys.exit(3)
    a @ a


def one_has_lost_it():
    ctx = pb.Context(engine="host")
    if RANK == 1:
        del ctx
        gc.collect()
    else:
        keep.append(ctx)


def one_has_lost_it_while_others_close():
    ctx = pb.Context(engine="host")
    if RANK == 1:
        del ctx
        gc.collect()
    else:
        ctx.close()


def finalized_before_the_end():
    keep.append(pb.Context(engine="host"))
    MPI.Finalize()


def too_many_plans():
    pblasmp.runtime.runtime.MANY_PLANS = 50
    with pb.Context(engine="host") as ctx:
        a = matrix(ctx)
        plans = [pb.plan(pb.matmul, a, a) for _ in range(49)]
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            plans += [pb.plan(pb.matmul, a, a) for _ in range(2)]
        said = " ".join(str(each.message)[-54:].strip() for each in found)
        say(f"rank {RANK}: {len(found)} warning {said}")


keep = []

# -- children and threads


def child_leaves():
    """A fork of a rank leaves the with block: nobody hears of it."""
    with pb.Context(engine="host") as ctx:
        a = matrix(ctx)
        pid = os.fork() if RANK == 1 else -1
        if pid == 0:
            try:
                tells(lambda: a @ a)
                ctx.__exit__(None, None, None)
                ctx.__exit__(ValueError, ValueError("of the child"), None)
            finally:
                os._exit(7)
        if pid > 0:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        WORLD.Barrier()
        whole = (a @ a).gather()
        if RANK == 0:
            say(f"rank 0: went on {int(whole[0, 0])}")


def two_threads():
    with pb.Context(engine="host") as ctx:
        a = matrix(ctx)
        if RANK == 1:
            with ctx.running("first"):
                thread = threading.Thread(target=tells, args=[lambda: a @ a])
                thread.start()
                thread.join()
        tells(lambda: a @ a)


# -- several contexts


def used_in_different_orders():
    in_time(0.2)
    with pb.Context(engine="host") as one, pb.Context(engine="host") as two:
        for ctx in (one, two) if RANK else (two, one):
            matrix(ctx)


def closed_in_different_orders():
    in_time(0.2)
    one, two = pb.Context(engine="host"), pb.Context(engine="host")
    for ctx in (one, two) if RANK else (two, one):
        ctx.close()


def made_while_others_multiply():
    in_time(0.2)
    with pb.Context(engine="host") as ctx:
        a = matrix(ctx)
        if RANK == 1:
            pb.Context(engine="host")
        a @ a


def slow_but_in_order():
    """One rank comes so late that the others look for what may be wrong: nothing is."""
    in_time(0.1)
    with pb.Context(engine="host") as one, pb.Context(engine="host") as two:
        for ctx in (one, two, one):
            if RANK == 1:
                time.sleep(0.3)
            whole = (matrix(ctx) @ matrix(ctx)).gather()
        if RANK == 1:
            time.sleep(0.3)
        with pb.Context(engine="host") as three:
            matrix(three)
        if RANK == 0:
            say(f"rank 0: went on {int(whole[0, 0])}")


PROGRAMS = EXITS | {name: partial(caught_in, *how) for name, how in CAUGHT.items()}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        if sys.argv[2:]:
            say(f"rank {RANK}: {name}")
        PROGRAMS.get(name, globals().get(name))()
