# SPDX-License-Identifier: Apache-2.0
"""Local arrays as Fortran programs hold them, and matrices as ScaLAPACK takes them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .dtypes import as_dtype
from .errors import ArgumentError
from .layout import Grid, MatrixDescriptor
from .layout.grid import integer

__all__ = ["ScalapackMatrix", "column_major_view", "leading_dimension", "read_descriptor"]


class ScalapackMatrix(NamedTuple):
    """A matrix as PBLAS and ScaLAPACK take one: four arguments, in their order.

    Attributes:
        local: this rank's local array, in Fortran order: NumPy's or CuPy's, not a copy.
        ia, ja: row and column of ``local``'s matrix where the sub-matrix begins, from 1.
        desc: its descriptor, nine integers (int32).
    """

    local: Any
    ia: int
    ja: int
    desc: NDArray[np.int32]


def column_major_view(array: Any, shape: tuple[int, int], lld: int) -> Any:
    """Return a view of the first ``shape`` of a local array whose leading dimension is ``lld``. Local.

    Args:
        array: NumPy's or CuPy's, of two dimensions in Fortran order, at least ``shape``, with columns ``lld`` apart; or
            of one dimension, which holds column after column. If ``shape`` has no elements, any size will do.
        shape: rows and columns.
        lld: elements from one column to the next.

    Raises:
        ArgumentError: the array is too small, or its strides are not these.
    """
    rows, cols = shape
    item = array.itemsize
    if array.ndim not in (1, 2):
        raise ArgumentError(f"local array: has {array.ndim} dimensions, expected 1 or 2")
    if not (rows and cols):
        return array[(slice(0),) * array.ndim].reshape(shape, order="F")
    if array.ndim == 1:
        need = lld * (cols - 1) + rows
        if array.size < need:
            raise ArgumentError(
                f"local array: holds {array.size} elements, expected at least {need} ({cols} columns of {lld})"
            )
        if array.size > 1 and array.strides[0] != item:
            raise ArgumentError("local array: its elements are not contiguous")
        if isinstance(array, np.ndarray):
            return np.ndarray(shape, array.dtype, array, strides=(item, lld * item))
        library = importlib.import_module(f"{type(array).__module__.partition('.')[0]}.lib.stride_tricks")
        return library.as_strided(array, shape, (item, lld * item))
    if array.shape[0] < rows or array.shape[1] < cols:
        raise ArgumentError(f"local array: shape is {array.shape}, expected at least {shape}")
    part = array[:rows, :cols]
    if rows > 1 and part.strides[0] != item:
        raise ArgumentError(
            f"local array: strides are {array.strides} bytes, expected contiguous columns (Fortran order)"
        )
    if cols > 1 and part.strides[1] != lld * item:
        apart = part.strides[1] / item
        raise ArgumentError(
            f"local array: columns are {apart:g} elements apart, expected the leading dimension {lld}"
        )
    return part


def leading_dimension(array: Any) -> int:
    """Return the leading dimension of a Fortran-ordered local array, in elements, at least 1. Local."""
    rows, cols = array.shape
    apart: int = array.strides[1] // array.itemsize if rows and cols > 1 else 0
    return max(1, int(rows), apart)


def read_descriptor(desc: Sequence[int], kind: str, grid: Grid) -> tuple[MatrixDescriptor, int]:
    """Return what a rank's nine integers say: the matrix's layout, the same on every rank, and this rank's LLD. Local.

    ArgumentError if the descriptor is not legal.
    """
    unpadded = [*desc[:8], *(2**31 - 1 for _ in desc[8:])]  # LLD may differ from rank to rank
    descriptor = MatrixDescriptor.from_scalapack(unpadded, grid, as_dtype(kind))
    return replace(descriptor, ld=None), integer(desc[8], "desc[8]", 1)
