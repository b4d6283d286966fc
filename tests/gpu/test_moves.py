# SPDX-License-Identifier: Apache-2.0
"""Moves between layouts on GPUs: right, and none that hangs; PBLASMP_TRACE=1 says which one runs."""

from __future__ import annotations

import os

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.gpu import gpu_transport
from tests.helpers.gpu.host_arrays import check_trip
from tests.helpers.gpu.moves import check_move, grids, say
from tests.helpers.gpu.products import check_whole, integers, place
from tests.helpers.slow import thinned

COUNT = int(os.environ.get("PBLASMP_RANDOM_MOVES", thinned(1000)))
BATCH = 50


@pytest.fixture(params=["by copy engines", "by NCCL"])
def way(ctx: pb.Context, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Copy engines move what they reach; NCCL everything, as where they reach nothing."""
    if request.param == "by NCCL":
        monkeypatch.setattr(ctx.engine.session.gpu, "why_no_windows", "NCCL is tried")
        monkeypatch.setattr(ctx.engine.transport, "near", frozenset())
        monkeypatch.setattr(ctx.engine.transport, "inbox", None)
    elif ctx.engine.session.gpu.why_no_windows:
        pytest.skip("GPUs do not reach each other")
    return str(request.param)


def test_lines_of_processes(ctx, way):
    """Every grid to every other, with few blocks: ranks without data, and sources that are not the first."""
    for number, (one, other) in enumerate((a, b) for a in grids(ctx.size) for b in grids(ctx.size)):
        for blocks in (((1, 1), (4, 4)), ((3, 5), (2, 2)), ((20, 20), (1, 7))):
            say(ctx, f"{way} {one} -> {other} {blocks}")
            source = pb.MatrixDescriptor((9, 13), blocks[0], one, (one.nprow - 1, one.npcol - 1), order="F")
            target = pb.MatrixDescriptor(
                (9, 13), blocks[1], other, (other.nprow // 2, 0), order="CF"[number % 2]
            )
            values = integers(source.shape, source.dtype, number)
            moved = place(ctx, values, source).redistribute(target)
            check_whole(ctx, moved, values, f"{source} -> {target}")


@pytest.mark.parametrize("batch", range(max(1, COUNT // BATCH)))
def test_random_moves_are_right(ctx, way, batch):
    first = 100_000 * ctx.size + batch * BATCH
    for seed in range(first, first + BATCH):
        check_move(ctx, seed)


def test_a_move_is_ordered_with_what_is_queued_around_it(ctx, way):
    import cupy

    n = 1500
    d = pb.MatrixDescriptor((n, n), (64, 64), pb.Grid.squarest(ctx.size), dtype="float32")
    other = pb.MatrixDescriptor((n, n), (n, 100), pb.Grid(1, ctx.size), dtype="float32", order="F")
    values = integers(d.shape, d.dtype, 1)
    a = place(ctx, values, d)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        for _ in range(5):
            a.local[...] *= -1
            moved = a.redistribute(other)
            moved.local[...] += 1
        stream.synchronize()
    check_whole(ctx, moved, 1 - values)


def test_products_whose_operands_are_moved(ctx, way):
    n = 96
    grid = pb.Grid.squarest(ctx.size)
    a = pb.MatrixDescriptor((n, n), (16, 8), grid, dtype="complex64")
    b = pb.MatrixDescriptor((n, n), (7, 16), pb.Grid(ctx.size, 1), dtype="complex64", order="F")
    values = [integers(x.shape, x.dtype, i) for i, x in enumerate((a, b))]
    whole = np.full((n + 5, n + 3), np.nan, np.complex64)
    whole[5:, 3:] = values[1]
    parent = place(
        ctx, whole, pb.MatrixDescriptor(whole.shape, b.block, b.grid, dtype="complex64", order="F")
    )
    a, b = place(ctx, values[0], a), parent[5:, 3:]
    with pb.plan(pb.matmul, a, b, algo="default") as plan:
        for _ in range(2):
            check_whole(ctx, plan(), values[0] @ values[1])
        (line,) = [line for line in plan.report().moved if line.startswith("b is moved to")]
        assert (way if ctx.size > 1 else "by a local copy") in line
        out, graph = plan(), plan.graph()
        for factor in (1, -2, 3):  # which the graph reads when it is replayed
            out.local[...] = np.nan
            a.local[...] *= factor
            values[0] = values[0] * factor
            check_whole(ctx, graph.replay(), values[0] @ values[1], factor)


@pytest.mark.parametrize("panel", [1000, 64 << 20])
def test_random_trips_from_the_host_and_back(ctx, monkeypatch, tmp_path, panel):
    monkeypatch.setattr(gpu_transport, "PANEL_BYTES", panel)
    directory = ctx.comm.bcast(str(tmp_path))
    for seed in range(thinned(300)):
        check_trip(ctx, 100_000 * ctx.size + seed, directory)


def test_a_large_matrix_from_the_host_and_back(ctx):
    """Several panels, through pinned memory."""
    values = np.random.default_rng(3).integers(-100, 100, (5000, 4321)).astype(np.float64)
    for order in "CF":
        d = pb.MatrixDescriptor(values.shape, (64, 32), pb.Grid.squarest(ctx.size), order=order)
        a = ctx.scatter(values, d)
        back = a.gather()
        check_whole(ctx, a, values)
        assert back is None or np.array_equal(back, values)
