# SPDX-License-Identifier: Apache-2.0
"""Kernels that wait for other ranks on all multiprocessors, on real GPUs that are not empty; and users' graphs of them.

Where something never ends, a test fails after ``PATIENCE`` seconds instead of waiting.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

import pblasmp as pb
from tests.helpers import inside
from tests.helpers.gpu.one_kernel import FORMS, SLEEP, Product

PATIENCE = 10.0
SIZES = {
    "matmul_reduce_scatter": (2048, 3584, 128), "matmul_allreduce": (4096, 3584, 128),
    "matmul_allgather": (4096, 1792, 128),
}  # fmt: skip
"""More tiles than a GPU has multiprocessors."""
HOLD = r"""
extern "C" __global__ void hold(long long cycles) {
  extern __shared__ char held[];  // a block on each multiprocessor, and nothing else
  long long t = clock64();
  while (clock64() - t < cycles) {}
}
"""
HELD, HELD_BYTES = 16, 200 << 10
LEFT = HELD + 10
"""So many held leave room for 108 blocks in clusters of two on a GPU of 132 multiprocessors: half of a pair is lost."""


@pytest.fixture(scope="module")
def other(ctx: pb.Context) -> Iterator[pb.Context]:
    """A second context of the same ranks."""
    with pb.Context(engine="cublasmp") as context:
        yield context


@pytest.fixture(scope="module")
def streams() -> Any:
    import cupy

    return [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]


def assert_end(ctx: pb.Context, streams: Any) -> None:
    """Wait until all is done on streams of all ranks; fail on all if it is not."""
    deadline = time.monotonic() + PATIENCE
    while not all(stream.done for stream in streams) and time.monotonic() < deadline:
        time.sleep(0.001)
    done = [stream.done for stream in streams]
    assert ctx.comm.allgather(done) == [[True] * len(done)] * ctx.size


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "algos", [("one_kernel", "one_kernel"), ("one_kernel", "push"), ("nccl", "one_kernel")]
)
@pytest.mark.parametrize("runs", [1, 3])  # the first run, and a replay
def test_two_contexts_on_two_streams(ctx, other, streams, form, algos, runs):
    """Whichever stream a GPU begins with."""
    import cupy

    sleep = cupy.RawKernel(SLEEP, "sleep")
    plans, products = [], []
    for context, stream, algo in zip((ctx, other), streams, algos, strict=True):
        with stream:
            product = Product(context, form, SIZES[form])
            plan = pb.plan(form, product.x, product.w, context, algo=algo)
            sleep((1,), (1,), (1000,))  # loaded now: no module is loaded next to a kernel that waits
            for _ in range(runs):
                plan()
            stream.synchronize()
            plans.append(plan)
            products.append(product)
    for turn in range(4):
        ctx.comm.barrier()
        with streams[(ctx.rank + turn) % 2]:
            sleep((1,), (1,), (50_000_000,))
        found = []
        for plan, stream in zip(plans, streams, strict=True):
            with stream:
                found.append(plan())
        assert_end(ctx, streams)
        for product, y in zip(products, found, strict=True):
            product.check(y)
    for plan in plans:
        plan.close()


@pytest.mark.parametrize("form", FORMS)
def test_multiprocessors_that_are_left(ctx, form):
    """The kernel runs while another one holds some, on a stream of no other context, for whose turns it would wait."""
    import cupy

    hold = cupy.RawKernel(HOLD, "hold")
    hold.max_dynamic_shared_size_bytes = HELD_BYTES
    streams = stream, side = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    with stream:
        product = Product(ctx, form, SIZES[form])
        with pb.plan(form, product.x, product.w, ctx, algo="one_kernel", comm_sms=LEFT) as plan:
            assert f"{LEFT} multiprocessors are left" in plan.report().path
            for _ in range(3):
                plan()
            with side:
                hold((HELD,), (32,), (1000,), shared_mem=HELD_BYTES)
            assert_end(ctx, streams)
            with side:
                hold((HELD,), (32,), (2_000_000_000,), shared_mem=HELD_BYTES)
            y = plan()
            assert_end(ctx, [stream])
            assert ctx.comm.allgather(side.done) == [False] * ctx.size
            assert_end(ctx, [side])
            product.check(y)


def test_as_many_multiprocessors_as_there_are_cannot_be_left(ctx):
    with pytest.raises(pb.UnsupportedError, match="leaves none of"):
        Product(ctx, FORMS[0], (96, 80, 112))(comm_sms=10_000)


def test_boxes_of_gathered_outputs_hold_this_rank_s_tiles(other):
    tokens, outputs = 8192, 4096
    product = Product(other, "matmul_allgather", (tokens, outputs, 64))
    with pb.plan("matmul_allgather", product.x, product.w, other, algo="one_kernel") as plan:
        product.check(plan())
        assert plan.report().workspace.device_bytes < 1.2 * 2 * tokens * outputs * 2


@pytest.mark.parametrize(("form", "algo"), [
    ("matmul_reduce_scatter", "one_kernel"), ("matmul_allgather", "one_kernel"), ("matmul_allreduce", "push"),
])  # fmt: skip
def test_a_user_s_graph_lasts_when_buffers_grow(ctx, streams, form, algo):
    """What it was captured with is kept, and is not what later products use."""
    stream = streams[0]
    with pb.Context(engine="cublasmp") as context, stream:  # whose buffers are small
        small, large = (Product(context, form, sizes) for sizes in ((300, 520, 1000), SIZES[form]))
        with pb.plan(form, small.x, small.w, context, algo=algo) as plan:
            plan()
            stream.synchronize()
            context.comm.barrier()
            stream.begin_capture()
            y = plan()
            graph = stream.end_capture()
            for _ in range(2):
                graph.launch(stream)
            assert_end(context, [stream])
            small.check(y)
            with pb.plan(form, large.x, large.w, context, algo=algo) as larger:
                assert context.engine.session.gpu.windows is None or inside.windows_retired(context)
                for turn in itertools.islice(itertools.cycle((0, 1)), 6):
                    if turn:
                        y.fill(7)
                        graph.launch(stream)
                    else:
                        found = larger()
                    assert_end(context, [stream])
                    if turn:
                        small.check(y)
                    else:
                        large.check(found)
            del graph
