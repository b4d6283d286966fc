# SPDX-License-Identifier: Apache-2.0
"""Handle: what a distributed matrix is below its public face: a runtime, a descriptor, a local array, and views."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from .engines.request import Operands
from .layout import MatrixDescriptor, Trapezoid
from .runtime import Runtime

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Handle", "Matrix", "Place"]


class Place(NamedTuple):
    """Where a view is in the matrix whose memory it shows. Views of one place are the same elements.

    Attributes:
        whole: that matrix, which is no view.
        i, j: the row and the column in it where the view begins.
        transposed: whether the view's rows are its columns.
    """

    whole: Handle
    i: int
    j: int
    transposed: bool

    def part(self, i: int, j: int) -> Place:
        """Return the place of a sub-matrix that begins at row ``i`` and column ``j`` of this view. Local."""
        down, right = (j, i) if self.transposed else (i, j)
        return self._replace(i=self.i + down, j=self.j + right)


class Handle:
    """A descriptor and this rank's local array. Users have ``DistributedMatrix``; modules below it take this. Local.

    Attributes:
        context: the context that it belongs to.
        descriptor: its layout.
    """

    def __init__(
        self, context: Runtime[Any], descriptor: MatrixDescriptor, local: Any, place: Place | None = None
    ) -> None:
        self.context = context
        self.descriptor = descriptor
        self._local = local
        self._view_at = place

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

    @property
    def place(self) -> Place:
        """Where this matrix is in the one whose memory it shows: for most matrices, that is all of itself. Local."""
        return self._view_at or Place(self, 0, 0, transposed=False)

    # -- views: nothing moves

    @property
    def T(self) -> Self:  # noqa: N802 - the name NumPy uses
        """The transpose as a view of the same memory. Local."""
        place = self.place
        return type(self)(
            self.context, self.descriptor.T, self._local.T, place._replace(transposed=not place.transposed)
        )

    @property
    def H(self) -> Self:  # noqa: N802 - the usual name
        """The conjugate transpose: a view for real types, a new matrix for complex ones. Local.

        In a product ``op_a="C"`` does the same without a copy.
        """
        if self.dtype.kind != "c":
            return self.T
        return type(self)(self.context, replace(self.descriptor, ld=None), self._local.conj()).T

    def part(self, index: object) -> Self:
        """Return a sub-matrix as a view of the same memory, even if it is one element. Local; 0-based.

        Raises:
            LayoutError: the index is none of a sub-matrix.
        """
        d = self.descriptor
        rows, cols = d.ranges(index)
        coords = self.context.coords(d)
        local = self._local
        if coords is not None:
            local = local[d.rows.local_window(coords[0], *rows), d.cols.local_window(coords[1], *cols)]
        return type(self)(self.context, d[index], local, self.place.part(rows[0], cols[0]))

    def move_to(self, out: Handle, part: Trapezoid | None = None) -> None:
        """Write this matrix, or ``part`` of it, into ``out``: same shape, any layout, no checks.

        Collective over the context.
        """
        arrays = self._local, out._local
        move = self.context.engine.prepare_move(self.descriptor, out.descriptor, arrays, part)
        try:
            move.run(Operands(arrays[0], None, None, arrays[1]))
        finally:
            move.close()

    def on_host(self) -> NDArray[Any]:
        """Return the local array as a NumPy array: itself, or a copy if it is on a GPU. Local."""
        values = self.context.engine.to_host(self._local)
        return values if values.dtype == self.dtype else values.view(self.dtype)

    def like_on_host(self) -> NDArray[Any]:
        """Return an array to fill for ``engine.from_host``: the local array itself, or one like it. Local."""
        values = self.context.engine.like_on_host(self._local)
        return values if values.dtype == self.dtype else values.view(self.dtype)


Matrix = TypeVar("Matrix", bound=Handle)
