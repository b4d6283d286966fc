# SPDX-License-Identifier: Apache-2.0
"""Ranks that are gone, GPUs that are lost, NCCL's errors: who waits gets the cause; no wait is for ever (health.py)."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.comm import side_channel
from pblasmp.engines.gpu.runtime import health as module
from pblasmp.layout import Grid
from tests.helpers.fakelt import FakeLt
from tests.helpers.inside import have_run, takes_turns
from tests.helpers.machine import Meeting, context, machine
from tests.helpers.mpi import on_ranks, run_mpi
from tests.helpers.places import places

LOST = "GPU 0000:01:00.0 of rank 1 cannot be used any more in this process: 719"


def raised(function: Any, *arguments: Any) -> Exception | None:
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001 - what it is, is the question
        return error
    return None


def check_error(error: Exception | None, kind: type[Exception], *words: str, case: str = "") -> None:
    """Fail unless an error of this kind, with these words, was raised."""
    assert type(error) is kind, f"{case}: {error!r}"
    for word in words:
        assert word in str(error), case


def launch(ctx: pb.Context, x: Any) -> None:
    """A library's call fails as it may where the GPU is lost."""
    if ctx.rank == 0:
        ctx.engine.synchronize()
    with ctx.running("matmul"):
        raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")


def check(ctx: pb.Context, x: Any) -> None:
    """The same where the ranks would agree."""
    if ctx.rank == 0:
        ctx.engine.synchronize()
    with ctx.agreement("zeros"):
        raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")


def run(ctx: pb.Context, plan: Any) -> None:
    """A plan that waits in a run on which the ranks do not agree."""
    have_run(plan, ctx.engine.synchronize)
    plan()


@on_ranks(2)
def test_lost_gpus(comm: Any, path: str) -> None:
    """One rank's GPU is lost while the other waits for it, in every kind of wait; both hear it, and can leave."""
    waits = {
        "synchronize": lambda ctx, x: ctx.engine.synchronize(),
        "to_host": lambda ctx, x: ctx.engine.to_host(x.local),
        "norm": lambda ctx, x: x.norm(),
        "gather": lambda ctx, x: x.gather(),
        "a plan": lambda ctx, x: pb.matmul(x, x, algo="push"),
        "sum": lambda ctx, x: x.sum(axis=0),
        "a launch": launch,
        "checking": check,
        "a run": run,
        "closing": lambda ctx, x: ctx.close(),
    }
    for name, wait in waits.items():
        with machine(path, Meeting, comm=comm.Dup(), lt=FakeLt()) as lib:
            ctx = pb.Context(comm, engine="cublasmp")
            x = ctx.zeros((64, 64), block=8, dtype="float32")
            if wait is run:
                x = pb.plan(pb.matmul, x, x, algo="push")
                x()
            began, hook = len(lib.gpu.events), sys.unraisablehook
            if comm.rank == 1:
                lib.gpu.lost = 719
            else:
                lib.gpu.stuck = True
            error = raised(wait, ctx, x)
            again = raised(ctx.zeros, (4, 4))
            assert not raised(ctx.close), f"{name}: closing again"
            if comm.rank == 1:
                check_error(error, pb.StatusError, LOST, case=name)
            else:
                check_error(error, pb.ClosedError, "rank 1 left", "StatusError", LOST, case=name)
            check_error(again, pb.ClosedError, LOST, case=f"{name}: afterwards")
            released = [event for event in lib.gpu.events[began:] if event[0].endswith("released")]
            if (
                wait is run
            ):  # a thread may free its windows, as Windows.let_go says: NCCL's abort ends the run
                released = [event for event in released if event[0] != "window released"]
            assert not released, f"{name}: what peers may still use is kept"
            if comm.rank == 0:  # what waits in NCCL ends
                deadline = time.monotonic() + 5
                while lib.gpu.stuck and time.monotonic() < deadline:
                    time.sleep(0.01)
                how = {how for _, how in lib.gpu.aborted}
                assert how == {"comm_abort"}, f"{name}: what ends: {lib.gpu.aborted}"
            else:
                assert not lib.gpu.aborted, f"{name}: what ends"
            quiet = comm.rank == 1
            assert not [fault for fault in lib.gpu.faults if "asnumpy" in fault], f"{name}: on the host"
            assert (sys.unraisablehook is not hook) == quiet, f"{name}: destructors: are heard"
            sys.unraisablehook = hook


@on_ranks(2)
def test_rank_that_leaves(comm: Any, path: str) -> None:
    """A rank that waits for its GPU hears that another has left, and its communicators are aborted, not destroyed."""
    with machine(path, Meeting, comm=comm.Dup(), lt=FakeLt()) as lib:
        ctx = pb.Context(comm, engine="cublasmp")
        lib.gpu.stuck = comm.rank == 0
        if comm.rank == 1:
            with pytest.raises(ZeroDivisionError), ctx.running("matmul"):
                raise ZeroDivisionError("injected")
            assert {how for _, how in lib.gpu.aborted} <= {"abort"}, "there"
        else:
            error = raised(ctx.engine.synchronize)
            check_error(error, pb.ClosedError, "rank 1 left matmul with ZeroDivisionError: injected")
        ctx.close()
        assert not lib.of("Destroy"), "kept"
        assert not lib.of("GridDestroy"), "kept"


def rank_that_waits_in_nccl(comm: Any, path: str) -> Any:
    """A rank whose thread waits inside NCCL for one that has left a run is let go, and hears why."""
    side_channel.BLOCKED_SECONDS, module._LOOK_SECONDS = 0.3, 0.1
    with machine(path, Meeting, comm=comm.Dup(), lt=FakeLt()) as lib:
        ctx = pb.Context(comm, engine="cublasmp")
        a = ctx.zeros((64, 64), block=8, dtype="float32")
        plan = pb.plan(pb.matmul, a, a, algo="gathered")
        plan()  # now there is memory for messages, on which the ranks agree
        cause = ZeroDivisionError("injected")

        def leave() -> None:
            raise cause

        if comm.rank == 1:
            have_run(plan, leave)
        lib.gpu.connecting = comm.rank == 0
        error = raised(plan)
        lib.gpu.connecting = False
        if comm.rank == 1:
            assert error is cause, f"error: raised {error!r}"
        else:
            check_error(error, pb.ClosedError, "rank 1 left matmul with ZeroDivisionError: injected")
        again = raised(ctx.zeros, (4, 4))
        check_error(again, pb.ClosedError, "rank 1 left matmul with ZeroDivisionError", case="afterwards")
        ctx.close()


def test_a_rank_that_waits_in_nccl_for_one_that_has_left_is_let_go(stand_in, monkeypatch):
    monkeypatch.setenv("PBLASMP_RANKS_PER_NODE", "1")  # messages by NCCL
    run_mpi(rank_that_waits_in_nccl, 2, timeout=60, path=stand_in(1000))


@on_ranks(2)
def test_errors_of_nccl(comm: Any, path: str) -> None:
    """What NCCL finds on one rank, every rank raises: also where that rank's own work has ended."""
    for stuck in (False, True):
        with machine(path, Meeting, comm=comm.Dup(), lt=FakeLt()) as lib:
            ctx = pb.Context(comm, engine="cublasmp")
            if comm.rank == 1:
                lib.gpu.nccl_error, lib.gpu.stuck = 6, stuck
            else:
                lib.gpu.stuck = True
            error = raised(ctx.engine.synchronize)
            words = "NCCL on rank 1: 6, found by ncclCommGetAsyncError"
            kind = pb.StatusError if comm.rank == 1 else pb.ClosedError
            check_error(error, kind, words, case=f"stuck: {stuck}")
            ctx.close()


@on_ranks(2)
def test_half_of_a_first_run(comm: Any, path: str) -> None:
    """A first run that fails on one rank only leaves the other's GPU waiting: the context cannot go on."""
    for failing in ([1], [0, 1]):
        with machine(path, Meeting, comm=comm.Dup(), lt=FakeLt()) as lib:
            ctx = pb.Context(comm, engine="cublasmp")
            x = sys.modules["cupy"].zeros((8, 8), np.float32)
            with pb.plan(pb.matmul_allreduce, x, x, ctx, algo="one_shot") as plan:
                lib.gpu.lt.found = int(comm.rank not in failing)  # algorithms
                error = raised(plan)
                lib.gpu.lt.found = 1
                where = ["(on rank 1)"] if failing == [1] else []
                check_error(error, pb.UnsupportedError, "cuBLASLt", *where, case=f"{failing}: error")
                again, text = raised(plan), "the first run failed on some ranks only"
                if failing == [1]:
                    check_error(again, pb.ClosedError, text, case=f"{failing}: again")
                else:
                    assert not again, f"{failing}: again"
            ctx.close()


@on_ranks(2)
def test_memory_that_is_short(comm: Any, path: str) -> None:
    """One rank lacks memory for values, messages or slabs: an error of every rank; the context stays usable."""
    with context(path, Meeting, comm=comm.Dup(), lt=FakeLt()) as (ctx, lib):
        a = ctx.zeros(pb.MatrixDescriptor((64, 64), (8, 8), pb.Grid(1, comm.size)))
        b = pb.MatrixDescriptor((64, 64), (8, 8), pb.Grid(comm.size, 1))
        file = Path(path).with_suffix(".npy")
        if comm.rank == 0:
            np.save(file, np.ones((64, 64)))
        comm.Barrier()
        for name, call in {
            "values": lambda: ctx.from_function(lambda i, j: i + j, a.descriptor),
            "identity": lambda: ctx.eye(a.descriptor),
            "full": lambda: ctx.full(a.descriptor, 2),
            "random": lambda: ctx.random(a.descriptor, seed=1),
            "scatter": lambda: ctx.scatter(np.ones((64, 64)) if ctx.rank == 0 else None, a.descriptor),
            "load": lambda: ctx.load(file, descriptor=a.descriptor),
            "copy": a.copy,
            "transposed copy": a.T.copy,
            "astype": lambda: a.astype("float32"),
            "trace": a.trace,
            "diagonal": a.diagonal,
            "messages": lambda: a.redistribute(b),
            "slabs": lambda: pb.matmul(a, a, algo="gathered"),
            "right-hand sides": lambda: pb.blas.trsm(ctx.eye(a.descriptor), a, side="R", algo="gathered"),
        }.items():
            failed: set[Any] = set()
            while True:
                met: list[int] = []

                def refuses(nbytes: int, failed: set[Any] = failed, met: list[int] = met) -> bool:
                    place = places()
                    if met:  # nor is there room after buffers have been given up
                        return True
                    if place in failed:
                        return False
                    failed.add(place)
                    met.append(nbytes)
                    return True

                lib.gpu.refuses = refuses if comm.rank == 1 else None
                error = raised(call)
                lib.gpu.refuses = None
                if not comm.bcast(met, 1):
                    break
                check_error(error, MemoryError, " bytes", "(on rank 1)", case=f"{name}, {comm.bcast(met, 1)}")
            assert not error, f"{name}: in the end"
            assert comm.bcast(failed, 1), f"{name}: tried: nothing is allocated"


@on_ranks(2)
def test_rank_that_is_behind(comm: Any, path: str) -> None:
    """A rank that closes while another's GPU waits for a run that the first has not begun: both hear of it."""
    side_channel.STALL_SECONDS = 0.3
    with machine(path, Meeting, comm=comm.Dup(), lt=FakeLt()) as lib:
        ctx = pb.Context(comm, engine="cublasmp")
        x = sys.modules["cupy"].zeros((8, 8), np.float32)
        plan = pb.plan(pb.matmul_allreduce, x, x, ctx, algo="nccl")
        plan()
        if comm.rank == 0:
            lib.gpu.stuck = True
            plan()
        error = raised(ctx.engine.synchronize if comm.rank == 0 else ctx.close)
        waiting = "rank 0 waits for run 2 of a plan, which rank 1, waiting in closing the context"
        check_error(error, pb.ClosedError, waiting, "has not begun", case="behind")
        ctx.close()
    with machine(path, Meeting, comm=comm.Dup(), lt=FakeLt()) as lib:
        ctx = pb.Context(comm, engine="cublasmp")
        plan = pb.plan(pb.matmul_allreduce, x, x, ctx, algo="nccl")
        plan()
        if comm.rank == 0:  # only slow: the other has begun all of it
            lib.gpu.stuck = True
            threading.Timer(0.8, setattr, [lib.gpu, "stuck", False]).start()
        error = raised(ctx.engine.synchronize)
        error = error or raised(ctx.close)
        assert not error, "slow"


def break_off(ctx: pb.Context) -> None:
    with ctx.running("matmul"):
        raise ZeroDivisionError("injected")


@on_ranks(2)
def test_another_context(comm: Any, path: str) -> None:
    """A context breaks while a GPU waits; its memory is free before the next one computes, in the same processes."""
    module._ABORT_SECONDS = 0.5
    with machine(path, Meeting, comm=comm.Dup(), lt=FakeLt()) as lib:
        for breaks in ("a wait", "nothing", "nothing again"):
            before = set(lib.gpu.alive)
            ctx = pb.Context(comm, engine="cublasmp")
            x = ctx.zeros((64, 64), block=8, dtype="float32")
            kept = ctx.empty(x.descriptor, symmetric=True)
            pb.matmul(x, x, algo="push")
            pb.matmul(x, x, algo="default")
            session = ctx.engine.session
            memory = {at for kind, at in set(lib.gpu.alive) - before if kind == "window"}
            comm.Barrier()
            began = len(lib.gpu.events)
            lib.gpu.stuck = breaks == "a wait" and comm.rank == 0
            waits = ctx.engine.synchronize if lib.gpu.stuck else partial(ctx.eye, (4, 4))
            error = raised(waits) if comm.rank == 0 else raised(break_off, ctx)
            check_error(error, ZeroDivisionError if comm.rank else pb.ClosedError, case=f"{breaks}: there")
            ctx.close()
            del x
            other = pb.Context(comm, engine="cublasmp")
            freed = {event[1] for event in lib.gpu.events[began:] if event[0] == "window released"}
            left = memory - freed  # what users have, and flags, which the other rank may still write
            here = len(memory) == 4 and len(left) == 2 and kept.local.data.ptr in left
            assert here, f"{breaks}: freed: of {memory} is left {left}"
            assert not takes_turns(session), f"{breaks}: turns"
            a = other.zeros((64, 64), block=8, dtype="float32")
            for algo in ("push", "default"):
                pb.matmul(a, a, algo=algo)
            other.close()
        ctx = pb.Context(comm, engine="cublasmp")
        if comm.rank == 0:
            ctx.engine.runtime.health._is_idle = lambda: False
        raised(*((break_off, ctx) if comm.rank else (ctx.eye, (4, 4))))
        ctx.close()
        error = raised(pb.Context, comm)
        check_error(error, pb.StatusError, "rank 0: on its GPU, work of a broken context", case="for ever")
        with pb.Context(comm, engine="host") as ctx:
            assert ctx.eye((4, 4), block=2).sum() == 4, "CPU ranks: wrong"


# -- one rank


def test_a_lost_gpu_without_other_ranks(ctx, lib):
    hook = sys.unraisablehook
    lib.gpu.lost = 700
    with pytest.raises(pb.StatusError, match="of rank 0 cannot be used any more in this process: 700"):
        ctx.engine.synchronize()
    ctx_error = raised(ctx.close)
    assert isinstance(ctx_error, pb.StatusError)
    assert not lib.of("Destroy")
    heard = []
    sys.unraisablehook, quiet = heard.append, sys.unraisablehook
    sys.unraisablehook = hook
    foreign = type("CUDARuntimeError", (RuntimeError,), {"__module__": "cupy_backends.cuda.api.runtime"})
    quiet(SimpleNamespace(exc_type=foreign, exc_value=foreign("x"), object=None))  # says nothing
    lib.gpu.lost = 0
    lib.gpu.alive.clear(), lib.alive.clear(), lib.gpu.lt.alive.clear()


def test_a_process_without_its_gpu_ends_even_where_a_destructor_waits():
    script = """
import time
from pblasmp.engines.gpu.runtime import health
class Waits:
    def __del__(self):
        time.sleep(60)
waits = Waits()
health._EXIT_SECONDS = 1
health.atexit.register(health._end_in_time)
"""
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", script], timeout=50, check=False)
    assert (ended.returncode, time.monotonic() - start < 30) == (-signal.SIGALRM, True)


def test_errors_of_a_recording_are_no_loss(ctx, lib):
    lib.gpu.lost = 900  # cudaErrorStreamCaptureUnsupported
    assert ctx.engine.session.runtime.health.fault() is None
    lib.gpu.lost = 0


def test_a_wait_takes_no_longer_than_what_it_waits_for(ctx, lib):
    """It asks the stream once, and looks once for errors."""
    session, asked = ctx.engine.session, []
    stream = type("Stream", (), {"done": property(lambda self: asked.append(1) is None)})()
    session.runtime.wait(stream)
    assert asked == [1]


def test_own_flags_are_raised_until_the_queue_is_empty(ctx, lib, monkeypatch):
    health, raised_flags = ctx.engine.session.runtime.health, []
    lib.gpu.stuck = True

    def raise_own(stream: Any) -> None:
        raised_flags.append(stream)
        lib.gpu.stuck = len(raised_flags) < 3

    monkeypatch.setattr(lib.gpu, "_wait_for_the_device", lambda: None)
    health.raisers.append(raise_own)
    ended = threading.Event()
    health._let_go(ended)
    health.raisers.remove(raise_own)
    assert ended.is_set()
    assert raised_flags == [health._aside] * 3


def test_nothing_is_aborted_where_all_ends_well(stand_in, alone):
    with machine(stand_in(1000), lt=FakeLt()) as lib:
        with pb.Context(engine="cublasmp") as ctx:
            ctx.engine.session.cublasmp.workspace(Grid(1, 1))
            channel = ctx.control.channel
            health = ctx.engine.session.runtime.health
            ctx.engine.session.gpu.stream("copy")
            assert channel.device is health
            assert [len(queue()) for queue in health.queues] == [1, 1]
            assert len(health.raisers) == (ctx.engine.session.gpu.windows is not None)
        assert channel.device is None
        assert (len(health.queues), health.raisers) == (1, [])  # nothing of the closed Gpu
        assert not lib.gpu.aborted
        lib.gpu.assert_clean()


def test_a_communicator_of_the_callers_is_left_alone(stand_in, alone):
    with machine(stand_in(1000)) as lib:
        mine = sys.modules["nccl.core"].Communicator.init(1, 0, b"unique")
        with pb.Context(engine="cublasmp", nccl=mine) as ctx:
            assert ctx.engine.session.runtime.health.own == []
            assert ctx.engine.session.runtime.health.nccls == [mine]
        mine.destroy()
        lib.gpu.assert_clean()


def test_a_communicator_that_somebody_has_destroyed_is_an_error():
    class Gone:
        def get_async_error(self) -> int:
            raise RuntimeError("Cannot get async error: Communicator not initialized")

    assert module._nccl_error(Gone()) == "RuntimeError: Cannot get async error: Communicator not initialized"
    assert module._nccl_error(SimpleNamespace(get_async_error=lambda: 7)) == ""
    assert module._nccl_error(SimpleNamespace()) == ""
