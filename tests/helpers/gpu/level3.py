# SPDX-License-Identifier: Apache-2.0
"""Random level-3 routines: every option, layouts that fit and any others, NaN in what may not be read."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import pblasmp as pb
from pblasmp.layout.level3_problem import ROUTINES
from tests.helpers import level3 as reference
from tests.helpers.slow import in_turn

from .jobs import TURNS, Job
from .moves import AROUND, End, around, grids, random_end, say
from .products import integers, part_of, turned

TYPES = ("float64", "float32", "complex128", "complex64")
TOLERANCES = {
    "float64": 1e-12, "complex128": 1e-12, "float32": 1e-4, "complex64": 1e-4, "float16": 2e-2, "bfloat16": 6e-2,
}  # fmt: skip
WHOLE = (slice(None), slice(None))
BEFORE = 5  # the values where the result goes


@dataclass(frozen=True)
class Case:
    """A call: which routine, its options and scalars, the layouts of the matrices, where the result goes.

    Attributes:
        ends: the layouts of A, B, C and the result; none for a result that is ``begins``.
        begins: the operand that the result is written over, or "".
        fits: the layouts are such that nothing has to be moved.
    """

    routine: str
    flags: dict[str, str]
    dtype: str
    alpha: complex
    beta: complex
    ends: dict[str, End]
    begins: str
    new: bool
    fits: bool

    @property
    def in_place(self) -> str:
        """The operand that the result may be."""
        return "c" if "c" in ROUTINES[self.routine].operands else "b"


def random_case(rng: random.Random, ranks: int, routine: str, mode: str) -> Case:
    """Return a random call of a routine; for ``mode`` see ``cases``."""
    dtype = rng.choice(TYPES)
    flags = rng.choice(reference.legal_flags(routine, dtype))
    largest = rng.choice([7, 40, 120])
    m, n, k = (rng.randint(1, largest) for _ in range(3))
    shapes = reference.shapes(routine, flags, m, n, k)
    operands = ROUTINES[routine].operands
    hermitian = routine.startswith("he")
    turn = 1j if dtype.startswith("complex") else 0
    alpha = rng.choice([1, 2, -1]) + turn * rng.choice([0, 1])
    beta = rng.choice([0, 1, -2])
    if not hermitian:
        beta += turn * rng.choice([0, 1]) * (beta != 0)
    if routine == "herk":
        alpha = alpha.real
    with_c = "c" in operands and (beta != 0 or rng.random() < 0.5 or ROUTINES[routine].shape == "added")
    names = [name for name in operands if name != "c" or with_c] + ["d"]
    if mode != "any":
        grid, block, order = (
            rng.choice(grids(ranks)),
            rng.randint(1, rng.choice([3, 16, largest + 3])),
            rng.choice("CF"),
        )
        while (max(m, n, k) // block + 1) ** 2 > 400:
            block *= 2
        begin = {name: [rng.randrange(p) if mode == "sources" else 0 for p in grid.shape] for name in names}
        for name in ("c", "b") if routine == "trsm" else ("c",):  # which is copied to the result
            begin[name] = begin["d"]
        ends = {name: _fitting(rng, shapes[name], grid, block, dtype, order, begin[name]) for name in names}
    else:
        ends = {name: random_end(rng, ranks, shapes[name], dtype) for name in names}
    chance = rng.random()
    begins = ("c" if "c" in operands else "b") if chance < 0.3 else ""
    if begins not in ends:
        begins = ""
    return Case(routine, flags, dtype, alpha, beta, ends, begins, chance > 0.8 and not begins, mode != "any")


def every_case(routine: str, ranks: int, size: int, block: int) -> Iterator[Case]:
    """Yield a call for each choice of options, in layouts that fit, on all grids in turn.

    Every choice comes with a real or a complex type, and both memory orders come with every option; all types and
    orders come with each choice if all is tried.
    """
    lines = itertools.cycle([grid for grid in grids(ranks) if grid.size == ranks])
    starts = itertools.cycle(["", "", "c" if "c" in ROUTINES[routine].operands else "b"])
    flags_of = {dtype: reference.legal_flags(routine, dtype) for dtype in TYPES}
    for dtype, order, number in in_turn(TYPES, "CF", range(max(map(len, flags_of.values()))), keep=3):
        if number >= len(flags_of[dtype]):
            continue
        flags, grid = flags_of[dtype][number], next(lines)
        ends = {
            name: End(pb.MatrixDescriptor(shape, (block, block), grid, dtype=dtype, order=order), WHOLE)
            for name, shape in reference.shapes(routine, flags, size, size - 3, size + 5).items()
            if name in (*ROUTINES[routine].operands, "d")
        }
        yield Case(routine, flags, dtype, 2, -1, ends, next(starts), False, True)


def _fitting(
    rng: random.Random,
    shape: tuple[int, int],
    grid: pb.Grid,
    block: int,
    dtype: str,
    order: str,
    begin: list[int],
) -> End:
    """Return a layout in square blocks, maybe of a sub-matrix that begins with a block."""
    before = [rng.randint(0, 2) * block if rng.random() < 0.3 else 0 for _ in shape]
    after = [rng.randint(0, 5) if rng.random() < 0.3 else 0 for _ in shape]
    whole = tuple(o + e + a for o, e, a in zip(before, shape, after, strict=True))
    parent = pb.MatrixDescriptor(whole, (block, block), grid, dtype=dtype, order=order)
    source = tuple((s - o // block) % p for s, o, p in zip(begin, before, grid.shape, strict=True))
    window = tuple(slice(o, o + e) for o, e in zip(before, shape, strict=True))
    return End(replace(parent, source=source), window)


def values_of(case: Case, seed: int) -> dict[str, np.ndarray]:
    """Return the operands: small integers, for a solve a matrix that is easily inverted; NaN in what is not read."""
    values = {}
    for number, (name, end) in enumerate(case.ends.items()):
        if name == "d":
            continue
        d = end.parent[end.window]
        x = integers(d.shape, d.dtype, seed * 10 + number)
        if name == "a" and case.routine == "trsm":
            x = x / (4 * len(x)) + 2 * np.eye(len(x))
        if name == "a" or (name == "c" and case.in_place == "c"):
            may = reference.touched(case.routine, name, case.flags, x.shape)
            hermitian = case.routine.startswith("he") and d.dtype.kind == "c"
            if hermitian and (name == "c" or ROUTINES[case.routine].triangle == "a"):
                x = x + 9j * np.eye(*x.shape)  # which are taken to be 0
            x = np.where(may, x, np.nan)
        values[name] = x
    return values


def expected_of(case: Case, values: dict[str, np.ndarray]) -> np.ndarray:
    """Return the whole result, where it is not written what was there before."""
    clean = {name: x for name, x in values.items() if name != "c" or case.beta != 0}
    computed = reference.dense(case.routine, clean, case.flags, case.alpha, case.beta)
    written = reference.touched(case.routine, "d", case.flags, computed.shape)
    if case.begins:
        before: Any = values[case.begins]
    elif case.new:
        before = values.get("c", 0)
    else:
        before = BEFORE
    return np.where(written, computed, before)


def routine_job(ctx: pb.Context, case: Case, seed: int, algo: str = "auto", *, planned: bool = True) -> Job:
    """Return a call of a routine, by a plan or the plain function. Collective over the context.

    For a ``new`` result nothing says what is around it, and it needs a plan.
    Operands may be moved. They are for cuBLASMp that is asked for; otherwise only a C that is not like the result is.
    """
    say(ctx, f"{algo} {seed} {case}")
    values = [values_of(case, seed + 1_000_003 * turn) for turn in range(TURNS)]
    matrices = {}
    for name, x in values[0].items():
        matrices[name] = case.ends[name].place(ctx, x, AROUND if name == case.begins else np.nan)
    out_end = case.ends[case.begins or "d"]
    shape = out_end.parent[out_end.window].shape
    loads = [turned(ctx, matrices[name][1], [x[name] for x in values]) for name in matrices]
    if case.begins:
        parent, out = matrices[case.begins]
    else:
        written = reference.touched(case.routine, "d", case.flags, shape)
        before = np.where(written, np.nan, float(BEFORE))
        parent, out = out_end.place(ctx, before, AROUND)
        loads.append(turned(ctx, out, [before] * TURNS))
    call: dict[str, Any] = {name: pair[1] for name, pair in matrices.items()}
    call |= {**case.flags, "alpha": case.alpha, "out": None if case.new else out}
    call |= {"algo": algo}
    if "c" in ROUTINES[case.routine].operands:
        call["beta"] = case.beta
    function = getattr(pb.blas, case.routine)
    plan = pb.plan(function, **call) if planned else None
    result = plan._call.result(None).descriptor if case.new and plan else out.descriptor
    return Job(
        f"{algo} seed {seed} {case}", plan or functools.partial(function, **call), loads,
        lambda turn: part_of(ctx, expected_of(case, values[turn]), result),
        lambda found, part: _differs(found, part, TOLERANCES[case.dtype]),
        lambda: "" if case.new else around(ctx, parent, out_end), plan,
    )  # fmt: skip


def one_case(ctx: pb.Context, case: Case, seed: int, algo: str = "auto") -> str:
    """Call a routine; return what is wrong with what it wrote on this rank."""
    version = getattr(ctx.engine, "version", 0)
    try:
        job = routine_job(ctx, case, seed, algo)
        assert job.plan is not None
        with job.plan:
            found = ctx.engine.to_host(job.run(0))
            report = job.plan.report()
    except pb.UnsupportedError as error:  # a known fault of older versions
        if case.routine == "syr2k" and version < 1000 and "wrong for a complex alpha" in str(error):
            return ""
        raise
    fault = ""
    older = ROUTINES[case.routine].shape == "added" and version < 1000  # whose sums are not to move data
    if case.fits and report.moved and not older:
        fault = f"moved {report.moved}"
    if algo != "cublasmp" and any(not line.startswith("c is moved to") for line in report.moved):
        fault = f"moved {report.moved}"
    if algo not in ("auto", report.algorithm):
        fault = f"{report.algorithm} was taken"
    fault = fault or job.wrong(found, 0) or job.around()
    return f"{fault}; seed {seed}: {case}" if fault else ""


def _differs(found: np.ndarray, part: np.ndarray, tolerance: float) -> str:
    local = found.astype(np.complex128)
    wrong = ~((local == part) | (np.isnan(local) & np.isnan(part)))
    scale = max(1.0, float(np.abs(part[~np.isnan(part)]).max(initial=0)))
    wrong &= ~(np.abs(local - part) <= tolerance * scale)
    if not wrong.any():
        return ""
    at = tuple(int(i[0]) for i in np.nonzero(wrong))
    return f"{int(wrong.sum())} of {wrong.size} wrong, first at local {at}: {local[at]}, expected {part[at]}"


def cases(routine: str, ranks: int, count: int, first: int, mode: str) -> list[tuple[int, Case]]:
    """Return calls of a routine by their seeds.

    Args:
        routine: its name.
        ranks: of the context.
        count: how many.
        first: the first seed.
        mode: "fits": nothing has to be moved, and all begins on the first process; "sources": on any process; "any":
            layouts as they come.
    """
    seeds = range(first, first + count)
    return [(seed, random_case(random.Random(f"{routine} {seed}"), ranks, routine, mode)) for seed in seeds]
