# SPDX-License-Identifier: Apache-2.0
"""The operations of a GPU rank on arrays of every memory order, with a cuBLASLt that multiplies."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.gpu.cublasmp.library import Cublasmp
from pblasmp.engines.gpu.gpu_operations import GpuOperations
from pblasmp.engines.gpu.kernels.lt_product import Batch
from pblasmp.engines.gpu.kernels.views import View
from pblasmp.engines.local import slab_terms
from pblasmp.engines.local.slab_terms import Gemm, ResultPart
from pblasmp.layout import Trapezoid
from tests.helpers.gpu_memory import AtOnce
from tests.helpers.machine import Witness
from tests.helpers.pairs import pairs


@pytest.fixture
def played() -> dict[str, Any]:
    return {"queues": AtOnce()}


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
    for orders, (m, n, k), (of_c, of_type), beta in pairs(
        list(itertools.product("CF", repeat=3)), sizes, given.items(), (0, 1, -2)
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


@pytest.mark.parametrize("library", ["cuBLASLt", "cuBLAS"])
@pytest.mark.parametrize("own_c", [False, True])
def test_batches_of_products(
    lib: Witness, ctx: pb.Context, monkeypatch: pytest.MonkeyPatch, library: str, own_c: bool
) -> None:
    """A, B, C and D have different strides between products; cuBLAS, the fallback, gets them one by one."""
    operations, rng, count = ctx.engine.operations, np.random.default_rng(6), 3
    if library == "cuBLAS":
        why = pb.UnsupportedError("cuBLASLt found no algorithm")
        monkeypatch.setattr(ctx.engine.session.gpu.products, "multiply", mock.Mock(side_effect=why))
    shapes, steps = {"x": (4, 5), "w": (6, 5), "d": (4, 6), "c": (4, 6)}, {"x": 23, "w": 31, "d": 29, "c": 37}
    values = {name: rng.integers(-3, 4, (count, *shape)) + 0.0 for name, shape in shapes.items()}
    views, parts = {}, {}
    for name, (rows, cols) in shapes.items():
        memory = ctx.engine.xp.asarray(np.full(count * steps[name] + 9, np.nan))
        parts[name] = [memory[1 + i * steps[name] :][: rows * cols].reshape(rows, cols) for i in range(count)]
        for part, value in zip(parts[name], values[name], strict=True):
            part[...] = value
        views[name] = View.of(parts[name][0])
    batch = Batch(count, *(steps[name] for name in ("x", "w", "d", "c" if own_c else "d")))
    given = views["c"] if own_c else None
    operations.multiply(
        views["x"], views["w"], views["d"], given, op_x="N", op_w="T", alpha=2, beta=-1, batch=batch
    )
    old = values["c" if own_c else "d"]
    expected = 2 * values["x"] @ values["w"].swapaxes(1, 2) - old
    np.testing.assert_array_equal([np.asarray(part) for part in parts["d"]], expected)
    assert ("cuBLAS computed what cuBLASLt has not" in str(operations.remarks)) == (library == "cuBLAS")


@pytest.mark.parametrize(
    ("rows", "cols", "few"),
    [
        (np.arange(16), np.arange(16), 5),
        (np.arange(32).reshape(4, 2, 4)[:, 1].ravel(), np.arange(32).reshape(4, 2, 4)[:, 0].ravel(), 3),
        (np.array([1, 2, 3, 7, 8, 12, 13, 14, 20]), np.array([0, 1, 2, 6, 7, 9, 10, 12, 15, 16, 30]), 0),
    ],
)
def test_equal_parts_of_a_triangle_are_one_call(
    rows: np.ndarray, cols: np.ndarray, few: int, lib: Witness, ctx: pb.Context, monkeypatch: Any
) -> None:
    """In two panels, in every memory order, C in another order than D or not."""
    monkeypatch.setattr(GpuOperations, "tile", 1)
    monkeypatch.setattr(slab_terms, "TILES", 99)
    rng, k, triangle = np.random.default_rng(3), 6, Trapezoid("L")
    written = triangle.mask(rows, cols)
    for *orders, beta in pairs(*["CF"] * 4, (0, -1)):
        a, b, z = (
            rng.integers(-3, 4, shape) + 0.0
            for shape in ((len(rows), k), (k, len(cols)), (len(rows), len(cols)))
        )
        read = z if beta else np.full(z.shape, np.nan)
        (left, _), (right, _), (c, _) = (
            inside(ctx, x, "float64", order) for x, order in zip((a, b, read), orders, strict=False)
        )
        d, around = inside(ctx, np.full(z.shape, np.nan), "float64", orders[3])
        part = ResultPart(triangle, rows, cols, hermitian=False)
        lib.gpu.lt.calls.clear()
        part(ctx.engine.operations, Gemm(2, left[:, :2], right[:2], beta, d, 0, None, c, True))
        part(ctx.engine.operations, Gemm(2, left[:, 2:], right[2:], 1, d, 2))
        wanted = np.where(written, 2 * a @ b + beta * z, np.nan)
        np.testing.assert_array_equal(np.asarray(d), wanted, str((orders, beta)))
        d[...] = np.nan
        assert np.isnan(np.asarray(around)).all(), (orders, beta)
        if few and (orders[2] == orders[3] or beta == 0):  # otherwise C is copied, part by part
            assert len(lib.gpu.lt.calls) == 2 * few


class Placed:
    """A part of a GPU's memory as CuPy describes it."""

    def __init__(self, like: np.ndarray) -> None:
        self.shape, self.strides, self.size, self.itemsize = (
            like.shape,
            like.strides,
            like.size,
            like.itemsize,
        )
        self.data = SimpleNamespace(ptr=like.__array_interface__["data"][0])


def test_which_arrays_overlap():
    """As NumPy finds it, which is asked only about arrays that are not apart."""
    rng, memory = np.random.default_rng(6), np.zeros((12, 10))
    found = []
    for _ in range(400):
        starts, steps = rng.integers(0, 8, (2, 2)), rng.choice([-2, -1, 1, 2], (2, 2))
        sizes = rng.integers(0, 8, (2, 2))
        parts = [
            memory[r : r + m, c : c + n][:: sign[0], :: sign[1]]
            for (r, c), (m, n), sign in zip(starts, sizes, steps, strict=True)
        ]
        if rng.integers(2):
            parts[1] = parts[1].T
        expected = np.shares_memory(*parts)
        assert Cublasmp.overlap(*map(Placed, parts)) == expected
        found.append(expected)
    assert 20 < sum(found) < 380
    with mock.patch("pblasmp.engines.gpu.cublasmp.library.overlap") as asked:
        assert not Cublasmp.overlap(Placed(memory[:6]), Placed(memory[6:]))
        assert not asked.call_count
        assert Cublasmp.overlap(Placed(memory[:6]), Placed(memory[5:]))
        assert asked.call_count == 1
