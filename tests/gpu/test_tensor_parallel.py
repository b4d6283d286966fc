# SPDX-License-Identifier: Apache-2.0
"""The four tensor-parallel products on GPUs: CuPy and PyTorch arrays, against NumPy and against NCCL + cuBLAS."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.dtypes import DTYPES
from tests.helpers import tensor_cases
from tests.helpers.cases import exact
from tests.helpers.gpu.products import check_part
from tests.helpers.tensor_cases import FORMS

# Tokens, outputs (of one rank for the all-gathers), inputs: those of PyTorch's published all-gather benchmarks.
SHAPES = (
    *((4096, 1792, 4096), (8192, 1792, 4096), (16384, 1792, 4096)),
    *((4096, 3584, 8192), (8192, 3584, 8192), (16384, 3584, 8192)),
    *((4096, 6656, 16384), (8192, 6656, 16384), (16384, 6656, 16384), (1024, 1024, 1024)),
)


class Case(tensor_cases.Case):
    """A product of whole numbers, this rank's parts of them on its GPU."""

    def __init__(self, ctx: pb.Context, form: str, dtype: str, t: int, n: int, k: int) -> None:
        super().__init__(np.random.default_rng(t + 10 * n + 100 * k), ctx, form, dtype, t, n, k)
        tensor_cases.on_gpu(self)
        self.ctx = ctx

    def check_result(self, got: Any, expected: np.ndarray) -> None:
        """Fail if this rank's array is not as expected."""
        limit = 2.0**-7 if self.dtype.itemsize == 2 else 0  # partial sums of 16-bit results travel in 16 bits
        assert got.shape == expected.shape
        check_part(self.ctx.engine.to_host(got), expected, self.dtype, tolerance=limit)


def test_gathered_input(ctx):
    for t in (8 * ctx.size, 8 * ctx.size + 3):
        case = Case(ctx, "allgather_matmul", "bfloat16", t, 16 * ctx.size, 64)
        y, gathered = case(ctx, return_gathered=True)
        case.check_result(y, case.expected())
        case.check_result(gathered, case.x)


def test_plans_read_symmetric_memory_in_place(ctx):
    case = Case(ctx, "allgather_matmul", "bfloat16", 64 * ctx.size, 64 * ctx.size, 256)
    with pb.plan(pb.allgather_matmul, case.local_x.shape, case.local_w, ctx, algo="default") as plan:
        buffer = plan.input_buffer()
        buffer[...] = case.local_x
        for _ in range(3):
            case.check_result(plan(), case.expected())
        assert "is in symmetric memory" in str(plan.report())
        assert plan.input_buffer() is buffer
        other = case.local_x + case.local_x
        case.check_result(plan(other), case.expected(2))


@pytest.mark.parametrize("form", FORMS)
def test_pytorch_tensors(ctx, form):
    torch = pytest.importorskip("torch")
    torch.cuda.set_device(ctx.engine.device.index)
    view = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    for dtype, side in itertools.product(view, (False, True)):
        case = Case(ctx, form, dtype, 32 * ctx.size, 64 * ctx.size, 16 * ctx.size)

        def tensor(array: Any, dtype: str = dtype) -> Any:
            return torch.from_dlpack(array.view(f"i{array.itemsize}")).view(view[dtype])

        x, w, bias = tensor(case.local_x), tensor(case.local_w), tensor(case.local_bias)
        ctx.engine.xp.cuda.Device().synchronize()
        stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            twice = x + x  # queued on the same stream just before
            y = getattr(pb, form)(
                twice.view(2, -1, x.shape[1]) if form == "matmul_allreduce" else twice, w, ctx, bias=bias
            )
            total = y.float()
        stream.synchronize()
        assert isinstance(y, torch.Tensor)
        assert (y.dtype, y.device.index) == (view[dtype], ctx.engine.device.index)
        expected = exact(case.expected(2, bias=True))
        found = total.cpu().numpy().reshape(expected.shape)
        limit = 2.0**-7 * np.abs(expected).max() if dtype == "bfloat16" else 0
        assert np.abs(found - expected).max() <= limit, f"{dtype} {side=}"


def test_bench(ctx):
    """What ``pblasmp bench`` does on each rank: pblasmp as NCCL + cuBLAS, and a time for each."""
    from pblasmp.cli.bench import BenchOptions, bench_on_ranks
    from pblasmp.cli.reports import Reporter
    from pblasmp.layout.schemes import FORMS

    shapes = ((256, 128, 512), (1024, 512, 1024))
    result = bench_on_ranks(BenchOptions(tuple(FORMS), shapes, None, 3, "cublasmp"), Reporter())
    assert (result["separate"], result["dtype"]) == ("NCCL + cuBLAS", "bfloat16")
    for name, rows in result["sections"].items():
        for row in rows:
            assert row["good"], f"{name} {row}"
            assert {"pblasmp", "NCCL + cuBLAS", "GEMM alone"} <= set(row["us"])
            assert min(row["us"].values()) > 0


@pytest.fixture(scope="module")
def nccl(ctx):
    """PyTorch's NCCL backend over the same ranks."""
    pytest.importorskip("torch")
    from mpi4py import MPI

    from reference.gpu import Torch

    torch = Torch(MPI.COMM_WORLD, ctx.engine.device.index, 0, lambda step: step())
    yield torch
    torch.close()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_nccl_and_cublas(ctx, nccl, shape):
    """At the shapes of the benchmarks, in bfloat16: the same as PyTorch computes with all-gather and reduce-scatter."""
    import cupy

    t, n, k = shape
    generator = cupy.random.default_rng(1000 + ctx.rank)

    def random(*size: int) -> Any:
        values = generator.standard_normal(size, dtype=cupy.float32)
        return values.astype(DTYPES["bfloat16"])

    x, w = random(t // ctx.size, k), random(n, k)
    y = pb.allgather_matmul(x, w, ctx)
    expected = nccl.ag(nccl.view(x), nccl.view(w), ctx.size)
    expected.run()
    assert nccl.error(nccl.view(y), expected.result()) < 1e-2, "all-gather"
    del y, expected
    x, w = random(t, k // ctx.size), random(n, k // ctx.size)
    y = pb.matmul_reduce_scatter(x, w, ctx)
    expected = nccl.rs(nccl.view(x), nccl.view(w), ctx.size)
    expected.run()
    assert nccl.error(nccl.view(y), expected.result()) < 2e-2, "reduce-scatter"
