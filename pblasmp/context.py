# SPDX-License-Identifier: Apache-2.0
"""Context: owns the communicator, the engine and what is made with them."""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from . import creation, io
from .comm import (
    Agreement,
    Communicator,
    RepeatedCalls,
    Running,
    closing,
    is_agreed,
    leave,
    make_boards,
    watch,
    wrap,
)
from .creation import Block, GridLike, Layout
from .engines.choice import EngineName, choose_engine
from .engines.protocol import Engine
from .epilogue import aux_layout
from .errors import ArgumentError, ArgumentTypeError, ClosedError, LayoutError
from .kept import Closable, KeptPlans
from .layout import Grid, MatrixDescriptor
from .layout.grid import integer, one_of
from .logs import logger
from .matrix import DistributedMatrix
from .tuning.measurements import Measured, machine_of, read_file, tuning_file

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import DTypeLike
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self

    from .io import Progress
    from .layout.descriptor import MemoryOrder

__all__ = ["Context"]

_MANY = 1000
_names = itertools.count(1)
_by_name: WeakValueDictionary[str, Context] = WeakValueDictionary()


class Context:
    """The ranks that compute together, and the engine they compute with. A context manager.

    Leaving the ``with`` block closes it, and so does the end of the process. An exception that only some ranks see
    inside the block ends the job: the other ranks raise it too at their next collective call, and are aborted if they
    make none. An exception that only some ranks see inside a collective call, and catch, breaks the context: from then
    on every rank that uses it raises ClosedError, and so does closing it on a rank that has not raised yet.

    Collective over ``comm``.

    Args:
        comm: an mpi4py communicator, a torch.distributed process group, or a one-dimensional device mesh
            (``device_mesh["tp"]``); pblasmp makes its own communicator of the same ranks.
            By default COMM_WORLD; without an MPI launcher, PyTorch's default process group if there is one, as under
            torchrun; otherwise a single process.
        engine: "host" (MPI ranks and the CPU's BLAS), "cublasmp" (GPUs), or "auto": cublasmp when every rank has its
            own GPU and the library loads, else host. ``ctx.engine.why`` says which and why.
        nccl: an NCCL communicator of the same ranks for cublasmp to use, as its address (an int) or nccl4py's
            object; it is never destroyed here. By default the engine makes one.

    Raises:
        ArgumentError: the engine's name is unknown, or ``comm`` is none of these.
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
        self._made_of = comm  # where layers of PyTorch find their device mesh
        self._control = wrap(comm)
        self._control.channel.name = f"the context made at {self._made_at}"
        self.comm = self._control.split([range(self._control.size)])
        self._children: list[Closable] = []
        self._adopted = 0
        self._calls = RepeatedCalls()
        watch(self, self._control)
        try:
            self.engine: Engine = choose_engine(engine, self.comm, nccl)
            self._kept = KeptPlans(self.engine)
            self._control.patient = self.comm.patient
            self.comm.board, self._control.board = make_boards(self.comm, 2)
            self.engine.measured = _measured(self.comm, self.engine)
            logger.info("engine %s on %d ranks: %s", self.engine.name, self.comm.size, self.engine.why)
        except BaseException as error:
            if is_agreed(error, self.comm):
                if hasattr(self, "engine"):
                    self.engine.close()
                self.comm.free()
                self._control.free()
            else:
                leave(self._control, error)
            raise
        self._name = f"{next(_names)}: rank {self.rank} of {self.size}"  # operators of PyTorch take texts
        _by_name[self._name] = self
        self._open = True

    @classmethod
    def _named(cls, name: str) -> Context:
        """Return the context of this process that has this name. Local.

        Raises:
            ClosedError: there is none any more.
        """
        try:
            return _by_name[name]
        except KeyError:
            raise ClosedError(f"context {name} is gone") from None

    @classmethod
    def _all_open(cls) -> list[Context]:
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

    # -- the end of the context

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or is_agreed(error, self._control) or self.size == 1:
            self.close()
        else:
            self._fail(error)

    def close(self) -> None:
        """Give back everything: plans (last made first), the engine, the communicator. Collective; idempotent.

        Collective over the context.

        Raises:
            ClosedError: the context is broken, and this rank has not raised an exception that said so.
        """
        channel = self._control.channel
        channel.look()
        if self._open and (channel.raised or self._control.gone()):  # nothing collective can follow
            self._open = False
            channel.leave(0)
        if not self._open:
            return
        try:
            everyone = closing(self._control, here=True)
        except BaseException as error:
            self._open = not is_agreed(error, self._control)  # otherwise _fail() has to tell the others
            raise
        self._open = False
        if not everyone:  # some rank dropped it without closing it, and is ending
            return
        with Running(self._control, "close"), ExitStack() as last_first:  # every step, even if one fails
            last_first.callback(self._control.free)
            last_first.callback(self.comm.free)
            last_first.callback(self.engine.close)
            for child in self._children:
                last_first.callback(child.close)

    def _fail(self, error: BaseException) -> None:
        """Tell the other ranks of an exception that this rank leaves with; end them if they do not react. Local."""
        if not self._open:
            return
        self._open = False
        if not is_agreed(error, self._control):
            leave(self._control, error)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copy of a layer works with the same ranks

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError(
            "a Context cannot be pickled, nor can a matrix, plan or layer that holds it: it belongs to these "
            "processes. Write a matrix with save(), or gather() its values; of a layer, save its state_dict()"
        )

    def __del__(self) -> None:
        if getattr(self, "_open", False) and self.size > 1 and not self._control.channel.raised:
            warnings.warn(f"{self!r} made at {self._made_at} was never closed", ResourceWarning, stacklevel=1)
        elif hasattr(self, "_control"):
            self._control.board = (
                None  # its memory goes with the context; the other ranks are still told of the end
            )

    # -- for the modules of pblasmp

    def _agreement(self, call: str) -> Agreement:
        """Return the agreement that every collective call of this context begins with. Local.

        Raises:
            ClosedError: the context is closed.
        """
        self._check_open()
        return Agreement(self._control, call)

    def _running(self, call: str, *, checks: bool = True) -> Running:
        """Return the block that goes around every collective call, including its agreements. Local.

        ``with ctx._running("matmul"):`` An exception that only this rank sees inside breaks the context on every rank;
        what the ranks agreed to raise does not.

        Raises:
            ClosedError: the context is closed.
        """
        self._check_open()
        return Running(self._control, call, checks=checks)

    def _check_open(self) -> None:
        """Raise ClosedError if the context is closed. Local."""
        if self._control.channel.cause:
            raise self._control.channel.error()
        if not self._open:
            raise ClosedError(f"this context, made at {self._made_at}, is closed")

    def _check_rank(self, rank: int, name: str) -> None:
        """Raise ArgumentError unless ``rank`` is a rank of the context. Local."""
        if integer(rank, name, 0, ArgumentError) >= self.size:
            raise ArgumentError(f"{name}: expected a rank from 0 to {self.size - 1}, got {rank!r}")

    def _check_descriptor(self, descriptor: MatrixDescriptor) -> None:
        """Raise ArgumentError unless ``descriptor`` fits this context. Local."""
        if not isinstance(descriptor, MatrixDescriptor):
            raise ArgumentTypeError(f"descriptor: expected a MatrixDescriptor, got {descriptor!r}")
        if descriptor.grid.size > self.size:
            raise LayoutError(
                f"descriptor: a grid of {descriptor.grid} needs {descriptor.grid.size} ranks, got {self.size}"
            )

    def _coords(self, descriptor: MatrixDescriptor) -> tuple[int, int] | None:
        """Return this rank's coordinates in the grid, None outside it. Local."""
        grid = descriptor.grid
        return grid.coords(self.rank) if self.rank < grid.size else None

    def _cells(self, descriptor: MatrixDescriptor, local: NDArray[Any]) -> list[NDArray[Any] | None]:
        """Return the local arrays of a matrix's cells, as an exchange takes them: None for other ranks. Local."""
        return [local if rank == self.rank else None for rank in range(descriptor.grid.size)]

    def _allocate(self, descriptor: MatrixDescriptor, *, symmetric: bool = False) -> DistributedMatrix:
        """Return an uninitialised matrix without agreement. Local; collective if ``symmetric``."""
        inside = self.rank < descriptor.grid.size
        shape, ld = (descriptor.local_shape(self.rank), descriptor.lld(self.rank)) if inside else ((0, 0), 1)
        local = self.engine.empty(shape, descriptor.dtype, descriptor.order, ld, symmetric=symmetric)
        return DistributedMatrix(self, descriptor, local)

    def _adopt(self, child: Closable) -> int:
        """Close ``child`` when this context closes; return its number, the same on every rank. Local."""
        self._children.append(child)
        self._adopted += 1
        if len(self._children) == _MANY:
            warnings.warn(
                f"{self!r} made at {self._made_at} has {_MANY} open plans: close those that are no longer used",
                ResourceWarning,
                stacklevel=3,
            )
        return self._adopted

    def _release(self, child: Closable) -> None:
        """Forget a child that has closed itself. Local."""
        self._children.remove(child)

    # -- matrices

    def empty(
        self,
        layout: MatrixDescriptor | Sequence[int],
        *,
        block: Block | None = None,
        grid: GridLike | None = None,
        source: Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
        order: MemoryOrder | None = None,
        symmetric: bool = False,
    ) -> DistributedMatrix:
        """Return an uninitialised matrix. Collective over the context.

        Args:
            layout: a descriptor, or the shape ``(rows, columns)``; with a shape, the arguments below say how.
            block: one block size or ``(mb, nb)``, by default 256.
            grid: a ``Grid``, ``(2, 3)`` or ``"2x3"``; by default the squarest one of all ranks.
            source: process that owns the first block, by default (0, 0).
            dtype: element type, by default float64.
            order: memory order of the local arrays, "C" (the default) or "F".
            symmetric: allocate it in memory that other GPUs can reach (cublasmp), which lets AllGather + GEMM read its
                gathered operand in place. Such memory is freed when the context closes. No effect on the host.

        Raises:
            ArgumentError: the layout is not legal, or its grid has more ranks than the context.
            MemoryError: a GPU has no room for it; raised on every rank.
        """
        wanted = Layout(layout, block=block, grid=grid, source=source, dtype=dtype, order=order)
        with self._agreement("empty") as facts:
            descriptor = wanted.descriptor(self.size)
            facts.update(descriptor=descriptor, symmetric=symmetric)
            if not symmetric:
                return self._allocate(descriptor)
        return self._allocate(descriptor, symmetric=True)  # collective: it agrees itself

    def zeros(
        self,
        layout: MatrixDescriptor | Sequence[int],
        *,
        block: Block | None = None,
        grid: GridLike | None = None,
        source: Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
        order: MemoryOrder | None = None,
    ) -> DistributedMatrix:
        """Return a matrix of zeros; arguments as for :meth:`empty`. Collective over the context."""
        wanted = Layout(layout, block=block, grid=grid, source=source, dtype=dtype, order=order)
        out = creation.new(self, "zeros", wanted)
        out.local[...] = 0
        return out

    def full(
        self,
        layout: MatrixDescriptor | Sequence[int],
        value: complex,
        *,
        block: Block | None = None,
        grid: GridLike | None = None,
        source: Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
        order: MemoryOrder | None = None,
    ) -> DistributedMatrix:
        """Return a matrix whose elements are all ``value``. Collective over the context.

        Args:
            layout, block, grid, source, order: as for :meth:`empty`.
            value: a number.
            dtype: element type; by default float64, or complex128 where ``value`` is complex.

        Raises:
            ArgumentError: the layout is not legal, or ``value`` is complex and the matrix real.
        """
        wanted = Layout(layout, block=block, grid=grid, source=source, dtype=dtype, order=order)
        return creation.full(self, wanted, value)

    def eye(
        self,
        layout: MatrixDescriptor | Sequence[int] | int,
        *,
        block: Block | None = None,
        grid: GridLike | None = None,
        source: Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
        order: MemoryOrder | None = None,
    ) -> DistributedMatrix:
        """Return a matrix with ones on the diagonal and zeros elsewhere. Collective over the context.

        Args:
            layout: a descriptor, the shape, or the number of rows and columns of a square matrix.
            block, grid, source, dtype, order: as for :meth:`empty`.
        """
        shape = (layout, layout) if isinstance(layout, (int, np.integer)) else layout
        wanted = Layout(shape, block=block, grid=grid, source=source, dtype=dtype, order=order)
        return creation.eye(self, wanted)

    def random(
        self,
        layout: MatrixDescriptor | Sequence[int],
        *,
        seed: int | None = None,
        distribution: Literal["uniform", "normal"] = "uniform",
        block: Block | None = None,
        grid: GridLike | None = None,
        source: Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
        order: MemoryOrder | None = None,
    ) -> DistributedMatrix:
        """Return a matrix of random numbers. Collective over the context.

        Element (i, j) depends only on i, j, ``seed`` and the type: any grid, blocks, memory order and number of ranks
        give the same matrix, and a larger matrix has a smaller one in its upper left corner.

        Args:
            layout, block, grid, source, dtype, order: as for :meth:`empty`.
            seed: 0 to 2**64 - 1; by default a new one each time.
            distribution: "uniform" in [0, 1), or "normal" with mean 0 and variance 1. In complex matrices this
                holds for the real and the imaginary parts.

        Raises:
            ArgumentError: the layout, the seed or the distribution is not legal.
        """
        wanted = Layout(layout, block=block, grid=grid, source=source, dtype=dtype, order=order)
        with self._running("random"):
            return creation.random(self, wanted, seed, distribution)

    def empty_aux(self, descriptor: MatrixDescriptor, activation: str) -> Any:
        """Return an uninitialised local array for ``Epilogue(activation, aux=...)`` of a product with this D. Local.

        Args:
            descriptor: the descriptor of D.
            activation: "relu" (the array is a bit mask) or "gelu" (it has D's shape and type), or their derivatives.

        Raises:
            ArgumentError: there is no such activation, or the grid has more ranks than the context.
        """
        self._check_open()
        self._check_descriptor(descriptor)
        if not one_of(activation, ("relu", "gelu", "drelu", "dgelu")):
            raise ArgumentError(f"activation: expected 'relu' or 'gelu', got {activation!r}")
        if self.rank >= descriptor.grid.size:
            return self.engine.empty((0, 0), descriptor.dtype, descriptor.order, 1)
        shape, ld, dtype = aux_layout(descriptor, self.rank, activation)
        return self.engine.empty(shape, dtype, descriptor.order, ld)

    def scatter(
        self,
        array: NDArray[Any] | None,
        descriptor: MatrixDescriptor | None = None,
        root: int = 0,
        *,
        block: Block | None = None,
        grid: GridLike | None = None,
        source: Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
        order: MemoryOrder | None = None,
    ) -> DistributedMatrix:
        """Return a matrix with the values of a NumPy array that only ``root`` has. Collective over the context.

        Args:
            array: on ``root``, a 2D array of the descriptor's shape, of any memory order; elsewhere ignored.
            descriptor: how the matrix is distributed; the values are converted to its dtype. Without one, the
                arguments below say how.
            root: the rank that has the array.
            block, grid, source, order: as for :meth:`empty`.
            dtype: by default the array's, or float64 if that is not an element type of matrices.

        Raises:
            ArgumentError: the array does not fit the descriptor, or is masked; raised on every rank.
        """
        wanted = Layout(descriptor, block=block, grid=grid, source=source, dtype=dtype, order=order)
        with self._running("scatter"):
            return creation.scatter(self, array, wanted, root)

    def from_function(
        self,
        function: Callable[[NDArray[np.int64], NDArray[np.int64]], Any],
        layout: MatrixDescriptor | Sequence[int],
        *,
        block: Block | None = None,
        grid: GridLike | None = None,
        source: Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
        order: MemoryOrder | None = None,
    ) -> DistributedMatrix:
        """Return the matrix whose element (i, j) is ``function(i, j)``. Collective over the context; 0-based.

        Args:
            function: called once on every rank with the row indices of its part as a column and the column indices as a
                row (int64); returns the values, or anything that broadcasts to them. ``numpy.vectorize(f)`` makes one
                of a function of two numbers.
            layout, block, grid, source, dtype, order: as for :meth:`empty`.

        Raises:
            ArgumentError: the values do not fit, or ``function`` takes numbers but no arrays; raised on every rank.
            Exception: what ``function`` raises on any rank; raised on every rank.
        """
        wanted = Layout(layout, block=block, grid=grid, source=source, dtype=dtype, order=order)
        return creation.from_function(self, function, wanted)

    def from_local(self, local: Any, descriptor: MatrixDescriptor) -> DistributedMatrix:
        """Return a matrix over the caller's local arrays, without a copy. Collective over the context.

        Args:
            local: this rank's local array, contiguous along one dimension as the descriptor's order says, with any
                leading dimension; ignored on ranks outside the grid.
            descriptor: how the matrix is distributed.

        Raises:
            ArgumentError: an array has another shape, type or memory order, or is masked; raised on every rank.
        """
        return creation.from_local(self, local, descriptor)

    def from_scalapack(self, local: Any, desc: Sequence[int], grid: Grid) -> DistributedMatrix:
        """Return the matrix that a local array and its ScaLAPACK descriptor describe, without a copy.

        Collective over the context. A sub-matrix that begins at ``ia``, ``ja`` (from 1) is
        ``A[ia - 1 : ia - 1 + m, ja - 1 : ja - 1 + n]`` of the result; ``A.to_scalapack()`` is the way back.

        Args:
            local: this rank's local array, NumPy's or CuPy's, in Fortran order with LLD between columns, or in one
                dimension, column after column; ignored on ranks outside the grid.
            desc: nine integers; the context's number is ignored, LLD is this rank's own. Ignored on ranks outside the
                grid.
            grid: the process grid, over the first ranks of this context.

        Raises:
            ArgumentError: an array does not fit its descriptor, or a descriptor is not legal; raised on every rank.
            RankMismatchError: the ranks gave different descriptors.
        """
        return creation.from_scalapack(self, local, desc, grid)

    def load(
        self,
        path: str | os.PathLike[str],
        descriptor: MatrixDescriptor | None = None,
        *,
        dataset: str | None = None,
        block: Block | None = None,
        grid: GridLike | None = None,
        source: Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
        order: MemoryOrder | None = None,
        progress: Progress | None = None,
    ) -> DistributedMatrix:
        """Return the matrix stored in a file. Collective over the context.

        The ranks read contiguous parts of the file and pass the blocks on to their owners.

        Args:
            path: the file, readable by every rank: HDF5 if it ends in ``.h5`` or ``.hdf5`` (extra ``hdf5``), Zarr if it
                ends in ``.zarr`` (extra ``zarr``), otherwise .npy, in C or F order.
            descriptor: how the matrix is distributed. Without one, the arguments below say how.
            dataset: the dataset in an HDF5 file (needed if it has several), or the array in a Zarr group.
            block, grid, source: as for :meth:`empty`.
            dtype: element type, by default the file's; the numbers are converted.
            order: memory order of the local arrays, by default the file's.
            progress: called on this rank with (bytes done, total bytes) of its part.

        Raises:
            OSError: the file cannot be opened; raised on every rank.
            ArgumentError: it does not hold a readable matrix, or does not fit the descriptor; raised on every rank.
            LibraryNotFoundError: h5py or zarr is missing.
        """
        wanted = Layout(descriptor, block=block, grid=grid, source=source, order=order)
        with self._running("load"):
            return io.load(self, path, dataset, wanted, dtype, progress)


def _measured(comm: Communicator, engine: Engine) -> Measured:
    """Return, on every rank, the times of algorithms on this machine that rank 0 knows. Collective."""
    with Agreement(comm, "Context"):
        mine = engine.machine, engine.libraries
    machine = machine_of(comm, *mine)
    entries = None
    if comm.rank == 0:
        entries = [entry for entry in read_file(tuning_file()) if entry.machine == machine]
    return Measured(machine, not engine.agrees, {entry.bucket: entry for entry in comm.bcast(entries)})
