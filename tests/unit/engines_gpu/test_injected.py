# SPDX-License-Identifier: Apache-2.0
"""Every call of CuPy, NCCL, NVSHMEM and CUDA failing, on each rank, wherever the engine makes it.

What ranks agree on is raised by all, and nothing is left behind. A run that one rank leaves breaks the context: the
other ranks hear of it where they next agree, and nobody waits for messages that never come.

The same calls while the user has made another GPU the current one, which stays so.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.comm import agreement
from pblasmp.comm.side_channel import SideChannel
from pblasmp.engines.gpu.runtime import health
from pblasmp.engines.gpu.runtime.symmetric_memory import SymmetricHeap
from pblasmp.engines.gpu.tensor.base import CopyProduct
from tests.helpers import float8, inside
from tests.helpers.cases import refuses
from tests.helpers.copy_products import PRODUCTS
from tests.helpers.failing_calls import left_behind, lives
from tests.helpers.fakelt import FakeLt
from tests.helpers.machine import Meeting, context, machine
from tests.helpers.mpi import on_ranks, run_mpi
from tests.helpers.slow import draws

PATIENCE = 0.3  # seconds; messages of ranks that are alive take less, also on a busy machine
SPARED = (
    *(
        (name, "pblasmp.engines.gpu.runtime.device:_current") for name in ("getDevice", "deviceGetPCIBusId")
    ),  # may fail
    ("getDevice", "pblasmp.engines.gpu.runtime.device:__enter__"),  # a lost GPU says so where it is used
    (
        "deviceGetByPCIBusId",
        "pblasmp.engines.gpu.runtime.windows:_why_deaf",
    ),  # may see fewer GPUs than there are
    (
        "init",
        "pblasmp.engines.gpu.runtime.symmetric_memory:__init__",
    ),  # ends on all ranks or, in NVSHMEM, on none
)
ALONE = "get_current_stream", "pblasmp.engines.gpu.gpu_engine:lifetime"
"""Fails while the other ranks wait in an agreement of the engine: fails on every rank, also in the short form."""
OTHER, ITS_STREAM = 7, 471100  # a GPU that no rank has, and the stream that the user has chosen there
RELEASES = (
    *("destroy", "close", "finalize", "free", "deviceSynchronize", "use"),
    *("matmul_desc_destroy", "matrix_layout_destroy", "matmul_preference_destroy"),
)


def life(lib: Meeting, comm: Any) -> None:
    """A context, and plans that use all that a session makes."""
    with pb.Context(comm, engine="cublasmp") as ctx:
        lib.channel = ctx.control.channel
        size, cuda = ctx.size, sys.modules["cupy"].cuda
        grid = pb.Grid(1, size)
        a, b, c = (ctx.zeros(pb.MatrixDescriptor((6, 6), (2, 2), grid, dtype="float32")) for _ in range(3))
        one = ctx.zeros(pb.MatrixDescriptor((6, 6), (6, 6), pb.Grid(1, 1), dtype="float32"))
        for algo in ("default", "gathered", "panels"):
            pb.matmul(a, b, algo=algo)
        pb.matmul(one, one, algo="default")  # another communicator
        pb.blas.syrk(a, c, beta=1, algo="summed")
        with pb.plan(pb.blas.trsm, ctx.eye(a.descriptor), b, algo="gathered") as plan:
            plan()
            with cuda.Stream():
                plan()
        pb.blas.geadd(a, c, op_a="T", algo="moved")
        b.redistribute(one.descriptor)
        ar, ag = (
            f(4, 4, 4, size, dtype="float32", order="F")
            for f in (pb.MatmulProblem.matmul_allreduce, pb.MatmulProblem.allgather_matmul)
        )
        pb.matmul(ctx.zeros(ar.a), ctx.zeros(ar.b), op_a="T", scheme="matmul_allreduce", algo="sum")
        gathered = ctx.empty(ag.b, symmetric=True)
        with pb.plan(pb.matmul, ctx.zeros(ag.a), gathered, op_a="T", scheme="allgather_matmul") as plan:
            plan.graph().replay()
        lib.workspace = (8192, 1024)
        pb.matmul(a, b, algo="default")
        pb.matmul(ctx.zeros(ag.a), gathered, op_a="T", scheme="allgather_matmul", algo="push")
        one.gather()
        ctx.zeros(a.descriptor)  # where ranks agree that had no part in the last copy


def overlapped_life(lib: Meeting, comm: Any) -> None:
    """A context whose GPUs reach each other, and plans of every algorithm of pblasmp: run, recorded, replayed."""
    with pb.Context(comm, engine="cublasmp") as ctx:
        lib.channel = ctx.control.channel
        cupy, size = sys.modules["cupy"], ctx.size
        x, w = (cupy.zeros((8, 8), np.float32) for _ in range(2))
        for form, names in PRODUCTS.items():
            for name in [name for name in names if name != "one_kernel"]:
                with pb.plan(form, x, w, ctx, algo=name) as plan:
                    assert isinstance(inside.product(plan), CopyProduct), plan.report()
                    for _ in range(3):
                        plan()
        y, gathered = pb.allgather_matmul(x, w, ctx, algo="push", return_gathered=True)
        assert (y.shape, gathered.shape) == ((8 * size, 8), (8 * size, 8))
        d = pb.MatrixDescriptor((12, 12), (3, 2), pb.Grid(1, size), dtype="complex64")
        a, b = (
            ctx.zeros(d),
            ctx.zeros(pb.MatrixDescriptor((12, 12), (5, 5), pb.Grid(size, 1), dtype="complex64")),
        )
        for op in "NC":
            with pb.plan(pb.matmul, a, b, op_a=op, algo="push") as plan:
                for _ in range(3):
                    plan()
                plan.graph().replay()
        bias = cupy.zeros(ctx.empty(pb.MatrixDescriptor((8, 8), (4, 4), pb.Grid(1, size))).local.shape[1])
        c = ctx.zeros(pb.MatrixDescriptor((8, 8), (4, 4), pb.Grid(1, size)))
        pb.matmul(c, c, algo="push", epilogue=pb.Epilogue("relu", bias=bias))
        ctx.zeros(d)


def varied_life(lib: Meeting, comm: Any) -> None:
    """Products of other numbers of tokens, on which the ranks take a single vote: only in them anything fails."""
    fails, lib.gpu.fails = lib.gpu.fails, None
    with pb.Context(comm, engine="cublasmp") as ctx:
        lib.channel = ctx.control.channel
        x, w = (sys.modules["cupy"].zeros((8, 8), np.float32) for _ in range(2))
        for form in PRODUCTS:
            getattr(pb, form)(x, w, ctx, algo="push")
        if lib.gpu.called is not None:
            lib.gpu.called.clear()
        lib.gpu.fails = fails
        before = inside.votes(ctx)
        for form in PRODUCTS:
            getattr(pb, form)(x[:6], w, ctx, algo="push")
        if lib.gpu.called is not None:
            assert inside.votes(ctx) == before + len(PRODUCTS)
            lib.gpu.called[:] = [place for place in lib.gpu.called if place[0] not in RELEASES]
        ctx.engine.synchronize()


@contextlib.contextmanager
def tells(broken_off: Path) -> Iterator[None]:
    """Make the file once this rank has broken its context: it sends nothing more."""
    break_ = SideChannel.break_

    def break_and_tell(channel: SideChannel, *how: Any) -> None:
        break_(channel, *how)
        broken_off.touch()

    SideChannel.break_ = break_and_tell
    try:
        yield
    finally:
        SideChannel.break_ = break_


def failures(
    comm: Any, path: str, directory: str, reach: bool = False, keep: int = 1, varied: bool = False
) -> Any:
    """Every place fails on every rank, in the short form one in ``keep``, other ones on each rank.

    Args:
        comm: the ranks.
        path: the library.
        directory: where a rank says that it has broken off.
        reach: the GPUs reach each other.
        keep: of how many places one fails on a rank.
        varied: only what takes another number of tokens fails.
    """
    health._FLAGS_SECONDS = 0.02  # what flags can end, ends at once on these GPUs
    agreement.BLOCKED_SECONDS = PATIENCE
    begins = varied_life if varied else overlapped_life if reach else life
    how = lambda: {"lt": FakeLt()} if reach else {}  # noqa: E731
    with machine(path, Meeting, comm=comm, **how()) as lib:
        lib.gpu.called = []
        begins(lib, comm)
        mine = [place for place in dict.fromkeys(lib.gpu.called) if place not in SPARED]
        lib.assert_clean()
        lib.gpu.assert_clean()
    assert len(mine) >= (10 if varied else 40), "places"
    for failing in range(comm.size):
        places = comm.bcast(mine if comm.rank == failing else None, failing)
        for place in dict.fromkeys((ALONE, *places[failing::keep])):
            with machine(path, Meeting, comm=comm.Dup(), **how()) as lib:
                broken_off = Path(directory, f"{failing} {' '.join(place)}")
                lib.gpu.patience, lib.gpu.hopeless = PATIENCE, broken_off.exists
                if comm.rank == failing:
                    lib.gpu.fails = place
                with tells(broken_off):
                    error = lives(begins, lib, comm)
                everyone = comm.allgather(error is not None)
                again = varied and not any(everyone)  # what fails before the vote is read as a new call
                found = wrong(lib, error, place[0], here=comm.rank == failing and not again)
            if not (all(everyone) or again) and place[0] not in RELEASES:
                found.append(f"raised on {everyone} alone")
            assert not "; ".join(found), f"{place[0]} in {place[1]} on rank {failing}"


def wrong(lib: Meeting, error: Exception | None, name: str, *, here: bool) -> list[str]:
    """Return what is wrong with how a rank ended, of which one call failed ``here`` or on another rank."""
    broken = bool(lib.channel and lib.channel.cause)
    found = [*lib.faults, *lib.gpu.faults]
    if not broken:  # a context that is broken keeps what others may still write to
        found = left_behind(lib)
    if lib.gpu.lt is not None and lib.gpu.lt.alive and not broken:
        found.append(f"cuBLASLt keeps {len(lib.gpu.lt.alive)}")
    if error is not None and f"injected: {name}" not in str(error):
        found.append(f"raised {error!r}")
    if here and error is None:
        found.append("raised nothing where it failed")
    return found


@pytest.mark.parametrize(("nranks", "version", "keep"), [(1, 1000, 3), (2, 1000, 12), (2, 700, 16)])
def test_every_call_failing_on_each_rank(stand_in, tmp_path, nranks, version, keep):
    """With 0.7 symmetric memory is NVSHMEM's."""
    how = {"path": stand_in(version), "directory": str(tmp_path), "keep": draws(keep, long=1)}
    run_mpi(failures, nranks, timeout=240, **how)


@pytest.mark.parametrize(("varied", "keep"), [(False, 14), (True, 4)])
def test_every_call_of_our_own_algorithms_failing_on_each_rank(stand_in, tmp_path, varied, keep):
    how = {"path": stand_in(1000), "directory": str(tmp_path), "keep": draws(keep, long=1), "varied": varied}
    run_mpi(failures, 2, timeout=240, reach=True, **how)


@pytest.mark.parametrize("reach", [False, True])
@on_ranks(2)
def test_while_another_gpu_is_current(comm: Any, path: str, reach: bool) -> None:
    """The lives while another GPU is current, with a stream of its own."""
    enter = pb.Context.__enter__

    def leave_home(ctx: pb.Context) -> pb.Context:
        lib.gpu.home, lib.gpu.current = ctx.engine.device.index, OTHER
        lib.gpu.stream = ITS_STREAM
        return enter(ctx)

    begins, how = (overlapped_life, {"lt": FakeLt()}) if reach else (life, {})
    with machine(path, Meeting, comm=comm, **how) as lib, patch.object(pb.Context, "__enter__", leave_home):
        begins(lib, comm)
        assert not [event for event in lib.gpu.events if ITS_STREAM in event], "its stream"
        assert lib.gpu.current == OTHER, f"afterwards: GPU {lib.gpu.current} is current"
        assert not "\n".join(dict.fromkeys(lib.gpu.faults)), "faults"
        lib.gpu.callers = OTHER
        lib.assert_clean()
        lib.gpu.assert_clean()


def test_memory_that_cannot_be_registered_is_freed_at_once(ctx, lib, monkeypatch):
    x = ctx.zeros(pb.MatrixDescriptor((6, 6), (2, 2), pb.Grid(1, 1)))
    with monkeypatch.context() as patch:
        patch.setattr(
            SymmetricHeap, "offer", lambda *_: (_ for _ in ()).throw(RuntimeError("not registered"))
        )
        with pytest.raises(RuntimeError, match="not registered"):
            pb.matmul(x, x, algo="default")
        assert not [kind for kind, _ in lib.gpu.alive if kind == "window"]
        assert not lib.of("BufferDeregister")
    pb.matmul(x, x, algo="default")


@on_ranks(2)
def test_gpus_of_different_capability(comm: Any, path: str) -> None:
    """8-bit products are left to what every GPU has, also where only one of them is too old."""
    capability = "80" if comm.rank == 1 else "90"
    with context(path, comm=comm, capability=capability) as (ctx, _):
        assert ctx.engine.session.runtime.capability == 80, "least"
        p = float8.problem("gemm", comm.size, (float8.E4, float8.E4, "float32"), "C")
        a, b = ctx.zeros(p.a), ctx.zeros(p.b)
        words = ["8-bit floats need GPUs of compute capability 8.9 or above, found 8.0"]
        refuses(ctx, pb.UnsupportedError, words, pb.matmul, a, b, op_b="T", algo="default")
        with pb.plan(pb.matmul, a, b, op_b="T") as plan:
            assert plan.report().algorithm == "gathered", "auto"
