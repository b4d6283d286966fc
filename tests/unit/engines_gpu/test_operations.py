# SPDX-License-Identifier: Apache-2.0
"""The operations of a GPU rank on arrays of every memory order, with a cuBLASLt that multiplies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers.fakelt import MultiplyingLt
from tests.helpers.machine import Witness, machine


@pytest.fixture
def lib(alone: None, stand_in: Any) -> Iterator[Witness]:
    with machine(stand_in(1000), lt=MultiplyingLt()) as lib:
        yield lib
        lib.assert_clean()
        lib.gpu.assert_clean()


def inside(ctx: pb.Context, values: np.ndarray, dtype: Any, order: str) -> tuple[Any, Any]:
    """Return a matrix of these values inside of one that is NaN around it, and that one."""
    rows, cols = values.shape
    whole = ctx.engine.xp.asarray(np.full((rows + 3, cols + 2), np.nan, dtype, order=order))
    matrix = whole[2:-1, 1:-1]
    matrix[...] = values.astype(dtype)
    return matrix, whole


@pytest.mark.parametrize(("dtype", "other"), [("float32", "float64"), ("complex128", "complex64")])
def test_products_in_every_memory_order(lib: Witness, ctx: pb.Context, dtype: str, other: str) -> None:
    """C is D or another matrix, in the order of D or not, in another type, or not read; k may be 0."""
    gemm, rng = ctx.engine.operations.gemm, np.random.default_rng(4)
    sizes = (5, 7, 3), (1, 7, 3), (5, 1, 3), (5, 7, 1), (6, 6, 6), (1, 1, 1), (5, 7, 0), (0, 7, 3)
    given = {"C": dtype, "F": dtype, "other": other, "": dtype}
    for orders, (m, n, k), (of_c, of_type), beta in itertools.product(
        itertools.product("CF", repeat=3), sizes, given.items(), (0, 1, -2)
    ):
        case = orders, (m, n, k), of_c, beta
        x, y, z = (rng.integers(-3, 4, shape) + 0.0 for shape in ((m, k), (k, n), (m, n)))
        if dtype[0] == "c":
            x, y, z = x * (1 + 1j), y * (2 - 1j), z * 1j
        (a, _), (b, _) = (
            inside(ctx, each, dtype, order) for each, order in zip((x, y), orders, strict=False)
        )
        c = inside(ctx, z, of_type, of_c if of_c in "CF" else "C")[0] if of_c else None
        read = z if c is None and beta != 0 else np.full((m, n), np.nan)
        d, around = inside(ctx, read, dtype, orders[2])
        gemm(-1, a, b, beta, d, c=c if beta else None)
        np.testing.assert_array_equal(np.asarray(d), beta * z - x @ y, str(case))
        d[...] = np.nan
        assert np.isnan(np.asarray(around)).all(), case
