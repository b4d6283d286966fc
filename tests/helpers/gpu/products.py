# SPDX-License-Identifier: Apache-2.0
"""Products with a known result: integer-valued data, so that float64 NumPy is exact, computed part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import pblasmp as pb

OPS = {"N": lambda x: x, "T": lambda x: x.T, "C": lambda x: x.conj().T}


def integers(shape: tuple[int, int], dtype: np.dtype, seed: int, limit: int = 3) -> np.ndarray:
    """Return the same small integers on every rank, as float64 or complex128."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-limit, limit + 1, shape).astype(np.float64)
    return values + 1j * rng.integers(-limit, limit + 1, shape) if dtype.kind == "c" else values


def place(ctx: pb.Context, values: np.ndarray, d: pb.MatrixDescriptor, **how: Any) -> pb.DistributedMatrix:
    """Return a matrix of ``values``, which every rank has: each writes its own part."""
    out = ctx.allocate(d, **how)
    part = part_of(ctx, values, d)
    if part is not None:
        ctx.engine.from_host(out.local, part.astype(d.dtype))
    return out


def turned(ctx: pb.Context, x: pb.DistributedMatrix, values: Sequence[np.ndarray]) -> tuple[Any, list[Any]]:
    """Return the local array of ``x``, and arrays like it that hold each of ``values`` (see ``jobs.Job.loads``)."""
    return x.local, [place(ctx, each, replace(x.descriptor, ld=None)).local for each in values]


def part_of(ctx: pb.Context, values: np.ndarray, d: pb.MatrixDescriptor) -> np.ndarray | None:
    """Return this rank's part of ``values``, None outside the grid."""
    if ctx.rank >= d.grid.size:
        return None
    rows, cols = d.global_indices(ctx.rank)
    return values[rows[:, None], cols]


def poisoned(ctx: pb.Context, d: pb.MatrixDescriptor) -> pb.DistributedMatrix:
    """Return a matrix of NaN, to be written over."""
    return place(ctx, np.full(d.shape, np.nan), d)


def product_part(
    ctx: pb.Context, p: pb.MatmulProblem, values: dict[str, np.ndarray], alpha: complex, beta: complex
) -> np.ndarray:
    """Return this rank's part of the product of the whole matrices, computed in float64 (0 × 0 outside the grid)."""
    if ctx.rank >= p.d.grid.size:
        return np.empty((0, 0))
    rows, cols = p.d.global_indices(ctx.rank)
    part = alpha * (OPS[p.op_a](values["a"])[rows] @ OPS[p.op_b](values["b"])[:, cols])
    return part + beta * values["c"][rows[:, None], cols] if beta else part


def unequal(local: np.ndarray, part: np.ndarray, dtype: np.dtype, tolerance: float = 0) -> str:
    """Return how an array of elements of ``dtype`` differs from ``part``, or an empty string."""
    local = local if local.dtype == dtype or local.dtype != np.uint8 else local.view(dtype)  # 8-bit floats
    value = local.astype(np.complex128 if dtype.kind == "c" else np.float64)
    error = np.abs(value - part.astype(dtype).astype(value.dtype))
    scale = max(1.0, float(np.abs(part).max(initial=0)))
    worst = float(error.max(initial=0))  # NaN stays NaN, and compares false
    return "" if worst <= tolerance * scale else f"largest difference {worst} (scale {scale})"


def check_part(
    found: np.ndarray, part: np.ndarray, dtype: np.dtype, case: str = "", tolerance: float = 0
) -> None:
    """Fail if an array of elements of ``dtype`` differs from ``part``. Local."""
    wrong = unequal(found, part, dtype, tolerance)
    assert not wrong, f"{case}: {wrong}"


def check_local(
    ctx: pb.Context, got: pb.DistributedMatrix, part: np.ndarray, case: object = "", tolerance: float = 0
) -> None:
    """Fail if the local array of ``got`` differs from ``part``. Local."""
    check_part(ctx.engine.to_host(got.local), part, got.dtype, f"{case}", tolerance)


def check_whole(
    ctx: pb.Context, got: pb.DistributedMatrix, expected: np.ndarray, case: object = "", tolerance: float = 0
) -> None:
    """Fail if this rank's part of ``got`` differs from the whole ``expected``. Local."""
    part = part_of(ctx, expected, got.descriptor)
    if part is not None:
        check_local(ctx, got, part, case, tolerance)


def failure(check: Callable[..., Any], *args: Any, **how: Any) -> str:
    """Run a check that asserts after its last collective call; return what it says, or an empty string."""
    try:
        check(*args, **how)
    except AssertionError as error:
        return str(error) or "an assertion without words"
    return ""
