# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel products of 8-bit floats on the host engine, which emulates them; what is refused there."""

import itertools

import ml_dtypes
import numpy as np

import pblasmp as pb
from tests.helpers import inside
from tests.helpers.cases import check_array, only_last, refuses
from tests.helpers.float8 import E4, E5
from tests.helpers.mpi import needs_torch, on_ranks, run_on_one_node
from tests.helpers.pairs import pairs
from tests.helpers.slow import in_turn, only_long
from tests.helpers.tensor_cases import FORMS, other_split
from tests.helpers.tensor_float8 import OF_W, TYPES, Case

SIZES = (1, 2, 3, 4)


def sizes(p):
    return (16 * p, 32 * p, 48 * p), (7 * p + 1, 5 * p + 2, 3 * p + 1), (1, 1, 1), (0, 3, 2), (3, 2, 0)


@on_ranks(1, *only_long(2), 3, *only_long(4), timeout=120)
def test_every_form_and_type(comm, ctx):
    rng = np.random.default_rng(71)
    for form, types, (t, n, k) in pairs(FORMS, TYPES, sizes(comm.size)):
        case = Case(ctx, rng, form, types, t, n, k, arrays=bool(rng.integers(2)))
        case.check(case(), f"{form} {types} {t}x{n}x{k}")
    for form, types in in_turn(itertools.product(FORMS, TYPES), keep=3, first=comm.size):
        for t, n, k in sizes(comm.size)[:2]:
            case = Case(ctx, rng, form, types, t, n, k, beta=-2.0, activation="relu", arrays=True)
            case.check(case(), f"{form} {types} {t}x{n}x{k} with C, bias, relu")
        case = Case(ctx, rng, form, types, 20, 24, 28, activation="gelu", split=other_split)
        case.check(case(), f"{form} {types} another split, gelu")
        if types[2].startswith("float8"):
            case = Case(ctx, rng, form, types, 16, 32, 48, overflow=True)
            case.check(case(), f"{form} {types} overflow")
    for t in (16 * comm.size, 16 * comm.size + 1):
        case = Case(ctx, rng, "allgather_matmul", TYPES[2], t, 16, 32)
        y, gathered = case(return_gathered=True)
        case.check(y, f"gathered {t}")
        check_array(gathered, case.whole_x, f"gathered {t}")


@on_ranks(1, 3)
def test_in_place(comm, ctx):
    """C of the result's type may be the result; a call without scales has ones; out tells the type."""
    rng = np.random.default_rng(72)
    for form, t in itertools.product(FORMS, (16 * comm.size, 16 * comm.size + 1)):
        for types in TYPES[:3]:
            case = Case(ctx, rng, form, types, t, 24, 32, beta=0.5)
            y = case(out=case.arrays["c"])
            case.check(y, f"{form} {types} {t}")
            assert y is case.arrays["c"], f"{form} {types} {t}"
        ones = [np.ones((32, 16), as_type) for as_type in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)]
        y = getattr(pb, form)(*ones, ctx)
        total = 16 * comm.size if form in ("matmul_reduce_scatter", "matmul_allreduce") else 16
        check_array(y, np.full(y.shape, total, ml_dtypes.bfloat16), f"{form} {t} plain")
        out = np.zeros(y.shape, ml_dtypes.float8_e4m3fn)
        scales = pb.Scales(d=1 / 8)
        same = getattr(pb, form)(*ones, ctx, out=out, scales=scales) is out
        assert same, f"{form} {t} out"
        assert (out == out.dtype.type(total / 8)).all(), f"{form} {t} out"


@on_ranks(2, *only_long(3), runner=run_on_one_node)
def test_other_numbers_of_tokens(comm, ctx):
    """Another number of tokens takes a single vote; scales are read each time, and a wrong one is found in time."""
    rng, p = np.random.default_rng(74), comm.size
    for form, types in itertools.product(FORMS, (TYPES[0], TYPES[4])):
        for turn, t in enumerate((64, 32, 16, 48)):
            case = Case(ctx, rng, form, types, t * p, 32, 48, arrays=True)
            before = inside.votes(ctx)
            case.check(case())
            count = inside.votes(ctx) - before
            assert (count == 1) == (turn > 0), f"{form} {types} {t}: {count} votes"
        good, two = case.scales.a, np.ones(2, np.float32)
        case.scales = pb.Scales(two if ctx.rank == p - 1 else good, OF_W, d=case.unit, amax=case.amax[0])
        refuses(ctx, pb.ArgumentError, ["scales: a: expected 1 float32, got 2"], case)


@on_ranks(1, *only_long(2), 3)
def test_plans(comm, ctx):
    """Each run reads scales in arrays; others take their place; a buffer has the planned type; there are no graphs."""
    rng = np.random.default_rng(73)
    for form, t in itertools.product(FORMS, (16 * comm.size, 16 * comm.size + 1)):
        case = Case(ctx, rng, form, TYPES[2], t, 32, 48, arrays=True)
        with case.plan() as plan:
            for factor in (1.0, 4.0):
                case.scales.a[...] = 0.5 * factor
                case.check(plan(), factor=factor, case=f"{form} {t} {factor}")
            others = pb.Scales(a=case.scales.a, b=2.0, amax=case.amax[0])
            case.check(plan(scales=others), factor=4 * 8, case=f"{form} {t} other scales")
            case.check(plan(), factor=4 * 8, case=f"{form} {t} which stay")
            if ctx.size > 1:
                by_rank, words = (
                    pb.Scales(case.scales.a, 1.0 + ctx.rank, amax=case.amax[0]),
                    ["b: 1.0", "b: 2.0"],
                )
                refuses(ctx, pb.RankMismatchError, words, plan, scales=by_rank)
            buffer = plan.input_buffer()
            assert buffer.dtype == ml_dtypes.float8_e5m2, f"{form} {t} buffer"
            buffer[...] = case.x
            case.check(plan(), factor=4 * 8, case=f"{form} {t} buffer")
            words = ["scales is Scales(a, tensor), the plan is for Scales(a, b, amax, tensor)"]
            refuses(ctx, pb.ArgumentError, words, plan, scales=pb.Scales(a=case.scales.a))
            said = f"float8_e5m2 by float8_e4m3fn to float32 {form}"
            assert said in str(plan.report()), f"{form} {t} report"
            words = ["a CUDA graph: the host engine has none"]
            refuses(ctx, pb.UnsupportedError, words, plan.graph)
        refuses(ctx, pb.ClosedError, ["this plan is closed"], plan.graph)
    x, w = (np.ones((16, 32), dtype) for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
    with pb.plan(pb.matmul_allgather, (16, 32), w, ctx, x_dtype=E4) as plan:
        plan.input_buffer()[...] = x
        check_array(plan(), np.full((16, 16 * comm.size), 32, ml_dtypes.bfloat16), "from a shape")
    made, take_over = [], ctx.take_over
    ctx.take_over = lambda plan: made.append(type(plan)) or take_over(plan)
    case = Case(ctx, rng, "allgather_matmul", TYPES[0], 16, 32, 48)
    for value in (1.0, 2.0, 3.0):  # a new number each step
        case.scales = pb.Scales(0.5 * value, 0.25, amax=case.amax[0])
        case.check(case(), factor=value, case=f"number {value}")
    assert len(made) == 1, f"one plan: {len(made)} plans"


@on_ranks(1, 2)
def test_bytes(ctx):
    """Results without a type given for them."""
    for form in FORMS:
        x, w = (np.full((8, 4), 2, dtype) for dtype in (ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn))
        product = getattr(pb, form)
        expected = product(x, w, ctx)
        raw = product(x.view(np.uint8), w.view(np.uint8), ctx, x_dtype=E5, scales=pb.Scales())
        check_array(raw, expected, form)
        out = np.zeros(expected.shape, np.uint8)
        product(x, w, ctx, out=out, dtype=E5)
        check_array(out.view(ml_dtypes.float8_e5m2), expected.astype(ml_dtypes.float8_e5m2), f"{form} out")


@on_ranks(1, 3)
def test_what_is_refused(comm, ctx):
    p = comm.size
    e4, e5 = (np.zeros((16, 32), dtype) for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
    raw, wide = e4.view(np.uint8), e4.astype(np.float32)
    one, two = np.ones(1, np.float32), np.ones(2, np.float32)
    room = np.zeros((16 * p, 16), np.float32)

    wrong = only_last(comm)
    for words, args, how in (
        (["w: dtype is float8_e5m2 like x, expected float8_e4m3fn for one of them"], (e5, e5), {}),
        (["x: dtype is float32, expected an 8-bit float like the other operand"], (wide, e4), {}),
        (["result: dtype is float64, expected bfloat16, float16"], (e4, e4), {"dtype": "float64"}),
        (["result: dtype is float8_e5m2, expected"], (e4, e4), {"dtype": E5}),
        (["w: inputs are not contiguous", "as torch.nn has them"],
         (e4, np.ascontiguousarray(e4.T)), {"transposed": True}),
        (["w: dtype uint8 is not supported"], (raw, raw), {}),
        (["x: dtype is float8_e4m3fn, expected x_dtype, float8_e5m2"], (e4, e4), {"x_dtype": E5}),
        (["dtype", "is not supported"], (e4, raw), {"w_dtype": "float9"}),
        (["scales: expected Scales, got float"], (e4, e4), {"scales": wrong(2.0, pb.Scales())}),
        (["scales: only for 8-bit operands, A is float32"], (wide, wide),
         {"scales": pb.Scales(a=2.0)}),
        (["scales: d: only for an 8-bit D, D is bfloat16"], (e4, e4), {"scales": pb.Scales(d=2.0)}),
        (["scales: a: expected 1 float32, got 2"], (e4, e4), {"scales": pb.Scales(a=wrong(two, one))}),
        (["c: dtype is float32, expected bfloat16 or float16 for a D of 8 bits"], (e4, e4),
         {"dtype": E4, "beta": 1, "c": room}),
        (["bias: dtype is float32, expected bfloat16"], (e4, e4),
         {"dtype": "float32", "bias": np.zeros(16, np.float32)}),
        (["out: dtype is float32, expected bfloat16"], (e4, e4), {"out": room, "dtype": "bfloat16"}),
    ):  # fmt: skip
        refuses(ctx, pb.ArgumentError, words, pb.allgather_matmul, *args, ctx, **how)
    blocks = pb.Scales(a=np.zeros(512, np.uint8), b=np.zeros(512, np.uint8), mode="block")
    words = ["scales: mode is 'block', expected 'tensor': the tensor-parallel functions take one scale"]
    for form in FORMS:
        product = getattr(pb, form)
        refuses(ctx, pb.UnsupportedError, words, product, e4, e4, ctx, scales=blocks)
        if p > 1:
            unlike_ = pb.Scales(a=1.0 + comm.rank)
            words_ = ["a: 1.0", "a: 2.0"]
            refuses(ctx, pb.RankMismatchError, words_, product, e4, e4, ctx, scales=unlike_)
    y = pb.allgather_matmul(e4[:, :16], e4[:, :16], ctx)
    check_array(y, np.zeros((16 * p, 16), ml_dtypes.bfloat16), "and it still works")


@needs_torch
@on_ranks(1, 2)
def test_tensors_of_pytorch(comm, ctx):
    """PyTorch's 8-bit tensors in and out; scales in tensors."""
    import torch

    for form in FORMS:
        x, w = torch.ones(32, 16).to(torch.float8_e4m3fn), torch.ones(32, 16).to(torch.float8_e5m2)
        amax, half = torch.zeros(1), torch.full((1,), 0.5)
        total = 16 * comm.size if form in ("matmul_reduce_scatter", "matmul_allreduce") else 16
        scales = pb.Scales(a=half, amax=amax)
        for dtype in ("bfloat16", "float16", "float32", E4, E5):
            y = getattr(pb, form)(x, w, ctx, dtype=dtype, scales=scales)
            good = y.dtype == getattr(torch, dtype) and bool((y.float() == total / 2).all())
            assert good, f"{form} {dtype}: {y} {amax}"
            assert amax.item() == total / 2, f"{form} {dtype}: {y} {amax}"
            out = torch.zeros_like(y)
            same = getattr(pb, form)(x, w, ctx, out=out, scales=scales) is out
            assert same, f"{form} out {dtype}"
            assert torch.equal(out.float(), y.float()), f"{form} out {dtype}"
        with pb.plan(form, tuple(x.shape), w, ctx, x_dtype=E4, scales=scales) as plan:
            buffer = plan.input_buffer()
            buffer.copy_(x)
            good = buffer.dtype == torch.float8_e4m3fn and bool((plan().float() == total / 2).all())
            assert good, f"{form} plan: {buffer}"
