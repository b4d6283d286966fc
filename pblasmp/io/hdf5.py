# SPDX-License-Identifier: Apache-2.0
"""HDF5 files through h5py, built with or without parallel HDF5.

Each rank reads through h5py. A matrix is written as a contiguous dataset: rank 0 creates it, and all ranks write their
parts at the position in the file where HDF5 has put it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..dtypes import DTYPES, FLOAT8, is_foreign
from ..errors import ArgumentError, LibraryNotFoundError
from ..extras import install
from ..layout.descriptor import MatrixDescriptor, MemoryOrder

if TYPE_CHECKING:
    import h5py

__all__ = ["Hdf5Dataset", "add", "begin", "check_name", "marked_dtype"]

_MARK = "pblasmp_dtype"


class Hdf5Dataset:
    """A dataset of an HDF5 file opened for reading. Local.

    Args:
        path: the file.
        name: the dataset; None if the file has only one matrix.

    Raises:
        OSError: the file cannot be opened, or is not an HDF5 file.
        ArgumentError: there is no such dataset, or it is not a matrix.
        LibraryNotFoundError: there is no h5py.
    """

    order: MemoryOrder = "C"

    def __init__(self, path: Path, name: str | None) -> None:
        h5py = _h5py()
        with path.open("rb"):  # its errors say what is wrong
            pass
        try:
            self._file = h5py.File(path, "r")
        except OSError as error:
            raise ArgumentError(f"{path}: not a readable HDF5 file: {error}") from None
        try:
            self._data = _find(self._file, path, name)
            self.shape: tuple[int, int] = self._data.shape
            self.dtype = marked_dtype(self._data.dtype, self._data.attrs)
            self.tile: tuple[int, int] = self._data.chunks or (1, 1)
        except BaseException:
            self._file.close()
            raise

    def read(self, rows: slice, cols: slice) -> NDArray[Any]:
        """Return a part. Local."""
        values: NDArray[Any] = self._data[rows, cols]
        return values.view(self.dtype) if is_foreign(self.dtype) else values

    def close(self) -> None:
        """Close the file. Local."""
        self._file.close()


def _h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise LibraryNotFoundError(f"HDF5 files need h5py: {install('hdf5')}") from None
    return h5py


def marked_dtype(stored: np.dtype, attributes: Any) -> np.dtype:
    """Return the element type of stored data, which may be integers that hold bfloat16 or 8-bit floats. Local."""
    mark = attributes.get(_MARK)
    meant = (DTYPES | FLOAT8).get(mark) if isinstance(mark, str) else None
    return meant if meant is not None and meant.itemsize == stored.itemsize else stored


def mark(attributes: Any, dtype: np.dtype) -> None:
    """Record an element type that the format lacks in an attribute. Local."""
    if is_foreign(dtype):
        attributes[_MARK] = dtype.name


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """Return the type in which ``dtype`` is stored: unsigned integers for types that the format lacks. Local."""
    return np.dtype(f"u{dtype.itemsize}") if is_foreign(dtype) else dtype


def _find(file: h5py.File, path: Path, name: str | None) -> h5py.Dataset:
    h5py = _h5py()
    matrices: list[str] = []
    file.visititems(
        lambda key, x: matrices.append(key) if isinstance(x, h5py.Dataset) and x.ndim == 2 else None
    )
    there = f"the file has {', '.join(map(repr, matrices)) or 'no matrices'}"
    if name is None:
        if len(matrices) != 1:
            raise ArgumentError(f"{path}: give dataset= to say which dataset to load; {there}")
        name = matrices[0]
    try:
        found = file[name]
    except (KeyError, ValueError):
        raise ArgumentError(f"{path}: there is no dataset {name!r}; {there}") from None
    if not isinstance(found, h5py.Dataset):
        raise ArgumentError(
            f"{path}: {name!r} is a {type(found).__name__.lower()}, expected a dataset; {there}"
        )
    if found.ndim != 2:
        raise ArgumentError(f"{path}: dataset {name!r}: expected a matrix (2 dimensions), got {found.ndim}")
    return found


def check_name(name: str | None) -> None:
    """Raise ArgumentError unless a dataset can have this name. Local."""
    if name is None:
        raise ArgumentError("dataset: an HDF5 file holds several matrices: give a name, such as dataset='A'")
    if not name.strip("/"):
        raise ArgumentError(f"dataset: expected a name, got {name!r}")


def begin(path: Path, old: Path) -> None:
    """Make an empty file a copy of ``old``, or an HDF5 file without datasets if there is no ``old``. Local.

    Raises:
        OSError: it cannot be written, or the disk is full.
        ArgumentError: ``old`` is not an HDF5 file.
    """
    h5py = _h5py()
    exists = old.exists()
    if exists:
        shutil.copyfile(old, path)
    try:
        h5py.File(path, "r+" if exists else "w", locking=False).close()  # the caller holds a lock
    except OSError as error:
        if not exists:
            raise
        raise ArgumentError(f"{old}: not a readable HDF5 file: {error}") from None


def add(path: Path, name: str, descriptor: MatrixDescriptor) -> int:
    """Create a dataset for a matrix in a file that ``begin`` made; return where its data begin. Local.

    Raises:
        OSError: it cannot be written, or the disk is full.
        ArgumentError: the file has a group of that name.
    """
    h5py = _h5py()
    with h5py.File(path, "r+", locking=False) as file:
        try:
            if isinstance(file.get(name), h5py.Dataset):
                del file[name]
            data = _new_dataset(file, name, descriptor)
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(f"dataset {name!r}: {error}") from None
        mark(data.attrs, descriptor.dtype)
        offset = data.id.get_offset()
    return 0 if offset is None else int(offset)


def _new_dataset(file: h5py.File, name: str, descriptor: MatrixDescriptor) -> h5py.Dataset:
    """Return a new contiguous dataset whose space in the file is allocated."""
    from h5py import h5d, h5p, h5s, h5t

    h5py = _h5py()
    parent, _, last = name.strip("/").rpartition("/")
    group = file.require_group(parent) if parent else file
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_layout(h5d.CONTIGUOUS)
    properties.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5d.FILL_TIME_NEVER)
    kind = h5t.py_create(stored_dtype(descriptor.dtype), logical=True)
    space = h5s.create_simple(descriptor.shape)
    return h5py.Dataset(h5d.create(group.id, last.encode(), kind, space, properties))
