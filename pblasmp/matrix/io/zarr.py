# SPDX-License-Identifier: Apache-2.0
"""Zarr arrays in directories, through zarr-python: chunks are read and written by different ranks at once."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...dtypes import is_foreign
from ...errors import ArgumentError, LibraryNotFoundError, install, not_two, short_repr
from ...layout.descriptor import MatrixDescriptor, MemoryOrder
from .formats import check_chunks, errors_naming, parts_of
from .hdf5 import MARK, mark, marked_dtype, stored_dtype
from .temporary import Replacement, followed, is_temporary, put_back

CHUNK = 1024  # rows and columns of the chunks of a new array
_ARRAY, _OLD_ARRAY = "zarr.json", ".zarray"
_RESERVED = (_ARRAY, _OLD_ARRAY, ".zgroup", ".zattrs", ".zmetadata")
_MOST_METADATA = 1 << 26  # bytes of one of these
_SLACK = 1 << 20  # bytes of a chunk's file beyond four times its numbers, which an index of shards may take
_OF_AN_ARRAY = re.compile(r"zarr\.json|\.zarray|\.zattrs|\.zmetadata|c|(c\.)?\d+(\.\d+)*")

# What compresses numbers and transforms them. Others may run what is in the file, as "pickle" does.
_CODECS = (
    *("adler32", "astype", "bitround", "blosc", "bytes", "bz2", "crc32", "crc32c", "delta", "endian"),
    *("fixedscaleoffset", "fletcher32", "gzip", "jenkins_lookup3", "lz4", "lzma", "packbits", "pcodec"),
    *("quantize", "sharding_indexed", "shuffle", "transpose", "zfpy", "zlib", "zstd"),
)


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
        _zarr()
        shown, where = path.joinpath(*_array_parts(name)), followed(path)
        put_back(where)
        with errors_naming(path):
            where.stat()
        if name is not None:
            where = followed(shown)
            put_back(where)
        self._where, self._version = where, _version(where)
        try:
            self._data = _open(where, write=write)
        except Exception as error:  # noqa: BLE001 - the releases of zarr raise many kinds
            hint = "" if name or not is_group(where) else "; it is a group: give dataset=, the array to load"
            raise ArgumentError(f"{shown}: not a readable Zarr array: {error}{hint}") from None
        if len(self._data.shape) != 2:
            raise ArgumentError(f"{shown}: {not_two(len(self._data.shape))}")
        self.shape: tuple[int, int] = tuple(self._data.shape)
        self.dtype = marked_dtype(np.dtype(self._data.dtype), self._data.attrs)
        self.tile = check_chunks(shown, self.shape, tuple(self._data.chunks), self.dtype)
        self._stored = tuple(getattr(self._data, "shards", None) or self._data.chunks)  # in one file
        check_chunks(shown, self.shape, self._stored, self.dtype)

    def read(self, rows: slice, cols: slice) -> NDArray[Any]:
        """Return a part. Local.

        ArgumentError if a chunk is no file, so that reading it may have no end, or is far too large, or not readable.
        """
        (high, wide), item = self._stored, self.dtype.itemsize
        for i in range(rows.start // high, -(-rows.stop // high)):
            for j in range(cols.start // wide, -(-cols.stop // wide)):
                _check_file(self._where / _chunk_key(self._data, (i, j)), 4 * high * wide * item + _SLACK)
        try:
            values = np.asarray(self._data[rows, cols])
        except (OSError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - each codec raises others
            raise ArgumentError(f"{self._where}: a chunk cannot be read: {error}") from None
        return values.view(self.dtype) if is_foreign(self.dtype) else values

    def check(self) -> None:
        """Raise ArgumentError if the array has been replaced since it was opened. Local.

        Chunks are found by their names, so they may be those of the new array; those of the old one may be missing.
        """
        if _version(self._where) != self._version:
            raise ArgumentError(f"{self._where}: was replaced while it was loaded; load it again")

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


def _is_old() -> bool:
    """Return whether this is zarr 2. Local."""
    return str(_zarr().__version__).startswith("2.")


def _open(where: Path, *, write: bool = False) -> Any:
    """Return a zarr array, once its metadata show that reading it runs no code.

    ArgumentError if they ask for a codec that is not known to be harmless, or for Python objects.
    """
    zarr = _zarr()
    for name in _RESERVED:
        path = where / name
        if _check_file(path, _MOST_METADATA) and name in (_ARRAY, _OLD_ARRAY):
            _check_codecs(json.loads(path.read_text(encoding="utf-8")))
    if not write:
        return zarr.open_array(str(where), mode="r")
    # Chunks are always written: zarr takes some values for the fill value that are not, such as a complex -0.
    if _is_old():
        return zarr.open_array(str(where), mode="r+", write_empty_chunks=True)
    with zarr.config.set({"array.write_empty_chunks": True}):
        return zarr.open_array(str(where), mode="r+")


def _check_file(path: Path, most: int) -> bool:
    """Return whether a file is there; raise ArgumentError if it is something else, or larger than it can be. Local."""
    try:
        status = path.stat()
    except OSError:
        return False  # whoever opens it says why it cannot be opened
    if not stat.S_ISREG(status.st_mode):
        raise ArgumentError(f"{path}: is not a file")
    if status.st_size > most:
        raise ArgumentError(f"{path}: has {status.st_size} bytes, expected at most {most}")
    return True


def _chunk_key(data: Any, number: tuple[int, int]) -> str:
    """Return the name of a chunk's file, from the directory of the array. Local."""
    return str(data._chunk_key(number) if _is_old() else data.metadata.encode_chunk_key(number))


def _check_codecs(metadata: Any) -> None:
    if not isinstance(metadata, dict):
        raise ArgumentError("its metadata are not those of an array")
    for kind in (metadata.get("dtype"), metadata.get("data_type")):
        if kind == "object" or "O" in repr(kind):
            raise ArgumentError(f"expected numbers, got Python objects ({kind!r})")
    waiting = [metadata.get(key) for key in ("filters", "compressor", "codecs")]
    while waiting:
        codec = waiting.pop()
        if isinstance(codec, list):
            waiting.extend(codec)
        elif isinstance(codec, dict):
            for name in {"id", "name"} & codec.keys() or {"name"}:  # of old arrays, and of new ones
                if str(codec.get(name)).removeprefix("numcodecs.") not in _CODECS:
                    what = short_repr(codec.get(name))
                    raise ArgumentError(f"codec {what} is not one of those that only decode numbers")
            configuration = codec.get("configuration")
            if isinstance(configuration, dict):
                waiting.extend(configuration.get(key) for key in ("codecs", "index_codecs"))
        elif isinstance(codec, str):
            waiting.append({"name": codec})


def _version(where: Path) -> list[tuple[int, int]]:
    """Return what differs between an array and another one that replaces it. Local."""
    found = []
    for path in (where / _ARRAY, where / _OLD_ARRAY):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append((status.st_ino, status.st_mtime_ns))
    return found


def is_group(path: Path) -> bool:
    """Return whether a directory is a Zarr group. Local."""
    try:
        for name in _RESERVED:
            _check_file(path / name, _MOST_METADATA)  # to open a pipe would take forever
        _zarr().open_group(str(path), mode="r")
    except LibraryNotFoundError:
        raise
    except Exception:  # noqa: BLE001 - the releases of zarr raise many kinds
        return False
    return True


def _array_parts(name: str | None) -> list[str]:
    if name is None:
        return []
    parts = parts_of(name)
    for part in parts:
        if part in _RESERVED or part.startswith("__") or is_temporary(part):
            whose = "pblasmp" if is_temporary(part) else "Zarr"
            raise ArgumentError(
                f"dataset: expected a name, got {name!r}: {part!r} is one that {whose} uses itself"
            )
    return parts


def check_length(path: Path) -> None:
    """Raise OSError if a name is too long for the file system. Local."""
    try:
        path.lstat()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {short_repr(path.name)}", str(path)) from None


class NewArray(Replacement):
    """A new version of an array: ``with NewArray(path, name, d) as new: write new.array; new.commit()``. Local.

    Groups that are missing above it appear together with it.

    Args:
        path: the directory of the array, or of the group that it is in.
        name: the array in the group; None if ``path`` is the array.
        descriptor: the matrix.

    Raises:
        ArgumentError: the array would replace something else: a group, or a directory that is not Zarr's.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, name: str | None, descriptor: MatrixDescriptor) -> None:
        where = followed(path)
        put_back(where)
        self._descriptor, self._parts = descriptor, _array_parts(name)
        self._format: int | None = None  # of the group that the array is in
        while self._parts and where.exists():
            self._format = _check_group(where, self._parts[0])
            where = followed(where / self._parts.pop(0))
            put_back(where)
        for part in self._parts:
            check_length(where.parent / part)
        self._replaced = _replaced(where) if not self._parts and where.exists() else None
        super().__init__(where, directory=True)
        _check_foreseen(self, self._replaced is not None)

    @property
    def array(self) -> Path:
        """The directory to write."""
        return self.path.joinpath(*self._parts)

    def fill(self) -> None:
        """Create the array, and the groups above it, in the new directory. Local."""
        zarr, d, old = _zarr(), self._descriptor, self._replaced
        options: dict[str, Any] = {}
        if old is not None and not _is_old():
            options["zarr_format"] = old.metadata.zarr_format
            if names := getattr(old.metadata, "dimension_names", None):
                options["dimension_names"] = names
        elif self._format is not None and not _is_old():
            options["zarr_format"] = self._format
        for depth in range(len(self._parts)):
            group = self.path.joinpath(*self._parts[:depth])
            zarr.open_group(str(group), mode="a", **options)
        chunks = tuple(min(CHUNK, max(1, extent)) for extent in d.shape)
        # Mode "w" would recreate the directory, and lose the lock on it.
        data = zarr.open_array(
            str(self.array), mode="a", shape=d.shape, chunks=chunks, dtype=stored_dtype(d.dtype), **options
        )
        if old is not None:
            data.attrs.update({key: value for key, value in dict(old.attrs).items() if key != MARK})
        mark(data.attrs, d.dtype)

    def commit(self) -> None:
        """Replace the array, or raise as ``Replacement.commit``. Local."""
        _commit(super(), self.path, self.target, self._parts)


def _commit(new: Any, path: Path, target: Path, parts: list[str]) -> None:
    """Give a directory its name; replace an array that another job has made meanwhile, add to a group what it lacks."""
    try:
        new.commit()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        while parts and target.exists():
            _check_group(target, parts[0])
            path, target, parts = path / parts[0], target / parts[0], parts[1:]
        there = target.exists() and _replaced(target) is not None
        with Replacement(target, directory=True) as inner:
            _check_foreseen(inner, there)
            path.rename(inner.path)
            _commit(inner, inner.path, inner.target, parts)


def _check_foreseen(new: Replacement, there: bool) -> None:
    """Raise ArgumentError if a new version would replace what was not looked at. Local."""
    if new.replaces != there:
        raise ArgumentError(f"{new.target}: another job made or removed it at the same moment; save again")


def _check_group(path: Path, name: str) -> int:
    """Return the version of the format of a group; raise ArgumentError if it is none. Local."""
    if not is_group(path):
        raise ArgumentError(f"{path}: is not a Zarr group: it cannot hold dataset {name!r}")
    return 3 if (path / _ARRAY).exists() else 2


def _replaced(where: Path) -> Any:
    """Return the array that is replaced; raise ArgumentError if it is something else, or not only that. Local."""
    try:
        found = _open(where)
    except Exception:  # noqa: BLE001 - the releases of zarr raise many kinds
        what = "a Zarr group: give dataset=" if is_group(where) else "not a Zarr array"
        raise ArgumentError(f"{where}: is {what}; it is not replaced") from None
    if other := next(_others(where), None):
        raise ArgumentError(
            f"{where}: has {other!r} in it, which is not a part of the array; it is not replaced"
        )
    return found


def _others(where: Path) -> Iterator[str]:
    with os.scandir(where) as entries:
        yield from (each.name for each in entries if not _OF_AN_ARRAY.fullmatch(each.name))
