# SPDX-License-Identifier: Apache-2.0
"""Context: owns the communicator, the engine and what is made with them."""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from . import npy
from .arrays import adopted
from .comm import CLOSING, Agreement, Cell, Communicator, Exchange, Side, is_agreed, leave, watch, wrap
from .dtypes import DTYPES, FLOAT8, as_dtype
from .engines.base import Engine
from .engines.choice import choose_engine
from .epilogue import aux_layout
from .errors import ClosedError, LayoutError
from .layout import Grid, MatrixDescriptor
from .layout.axis import Axis
from .layout.grid import integer, one_of
from .matrix import DistributedMatrix
from .scalapack import column_major_view, described

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import DTypeLike
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self

    from .layout.descriptor import MemoryOrder

__all__ = ["Context"]

EngineName = Literal["auto", "host", "cublasmp"]
DEFAULT_BLOCK = 256
_KEPT = 32
_names = itertools.count(1)
_by_name: WeakValueDictionary[str, Context] = WeakValueDictionary()


class Closable(Protocol):
    """What a context closes: plans."""

    def close(self) -> None:
        """Give back what it holds. Collective."""


Kept = TypeVar("Kept", bound=Closable)


class Context:
    """The ranks that compute together, and the engine they compute with. A context manager.

    Leaving the ``with`` block closes it. An exception that only some ranks see inside the block ends the job: the
    other ranks raise it too when they come to their next collective call, and are aborted when they don't come.

    Collective over ``comm``.

    Args:
        comm: an mpi4py communicator, a torch.distributed process group, or a device mesh of one dimension
            (``device_mesh["tp"]``); a communicator of our own is made beside it.
            By default COMM_WORLD; where mpirun started nothing, PyTorch's default process group if there is one, as
            under torchrun; without either, one process.
        engine: "host" (MPI ranks and the CPU's BLAS), "cublasmp" (GPUs), or "auto": cublasmp when every rank has a GPU
            of its own and the library loads, else host. ``ctx.engine.why`` says which and why.
        nccl: an NCCL communicator of the same ranks that cublasmp shall use, as its address (an int) or nccl4py's
            object; it is never destroyed here. By default the engine makes one.

    Raises:
        LayoutError: the engine's name is unknown, or ``comm`` is none of these.
        LibraryNotFoundError: a library that the engine needs is missing.
        UnsupportedError: torchrun started this process, which has no process group yet.
    """

    def __init__(
        self,
        comm: MPI.Comm | ProcessGroup | DeviceMesh | Communicator | None = None,
        engine: EngineName = "auto",
        *,
        nccl: object = None,
    ) -> None:
        self._open = False
        caller = sys._getframe(1)
        self._made_at = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        self.made_of = comm  # where layers of PyTorch find their device mesh
        self._control = wrap(comm)
        self.comm = self._control.split([range(self._control.size)])
        self._children: list[Closable] = []
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._adopted = 0
        watch(self)
        try:
            self.engine: Engine = choose_engine(engine, self.comm, nccl)
            self._control.patient = self.comm.patient
        except BaseException as error:
            if is_agreed(error, self.comm):
                self.comm.free()
                self._control.free()
            else:
                leave(self._control, error)
            raise
        self.name = f"{next(_names)}: rank {self.rank} of {self.size}"  # operators of PyTorch take texts
        _by_name[self.name] = self
        self._open = True

    @classmethod
    def named(cls, name: str) -> Context:
        """Return the context of this process that has this name. Local.

        Raises:
            ClosedError: it is gone.
        """
        try:
            return _by_name[name]
        except KeyError:
            raise ClosedError(f"context {name} is gone") from None

    @classmethod
    def all_open(cls) -> list[Context]:
        """Return the open contexts of this process, the last made first. Local."""
        return [ctx for ctx in reversed(list(_by_name.values())) if ctx._open]

    @property
    def rank(self) -> int:
        """This process's rank in the context."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.comm.size

    def __repr__(self) -> str:
        state = "" if self._open else ", closed"
        return f"Context(rank {self.rank} of {self.size}, engine {self.engine.name}{state})"

    # -- its life

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or is_agreed(error, self._control) or self.size == 1:
            self.close()
        else:
            self.fail(error)

    def close(self) -> None:
        """Give back everything: plans (last made first), the engine, the communicator. Collective; idempotent.

        Collective over the context.
        """
        if not self._open:
            return
        if self._control.broken:  # ranks have left: nothing collective can follow
            self._open = False
            return
        with Agreement(self._control, CLOSING):
            self._open = False
        with ExitStack() as last_first:  # all of it, whatever fails
            last_first.callback(self._control.free)
            last_first.callback(self.comm.free)
            last_first.callback(self.engine.close)
            for child in self._children:
                last_first.callback(child.close)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of an exception that this rank leaves with; end them if they don't listen. Local."""
        if not self._open:
            return
        self._open = False
        if not is_agreed(error, self._control):
            leave(self._control, error)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copy of a layer works with the same ranks

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Context cannot be pickled, it is of these processes: of a layer save state_dict()")

    def __del__(self) -> None:
        if getattr(self, "_open", False) and self.size > 1:
            warnings.warn(f"{self!r} made at {self._made_at} was never closed", ResourceWarning, stacklevel=1)

    # -- for the modules of pblasmp

    def agreement(self, call: str) -> Agreement:
        """Return what every collective call of this context begins with. Local.

        Raises:
            ClosedError: the context is closed.
        """
        self.check_open()
        return Agreement(self._control, call)

    def check_open(self) -> None:
        """Raise ClosedError if the context is closed. Local."""
        if self._control.broken:
            raise ClosedError("a rank has left this context: nothing collective can follow")
        if not self._open:
            raise ClosedError(f"this context, made at {self._made_at}, is closed")

    def check_rank(self, rank: int, name: str) -> None:
        """Raise LayoutError unless ``rank`` is one of the context. Local."""
        if integer(rank, name, 0) >= self.size:
            raise LayoutError(f"{name}: expected a rank from 0 to {self.size - 1}, got {rank!r}")

    def check_descriptor(self, descriptor: MatrixDescriptor) -> None:
        """Raise LayoutError unless ``descriptor`` fits this context. Local."""
        if not isinstance(descriptor, MatrixDescriptor):
            raise LayoutError(f"descriptor: expected a MatrixDescriptor, got {descriptor!r}")
        if descriptor.grid.size > self.size:
            raise LayoutError(
                f"descriptor: a grid of {descriptor.grid} needs {descriptor.grid.size} ranks, got {self.size}"
            )

    def coords(self, descriptor: MatrixDescriptor) -> tuple[int, int] | None:
        """Return this rank's coordinates in the grid, None outside it. Local."""
        grid = descriptor.grid
        return grid.coords(self.rank) if self.rank < grid.size else None

    def cells(self, descriptor: MatrixDescriptor, local: NDArray[Any]) -> list[NDArray[Any] | None]:
        """Return the local arrays of a matrix's cells as an exchange wants them, None for other ranks. Local."""
        return [local if rank == self.rank else None for rank in range(descriptor.grid.size)]

    def allocate(self, descriptor: MatrixDescriptor, *, symmetric: bool = False) -> DistributedMatrix:
        """Return an uninitialised matrix without agreement. Local; collective if ``symmetric``."""
        inside = self.rank < descriptor.grid.size
        shape, ld = (descriptor.local_shape(self.rank), descriptor.lld(self.rank)) if inside else ((0, 0), 1)
        local = self.engine.empty(shape, descriptor.dtype, descriptor.order, ld, symmetric=symmetric)
        return DistributedMatrix(self, descriptor, local)

    def adopt(self, child: Closable) -> int:
        """Close ``child`` when this context closes; return its number, the same on every rank. Local."""
        self._children.append(child)
        self._adopted += 1
        return self._adopted

    def kept(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """Return what was made for ``key``, a plan say, or make it. Collective over the context, if it is made.

        The last few are kept; those that were used longest ago are closed. Key and order are the same on every rank.
        """
        found: Kept | None = self._kept.pop(key, None)
        if found is None:
            if len(self._kept) >= _KEPT:
                self._kept.popitem(last=False)[1].close()
            found = make()
        self._kept[key] = found
        return found

    def release(self, child: Closable) -> None:
        """Forget a child that has closed itself. Local."""
        self._children.remove(child)

    # -- matrices

    def empty(self, descriptor: MatrixDescriptor, *, symmetric: bool = False) -> DistributedMatrix:
        """Return an uninitialised matrix. Collective over the context.

        Args:
            descriptor: how it lies.
            symmetric: put it in memory that other GPUs reach (cublasmp), which lets AllGather + GEMM read its gathered
                operand in place. Such memory is given back when the context closes. On the host: no difference.

        Raises:
            LayoutError: the grid has more ranks than the context.
            MemoryError: a GPU has no room for it, on every rank.
        """
        with self.agreement("empty") as facts:
            facts.update(descriptor=descriptor, symmetric=symmetric)
            self.check_descriptor(descriptor)
            if not symmetric:
                return self.allocate(descriptor)
        return self.allocate(descriptor, symmetric=True)  # collective: it agrees itself

    def zeros(self, descriptor: MatrixDescriptor) -> DistributedMatrix:
        """Return a matrix of zeros. Collective over the context."""
        out = self._new("zeros", descriptor)
        out.local[...] = 0
        return out

    def empty_aux(self, descriptor: MatrixDescriptor, activation: str) -> Any:
        """Return an uninitialised local array for ``Epilogue(activation, aux=...)`` of a product with this D. Local.

        Args:
            descriptor: D's.
            activation: "relu" (the array is a bit mask) or "gelu" (it has D's shape and type), or their derivatives.

        Raises:
            LayoutError: there is no such activation, or the grid has more ranks than the context.
        """
        self.check_open()
        self.check_descriptor(descriptor)
        if not one_of(activation, ("relu", "gelu", "drelu", "dgelu")):
            raise LayoutError(f"activation: expected 'relu' or 'gelu', got {activation!r}")
        if self.rank >= descriptor.grid.size:
            return self.engine.empty((0, 0), descriptor.dtype, descriptor.order, 1)
        shape, ld, dtype = aux_layout(descriptor, self.rank, activation)
        return self.engine.empty(shape, dtype, descriptor.order, ld)

    def _new(self, call: str, descriptor: MatrixDescriptor) -> DistributedMatrix:
        with self.agreement(call) as facts:
            facts["descriptor"] = descriptor
            self.check_descriptor(descriptor)
            return self.allocate(descriptor)

    def scatter(
        self, array: NDArray[Any] | None, descriptor: MatrixDescriptor, root: int = 0
    ) -> DistributedMatrix:
        """Return a matrix with the values of a NumPy array that only ``root`` has. Collective over the context.

        Args:
            array: on ``root``, a 2D array of the descriptor's shape, of any memory order; elsewhere ignored.
            descriptor: how the matrix lies; the values are converted to its dtype.
            root: the rank that has the array.

        Raises:
            LayoutError: the array does not fit the descriptor, on every rank.
        """
        with self.agreement("scatter") as facts:
            facts.update(descriptor=descriptor, root=root)
            self.check_descriptor(descriptor)
            self.check_rank(root, "root")
            if self.rank == root:
                array = self._fitting(array, descriptor)
            out = self.allocate(descriptor)
            host = out.on_host()
        source = Side(
            _whole(descriptor.shape[0]),
            _whole(descriptor.shape[1]),
            (Cell((0, 0), (root,)),),
            descriptor.order,
        )
        exchange = Exchange(self.comm, source, Side.of(descriptor), descriptor.dtype)
        exchange.run([array if self.rank == root else None], self.cells(descriptor, host))
        self.engine.from_host(out.local, host)
        return out

    @staticmethod
    def _fitting(array: Any, descriptor: MatrixDescriptor) -> NDArray[Any]:
        """Return ``array`` as a NumPy array that has the descriptor's shape and converts to its dtype."""
        values = _numbers(array, "array")
        if values.shape != descriptor.shape:
            raise LayoutError(f"array: shape is {values.shape}, the descriptor's {descriptor.shape}")
        if values.dtype.kind == "c" and descriptor.dtype.kind != "c":
            raise LayoutError(f"array: {values.dtype} does not convert to {descriptor.dtype.name}")
        return values

    def from_function(
        self, function: Callable[[NDArray[np.int64], NDArray[np.int64]], Any], descriptor: MatrixDescriptor
    ) -> DistributedMatrix:
        """Return the matrix whose element (i, j) is ``function(i, j)``. Collective over the context; 0-based.

        Args:
            function: called once on every rank with a column of row indices and a row of column indices (int64) of its
                part; returns the values, or anything that broadcasts to them.
            descriptor: how the matrix lies.

        Raises:
            Exception: what ``function`` raises on any rank, on every rank.
        """
        with self.agreement("from_function") as facts:
            facts["descriptor"] = descriptor
            self.check_descriptor(descriptor)
            if not callable(function):
                raise LayoutError(f"function: expected one of i and j, got {function!r}")
            out = self.allocate(descriptor)
            host = out.on_host()
            if self.rank < descriptor.grid.size:
                rows, cols = descriptor.global_indices(self.rank)
                values = _numbers(function(rows[:, None], cols[None, :]), "from_function")
                if values.dtype.kind == "c" and descriptor.dtype.kind != "c":
                    raise LayoutError(
                        f"from_function: {values.dtype} does not convert to {descriptor.dtype.name}"
                    )
                try:
                    host[...] = values
                except ValueError as error:
                    raise LayoutError(
                        f"from_function: {error}; expected values of shape {host.shape}"
                    ) from None
        self.engine.from_host(out.local, host)
        return out

    def from_local(self, local: Any, descriptor: MatrixDescriptor) -> DistributedMatrix:
        """Return a matrix over local arrays that the caller has, without a copy. Collective over the context.

        Args:
            local: this rank's local array, one contiguous dimension as the descriptor's order says, its leading
                dimension whatever it is; on ranks outside the grid anything.
            descriptor: how the matrix lies.

        Raises:
            LayoutError: an array has another shape, type or memory order, on every rank.
        """
        with self.agreement("from_local") as facts:
            facts["descriptor"] = descriptor
            self.check_descriptor(descriptor)
            if self.rank >= descriptor.grid.size:
                return self.allocate(descriptor)
            array = adopted(self.engine, local, "local array", descriptor.dtype)
            expected = descriptor.local_shape(self.rank)
            if array.shape != expected:
                raise LayoutError(f"local array: shape is {array.shape}, expected {expected}")
            if array.dtype != self.engine.stored(descriptor.dtype):
                raise LayoutError(f"local array: dtype is {array.dtype}, expected {descriptor.dtype.name}")
            contiguous, other = (1, 0) if descriptor.order == "C" else (0, 1)
            item, apart = array.itemsize, array.strides[other]
            if array.size and (
                (expected[contiguous] > 1 and array.strides[contiguous] != item)
                or (expected[other] > 1 and (apart < expected[contiguous] * item or apart % item))
            ):
                raise LayoutError(
                    f"local array: strides are {array.strides} bytes, expected contiguous "
                    f"{'rows (C order)' if descriptor.order == 'C' else 'columns (F order)'}, "
                    f"a multiple of {item} bytes apart"
                )
            return DistributedMatrix(self, descriptor, array)

    def from_scalapack(self, local: Any, desc: Sequence[int], grid: Grid) -> DistributedMatrix:
        """Return the matrix that a local array and its ScaLAPACK descriptor mean, without a copy.

        Collective over the context. A sub-matrix that begins at ``ia``, ``ja`` (from 1) is
        ``A[ia - 1 : ia - 1 + m, ja - 1 : ja - 1 + n]`` of the result; ``A.to_scalapack()`` is the way back.

        Args:
            local: this rank's local array, NumPy's or CuPy's, in Fortran order with LLD between columns, or in one
                dimension, column after column; on ranks outside the grid anything.
            desc: nine integers, the context's number not looked at, LLD this rank's own; on ranks outside the grid
                anything.
            grid: the process grid, over the first ranks of this context.

        Raises:
            LayoutError: an array does not fit its descriptor, or a descriptor is not legal, on every rank.
            RankMismatchError: the ranks gave different descriptors.
        """
        with self.agreement("from_scalapack") as facts:
            facts["grid"] = grid
            if not isinstance(grid, Grid):
                raise LayoutError(f"grid: expected a Grid, got {grid!r}")
            inside = self.rank < grid.size
            if inside:
                local = self.engine.adopt(local)
                if not isinstance(desc, (Sequence, np.ndarray)):
                    raise LayoutError(f"desc: expected nine integers, got {desc!r}")
            mine = (list(desc), str(local.dtype)) if inside else None
        first = self.comm.bcast(mine)
        with self.agreement("from_scalapack: descriptor"):
            numbers, kind = first if mine is None else mine
            descriptor, lld = described(numbers, kind, grid)
            self.check_descriptor(descriptor)
            if inside:
                local = column_major_view(local, descriptor.local_shape(self.rank), lld)
        return self.from_local(local, descriptor)

    def load(
        self,
        path: str | os.PathLike[str],
        descriptor: MatrixDescriptor | None = None,
        *,
        grid: Grid | None = None,
        block: int | Sequence[int] | None = None,
        source: Sequence[int] = (0, 0),
        order: MemoryOrder | None = None,
        dtype: DTypeLike | None = None,
        progress: npy.Progress | None = None,
    ) -> DistributedMatrix:
        """Return the matrix of an .npy file, each rank reading its own blocks. Collective over the context.

        Args:
            path: the file, seen by every rank; in C or F order.
            descriptor: how the matrix shall lie. Without one, the rest says it:
            grid: by default the squarest one of all ranks.
            block: one block size or ``(mb, nb)``, by default 256.
            source: process that owns the first block.
            order: memory order of the local arrays, by default the file's.
            dtype: element type, by default the file's; the numbers are converted.
            progress: called on this rank with (bytes done, bytes in all) of its part.

        Raises:
            OSError: the file cannot be opened, on every rank.
            LayoutError: it is not a 2D .npy file, or does not fit the descriptor, on every rank.
        """
        with self.agreement("load") as facts:
            path = Path(path)
            if descriptor is not None:
                self.check_descriptor(descriptor)
            array = npy.map_file(path)
            wanted = (
                descriptor.dtype if descriptor is not None else None if dtype is None else as_dtype(dtype)
            )
            array, kind = npy.as_element_type(path, array, wanted)
            if descriptor is None:
                shape = (block, block) if isinstance(block, int) else block or (DEFAULT_BLOCK, DEFAULT_BLOCK)
                grid = Grid.squarest(self.size) if grid is None else grid
                order = order or ("F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C")
                descriptor = MatrixDescriptor(array.shape, shape, grid, source, kind, order)
            facts.update(path=str(path), descriptor=descriptor)
            self.check_descriptor(descriptor)
            if descriptor.shape != array.shape:
                raise LayoutError(f"{path}: shape is {array.shape}, the descriptor's {descriptor.shape}")
            out = self.allocate(descriptor)
            host = out.on_host()
        coords = self.coords(out.descriptor)
        with self.agreement("load: reading"):
            if coords is not None:
                npy.read(array, out.descriptor, coords, host, progress)
        self.engine.from_host(out.local, host)
        return out


def _numbers(values: Any, name: str) -> NDArray[Any]:
    """Return ``values`` as a NumPy array, or raise LayoutError where they are no numbers. Local."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of several lengths
        raise LayoutError(f"{name}: {error}") from None
    if array.dtype.kind not in "biufc" and array.dtype not in (DTYPES | FLOAT8).values():
        raise LayoutError(f"{name}: expected numbers, got {array.dtype}")
    return array


def _whole(extent: int) -> Axis:
    return Axis(extent, max(1, extent))
