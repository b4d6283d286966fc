# SPDX-License-Identifier: Apache-2.0
"""MatrixDescriptor: how a matrix is distributed over a process grid, as a plain value. 0-based."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from operator import index
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..dtypes import as_dtype, plain
from ..errors import ArgumentError, ArgumentTypeError, LayoutError, short_repr
from ..lazy import hook
from .axis import Axis, axis
from .grid import PAIR_OF_SHAPE, Grid, as_block, as_grid, integer, one_of, pair
from .value import Value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike

MemoryOrder = Literal["C", "F"]

_INT32_MAX = 2**31 - 1
_FLIPPED: dict[str, MemoryOrder] = {"C": "F", "F": "C"}
_REMEMBERED = 1024  # texts


@dataclass(frozen=True, slots=True, repr=False)
class MatrixDescriptor(Value):
    """A matrix dealt out in blocks over a process grid (2D block-cyclic). Local.

    Args:
        shape: global ``(rows, columns)``, each at least 0.
        block: ``(mb, nb)``, rows and columns of a block, each at least 1, or one integer for both; may be larger than
            the matrix.
        grid: the process grid: a ``Grid``, ``(2, 3)`` or ``"2x3"``.
        source: ``(prow, pcol)`` of the process that owns the first block (ScaLAPACK's rsrc, csrc).
        dtype: element type: a name, a NumPy type or dtype; stored as ``np.dtype``.
        order: memory order of each rank's local array, "C" (rows contiguous) or "F" (columns contiguous).
        lead: rows and columns of the first block before the matrix: non-zero only for a sub-matrix
            that starts inside a block.
        ld: leading dimension of padded local arrays, in elements; None: no padding.

    Raises:
        LayoutError: an argument is out of range.
    """

    shape: tuple[int, int]
    block: tuple[int, int]
    grid: Grid
    source: tuple[int, int] = (0, 0)
    dtype: np.dtype = np.dtype(np.float64)  # noqa: RUF009 - immutable
    order: MemoryOrder = "C"
    lead: tuple[int, int] = (0, 0)
    ld: int | None = None

    if TYPE_CHECKING:  # the accepted types are wider than the stored ones

        def __init__(
            self,
            shape: Sequence[int],
            block: int | Sequence[int],
            grid: Grid | str | Sequence[int],
            source: Sequence[int] = (0, 0),
            dtype: DTypeLike = "float64",
            order: MemoryOrder = "C",
            lead: Sequence[int] = (0, 0),
            ld: int | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "shape", pair(self.shape, "shape", 0, PAIR_OF_SHAPE))
        put(self, "block", as_block(self.block))
        put(self, "grid", as_grid(self.grid))
        put(self, "source", pair(self.source, "source", 0))
        put(self, "lead", pair(self.lead, "lead", 0))
        put(self, "dtype", as_dtype(self.dtype))
        put(self, "order", plain(self.order))
        if not one_of(self.order, ("C", "F")):
            raise LayoutError(f"order: expected 'C' or 'F', got {short_repr(self.order)}")
        if self.source[0] >= self.grid.nprow or self.source[1] >= self.grid.npcol:
            raise LayoutError(f"source: process {self.source} is not in a grid of {self.grid}")
        if self.lead[0] >= self.block[0] or self.lead[1] >= self.block[1]:
            raise LayoutError(f"lead: {self.lead} is not inside a block of {self.block}")
        if self.ld is not None:
            put(self, "ld", integer(self.ld, "ld", 1))
            contiguous = self.cols if self.order == "C" else self.rows
            need = max(
                contiguous.count(p) for p in {contiguous.source, (contiguous.source + 1) % contiguous.nprocs}
            )
            if self.ld < need:
                raise LayoutError(
                    f"ld: {self.ld} is too small: the local arrays are up to {need} "
                    f"{'columns wide' if self.order == 'C' else 'rows high'}"
                )

    @property
    def rows(self) -> Axis:
        """The row dimension, over the process rows."""
        return axis(self.shape[0], self.block[0], self.source[0], self.grid.nprow, self.lead[0])

    @property
    def cols(self) -> Axis:
        """The column dimension, over the process columns."""
        return axis(self.shape[1], self.block[1], self.source[1], self.grid.npcol, self.lead[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the whole matrix."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def local_shape(self, rank: int) -> tuple[int, int]:
        """Return ``(rows, columns)`` of the local array of ``rank``. Local; constant time."""
        prow, pcol = self.grid.coords(rank)
        return self.rows.count(prow), self.cols.count(pcol)

    def lld(self, rank: int) -> int:
        """Return the leading dimension of the local array of ``rank``, in elements, at least 1. Local.

        It is the distance between columns in F order, between rows in C order.
        """
        rows, cols = self.local_shape(rank)
        return max(1, cols if self.order == "C" else rows, self.ld or 1)

    def owner(self, i: int, j: int) -> int:
        """Return the rank that owns element ``(i, j)``. Local; constant time."""
        return self.grid.rank(self.rows.owner(i), self.cols.owner(j))

    def to_local(self, i: int, j: int) -> tuple[int, int, int]:
        """Return ``(rank, li, lj)``: who owns element ``(i, j)``, and where. Local; constant time."""
        prow, li = self.rows.local(i)
        pcol, lj = self.cols.local(j)
        return self.grid.rank(prow, pcol), li, lj

    def to_global(self, rank: int, li: int, lj: int) -> tuple[int, int]:
        """Return ``(i, j)`` of the element that ``rank`` has at ``(li, lj)``. Local; constant time."""
        prow, pcol = self.grid.coords(rank)
        return self.rows.to_global(prow, li), self.cols.to_global(pcol, lj)

    def global_indices(self, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return ``(rows, cols)``: the global indices, int64, of the rows and columns of ``rank``. Local."""
        prow, pcol = self.grid.coords(rank)
        return self.rows.globals(prow), self.cols.globals(pcol)

    @property
    def T(self) -> MatrixDescriptor:  # noqa: N802 - the name NumPy uses
        """The transpose of the same memory: nothing moves, and every rank keeps its array."""
        return MatrixDescriptor(
            self.shape[::-1],
            self.block[::-1],
            self.grid.T,
            self.source[::-1],
            self.dtype,
            _FLIPPED[self.order],
            self.lead[::-1],
            self.ld,
        )

    def __getitem__(self, where: object) -> MatrixDescriptor:
        """Return the descriptor of the sub-matrix ``[i0:i1, j0:j1]``, each element in its place. Local.

        An integer in place of a slice is one row or column; what follows may be left out, as in ``[3]`` and ``[:5]``.

        Raises:
            ArgumentError: the index is none of these, is out of range, or has another step than 1.
        """
        rows, cols = self.ranges(where)
        row_axis, col_axis = self.rows.window(*rows), self.cols.window(*cols)
        return MatrixDescriptor(
            (row_axis.extent, col_axis.extent),
            self.block,
            self.grid,
            (row_axis.source, col_axis.source),
            self.dtype,
            self.order,
            (row_axis.lead, col_axis.lead),
            self.ld,
        )

    def ranges(self, where: object) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return ``((i0, i1), (j0, j1))`` for an index, as NumPy would resolve it; an integer is one long. Local."""
        given = expanded(where if isinstance(where, tuple) else (where,))
        if len(given) > 2 or not all(isinstance(each, slice) or is_integer(each) for each in given):
            raise ArgumentError(
                "index: expected integers or slices, such as A[3, 4], A[3], A[:5] or A[0:4, 2:8], "
                f"got {short_repr(where)}"
            )
        rows, cols = (*given, slice(None), slice(None))[:2]
        return _range(rows, self.shape[0], "row"), _range(cols, self.shape[1], "column")

    def same_places(self, other: MatrixDescriptor) -> bool:
        """Return whether every element is on the same rank at the same local index in both. Local."""
        return (
            self.shape == other.shape and self.grid.same_ranks(other.grid)
            and self.rows.same_places(other.rows) and self.cols.same_places(other.cols)
        )  # fmt: skip

    def to_scalapack(self, rank: int, *, context: int = 0) -> NDArray[np.int32]:
        """Return ScaLAPACK's 9-integer descriptor for ``rank``, int32. Local.

        ``[1, context, M, N, MB, NB, RSRC, CSRC, LLD]``. ScaLAPACK knows only F order: for a C-ordered matrix
        use its ``.T``, which is the same memory.

        Raises:
            LayoutError: the matrix is in C order, starts inside a block, or a number needs more than 32 bits.

        Source: ScaLAPACK TOOLS, DESCINIT.
        """
        if self.order != "F":
            raise LayoutError("ScaLAPACK knows only F order: use .T.to_scalapack(rank), the same memory")
        if self.lead != (0, 0):
            raise LayoutError(
                f"a ScaLAPACK descriptor starts at a block boundary, got a start {self.lead} into a block"
            )
        numbers = [1, integer(context, "context", -1), *self.shape, *self.block, *self.source, self.lld(rank)]
        if max(numbers) > _INT32_MAX:
            raise LayoutError(f"a ScaLAPACK descriptor holds 32-bit integers, got {max(numbers)}")
        return np.array(numbers, dtype=np.int32)

    @classmethod
    def from_scalapack(
        cls, desc: Sequence[int], grid: Grid, dtype: DTypeLike = "float64"
    ) -> MatrixDescriptor:
        """Return the F-ordered descriptor that a 9-integer ScaLAPACK descriptor describes on ``grid``. Local.

        LLD is taken as padding if no rank has it without padding.

        Raises:
            LayoutError: not nine integers, not a dense descriptor, or values that contradict each other.

        Source: ScaLAPACK TOOLS, DESCINIT.
        """
        try:
            given = [*desc]
        except TypeError:
            raise ArgumentTypeError(f"desc: expected 9 integers, got {short_repr(desc)}") from None
        values = [integer(v, f"desc[{i}]", -1) for i, v in enumerate(given)]
        if len(values) != 9:
            raise LayoutError(f"a ScaLAPACK descriptor has 9 integers, got {len(values)}")
        kind, _, m, n, mb, nb, rsrc, csrc, lld = values
        if kind != 1:
            raise LayoutError(f"desc[0]: expected 1 (a dense block-cyclic matrix), got {kind}")
        tight = cls((m, n), (mb, nb), grid, (rsrc, csrc), dtype, "F")
        turns = {(rsrc + turn) % grid.nprow for turn in (0, m // mb, grid.nprow - 1)}
        if lld in {max(1, tight.rows.count(p)) for p in turns}:
            return tight
        return replace(tight, ld=lld)

    def to_dict(self) -> dict[str, Any]:
        """Return a table of plain values that ``from_dict`` reads back: JSON and TOML can hold it. Local."""
        values = {
            "shape": [*self.shape],
            "block": [*self.block],
            "grid": self.grid.label,
            "source": [*self.source],
            "dtype": self.dtype.name,
            "order": self.order,
            "lead": [*self.lead],
            "ld": self.ld,
        }
        return {key: value for key, value in values.items() if value not in (None, [0, 0]) or key == "shape"}

    def to_toml(self) -> str:
        """Return the descriptor as TOML: the text of a table that ``from_dict`` reads back. Local."""
        text: str = hook("to_toml")(self.to_dict())
        return text

    def __repr__(self) -> str:
        return _written(self)

    def __str__(self) -> str:
        return (
            f"{self.shape[0]}x{self.shape[1]} {self.dtype.name} in blocks of {self.block[0]}x{self.block[1]} "
            f"on {self.grid}{'' if self.source == (0, 0) else f' from {self.source}'}, {self.order} order"
        )


def window_of(shape: tuple[int, int], ranges: Sequence[Sequence[int]] | None = None) -> tuple[slice, slice]:
    """Return ``[[i0, i1], [j0, j1]]`` as slices of a matrix of this shape, all for None; else LayoutError. Local."""
    rows, cols = ranges or [[0, extent] for extent in shape]
    for (start, stop), extent in ((rows, shape[0]), (cols, shape[1])):
        if not start <= stop <= extent:
            raise LayoutError(
                f"window: expected a part of 0 to {extent}, got {short_repr(start)} to {short_repr(stop)}"
            )
    return slice(*rows), slice(*cols)


def expanded(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an index with slices of everything in place of its Ellipsis, if it has one. Local."""
    at = [k for k, each in enumerate(index) if each is ...]
    if len(at) != 1:
        return index
    return (*index[: at[0]], *(slice(None),) * (3 - len(index)), *index[at[0] + 1 :])


def is_integer(where: Any) -> bool:
    """Return whether an index is an integer; truth values and arrays are none. Local."""
    try:
        if isinstance(where, (bool, np.bool_)) or getattr(where, "ndim", 0) > 0:
            return False
        index(where)
    except Exception:  # noqa: BLE001 - what a user's own type raises, too
        return False
    return True


def _range(which: Any, extent: int, what: str) -> tuple[int, int]:
    """Return the range ``[start, stop)`` that an integer or a slice means in a dimension. Local."""
    if not isinstance(which, slice):
        at = index(which)
        if not -extent <= at < extent:
            raise ArgumentError(
                f"index: {what} {short_repr(at)} is out of range: the matrix has {extent} {what}s"
            )
        return at % extent, at % extent + 1
    try:
        start, stop, step = which.indices(extent)
    except TypeError:
        raise ArgumentError(f"a sub-matrix begins and ends at integers, got {short_repr(which)}") from None
    if step != 1:
        raise ArgumentError(
            f"a sub-matrix has step 1, got {short_repr(which)}; the array that A.allgather() returns takes any"
        )
    return start, max(start, stop)


@lru_cache(_REMEMBERED)
def _written(d: MatrixDescriptor) -> str:
    """Return the expression that makes an equal descriptor, without arguments that have their defaults."""
    given = [repr(d.shape), repr(d.block), repr(d.grid)]
    given += [f"source={d.source}"] if d.source != (0, 0) else []
    given += [f"dtype={d.dtype.name!r}", f"order={d.order!r}"]
    given += [f"lead={d.lead}"] if d.lead != (0, 0) else []
    given += [f"ld={d.ld}"] if d.ld is not None else []
    return f"MatrixDescriptor({', '.join(given)})"
