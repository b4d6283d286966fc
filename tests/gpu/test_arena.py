# SPDX-License-Identifier: Apache-2.0
"""The memory that products share, on several streams and in graphs."""

from contextlib import ExitStack

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers import inside

N = 1 << 22  # bytes

_SPIN = r"""
extern "C" __global__ void spin(long long cycles) { long long end = clock64() + cycles; while (clock64() < end) {} }
"""


def test_a_buffer_that_another_stream_still_reads_is_no_new_array(ctx):
    """CuPy would give its memory to the next array of the stream that it was made on."""
    import cupy

    operations, spin = ctx.engine.operations, cupy.RawKernel(_SPIN, "spin")
    first, last = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with first:
        operations.bytes("several streams", N)[...] = 1
    with last:
        buffer = operations.bytes("several streams", N)
        found = cupy.empty(N, np.uint8)
        spin((1,), (1,), (np.int64(400_000_000),))  # about 0.2 s
        found[...] = buffer[:N]
        del buffer
        operations.bytes("several streams", 2 * N)
    with first:
        new = [cupy.full(N, 7, np.uint8) for _ in range(4)]
    cupy.cuda.runtime.deviceSynchronize()
    assert bool((found == 1).all())
    assert len(new) == 4


def test_a_graph_of_a_routine_in_steps_notices_a_new_workspace(ctx):
    d = pb.MatrixDescriptor((512, 512), (64, 64), pb.Grid(1, ctx.size))
    a, b = ctx.random(d, seed=1), ctx.random(d, seed=2)
    pb.plan(
        pb.matmul, a, b, algo="default"
    ).close()  # unless it is refused here: the workspace is symmetric memory
    ctx.engine.session.cublasmp.workspace(d.grid).grow(1 << 20, 0)  # there is one to be replaced
    with (
        pb.plan(pb.blas.symm, a, b, algo="full") as plan,
        pb.plan(pb.matmul, a, b, algo="default") as product,
    ):
        product()
        expected = plan().gather()
        graph = plan.graph()
        graph.replay()
        workspace = ctx.engine.session.cublasmp.workspace(d.grid)
        inside.grow(workspace)
        with pytest.raises(pb.ClosedError, match="has been replaced"):
            graph.replay()
        product()
        again = plan.graph()
        again.replay()
        found = plan().gather()
        if ctx.rank == 0:
            np.testing.assert_array_equal(found, expected)


def test_a_graph_outlives_buffers_that_grow_on_one_rank(ctx):
    """Replaying is no business of several ranks: if one of them refused, the others would wait for it."""
    import cupy

    arena = ctx.engine.session.runtime.arena
    x, w = (cupy.random.default_rng(seed).standard_normal((64, 64), dtype=np.float32) for seed in (1, 2))
    with pb.plan(pb.matmul_allreduce, x, w, ctx) as plan:
        expected = plan().copy()
        graph = plan.graph()
        if ctx.rank == 0:
            inside.double(arena)
        found = graph.replay().copy()
        assert bool((found == expected).all())
        assert bool((plan() == expected).all())


def test_graphs_share_the_memory_of_their_arrays(ctx):
    """Each would hold its own otherwise, also those of a plan's steps: 30 GiB for a solve of order 16,384."""
    arena, n = ctx.engine.session.runtime.arena, 512
    d = pb.MatrixDescriptor((n, n), (64, 64), pb.Grid(1, ctx.size), order="F")
    a, b, c = (ctx.random(d, seed=seed) for seed in (1, 2, 3))
    with ExitStack() as stack:
        plans, found = [], []
        for side, alpha in (("L", 1.0), ("R", 2.0), ("L", 3.0)):
            how = {"side": side, "alpha": alpha, "beta": 0.5, "algo": "stationary"}
            plan = stack.enter_context(pb.plan(pb.blas.symm, a, b, c, out=ctx.empty(d), **how))
            expected = plan().gather()
            for _ in range(2):
                plan()  # records a graph
            plans.append((plan, expected))
            found.append(arena.graph_memory().nbytes)
        assert found[2] == found[0], found
        for plan, expected in plans * 2:
            again = plan().gather()
            if ctx.rank == 0:
                np.testing.assert_array_equal(again, expected)
    assert arena.graph_memory().nbytes == 0


def test_scales_that_are_numbers_of_numpy(ctx):
    import cupy

    x, w = (cupy.asarray(np.full((64, 64), 0x38, np.uint8)) for _ in range(2))  # ones
    expected = pb.matmul_allreduce(x, w, ctx, algo="nccl", scales=pb.Scales(a=2.0, b=0.5))
    for kind in (np.float64, np.float32, np.float16):
        found = pb.matmul_allreduce(x, w, ctx, algo="nccl", scales=pb.Scales(a=kind(2), b=kind(0.5)))
        assert bool((found == expected).all())


def test_all_ranks_count_the_same_multiprocessors(ctx):
    session = ctx.engine.session
    counts = ctx.comm.allgather((session.runtime.multiprocessors, session.gpu.multiprocessors))
    assert len(set(counts)) == 1
    assert counts[0][0] <= session.gpu.kernels.multiprocessors
