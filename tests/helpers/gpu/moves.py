# SPDX-License-Identifier: Apache-2.0
"""Random moves between layouts: grids, blocks, sources, memory orders, types, padding, offsets inside blocks."""

from __future__ import annotations

import os
import random
import sys
import time
from typing import NamedTuple

import numpy as np

import pblasmp as pb
from pblasmp.dtypes import as_dtype
from pblasmp.engines.request import Operands
from pblasmp.layout import Trapezoid
from tests.helpers.calls import Operand, draw_place, side_by_side
from tests.helpers.cases import pick

from .jobs import TURNS, Job
from .products import check_part, integers, part_of, turned, unequal

AROUND = 7  # the values outside of a triangle that is written

CONVERTS = {
    "float64": ("float64", "float32", "complex128"),
    "float32": ("float32", "float64", "complex64"),
    "complex128": ("complex128", "complex64"),
    "complex64": ("complex64", "complex128"),
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32", "float8_e5m2"),
    "float8_e4m3fn": ("float8_e4m3fn", "float32", "complex128", "float8_e5m2"),
}


def grids(ranks: int) -> list[pb.Grid]:
    """Every grid over some of the ranks."""
    return [
        pb.Grid(p, q, order)
        for p in range(1, ranks + 1)
        for q in range(1, ranks // p + 1)
        for order in ("row", "col")
    ]


def say(ctx: pb.Context, text: str) -> None:
    """Write where a hang would be found, where PBLASMP_TRACE asks for it."""
    if ctx.rank == 0 and os.environ.get("PBLASMP_TRACE"):
        print(f"{time.monotonic():.2f} {text}", file=sys.__stderr__, flush=True)


class Drawn(NamedTuple):
    """A move: from where to where, what moves, and which elements of it."""

    source: Operand
    target: Operand
    values: list[np.ndarray]
    part: tuple[str, str]
    written: np.ndarray

    def __str__(self) -> str:
        return f"{self.part} {self.source.matrix} -> {self.target.matrix}"


def random_move(ctx: pb.Context, rng: np.random.Generator) -> Drawn:
    """Return a move of a matrix, or of a triangle of it; NaN where it goes. Collective over the context."""
    largest = pick(rng, (5, 20, 60, 200, 600))
    shape = tuple(int(n) for n in rng.integers(int(rng.integers(20) > 0), largest + 1, 2))
    dtype = pick(rng, list(CONVERTS))
    other = pick(rng, CONVERTS[dtype]) if rng.integers(3) == 2 else dtype
    seed, wide = int(rng.integers(1 << 30)), max(1, largest // 30)
    values = [integers(shape, as_dtype(dtype), seed + turn) for turn in range(TURNS)]
    part = pick(rng, (("", "N"), ("", "N"), ("L", "N"), ("U", "N"), ("L", "U"), ("U", "U")))
    trapezoid = Trapezoid.of_shape(shape, part[0] or "L", part[1])
    written = trapezoid.mask(*map(np.arange, shape)) if part[0] else np.ones(shape, bool)
    places = [draw_place(ctx, rng, None) for _ in "xy"]
    if rng.integers(5) == 4:  # where it is, perhaps in the other memory order
        places[1] = places[0]
    ends = [
        side_by_side(ctx, rng, [x.astype(kind)], at._replace(block=(at.block[0] * wide, at.block[1] * wide)),
                     pick(rng, "CF"), turns=places[0] is not places[1])[0]
        for x, kind, at in ((values[0], as_dtype(dtype), places[0]),
                            (np.where(written, np.nan, AROUND), as_dtype(other), places[1]))
    ]  # fmt: skip
    return Drawn(ends[0], ends[1], values, part, written)


def move_job(ctx: pb.Context, rng: random.Random) -> Job:
    """Return a move of a random matrix, or of a triangle of it. Collective over the context."""
    move = random_move(ctx, np.random.default_rng(rng.randrange(1 << 30)))
    say(ctx, f"{move}")
    x, to, (uplo, diag) = move.source.matrix, move.target.matrix, move.part
    before = np.where(move.written, np.nan, AROUND)
    return Job(
        f"{move}", lambda: x.redistribute(out=to, uplo=uplo or None, diag=diag),
        [turned(ctx, x, move.values), turned(ctx, to, [before] * TURNS)],
        lambda turn: part_of(ctx, np.where(move.written, move.values[turn], AROUND), to.descriptor),
        lambda found, expected: unequal(found, expected, to.dtype), lambda: move.target.around() or "",
    )  # fmt: skip


def check_move(ctx: pb.Context, seed: int) -> str:
    """Move a random matrix, twice; fail, at the end, if this rank has anything wrong; return the way. Collective."""
    drawn = random_move(ctx, np.random.default_rng(seed))
    say(ctx, f"{seed} {drawn}")
    x, to, (uplo, diag) = drawn.source.matrix, drawn.target.matrix, drawn.part
    part = Trapezoid.of_shape(x.shape, uplo, diag) if uplo else None
    move = ctx.engine.prepare_move(x.descriptor, to.descriptor, (x.local, to.local), part)
    results = []
    for values in drawn.values:
        mine = part_of(ctx, values, x.descriptor)
        if mine is not None:
            ctx.engine.from_host(x.local, mine.astype(x.dtype))
        move.run(Operands(x.local, None, None, to.local))
        mine = part_of(ctx, np.where(drawn.written, values, AROUND), to.descriptor)
        results.append((ctx.engine.to_host(to.local), mine))
    path = move.path
    move.close()
    case = f"seed {seed}, {path}: {drawn}"
    for found, mine in results:
        if mine is not None:
            check_part(found, mine, to.dtype, case)
    around = drawn.target.around()
    assert not around, f"{case}: {around}"
    return path
