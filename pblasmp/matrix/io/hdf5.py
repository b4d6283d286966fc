# SPDX-License-Identifier: Apache-2.0
"""HDF5 files through h5py, built with or without parallel HDF5.

Each rank reads through h5py. A matrix is written as a contiguous dataset: rank 0 creates it, and all ranks write their
parts at the position in the file where HDF5 has put it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...dtypes import DTYPES, FLOAT8, is_foreign
from ...errors import ArgumentError, LibraryNotFoundError, install, not_two, short_repr
from ...layout.descriptor import MatrixDescriptor, MemoryOrder
from .formats import check_chunks, check_version, errors_naming, parts_of, reserve
from .temporary import PATIENCE_SECONDS, check_kind, followed, is_being_written

if TYPE_CHECKING:
    import h5py

MARK = "pblasmp_dtype"
_MOST_LINKS = 40  # symbolic links in one name
_MOST_NAMES = 10  # in a message
_SLACK = 1 << 16  # bytes for what HDF5 writes about a dataset


class Hdf5Dataset:
    """A dataset of an HDF5 file opened for reading; without a name its only matrix. Local.

    OSError if the file cannot be opened, ArgumentError if there is no such matrix, LibraryNotFoundError without h5py.
    """

    order: MemoryOrder = "C"

    def __init__(self, path: Path, name: str | None) -> None:
        _h5py()
        self._path, self._checked = followed(path), False
        with errors_naming(path):
            check_kind(path, self._path.stat().st_mode, directory=False)
            with self._path.open("rb"):  # its errors say what is wrong
                pass
        try:
            self._file = _opened(self._path)
        except OSError as error:
            why = ": another program writes it at the moment" if error.errno == errno.EAGAIN else ""
            raise ArgumentError(f"{path}: not a readable HDF5 file{why}: {error}") from None
        try:
            self._data = _find(self._file, path, name)
            self.shape: tuple[int, int] = self._data.shape
            try:
                self.dtype = marked_dtype(self._data.dtype, self._data.attrs)
            except (TypeError, ValueError, OSError) as error:  # NumPy has no such type
                raise ArgumentError(f"{path}: dataset {self._data.name!r}: not readable: {error}") from None
            chunks = self._data.chunks
            self.tile = check_chunks(path, self.shape, chunks, self.dtype) if chunks else (1, 1)
        except BaseException as error:
            self._file.close()
            if not isinstance(error, (KeyError, OSError, RuntimeError)):
                raise
            raise ArgumentError(f"{path}: a damaged HDF5 file: {error}") from None

    def read(self, rows: slice, cols: slice) -> NDArray[Any]:
        """Return a part. Local."""
        values: NDArray[Any] = self._data[rows, cols]
        return values.view(self.dtype) if is_foreign(self.dtype) else values

    def check(self) -> None:
        """Raise ArgumentError if ranks may have opened different versions of the file. Local."""
        if not self._checked:
            check_version(self._path, self._file.id.get_vfd_handle())
            self._checked = True

    def close(self) -> None:
        """Close the file. Local."""
        self._file.close()


def _h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise LibraryNotFoundError(f"HDF5 files need h5py: {install('hdf5')}") from None
    return h5py


def _opened(path: Path) -> h5py.File:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return _h5py().File(path, "r")
        except BlockingIOError:
            # A save locks the file that it will replace, and changes nothing in it.
            if is_being_written(path):
                return _h5py().File(path, "r", locking=False)
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def marked_dtype(stored: np.dtype, attributes: Any) -> np.dtype:
    """Return the element type of stored data, which may be integers that hold bfloat16 or 8-bit floats. Local."""
    mark = attributes.get(MARK)
    meant = (DTYPES | FLOAT8).get(mark) if isinstance(mark, str) else None
    return meant if meant is not None and meant.itemsize == stored.itemsize else stored


def mark(attributes: Any, dtype: np.dtype) -> None:
    """Record an element type that the format lacks in an attribute, and only such a type. Local."""
    if is_foreign(dtype):
        attributes[MARK] = dtype.name
    elif MARK in attributes:
        del attributes[MARK]


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """Return the type in which ``dtype`` is stored: unsigned integers for types that the format lacks. Local."""
    return np.dtype(f"u{dtype.itemsize}") if is_foreign(dtype) else dtype


def _find(file: h5py.File, path: Path, name: str | None) -> h5py.Dataset:
    h5py = _h5py()
    if name is None:
        names = list(itertools.islice(_matrices(file), 2))
        if len(names) != 1:
            raise ArgumentError(f"{path}: give dataset= to say which dataset to load; {_what_is_in(file)}")
        name = names[0]
    else:
        parts_of(name)
    try:
        found = file[name]
    except (KeyError, ValueError, OSError, RuntimeError):  # the last of links that lead in a circle
        raise ArgumentError(f"{path}: there is no dataset {short_repr(name)}; {_what_is_in(file)}") from None
    if not isinstance(found, h5py.Dataset):
        raise ArgumentError(
            f"{path}: {name!r} is a {type(found).__name__.lower()}, expected a dataset; {_what_is_in(file)}"
        )
    if found.ndim != 2:
        raise ArgumentError(f"{path}: dataset {name!r}: {not_two(found.ndim)}")
    return found


def _what_is_in(file: h5py.File) -> str:
    names = list(itertools.islice(_matrices(file), _MOST_NAMES + 1))
    more = ", and more" if len(names) > _MOST_NAMES else ""
    return f"the file has {', '.join(map(short_repr, names[:_MOST_NAMES])) or 'no matrices'}{more}"


def _matrices(file: h5py.File) -> Iterator[str]:
    """Yield the names of the matrices of a file, each once. Local."""
    from h5py import h5d, h5o

    seen = set()
    for group, name, address, path in _hard_links(file):
        if address not in seen and h5o.get_info(group, name).type == _h5py().h5o.TYPE_DATASET:
            seen.add(address)
            if h5d.open(group, name).rank == 2:
                yield path.decode(errors="replace")


def _hard_links(file: h5py.File) -> Iterator[tuple[Any, bytes, int, bytes]]:
    """Yield all hard links of a file: the group, the name in it, the address of the object, and the whole name. Local.

    Groups are entered once, even if there is a circle of them.
    """
    from h5py import h5g, h5l, h5o

    waiting, seen = [(file["/"].id, b"")], {h5o.get_info(file["/"].id).addr}
    while waiting:
        group, above = waiting.pop()
        links: list[tuple[bytes, int]] = []
        group.links.iterate(
            lambda name, link, into=links: (
                into.append((name, link.u)) if link.type == h5l.TYPE_HARD else None
            ),
            info=True,
        )
        inner = []
        for name, address in links:
            yield group, name, address, above + name
            if address not in seen and h5o.get_info(group, name).type == h5o.TYPE_GROUP:
                seen.add(address)
                inner.append((h5g.open(group, name), above + name + b"/"))
        waiting.extend(reversed(inner))


def check_name(name: str | None) -> None:
    """Raise ArgumentError unless a dataset can have this name. Local."""
    if name is None:
        raise ArgumentError("dataset: an HDF5 file holds several matrices: give a name, such as dataset='A'")
    parts_of(name)


def begin(path: Path, old: Path) -> None:
    """Make an empty file a copy of ``old``, or an HDF5 file without datasets if there is no ``old``. Local.

    ArgumentError if ``old`` is not an HDF5 file.
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

    A dataset of that name is the same object afterwards if it has the matrix's shape and type and is not chunked.
    Otherwise a new one gets its attributes, and takes its place under all its names. ArgumentError if there is
    something else of that name, or the name leads out of the file.
    """
    h5py = _h5py()
    kind = h5py.h5t.py_create(stored_dtype(descriptor.dtype), logical=True)
    try:
        with h5py.File(path, "r+", locking=False) as file:
            old = _replaced(file, name)
            if old is not None and _is_alike(old, descriptor, kind):
                mark(old.attrs, descriptor.dtype)
                return _offset(old)
        with path.open("r+b") as raw:
            reserve(raw.fileno(), path.stat().st_size, descriptor.nbytes + _SLACK)
        with h5py.File(path, "r+", locking=False) as file:
            old = _replaced(file, name)
            if old is None:
                group, missing = _place(file, name)
                data = _new_dataset(group, missing, descriptor, kind, None)
            else:
                _check_references(file, name, old)
                data = _new_dataset(file, [], descriptor, kind, old)
                _copy_attributes(name, old, data)
                _take_over(file, old, data)
            mark(data.attrs, descriptor.dtype)
            return _offset(data)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"dataset {name!r}: {error}") from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise ArgumentError(f"dataset {name!r}: {error}") from None


def _offset(data: h5py.Dataset) -> int:
    offset = data.id.get_offset()
    return 0 if offset is None else int(offset)


def _replaced(file: h5py.File, name: str) -> h5py.Dataset | None:
    """Return the dataset that one of this name would replace.

    ArgumentError if it is something else, or its numbers are in other files.
    """
    h5py = _h5py()
    group, missing = _place(file, name)
    if len(missing) > 1 or (missing and group.get(missing[0], getlink=True) is None):
        return None
    found = group[missing[0]] if missing else group
    if not isinstance(found, h5py.Dataset):
        raise ArgumentError(f"dataset {name!r}: is a {type(found).__name__.lower()}, which is not replaced")
    properties = found.id.get_create_plist()
    if properties.get_layout() == h5py.h5d.VIRTUAL or properties.get_external_count():
        raise ArgumentError(
            f"dataset {name!r}: its numbers are in other files or datasets, which are not replaced; save under another "
            "name"
        )
    return found


def _place(file: h5py.File, name: str) -> tuple[h5py.Group, list[str]]:
    """Follow a name: return the innermost existing group, and what remains of the name.

    ArgumentError if the name leads through a dataset or into another file.
    """
    h5py = _h5py()
    group, links = file["/"], 0
    rest = [*reversed(parts_of(name))]
    while rest:
        part = rest.pop()
        try:
            link = group.get(part, getlink=True)
        except TypeError:  # a class of links that some other program has defined
            link = h5py.ExternalLink("unknown", "/")
        if link is None:
            break
        if isinstance(link, h5py.ExternalLink):
            raise ArgumentError(
                f"dataset {name!r}: {part!r} is a link into another file, {link.filename}, which is not written: save "
                "to that file"
            )
        if isinstance(link, h5py.SoftLink):
            links += 1
            if links > _MOST_LINKS:
                raise ArgumentError(f"dataset {name!r}: leads through more than {_MOST_LINKS} soft links")
            if link.path.startswith("/"):
                group = file["/"]
            rest.extend(each for each in reversed(link.path.split("/")) if each not in ("", "."))
            continue
        if not rest:
            break
        inner = group[part]
        if not isinstance(inner, h5py.Group):
            raise ArgumentError(
                f"dataset {name!r}: {part!r} is a {type(inner).__name__.lower()}, expected a group"
            )
        group = inner
    else:
        return group, []
    return group, [part, *reversed(rest)]


def _is_alike(old: h5py.Dataset, descriptor: MatrixDescriptor, kind: Any) -> bool:
    """Return whether a matrix can be written over an old dataset as it is in the file."""
    from h5py import h5d

    alike = old.id.get_create_plist().get_layout() == h5d.CONTIGUOUS
    alike = alike and old.shape == descriptor.shape and old.id.get_type() == kind
    return alike and (
        old.size == 0 or old.id.get_offset() is not None
    )  # else it has no space in the file yet


def _new_dataset(
    group: h5py.Group, names: list[str], descriptor: MatrixDescriptor, kind: Any, old: h5py.Dataset | None
) -> h5py.Dataset:
    """Return a new contiguous dataset whose space in the file is allocated; without names, one that has no name yet."""
    from h5py import h5d, h5p, h5s

    h5py = _h5py()
    properties = h5p.create(h5p.DATASET_CREATE)
    if old is not None:
        before = old.id.get_create_plist()
        properties.set_attr_creation_order(before.get_attr_creation_order())
        properties.set_attr_phase_change(*before.get_attr_phase_change())
        properties.set_obj_track_times(before.get_obj_track_times())
    properties.set_layout(h5d.CONTIGUOUS)
    properties.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5d.FILL_TIME_NEVER)
    space = h5s.create_simple(descriptor.shape)
    if names[:-1]:
        group = group.require_group("/".join(names[:-1]))
    name = names[-1].encode() if names else None
    return h5py.Dataset(h5d.create(group.id, name, kind, space, properties, _unicode()))


def _unicode() -> Any:
    """Return how to make links whose names are in UTF-8."""
    from h5py import h5p, h5t

    properties = h5p.create(h5p.LINK_CREATE)
    properties.set_char_encoding(h5t.CSET_UTF8)
    return properties


def _copy_attributes(name: str, old: h5py.Dataset, new: h5py.Dataset) -> None:
    """Give a new dataset the attributes of an old one, with their types; ArgumentError if h5py cannot copy one."""
    from h5py import h5, h5a, h5p, h5s

    in_order = old.id.get_create_plist().get_attr_creation_order() & h5p.CRT_ORDER_TRACKED
    by = h5.INDEX_CRT_ORDER if in_order else h5.INDEX_NAME

    for index in range(h5a.get_num_attrs(old.id)):
        attribute = h5a.open(old.id, index=index, index_type=by)
        try:
            space = attribute.get_space()
            copy = h5a.create(new.id, attribute.name, attribute.get_type(), space)
            if space.get_simple_extent_type() != h5s.NULL:
                values = np.zeros(attribute.shape, attribute.dtype)
                attribute.read(values)
                copy.write(values)
        except (TypeError, ValueError, RuntimeError, OSError) as error:
            raise ArgumentError(
                f"dataset {name!r}: its attribute {attribute.name.decode(errors='replace')!r} cannot be kept: "
                f"{error}; delete the dataset first"
            ) from None


def _take_over(file: h5py.File, old: h5py.Dataset, new: h5py.Dataset) -> None:
    """Give a new dataset all the names of an old one, in the same order of creation where a group keeps it."""
    from h5py import h5, h5o, h5p

    address, text = h5o.get_info(old.id).addr, _unicode()
    for group, name, its_address, _ in list(_hard_links(file)):
        if its_address != address:
            continue
        later: list[bytes] = []
        if group.get_create_plist().get_link_creation_order() & h5p.CRT_ORDER_TRACKED:
            group.links.iterate(later.append, idx_type=h5.INDEX_CRT_ORDER)
            later = later[later.index(name) + 1 :]
        group.unlink(name)
        h5o.link(new.id, group, name, text)
        unused = next(each for each in map(b"%d".__mod__, itertools.count()) if not group.links.exists(each))
        for each in later:
            group.links.move(each, group, unused, text)
            group.links.move(unused, group, each, text)


def _check_references(file: h5py.File, name: str, old: h5py.Dataset) -> None:
    """Raise ArgumentError if an object or region reference in the file points to a dataset. Local."""
    from h5py import h5o

    h5py = _h5py()
    address, seen = h5o.get_info(old.id).addr, set()

    def refers(values: Any) -> bool:
        if isinstance(values, h5py.Reference):  # one to a region is one, too
            with contextlib.suppress(ValueError, RuntimeError, KeyError, OSError):  # it leads nowhere
                return bool(values) and h5o.get_info(file[values].id).addr == address
            return False
        if isinstance(values, np.void):
            return any(refers(values[each]) for each in values.dtype.names or ())
        return isinstance(values, np.ndarray) and any(refers(each) for each in values.flat)

    for group, link, its_address, path in itertools.chain([(file.id, b"/", 0, b"/")], _hard_links(file)):
        if its_address in seen:
            continue
        seen.add(its_address)
        inner = h5o.open(group, link)
        if not isinstance(inner, h5py.h5d.DatasetID) and not h5py.h5a.get_num_attrs(inner):
            continue
        thing = h5py.Group(group)[link]
        found = isinstance(thing, h5py.Dataset) and _has_references(thing.id) and refers(thing[()])
        found = found or any(
            _has_references(thing.attrs.get_id(key)) and refers(thing.attrs[key]) for key in thing.attrs
        )
        if found:
            raise ArgumentError(
                f"dataset {name!r}: {path.decode(errors='replace')!r} refers to it, which can be kept only if the "
                "matrix has the dataset's shape and type and the dataset has no chunks; delete it first"
            )


def _has_references(values: Any) -> bool:
    """Return whether a dataset or an attribute holds references, as its type says. Local."""
    h5py = _h5py()

    def among(dtype: np.dtype) -> bool:
        if dtype.names:
            return any(among(dtype[each]) for each in dtype.names)
        inner = h5py.check_vlen_dtype(dtype)
        return among(inner) if isinstance(inner, np.dtype) else h5py.check_ref_dtype(dtype) is not None

    try:
        return among(values.dtype)
    except TypeError:  # NumPy has no such type
        return False
