# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit floats on GPUs against float64 NumPy; PBLASMP_TRACE=1 says which one is under way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import pblasmp as pb
from tests.helpers import float8
from tests.helpers.epilogues import difference, part_of_d, placed

from .tables import Table

TOLERANCE = (
    2.0**-9
)  # of the largest value: tensor cores sum products of 8-bit floats in fewer bits than float32 has


def tolerance(ctx: pb.Context, scheme: str, out: str) -> float:
    """Return the tolerance for a D of this type: where parts of sums travel, each is rounded to what it travels in."""
    if scheme not in ("rs", "ar") or ctx.size == 1:
        return TOLERANCE
    return TOLERANCE + ctx.size * float8.ROUNDING["bfloat16" if out.startswith("float8") else out]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("scheme", ["ag", "rs", "ar", "gemm"])
def test_products_are_right(ctx, scheme, order):
    rng, table = np.random.default_rng(51), Table(ctx)
    for types in float8.TYPES:
        p = float8.problem(scheme, ctx.size, types, order, unit=64)
        names = " x ".join(types[:2]) + " to " + types[2]
        within = tolerance(ctx, scheme, types[2])
        table.add(f"{scheme} {order} {names}", lambda p=p, t=within: float8.scaled(ctx, rng, p, tolerance=t))
        if scheme == "ar":
            continue
        table.add(
            f"{scheme} {order} {names} with C",
            lambda p=p, t=within: float8.scaled(ctx, rng, p, beta=-2.0, tolerance=t),
        )
    assert not table.lines, str(table)


@pytest.mark.parametrize("scheme", ["ag", "rs"])
def test_epilogues_of_products_are_right(ctx, scheme):
    rng, table = np.random.default_rng(52), Table(ctx)
    for types in float8.TYPES:
        for activation in ("relu", "gelu"):
            p = float8.problem(scheme, ctx.size, types, "C", unit=64)
            table.add(
                f"{scheme} {types}: {activation} bias",
                lambda p=p, activation=activation: float8.scaled(
                    ctx, rng, p, activation=activation, tolerance=2 * tolerance(ctx, scheme, p.d.dtype.name)
                ),
            )
    assert not table.lines, str(table)


def test_what_is_too_large_is_stored_as_the_largest(ctx):
    rng, table = np.random.default_rng(53), Table(ctx)
    for types in float8.TYPES:
        if types[2].startswith("float8"):
            p = float8.problem("ag", ctx.size, types, "C", unit=64)
            table.add(f"{types}", lambda p=p: float8.scaled(ctx, rng, p, overflow=True, tolerance=TOLERANCE))
    assert not table.lines, str(table)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_tensors_of_pytorch_are_taken_without_a_copy(ctx, name):
    types = (name, float8.E4, "bfloat16")
    p = float8.problem("ag", ctx.size, types, "C", unit=64)
    device = f"cuda:{ctx.engine.device.index}"
    values = np.random.default_rng(54).integers(-2, 3, p.a.shape).astype(np.float64)
    tensor = torch.tensor(part_of_d(values, replace(p, d=p.a), ctx.rank), device=device).to(
        getattr(torch, name)
    )
    weights = torch.ones(p.b.local_shape(ctx.rank), device=device).to(torch.float8_e4m3fn)
    a, b = ctx.from_local(tensor, p.a), ctx.from_local(weights, p.b)
    assert a.local.data.ptr == tensor.data_ptr()
    d = pb.matmul(a, b, op_b="T", scheme="ag", scales=pb.Scales(a=0.5))
    expected = part_of_d(0.5 * values @ np.ones(p.b.shape).T, p, ctx.rank)
    assert difference("D", d.on_host(), expected, 2.0**-7) is None


def test_a_graph_reads_the_scales(ctx):
    p = float8.problem("ag", ctx.size, (float8.E4, float8.E4, "bfloat16"), "C", unit=64)
    a, b = (ctx.from_function(lambda i, j: np.ones((i.size, j.size)), x) for x in (p.a, p.b))
    unit = placed(ctx, np.ones(1, np.float32))
    with pb.plan_matmul(a, b, op_b="T", scheme="ag", scales=pb.Scales(a=unit[0], b=0.5)) as plan:
        graph = plan.graph()
        for value in (1.0, 0.25, 4.0):
            ctx.engine.from_host(unit, np.full((1, 1), value, np.float32))
            assert (graph.replay().on_host().astype(np.float64) == 0.5 * value * p.k).all()


def test_block_scales_need_blackwell(ctx):
    if ctx.engine.capability >= 100:
        pytest.fail("a Blackwell GPU: block scales can be tried at last")
    p = float8.problem("gemm", ctx.size, (float8.E4, float8.E4, "bfloat16"), "C", unit=128)
    sizes = [rows * (columns // 32) for rows, columns in (x.local_shape(ctx.rank) for x in (p.a, p.b))]
    bytes_ = [ctx.engine.empty((1, size), np.dtype(np.uint8), "C", size)[0] for size in sizes]
    scales = pb.Scales(*bytes_, mode="block")
    with pytest.raises(pb.UnsupportedError, match="needs a Blackwell GPU"):
        pb.matmul(ctx.empty(p.a), ctx.empty(p.b), op_b="T", scales=scales)
