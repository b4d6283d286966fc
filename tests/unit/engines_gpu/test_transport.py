# SPDX-License-Identifier: Apache-2.0
"""Pieces of matrices that are copied on a GPU: by the kernel where only bytes move, else by CuPy."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from pblasmp.layout.axis import Axis
from pblasmp.layout.intersection import Piece, intersect
from tests.helpers.oracle import positions

AROUND = 77
# What process 1 of 2 has in blocks of 3, and process 0 of 2 in blocks of 2: several runs, not at equal distances.
ROWS = Axis(23, 3, 0, 2), 1, Axis(23, 2, 0, 2), 0
COLS = Axis(17, 4, 1, 2), 0, Axis(17, 3, 0, 2), 1
PIECE = Piece(intersect(*ROWS), intersect(*COLS))


def _array(shape: tuple[int, int], dtype: Any, order: str, pad: int) -> Any:
    """An array whose lines are ``pad`` entries further apart than they are long."""
    rows, cols = shape if order == "C" else shape[::-1]
    array = sys.modules["cupy"].empty((rows, cols + pad), dtype)[:, :cols]
    return array if order == "C" else array.T


def copied(ctx: Any, piece: Piece, shapes: Any, dtypes: Any, orders: str, *, conjugate: bool = False) -> None:
    """Copy a piece from one array to another; check the values, and those around them."""
    src, dst = (_array(*each, pad) for *each, pad in zip(shapes, dtypes, orders, (3, 5), strict=True))
    numbers = np.random.default_rng(4).integers(-9, 10, (2, *src.shape))
    src[...] = numbers[0] + 1j * numbers[1] if src.dtype.kind == "c" else numbers[0]
    dst[...] = AROUND
    expected = np.array(dst)
    for i, k in positions(piece.rows):
        for j, m in positions(piece.cols):
            expected[k, m] = src[i, j].conjugate() if conjugate else src[i, j]
    ctx.engine.transport.copy_piece(dst, src, piece, conjugate=conjugate)
    np.testing.assert_array_equal(np.asarray(dst), expected)
    assert (expected != AROUND).any()


SHAPES = [(ROWS[0].count(1), COLS[0].count(0)), (ROWS[2].count(0), COLS[2].count(1))]


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128", bfloat16, "uint8"])
@pytest.mark.parametrize("orders", ["CC", "FF"])
def test_a_piece_of_the_same_type_and_memory_order_goes_by_the_kernel(ctx, gpu, orders, dtype):
    copied(ctx, PIECE, SHAPES, [dtype, dtype], orders)
    assert gpu.moves == 1 < len(PIECE.rows) * len(PIECE.cols)


@pytest.mark.parametrize(
    ("dtypes", "orders", "conjugate"),
    [
        (("float64", "float64"), "CF", False),
        (("bfloat16", "bfloat16"), "FC", False),
        (("complex128", "complex128"), "CF", True),
        (("float32", "float64"), "CC", False),
        (("float64", "complex64"), "FF", False),
        (("int32", "float32"), "CC", False),  # as many bytes
    ],
)
def test_one_that_transposes_conjugates_or_converts_goes_by_cupy(ctx, gpu, dtypes, orders, conjugate):
    kinds = [bfloat16 if dtype == "bfloat16" else dtype for dtype in dtypes]
    copied(ctx, PIECE, SHAPES, kinds, orders, conjugate=conjugate)
    assert gpu.moves == 0


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("orders", ["CC", "FF"])
def test_the_kernel_conjugates_complex_numbers(ctx, gpu, orders, dtype):
    copied(ctx, PIECE, SHAPES, [dtype, dtype], orders, conjugate=True)
    assert gpu.moves == 1


def test_real_numbers_are_their_conjugates(ctx, gpu):
    copied(ctx, PIECE, SHAPES, ["float64", "float64"], "FF", conjugate=True)
    assert gpu.moves
