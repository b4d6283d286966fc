# SPDX-License-Identifier: Apache-2.0
"""Matrices that come from the host and go back there, by scatter, gather, save and load, at random."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import pblasmp as pb
from pblasmp.dtypes import FLOAT8
from tests.helpers.cases import TYPES, check_array, layout, numbers, part, pick

GIVEN = ("the matrix's", "the other order", "every second", "int16")


def check_trip(ctx: pb.Context, seed: int, directory: str) -> None:
    """Scatter, gather, save and load a random matrix; fail, at the end, if it is another one. Collective."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(FLOAT8[pick(rng, sorted(FLOAT8))] if seed % 8 == 0 else pick(rng, TYPES))
    shape = tuple(int(x) for x in rng.integers(0 if seed % 10 == 0 else 1, 40, 2))
    values = (rng.integers(-4, 5, shape) if dtype in FLOAT8.values() else numbers(rng, shape, dtype)).astype(
        dtype
    )
    d, other = (layout(rng, shape, ctx.size, dtype=dtype) for _ in range(2))
    root, end, way = int(rng.integers(ctx.size)), int(rng.integers(ctx.size)), pick(rng, GIVEN)
    a = ctx.scatter(_given(values, d.order, way) if ctx.rank == root else None, d, root=root)
    real = values.real.astype(dtype)
    if dtype.kind == "c" and way == "int16":
        values = real
    back = a.gather(end)
    found, saved = {"scatter": a}, values
    if dtype not in FLOAT8.values() and dtype.name != "bfloat16":
        path = Path(directory) / f"{seed}.npy"
        a.save(path)
        saved, found["load"] = np.load(path), ctx.load(path, other)
    case = f"seed {seed}, {d}, {other}, roots {root} and {end}, {way}"
    assert (back is not None) == (ctx.rank == end), f"{case}: gather"
    if back is not None:
        check_array(back, values, f"{case}: gather")
    assert np.array_equal(saved, values), f"{case}: save"
    for what, x in found.items():
        check_array(x.on_host(), part(values, x.descriptor, ctx.rank), f"{case}: {what}")


def _given(values: np.ndarray, order: str, way: str) -> np.ndarray:
    """Return an array with the values, in one of several ways to have them in memory."""
    if way == "int16":
        return values.real.astype(np.int16)
    if way == "every second":
        spread = np.zeros((2 * values.shape[0], 2 * values.shape[1]), values.dtype)
        spread[::2, ::2] = values
        return spread[::2, ::2]
    return np.array(values, order={"C": "F", "F": "C"}[order] if way == "the other order" else order)
