# SPDX-License-Identifier: Apache-2.0
"""Matrices that come from the host and go back there, by scatter, gather, save and load, at random."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import pblasmp as pb
from pblasmp.dtypes import FLOAT8
from tests.helpers.cases import TYPES, layout, numbers, part, pick

GIVEN = ("the matrix's", "the other order", "every second", "int16")


def one_trip(ctx: pb.Context, seed: int, directory: str) -> str:
    """Return what is wrong on this rank with a random matrix after scatter, gather, save and load, or nothing."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(FLOAT8[pick(rng, sorted(FLOAT8))] if seed % 8 == 0 else pick(rng, TYPES))
    shape = tuple(int(x) for x in rng.integers(0 if seed % 10 == 0 else 1, 40, 2))
    values = (rng.integers(-4, 5, shape) if dtype in FLOAT8.values() else numbers(rng, shape, dtype)).astype(
        dtype
    )
    d, other = (layout(rng, shape, ctx.size, dtype=dtype) for _ in range(2))
    root, end, way = int(rng.integers(ctx.size)), int(rng.integers(ctx.size)), pick(rng, GIVEN)
    a = ctx.scatter(_given(values, d.order, way) if ctx.rank == root else None, d, root=root)
    fault = _unlike(a, values, "scatter") if way != "int16" or dtype.kind != "c" else ""
    if dtype.kind == "c" and way == "int16":
        values = values.real.astype(dtype)
    back = a.gather(end)
    if (back is not None) != (ctx.rank == end):
        fault = fault or f"gather: {back!r}"
    elif back is not None and not (back.dtype == dtype and np.array_equal(back, values)):
        fault = fault or "gather: other values"
    if dtype not in FLOAT8.values() and dtype.name != "bfloat16":
        path = Path(directory) / f"{seed}.npy"
        a.save(path)
        if not np.array_equal(np.load(path), values):
            fault = fault or "save: other values"
        loaded = ctx.load(path, other)
        fault = fault or _unlike(loaded, values, "load")
    return fault and f"seed {seed}, {d}, {other}, roots {root} and {end}, {way}: {fault}"


def _given(values: np.ndarray, order: str, way: str) -> np.ndarray:
    """Return an array with the values, in one of several ways to have them in memory."""
    if way == "int16":
        return values.real.astype(np.int16)
    if way == "every second":
        spread = np.zeros((2 * values.shape[0], 2 * values.shape[1]), values.dtype)
        spread[::2, ::2] = values
        return spread[::2, ::2]
    return np.array(values, order={"C": "F", "F": "C"}[order] if way == "the other order" else order)


def _unlike(x: pb.DistributedMatrix, values: np.ndarray, what: str) -> str:
    found = x.on_host()
    return (
        "" if np.array_equal(found, part(values, x.descriptor, x.context.rank)) else f"{what}: other values"
    )
