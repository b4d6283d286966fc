# SPDX-License-Identifier: Apache-2.0
"""What each file format supplies, and what all formats share."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...dtypes import DTYPES, FLOAT8, is_foreign
from ...errors import ArgumentError, not_two, short_repr
from ...layout.descriptor import MatrixDescriptor, MemoryOrder
from .temporary import followed

_LONGEST_NAME = 4096  # bytes
_MOST_CHUNKS = 1_000_000
_SMALL_CHUNK = 1 << 16  # bytes
_LARGE_CHUNK = 1 << 26

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes) of this rank's part."""


class Source(Protocol):
    """A matrix in a file that this rank has opened for reading.

    Attributes:
        shape: rows and columns of the matrix.
        dtype: element type in the file.
        order: "C" if rows are contiguous in the file, "F" if columns are.
        tile: rows and columns that the file stores together: (1, 1) for flat files, else a chunk.
    """

    shape: tuple[int, int]
    dtype: np.dtype
    order: MemoryOrder
    tile: tuple[int, int]

    def read(self, rows: slice, cols: slice) -> NDArray[Any]:
        """Return a part; in an F-ordered file, of the transpose. Local."""

    def check(self) -> None:
        """Raise ArgumentError if ranks may have read different versions of the file. Local.

        Called on every rank after parts have been read. All ranks have opened the file before the first is.
        """

    def close(self) -> None:
        """Close the file. Local."""


class Target(Protocol):
    """A matrix in a file that this rank has opened for writing.

    Attributes:
        tile: rows and columns that only one rank may write.
    """

    tile: tuple[int, int]

    def write(self, rows: slice, cols: slice, values: NDArray[Any]) -> None:
        """Write a part, C-contiguous; in an F-ordered file, of the transpose. Local."""

    def sync(self) -> None:
        """Flush what was written to disk. Local."""

    def close(self) -> None:
        """Close the file. Local."""


class RawFile:
    """A C-ordered array in a file from ``offset`` bytes on, read or written in place, without a memory map. Local."""

    tile: tuple[int, int] = (1, 1)

    def __init__(
        self, path: Path, offset: int, shape: tuple[int, int], dtype: np.dtype, *, write: bool = False
    ) -> None:
        self._path, self._offset, self._width, self._item = path, offset, shape[1], dtype
        self._checked = False
        self._file = path.open("r+b" if write else "rb", buffering=0)

    def _runs(self, rows: slice, cols: slice, array: NDArray[Any]) -> Iterator[tuple[memoryview, int]]:
        """Yield each contiguous range of the file: its bytes in ``array``, and where it begins."""
        parts = [array] if array.shape[1] == self._width else list(array)
        for i, part in enumerate(parts):
            start = (rows.start + i) * self._width + cols.start
            data = part.reshape(-1).view(np.uint8)
            yield data.data, self._offset + start * self._item.itemsize

    def read(self, rows: slice, cols: slice) -> NDArray[Any]:
        """Return a part of the array; ArgumentError if the file has become shorter. Local."""
        out = np.empty((rows.stop - rows.start, cols.stop - cols.start), self._item)
        for data, at in self._runs(rows, cols, out):
            done = 0
            while done < len(data):
                got = os.preadv(self._file.fileno(), [data[done:]], at + done)
                if got == 0:
                    raise ArgumentError(
                        f"{self._path}: the file became shorter while it was read: it ends at byte {at + done}"
                    )
                done += got
        return out

    def check(self) -> None:
        """Raise ArgumentError if ranks may have opened different versions of the file. Local."""
        if not self._checked:
            check_version(self._path, self._file.fileno())
            self._checked = True

    def write(self, rows: slice, cols: slice, values: NDArray[Any]) -> None:
        """Write a C-contiguous part of the array. Local."""
        for data, at in self._runs(rows, cols, values):
            done = 0
            while done < len(data):
                done += os.pwrite(self._file.fileno(), data[done:], at + done)

    def sync(self) -> None:
        """Flush what was written to disk. Local."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Local."""
        self._file.close()


def parts_of(dataset: str) -> list[str]:
    """Return the names of the groups and of the dataset in a name such as "run1/A". Local.

    ArgumentError if it is not a name that HDF5 and Zarr can both have.
    """
    parts = dataset.strip("/").split("/")
    size = len(dataset.encode(errors="replace"))
    if "\0" in dataset or not all(parts) or any(part in (".", "..") for part in parts):
        raise ArgumentError(
            f"dataset: expected a name without '.', '..', NUL or empty parts, got {short_repr(dataset)}"
        )
    if size > _LONGEST_NAME:
        raise ArgumentError(f"dataset: expected a name of at most {_LONGEST_NAME} bytes, got {size}")
    try:
        dataset.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"dataset: expected a name in Unicode, got {short_repr(dataset)}") from None
    return parts


def check_version(path: Path, file: int) -> None:
    """Raise ArgumentError if a path no longer leads to the file or directory with this descriptor. Local."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(path.stat(), os.fstat(file)):
            return
    raise ArgumentError(f"{path}: was replaced while it was loaded; load it again")


def check_chunks(
    path: Path, shape: tuple[int, int], chunk: tuple[int, int], dtype: np.dtype
) -> tuple[int, int]:
    """Return a chunk, not larger than the matrix. Local.

    ArgumentError if reading would take far more time or memory than the matrix is worth: a few bytes can describe any
    number of chunks that were never written, or a chunk far larger than the matrix.
    """
    nbytes = math.prod(chunk) * dtype.itemsize
    count = math.prod(-(-extent // max(1, part)) for extent, part in zip(shape, chunk, strict=True))
    if (
        min(chunk) < 1
        or (count > _MOST_CHUNKS and nbytes < _SMALL_CHUNK)
        or nbytes > max(_LARGE_CHUNK, 2 * math.prod(shape) * dtype.itemsize)
    ):
        raise ArgumentError(
            f"{path}: not a readable matrix: {shape[0]} x {shape[1]} {dtype} in {count} chunks of {nbytes} bytes; "
            "store it with chunks of about a megabyte"
        )
    rows, cols = (max(1, min(extent, part)) for extent, part in zip(shape, chunk, strict=True))
    return rows, cols


def reserve(file: int, start: int, nbytes: int) -> None:
    """Reserve space in a file, so that a full disk is an error now, not when the numbers are written. Local."""
    if not nbytes:
        return
    try:
        os.posix_fallocate(file, start, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(file, start + nbytes)  # on a file system that cannot reserve space


def element_type(path: Path, found: np.dtype, wanted: np.dtype | None) -> np.dtype:
    """Return the element type to load a file as: its own, or ``wanted`` if its numbers convert to it. Local.

    Files may hold bfloat16 and 8-bit floats as bytes without a type: they need ``dtype="bfloat16"`` or the like.
    ArgumentError if the numbers do not convert, or the file's type is not supported and ``wanted`` is None.
    """
    native: np.dtype = found.newbyteorder("=")
    if wanted is not None:
        is_bytes = found.kind == "V" and found.names is None and found.subdtype is None
        if is_bytes and is_foreign(wanted) and found.itemsize == wanted.itemsize:
            return wanted
        if (found.kind not in "iufcb" and not is_foreign(found)) or (
            found.kind == "c" and wanted.kind != "c"
        ):
            raise ArgumentError(f"{path}: {found} does not convert to {wanted.name}")
        return wanted
    if native not in (DTYPES | FLOAT8).values():
        raise ArgumentError(
            f"{path}: dtype {found} is not supported: give dtype=, one of {', '.join(DTYPES)}"
        )
    return native


def as_values(values: NDArray[Any], dtype: np.dtype) -> NDArray[Any]:
    """Return what was read as ``dtype``: untyped bytes are reinterpreted, numbers are converted. Local."""
    if values.dtype.kind == "V" and not is_foreign(values.dtype):
        return values.view(dtype)
    return values.astype(dtype, copy=False)


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Make errors of the operating system name ``path``, the file that the caller knows. Local."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename, error.filename2 = str(path), None
        raise


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

    OSError if it cannot be opened; ArgumentError if it is no .npy file, holds no matrix, or is shorter than its header
    says.
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
    """Write the header of a matrix into an empty file, and reserve its space; return where the data begin. Local."""
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
