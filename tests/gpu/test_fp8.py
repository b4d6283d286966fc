# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit floats on GPUs against float64 NumPy; PBLASMP_TRACE=1 says which one runs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import pblasmp as pb
from tests.helpers import float8
from tests.helpers.copy_products import PRODUCTS
from tests.helpers.epilogues import check_within, part_of_d, placed
from tests.helpers.gpu.tables import check_each
from tests.helpers.schemes import AG, AR, RS
from tests.helpers.tensor_cases import FORMS
from tests.helpers.tensor_float8 import ALPHA, OF_W, OF_X, TYPES, Case, on_host

TOLERANCE = (
    2.0**-9
)  # of the largest value: tensor cores sum products of 8-bit floats in fewer bits than float32 has


def tolerance(ctx: pb.Context, scheme: str, out: str) -> float:
    """Return the tolerance for a D of this type: where parts of sums travel, or are added up in D, each is rounded."""
    if scheme == AG or ctx.size == 1:
        return TOLERANCE
    # Half a unit for each of the 4 size blocks of k; one for each rank.
    parts = 2 * ctx.size if scheme == "gemm" else ctx.size
    return TOLERANCE + parts * float8.ROUNDING["bfloat16" if out.startswith("float8") else out]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("scheme", [AG, RS, AR, "gemm"])
def test_products_are_right(ctx, scheme, order):
    rng, betas = np.random.default_rng(51), (0.0, -2.0) if scheme != AR else (0.0,)

    def cases():
        for types, beta in itertools.product(float8.TYPES, betas):
            p = float8.problem(scheme, ctx.size, types, order, unit=64)
            within = tolerance(ctx, scheme, types[2])
            yield partial(float8.check_scaled, ctx, rng, p, beta=beta, tolerance=within)

    check_each(ctx, cases())


@pytest.mark.parametrize("scheme", [AG, RS])
def test_epilogues_of_products_are_right(ctx, scheme):
    rng = np.random.default_rng(52)

    def cases():
        for types, activation in itertools.product(float8.TYPES, ("relu", "gelu")):
            p = float8.problem(scheme, ctx.size, types, "C", unit=64)
            within = 2 * tolerance(ctx, scheme, types[2])
            yield partial(float8.check_scaled, ctx, rng, p, activation=activation, tolerance=within)

    check_each(ctx, cases())


def test_what_is_too_large_is_stored_as_the_largest(ctx):
    rng = np.random.default_rng(53)
    for types in float8.TYPES:
        if types[2].startswith("float8"):
            p = float8.problem(AG, ctx.size, types, "C", unit=64)
            float8.check_scaled(ctx, rng, p, overflow=True, tolerance=TOLERANCE)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_tensors_of_pytorch_are_taken_without_a_copy(ctx, name):
    types = (name, float8.E4, "bfloat16")
    p = float8.problem(AG, ctx.size, types, "C", unit=64)
    device = f"cuda:{ctx.engine.device.index}"
    values = np.random.default_rng(54).integers(-2, 3, p.a.shape).astype(np.float64)
    tensor = torch.tensor(part_of_d(values, replace(p, d=p.a), ctx.rank), device=device).to(
        getattr(torch, name)
    )
    weights = torch.ones(p.b.local_shape(ctx.rank), device=device).to(torch.float8_e4m3fn)
    a, b = ctx.from_local(tensor, p.a), ctx.from_local(weights, p.b)
    assert a.local.data.ptr == tensor.data_ptr()
    d = pb.matmul(a, b, op_b="T", scheme=AG, scales=pb.Scales(a=0.5))
    expected = part_of_d(0.5 * values @ np.ones(p.b.shape).T, p, ctx.rank)
    check_within("D", d.on_host(), expected, 2.0**-7)


def test_a_graph_reads_the_scales(ctx):
    p = float8.problem(AG, ctx.size, (float8.E4, float8.E4, "bfloat16"), "C", unit=64)
    a, b = (ctx.from_function(lambda i, j: np.ones((i.size, j.size)), x) for x in (p.a, p.b))
    unit = placed(ctx, np.ones(1, np.float32))
    with pb.plan(pb.matmul, a, b, op_b="T", scheme=AG, scales=pb.Scales(a=unit[0], b=0.5)) as plan:
        graph = plan.graph()
        for value in (1.0, 0.25, 4.0):
            ctx.engine.from_host(unit, np.full((1, 1), value, np.float32))
            assert (graph.replay().on_host().astype(np.float64) == 0.5 * value * p.k).all()


def test_block_scales_need_blackwell(ctx):
    if ctx.engine.session.runtime.capability >= 100:
        pytest.fail("a Blackwell GPU: block scales can be tried at last")
    p = float8.problem("gemm", ctx.size, (float8.E4, float8.E4, "bfloat16"), "C", unit=128)
    sizes = [rows * (columns // 32) for rows, columns in (x.local_shape(ctx.rank) for x in (p.a, p.b))]
    bytes_ = [ctx.engine.empty((1, size), np.dtype(np.uint8), "C", size)[0] for size in sizes]
    scales = pb.Scales(*bytes_, mode="block")
    with pytest.raises(pb.UnsupportedError, match="needs Blackwell GPUs"):
        pb.matmul(ctx.empty(p.a), ctx.empty(p.b), op_b="T", scales=scales, algo="default")


# -- the functions of tensor parallelism


@pytest.mark.parametrize("form", FORMS)
def test_tensor_parallel_functions_are_right(ctx, form):
    """Even shares in one call, with arrays and numbers as scales; any others by messages."""
    rng, p = np.random.default_rng(55), ctx.size
    sums = form in (RS, AR)  # which travel in 16 bits
    tolerance = 2.0**-7 if sums else TOLERANCE
    even, others = (
        (64 * p, 128 * p, 256 * p),
        ((7 * p + 1, 5 * p + 2, 9 * p + 1), (16 * p + 8, 64, 32 * p), (1, 1, 1)),
    )

    def check(types, sizes, within, **how):
        case = Case(ctx, rng, form, types, *sizes, **how)
        case.check(case(), tolerance=within)

    def cases():
        for types, arrays in itertools.product(TYPES, (False, True)):
            eight = types[2].startswith("float8")
            if eight and form == "matmul_allgather":
                continue  # refused, as below
            for activation in (None, "relu", "gelu"):
                if not (eight and activation and form == AR):
                    yield partial(check, types, even, 2 * tolerance, arrays=arrays, activation=activation)
            for beta, sizes in ((-2.0, even), *itertools.product((0.0, 1.0), others)):
                if not (eight and (sizes != even or form == AR)):
                    yield partial(check, types, sizes, tolerance, arrays=arrays, beta=beta)

    check_each(ctx, cases())


def test_tensor_parallel_reports(ctx):
    rng, p = np.random.default_rng(56), ctx.size
    for form in FORMS:
        for t, even in ((64 * p, True), (64 * p + 8, False)):
            case = Case(ctx, rng, form, TYPES[0], t, 64 * p, 64 * p)
            case.scales = pb.Scales(0.5, 0.25)
            with case.plan() as plan:
                plan()
                report = plan.report()
            if form == "matmul_allgather" or not even:  # which cuBLASMp has not
                assert report.algorithm in PRODUCTS[form], report
    case = Case(ctx, rng, "matmul_allgather", TYPES[3], 64, 64 * p, 64)
    case.check(case(), tolerance=TOLERANCE)


def test_gathered_bytes(ctx):
    rng = np.random.default_rng(57)
    for t in (64 * ctx.size, 64 * ctx.size + 8):
        case = Case(ctx, rng, AG, TYPES[2], t, 64 * ctx.size, 64)
        y, gathered = case(return_gathered=True)
        case.check(y, tolerance=TOLERANCE)
        np.testing.assert_array_equal(ctx.engine.to_host(gathered), case.whole_x.view(np.uint8))


@pytest.mark.parametrize("form", FORMS)
def test_tensor_parallel_tensors_of_pytorch(ctx, form):
    """A layer's: 8-bit tensors, scales that are tensors on the GPU, on PyTorch's current stream."""
    device = torch.device("cuda", ctx.engine.device.index)
    torch.cuda.set_device(device)
    p = ctx.size
    total = 64 * p if form in (RS, AR) else 64
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.ones(64, 64, device=device).to(torch.float8_e4m3fn)
        w = torch.ones(64, 64, device=device).to(torch.float8_e5m2)
        half, amax = torch.full((1,), 0.5, device=device), torch.zeros(1, device=device)
        for dtype in ("bfloat16", "float32", "float8_e4m3fn"):
            eight = dtype.startswith("float8")
            if eight and form == "matmul_allgather":
                continue
            for scales, value in (
                (pb.Scales(a=half, amax=amax), total / 2),
                (pb.Scales(a=half, b=2.0, d=0.125 if eight else None), total / (8 if eight else 1)),
            ):
                y = getattr(pb, form)(x, w, ctx, scales=scales, dtype=dtype)
                assert y.dtype == getattr(torch, dtype)
                assert y.float().unique().tolist() == [value]
                assert scales.amax is None or amax.item() == total / 2


@pytest.mark.parametrize("algo", ["auto", "nccl", "push", "default"])
@pytest.mark.parametrize("form", FORMS)
def test_scales_may_be_parts_of_a_tensor(ctx, form, algo):
    """cuBLASLt takes scales at multiples of 16 bytes only."""
    if form == "matmul_allgather" and algo == "default":
        pytest.skip("cuBLASMp has no such product")
    device = torch.device("cuda", ctx.engine.device.index)
    x, w = (torch.ones(64, 64, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    units = torch.tensor([8.0, 0.5, 0.25], device=device)
    scales = pb.Scales(units[1:2], units[2:])
    y = getattr(pb, form)(x, w, ctx, scales=scales, dtype="bfloat16", algo=algo)
    value = 8.0 * (ctx.size if form in (RS, AR) else 1)
    assert y.float().unique().tolist() == [value]


@pytest.mark.parametrize("scheme", ["gemm", AG, RS, AR])
@pytest.mark.parametrize("algo", ["auto", "default"])
def test_scales_of_matrices_may_be_parts_of_an_array(ctx, scheme, algo):
    p = float8.problem(scheme, ctx.size, (float8.E4, float8.E4, "bfloat16"), "C", unit=64)
    a, b = (ctx.from_function(lambda i, j: np.ones((i.size, j.size)), x) for x in (p.a, p.b))
    units = placed(ctx, np.array([8.0, 0.5, 0.25], np.float32)).reshape(-1)
    d = pb.matmul(a, b, op_b="T", scheme=scheme, scales=pb.Scales(a=units[1:2], b=units[2:]), algo=algo)
    assert np.unique(d.on_host().astype(np.float64)).tolist() == [p.k / 8]


@pytest.mark.parametrize("form", FORMS[:3])
def test_tensor_parallel_graphs_read_scales_and_operands(ctx, form):
    p, one = ctx.size, 0x38  # 1 in e4m3
    value = ALPHA * OF_X * OF_W * 64 * (1 if form == AG else p)
    for result in ("bfloat16", float8.E4):
        types = (float8.E4, float8.E4, result)
        inputs = 64 if form == AG else 64 * p
        case = Case(ctx, np.random.default_rng(58), form, types, 64 * p, 64 * p, inputs, arrays=True)
        case.x[...] = case.w[...] = one
        # amax of a result of 16 bits is computed after the product, which a graph does not hold
        more = {"d": 1.0, "amax": case.amax[0]} if result == float8.E4 else {}
        case.scales = pb.Scales(case.scales.a, case.scales.b, **more)
        with case.plan() as plan:
            graph = plan.graph()
            for factor, byte in ((1, one), (-1, one | 0x80), (-4, one | 0x80)):
                case.x[...] = byte
                case.scales.a[...] = OF_X * abs(factor)
                found = on_host(ctx, graph.replay(), result)
                assert np.unique(found).tolist() == [factor * value]
                assert not more or float(case.amax[0, 0]) == abs(factor) * value


def test_tensor_parallel_graphs_on_a_stream_of_pytorch(ctx):
    device = torch.device("cuda", ctx.engine.device.index)
    torch.cuda.set_device(device)
    p = ctx.size
    x = torch.ones(8, 64, device=device)
    w = torch.ones(16, 64, device=device)
    for form in FORMS:
        total = 64 * p if form in (RS, AR) else 64
        tokens = x.repeat(p, 1) if form == RS else x
        with pb.plan(form, tokens, w, ctx) as plan:
            graph = plan.graph()
            with torch.cuda.stream(torch.cuda.Stream()):
                for value in (1.0, 3.0):
                    tokens.fill_(value)
                    y = graph.replay() + 0
                torch.cuda.current_stream().synchronize()
            assert y.unique().tolist() == [3 * total], form
