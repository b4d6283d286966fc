# SPDX-License-Identifier: Apache-2.0
"""DistributedMatrix: a descriptor and this rank's local array."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import npy
from .comm import Cell, Exchange, Side
from .errors import LayoutError
from .layout import MatrixDescriptor, Trapezoid
from .layout.axis import Axis
from .layout.grid import one_of
from .scalapack import ScalapackMatrix, leading_dimension

if TYPE_CHECKING:
    from .context import Context
    from .layout.level3 import Diag, Uplo

__all__ = ["DistributedMatrix"]


P = ParamSpec("P")
Returned = TypeVar("Returned")


def _running(
    method: Callable[Concatenate[DistributedMatrix, P], Returned],
) -> Callable[Concatenate[DistributedMatrix, P], Returned]:
    """Have an exception that only this rank sees inside a method break its context on every rank."""

    @wraps(method)
    def run(self: DistributedMatrix, /, *args: P.args, **kwargs: P.kwargs) -> Returned:
        with self.context.running(method.__name__):
            return method(self, *args, **kwargs)

    return run


class DistributedMatrix:
    """A matrix spread over the ranks of a context. Made by the context's methods, not directly. Local.

    Attributes:
        context: the context it belongs to.
        descriptor: how it lies.
    """

    __array_ufunc__ = None  # NumPy arrays leave operators to us

    def __init__(
        self,
        context: Context,
        descriptor: MatrixDescriptor,
        local: Any,
        transpose_of: DistributedMatrix | None = None,
        part_of: tuple[DistributedMatrix, int, int] | None = None,
    ) -> None:
        self.context = context
        self.descriptor = descriptor
        self._local = local
        self.transpose_of = transpose_of
        self._part_of = part_of

    @property
    def local(self) -> Any:
        """This rank's local array: NumPy (host) or CuPy (cublasmp); 0 × 0 on ranks outside the grid. Local."""
        return self._local

    @property
    def shape(self) -> tuple[int, int]:
        """Global ``(rows, columns)``."""
        return self.descriptor.shape

    @property
    def dtype(self) -> np.dtype:
        """Element type."""
        return self.descriptor.dtype

    def __repr__(self) -> str:
        return f"DistributedMatrix({self.descriptor}; rank {self.context.rank} holds {self._local.shape})"

    # -- views: nothing moves

    @property
    def T(self) -> DistributedMatrix:  # noqa: N802 - the name NumPy uses
        """The transpose as a view of the same memory. Local."""
        return DistributedMatrix(self.context, self.descriptor.T, self._local.T, transpose_of=self)

    @property
    def H(self) -> DistributedMatrix:  # noqa: N802 - the usual name
        """The conjugate transpose: a view for real types, a new matrix for complex ones. Local.

        In a product ``op_a="C"`` does the same without a copy.
        """
        if self.dtype.kind != "c":
            return self.T
        return DistributedMatrix(self.context, replace(self.descriptor.T, ld=None), self._local.conj().T)

    def __getitem__(self, index: tuple[slice, slice]) -> DistributedMatrix:
        """Return the sub-matrix ``[i0:i1, j0:j1]`` as a view of the same memory. Local; 0-based.

        Raises:
            LayoutError: the index is not a pair of slices of step 1.
        """
        d = self.descriptor
        rows, cols = d.ranges(index)
        coords = self.context.coords(d)
        local = self._local
        if coords is not None:
            local = local[d.rows.local_window(coords[0], *rows), d.cols.local_window(coords[1], *cols)]
        whole, i, j = self._place()
        return DistributedMatrix(self.context, d[index], local, part_of=(whole, i + rows[0], j + cols[0]))

    def _place(self) -> tuple[DistributedMatrix, int, int]:
        """Return the matrix that this one is a part of, maybe itself, and its first row and column there. Local."""
        if self.transpose_of is not None:
            whole, i, j = self.transpose_of._place()
            return whole.T, j, i
        return self._part_of or (self, 0, 0)

    def to_scalapack(self, context: int = 0) -> ScalapackMatrix:
        """Return ``(local, ia, ja, desc)``: this matrix as PBLAS and ScaLAPACK take one, nothing copied. Local.

        ``local`` is the local array of the whole matrix that this one is a part of, ``ia`` and ``ja`` count from 1, and
        LLD in ``desc`` is the array's own. ScaLAPACK knows only F order: for a C-ordered matrix ask its ``.T``, which
        is the same memory.

        Args:
            context: the number of the BLACS context, of ScaLAPACK or of ``pblasmp.pblas``.

        Raises:
            LayoutError: the matrix is in C order or of a 16-bit type, or a number needs more than 32 bits.
        """
        whole, i, j = self._place()
        d, rank = whole.descriptor, self.context.rank
        if d.dtype.itemsize == 2:
            raise LayoutError(f"ScaLAPACK has no matrices of {d.dtype.name}")
        inside = rank < d.grid.size
        desc = d.to_scalapack(rank if inside else 0, context)
        desc[8] = leading_dimension(whole.local)
        return ScalapackMatrix(whole.local, i + 1, j + 1, desc)

    # -- moving

    @_running
    def gather(self, root: int = 0) -> NDArray[Any] | None:
        """Return the whole matrix as a NumPy array on ``root``, None elsewhere. Collective over the context."""
        return self._gather("gather", root, everywhere=False)

    def _gather(self, call: str, root: int, *, everywhere: bool) -> NDArray[Any] | None:
        """Return the whole matrix on ``root``; on other ranks None or, with ``everywhere``, room for it."""
        ctx, d = self.context, self.descriptor
        with ctx.agreement(call) as facts:
            facts.update(matrix=d, root=root)
            ctx.check_rank(root, "root")
            here = everywhere or ctx.rank == root
            whole = np.empty(d.shape, d.dtype, order=d.order) if here else None
        target = Side(_whole(d.shape[0]), _whole(d.shape[1]), (Cell((0, 0), (root,)),), d.order)
        Exchange(ctx.comm, Side.of(d), target, d.dtype).run(ctx.cells(d, self.on_host()), [whole])
        return whole

    @_running
    def allgather(self) -> NDArray[Any]:
        """Return the whole matrix as a NumPy array on every rank. Collective over the context."""
        whole = self._gather("allgather", 0, everywhere=True)
        assert whole is not None
        self.context.comm.bcast_into(whole, 0)
        return whole

    @_running
    def redistribute(
        self,
        descriptor: MatrixDescriptor | None = None,
        *,
        uplo: Uplo | None = None,
        diag: Diag = "N",
        out: DistributedMatrix | None = None,
    ) -> DistributedMatrix:
        """Return the same matrix in another layout: grid, blocks, source, memory order, element type. Collective.

        Collective over the context. ScaLAPACK knows it as p?gemr2d and, with ``uplo``, as p?trmr2d.

        Args:
            descriptor: the new layout; by default that of ``out``.
            uplo: "L" or "U": move only this triangle. Of a matrix that is not square it is a trapezoid whose diagonal
                ends in the last corner where it would otherwise be cut off, as in p?trmr2d.
            diag: "U" leaves the diagonal out, too.
            out: a matrix to write to; what is not moved keeps its values. In a new matrix it is zero.

        Raises:
            LayoutError: the shapes differ, the grid has more ranks than the context, complex would become real, or
                ``out`` shares memory with this matrix.
        """
        ctx = self.context
        with ctx.agreement("redistribute") as facts:
            if out is not None:
                self._check_out(out)
                descriptor = out.descriptor if descriptor is None else descriptor
            facts.update(matrix=self.descriptor, to=descriptor, uplo=uplo, diag=diag, out=out is not None)
            if descriptor is None:
                raise LayoutError("redistribute: expected a descriptor or out=")
            ctx.check_descriptor(descriptor)
            if out is not None and out.descriptor != descriptor:
                raise LayoutError(f"out: lies as {out.descriptor}, the new descriptor is {descriptor}")
            if descriptor.shape != self.shape:
                raise LayoutError(
                    f"redistribute: the matrix is {self.shape}, the new descriptor {descriptor.shape}"
                )
            if self.dtype.kind == "c" and descriptor.dtype.kind != "c":
                raise LayoutError(
                    f"redistribute: {self.dtype.name} does not convert to {descriptor.dtype.name}"
                )
            part = self._part(uplo, diag)
            result = ctx.allocate(descriptor) if out is None else out
            if out is None and part is not None:
                result.local[...] = 0
        self.move_to(result, part)
        return result

    def _check_out(self, out: DistributedMatrix) -> None:
        if not isinstance(out, DistributedMatrix):
            raise LayoutError(f"out: expected a DistributedMatrix, got {type(out).__name__}")
        if out.context is not self.context:
            raise LayoutError("out: belongs to another context")
        if not getattr(out.local.flags, "writeable", True):
            raise LayoutError("out: its local array is read-only")
        if self.context.engine.overlap(self.local, out.local):
            raise LayoutError("out: shares memory with the matrix; expected a matrix of its own")

    def _part(self, uplo: Uplo | None, diag: Diag) -> Trapezoid | None:
        if uplo is not None and not one_of(uplo, "LU"):
            raise LayoutError(f"uplo: expected 'L', 'U' or None, got {uplo!r}")
        if not one_of(diag, "NU") or (uplo is None and diag != "N"):
            expected = "'N' or 'U'" if uplo else "'N' without uplo"
            raise LayoutError(f"diag: expected {expected}, got {diag!r}")
        return None if uplo is None else Trapezoid.of_shape(self.shape, uplo, diag)

    def move_to(self, out: DistributedMatrix, part: Trapezoid | None = None) -> None:
        """Write this matrix, or ``part`` of it, into ``out``: same shape, any layout, no checks. Collective.

        Collective over the context.
        """
        arrays = self._local, out._local
        move = self.context.engine.prepare_move(self.descriptor, out.descriptor, arrays, part)
        try:
            move.run(*arrays)
        finally:
            move.close()

    def on_host(self) -> NDArray[Any]:
        """Return the local array as a NumPy array: itself, or a copy where it is on a GPU. Local."""
        values = self.context.engine.to_host(self._local)
        return values if values.dtype == self.dtype else values.view(self.dtype)

    @_running
    def save(
        self, path: str | os.PathLike[str], *, order: str | None = None, progress: npy.Progress | None = None
    ) -> None:
        """Write an .npy file, each rank its own blocks; it appears under its name when it is whole. Collective.

        Collective over the context. bfloat16 is written as NumPy does, as 2 bytes without a type.

        Args:
            path: where to; seen by every rank. An existing file is replaced.
            order: memory order of the file, by default the matrix's.
            progress: called on this rank with (bytes done, bytes in all) of its part.

        Raises:
            OSError: the file cannot be written, or the disk is full; nothing is left behind then.
        """
        ctx, d = self.context, self.descriptor
        order = d.order if order is None else order
        temporary = None
        try:
            with ctx.agreement("save") as facts:
                path = Path(path)
                facts.update(matrix=d, path=str(path), order=order)
                if order not in ("C", "F"):
                    raise LayoutError(f"order: expected 'C' or 'F', got {order!r}")
                if ctx.rank == 0:
                    temporary = npy.temporary_name(path)
                    with npy.errors_naming(path):
                        npy.create(temporary, d, order)
            name = ctx.comm.bcast(temporary)
            coords = ctx.coords(d)
            with ctx.agreement("save: writing"):
                if coords is not None:
                    file = npy.map_for_writing(name, d.dtype)
                    npy.write(file, d, coords, self.on_host(), progress)
                    if isinstance(file.base, np.memmap):
                        file.base.flush()
            with ctx.agreement("save: renaming"):
                if temporary is not None:
                    with npy.errors_naming(path):
                        temporary.replace(path)
                    temporary = None
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):  # it may not be there; the error to tell is what failed
                    temporary.unlink()

    # -- arithmetic

    def __matmul__(self, other: DistributedMatrix) -> DistributedMatrix:
        """Return the product as a new matrix. Collective over the context; see ``pblasmp.matmul``."""
        if not isinstance(other, DistributedMatrix):
            return NotImplemented
        from .products import matmul

        return matmul(self, other)


def _whole(extent: int) -> Axis:
    return Axis(extent, max(1, extent))
