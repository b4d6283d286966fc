# SPDX-License-Identifier: Apache-2.0
"""The user has made another GPU the current one: calls use the context's GPU, and leave the other one current."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers.gpu.products import integers

N = 300


@pytest.fixture
def other(ctx: pb.Context) -> Iterator[int]:
    """Another GPU, current during the test."""
    cuda = ctx.engine.xp.cuda
    own, count = ctx.engine.device.index, cuda.runtime.getDeviceCount()
    if min(ctx.comm.allgather(count)) < 2:
        pytest.skip("each rank sees one GPU")
    found = (own + 1) % count
    cuda.Device(found).use()
    cuda.Stream(non_blocking=True).use()  # that of the other GPU
    try:
        yield found
    finally:
        cuda.Device(found).use()
        cuda.Stream.null.use()
        cuda.Device(own).use()


def check_same(ctx: pb.Context, found: Any, expected: np.ndarray, case: str = "") -> None:
    if isinstance(found, pb.DistributedMatrix):
        found = found.allgather()
    elif not isinstance(found, float):
        found = ctx.engine.to_host(found)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10, err_msg=case)


def products(ctx: pb.Context, w: np.ndarray) -> Iterator[tuple[str, Any, np.ndarray]]:
    """Products, moves, sums and factorizations of matrices that are made here, again and again; and NumPy's."""
    a, b = ctx.scatter(w, block=32), ctx.scatter(w, block=48, order="F")
    spd = w @ w.T + N * np.eye(N)
    for turn in range(4):  # direct calls, kept plans, replays
        yield f"matmul {turn}", a @ b, w @ w
        yield f"plan {turn}", pb.matmul(a, b, algo="gathered"), w @ w
        yield f"+ {turn}", a + b, 2 * w
    yield "zeros", ctx.zeros((N, N)), np.zeros((N, N))
    yield "norm", a.norm(), np.linalg.norm(w)
    yield "cholesky", pb.linalg.cholesky(ctx.scatter(spd)), np.linalg.cholesky(spd)
    yield "solve", pb.linalg.solve(ctx.scatter(spd), ctx.scatter(w)), np.linalg.solve(spd, w)
    with pb.plan(pb.matmul, a, b, out=ctx.zeros((N, N), block=32)) as plan:
        graph = plan.graph()
        yield "graph", graph.replay(), w @ w
        yield "run", plan(), w @ w


def test_matrices(ctx, other):
    for case, found, expected in products(ctx, integers((N, N), np.dtype("float64"), 1)):
        check_same(ctx, found, expected, case)
        assert ctx.engine.xp.cuda.runtime.getDevice() == other, case


def test_tensor_parallel(ctx, other):
    """Calls that are kept, recorded and replayed, of every algorithm that "auto" takes."""
    xp, values = ctx.engine.xp, integers((N, N), np.dtype("float64"), 2)
    with xp.cuda.Device(ctx.engine.device.index):
        x, w = xp.asarray(values), xp.asarray(values)
    for algo in ("auto", "nccl", "push"):
        for turn in range(5):
            found = pb.matmul_allreduce(x, w, ctx, algo=algo)
            check_same(ctx, found, ctx.size * values @ values.T, f"{algo} {turn}")
            assert xp.cuda.runtime.getDevice() == other, f"{algo} {turn}"


def test_a_thread_begins_with_the_first_gpu(ctx):
    """CUDA's current GPU is a thread's own."""

    def work() -> None:
        for case, found, expected in products(ctx, integers((N, N), np.dtype("float64"), 3)):
            check_same(ctx, found, expected, case)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result()


def test_operands_on_another_gpu_are_refused_by_all(ctx, other):
    """Only one rank has such an operand."""
    xp, own = ctx.engine.xp, ctx.engine.device.index
    with xp.cuda.Device(other if ctx.rank == ctx.size - 1 else own):
        x = xp.ones((64, 64))
    with xp.cuda.Device(own):
        w = xp.ones((64, 64))
    with pytest.raises(pb.ArgumentError, match=r"x: .*is on GPU \d+, this rank's is \d+"):
        pb.matmul_allreduce(x, w, ctx)
    with pytest.raises(pb.ArgumentError, match=r"is on GPU \d+, this rank's is \d+"):
        ctx.from_local(x, pb.MatrixDescriptor((64, 64 * ctx.size), (64, 64), pb.Grid(1, ctx.size)))
    assert xp.cuda.runtime.getDevice() == other


def test_closing(ctx, other):
    """A context that is made and closed meanwhile."""
    cuda = ctx.engine.xp.cuda
    cuda.Device(ctx.engine.device.index).use()  # each rank's own, which the new context takes
    with pb.Context(engine="cublasmp") as mine:
        cuda.Device(other).use()
        a = mine.full((64, 64), 1.0)
        check_same(mine, a @ a, np.full((64, 64), 64.0))
    assert cuda.runtime.getDevice() == other


def test_pytorch(ctx, other):
    torch = pytest.importorskip("torch")
    own = torch.device("cuda", ctx.engine.device.index)
    values = integers((N, N), np.dtype("float64"), 4)
    x, w = (torch.from_numpy(values).to(own) for _ in range(2))
    torch.cuda.set_device(other)
    with torch.cuda.stream(torch.cuda.Stream(own)):
        torch.cuda.set_device(other)
        for turn in range(5):
            found = pb.matmul_allreduce(x, w, ctx)
            np.testing.assert_array_equal(found.cpu().numpy(), ctx.size * values @ values.T, f"{turn}")
    torch.cuda.set_device(other)
