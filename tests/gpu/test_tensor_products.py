# SPDX-License-Identifier: Apache-2.0
"""The overlapped tensor-parallel algorithms on GPUs: every algorithm, form and type, against NumPy in float64."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.dtypes import DTYPES, FLOAT8, is_float8
from pblasmp.engines.gpu.kernels.views import View
from pblasmp.engines.gpu.runtime.gpu import Gpu
from pblasmp.engines.gpu.types import carried
from pblasmp.engines.request import Options
from pblasmp.engines.tensor.tensor_product import offsets, shares
from pblasmp.layout import ParallelProblem
from tests.helpers.copy_products import PRODUCTS, SPLIT, problem, product, queue

NAMES = [(form, name) for form, algorithms in PRODUCTS.items() for name in algorithms]
E4M3 = FLOAT8["float8_e4m3fn"]
SMALL = {"tokens": 300, "outputs": 208, "inputs": 144}
EIGHT = {"tokens": 288, "outputs": 384, "inputs": 384}  # 8 bits need multiples of 16 on every rank
RUNS = 1000  # of a product whose bits are compared
REFUSED: dict[str, Callable[[ParallelProblem, Options], bool]] = {
    "ring": lambda p, options: (
        p.size != 2 or options.beta != 0 or carried(p.out_dtype, options.comm_dtype) != p.out_dtype
    ),
    "one_kernel": lambda p, options: (
        p.dtype.itemsize > 2
        or carried(p.out_dtype, options.comm_dtype) != (DTYPES["bfloat16"] if is_float8(p.dtype) else p.dtype)
        or p.out_dtype.itemsize > 2
        or options.beta != 0
        or not p.outputs_first
        or (p.form == "matmul_allgather" and any(n * p.out_dtype.itemsize % 16 for n in p.outputs[:-1]))
    ),
}
"""What an algorithm cannot compute, of the products below."""
LARGE = {"tokens": 8192, "outputs": 4096, "inputs": 512}  # several pieces


@pytest.fixture(scope="module")
def gpu(ctx: pb.Context) -> Iterator[Gpu]:
    import cupy

    session = ctx.engine.session
    with cupy.cuda.Stream(non_blocking=True):
        gpu = Gpu(session.runtime, session.nccl)
        assert os.environ.get("NCCL_HOSTID") or not gpu.why_no_windows, gpu.why_no_windows
        yield gpu
        gpu.close()


class Case:
    """A product of random numbers that every rank knows, and this rank's parts of it on its GPU."""

    def __init__(self, ctx: pb.Context, gpu: Gpu, form: str, extents: dict[str, int], **how: Any) -> None:
        import cupy

        self.cupy, self.ctx, self.gpu, self.form = cupy, ctx, gpu, form
        kind = how.pop("dtype", DTYPES["bfloat16"])
        out_dtype = how.pop("out_dtype", DTYPES["bfloat16"] if is_float8(kind) else kind)
        c_dtype = DTYPES["bfloat16"] if is_float8(out_dtype) else out_dtype
        uneven, with_bias, self.scales = (how.pop(name, None) for name in ("uneven", "bias", "scales"))
        self.activation, outputs_first = how.pop("activation", None), how.pop("transposed", True)
        self.options = Options(**how)
        rng = np.random.default_rng(7)
        t, n, k = (extents[name] for name in ("tokens", "outputs", "inputs"))
        self.x, self.w, self.c, self.bias = (
            self._numbers(rng, shape, kind) for shape in ((t, k), (n, k), (t, n), (n,))
        )
        parts = {}
        for name, total in extents.items():
            cut = shares(total, ctx.size)
            if uneven and name in SPLIT[form]:
                unit = 16 if name != "tokens" else 1
                cut = (*[unit * (rank + 1) for rank in range(ctx.size - 1)],)
                cut = (*cut, total - sum(cut))
            parts[name] = cut if name in SPLIT[form] else (total,)
        self.p = problem(
            form, ctx.size, parts, kind, out_dtype=out_dtype, c_dtype=c_dtype, outputs_first=outputs_first
        )

        def part(name: str) -> slice:
            cut = parts[name]
            return slice(None) if len(cut) == 1 else slice(*offsets(cut)[ctx.rank : ctx.rank + 2])

        tokens, outputs, inputs = (part(name) for name in ("tokens", "outputs", "inputs"))
        gathers = form == "allgather_matmul"
        all_ = slice(None)
        self.rows = tokens if form == "matmul_reduce_scatter" else all_
        self.cols = outputs if gathers else all_
        w = self.w[outputs, inputs]
        self.arrays = {
            "x": self._put(self.x[tokens if gathers else all_, inputs], kind),
            "w": self._put(w if outputs_first else w.T, kind),
            "c": self._put(self.c[self.rows, self.cols], c_dtype) if self.options.beta else None,
            "out": self._put(np.full((t, n), np.nan)[self.rows, self.cols], out_dtype),
            "bias": self._put(self.bias[None, outputs], c_dtype)[0] if with_bias else None,
            "scales": self.scales,
        }

    def run(self, name: str) -> None:
        """Run an algorithm."""
        self.queue(self.product(name))

    def product(self, name: str) -> Any:
        """Return this product by an algorithm; skip what it refuses and should."""
        if self.gpu.why_no_windows and PRODUCTS[self.form][name].needs_windows:
            pytest.skip(self.gpu.why_no_windows)
        why = PRODUCTS[self.form][name].why_not(self.gpu, self.p, self.options)
        refused = REFUSED[name](self.p, self.options) if name in REFUSED else False
        assert bool(why) == refused, why or "it refused nothing"
        if why:
            pytest.skip(why)
        return product(self.gpu, name, self.p, self.options)

    def queue(self, made: Any) -> None:
        """Queue a run of it."""
        queue(made, **self.arrays, activation=self.activation)

    @staticmethod
    def _numbers(rng: np.random.Generator, shape: tuple[int, ...], kind: np.dtype) -> np.ndarray:
        values = rng.standard_normal(shape)
        values = values + 1j * rng.standard_normal(shape) if kind.kind == "c" else values
        return values.astype(kind).astype(complex if kind.kind == "c" else float)

    def _put(self, values: np.ndarray, kind: np.dtype) -> Any:
        values = np.ascontiguousarray(values).astype(kind)
        return self.cupy.asarray(values.view(np.uint8) if is_float8(kind) else values)

    def expected(self) -> np.ndarray:
        options, scales = self.options, self.scales or SimpleNamespace(a=None, b=None, d=None)
        x = self.x * (scales.a or 1)
        y = options.alpha * (x @ (self.w * (scales.b or 1)).T) + options.beta * self.c
        y = y + self.bias if self.arrays["bias"] is not None else y
        if self.activation == "relu":
            y = np.maximum(y, 0)
        if self.activation == "gelu":
            y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        return (y * (scales.d or 1))[self.rows, self.cols]

    def got(self) -> np.ndarray:
        out = self.cupy.asnumpy(self.arrays["out"])
        return out.view(self.p.out_dtype) if is_float8(self.p.out_dtype) else out

    def check(self) -> None:
        """Every rank learns of a fault on any."""
        got, expected = self.got(), self.expected()
        summed = carried(self.p.out_dtype, self.options.comm_dtype)
        kinds = {self.p.dtype.itemsize, self.p.out_dtype.itemsize, summed.itemsize}
        worst = {1: 4e-2, 2: 6e-3}.get(
            min(kinds), 2e-6 if self.p.dtype.name in ("float32", "complex64") else 1e-13
        )
        error = 0.0
        if got.size:
            wide = got.astype(expected.dtype)
            error = float(np.linalg.norm(wide - expected) / np.linalg.norm(expected))
            error = error if np.isfinite(wide).all() else float("inf")
        errors = self.ctx.comm.allgather(error)
        assert max(errors) < worst, f"{self.form}: relative errors {errors}, expected less than {worst}"


@pytest.mark.parametrize(("form", "name"), NAMES)
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "complex64", "complex128"])
def test_types(ctx, gpu, form, name, dtype, uneven):
    case = Case(ctx, gpu, form, SMALL, dtype=DTYPES[dtype], uneven=uneven)
    algorithm = case.product(name)
    for _ in range(3):
        case.queue(algorithm)
    case.check()


@pytest.mark.parametrize(("form", "name"), NAMES)
@pytest.mark.parametrize("how", [
    {"transposed": False, "alpha": 2, "beta": -1},
    {"bias": True, "activation": "relu"},
    {"bias": True, "activation": "gelu", "beta": 0.5},
    {"dtype": DTYPES["float32"], "bias": True, "activation": "gelu", "uneven": True},
    {"dtype": DTYPES["float64"], "bias": True, "activation": "relu", "beta": 2},
    {"dtype": DTYPES["complex64"], "bias": True, "alpha": 1j, "beta": 1 - 1j},
    {"out_dtype": DTYPES["float32"]},
    {"comm_dtype": DTYPES["float32"], "beta": 1},
], ids=str)  # fmt: skip
def test_options(ctx, gpu, form, name, how):
    case = Case(ctx, gpu, form, SMALL, **how)
    case.run(name)
    case.check()


@pytest.mark.parametrize(("form", "name"), NAMES)
@pytest.mark.parametrize("how", [
    {},
    {"bias": True, "activation": "relu"},
    {"out_dtype": DTYPES["float32"]},
    {"out_dtype": E4M3, "scales": SimpleNamespace(a=0.5, b=2.0, d=0.125, amax=None)},
], ids=str)  # fmt: skip
def test_8_bits(ctx, gpu, form, name, how):
    case = Case(ctx, gpu, form, EIGHT, dtype=E4M3, **how)
    case.run(name)
    case.check()


@pytest.mark.parametrize(("form", "name"), NAMES)
def test_several_pieces_eagerly_and_from_a_graph(ctx, gpu, form, name):
    import cupy

    case = Case(ctx, gpu, form, LARGE, dtype=DTYPES["bfloat16"])
    algorithm = case.product(name)
    case.queue(algorithm)
    case.check()
    stream = cupy.cuda.get_current_stream()
    stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
    case.queue(algorithm)
    graph = stream.end_capture()
    case.arrays["out"].fill(float("nan"))
    for _ in range(5):
        graph.launch(stream)
    case.check()


@pytest.mark.parametrize("name", ["one_shot", "two_shot", "push", "ring"])
def test_allreduce_has_the_same_bits_everywhere_and_always(ctx, gpu, name):
    import cupy

    case = Case(ctx, gpu, "matmul_allreduce", LARGE)
    algorithm = case.product(name)
    out = case.arrays["out"].view(np.uint16)
    case.queue(algorithm)
    first = out.copy()
    differ = cupy.zeros((), np.int64)
    for _ in range(RUNS):  # compared on the GPU, so that the host never waits
        case.queue(algorithm)
        differ += (out != first).any()
    sums = int(first.astype(np.uint64).sum())
    assert set(ctx.comm.allgather((int(differ), sums))) == {(0, sums)}


def test_copies_of_blocks(gpu):
    """Rows of every other block, of uneven widths, packed; nothing is written beyond them."""
    import cupy

    rng = np.random.default_rng(3)
    stream = cupy.cuda.get_current_stream()
    for itemsize, nb, blocks, rows in (
        (1, 3, 5, 7),
        (2, 8, 4, 33),
        (4, 64, 3, 129),
        (8, 5, 2, 1),
        (2, 256, 9, 1000),
    ):
        whole = cupy.asarray(rng.integers(0, 256, (rows, 2 * blocks * nb * itemsize), dtype=np.uint8))
        packed = cupy.zeros((rows, blocks * nb * itemsize + 16), np.uint8)
        gpu.kernels.move(
            stream,
            [(packed.data.ptr, (packed.strides[0], 0, nb * itemsize),
              whole.data.ptr + nb * itemsize, (whole.strides[0], 0, 2 * nb * itemsize),
              (rows, 1, blocks, nb * itemsize))],
        )  # fmt: skip
        expected = cupy.asnumpy(whole).reshape(rows, blocks, 2, -1)[:, :, 1].reshape(rows, -1)
        np.testing.assert_array_equal(cupy.asnumpy(packed[:, :-16]), expected)
        assert not packed[:, -16:].any()


def test_sums_of_all_widths(gpu):
    """Vectors and single entries alike; nothing is written beyond the result."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    rng = np.random.default_rng(4)
    for cols, count in ((1, 2), (7, 3), (8, 2), (64, 5), (1000, 8)):
        parts = [cupy.asarray(rng.standard_normal((33, cols)).astype(np.float16)) for _ in range(count)]
        out = cupy.full((33, cols + 8), 9, np.float32)
        views = [View.of(part) for part in parts]
        gpu.kernels.add(stream, views, [View.of(out[:, :cols])])
        expected = sum(cupy.asnumpy(part).astype(np.float32) for part in parts)
        np.testing.assert_array_equal(cupy.asnumpy(out[:, :cols]), expected)
        assert (out[:, cols:] == 9).all()


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "complex64"])
def test_a_sum_of_nothing(gpu, kind):
    """C and a bias alone, and nothing at all."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    out = cupy.full((33, 72), 9, kind)
    c, bias = cupy.full((33, 64), 3, kind), cupy.arange(64).astype(kind).reshape(1, -1)
    gpu.kernels.add(stream, [], [View.of(out[:, :64])], beta=2, c=View.of(c), bias=View.of(bias))
    np.testing.assert_array_equal(cupy.asnumpy(out[:, :64]), np.tile(6 + np.arange(64), (33, 1)))
    gpu.kernels.add(stream, [], [View.of(out[:, :64])])
    assert not out[:, :64].any()
    assert (out[:, 64:] == 9).all()


@pytest.mark.parametrize("algo", ["ring", "push", "one_shot", "auto"])
def test_a_rank_without_inputs(ctx, algo):
    """The inputs may be split in any way."""
    import cupy

    if algo == "ring" and ctx.size != 2:
        pytest.skip("it is for two GPUs")
    rows, cols = 2048, 1024
    x, w = (cupy.ones((n, int(ctx.rank == 0)), np.float32) for n in (rows, cols))
    bias = cupy.arange(cols, dtype=np.float32)
    with pb.plan(pb.matmul_allreduce, x, w, ctx, algo=algo, bias=bias) as plan:
        for _ in range(3):  # the second run records a graph
            y = plan()
        wrong = int((y != 1 + bias).sum())
    assert ctx.comm.allgather(wrong) == [0] * ctx.size
