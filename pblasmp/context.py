# SPDX-License-Identifier: Apache-2.0
"""Context: the public face of the ranks that compute together; it makes matrices."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from .epilogue import aux_layout
from .errors import ArgumentError, short_repr
from .layout import Grid, MatrixDescriptor
from .layout.grid import one_of
from .matrix import creation, io
from .matrix.creation import Layout, LayoutKeywords
from .matrix.distributed import DistributedMatrix
from .runtime.runtime import Runtime

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import DTypeLike
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from .comm import Communicator
    from .engines.choose import EngineName
    from .matrix.io import Progress


class Context(Runtime[DistributedMatrix]):
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

    Attributes:
        engine: ``engine.name``, and ``engine.why`` it was chosen; ``engine.xp`` is the module of local arrays, NumPy or
            CuPy, and ``engine.device`` this rank's GPU, None on the host.
        comm: the ranks: ``comm.rank``, ``comm.size``, ``comm.allgather(value)``, ``comm.bcast(value, root)``.

    Raises:
        ArgumentError: the engine's name is unknown, or ``comm`` is none of these.
        LibraryNotFoundError: a library that the engine needs is missing.
        UnsupportedError: torchrun started this process, which has no process group yet.
    """

    matrix_type = DistributedMatrix

    def __init__(
        self,
        comm: MPI.Comm | ProcessGroup | DeviceMesh | Communicator | None = None,
        engine: EngineName = "auto",
        *,
        nccl: object = None,
    ) -> None:
        super().__init__(comm, engine, nccl)

    def __dir__(self) -> list[str]:
        """Return the names for users: not those that the modules of pblasmp have from ``Runtime``."""
        own = {name for name in vars(Context) if name != "matrix_type"}
        hidden = {name for name in super().__dir__() if name.startswith("_")}
        return sorted(own | hidden | {"close", "comm", "engine", "rank", "size"})

    def empty(
        self,
        descriptor: MatrixDescriptor | Sequence[int],
        *,
        symmetric: bool = False,
        **how: Unpack[LayoutKeywords],
    ) -> DistributedMatrix:
        """Return an uninitialized matrix. Collective over the context.

        Args:
            descriptor: a descriptor, or the shape ``(rows, columns)``; with a shape, the arguments below say how.
            block: one block size or ``(mb, nb)``, by default 256, or less if that leaves a process without a part.
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
        wanted = Layout(descriptor, how)
        with self.agreement("empty") as facts:
            descriptor = wanted.descriptor(self.size)
            facts.update(descriptor=descriptor, symmetric=symmetric)
            if not symmetric:
                return self.allocate(descriptor)
        return self.allocate(descriptor, symmetric=True)  # collective: it agrees itself

    def zeros(
        self,
        descriptor: MatrixDescriptor | Sequence[int],
        **how: Unpack[LayoutKeywords],
    ) -> DistributedMatrix:
        """Return a matrix of zeros; arguments as for :meth:`empty`. Collective over the context."""
        wanted = Layout(descriptor, how)
        out = creation.new(self, "zeros", wanted)
        with self.engine.on_device():
            out.local[...] = 0
        return out

    def ones(
        self,
        descriptor: MatrixDescriptor | Sequence[int],
        **how: Unpack[LayoutKeywords],
    ) -> DistributedMatrix:
        """Return a matrix of ones; arguments as for :meth:`empty`. Collective over the context."""
        return creation.full(self, Layout(descriptor, how), 1, "ones")

    def full(
        self,
        descriptor: MatrixDescriptor | Sequence[int],
        value: complex,
        **how: Unpack[LayoutKeywords],
    ) -> DistributedMatrix:
        """Return a matrix whose elements are all ``value``. Collective over the context.

        Args:
            descriptor, block, grid, source, order: as for :meth:`empty`.
            value: a number.
            dtype: element type; by default float64, or complex128 if ``value`` is complex.

        Raises:
            ArgumentError: the layout is not legal, or ``value`` is complex and the matrix real.
        """
        wanted = Layout(descriptor, how)
        return creation.full(self, wanted, value)

    def eye(
        self,
        descriptor: MatrixDescriptor | Sequence[int] | int,
        **how: Unpack[LayoutKeywords],
    ) -> DistributedMatrix:
        """Return a matrix with ones on the diagonal and zeros elsewhere. Collective over the context.

        Args:
            descriptor: a descriptor, the shape, or the number of rows and columns of a square matrix.
            block, grid, source, dtype, order: as for :meth:`empty`.
        """
        shape = (descriptor, descriptor) if isinstance(descriptor, (int, np.integer)) else descriptor
        wanted = Layout(shape, how)
        return creation.eye(self, wanted)

    def random(
        self,
        descriptor: MatrixDescriptor | Sequence[int],
        *,
        seed: int | None = None,
        distribution: Literal["uniform", "normal"] = "uniform",
        **how: Unpack[LayoutKeywords],
    ) -> DistributedMatrix:
        """Return a matrix of random numbers. Collective over the context.

        Element (i, j) depends only on i, j, ``seed`` and the type: any grid, blocks, memory order and number of ranks
        give the same matrix, and a larger matrix has a smaller one in its upper left corner.

        Args:
            descriptor, block, grid, source, dtype, order: as for :meth:`empty`.
            seed: 0 to 2**64 - 1; by default a new one each time.
            distribution: "uniform" in [0, 1), or "normal" with mean 0 and variance 1. In complex matrices this
                holds for the real and the imaginary parts.

        Raises:
            ArgumentError: the layout, the seed or the distribution is not legal.
        """
        wanted = Layout(descriptor, how)
        with self.running("random"):
            return creation.random(self, wanted, seed, distribution)

    def empty_aux(self, descriptor: MatrixDescriptor, activation: str) -> Any:
        """Return an uninitialized local array for ``Epilogue(activation, aux=...)`` of a product with this D. Local.

        Args:
            descriptor: the descriptor of D.
            activation: "relu" (the array is a bit mask) or "gelu" (it has D's shape and type), or their derivatives.

        Raises:
            ArgumentError: there is no such activation, or the grid has more ranks than the context.
        """
        self.check_open()
        self.check_descriptor(descriptor)
        if not one_of(activation, ("relu", "gelu", "drelu", "dgelu")):
            raise ArgumentError(f"activation: expected 'relu' or 'gelu', got {short_repr(activation)}")
        if self.rank >= descriptor.grid.size:
            return self.engine.empty((0, 0), descriptor.dtype, descriptor.order, 1)
        shape, ld, dtype = aux_layout(descriptor, self.rank, activation)
        return self.engine.empty(shape, dtype, descriptor.order, ld)

    def scatter(
        self,
        array: NDArray[Any] | None,
        descriptor: MatrixDescriptor | None = None,
        root: int = 0,
        **how: Unpack[LayoutKeywords],
    ) -> DistributedMatrix:
        """Return a matrix with the values of a NumPy array that only ``root`` has. Collective over the context.

        Args:
            array: on ``root``, a 2D array of the descriptor's shape, of any memory order; elsewhere ignored.
            descriptor: how the matrix is distributed; the values are converted to its dtype. Without one, the
                arguments below say how.
            root: the rank that has the array.
            block, grid, source, order: as for :meth:`empty`.
            dtype: by default the array's. Integers and other types that matrices do not have need it.

        Raises:
            ArgumentError: the array does not fit the descriptor, is masked, or holds integers and ``dtype`` is missing;
                raised on every rank.
        """
        wanted = Layout(descriptor, how)
        with self.running("scatter"):
            return creation.scatter(self, array, wanted, root)

    def from_function(
        self,
        function: Callable[[NDArray[np.int64], NDArray[np.int64]], Any],
        descriptor: MatrixDescriptor | Sequence[int],
        **how: Unpack[LayoutKeywords],
    ) -> DistributedMatrix:
        """Return the matrix whose element (i, j) is ``function(i, j)``. Collective over the context; 0-based.

        Args:
            function: called once on every rank with the row indices of its part as a column and the column indices as a
                row (int64); returns the values, or anything that broadcasts to them. ``numpy.vectorize(f)`` makes one
                of a function of two numbers. The indices are NumPy's. The values may be ``ctx.engine.xp``'s: a function
                that begins with ``i, j = map(ctx.engine.xp.asarray, (i, j))`` is computed on the GPU, if there is one.
            descriptor, block, grid, source, dtype, order: as for :meth:`empty`.

        Raises:
            ArgumentError: the values do not fit, or ``function`` takes numbers but no arrays; raised on every rank.
            Exception: what ``function`` raises on any rank; raised on every rank.
        """
        wanted = Layout(descriptor, how)
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

    def from_dlpack_shards(
        self, shard: Any, axis: int = 0, *, dtype: DTypeLike | None = None
    ) -> DistributedMatrix:
        """Return a matrix whose rows, or columns, the ranks have in parts, without a copy. Collective over the context.

        Rank 0 has the first part. All have equally many rows but for the last ones, which may have fewer.
        ``A.to_dlpack_shard()`` is the way back.

        Args:
            shard: this rank's part, or the array that it is a part of: a two-dimensional array that shares its memory
                by DLPack (NumPy's, CuPy's, PyTorch's, JAX's), with contiguous rows on all ranks, or contiguous columns;
                a ``jax.Array`` that is split along one axis, with one device in each process; or a DTensor placed
                ``Shard(0)`` or ``Shard(1)`` on a mesh of the context's ranks. JAX's arrays are not to be written to:
                on CPUs the matrix is read-only.
            axis: 0 if the ranks have rows, 1 if they have columns. Arrays that know it say it themselves.
            dtype: the type of the elements, for 8-bit floats of libraries that have none, such as CuPy: then bytes are
                such floats. Of other arrays it is only compared.

        Raises:
            ArgumentError: the parts make no matrix, an array does not share its memory, is not of type ``dtype``,
                or is split otherwise; raised on every rank.
            RankMismatchError: the parts have several types.
        """
        return creation.from_shards(self, shard, axis, dtype)

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
        progress: Progress | None = None,
        **how: Unpack[LayoutKeywords],
    ) -> DistributedMatrix:
        """Return the matrix stored in a file. Collective over the context.

        The ranks read contiguous parts of the file and pass the blocks on to their owners.

        Args:
            path: the file, readable by every rank: HDF5 if it ends in ``.h5`` or ``.hdf5`` (extra ``hdf5``), Zarr if it
                ends in ``.zarr`` (extra ``zarr``), NumPy's format, in C or F order, if it ends in ``.npy``.
            descriptor: how the matrix is distributed. Without one, the arguments below say how.
            dataset: the dataset in an HDF5 file (needed if it has several), or the array in a Zarr group.
            block, grid, source: as for :meth:`empty`.
            dtype: element type, by default the file's; the numbers are converted.
            order: memory order of the local arrays, by default the file's.
            progress: called on this rank with (bytes done, total bytes) of its part.

        Raises:
            OSError: the file cannot be opened; raised on every rank.
            ArgumentError: its name ends otherwise, it does not hold a readable matrix, or does not fit the descriptor;
                raised on every rank.
            RankMismatchError: the ranks name different files, also by one relative name in different working
                directories.
            LibraryNotFoundError: h5py or zarr is missing.
        """
        dtype = how.pop("dtype", None)
        wanted = Layout(descriptor, how)
        with self.running("load"):
            return io.load(self, path, dataset, wanted, dtype, progress)

    def open_file(self, path: str | os.PathLike[str]) -> io.OpenFile:
        """Return an HDF5 file to save several matrices in. Collective over the context.

        ``with ctx.open_file("R.h5") as file: A.save(file, dataset="A"); B.save(file, dataset="B")``. At the end of the
        block, which is collective, the file gets its name. If a matrix cannot be saved, or an exception leaves the
        block, the file is dropped, and an older one is as it was. Its other datasets are copied once, when it is
        opened; each save in a file that is not open copies them. Until the end of the block nobody else can write it.

        Args:
            path: the file, writable by every rank; it ends in ``.h5`` or ``.hdf5`` (extra ``hdf5``).

        Raises:
            OSError: the file cannot be written.
            ArgumentError: ``path`` does not name an HDF5 file, it holds something else, or is in use.
            LibraryNotFoundError: h5py is missing.
        """
        with self.running("open_file"):
            return io.OpenFile(self, path)
