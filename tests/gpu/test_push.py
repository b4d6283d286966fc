# SPDX-License-Identifier: Apache-2.0
"""Pushed products on real GPUs: any layout and type against NumPy, streams that take turns, graphs."""

from __future__ import annotations

import os

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.dtypes import DTYPES, FLOAT8
from pblasmp.engines.method import prepare
from pblasmp.engines.request import Operands, Options, Task
from tests.helpers.gpu.products import check_local, integers, place, poisoned, product_part
from tests.helpers.layouts import random_product

COUNT = int(os.environ.get("PBLASMP_RANDOM_PUSHES", "300"))
BATCH = 50
TYPES = ("float64", "float32", "complex128", "complex64", "float16", "bfloat16")


def one_product(ctx: pb.Context, seed: int, *, graph: bool = False) -> None:
    """Multiply sub-matrices of random layouts."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[str(rng.choice(TYPES))]
    p, wholes = random_product(rng, ctx.size, int(rng.choice([20, 200, 700])), dtype=dtype)
    limit = 1 if dtype.itemsize == 2 else 3
    values = {name: integers(getattr(p, "d" if name == "c" else name).shape, dtype, seed + i, limit)
              for i, name in enumerate("abc")}  # fmt: skip
    matrices = {}
    for name, (whole, window) in (wholes | {"c": wholes["d"], "d": wholes["d"]}).items():
        around = np.full(whole.shape, np.nan, values["a"].dtype)
        if name != "d":
            around[window] = values[name]
        matrices[name] = place(ctx, around, whole)[window]
    beta = int(rng.choice([0, 0, 1, -2]))
    local = {name: x.local for name, x in matrices.items()}
    operands = Operands(local["a"], local["b"], local["c"] if beta else None, local["d"])
    product, _ = prepare(ctx.engine, Task(p, Options(alpha=2, beta=beta, algo="push")), operands)
    if graph:
        replay = product.bind(operands).capture()
        for _ in range(3):
            local["d"][...] = np.nan
            replay()
    else:
        product.run(operands)
    product.close()
    tolerance = 0 if dtype.itemsize > 2 else 2.0**-7
    expected = product_part(ctx, p, values, 2, beta)
    check_local(ctx, matrices["d"], expected, f"seed {seed}: {p} beta {beta}", tolerance)


@pytest.mark.parametrize("batch", range(max(1, COUNT // BATCH)))
def test_any_layout(ctx, batch):
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        one_product(ctx, seed)


def test_graphs(ctx):
    for seed in range(5000, 5030):
        one_product(ctx, seed, graph=True)


@pytest.mark.parametrize("shape", ["rows", "columns"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_large_products_in_several_chunks(ctx, shape, order):
    grid = pb.Grid(ctx.size, 1) if shape == "rows" else pb.Grid(1, ctx.size)
    p = pb.MatmulProblem.gemm(3000, 5200, 700, grid, (96, 80, 24), dtype="float64", order=order)
    values = {name: integers(getattr(p, name).shape, p.a.dtype, i) for i, name in enumerate("ab")}
    a, b, d = place(ctx, values["a"], p.a), place(ctx, values["b"], p.b), poisoned(ctx, p.d)
    with pb.plan(pb.matmul, a, b, out=d, algo="push") as plan:
        for _ in range(3):
            plan()
    check_local(ctx, d, product_part(ctx, p, values, 1, 0))


@pytest.mark.parametrize("more", [0, 5], ids=["whole", "in a wider matrix"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("ops", ["NN", "TT", "NT"])
def test_many_equal_blocks_of_k(ctx, ops, order, more):
    k, grid = 64 * 18 * ctx.size, pb.Grid(1, ctx.size)
    p = pb.MatmulProblem.gemm(256, 320, k, grid, 64, op_a=ops[0], op_b=ops[1], dtype="bfloat16", order=order)
    values = {name: integers(getattr(p, name).shape, p.a.dtype, i, 1) for i, name in enumerate("ab")}
    matrices = []
    for name, x in (("a", p.a), ("b", p.b)):
        rows, cols = x.shape
        around = np.full((rows + more, cols + more), 7.0)
        around[:rows, :cols] = values[name]
        whole = pb.MatrixDescriptor(around.shape, (64, 64), grid, dtype="bfloat16", order=order)
        matrices.append(place(ctx, around, whole)[:rows, :cols])
    d = poisoned(ctx, p.d)
    pb.matmul(*matrices, out=d, op_a=ops[0], op_b=ops[1], algo="push")
    check_local(ctx, d, product_part(ctx, p, values, 1, 0), tolerance=2.0**-7)


def test_streams_take_turns(ctx):
    import cupy

    p = pb.MatmulProblem.gemm(900, 700, 500, pb.Grid(1, ctx.size), 32, dtype="float32", order="C")
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cases = []
    for seed in range(2):
        values = {
            name: integers(getattr(p, name).shape, p.a.dtype, seed * 2 + i) for i, name in enumerate("ab")
        }
        a, b, d = place(ctx, values["a"], p.a), place(ctx, values["b"], p.b), poisoned(ctx, p.d)
        cases.append((pb.plan(pb.matmul, a, b, out=d, algo="push"), d, values))
    cupy.cuda.runtime.deviceSynchronize()
    for _ in range(20):
        for stream, (plan, _, _) in zip(streams, cases, strict=True):
            with stream:
                plan()
    for stream in streams:
        stream.synchronize()
    for plan, _, _ in cases:
        plan.close()
    for _, d, values in cases:
        check_local(ctx, d, product_part(ctx, p, values, 1, 0))


def test_8_bit_floats_are_multiplied_as_such(ctx):
    e4m3 = FLOAT8["float8_e4m3fn"]
    p = pb.MatmulProblem.gemm(
        256, 384, 512, pb.Grid(1, ctx.size), 32, op_b="T", dtype=e4m3, out_dtype="bfloat16", order="C"
    )
    values = {name: integers(getattr(p, name).shape, p.a.dtype, i, 1) for i, name in enumerate("ab")}
    a, b, d = place(ctx, values["a"], p.a), place(ctx, values["b"], p.b), poisoned(ctx, p.d)
    pb.matmul(a, b, out=d, op_b="T", algo="push")
    check_local(ctx, d, product_part(ctx, p, values, 1, 0), tolerance=2.0**-7)


def test_auto_takes_it(ctx):
    p = pb.MatmulProblem.gemm(64, 64, 64, pb.Grid(1, ctx.size), 16, dtype="float64", order="C")
    a, b = (place(ctx, integers(x.shape, x.dtype, 1), x) for x in (p.a, p.b))
    pb.plan(pb.matmul, a, b, algo="push").close()  # unless it is refused here
    with pb.plan(pb.matmul, a, b) as plan:
        assert plan.report().path == "push"
