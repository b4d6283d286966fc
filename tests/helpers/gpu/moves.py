# SPDX-License-Identifier: Apache-2.0
"""Random moves between layouts: grids, blocks, sources, memory orders, types, padding, offsets inside blocks."""

from __future__ import annotations

import os
import random
import sys
import time
from dataclasses import dataclass, replace

import numpy as np

import pblasmp as pb
from pblasmp.engines.request import Operands
from pblasmp.layout import Trapezoid

from .jobs import TURNS, Job
from .products import integers, part_of, place, turned, unequal, wrong_part

CONVERTS = {
    "float64": ("float64", "float32", "complex128"),
    "float32": ("float32", "float64", "complex64"),
    "complex128": ("complex128", "complex64"),
    "complex64": ("complex64", "complex128"),
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32", "float8_e5m2"),
    "float8_e4m3fn": ("float8_e4m3fn", "float32", "complex128", "float8_e5m2"),
}
AROUND = 7  # the values around a sub-matrix that is written

Window = tuple[slice, slice]


@dataclass(frozen=True)
class End:
    """Where a matrix is: a whole one, or a window of a larger one."""

    parent: pb.MatrixDescriptor
    window: Window

    def place(self, ctx: pb.Context, values: np.ndarray, around: float) -> tuple[pb.DistributedMatrix, ...]:
        """Return the larger matrix and its window, which has the values."""
        whole = np.full(self.parent.shape, around, values.dtype)
        whole[self.window] = values
        parent = place(ctx, whole, self.parent)
        return parent, parent[self.window]


def grids(ranks: int) -> list[pb.Grid]:
    """Every grid over some of the ranks."""
    return [
        pb.Grid(p, q, order)
        for p in range(1, ranks + 1)
        for q in range(1, ranks // p + 1)
        for order in ("row", "col")
    ]


def random_end(rng: random.Random, ranks: int, shape: tuple[int, int], dtype: str) -> End:
    """Return a random layout of a matrix of that shape."""
    grid = rng.choice(grids(ranks))
    block = [rng.randint(1, rng.choice([3, 16, 64, extent + 5])) for extent in shape]
    while (shape[0] // block[0] + 1) * (shape[1] // block[1] + 1) > 400:
        block = [b * 2 for b in block]
    inside = rng.random() < 0.4
    before = [rng.randint(0, 2 * b) if inside else 0 for b in block]
    after = [rng.randint(0, 9) if inside else 0 for _ in block]
    whole = tuple(o + e + a for o, e, a in zip(before, shape, after, strict=True))
    source = rng.randrange(grid.nprow), rng.randrange(grid.npcol)
    parent = pb.MatrixDescriptor(whole, block, grid, source, dtype, rng.choice("CF"))
    if rng.random() < 0.2:
        parent = replace(parent, ld=max(whole) + rng.randint(0, 5))
    window = tuple(slice(o, o + e) for o, e in zip(before, shape, strict=True))
    if inside and rng.random() < 0.2:  # a whole matrix that begins inside a block
        parent, window = replace(parent[window], ld=None), (slice(None), slice(None))
    return End(parent, window)


def random_move(rng: random.Random, ranks: int) -> tuple[End, End]:
    """Return where a matrix is and where it goes."""
    largest = rng.choice([5, 20, 60, 200, 600])
    shape = tuple(rng.randint(0 if rng.random() < 0.05 else 1, largest) for _ in range(2))
    dtype = rng.choice(list(CONVERTS))
    other = rng.choice(CONVERTS[dtype]) if rng.random() < 0.3 else dtype
    source = random_end(rng, ranks, shape, dtype)
    if rng.random() < 0.15:  # where it is, in the other memory order
        parent = replace(source.parent, dtype=other, order=rng.choice("CF"), ld=None)
        return source, End(parent, source.window)
    return source, random_end(rng, ranks, shape, other)


def say(ctx: pb.Context, text: str) -> None:
    """Write where a hang would be found, where PBLASMP_TRACE asks for it."""
    if ctx.rank == 0 and os.environ.get("PBLASMP_TRACE"):
        print(f"{time.monotonic():.2f} {text}", file=sys.__stderr__, flush=True)


def around(ctx: pb.Context, parent: pb.DistributedMatrix, end: End) -> str:
    """Return whether anything was written around a sub-matrix, or an empty string."""
    mask = np.ones(parent.shape)
    mask[end.window] = 0
    untouched = part_of(ctx, mask, parent.descriptor)
    if untouched is None:
        return ""
    values = parent.on_host()[untouched == 1].astype(np.complex128)
    return "" if (values == AROUND).all() else "wrote outside the sub-matrix"


def move_job(ctx: pb.Context, rng: random.Random) -> Job:
    """Return a move of a random matrix, or of a triangle of it. Collective over the context."""
    source, target = random_move(rng, ctx.size)
    seed, d = rng.randrange(1 << 30), source.parent[source.window]
    uplo, diag = rng.choice([(None, "N"), (None, "N"), ("L", "N"), ("U", "N"), ("L", "U"), ("U", "U")])
    what = f"{uplo} {diag} {source} -> {target}"
    say(ctx, what)
    values = [integers(d.shape, d.dtype, seed + turn) for turn in range(TURNS)]
    nothing = np.full(d.shape, float(AROUND))
    _, x = source.place(ctx, values[0], np.nan)
    parent, to = target.place(ctx, nothing, AROUND)
    part = Trapezoid.of_shape(d.shape, uplo or "L", diag)
    written = part.mask(*(np.arange(extent) for extent in d.shape)) if uplo else np.ones(d.shape, bool)
    before = np.where(written, np.nan, AROUND)
    return Job(
        what, lambda: x.redistribute(out=to, uplo=uplo, diag=diag),
        [turned(ctx, x, values), turned(ctx, to, [before] * TURNS)],
        lambda turn: part_of(ctx, np.where(written, values[turn], AROUND), to.descriptor),
        lambda found, expected: unequal(found, expected, to.dtype), lambda: around(ctx, parent, target),
    )  # fmt: skip


def one_move(ctx: pb.Context, seed: int) -> tuple[str, str]:
    """Move a random matrix, twice; return the way taken and what is wrong on this rank."""
    rng = random.Random(seed)
    source, target = random_move(rng, ctx.size)
    say(ctx, f"{seed} {source} -> {target}")
    d = source.parent[source.window]
    out = target.parent[target.window]
    _, x = source.place(ctx, np.full(d.shape, np.nan), np.nan)
    parent, to = target.place(ctx, np.full(out.shape, float(AROUND)), AROUND)
    trapezoid = rng.choice(
        [None, None, *(Trapezoid.of_shape(d.shape, *part) for part in ("LN", "UN", "LU", "UU"))]
    )
    written = np.ones(d.shape, bool)
    if trapezoid is not None:
        written = trapezoid.mask(*(np.arange(extent) for extent in d.shape))
    move = ctx.engine.prepare_move(x.descriptor, to.descriptor, (x.local, to.local), trapezoid)
    fault = ""
    for turn in range(2):
        values = integers(d.shape, d.dtype, seed + turn)
        part = part_of(ctx, values, d)
        if part is not None:
            ctx.engine.from_host(x.local, part.astype(d.dtype))
        move.run(Operands(x.local, None, None, to.local))
        part = part_of(ctx, np.where(written, values, AROUND), out)
        fault = fault or ("" if part is None else wrong_part(ctx, to, part))
    path = move.path
    move.close()
    fault = fault or around(ctx, parent, target)
    return path, f"seed {seed}, {path}: {fault}: {source} -> {target}" if fault else ""
