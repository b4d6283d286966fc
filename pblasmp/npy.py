# SPDX-License-Identifier: Apache-2.0
""".npy files, each rank reading and writing its own blocks through a memory map; C and F order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dtypes import DTYPES, element_type
from .errors import LayoutError
from .layout import MatrixDescriptor
from .layout.axis import Axis
from .layout.intersection import Piece, copy, intersect

__all__ = ["Progress", "create", "errors_naming", "map_file", "read", "temporary_name", "write"]

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) of this rank's part."""

_STEP = 1 << 22  # elements between two calls of a progress function


def map_file(path: Path) -> NDArray[Any]:
    """Return the 2D array of an .npy file, mapped read-only. Local.

    Raises:
        OSError: it cannot be opened.
        LayoutError: it is no .npy file, or not of a 2D array of numbers.
    """
    try:
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise LayoutError(f"{path}: not a readable .npy file: {error}") from None
    if array.ndim != 2:
        raise LayoutError(f"{path}: expected a matrix (2 dimensions), got {array.ndim}")
    return array


def _is_raw(dtype: np.dtype) -> bool:
    """Return whether .npy files hold ``dtype`` as bytes without a type."""
    return element_type(dtype).storage != ""


def as_element_type(path: Path, array: NDArray[Any], dtype: np.dtype | None) -> tuple[NDArray[Any], np.dtype]:
    """Return ``(array, element type)`` to load: the file's own type, or ``dtype`` where its numbers convert. Local.

    NumPy writes bfloat16 and 8-bit floats as bytes without a type: such a file needs ``dtype="bfloat16"`` or the like.

    Raises:
        LayoutError: the file's type is none of pblasmp's and ``dtype`` does not say what to make of it.
    """
    if array.dtype.kind == "V" and dtype is not None and _is_raw(dtype) and array.itemsize == dtype.itemsize:
        return array.view(dtype), dtype
    if dtype is not None:
        if array.dtype.kind not in "iufcb" or (array.dtype.kind == "c" and dtype.kind != "c"):
            raise LayoutError(f"{path}: {array.dtype} does not convert to {dtype.name}")
        return array, dtype
    native = array.dtype.newbyteorder("=")
    if native not in DTYPES.values():
        raise LayoutError(
            f"{path}: dtype {array.dtype} is not supported as it is: give dtype, one of {', '.join(DTYPES)}"
        )
    return array, native


def _piece(descriptor: MatrixDescriptor, coords: tuple[int, int], *, reading: bool) -> Piece:
    parts = []
    for axis, process in zip((descriptor.rows, descriptor.cols), coords, strict=True):
        whole = Axis(axis.extent, max(1, axis.extent))
        parts.append(intersect(whole, 0, axis, process) if reading else intersect(axis, process, whole, 0))
    return Piece(parts[0], parts[1])


def _steps(piece: Piece, order: str, itemsize: int, progress: Progress | None) -> Any:
    total, done = piece.size * itemsize, 0
    if progress is not None:
        progress(0, total)
    for step in piece.split(_STEP, order) if piece.size else []:
        yield step
        done += step.size * itemsize
        if progress is not None:
            progress(done, total)


def read(
    array: NDArray[Any],
    descriptor: MatrixDescriptor,
    coords: tuple[int, int],
    local: NDArray[Any],
    progress: Progress | None,
) -> None:
    """Copy the part of the process at ``coords`` from a mapped file into its local array. Local."""
    piece = _piece(descriptor, coords, reading=True)
    for step in _steps(piece, descriptor.order, local.itemsize, progress):
        copy(local, array, step)


def write(
    array: NDArray[Any],
    descriptor: MatrixDescriptor,
    coords: tuple[int, int],
    local: NDArray[Any],
    progress: Progress | None,
) -> None:
    """Copy the local array of the process at ``coords`` to its place in a mapped file. Local."""
    piece = _piece(descriptor, coords, reading=False)
    for step in _steps(piece, descriptor.order, local.itemsize, progress):
        copy(array, local, step)


def temporary_name(path: Path) -> Path:
    """Return where a file that is to become ``path`` is written first: beside it, hidden, ``.NAME.PID.tmp``. Local."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Have errors of the operating system name ``path``, the file that the caller knows. Local."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def create(path: Path, descriptor: MatrixDescriptor, order: str) -> None:
    """Create an .npy file of the size of a matrix, its space reserved: a full disk is an error now. Local.

    Raises:
        OSError: it cannot be created, or the disk is full.
    """
    dtype = descriptor.dtype
    if _is_raw(dtype):
        dtype = np.dtype(f"V{dtype.itemsize}")
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": order == "F",
        "shape": descriptor.shape,
    }
    with path.open("xb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        start = file.tell()
        file.flush()
        if descriptor.nbytes:
            os.posix_fallocate(file.fileno(), start, descriptor.nbytes)


def map_for_writing(path: Path, dtype: np.dtype) -> NDArray[Any]:
    """Return the array of a file made by ``create``, mapped for writing. Local."""
    array: NDArray[Any] = np.load(path, mmap_mode="r+", allow_pickle=False)
    return array.view(dtype) if array.dtype != dtype else array
