# SPDX-License-Identifier: Apache-2.0
"""Random products against float64 NumPy: no wrong one among 2,000."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers.gpu.moves import say
from tests.helpers.gpu.products import (
    everywhere,
    integers,
    part_of,
    place,
    poisoned,
    product_part,
    wrong,
    wrong_part,
)

COUNT = int(os.environ.get("PBLASMP_RANDOM_PRODUCTS", "2000"))
BATCH = 50
TYPES = ("float64", "float32", "complex128", "complex64", "float16", "bfloat16")


def random_problem(rng: random.Random, ranks: int) -> pb.MatmulProblem:
    grids = [
        pb.Grid(p, q, o)
        for p in range(1, ranks + 1)
        for q in range(1, ranks // p + 1)
        for o in ("row", "col")
    ]
    grid = rng.choice(grids)
    largest = rng.choice([20, 60, 60, 200, 200, 200, 600, 600, 600, 2500])
    m, n, k = (rng.randint(0 if rng.random() < 0.05 else 1, largest) for _ in range(3))
    most = rng.choice([3, 16, 64, largest + 5])
    blocks = [rng.randint(1, most) for _ in range(3)]
    if rng.random() < 0.3:
        blocks = [blocks[0]] * 3
    while (m // blocks[0] + 1) * (n // blocks[1] + 1) * (k // blocks[2] + 1) > 1500:
        blocks = [b * 2 for b in blocks]
    dtype = rng.choice(TYPES)
    ops = rng.choice("NTC"), rng.choice("NTC")
    problem = pb.MatmulProblem.gemm(
        m, n, k, grid, blocks, op_a=ops[0], op_b=ops[1], dtype=dtype,
        out_dtype="float32" if dtype in ("float16", "bfloat16") and rng.random() < 0.3 else None,
        order="".join(rng.choice("CF") for _ in range(3)), with_c=rng.random() < 0.4,
    )  # fmt: skip
    moved = {name: replace(getattr(problem, name), source=(rng.randrange(grid.nprow), rng.randrange(grid.npcol)))
             for name in "abd"}  # fmt: skip
    return replace(problem, **moved, c=moved["d"] if problem.c is not None else None)


def embedded(rng: random.Random, x: pb.MatrixDescriptor) -> tuple[pb.MatrixDescriptor, tuple[slice, slice]]:
    """Return a larger matrix, and where in it a sub-matrix that lies as ``x`` begins and ends."""
    before = [rng.randint(0, 2) * b for b in x.block]
    after = [rng.randint(0, 9) for _ in x.block]
    source = tuple(
        (s - off // b) % p for s, off, b, p in zip(x.source, before, x.block, x.grid.shape, strict=True)
    )
    shape = tuple(o + e + a for o, e, a in zip(before, x.shape, after, strict=True))
    window = tuple(slice(o, o + e) for o, e in zip(before, x.shape, strict=True))
    return replace(x, shape=shape, source=source), window


def one_product(ctx: pb.Context, seed: int) -> str:
    """Multiply random matrices; return what is wrong with the result, the same on every rank."""
    rng = random.Random(seed)
    p = random_problem(rng, ctx.size)
    say(ctx, f"{seed} {p}")
    assert p.faults() == []
    alpha, beta = rng.choice([1, 1, 2, -1]), rng.choice([1, -2]) if p.c is not None else 0
    limit = 1 if p.a.dtype.itemsize == 2 else 3
    values = {
        name: integers(getattr(p, name).shape, p.a.dtype, seed + i, limit)
        for i, name in enumerate("abc")
        if getattr(p, name) is not None
    }
    matrices: dict[str, pb.DistributedMatrix | None] = {"c": None}
    for name in values:
        x = getattr(p, name)
        if rng.random() < 0.25:
            parent, window = embedded(rng, x)
            whole = np.full(parent.shape, np.nan, dtype=values[name].dtype)
            whole[window] = values[name]
            matrices[name] = place(ctx, whole, parent)[window]
        else:
            matrices[name] = place(ctx, values[name], x)
    out, parent_out = poisoned(ctx, p.d), None
    if rng.random() < 0.25:
        parent, window = embedded(rng, p.d)
        parent_out = place(ctx, np.full(parent.shape, 7.0), parent)
        out = parent_out[window]
    named = {"out": out, "alpha": alpha, "beta": beta, "op_a": p.op_a, "op_b": p.op_b}
    try:
        pb.matmul(matrices["a"], matrices["b"], matrices["c"], **named)
    except pb.PblasmpError as error:  # raised on every rank
        return f"seed {seed}: {type(error).__name__}: {error}: {p}"
    tolerance = 0 if p.d.dtype.itemsize > 2 else 2.0**-7
    fault = wrong_part(ctx, out, product_part(ctx, p, values, alpha, beta), tolerance)
    if not fault and parent_out is not None:
        around = np.ones(parent_out.shape)
        around[window] = 0
        untouched = part_of(ctx, around, parent_out.descriptor)
        host = ctx.engine.to_host(parent_out.local)
        if untouched is not None and not (host[untouched == 1].astype(np.complex128) == 7).all():
            fault = "wrote outside the sub-matrix"
    fault = everywhere(ctx, fault)
    return f"seed {seed}: {fault}: {p} alpha {alpha} beta {beta}" if fault else ""


@pytest.mark.parametrize("batch", range(max(1, COUNT // BATCH)))
def test_random_products_are_right(ctx, batch):
    first = 100_000 * ctx.size + batch * BATCH
    faults = [fault for seed in range(first, first + BATCH) if (fault := one_product(ctx, seed))]
    assert not faults, "\n".join(faults[:5])


def test_the_reference_can_fail(ctx):
    d = pb.MatrixDescriptor((8, 8), (2, 2), pb.Grid.squarest(ctx.size))
    a = integers((8, 8), d.dtype, 1)
    b = a.copy()
    b[0, 0] += 1
    assert everywhere(ctx, wrong(ctx, place(ctx, a, d), b)) != ""
    assert part_of(ctx, a, d) is not None
