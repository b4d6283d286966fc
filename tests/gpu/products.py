# SPDX-License-Identifier: Apache-2.0
"""Products with a known result: integer-valued data, so that float64 NumPy is exact, computed part by part."""

from __future__ import annotations

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
    out = ctx.empty(d, **how)
    part = part_of(ctx, values, d)
    if part is not None:
        ctx.engine.from_host(out.local, part.astype(d.dtype))
    return out


def part_of(ctx: pb.Context, values: np.ndarray, d: pb.MatrixDescriptor) -> np.ndarray | None:
    """Return this rank's part of ``values``, None outside the grid."""
    if ctx.rank >= d.grid.size:
        return None
    rows, cols = d.global_indices(ctx.rank)
    return values[np.ix_(rows, cols)]


def poisoned(ctx: pb.Context, d: pb.MatrixDescriptor) -> pb.DistributedMatrix:
    """Return a matrix of NaN, to be written over."""
    return place(ctx, np.full(d.shape, np.nan), d)


def wrong(ctx: pb.Context, got: pb.DistributedMatrix, expected: np.ndarray, tolerance: float = 0) -> str:
    """Return how this rank's part of ``got`` differs from ``expected``, or an empty string."""
    part = part_of(ctx, expected, got.descriptor)
    if part is None:
        return ""
    local = ctx.engine.to_host(got.local)
    value = local.astype(np.complex128 if got.dtype.kind == "c" else np.float64)
    part = part.astype(got.dtype).astype(value.dtype)
    error = np.abs(value - part)
    scale = max(1.0, float(np.abs(part).max(initial=0)))
    worst = float(error.max(initial=0))  # NaN stays NaN, and compares false
    return "" if worst <= tolerance * scale else f"largest difference {worst} (scale {scale})"


def everywhere(ctx: pb.Context, fault: str) -> str:
    """Return the first rank's fault that is not empty."""
    return next((f"rank {rank}: {text}" for rank, text in enumerate(ctx.comm.allgather(fault)) if text), "")
