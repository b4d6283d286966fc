# SPDX-License-Identifier: Apache-2.0
"""The workspace: asked for with the call's arguments, known before it is there, shared, growing, never too small."""

from __future__ import annotations

from typing import Any

import pytest

import pblasmp as pb
from pblasmp.engines.gpu.runtime.symmetric_memory import roomy
from tests.helpers.machine import Witness, machine
from tests.helpers.mpi import on_ranks

D = pb.MatrixDescriptor((8, 8), (2, 2), pb.Grid(1, 1))


def planned(ctx: pb.Context, d: pb.MatrixDescriptor = D, **how: Any) -> Any:
    return pb.plan(pb.matmul, ctx.empty(d), ctx.empty(d), **how)


def buffers(lib: Witness) -> list[tuple[int, int, int, int]]:
    """What each call of cublasMpMatmul was given: addresses and sizes, on the device and on the host."""
    names = "d_work", "workspaceSizeInBytesOnDevice", "h_work", "workspaceSizeInBytesOnHost"
    return [tuple(call[name] for name in names) for call in lib.of("Matmul")]


def test_it_grows_and_earlier_plans_follow(ctx, lib):
    small = planned(ctx)
    small()
    lib.workspace = (8192, 256)
    large = planned(ctx)
    large()
    small()
    large()
    (old, _), (new, new_bytes) = lib.gpu.did("window")
    ((host, _),) = lib.gpu.did("pinned")  # the host part was large enough
    assert new_bytes == 8192
    assert buffers(lib) == [
        (old, 4096, host, 512), (new, 8192, host, 256), (new, 4096, host, 512), (new, 8192, host, 256),
    ]  # fmt: skip
    grown = [event[0] for event in lib.gpu.events]
    at = grown.index("BufferDeregister")
    assert grown[at - 1 : at + 4] == [
        "synchronize", "BufferDeregister", "window released", "window", "BufferRegister",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "nbytes", [0, 4096, (32 << 20) - 1, 32 << 20, 33_555_200, 100_000_000, 10**9, 10**11]
)
def test_large_buffers_have_room_to_spare(nbytes):
    room = roomy(nbytes)
    assert nbytes <= room <= nbytes + max(32 << 20, nbytes // 4)
    assert nbytes < 32 << 20 or room % (32 << 20) == 0
    assert room == nbytes or roomy(nbytes + 1) in (room, roomy(room + 1))


def test_grids_of_d_have_buffers_of_their_own(ctx, lib):
    for order in "CFC":
        planned(ctx, pb.MatrixDescriptor((8, 8), (2, 2), pb.Grid(1, 1), order=order))()
    assert len(lib.gpu.did("window")) == len({call["grid"] for call in lib.of("BufferRegister")}) == 2


def test_a_gathered_operand_is_registered_with_the_grid_of_d(ctx, lib):
    p = pb.MatmulProblem.allgather_matmul(4, 4, 4, 1, order="F", dtype="float32")
    for symmetric in (False, True):
        b = ctx.empty(p.b, symmetric=symmetric)
        with pb.plan(pb.matmul, ctx.empty(p.a), b, op_a="T", scheme="allgather_matmul") as plan:
            registered = [call["ptr"] for call in lib.of("BufferRegister")]
            assert registered == [b.local.data.ptr] * symmetric
            assert ("B, which is gathered, is in symmetric memory" in plan.report().notes) == symmetric
    with pb.plan(pb.matmul, ctx.empty(p.a), b, op_a="T", scheme="allgather_matmul"):
        assert len(lib.of("BufferRegister")) == 1  # once


def test_no_room_is_a_memory_error_and_the_next_run_tries_again(ctx, lib):
    with planned(ctx) as plan:
        lib.gpu.free = 4095
        for _ in range(2):
            with pytest.raises(MemoryError, match=r"4096 bytes .* GPU 0000:00:00.0 has 4095 free"):
                plan()
        assert lib.gpu.did("pool emptied")
        assert not lib.of("Matmul")
        lib.gpu.free = 4096
        plan()
        assert len(lib.of("Matmul")) == 1


def test_no_room_for_growing_leaves_earlier_plans_what_they_need(ctx, lib):
    small = planned(ctx)
    small()
    lib.workspace = (8192, 512)
    lib.gpu.free = 4096
    with pytest.raises(MemoryError):
        planned(ctx)()
    small()
    assert [bytes_ for _, bytes_ in lib.gpu.did("window")] == [4096, 4096]
    assert buffers(lib)[-1][0] == lib.gpu.did("window")[-1][0]


@on_ranks(2, timeout=30)
def test_sizes_that_differ_between_ranks(comm: Any, path: str) -> None:
    """Ranks that need less, or have less, do what those do that need more, or have more."""
    with machine(path, comm=comm) as lib:
        lib.workspace = (4096 * (comm.rank + 1), 512 * (2 - comm.rank))
        d = pb.MatrixDescriptor((8, 8), (2, 2), pb.Grid(1, 2))
        with pb.Context(comm, engine="cublasmp") as ctx:
            with planned(ctx, d) as plan:
                told = (plan.workspace.device_bytes, plan.workspace.host_bytes)
                assert told == (8192, 1024), "the largest"
                for what, free in (("no room", 0), ("no memory", 1 << 20)):
                    lib.gpu.free = free if comm.rank == 1 else 1 << 40
                    if what == "no memory":  # free, but fragmented
                        lib.gpu.fragmented = comm.rank == 1
                    with pytest.raises(MemoryError, match="on rank 1"):
                        plan()
                lib.gpu.free, lib.gpu.fragmented = 1 << 40, False
                plan()
                mine = (4096 * (comm.rank + 1), 512 * (2 - comm.rank))
                assert buffers(lib)[0][1::2] == mine, "own sizes"
                at = (
                    [size for _, size in lib.gpu.did("window")][-1],
                    [s for _, s in lib.gpu.did("pinned")][-1],
                )
                assert at == (8192, 1024), "allocated alike"
            lib.gpu.free = 0 if comm.rank == 0 else 1 << 40
            with pytest.raises(MemoryError, match="on rank 0"):
                ctx.empty(d, symmetric=True)
            lib.gpu.free = 1 << 40
            ctx.empty(pb.MatrixDescriptor((8, 7), (2, 4), pb.Grid(1, 2)), symmetric=True)
            assert lib.gpu.did("window")[-1][1] == 8 * 4 * 8, "arrays alike"
        lib.assert_clean()
        lib.gpu.assert_clean()
