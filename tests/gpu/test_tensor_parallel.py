# SPDX-License-Identifier: Apache-2.0
"""The four tensor-parallel products on GPUs: CuPy and PyTorch arrays, against NumPy and against NCCL + cuBLAS."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.dtypes import DTYPES
from pblasmp.tensor_parallel import shard
from tests.helpers.gpu.products import everywhere
from tests.helpers.slow import in_turn

FORMS = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather")
TYPES = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")
SCALARS = ((1, 0, ""), (2, 0, ""), (1, 1, ""), (-1, 2, ""), (0, 1, ""), (1, 1, "in place"))
"""Alpha, beta, and whether C becomes the result."""
# Tokens, outputs (of one rank for the all-gathers), inputs: those of PyTorch's published all-gather benchmarks.
SHAPES = (
    *((4096, 1792, 4096), (8192, 1792, 4096), (16384, 1792, 4096)),
    *((4096, 3584, 8192), (8192, 3584, 8192), (16384, 3584, 8192)),
    *((4096, 6656, 16384), (8192, 6656, 16384), (16384, 6656, 16384), (1024, 1024, 1024)),
)


class Case:
    """A product of whole matrices that every rank has, and this rank's parts of them on its GPU."""

    def __init__(self, ctx: pb.Context, form: str, dtype: str, t: int, n: int, k: int, **how: Any) -> None:
        import cupy

        self.ctx, self.form, self.cupy = ctx, form, cupy
        self.kind = DTYPES[dtype]
        self.transposed = how.get("transposed", False)
        rng = np.random.default_rng(t + 10 * n + 100 * k)
        self.x, self.w, self.c, self.bias = (
            self._numbers(rng, shape) for shape in ((t, k), (n, k), (t, n), (n,))
        )
        rows = shard(t, ctx.size, ctx.rank)
        self.cols = shard(n, ctx.size, ctx.rank)
        inner = shard(k, ctx.size, ctx.rank)
        whole = slice(None)
        of_x, of_w, self.part = {
            "allgather_matmul": ((rows, whole), (self.cols, whole), (whole, self.cols)),
            "matmul_reduce_scatter": ((whole, inner), (whole, inner), (rows, whole)),
            "matmul_allreduce": ((whole, inner), (whole, inner), (whole, whole)),
            "matmul_allgather": ((whole, whole), (self.cols, whole), (whole, whole)),
        }[form]
        w = self.w[of_w]
        self.local_x = self.on_gpu(self.x[of_x])
        self.local_w = self.on_gpu(w.T if self.transposed else w)
        self.local_c = self.on_gpu(self.c[self.part])
        splits_outputs = form in ("allgather_matmul", "matmul_allgather")
        self.local_bias = self.on_gpu(self.bias[self.cols] if splits_outputs else self.bias)

    def _numbers(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        values = rng.integers(-2, 3, shape).astype(np.float64)
        return values + 1j * rng.integers(-2, 3, shape) if self.kind.kind == "c" else values

    def on_gpu(self, values: np.ndarray) -> Any:
        return self.cupy.asarray(np.ascontiguousarray(values).astype(self.kind))

    def expected(self, alpha: complex = 1, beta: complex = 0, *, bias: bool = False) -> np.ndarray:
        y = alpha * (self.x @ self.w.T)
        y = y + beta * self.c if beta else y
        return (y + self.bias if bias else y)[self.part]

    def call(self, **how: Any) -> Any:
        return getattr(pb, self.form)(self.local_x, self.local_w, self.ctx, transposed=self.transposed, **how)

    def wrong(self, got: Any, expected: np.ndarray) -> str:
        """Return what is wrong on the first rank where anything is."""
        fault = ""
        if got.shape != expected.shape or got.dtype != self.kind:
            fault = f"{got.dtype} {got.shape}, expected {self.kind} {expected.shape}"
        elif got.size:
            values = self.cupy.asnumpy(got).astype(expected.dtype)
            exact = expected.astype(self.kind).astype(expected.dtype)
            worst = np.abs(values - exact).max()
            # Partial sums of 16-bit results travel in 16 bits.
            limit = 2.0**-7 * max(1.0, np.abs(exact).max()) if self.kind.itemsize == 2 else 0
            fault = "" if worst <= limit else f"largest difference {worst}"
        return everywhere(self.ctx, fault)


def sizes(p: int) -> list[tuple[int, int, int]]:
    return [
        (8 * p, 16 * p, 32 * p),
        (64 * p, 512 * p, 64 * p),
        (7 * p + 1, 9 * p + 1, 5 * p + 1),
        (p + 1, p + 1, p + 1),
        (1, 1, 1),
        (0, 8, 8),
        (8 * p, 2048 * p + 8, 64),
    ]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("form", FORMS)
def test_products_are_right(ctx, form, dtype):
    faults = []
    for (t, n, k), transposed, (alpha, beta, place) in in_turn(
        sizes(ctx.size), (False, True), SCALARS, keep=len(SCALARS), first=TYPES.index(dtype)
    ):
        case = Case(ctx, form, dtype, t, n, k, transposed=transposed)
        how: dict[str, Any] = {"alpha": alpha, "beta": beta}
        if beta:
            how["c"] = case.local_c.copy()
        if place:
            how["out"] = how["c"]
        fault = case.wrong(case.call(**how), case.expected(alpha, beta))
        if fault:
            faults.append(f"{t}x{n}x{k} {transposed=} {alpha=} {beta=} {place}: {fault}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_what_follows(ctx, form, dtype):
    faults = []
    for (t, n, k), activation in in_turn(
        sizes(ctx.size), (None, "relu"), keep=2, first=FORMS.index(form) + (dtype == "float32")
    ):
        case = Case(ctx, form, dtype, t, n, k)
        for turn in range(2):  # a kept plan is given another bias
            case.bias = case.bias + turn
            case.local_bias = case.local_bias + case.kind.type(turn)
            y = case.expected(bias=True)
            expected = y if activation is None else np.maximum(y, 0)
            fault = case.wrong(case.call(bias=case.local_bias, activation=activation), expected)
            if fault:
                faults.append(f"{t}x{n}x{k} {activation} {turn=}: {fault}")
    assert not faults, "\n".join(faults)


def test_gathered_input(ctx):
    for t in (8 * ctx.size, 8 * ctx.size + 3):
        case = Case(ctx, "allgather_matmul", "bfloat16", t, 16 * ctx.size, 64)
        y, gathered = case.call(return_gathered=True)
        assert case.wrong(y, case.expected()) == ""
        assert case.wrong(gathered, case.x) == ""


def test_plans_read_symmetric_memory_in_place(ctx):
    case = Case(ctx, "allgather_matmul", "bfloat16", 64 * ctx.size, 64 * ctx.size, 256)
    with pb.plan(pb.allgather_matmul, case.local_x.shape, case.local_w, ctx, algo="default") as plan:
        buffer = plan.input_buffer()
        buffer[...] = case.local_x
        for _ in range(3):
            assert case.wrong(plan(), case.expected()) == ""
        assert "is in symmetric memory" in str(plan.report())
        assert plan.input_buffer() is buffer
        other = case.on_gpu(2 * case.cupy.asnumpy(case.local_x).astype(np.float64))
        assert case.wrong(plan(other), case.expected(2)) == ""


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
        case.cupy.cuda.Device().synchronize()
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
        expected = 2 * case.expected() + (case.bias[case.cols] if form == "allgather_matmul" else case.bias)
        found = total.cpu().numpy().reshape(expected.shape)
        limit = 2.0**-7 * np.abs(expected).max() if dtype == "bfloat16" else 0
        worst = np.abs(found - expected).max()
        assert everywhere(ctx, "" if worst <= limit else f"{dtype} {side=}: {worst}") == ""


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
    error = nccl.error(nccl.view(y), expected.result())
    assert everywhere(ctx, "" if error < 1e-2 else f"all-gather: relative error {error}") == ""
    del y, expected
    x, w = random(t, k // ctx.size), random(n, k // ctx.size)
    y = pb.matmul_reduce_scatter(x, w, ctx)
    expected = nccl.rs(nccl.view(x), nccl.view(w), ctx.size)
    expected.run()
    error = nccl.error(nccl.view(y), expected.result())
    assert everywhere(ctx, "" if error < 2e-2 else f"reduce-scatter: relative error {error}") == ""
