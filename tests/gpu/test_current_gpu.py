# SPDX-License-Identifier: Apache-2.0
"""The user has made another GPU the current one: calls use the context's GPU, and leave the other one current."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers.gpu.products import everywhere, integers

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


def same(ctx: pb.Context, found: Any, expected: np.ndarray) -> str:
    values = found.allgather() if isinstance(found, pb.DistributedMatrix) else ctx.engine.to_host(found)
    return "" if np.allclose(values, expected, rtol=1e-10, atol=1e-10) else "wrong numbers"


def products(ctx: pb.Context, w: np.ndarray) -> Iterator[tuple[str, str]]:
    """Products, moves, sums and factorizations of matrices that are made here, again and again."""
    a, b = ctx.scatter(w, block=32), ctx.scatter(w, block=48, order="F")
    spd = w @ w.T + N * np.eye(N)
    for turn in range(4):  # direct calls, kept plans, replays
        yield f"matmul {turn}", same(ctx, a @ b, w @ w)
        yield f"plan {turn}", same(ctx, pb.matmul(a, b, algo="gathered"), w @ w)
        yield f"+ {turn}", same(ctx, a + b, 2 * w)
    yield "zeros", same(ctx, ctx.zeros((N, N)), np.zeros((N, N)))
    yield "norm", "" if np.isclose(a.norm(), np.linalg.norm(w)) else "wrong"
    yield "cholesky", same(ctx, pb.linalg.cholesky(ctx.scatter(spd)), np.linalg.cholesky(spd))
    yield "solve", same(ctx, pb.linalg.solve(ctx.scatter(spd), ctx.scatter(w)), np.linalg.solve(spd, w))
    with pb.plan(pb.matmul, a, b, out=ctx.zeros((N, N), block=32)) as plan:
        graph = plan.graph()
        yield "graph", same(ctx, graph.replay(), w @ w)
        yield "run", same(ctx, plan(), w @ w)


def tensor_parallel(ctx: pb.Context, x: Any, w: Any, expected: np.ndarray) -> Iterator[tuple[str, str]]:
    """Calls that are kept, recorded and replayed, of every algorithm that "auto" takes."""
    for algo in ("auto", "nccl", "push"):
        for turn in range(5):
            found = pb.matmul_allreduce(x, w, ctx, algo=algo)
            yield f"{algo} {turn}", same(ctx, found, expected)


def check(ctx: pb.Context, results: Iterator[tuple[str, str]], other: int) -> None:
    get = ctx.engine.xp.cuda.runtime.getDevice
    faults = []
    for case, fault in results:
        current = get()
        if fault or current != other:
            faults.append(f"{case}: {fault}, GPU {current} is current")
    assert not everywhere(ctx, "; ".join(faults))


def test_matrices(ctx, other):
    check(ctx, products(ctx, integers((N, N), np.dtype("float64"), 1)), other)


def test_tensor_parallel(ctx, other):
    xp, values = ctx.engine.xp, integers((N, N), np.dtype("float64"), 2)
    with xp.cuda.Device(ctx.engine.device.index):
        x, w = xp.asarray(values), xp.asarray(values)
    check(ctx, tensor_parallel(ctx, x, w, ctx.size * values @ values.T), other)


def test_a_thread_begins_with_the_first_gpu(ctx):
    """CUDA's current GPU is a thread's own."""
    faults: list[str] = []

    def work(do: Callable[[], Any]) -> None:
        try:
            faults.extend(f"{case}: {fault}" for case, fault in do() if fault)
        except Exception as error:  # noqa: BLE001 - shown by the test
            faults.append(repr(error))

    values = integers((N, N), np.dtype("float64"), 3)
    thread = threading.Thread(target=work, args=[lambda: products(ctx, values)])
    thread.start()
    thread.join()
    assert not everywhere(ctx, "; ".join(faults))


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
        assert same(mine, a @ a, np.full((64, 64), 64.0)) == ""
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
            fault = (
                "" if np.array_equal(found.cpu().numpy(), ctx.size * values @ values.T) else f"wrong {turn}"
            )
            assert not everywhere(ctx, fault)
    torch.cuda.set_device(other)
