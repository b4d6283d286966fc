# SPDX-License-Identifier: Apache-2.0
"""Handle: what a distributed matrix is below its public face: a runtime, a descriptor, a local array, and views."""

from __future__ import annotations

import itertools
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


ALL = slice(None)
_new = object.__new__


class KnownCall:
    """A direct call that was legal, so that it is again. It keeps no matrix. Making one is local."""

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

    # In slots the core finds them, too: see ``direct_forms.py``.
    __slots__ = (
        "__weakref__", "_array", "_at", "_descriptor", "_held", "_known", "_pin", "_view_of", "context",
    )  # fmt: skip

    def __init__(self, context: Runtime[Any], descriptor: MatrixDescriptor, local: Any) -> None:
        self.context = context
        self._descriptor: MatrixDescriptor | None = descriptor
        self._array: Any = local
        self._pin = _pin(local)
        self._view_of: Handle | None = None
        self._at = 0, 0, *descriptor.shape, False
        self._held: Any = None
        self._known: KnownCall | bool = False  # whether a call has been remembered, if none is

    def __getstate__(self) -> dict[str, Any]:
        # of a copy by the module copy; pickle refuses the context
        fields = "context", "_descriptor", "_array", "_view_of", "_at"
        return {name: getattr(self, name) for name in fields} | getattr(self, "__dict__", {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        # its memory may be elsewhere
        for name, value in {**state, "_held": None, "_known": False, "_pin": _pin(state["_array"])}.items():
            setattr(self, name, value)

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

        ``given`` are the routine and its arguments: the same objects.
        """
        known = self._known
        if (
            not isinstance(known, KnownCall)
            or known.identities != [*map(id, given)]
            or not self.context.is_usable
        ):
            return None
        return known.asked

    def know(self, given: Sequence[Any], asked: Asked) -> None:
        """Remember what the engine is asked for in a call that begins with this matrix, or writes it. Local.

        From the second one on: many views are used once.
        """
        self._known = KnownCall(given, asked) if self._known else True

    # -- views: nothing moves

    @property
    def T(self) -> Self:  # noqa: N802 - the name NumPy uses
        """The transpose as a view of the same memory. Local."""
        i, j, m, n, transposed = self._at
        return _view(self, (i, j, m, n, not transposed))

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

        ArgumentError if the index is none of a sub-matrix.
        """
        # A list is no index.
        rows, cols = index if type(index) is tuple and len(index) == 2 else (index, ALL)
        found = window(self, rows, cols)
        if found is None:
            found = window(self, *itertools.starmap(slice, self.descriptor.ranges(index)))
            assert found is not None
        return found

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


def window(x: Matrix, rows: Any, cols: Any) -> Matrix | None:
    """Return a sub-matrix as a view, None if rows and columns are no plain slices or integers inside of X. Local."""
    i, j, m, n, transposed = x._at
    if transposed:
        rows, cols = cols, rows
    if type(rows) is int:
        rows = slice(rows, rows + 1)
    if type(cols) is int:
        cols = slice(cols, cols + 1)
    if not (type(rows) is type(cols) is slice):
        return None
    i0, i1, j0, j1 = rows.start, rows.stop, cols.start, cols.stop
    if i0 is None:
        i0 = 0
    if i1 is None:
        i1 = m
    if j0 is None:
        j0 = 0
    if j1 is None:
        j1 = n
    if (
        type(i0) is type(i1) is type(j0) is type(j1) is int
        and rows.step is cols.step is None
        and 0 <= i0 <= i1 <= m
        and 0 <= j0 <= j1 <= n
    ):
        return _view(x, (i + i0, j + j0, i1 - i0, j1 - j0, transposed))
    return None


def _view(x: Matrix, at: tuple[int, int, int, int, bool]) -> Matrix:
    """Return the view at another place in the same matrix. Local."""
    view = _new(type(x))
    view.context = x.context
    view._descriptor = view._array = None
    view._known = False
    whole = x._view_of
    view._view_of = x if whole is None else whole
    view._at = at
    return view


def no_matrix(x: object, expected: str = "a DistributedMatrix") -> str:
    """Return what is wrong with an operand that should be a matrix, in words. Local."""
    ndim = getattr(x, "ndim", 0)
    hint = ": distribute the array first, as with ctx.scatter(array)" if ndim else ""
    if ndim == 1:
        hint = ": distribute the vector first as a matrix of one column, as with ctx.scatter(array[:, None])"
    return f"expected {expected}, got {type(x).__name__}{hint}"
