# SPDX-License-Identifier: Apache-2.0
"""Local arrays, NumPy's or CuPy's: whether they share memory, how BLAS takes them, how to make them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..comm import Agreement
from ..errors import ArgumentError
from ..layout import MatrixDescriptor, Trapezoid
from .protocol import Engine
from .request import LocalArray, Operands


def as_numpy(xp: Any, array: LocalArray) -> NDArray[Any]:
    """Return what an array of the module ``xp`` holds as a NumPy array: itself if it is one, else a copy. Local."""
    values: NDArray[Any] = array if xp is np else xp.asnumpy(array)
    return values


def overlap(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Return whether two NumPy arrays have an element in common; True if that takes too long to find out. Local."""
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def same_memory(a: LocalArray, b: LocalArray) -> bool:
    """Return whether two local arrays have the same elements at the same addresses. Local."""
    if a.shape != b.shape or a.strides != b.strides or a.dtype != b.dtype:
        return False
    return a is b or bool(a.size > 0 and address(a) == address(b))


def address(array: LocalArray) -> int:
    """Return where a local array's first element is. Local."""
    at = array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr
    return int(at)


def empty_part(engine: Engine, x: MatrixDescriptor, *, symmetric: bool = False) -> LocalArray:
    """Return memory for this rank's part of a matrix, empty outside its grid. Local; collective if ``symmetric``."""
    rank = engine.transport.rank
    inside = rank < x.grid.size
    shape, ld = (x.local_shape(rank), x.lld(rank)) if inside else ((0, 0), 1)
    return engine.empty(shape, x.dtype, x.order, ld, symmetric=symmetric)


def new_part(engine: Engine, x: MatrixDescriptor) -> LocalArray:
    """Return this rank's part of a new matrix, empty outside its grid. Collective: if one rank fails, all do."""
    with Agreement(engine.transport.comm, "making a matrix"):
        return empty_part(engine, x)


def move(
    engine: Engine,
    source: MatrixDescriptor,
    target: MatrixDescriptor,
    arrays: tuple[LocalArray, LocalArray],
    part: Trapezoid | None = None,
) -> None:
    """Move everything, or ``part``, between the local arrays of two matrices of one shape. Collective."""
    prepared = engine.prepare_move(source, target, arrays, part)
    try:
        prepared.run(Operands(arrays[0], None, None, arrays[1]))
    finally:
        prepared.close()


def window_of(array: LocalArray, x: MatrixDescriptor, rank: int, window: tuple[slice, slice]) -> LocalArray:
    """Return what a rank's local array of a matrix has of some rows and columns; all of it outside the grid. Local."""
    if rank >= x.grid.size:
        return array
    (rows, cols), (p, q) = x.ranges(window), x.grid.coords(rank)
    return array[x.rows.local_window(p, *rows), x.cols.local_window(q, *cols)]


def scale(array: LocalArray, beta: complex) -> None:
    """Multiply ``array`` by ``beta`` in place; 0 overwrites, so NaN does not survive. Local."""
    if array.strides[0] < array.strides[1]:  # CuPy's kernels run along rows
        array = array.T
    if beta == 0:
        array[...] = 0
    elif beta != 1:
        array *= beta


def adjoint_of(x: LocalArray) -> LocalArray:
    """Return the adjoint of an array: a view, if it is real. Local."""
    return x.conj().T if x.dtype.kind == "c" else x.T


def set_diagonal(xp: Any, a: LocalArray, value: Any) -> None:
    """Write a number, or a vector, to the diagonal of an array of ``xp``. Local."""
    n = min(a.shape)
    if n:
        xp.lib.stride_tricks.as_strided(a, (n,), (sum(a.strides),))[...] = value


def trsm_words(a: LocalArray, b: LocalArray, *, lower: bool) -> tuple[str, str, str, int, int, int, int]:
    """Return side, uplo, trans, m, n, lda and ldb of BLAS for solving A X = B in the place of B. Local."""
    (trans_b, ldb), (trans_a, lda) = blas_operand(b), blas_operand(a)
    turned, straight = trans_b == "T", trans_a == "N"  # B is in C order: solve X^T A^T = B^T
    m, n = b.shape[::-1] if turned else b.shape
    uplo, trans = "L" if lower == straight else "U", "T" if turned == straight else "N"
    return "R" if turned else "L", uplo, trans, m, n, lda, ldb


def blas_operand(array: LocalArray) -> tuple[str, int]:
    """Return BLAS's trans flag and leading dimension for a 2D array with one contiguous dimension. Local.

    Raises:
        ArgumentError: no dimension is contiguous.
    """
    rows, cols = array.shape
    item = array.itemsize
    if (array.strides[0] == item or rows <= 1) and (cols <= 1 or array.strides[1] >= rows * item):
        return "N", max(1, rows, array.strides[1] // item if cols > 1 else 1)
    if array.strides[1] != item and cols > 1:
        raise ArgumentError(
            f"local array: BLAS needs one contiguous dimension, got strides of {array.strides} bytes for {array.dtype}"
        )
    return "T", max(1, cols, array.strides[0] // item if rows > 1 else 1)
