# SPDX-License-Identifier: Apache-2.0
"""Plans of pushed products, on one rank with a GPU that computes at once (pushed_product.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.gpu.kernels.lt import WORKSPACE_BYTES
from pblasmp.engines.gpu.push import pushed_product as push
from tests.helpers import epilogues, float8, inside
from tests.helpers.gpu_memory import at

GRID = pb.Grid(1, 1)


def made(ctx: pb.Context, dtype: str, order: str) -> tuple[Any, ...]:
    p = pb.MatmulProblem.gemm(12, 10, 8, GRID, (4, 3, 2), dtype=dtype, order=order, with_c=True)
    matrices = [
        ctx.random(x, seed=i) if dtype != "bfloat16" else ctx.zeros(x) for i, x in enumerate((p.a, p.b, p.d))
    ]
    rng = np.random.default_rng(1)
    for x in matrices:
        x.local[...] = rng.integers(-2, 3, x.local.shape)
    return p, *matrices


def wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(complex if x.dtype.kind == "c" else float)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_bias_and_relu_are_one_kernel_that_a_graph_records(ctx, lib, gpu, monkeypatch, dtype, order):
    p, a, b, c = made(ctx, dtype, order)
    (bias,) = epilogues.placed(ctx, np.arange(-4, p.d.local_shape(0)[order == "C"] - 4).astype(p.d.dtype))
    activation = None if p.d.dtype.kind == "c" else "relu"
    epilogue = pb.Epilogue(activation, bias=bias)
    out = ctx.empty(p.d)
    monkeypatch.setattr(push, "Finish", _NoSteps)
    with pb.plan(pb.matmul, a, b, c, out=out, alpha=2, beta=-1, epilogue=epilogue, algo="push") as plan:
        along = wide(bias)[None, :] if order == "C" else wide(bias)[:, None]
        for value in (1, 3):
            a.local[...] = value
            plan()
            expected = 2 * wide(a.gather()) @ wide(b.gather()) - wide(c.gather()) + along
            expected = expected if activation is None else np.maximum(expected, 0)
            np.testing.assert_array_equal(wide(out.gather()), expected)
            out.local[...] = np.nan
            if value == 1:
                assert len(lib.gpu.did("capture ends")) == 0
        assert len(lib.gpu.did("capture ends")) == len(lib.gpu.did("graph launched")) == 1
        if dtype == "bfloat16":
            assert plan.workspace.device_bytes >= 12 * 10 * 4  # the sum, until it is rounded
        plan.graph().replay()


class _NoSteps:
    """What follows is not computed in steps."""

    needed = staticmethod(push.Finish.needed)

    def __init__(self, *_: Any) -> None:
        raise AssertionError("steps of CuPy's")


def test_a_graph_of_a_sum_in_place_runs_once(ctx, lib, gpu):
    """Making a graph runs the plan once, and not twice: D = A B + D."""
    _, a, b, c = made(ctx, "float64", "C")
    before = c.gather()
    with pb.plan(pb.matmul, a, b, c, out=c, beta=1, algo="push") as plan:
        plan.graph()
    queued = 2  # the run, and what the graph records: the GPU played here computes it as well
    assert gpu.queued == queued
    np.testing.assert_array_equal(c.gather(), before + queued * (a.gather() @ b.gather()))


def test_what_is_in_no_graph_says_why(ctx, gpu):
    p, a, b, _ = made(ctx, "float32", "C")
    aux = ctx.empty_aux(p.d, "relu")
    with (
        pb.plan(pb.matmul, a, b, epilogue=pb.Epilogue("relu", aux=aux), algo="push") as plan,
        pytest.raises(
            pb.UnsupportedError, match=r"a CUDA graph: epilogue 'relu aux' is computed after the product in"
        ),
    ):
        plan.graph()


def test_copies_that_a_graph_holds_are_in_the_workspace(ctx, gpu):
    p = pb.MatmulProblem.gemm(12, 10, 8, GRID, 4, dtype="complex64", order="CFC", op_b="C")
    x = replace(p, op_b="T")
    sizes = []
    for each in (x, p):
        with pb.plan(pb.matmul, ctx.zeros(each.a), ctx.zeros(each.b), op_b=each.op_b, algo="push") as plan:
            plan()
            kept = sum(copy.base.nbytes for copy in inside.product(plan)._copies.values())
            sizes.append((plan.workspace.device_bytes, kept))
    (plain, none), (more, copies) = sizes
    assert none == 0 < copies == more - plain


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_what_is_not_aligned_is_copied_first_and_in_the_workspace(ctx, gpu, monkeypatch, order, offset):
    seen: list[int] = []
    multiply = ctx.engine.operations.multiply

    def noted(x: Any, w: Any, d: Any, c: Any, **how: Any) -> None:
        seen.extend(y.address | y.ld * y.dtype.itemsize for y in (x, w, d, *([c] if c else [])))
        multiply(x, w, d, c, **how)

    monkeypatch.setattr(ctx.engine.operations, "multiply", noted)
    whole = pb.MatrixDescriptor((24, 24), (8, 8), GRID, dtype="float32", order=order)
    a, b, c, d = (
        ctx.random(whole, seed=seed)[offset : offset + 13, offset : offset + 13] for seed in range(4)
    )
    before = d.gather()
    with pb.plan(pb.matmul, a, b, c, out=d, beta=2, algo="push") as plan:
        assert (d.gather() == before).all()
        plan()
        np.testing.assert_allclose(d.gather(), a.gather() @ b.gather() + 2 * c.gather(), rtol=1e-5)
        kept = sum(copy.base.nbytes for copy in inside.product(plan)._copies.values())
        assert plan.workspace.device_bytes >= kept
    aligned = [at % 16 == 0 for at in seen]
    assert aligned
    assert all(aligned)
    assert (kept > 0) == (offset == 1)


def test_what_takes_many_commands_is_copied_first_and_in_the_workspace(ctx, gpu, monkeypatch):
    monkeypatch.setattr(
        push.Pushed, "takes_many_commands", lambda _, which, ld: (which, ld) in ((0, 16), (1, 8))
    )
    for k, copied, nbytes in ((16, ["aligned 0"], 16 * 16 * 4), (8, [], 0)):
        a, b = (
            ctx.random(pb.MatrixDescriptor(shape, (4, 4), GRID, dtype="float32", order="C"))
            for shape in ((16, k), (k, 16))
        )
        with pb.plan(pb.matmul, a, b, algo="push") as plan:
            np.testing.assert_allclose(plan().gather(), a.gather() @ b.gather(), rtol=1e-5)
            assert sorted(inside.product(plan)._copies) == copied
            assert plan.workspace.device_bytes == nbytes + WORKSPACE_BYTES


@pytest.fixture
def eight(ctx, monkeypatch, request) -> None:
    """cuBLASLt of the GPU that is played."""

    def multiply(stream: int, x: Any, w: Any, d: Any, *, op_x: str, op_w: str, alpha: float, beta: float, c: Any,
                 compute: Any, batch: None, lane: str) -> None:  # fmt: skip
        left, right = at(x).astype(float), at(w).astype(float)
        y = alpha * ((left if op_x == "N" else left.T) @ (right if op_w == "N" else right.T))
        at(d)[...] = y + beta * at(c or d).astype(float) if beta else y

    monkeypatch.setattr(ctx.engine.session.gpu.products, "multiply", multiply)
    request.getfixturevalue("gpu")  # the products are those of the GPU before


def test_scales_that_are_numbers_are_in_a_graph_and_arrays_are_not(ctx, lib, eight):
    p = float8.problem("gemm", 1, (float8.E4, float8.E4, float8.E4), "C")
    a, b, out = ctx.zeros(p.a), ctx.zeros(p.b), ctx.empty(p.d)
    one, amax = (
        epilogues.placed(ctx, np.ones(1, np.float32))[0],
        epilogues.placed(ctx, np.ones(1, np.float32))[0],
    )
    with pb.plan(pb.matmul, a, b, out=out, op_b="T", algo="push", scales=pb.Scales(0.5, 2, 4, amax)) as plan:
        plan.graph().replay()
        assert amax[0] == 0
    with (
        pb.plan(pb.matmul, a, b, out=out, op_b="T", algo="push", scales=pb.Scales(one, 2, one)) as plan,
        pytest.raises(pb.UnsupportedError, match="scales of A and B that are arrays are read by the host"),
    ):
        plan.graph()
