# SPDX-License-Identifier: Apache-2.0
"""Handle: what a distributed matrix is below its public face: a runtime, a descriptor, a local array, and views."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..engines.arrays import move
from ..engines.direct import Asked, Held, Part, pattern_of
from ..layout import MatrixDescriptor, Trapezoid
from .runtime import Runtime

if TYPE_CHECKING:
    from typing_extensions import Self


_ALL = slice(None)


class KnownCall:
    """A direct call that was legal, so that it is again. It keeps no matrix. Making one is local.

    Args:
        given: the routine and the arguments that it was called with.
        asked: what the engine was asked for.
    """

    __slots__ = ("_kept", "asked", "identities")

    def __init__(self, given: Sequence[Any], asked: Asked) -> None:
        # of objects that exist as long as this is not empty
        self.identities = identities = [*map(id, given)]
        self._kept = [
            weakref.ref(x, lambda _: identities.clear()) if isinstance(x, Handle) else x for x in given
        ]
        self.asked = asked


class Handle:
    """A descriptor and this rank's local array. Users have ``DistributedMatrix``; modules below it take this. Local.

    A view knows where it is in its matrix. Its descriptor and its local array are made on first use: a
    product of views may need neither.

    Attributes:
        context: the context that it belongs to.
    """

    def __init__(self, context: Runtime[Any], descriptor: MatrixDescriptor, local: Any) -> None:
        self.context = context
        self._descriptor: MatrixDescriptor | None = descriptor
        self._array: Any = local
        self._pin = _pin(local)
        self._view_of: Handle | None = None
        self._at = 0, 0, *descriptor.shape, False
        self._held: Any = None
        self._known: KnownCall | None = None
        self._has_called = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a copy by the module copy: its memory may be elsewhere
        vars(self).update(state, _held=None, _known=None, _pin=_pin(state["_array"]))

    @property
    def descriptor(self) -> MatrixDescriptor:
        """Its layout."""
        found = self._descriptor
        if found is None:
            assert self._view_of is not None
            i, j, m, n, transposed = self._at
            found = self._view_of.descriptor[i : i + m, j : j + n]
            self._descriptor = found = found.T if transposed else found
        return found

    @property
    def local(self) -> Any:
        """This rank's local array: NumPy (host) or CuPy (cublasmp); 0 × 0 on ranks outside the grid. Local."""
        found = self._array
        if found is None:
            whole = self._view_of
            assert whole is not None
            i, j, m, n, transposed = self._at
            found, d = whole._array, whole.descriptor
            coords = self.context.coords(d)
            if coords is not None:
                found = found[
                    d.rows.local_window(coords[0], i, i + m), d.cols.local_window(coords[1], j, j + n)
                ]
            self._array = found = found.T if transposed else found
        return found

    @property
    def shape(self) -> tuple[int, int]:
        """Global ``(rows, columns)``."""
        _, _, m, n, transposed = self._at
        return (n, m) if transposed else (m, n)

    @property
    def dtype(self) -> np.dtype:
        """Element type."""
        return self.whole.descriptor.dtype

    @property
    def whole(self) -> Handle:
        """The matrix whose memory a view shows; itself if it is no view."""
        return self if self._view_of is None else self._view_of

    @property
    def place(self) -> tuple[Handle, int, int, int, int, bool]:
        """Where this matrix is in the one whose memory it shows: for most matrices, that is all of itself. Local.

        That matrix, which is no view; the row and the column in it where this one begins, and how many of each it has;
        whether its rows are this one's columns. Views of one place are the same elements.
        """
        return self.whole, *self._at

    @property
    def transposed(self) -> bool:
        """Whether its rows are columns in the memory that it shows. Local."""
        return self._at[4]

    @property
    def writeable(self) -> bool:
        """Whether its local array may be written to. Local."""
        array: Any = (self if self._view_of is None else self._view_of)._array
        return not isinstance(array, np.ndarray) or array.flags.writeable  # CuPy's always are

    def direct_part(self) -> Part | None:
        """Return what direct calls take; None if they do not take this matrix. Local."""
        whole = self if self._view_of is None else self._view_of
        held = whole._held
        if held is None:
            on_gpus = self.context.engine.traits.on_gpus
            pattern = pattern_of(whole.descriptor, self.context.rank, narrow=on_gpus)
            held = whole._held = (pattern is not None and Held.of(pattern, whole.local)) or False
        return (held, *self._at) if held else None

    def known_call(self, given: Sequence[Any]) -> Asked | None:
        """Return what the engine was asked for in this call if ``know`` was told of it last; None if not. Local.

        Args:
            given: the routine and its arguments: the same objects.
        """
        known = self._known
        if known is None or known.identities != [*map(id, given)] or not self.context.is_usable:
            return None
        return known.asked

    def know(self, given: Sequence[Any], asked: Asked) -> None:
        """Remember what the engine is asked for in a call that begins with this matrix, or writes it. Local.

        From the second one on: many views are used once.
        """
        if self._has_called:
            self._known = KnownCall(given, asked)
        self._has_called = True

    # -- views: nothing moves

    def _view(self, at: tuple[int, int, int, int, bool]) -> Self:
        """Return the view at another place in the same matrix. Local."""
        view = object.__new__(type(self))
        view.context = self.context
        view._descriptor = view._array = view._known = None
        view._has_called = False
        view._view_of = self if self._view_of is None else self._view_of
        view._at = at
        return view

    @property
    def T(self) -> Self:  # noqa: N802 - the name NumPy uses
        """The transpose as a view of the same memory. Local."""
        i, j, m, n, transposed = self._at
        return self._view((i, j, m, n, not transposed))

    @property
    def H(self) -> Self:  # noqa: N802 - the usual name
        """The conjugate transpose: a view for real types, a new matrix for complex ones. Local.

        In a product ``op_a="C"`` does the same without a copy.
        """
        if self.dtype.kind != "c":
            return self.T
        with self.context.engine.on_device():
            conjugate = self.local.conj()
        return type(self)(self.context, replace(self.descriptor, ld=None), conjugate).T

    def part(self, index: Any) -> Self:
        """Return a sub-matrix as a view of the same memory, even if it is one element. Local; 0-based.

        Raises:
            ArgumentError: the index is none of a sub-matrix.
        """
        i, j, m, n, transposed = self._at
        height, width = (n, m) if transposed else (m, n)
        try:
            rows, cols = index if type(index) is tuple else (index, _ALL)  # a list is no index
            rows = slice(rows, rows + 1) if type(rows) is int else rows
            cols = slice(cols, cols + 1) if type(cols) is int else cols
            i0, i1, j0, j1 = rows.start, rows.stop, cols.start, cols.stop
            i0, i1 = 0 if i0 is None else i0, height if i1 is None else i1
            j0, j1 = 0 if j0 is None else j0, width if j1 is None else j1
            legal = (
                type(i0) is type(i1) is type(j0) is type(j1) is int
                and rows.step is cols.step is None
                and 0 <= i0 <= i1 <= height
                and 0 <= j0 <= j1 <= width
            )
        except (TypeError, ValueError, AttributeError):
            legal = False
        if not legal:
            (i0, i1), (j0, j1) = self.descriptor.ranges(index)
        if transposed:
            return self._view((i + j0, j + i0, j1 - j0, i1 - i0, True))
        return self._view((i + i0, j + j0, i1 - i0, j1 - j0, False))

    def move_to(self, out: Handle, part: Trapezoid | None = None) -> None:
        """Write this matrix, or ``part`` of it, into ``out``: same shape, any layout, no checks.

        Collective over the context.
        """
        arrays = self.local, out.local
        move(self.context.engine, self.descriptor, out.descriptor, arrays, part)

    def on_host(self) -> NDArray[Any]:
        """Return the local array as a NumPy array: itself, or a copy if it is on a GPU. Local."""
        values = self.context.engine.to_host(self.local)
        return values if values.dtype == self.dtype else values.view(self.dtype)

    def like_on_host(self) -> NDArray[Any]:
        """Return an array to fill for ``engine.from_host``: the local array itself, or one like it. Local."""
        values = self.context.engine.like_on_host(self.local)
        return values if values.dtype == self.dtype else values.view(self.dtype)


def _pin(array: Any) -> Any:
    """Return what keeps an array of NumPy where it is: it resizes none that has a weak reference. Local."""
    return weakref.ref(array) if isinstance(array, np.ndarray) else None


Matrix = TypeVar("Matrix", bound=Handle)


def no_matrix(x: object, expected: str = "a DistributedMatrix") -> str:
    """Return what is wrong with an operand that should be a matrix, in words. Local."""
    ndim = getattr(x, "ndim", 0)
    hint = ": distribute the array first, as with ctx.scatter(array)" if ndim else ""
    if ndim == 1:
        hint = ": distribute the vector first as a matrix of one column, as with ctx.scatter(array[:, None])"
    return f"expected {expected}, got {type(x).__name__}{hint}"
