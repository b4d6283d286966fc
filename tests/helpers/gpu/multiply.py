# SPDX-License-Identifier: Apache-2.0
"""A product on a simulated machine, which computes with the arguments that the library got."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

import pblasmp as pb
from pblasmp.engines.gpu.cublasmp import faults
from tests.helpers.gpu.products import OPS, check_whole, integers, part_of, poisoned
from tests.helpers.machine import Multiplying

Window = tuple[slice, slice]


def check_product(
    ctx: pb.Context,
    lib: Multiplying,
    p: pb.MatmulProblem,
    alpha: complex = 1,
    beta: complex = 0,
    within: Mapping[str, tuple[pb.MatrixDescriptor, Window]] = MappingProxyType({}),
    algo: str = "auto",
) -> None:
    """Multiply, and fail if the product is wrong or the library was not called as often as it is to be. Collective.

    The library is not called where "auto" knows of a fault of it. Operands are sub-matrices of those ``within`` names:
    the whole matrix, and their positions in it.
    """
    values = {x: integers(d.shape, d.dtype, seed, 1 if d.dtype.itemsize == 2 else 3)
              for seed, x in enumerate("abc") if (d := getattr(p, x)) is not None}  # fmt: skip
    wholes = {
        x: poisoned(ctx, within[x][0] if x in within else d)
        for x in "abcd"
        if (d := getattr(p, x)) is not None
    }
    matrices = {x: whole[within[x][1]] if x in within else whole for x, whole in wholes.items()}
    for x, of_x in values.items():
        if (part := part_of(ctx, of_x, matrices[x].descriptor)) is not None:
            ctx.engine.from_host(matrices[x].local, part.astype(p.a.dtype))
    out = matrices["d"]
    calls = len(lib.of("Matmul"))
    multiplies = ctx.rank < p.d.grid.size and alpha != 0 and 0 not in (p.m, p.n, p.k)
    if algo == "auto" and faults.avoided(p, ctx.engine.version)[1]:
        multiplies = False
    with pb.plan(
        pb.matmul,
        *(matrices.get(x) for x in "abc"),
        out=out,
        alpha=alpha,
        beta=beta,
        op_a=p.op_a,
        op_b=p.op_b,
        scheme=p.scheme,
        algo=algo,
    ) as plan:
        plan()
    assert len(lib.of("Matmul")) - calls == multiplies, f"{p}"
    expected = alpha * (OPS[p.op_a](values["a"]) @ OPS[p.op_b](values["b"]))
    if p.scheme == "matmul_allreduce":
        expected = np.tile(expected, (1, p.d.grid.size) if p.d.order == "F" else (p.d.grid.size, 1))
    if beta:
        expected = expected + beta * values["c"]
    check_whole(ctx, out, expected, p, 2.0**-6 if p.d.dtype.itemsize == 2 else 0)
    out.local[...] = np.nan
    assert np.isnan(wholes["d"].local).all(), f"{p}: written outside the sub-matrix"
