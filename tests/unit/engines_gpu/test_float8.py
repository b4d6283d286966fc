# SPDX-License-Identifier: Apache-2.0
"""8-bit floats on GPUs: the arguments of the library, what is refused where, arrays that CuPy has no type for."""

from __future__ import annotations

import ctypes
import itertools
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.bindings import MatmulAttribute, MatrixScale
from pblasmp.dtypes import DTYPES, FLOAT8, as_dtype
from pblasmp.engines.gpu.cublasmp.epilogues import check
from pblasmp.engines.gpu.kernels.views import convert, to_bits
from tests.helpers import float8
from tests.helpers.fused_machines import Scaling
from tests.helpers.machine import context
from tests.helpers.mpi import on_ranks
from tests.helpers.pairs import pairs
from tests.helpers.schemes import AG, AR
from tests.helpers.slow import only_long

A = MatmulAttribute
E4, E5 = float8.E4, float8.E5


@on_ranks(*only_long(1), 2)
def test_what_is_told_is_enough(comm: Any, path: str) -> None:
    rng = np.random.default_rng(95)
    with context(path, Scaling, comm=comm) as (ctx, _):
        for scheme, types, order in pairs(*float8.FACTORS):
            p = float8.problem(scheme, ctx.size, types, order)
            float8.check_scaled(ctx, rng, p, tolerance=2.0**-8)


def planned(
    ctx: pb.Context, p: pb.MatmulProblem, scales: pb.Scales | None, **how: Any
) -> pb.DistributedMatrix:
    out = ctx.empty(p.d)
    a, b = ctx.empty(p.a), ctx.empty(p.b)
    with pb.plan(
        pb.matmul, a, b, out=out, op_a=p.op_a, op_b=p.op_b, scheme=p.scheme, scales=scales, **how
    ) as plan:
        plan()
    return out


def number(ctx: pb.Context) -> Any:
    return ctx.engine.empty((1, 1), np.dtype(np.float32), "C", 1)[0]


def test_scales_at_addresses_that_the_library_refuses_are_copied_before_each_run(ctx, lib):
    p = float8.problem("gemm", 1, (E4, E4, E4), "F")
    parts = ctx.engine.empty((1, 8), np.dtype(np.float32), "C", 8)[0].reshape(-1)
    scales = pb.Scales(a=parts[1:2], b=parts[4:5], amax=parts[2:3])
    a, b, out = ctx.empty(p.a), ctx.empty(p.b), ctx.empty(p.d)
    with pb.plan(pb.matmul, a, b, out=out, op_a=p.op_a, op_b=p.op_b, scales=scales) as plan:
        for value in (2.0, 3.0):
            scales.a.fill(value)
            plan()
            stored = lib.attributes(lib.of("Matmul")[-1]["matmulDesc"])
            at = stored[A.A_SCALE_POINTER]
            assert (at % 16, ctypes.c_float.from_address(at).value) == (0, value)
            assert stored[A.B_SCALE_POINTER] == scales.b.ctypes.data
            assert stored[A.AMAX_D_POINTER] == scales.amax.ctypes.data, "it is written"


def blocks(p: pb.MatmulProblem, ctx: pb.Context) -> pb.Scales:
    sizes = [-(-rows // 128) * 128 * (-(-columns // 128) * 4) for rows, columns in (p.a.shape, p.b.shape)]
    return pb.Scales(*(ctx.engine.empty((1, n), np.dtype(np.uint8), "C", n)[0] for n in sizes), mode="block")


@pytest.mark.parametrize(
    ("version", "capability", "types", "words"),
    [
        (
            1000,
            "80",
            (E4, E4, "bfloat16"),
            "8-bit floats need GPUs of compute capability 8.9 or above, found 8.0",
        ),
        (700, "90", (E4, E4, E4), "an 8-bit D needs cuBLASMp 0.8.0, found 0.7.0"),
        (1000, "90", (E4, E4, "float32"), "mode 'block' needs Blackwell GPUs .*, found 9.0: use 'tensor'"),
        (500, "100", (E4, E4, "float32"), "mode 'block' needs cuBLASMp 0.6.0, found 0.5.0"),
    ],
)
def test_what_is_refused(alone, stand_in, version, capability, types, words):
    with context(stand_in(version), capability=capability) as (ctx, lib):
        p = float8.problem("gemm", 1, types, "C")
        scales = blocks(p, ctx) if "block" in words else None
        with pytest.raises(pb.UnsupportedError, match=words):
            planned(ctx, p, scales, algo="default")
        if scales is not None:  # which no other algorithm has
            with pytest.raises(pb.UnsupportedError, match=words):
                planned(ctx, p, scales)
        else:
            planned(ctx, p, None)
            assert not lib.of("Matmul")


@pytest.mark.parametrize(
    ("scheme", "ranks", "types", "refused"),
    [
        ("gemm", 2, (E4, E4, E4), True),
        ("gemm", 2, (E4, E4, "bfloat16"), False),
        ("gemm", 1, (E4, E4, E4), False),
        (AG, 2, (E4, E4, E4), False),
    ],
)
def test_what_is_refused_too_late(scheme, ranks, types, refused):
    """Pure: cuBLASMp has no 8-bit D in general layouts, and says so when some GPUs wait already."""
    p = float8.problem(scheme, ranks, types, "C")
    with pytest.raises(pb.UnsupportedError, match="an 8-bit D only on one GPU") if refused else nullcontext():
        check(p, None, 1000, 90)


def test_block_scales_on_blackwell(alone, stand_in):
    with context(stand_in(1000), capability="100") as (ctx, lib):
        p = float8.problem("gemm", 1, (E4, E4, "float32"), "C")
        scales = blocks(p, ctx)
        planned(ctx, p, scales)
        stored = lib.attributes(lib.of("Matmul")[-1]["matmulDesc"])
        assert stored[A.A_SCALE_MODE] == stored[A.B_SCALE_MODE] == MatrixScale.VEC32_UE8M0
        assert stored[A.A_SCALE_POINTER] == scales.b.ctypes.data


@pytest.mark.parametrize("algo", ["gathered", "panels"])
def test_what_reads_scales_on_the_host_is_no_graph(ctx, lib, gpu, algo):
    """A graph would multiply by the value that an array had when it was recorded."""
    scale, p = number(ctx), float8.problem("gemm", 1, (E4, E4, "bfloat16"), "C")
    for scales, recorded in ((pb.Scales(a=scale), 0), (None, 1)):
        before = [event[0] for event in lib.gpu.events].count("capture begins")
        how: Any = {"op_a": p.op_a, "op_b": p.op_b, "scales": scales, "algo": algo}
        with pb.plan(pb.matmul, ctx.zeros(p.a), ctx.zeros(p.b), out=ctx.empty(p.d), **how) as plan:
            for _ in range(3):
                plan()
            assert [event[0] for event in lib.gpu.events].count("capture begins") - before == recorded
            if scales is not None:
                with pytest.raises(
                    pb.UnsupportedError, match="scales of A and B that are arrays are read by the host"
                ):
                    plan.graph()
    x = pb.MatrixDescriptor((4, 4), (2, 2), pb.Grid(1, 1))
    gradient = pb.Epilogue(bias_grad_a=ctx.engine.empty((4, 1), x.dtype, "C", 1)[:, 0])
    with pb.plan(pb.matmul, ctx.zeros(x), ctx.zeros(x), epilogue=gradient, algo=algo) as plan:
        plan()
        with pytest.raises(pb.UnsupportedError, match="gradients of a bias are summed with indices"):
            plan.graph()


def test_an_epilogue_cannot_follow_an_eight_bit_d(ctx, lib):
    p = float8.problem(AR, 1, (E4, E4, E4), "C")
    with pytest.raises(
        pb.UnsupportedError, match=r"relu cannot be fused: .*, and by then an 8-bit D has been rounded"
    ):
        planned(ctx, p, None, epilogue=pb.Epilogue("relu"), algo="default")
    a, b, c = (ctx.zeros(p.a), ctx.zeros(p.b), ctx.zeros(float8.problem(AR, 1, (E4, E4, "bfloat16"), "C").d))
    c.local[...] = -1.7
    how = {"out": ctx.empty(p.d), "op_b": "T", "scheme": AR, "alpha": 0, "beta": 1}
    with pytest.raises(pb.UnsupportedError, match="an 8-bit D = beta C"):
        pb.matmul(a, b, c, **how, algo="default")
    assert (pb.matmul(a, b, c, **how).gather() == as_dtype(E4).type(-1.7)).all()


@pytest.mark.parametrize("name", [E4, E5])
def test_rounding_to_eight_bits_is_that_of_ml_dtypes(name):
    dtype = as_dtype(name)
    every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    exact = np.sort(every[np.isfinite(every)])
    between = (exact[1:] + exact[:-1]) / 2
    rng = np.random.default_rng(84)
    chance = rng.standard_normal(50_000) * 10.0 ** rng.integers(-9, 6, 50_000)
    near = [np.nextafter(between, way) for way in (np.float32(-np.inf), np.float32(np.inf))]
    x = np.concatenate([exact, between, *near, chance, [0.0, -0.0]]).astype(np.float32)
    expected = np.clip(x, exact[0], exact[-1]).astype(dtype).view(np.uint8)
    assert np.array_equal(to_bits(np, x, dtype), expected)
    turned = np.asfortranarray(x[:1000].reshape(20, 50))[:, ::2]
    assert np.array_equal(to_bits(np, turned, dtype), to_bits(np, turned.copy(), dtype))
    odd = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)
    largest = np.array([exact[-1], exact[0]]).astype(dtype).view(np.uint8)
    assert np.isnan(to_bits(np, odd[:2], dtype).view(dtype).astype(np.float32)).all()
    assert np.array_equal(to_bits(np, odd[2:], dtype), largest)


def test_arrays_are_bytes(ctx, lib):
    d = pb.MatrixDescriptor((4, 6), (4, 6), pb.Grid(1, 1), dtype=E4)
    values = np.arange(24).reshape(4, 6).astype(as_dtype(E4))
    x = ctx.scatter(values, d)
    assert x.local.dtype == np.uint8
    assert (x.gather() == values).all()
    assert x.gather().dtype == as_dtype(E4)
    moved = x.redistribute(pb.MatrixDescriptor((4, 6), (2, 2), pb.Grid(1, 1), dtype=E4, order="F"))
    assert (moved.gather() == values).all()
    wide = x.redistribute(pb.MatrixDescriptor((4, 6), (4, 6), pb.Grid(1, 1), dtype="float32"))
    assert (wide.gather() == values.astype(np.float32)).all()
    assert ctx.from_local(x.local, d).local is x.local
    with pytest.raises(pb.ArgumentError, match="dtype is float32, expected float8_e4m3fn"):
        ctx.from_local(wide.local, d)


def test_tensors_of_pytorch_are_taken_as_bytes(ctx, lib, monkeypatch):
    """As PyTorch has them: DLPack's readers may refuse the type, a view as bytes is the same memory."""
    memory = ctx.engine.empty((4, 6), np.dtype(np.uint8), "C", 6)

    class Tensor:
        """One on a GPU."""

        dtype, device = "torch.float8_e4m3fn", SimpleNamespace(type="cuda")
        is_conj = is_neg = staticmethod(lambda: False)
        requires_grad = False

        def detach(self) -> Any:
            return self

        def view(self, dtype: str) -> Any:
            assert dtype == "torch.uint8"
            return memory

        def __dlpack__(self) -> None:
            raise BufferError("float8 types are not supported")

    Tensor.__module__ = "torch"
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(uint8="torch.uint8"))
    d = pb.MatrixDescriptor((4, 6), (4, 6), pb.Grid(1, 1), dtype=E4)
    assert ctx.from_local(Tensor(), d).local.data.ptr == memory.data.ptr
    other = pb.MatrixDescriptor((4, 6), (4, 6), pb.Grid(1, 1), dtype=E5)
    with pytest.raises(pb.ArgumentError, match="local array: dtype is float8_e4m3fn, expected float8_e5m2"):
        ctx.from_local(Tensor(), other)


@pytest.mark.parametrize(
    ("of", "to"),
    [*itertools.product(
        ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64", "complex64"), FLOAT8
     ), *((name, "float32") for name in FLOAT8)],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_types_are_converted_as_by_numpy(of, to):
    """Of every number of 8 or 16 bits; of random ones of all sizes, and of those between and beyond all 8-bit ones."""
    of, to = ((DTYPES | FLOAT8)[name] for name in (of, to))
    if of.itemsize <= 2:
        x = np.arange(256**of.itemsize, dtype=f"u{of.itemsize}").view(of)
    else:
        numbers = np.arange(128, dtype=np.uint8).view(to)
        numbers = np.sort(numbers.astype(np.float64)[np.isfinite(numbers.astype(np.float64))])
        between = (numbers[1:] + numbers[:-1]) / 2
        spread = np.random.default_rng(1).standard_normal(5000) * 10.0 ** np.arange(-9, 11).repeat(250)
        x = np.concatenate(
            [numbers, between, between * (1 + 1e-6), between * (1 - 1e-6), spread, [np.inf, 1e30]]
        )
        x = np.concatenate([x, -x, [np.nan]]).astype(of)
    expected = (x.real if of.kind == "c" else x).astype(to)
    stored = x.view(np.uint8) if of.itemsize == 1 else x
    found = convert(np, stored, of, to)
    found = found.view(to) if to.itemsize == 1 else found
    wide = [each.astype(np.float32) for each in (found, expected)]
    assert np.array_equal(*wide, equal_nan=True)
    assert np.array_equal(*(np.signbit(each[~np.isnan(each)]) for each in wide))
