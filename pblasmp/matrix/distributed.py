# SPDX-License-Identifier: Apache-2.0
"""DistributedMatrix: a descriptor and this rank's local array."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, SupportsIndex, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, ArgumentTypeError, short_repr
from ..layout import MatrixDescriptor
from ..layout.descriptor import expanded, is_integer
from ..runtime.handle import ALL, Handle, window
from ..scalapack import ScalapackMatrix, leading_dimension
from . import arithmetic, assignment, io, reductions
from .creation import Block, GridLike, shard_layout
from .products import matmul

if TYPE_CHECKING:
    from types import EllipsisType

    from numpy.typing import DTypeLike
    from typing_extensions import Self

    from ..layout.descriptor import MemoryOrder
    from ..layout.level3_problem import Diag, Uplo
    from ..runtime.runtime import Runtime
    from .io import Progress

_Along: TypeAlias = "SupportsIndex | slice | EllipsisType"
Index: TypeAlias = "_Along | tuple[_Along, ...]"
Operand: TypeAlias = "DistributedMatrix | NDArray[Any] | complex"


class DistributedMatrix(Handle):
    """A matrix spread over the ranks of a context. Made by the context's methods, not directly. Local.

    Attributes:
        context: the context it belongs to.
        descriptor: its layout.
    """

    def __init__(self, context: Runtime[Any], descriptor: MatrixDescriptor, local: Any) -> None:
        super().__init__(context, descriptor, local)  # Python's errors name this class

    @property
    def ndim(self) -> int:
        """Number of dimensions: 2."""
        return 2

    @property
    def size(self) -> int:
        """Number of elements of the whole matrix."""
        return self.shape[0] * self.shape[1]

    def __len__(self) -> int:
        return self.shape[0]

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _INTERNAL]

    def __repr__(self) -> str:
        return f"DistributedMatrix({self.descriptor}; rank {self.context.rank} holds {self.local.shape})"

    def _repr_html_(self) -> str | None:
        draw = getattr(self.descriptor, "_repr_html_", None)
        return str(draw()) if draw is not None else None

    @overload
    def __getitem__(self, index: tuple[SupportsIndex, SupportsIndex]) -> Any: ...

    @overload
    def __getitem__(self, index: Index) -> Self: ...

    def __getitem__(self, index: Any) -> Any:
        """Return a sub-matrix as a view of the same memory, or one element. 0-based.

        ``A[i0:i1, j0:j1]`` and ``A[:5]`` are views; so are a row, ``A[3]``, which is a matrix of 1 × n, and a column,
        ``A[:, 3]`` or ``A[..., 3]``, of m × 1: a matrix always has two dimensions. Negative numbers count from the
        end. Local.

        ``A[3, 4]`` is a NumPy scalar on every rank. Collective over the context.

        Raises:
            ArgumentError: the index is none of these, is out of range, or has another step than 1.
        """
        rows, cols = index if type(index) is tuple and len(index) == 2 else (index, ALL)
        if type(rows) is slice or type(cols) is slice:
            view = window(self, rows, cols)
            if view is not None:  # nearly always
                return view
        if isinstance(index, tuple) and len(index) == 3:
            index = expanded(index)
        given = index if isinstance(index, tuple) else (index,)
        if (
            given
            and not any(isinstance(each, slice) or each is ... for each in given)
            and (len(given) > 1 or not is_integer(given[0]))
        ):  # also if it is wrong: other ranks may ask for an element
            with self.context.running("matrix[i, j]"):
                return reductions.element(self, index)
        return self.part(index)

    def __setitem__(self, index: Any, value: DistributedMatrix | NDArray[Any] | complex | None) -> None:
        """Write into a sub-matrix, or into one element. Collective over the context; 0-based.

        Args:
            index: as for reading.
            value: a number; a matrix of any layout, which may share memory with the sub-matrix, since all of it is read
                before it is overwritten; or a NumPy array of the sub-matrix's shape, or one that NumPy would broadcast
                to it. The array is the same on every rank, which is checked, or one rank has it and the others give
                None: that rank sends the others their parts.

        Raises:
            ArgumentError: the index is not legal, or the value does not fit.
            RankMismatchError: the ranks gave different arrays.
            TypeError: ``value`` is none of these.
        """
        assignment.set_item(self, index, value)

    def to_scalapack(self, *, context: int = 0) -> ScalapackMatrix:
        """Return ``(local, ia, ja, desc)``: this matrix as PBLAS and ScaLAPACK take it, without a copy. Local.

        ``local`` is the local array of the whole matrix that this one is a part of, ``ia`` and ``ja`` count from 1, and
        LLD in ``desc`` is the array's own. ScaLAPACK knows only F order: for a C-ordered matrix use its ``.T``, which
        is the same memory.

        Args:
            context: the number of the BLACS context, of ScaLAPACK or of ``pblasmp.pblas``.

        Raises:
            ArgumentError: the matrix is in C order or of a 16-bit type, or a number needs more than 32 bits.
        """
        whole, i, j, _, _, transposed = self.place
        if transposed:
            whole, i, j = whole.T, j, i
        d, rank = whole.descriptor, self.context.rank
        if d.dtype.itemsize == 2:
            raise ArgumentError(f"ScaLAPACK has no matrices of {d.dtype.name}")
        inside = rank < d.grid.size
        desc = d.to_scalapack(rank if inside else 0, context=context)
        desc[8] = leading_dimension(whole.local)
        return ScalapackMatrix(whole.local, i + 1, j + 1, desc)

    # -- moving

    def to_dlpack_shard(self, axis: int = 0) -> Any:
        """Return this rank's part of the rows, or columns, in C order. Collective over the context.

        Every rank has equally many, in the order of the ranks, but for the last ones, which may have fewer: as DTensors
        and JAX split arrays. It is the matrix's own local array if that is so already, and contiguous; else the matrix
        is moved.
        ``ctx.from_dlpack_shards`` is the way back.

        Args:
            axis: 0 for rows, 1 for columns.

        Returns:
            An array of NumPy or CuPy, which others take by DLPack: ``torch.from_dlpack``, ``jax.dlpack.from_dlpack``.

        Raises:
            ArgumentError: ``axis`` is neither 0 nor 1.
        """
        ctx = self.context
        with ctx.agreement("to_dlpack_shard") as facts:
            facts.update(matrix=self.descriptor, axis=axis)
            if not (is_integer(axis) and axis in (0, 1)):
                raise ArgumentError(f"axis: expected 0 or 1, got {short_repr(axis)}")
            d = shard_layout(self.shape, axis, ctx.size, self.dtype)
        same = self.descriptor.same_places(d) and all(ctx.comm.allgather(self.local.flags.c_contiguous))
        return (self if same else self.redistribute(d)).local

    def gather(self, root: int = 0) -> NDArray[Any] | None:
        """Return the whole matrix as a NumPy array on ``root``, None elsewhere. Collective over the context."""
        with self.context.running("gather"):
            return assignment.gathered(self, "gather", root, everywhere=False)

    def allgather(self) -> NDArray[Any]:
        """Return the whole matrix as a NumPy array on every rank. Collective over the context."""
        with self.context.running("allgather"):
            whole = assignment.gathered(self, "allgather", 0, everywhere=True)
            assert whole is not None
            self.context.comm.bcast_into(whole, 0)
            return whole

    def redistribute(
        self,
        descriptor: MatrixDescriptor | None = None,
        *,
        uplo: Uplo | None = None,
        diag: Diag = "N",
        out: DistributedMatrix | None = None,
        block: Block | None = None,
        grid: GridLike | None = None,
        source: Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
        order: MemoryOrder | None = None,
    ) -> DistributedMatrix:
        """Return the same matrix in another layout: grid, blocks, source, memory order, element type.

        Collective over the context. ScaLAPACK knows it as p?gemr2d and, with ``uplo``, as p?trmr2d.

        Args:
            descriptor: the new layout; by default that of ``out``, or this matrix's, changed as ``block``, ``grid``,
                ``source``, ``dtype`` and ``order`` say.
            uplo: "L" or "U": move only this triangle. In a matrix that is not square it is a trapezoid, whose diagonal
                ends in the last corner if it would otherwise be cut off, as in p?trmr2d.
            diag: "U" leaves out the diagonal as well.
            out: a matrix to write to; elements that are not moved keep their values. In a new matrix they are zero.
            block: one block size or ``(mb, nb)``.
            grid: a ``Grid``, ``(2, 3)`` or ``"2x3"``.
            source: process that owns the first block; (0, 0) if ``grid`` or ``block`` are given.
            dtype: element type.
            order: memory order.

        Raises:
            ArgumentError: the shapes differ, the grid has more ranks than the context, complex would become real, or
                ``out`` shares memory with this matrix.
        """
        changes = {"block": block, "grid": grid, "source": source, "dtype": dtype, "order": order}
        return assignment.redistributed(self, descriptor, changes, uplo, diag, out)

    def save(
        self,
        path: str | os.PathLike[str] | io.OpenFile,
        *,
        dataset: str | None = None,
        order: MemoryOrder | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Write the matrix to a file, which gets its name only when it is complete. Collective over the context.

        Each rank writes contiguous parts of the file. An existing file is replaced and keeps its mode; an HDF5 file
        keeps its other datasets, a Zarr group its other arrays, a dataset its attributes and
        links. bfloat16 and 8-bit floats are written to .npy as NumPy does, as bytes without a type; HDF5 and Zarr note
        the type in an attribute.

        Args:
            path: the file, writable by every rank: HDF5 if it ends in ``.h5`` or ``.hdf5`` (extra ``hdf5``), Zarr if it
                ends in ``.zarr`` (extra ``zarr``), NumPy's format if it ends in ``.npy``. A symbolic link is followed.
                Or what ``Context.open_file`` returns, for several matrices in one HDF5 file.
            dataset: the dataset in an HDF5 file (needed there), the array in a Zarr group (by default the path is an
                array itself). Groups on the way to it are made.
            order: memory order in an .npy file, by default the matrix's.
            progress: called on this rank with (bytes done, total bytes) of its part.

        Raises:
            OSError: the file cannot be written, or the disk is full; then nothing is left behind.
            ArgumentError: the name ends otherwise, something else has it, an HDF5 file is in use by another program,
                save or block of ``Context.open_file``, or an argument is not legal.
            LibraryNotFoundError: h5py or zarr is missing.
        """
        with self.context.running("save"):
            io.save(self, path, dataset, order, progress)

    # -- arithmetic

    @overload
    def __matmul__(self, other: DistributedMatrix) -> DistributedMatrix: ...

    @overload
    def __matmul__(self, other: NDArray[Any]) -> NDArray[Any]: ...

    def __matmul__(self, other: Any) -> Any:
        """Return the product as a new matrix. Collective over the context; see ``pblasmp.matmul``.

        With a vector, a NumPy array of one dimension that all ranks have alike, it is a vector, which every rank gets.
        """
        found = arithmetic.reflected("__rmatmul__", self, other)
        return matmul(self, other) if found is NotImplemented else found

    def __rmatmul__(self, other: Any) -> Any:
        return matmul(other, self)

    def __add__(self, other: Operand) -> DistributedMatrix:
        """Return the sum as a new matrix, laid out like this one. Collective over the context.

        ``-``, ``*``, ``/`` and ``**`` work alike: element-wise, as in NumPy, with a matrix of the same shape, a number,
        or a vector, which is a NumPy array that all ranks have alike: of shape (n,) or (1, n) with a number for each
        column, or (m, 1) with one for each row. A right operand in another layout is redistributed to the left one's
        first. Element types are promoted as in NumPy; Python numbers do not widen a matrix's type.

        Raises:
            ArgumentError: the shapes differ, or the matrices belong to different contexts.
            RankMismatchError: the ranks gave different operands.
        """
        return arithmetic.binary("+", self, other)

    def __sub__(self, other: Operand) -> DistributedMatrix:
        """Return the difference, see ``+``. Collective over the context."""
        return arithmetic.binary("-", self, other)

    def __mul__(self, other: Operand) -> DistributedMatrix:
        """Return the element-wise product, see ``+``. Collective over the context."""
        return arithmetic.binary("*", self, other)

    def __truediv__(self, other: Operand) -> DistributedMatrix:
        """Return the element-wise quotient, see ``+``. Collective over the context."""
        return arithmetic.binary("/", self, other)

    def __pow__(self, other: Operand) -> DistributedMatrix:
        """Return each element to a power, see ``+``. Collective over the context."""
        return arithmetic.binary("**", self, other)

    def __radd__(self, other: Any) -> DistributedMatrix:
        return arithmetic.binary("+", self, other, turned=True)

    def __rsub__(self, other: Any) -> DistributedMatrix:
        return arithmetic.binary("-", self, other, turned=True)

    def __rmul__(self, other: Any) -> DistributedMatrix:
        return arithmetic.binary("*", self, other, turned=True)

    def __rtruediv__(self, other: Any) -> DistributedMatrix:
        return arithmetic.binary("/", self, other, turned=True)

    def __rpow__(self, other: Any) -> DistributedMatrix:
        return arithmetic.binary("**", self, other, turned=True)

    def __iadd__(self, other: Operand) -> Self:
        """Add to this matrix in place, see ``+``; ``-=``, ``*=``, ``/=``, ``**=`` too. Collective over the context.

        Raises:
            ArgumentError: as for ``+``; or the result is complex and this matrix real, or its local array is read-only.
        """
        return arithmetic.binary("+", self, other, in_place=True)

    def __isub__(self, other: Operand) -> Self:
        return arithmetic.binary("-", self, other, in_place=True)

    def __imul__(self, other: Operand) -> Self:
        return arithmetic.binary("*", self, other, in_place=True)

    def __itruediv__(self, other: Operand) -> Self:
        return arithmetic.binary("/", self, other, in_place=True)

    def __ipow__(self, other: Operand) -> Self:
        return arithmetic.binary("**", self, other, in_place=True)

    def __neg__(self) -> DistributedMatrix:
        """Return the negative as a new matrix. Collective over the context."""
        return arithmetic.negative(self)

    def __abs__(self) -> DistributedMatrix:
        """Return the absolute values as a new matrix, real if this one is complex. Collective over the context."""
        return arithmetic.absolute(self)

    def conj(self) -> DistributedMatrix:
        """Return the complex conjugate as a new matrix. Collective over the context."""
        return arithmetic.conjugate(self)

    @property
    def real(self) -> DistributedMatrix:
        """The real part: for real types a view, for complex ones a new matrix, as with ``H``. Local."""
        return arithmetic.real(self)

    @property
    def imag(self) -> DistributedMatrix:
        """The imaginary part as a new matrix; zeros for real types. Local."""
        return arithmetic.imaginary(self)

    def tril(self, k: int = 0) -> DistributedMatrix:
        """Return a copy with zeros above a diagonal. Collective over the context.

        Args:
            k: which diagonal: 0 is the main one, 1 the next to the right, -1 the next below.

        Raises:
            ArgumentError: ``k`` is not an integer.
        """
        return arithmetic.triangle(self, "L", k)

    def triu(self, k: int = 0) -> DistributedMatrix:
        """Return a copy with zeros below a diagonal; ``k`` as for :meth:`tril`. Collective over the context."""
        return arithmetic.triangle(self, "U", k)

    def map(self, function: Callable[[Any], Any], *, dtype: DTypeLike | None = None) -> DistributedMatrix:
        """Return a new matrix of the function of each element, laid out like this one. Collective over the context.

        Args:
            function: called once on every rank with its local array, which may be empty; returns an array of the same
                shape. The array is ``ctx.engine.xp``'s, so ``A.map(ctx.engine.xp.exp)`` runs on both engines; of types
                that CuPy lacks, NumPy's. ``numpy.vectorize(f)`` makes such a function of one of numbers.
            dtype: the new element type, by default that of what the function returns.

        Raises:
            ArgumentError: the result has another shape, or a type that matrices do not have and ``dtype`` is not given;
                or the function takes numbers, but no arrays.
            RankMismatchError: the results have several types.
            Exception: what the function raises on any rank; raised on every rank.
        """
        return arithmetic.mapped(self, function, dtype)

    def __pos__(self) -> DistributedMatrix:
        """Return a copy. Collective over the context."""
        return self.copy()

    def copy(self) -> DistributedMatrix:
        """Return a new matrix of the same elements and layout. Collective over the context."""
        return arithmetic.copy(self)

    def astype(self, dtype: DTypeLike) -> DistributedMatrix:
        """Return a new matrix of another element type in the same layout. Collective over the context.

        Raises:
            ArgumentError: it is not an element type of matrices, or complex would become real.
        """
        return arithmetic.cast(self, dtype)

    def norm(
        self,
        ord: Literal["fro", "inf", "max"] | float = "fro",  # noqa: A002 - NumPy's name
        *,
        uplo: Uplo | None = None,
        diag: Diag = "N",
        kind: Literal["triangular", "symmetric", "hermitian"] = "triangular",
    ) -> float:
        """Return a norm, bit for bit the same on every rank. Collective over the context.

        It is computed in double precision whatever the element type, and scaled like LAPACK's lange: it overflows only
        if the norm itself is too large. NaN in the matrix gives NaN. An empty matrix has norm 0.

        Args:
            ord: "fro" (Frobenius), 1 (largest column sum of absolute values), "inf" or ``numpy.inf`` (largest row
                sum) or "max" (largest absolute value, which is not a consistent norm).
            uplo: "L" or "U": only this triangle is read. None: all of the matrix.
            diag: "U": the diagonal of a triangular matrix is taken as ones and not read.
            kind: what the triangle describes.

        Raises:
            ArgumentError: there is no such norm, or the matrix is not square although ``kind`` says so.
        """
        with self.context.running("norm"):
            return reductions.norm(self, ord, uplo, diag, kind)

    def sum(self, axis: int | None = None, *, dtype: DTypeLike | None = None) -> Any:
        """Return the sum of all elements, or of each column or row, on every rank. Collective over the context.

        Args:
            axis: None for a scalar; 0 for the sums of the columns, 1 for those of the rows, as a NumPy vector.
            dtype: type of the result, by default the matrix's; sums are computed in double precision and rounded once.

        Raises:
            ArgumentError: there is no such axis, or complex would become real.
        """
        with self.context.running("sum"):
            return reductions.total(self, "sum", axis, dtype)

    def mean(self, axis: int | None = None, *, dtype: DTypeLike | None = None) -> Any:
        """Return the mean of all elements, or of each column or row, on every rank. Collective over the context.

        Arguments and errors as for :meth:`sum`. The mean of no elements is NaN.
        """
        with self.context.running("mean"):
            return reductions.total(self, "mean", axis, dtype)

    def std(self, axis: int | None = None) -> Any:
        """Return the standard deviation of all elements, or of each column or row. Collective over the context.

        As NumPy's, the root of the mean of the squares of what is away from the mean, in double precision, and the same
        on every rank; two more matrices are made meanwhile. Of no elements it is NaN.

        Args:
            axis: None for a scalar; 0 for those of the columns, 1 for those of the rows, as a NumPy vector.

        Raises:
            ArgumentError: there is no such axis.
        """
        with self.context.running("std"):
            return reductions.deviation(self, axis)

    def min(self, axis: int | None = None) -> Any:
        """Return the least element, or that of each column or row, on every rank. Collective over the context.

        NaN if there is one, as in NumPy. Complex numbers compare by their real parts, then by the imaginary.

        Args:
            axis: None for a scalar; 0 for those of the columns, 1 for those of the rows, as a NumPy vector.

        Raises:
            ArgumentError: there is no such axis, or no element.
        """
        with self.context.running("min"):
            return reductions.extreme(self, "min", axis)

    def max(self, axis: int | None = None) -> Any:
        """Return the largest element; NaN if there is one. See :meth:`min`. Collective over the context."""
        with self.context.running("max"):
            return reductions.extreme(self, "max", axis)

    def trace(self) -> Any:
        """Return the sum of the diagonal's elements, as a NumPy scalar on every rank. Collective over the context."""
        with self.context.running("trace"):
            return reductions.trace(self)

    def diagonal(self) -> NDArray[Any]:
        """Return the diagonal as a new NumPy vector on every rank. Collective over the context."""
        with self.context.running("diagonal"):
            return reductions.diagonal(self)

    # -- what only NumPy arrays can do

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Compute NumPy's function of this matrix, as ``map`` does, or what an operator does. Collective."""
        if method == "__call__" and not options and ufunc.nout == 1:
            if ufunc.nin == 1:
                return self.map(ufunc)
            left, right = inputs
            if ufunc in (np.equal, np.not_equal):
                return self == left  # which says what to use instead
            if ufunc is np.matmul:
                return right.__rmatmul__(left) if right is self else self @ right
            for symbol, name in arithmetic.FUNCTIONS.items():
                if ufunc is getattr(np, name):
                    return arithmetic.binary(
                        symbol, self, left if right is self else right, turned=right is self
                    )
        raise ArgumentTypeError(
            f"numpy.{ufunc.__name__} does not take a DistributedMatrix in this way: A.map(function) computes with each "
            f"element, operators with those of two matrices; {_INSTEAD}"
        )

    if not TYPE_CHECKING:  # which would then know every name

        def __getattr__(self, name: str) -> NoReturn:
            known = hasattr(np.ndarray, name) and not name.startswith("_")
            hint = f", as NumPy's arrays have: {_INSTEAD}" if known else ""
            raise AttributeError(f"a DistributedMatrix has no {name!r}{hint}", name=name, obj=self)

    def __array__(self, *_args: Any, **_options: Any) -> NoReturn:
        raise ArgumentTypeError(
            f"a DistributedMatrix is not converted to a NumPy array implicitly: {_INSTEAD}"
        )

    def __array_function__(self, function: Any, *_args: Any) -> NoReturn:
        name = f"{function.__module__}.{function.__name__}"
        raise ArgumentTypeError(f"{name} does not take a DistributedMatrix: {_INSTEAD}")

    def __bool__(self) -> bool:
        raise ArgumentTypeError("a DistributedMatrix has no truth value: compare it with None, or use .size")

    def __eq__(self, other: object) -> NoReturn:
        raise ArgumentTypeError(
            "A == B and A != B are not for DistributedMatrix: pb.allclose(A, B) compares the elements, with rtol=0, "
            "atol=0 exactly, A.map(...) computes with each, and `is` tells whether both are one matrix"
        )

    __hash__ = Handle.__hash__
    __iter__ = None  # it has a length, but no rows to iterate over


_INTERNAL = {
    *("direct_part", "know", "known_call", "like_on_host", "move_to", "on_host", "part", "place"),
    *("transposed", "whole", "writeable"),
}
"""Names for the modules below, which completion does not show."""

_INSTEAD = "use gather() or allgather() for the whole matrix, .local for this rank's part"
