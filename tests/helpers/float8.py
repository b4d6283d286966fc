# SPDX-License-Identifier: Apache-2.0
"""Products of 8-bit floats with scales on any engine, compared with NumPy in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

import pblasmp as pb
from pblasmp.dtypes import is_float8
from tests.helpers import epilogues
from tests.helpers.schemes import MAKERS

E4, E5 = "float8_e4m3fn", "float8_e5m2"
LARGEST = {E4: 448.0, E5: 57344.0}
ROUNDING = {E4: 2.0**-4, E5: 2.0**-3, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
TYPES = tuple(
    (a, b, d)
    for a, b in ((E4, E4), (E4, E5), (E5, E4))
    for d in ("bfloat16", "float16", "float32", E4, *([E5] if E5 in (a, b) else []))
)
"""Every combination of the types of A, B and D."""


def problem(
    scheme: str, size: int, types: tuple[str, str, str], order: str, unit: int = 16
) -> pb.MatmulProblem:
    """x times torch.nn's weights in C order, or the like in F order; each rank's part is ``unit`` or more."""
    a, b, d = types
    ops = ("N", "T") if order == "C" else ("T", "N")
    m, n, k = 3 * unit * size, 2 * unit * size, 4 * unit * size
    if scheme == "gemm":
        grid = pb.Grid.squarest(size)
        p = pb.MatmulProblem.gemm(
            m, n, k, grid, unit, op_a=ops[0], op_b=ops[1], dtype=a, out_dtype=d, order=order
        )
    else:
        p = MAKERS[scheme](m, n, k, size, *ops, dtype=a, out_dtype=d, order=order)
    return replace(p, b=replace(p.b, dtype=b))


def check_scaled(
    ctx: pb.Context,
    rng: np.random.Generator,
    p: pb.MatmulProblem,
    *,
    beta: float = 0.0,
    activation: Any = None,
    tolerance: float = 2.0**-12,
    overflow: bool = False,
    reports: list[Any] | None = None,
    **how: Any,
) -> None:
    """Run a product with scales, numbers and arrays; fail, at the end, if this rank's part is wrong.

    Args:
        activation: of an epilogue with a bias, or None for none at all.
        tolerance: besides D's rounding, in units of its largest value.
        overflow: scale D so that its largest values cannot be stored.
    """
    a, left = epilogues.matrix(ctx, rng.standard_normal(p.a.shape), p.a)
    b, right = epilogues.matrix(ctx, rng.standard_normal(p.b.shape), p.b)
    left, right = epilogues.OPS[p.op_a](left), epilogues.OPS[p.op_b](right)
    whole, c = 1.5 * (0.5 * left) @ (0.25 * right), None
    if beta:
        kind = "bfloat16" if is_float8(p.d.dtype) else p.d.dtype
        c, added = epilogues.matrix(ctx, rng.standard_normal(p.d.shape), replace(p.d, dtype=kind))
        whole = whole + beta * added
        p = replace(p, c=c.descriptor)
    given: dict[str, Any] = {}
    if activation is not None:
        kind = "float16" if p.d.dtype == np.float16 else "bfloat16"
        bias = rng.standard_normal(p.n if p.d.order == "C" else p.m).astype(pb.dtypes.as_dtype(kind))
        whole = epilogues.follow(
            f"{activation} bias", whole, left, right, p.d.order, bias.astype(np.float64)
        ).d
        array = epilogues.placed(ctx, epilogues.part("bias", bias, p, ctx.rank))
        given["epilogue"] = pb.Epilogue(activation, bias=array[0])
    largest = np.abs(whole).max()
    limit = LARGEST.get(p.d.dtype.name)
    unit = (
        None if limit is None else float(2.0 ** np.floor(np.log2(limit / largest))) * (4 if overflow else 1)
    )
    amax = epilogues.placed(ctx, np.full(1, np.nan, np.float32))
    scales = pb.Scales(a=0.5, b=epilogues.placed(ctx, np.full(1, 0.25, np.float32))[0], d=unit, amax=amax[0])
    out = ctx.allocate(p.d)
    with pb.plan(
        pb.matmul,
        a,
        b,
        c,
        out=out,
        op_a=p.op_a,
        op_b=p.op_b,
        scheme=p.scheme,
        alpha=1.5,
        beta=beta,
        scales=scales,
        **given,
        **how,
    ) as plan:
        plan()
        if reports is not None:
            reports.append(plan.report())
    if ctx.rank >= p.d.grid.size:
        return
    case = f"{p}, {beta=}, {activation=}, {overflow=}, {how}"
    expected = epilogues.part_of_d(whole, p, ctx.rank)
    found = float(ctx.engine.to_host(amax)[0, 0])
    top = np.abs(expected).max(initial=0)
    near = max(tolerance, 2.0**-8 if limit is None else 0) * max(top, 1)
    assert abs(found - top) <= near, f"{case}: amax is {found}, expected {top}"
    stored = expected if limit is None else np.clip(expected * unit, -limit, limit)
    got = out.on_host().astype(np.float64)
    allowed = ROUNDING[p.d.dtype.name] * np.abs(stored) + tolerance * np.abs(stored).max(initial=0) + 2.0**-16
    worst = float((np.abs(got - stored) / allowed).max(initial=0))
    assert worst <= 1, f"{case}: D is off by {worst} times what rounding allows"


FACTORS = (("gemm", *MAKERS), TYPES, "CF")
"""Schemes, types and orders."""


def cases() -> Any:
    """Every combination of them."""
    return itertools.product(*FACTORS)
