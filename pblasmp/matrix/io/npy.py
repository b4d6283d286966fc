# SPDX-License-Identifier: Apache-2.0
""".npy files, in C and F order."""

from __future__ import annotations

import io
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...dtypes import is_foreign
from ...errors import ArgumentError, not_two
from ...layout.descriptor import MatrixDescriptor, MemoryOrder
from .source import RawFile, errors_naming, reserve
from .temporary import followed

__all__ = ["Header", "NpyFile", "create", "read_header"]

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,  # in UTF-8: only names of fields differ, which no matrix has
}
_MOST_BYTES = 1 << 16  # of a header, of which NumPy reads 10,000


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of an .npy file says about its matrix, and where the data begin."""

    shape: tuple[int, int]
    dtype: np.dtype
    order: MemoryOrder
    offset: int


def read_header(path: Path) -> Header:
    """Return the header of an .npy file. Local.

    Raises:
        OSError: it cannot be opened.
        ArgumentError: it is not an .npy file, does not hold a matrix, or is shorter than its header says.
    """
    with errors_naming(path):
        real = followed(path)
        mode = real.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ArgumentError(
            f"{path}: not a readable .npy file: expected a file, got a device, socket or pipe"
        )
    with errors_naming(path), real.open("rb") as file:
        start = io.BytesIO(file.read(_MOST_BYTES))  # the header itself may say that it has 4 GiB
        try:
            version = np.lib.format.read_magic(start)
            if version not in _HEADERS:
                raise ValueError(f"version {version} of the format, expected (1, 0), (2, 0) or (3, 0)")
            shape, fortran_order, dtype = _HEADERS[version](start)
            if dtype.hasobject:
                raise ValueError("expected numbers, got Python objects")
        except Exception as error:  # noqa: BLE001 - NumPy parses what is there, and anything may come of it
            what = str(error) or type(error).__name__
            raise ArgumentError(f"{path}: not a readable .npy file: {what}") from None
        offset, size = start.tell(), os.fstat(file.fileno()).st_size
    if len(shape) != 2:
        raise ArgumentError(f"{path}: {not_two(len(shape))}")
    if (
        any(isinstance(extent, bool) for extent in shape)
        or min(shape) < 0
        or offset + shape[0] * shape[1] * dtype.itemsize > size
    ):
        raise ArgumentError(
            f"{path}: not a readable .npy file: the header says {shape[0]} x {shape[1]} {dtype}, "
            f"but there are {size - offset} bytes of data"
        )
    order: MemoryOrder = "F" if fortran_order and min(shape) > 1 else "C"
    return Header((int(shape[0]), int(shape[1])), dtype, order, offset)


class NpyFile(RawFile):
    """An .npy file opened for reading; in F order, its transpose is read. Local.

    Attributes:
        shape, dtype, order: of the matrix, from the header.
    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.shape, self.dtype, self.order = header.shape, header.dtype, header.order
        stored = self.shape[::-1] if self.order == "F" else self.shape
        super().__init__(followed(path), header.offset, stored, header.dtype)


def create(path: Path, descriptor: MatrixDescriptor, order: MemoryOrder) -> int:
    """Write the header of a matrix into an empty file, and reserve its space; return where the data begin. Local.

    Raises:
        OSError: it cannot be written, or the disk is full.
    """
    dtype = descriptor.dtype
    if is_foreign(dtype):
        dtype = np.dtype(f"V{dtype.itemsize}")
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": order == "F",
        "shape": descriptor.shape,
    }
    with path.open("r+b") as file:
        np.lib.format.write_array_header_1_0(file, header)
        start = file.tell()
        file.flush()
        reserve(file.fileno(), start, descriptor.nbytes)
    return start
