# SPDX-License-Identifier: Apache-2.0
"""Zarr arrays in directories, through zarr-python: chunks are read and written by different ranks at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..dtypes import is_foreign
from ..errors import ArgumentError, LibraryNotFoundError
from ..extras import install
from ..layout.descriptor import MatrixDescriptor, MemoryOrder
from .hdf5 import mark, marked_dtype, stored_dtype

__all__ = ["ZarrArray", "create", "place"]

_CHUNK = 1024  # rows and columns of the chunks of a new array


class ZarrArray:
    """A Zarr array opened for reading or writing. Local.

    Args:
        path: the directory of the array, or of the group that it is in.
        name: the array in the group; None if ``path`` is the array.
        write: open it for writing, too.

    Raises:
        OSError: there is no such directory.
        ArgumentError: it is not a Zarr array, or does not hold a matrix.
        LibraryNotFoundError: there is no zarr.
    """

    order: MemoryOrder = "C"

    def __init__(self, path: Path, name: str | None = None, *, write: bool = False) -> None:
        zarr = _zarr()
        path.stat()
        where = path if name is None else path / name
        try:
            self._data = zarr.open_array(str(where), mode="r+" if write else "r")
        except Exception as error:  # noqa: BLE001 - the releases of zarr raise many kinds
            hint = "" if name or not is_group(path) else "; it is a group: give dataset=, the array to load"
            raise ArgumentError(f"{where}: not a readable Zarr array: {error}{hint}") from None
        if len(self._data.shape) != 2:
            raise ArgumentError(f"{where}: expected a matrix (2 dimensions), got {len(self._data.shape)}")
        self.shape: tuple[int, int] = tuple(self._data.shape)
        self.dtype = marked_dtype(np.dtype(self._data.dtype), self._data.attrs)
        self.tile: tuple[int, int] = tuple(self._data.chunks)

    def read(self, rows: slice, cols: slice) -> NDArray[Any]:
        """Return a part. Local."""
        values = np.asarray(self._data[rows, cols])
        return values.view(self.dtype) if is_foreign(self.dtype) else values

    def write(self, rows: slice, cols: slice, values: NDArray[Any]) -> None:
        """Write a part that consists of whole chunks, except at the edges. Local."""
        self._data[rows, cols] = values.view(stored_dtype(values.dtype))

    def sync(self) -> None:
        """Do nothing: each write is finished when it returns. Local."""

    def close(self) -> None:
        """Do nothing: no file is open between reads and writes. Local."""


def _zarr() -> Any:
    try:
        import zarr
    except ImportError:
        raise LibraryNotFoundError(f"Zarr arrays need zarr: {install('zarr')}") from None
    return zarr


def is_group(path: Path) -> bool:
    """Return whether a directory is a Zarr group. Local."""
    try:
        _zarr().open_group(str(path), mode="r")
    except LibraryNotFoundError:
        raise
    except Exception:  # noqa: BLE001 - the releases of zarr raise many kinds
        return False
    return True


def place(path: Path, name: str | None) -> Path:
    """Return the directory that a new array replaces; create its group if there is none. Local.

    Raises:
        ArgumentError: the array would replace something else: a group, or a directory that is not Zarr's.
    """
    zarr = _zarr()
    if name is None:
        where = path
    else:
        parts = name.strip("/").split("/")
        if not all(parts) or any(part in (".", "..") for part in parts):
            raise ArgumentError(f"dataset: expected a name, got {name!r}")
        where = path.joinpath(*parts)
        if not path.exists():
            zarr.open_group(str(path), mode="w-")
        elif not is_group(path):
            raise ArgumentError(f"{path}: is not a Zarr group: it cannot hold dataset {name!r}")
        inner = path
        for part in parts[:-1]:
            inner = inner / part
            if not inner.exists():
                zarr.open_group(str(inner), mode="w-")
            elif not is_group(inner):
                raise ArgumentError(f"{inner}: is not a Zarr group: it cannot hold {parts[-1]!r}")
    if where.exists():
        try:
            zarr.open_array(str(where), mode="r")
        except Exception:  # noqa: BLE001 - the releases of zarr raise many kinds
            what = "a Zarr group: give dataset=" if is_group(where) else "not a Zarr array"
            raise ArgumentError(f"{where}: is {what}; it is not replaced") from None
    return where


def create(path: Path, descriptor: MatrixDescriptor) -> None:
    """Create an array for a matrix in an empty directory. Local."""
    chunks = tuple(min(_CHUNK, max(1, extent)) for extent in descriptor.shape)
    dtype = stored_dtype(descriptor.dtype)
    # Mode "w" would recreate the directory, and lose the lock on it.
    data = _zarr().open_array(str(path), mode="a", shape=descriptor.shape, chunks=chunks, dtype=dtype)
    mark(data.attrs, descriptor.dtype)
