# SPDX-License-Identifier: Apache-2.0
"""Loading and saving matrices: each rank reads or writes contiguous tiles of a file, and ranks exchange blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...comm import Side
from ...dtypes import as_dtype
from ...errors import ArgumentError, ArgumentTypeError, ClosedError, short_repr
from ...layout import Grid, MatrixDescriptor
from ...layout.grid import one_of
from ...runtime.handle import Handle, Matrix
from ...runtime.runtime import Runtime
from ...trust import as_path
from . import formats, hdf5, zarr
from .formats import Progress, RawFile, Source, Target, as_values, element_type, errors_naming
from .temporary import Replacement

if TYPE_CHECKING:
    from typing_extensions import Self

    from ...layout.descriptor import MemoryOrder
    from ..creation import Layout

TILE_BYTES = 8 << 20
"""About how many bytes a rank reads or writes at a time."""


_FORMATS = {".npy": "npy", ".h5": "hdf5", ".hdf5": "hdf5", ".zarr": "zarr"}


def format_of(path: Path) -> str:
    """Return "npy", "hdf5" or "zarr", by the end of the name. Local.

    ArgumentError if it ends otherwise: other programs would take the file for something else.
    """
    found = _FORMATS.get(path.suffix.lower())
    if found is None and path.is_dir():
        return "npy"  # which is no file, as opening it says
    if found is None:
        *most, last = _FORMATS
        raise ArgumentError(f"{path}: expected a name that ends in {', '.join(most)} or {last}")
    return found


def _check_dataset(path: Path, dataset: str | None) -> None:
    kind = format_of(path)
    if dataset is None:
        return
    if not isinstance(dataset, str):
        raise ArgumentTypeError(f"dataset: expected a name, got {short_repr(dataset)}")
    if kind == "npy":
        raise ArgumentError(f"dataset: {path} holds one matrix; names are for .h5, .hdf5 and .zarr")


def open_source(path: Path, dataset: str | None = None) -> Source:
    """Return the matrix of a file, opened for reading. Local.

    Raises:
        OSError: it cannot be opened.
        ArgumentError: it is not a readable file of its kind, or does not hold a matrix.
        LibraryNotFoundError: its format needs a library that is missing.
    """
    _check_dataset(path, dataset)
    kind = format_of(path)
    if kind == "hdf5":
        return hdf5.Hdf5Dataset(path, dataset)
    return formats.NpyFile(path) if kind == "npy" else zarr.ZarrArray(path, dataset)


class _TilesInTurn:
    """How the ranks divide up a matrix to read or write it: they take tiles in turn. Local.

    A tile is a number of whole rows, or a part of a row if one row is longer than a tile; a multiple of ``unit``, the
    rows and columns that belong together.
    """

    def __init__(self, descriptor: MatrixDescriptor, unit: tuple[int, int], nranks: int) -> None:
        (m, n), item = descriptor.shape, descriptor.dtype.itemsize
        high, wide = unit
        row = max(1, n * item)
        if high * row <= TILE_BYTES or n <= wide:
            share = max(1, min(TILE_BYTES // row, -(-m // nranks)))
            block, grid = (-(-share // high) * high, max(1, n)), Grid(nranks, 1)
        else:
            block, grid = (high, max(1, TILE_BYTES // (high * item * wide)) * wide), Grid(1, nranks)
        self.layout = MatrixDescriptor(descriptor.shape, block, grid, dtype=descriptor.dtype)

    def rounds(self) -> Iterator[tuple[slice, slice]]:
        """Yield parts of the matrix, in each of which every rank has at most one tile."""
        (m, n), (mb, nb), (p, q) = self.layout.shape, self.layout.block, self.layout.grid.shape
        for i in range(0, m, mb * p):
            for j in range(0, n, nb * q):
                yield slice(i, min(m, i + mb * p)), slice(j, min(n, j + nb * q))

    def tile(self, part: tuple[slice, slice], rank: int) -> tuple[slice, slice] | None:
        """Return the rows and columns of a rank's tile in a part, None if it has none."""
        if rank >= self.layout.grid.size:
            return None
        out = []
        for which, block, turn in zip(part, self.layout.block, self.layout.grid.coords(rank), strict=True):
            start = which.start + block * turn
            if start >= which.stop:
                return None
            out.append(slice(start, min(which.stop, start + block)))
        return out[0], out[1]


class _FilePart:
    """This rank's local array, window by window, for a matrix as a C-ordered file holds it."""

    def __init__(
        self, ctx: Runtime[Any], descriptor: MatrixDescriptor, local: NDArray[Any], flip: bool
    ) -> None:
        self.context = ctx
        self.descriptor = descriptor.T if flip else descriptor
        self._local = local.T if flip else local
        self._coords = ctx.coords(self.descriptor)

    def window(self, part: tuple[slice, slice]) -> tuple[MatrixDescriptor, NDArray[Any]]:
        """Return the descriptor and the local array of a window of the matrix."""
        d, local = self.descriptor, self._local
        if self._coords is not None:
            rows, cols = ((each.start, each.stop) for each in part)
            local = local[
                d.rows.local_window(self._coords[0], *rows), d.cols.local_window(self._coords[1], *cols)
            ]
        return d[part], local


class _Count:
    """How much of its part a rank has done, for a progress function."""

    def __init__(self, total: int, tell: Progress | None) -> None:
        if not (tell is None or callable(tell)):
            raise ArgumentTypeError(f"progress: expected a function of two numbers, got {short_repr(tell)}")
        self._done, self._total, self._tell = 0, total, tell
        self.add(0)

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._tell is not None:
            self._tell(self._done, self._total)


def load(
    ctx: Runtime[Matrix],
    path: str | os.PathLike[str],
    dataset: str | None,
    layout: Layout,
    dtype: Any,
    progress: Progress | None,
) -> Matrix:
    """Return the matrix of a file. Collective over the context; see ``Context.load``."""
    with ExitStack() as stack:
        with ctx.agreement("load") as facts:
            path = as_path(path)
            source = stack.enter_context(closing(open_source(path, dataset)))
            given = layout.given
            if given is not None and not isinstance(given, MatrixDescriptor):
                raise ArgumentTypeError(f"descriptor: expected a MatrixDescriptor, got {short_repr(given)}")
            if given is None:
                kind = element_type(path, source.dtype, None if dtype is None else as_dtype(dtype))
                layout.given = source.shape
            else:
                if dtype is not None:
                    raise ArgumentError("dtype: cannot be given with a descriptor; expected one or the other")
                kind = element_type(path, source.dtype, given.dtype)
            descriptor = layout.descriptor(ctx.size, dtype=kind, order=source.order)
            # ranks with other working directories would read parts of other files
            facts.update(path=str(path.absolute()), dataset=dataset, descriptor=descriptor)
            if descriptor.shape != source.shape:
                raise ArgumentError(
                    f"{path}: shape is {source.shape}, expected the descriptor's {descriptor.shape}"
                )
            out = ctx.allocate(descriptor)
            part = _FilePart(ctx, descriptor, out.local, source.order == "F")
            tiling = _TilesInTurn(part.descriptor, source.tile, ctx.size)
            count = _Count(out.local.nbytes, progress)
        for window in tiling.rounds():
            inner, local = part.window(window)
            tile = tiling.tile(window, ctx.rank)
            values = None
            with ctx.agreement("load: reading"):
                if tile is not None:
                    with errors_naming(path):
                        values = as_values(source.read(*tile), kind)
                source.check()
                count.add(local.nbytes)
            mine = {} if values is None else {ctx.rank: values}
            cells = ctx.cells(inner, local)
            ctx.engine.put(Side.of(tiling.layout[window]), mine, Side.of(inner), cells, kind)
        with ctx.agreement("load: closing"):  # afterwards no rank has the file open, or locks it
            source.close()
    return out


class OpenFile:
    """An HDF5 file in which several matrices are saved, see ``Context.open_file``. Collective over the context."""

    def __init__(self, ctx: Runtime[Any], path: str | os.PathLike[str]) -> None:
        self._context = ctx
        self._new: Replacement | None = None
        self._state = "closed"
        with ExitStack() as on_error:
            with ctx.agreement("open_file") as facts:
                self.path = as_path(path)
                facts["path"] = str(self.path)
                if format_of(self.path) != "hdf5":
                    raise ArgumentError(
                        f"{self.path}: expected an HDF5 file, which ends in .h5 or .hdf5: only these hold several "
                        "matrices"
                    )
                if ctx.rank == 0:
                    with errors_naming(self.path):
                        self._new = Replacement(self.path, amends=True).begin(on_error)
                        hdf5.begin(self._new.path, self._new.target)
            on_error.pop_all()
        self._state = "open"
        ctx.take_over(self)

    def __repr__(self) -> str:
        return f"OpenFile({str(self.path)!r}, {self._state})"

    def check(self, ctx: Runtime[Any]) -> None:
        """Raise an error unless a matrix of ``ctx`` can be saved here. Local."""
        if ctx is not self._context:
            raise ArgumentError(f"{self.path}: was opened by another context")
        if self._state != "open":
            raise ClosedError(f"{self.path}: {self._state}")

    def add(self, dataset: str | None, descriptor: MatrixDescriptor) -> tuple[Replacement, tuple[Path, int]]:
        """Create a dataset; return the file, and where the data begin. Local; on one rank."""
        assert self._new is not None
        hdf5.check_name(dataset)
        with errors_naming(self.path):
            new = self._new
            return new, (new.path, hdf5.add(new.path, str(dataset), descriptor))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a save: after one that fails the file would be incomplete, so it is dropped. Local.

        Only an ArgumentError before ``begin`` leaves the file as it was.
        """
        self._begun = False
        try:
            yield
        except BaseException as error:
            if self._begun or not isinstance(error, ArgumentError):
                self.close("a matrix could not be saved, so the file was dropped")
            raise

    def begin(self) -> None:
        """Note that a save writes from now on. Local."""
        self._begun = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.close()
            return
        ctx = self._context
        try:
            with ctx.running("open_file"), ctx.agreement("open_file: renaming") as facts:
                facts["path"] = str(self.path)
                self.check(ctx)
                if self._new is not None:
                    with errors_naming(self.path):
                        self._new.commit()
        finally:
            self.close()

    def close(self, why: str = "the file is closed") -> None:
        """Drop the file if it has not got its name; ``why`` is what later saves say. Local."""
        if self._state == "open":
            self._state = why
            self._context.release(self)
            if self._new is not None:
                self._new.__exit__(None, None, None)


def save(
    matrix: Handle,
    path: str | os.PathLike[str] | OpenFile,
    dataset: str | None,
    order: MemoryOrder | None,
    progress: Progress | None,
) -> None:
    """Write a matrix to a file. Collective over the context; see ``DistributedMatrix.save``."""
    ctx, d = matrix.context, matrix.descriptor
    file = path if isinstance(path, OpenFile) else None
    replacement = None
    with nullcontext() if file is None else file.saving(), ExitStack() as stack:
        with ctx.agreement("save") as facts:
            if file is not None:
                file.check(ctx)
            path = path.path if isinstance(path, OpenFile) else as_path(path)
            facts.update(matrix=d, path=str(path), dataset=dataset, order=order, open=file is not None)
            order = _file_order(path, dataset, order, d.order)
            where: tuple[Path, int] | None = None
            if ctx.rank == 0:
                replacement, where = (
                    _create(path, dataset, d, order, stack) if file is None else file.add(dataset, d)
                )
        if file is not None:
            file.begin()
        name, offset = ctx.comm.bcast(where)
        with ctx.agreement("save: opening"):
            part = _FilePart(ctx, d, matrix.local, order == "F")
            target: Target
            if format_of(path) == "zarr":
                target = zarr.ZarrArray(name, write=True)
            else:
                with errors_naming(path):
                    target = RawFile(name, offset, part.descriptor.shape, d.dtype, write=True)
            stack.callback(target.close)
            tiling = _TilesInTurn(part.descriptor, target.tile, ctx.size)
            count = _Count(matrix.local.nbytes, progress)
        for window in tiling.rounds():
            inner, local = part.window(window)
            tile = tiling.tile(window, ctx.rank)
            values = None if tile is None else np.empty([each.stop - each.start for each in tile], d.dtype)
            mine = {} if values is None else {ctx.rank: values}
            cells = ctx.cells(inner, local)
            ctx.engine.get(Side.of(inner), cells, Side.of(tiling.layout[window]), mine, d.dtype)
            with ctx.agreement("save: writing"):
                if tile is not None and values is not None:
                    with errors_naming(path):
                        target.write(*tile, values)
                count.add(local.nbytes)
        with ctx.agreement("save: on disk"), errors_naming(path):
            target.sync()
        if file is not None:
            return
        with ctx.agreement("save: renaming"):
            if replacement is not None:
                with errors_naming(path):
                    replacement.commit()


def _file_order(
    path: Path, dataset: str | None, order: MemoryOrder | None, default: MemoryOrder
) -> MemoryOrder:
    """Return the order to write a file in."""
    _check_dataset(path, dataset)
    if order is not None and not one_of(order, ("C", "F")):
        raise ArgumentError(f"order: expected 'C' or 'F', got {short_repr(order)}")
    if format_of(path) == "npy":
        return order or default
    if order == "F":
        raise ArgumentError(f"order: {path} is in C order like all HDF5 and Zarr files, got 'F'")
    return "C"


def _create(
    path: Path, dataset: str | None, d: MatrixDescriptor, order: MemoryOrder, stack: ExitStack
) -> tuple[Replacement, tuple[Path, int]]:
    """Create the file that will become ``path``; return it, and where its data begin. Local; on one rank."""
    kind = format_of(path)
    with errors_naming(path):
        if kind == "zarr":
            array = zarr.NewArray(path, dataset, d)
            array.begin(stack)
            array.fill()
            return array, (array.array, 0)
        if kind == "hdf5":
            hdf5.check_name(dataset)
        new = Replacement(path, amends=kind == "hdf5").begin(stack)
        if kind == "hdf5":
            hdf5.begin(new.path, new.target)
            return new, (new.path, hdf5.add(new.path, str(dataset), d))
        return new, (new.path, formats.create(new.path, replace(d, ld=None), order))
