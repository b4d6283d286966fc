# SPDX-License-Identifier: Apache-2.0
"""Calls of the table (``tests/helpers/calls.py``) that GPUs make again and again, each time with other operands."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import pblasmp as pb
from pblasmp.layout.level3_problem import ROUTINES
from tests.helpers import inside
from tests.helpers.calls import DTYPES, Operand, Place, all_placed, legal_options, prepared, side_by_side
from tests.helpers.cases import extents, pick

from .jobs import TURNS, Job
from .moves import grids, say
from .products import part_of, turned

LARGEST = (8, 40, 120)
EXACT = {"float16": 2.0**-7, "bfloat16": 2.0**-7}
TOLERANCES = {"float64": 1e-12, "complex128": 1e-12, "float32": 1e-4, "complex64": 1e-4, **EXACT}


def algorithms(routine: str) -> tuple[str, ...]:
    """The algorithms of a routine that are not cuBLASMp's."""
    if routine == "matmul":
        return "gathered", "panels", "stationary"
    traits = ROUTINES[routine]
    if traits.shape == "added":
        return ("moved",)
    more: tuple[str, ...] = ("summed", "full")
    if traits.shape == "sided":
        more = ("stationary",) if traits.triangular else ("stationary", "full")
    return ("gathered", "panels", *more)


def _fitting(
    ctx: pb.Context, rng: Any, values: dict[str, np.ndarray], order: str, *, start: str, anywhere: bool
) -> dict[str, Operand]:
    """Put operands where nothing has to be moved for cuBLASMp: in square blocks of one grid, from a block's begin.

    What the result starts from is on the same processes as the result; others begin ``anywhere``, or on the first.
    """
    grid, largest = pick(rng, grids(ctx.size)), max(max(x.shape) for x in values.values())
    block, found = int(rng.integers(1, pick(rng, (3, 16, largest + 3)) + 1)), {}
    while (largest // block + 1) ** 2 > 400:
        block *= 2
    of_result = [int(rng.integers(p)) for p in grid.shape]
    for name, x in values.items():
        first = of_result if name in ("out", start) else [int(rng.integers(p)) for p in grid.shape]
        at = [int(i) * block for i in rng.integers(0, 3, 2) * (rng.integers(3, size=2) == 2)]
        source = [(anywhere * s - i // block) % p for s, i, p in zip(first, at, grid.shape, strict=True)]
        there = Place(grid, (block, block), (source[0], source[1]), (at[0], at[1]))
        (found[name],) = side_by_side(ctx, rng, [x], there, order, turns=False)
    return found


def call_job(
    ctx: pb.Context, rng: np.random.Generator, routine: str, algo: str = "auto", *, layouts: str = "any",
    planned: bool = True, order: str = "", **fixed: Any,
) -> Job:  # fmt: skip
    """Return a call, by a plan or the plain function. Collective over the context.

    Args:
        ctx: where.
        rng: draws what is not given.
        routine: its name.
        algo: the algorithm.
        layouts: "fits": nothing has to be moved for cuBLASMp, and all begins on the first process; "sources": on any;
            "any": layouts as they come.
        planned: by a plan.
        order: memory order of layouts that fit.
        fixed: ``dtype``, ``options``, ``sizes``.
    """
    dtype = fixed.get("dtype") or pick(rng, (*DTYPES, *EXACT) if routine == "matmul" else DTYPES)
    options = fixed.get("options") or pick(rng, legal_options(routine, dtype))
    sizes = fixed.get("sizes") or extents(rng, (int(rng.integers(12) > 0), pick(rng, LARGEST)))
    asks = pick(rng, ("out", "in place", "out", "new")[: 4 if planned else 3])
    placed: Any = all_placed
    if layouts != "any":
        how = {"start": "b" if routine == "trsm" else "c", "anywhere": layouts == "sources"}
        in_order = order or pick(rng, "CF")

        def placed(ctx: pb.Context, rng: Any, values: Any, _: Any) -> dict[str, Operand]:
            return _fitting(ctx, rng, values, in_order, **how)

    call = prepared(ctx, rng, routine, options, dtype, sizes, asks, turns=TURNS, placed=placed)
    if algo == "cublasmp":  # which reads what is taken to be 0
        for x in (x for turn in call.turns for x in turn.values() if x.dtype.kind == "c"):
            x.imag[np.isnan(x.imag) & ~np.isnan(x.real)] = 9
    what = f"{algo} {layouts} {dtype} {asks} {sizes} {call}"
    say(ctx, what)
    how = {**call.how, "algo": algo}
    plan = pb.plan(call.function, *call.operands, **how) if planned else None
    queue: Any = plan or functools.partial(call.function, *call.operands, **how)
    new = inside.new_layout(plan) if plan is not None and call.out is None else None
    layout = call.out.matrix.descriptor if call.out is not None else new
    tolerance = TOLERANCES[dtype] if routine != "matmul" else EXACT.get(layout.dtype.name, 0)
    return Job(
        what, queue,
        [turned(ctx, each.matrix, [x[name] for x in call.turns]) for name, each in call.given.items()],
        lambda turn: part_of(ctx, call.results[turn], layout),
        lambda found, part: differs(found, part, tolerance),
        lambda: next((wrong for x in call.given.values() if (wrong := x.around())), ""), plan,
    )  # fmt: skip


def differs(found: np.ndarray, part: np.ndarray, tolerance: float) -> str:
    """Return how an array differs from another, or an empty string; NaN is NaN."""
    local = found.astype(np.complex128)
    wrong = ~((local == part) | (np.isnan(local) & np.isnan(part)))
    scale = max(1.0, float(np.abs(part[~np.isnan(part)]).max(initial=0)))
    wrong &= ~(np.abs(local - part) <= tolerance * scale)
    if not wrong.any():
        return ""
    at = tuple(int(i[0]) for i in np.nonzero(wrong))
    return f"{int(wrong.sum())} of {wrong.size} wrong, first at local {at}: {local[at]}, expected {part[at]}"


def check_random_call(
    ctx: pb.Context, routine: str, algo: str, seed: int, *, layouts: str = "any", **fixed: Any
) -> None:
    """Make a random call, with each of its operands; fail, at the end, if this rank has anything wrong. Collective."""
    version = getattr(ctx.engine, "version", 0)
    try:
        rng = np.random.default_rng([seed, *f"{routine} {algo}".encode()])
        job = call_job(ctx, rng, routine, algo, layouts=layouts, **fixed)
    except pb.UnsupportedError as error:  # a known fault of older versions
        if routine == "syr2k" and version < 1000 and "wrong for a complex alpha" in str(error):
            return
        raise
    assert job.plan is not None
    with job.plan:
        results = [ctx.engine.to_host(job.run(turn)) for turn in range(TURNS)]
        report = job.plan.report()
    case = f"seed {seed}: {job.what}"
    for turn, found in enumerate(results):
        job.check(found, turn, f"seed {seed}")
    around = job.around()
    assert not around, f"{case}: {around}"
    older = routine in ("geadd", "tradd") and version < 1000  # whose sums are not to move data
    assert layouts == "any" or older or not report.moved, case
    if algo not in ("default", "cublasmp"):
        assert all(line.startswith("c is moved to") for line in report.moved), f"{case}: moved {report.moved}"
    assert algo in ("auto", report.algorithm), f"{case}: {report.algorithm} was taken"
