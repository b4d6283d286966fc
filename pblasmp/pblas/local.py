# SPDX-License-Identifier: Apache-2.0
"""What a process has of a sub-matrix, and what it can do there by itself: fill, scale, copy, take an element."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..engines.direct import Part
from ..engines.direct.spans import Axes, Span
from ..engines.direct.sub_matrix import SubMatrix
from ..layout import Trapezoid
from ..layout.caches import sized_cache
from ..matrix.distributed import DistributedMatrix

__all__ = ["OwnElements", "copied", "element_place", "filled", "scaled", "with_same_places"]

_SLAB = 1 << 18  # elements that are computed at a time


class OwnElements(NamedTuple):
    """The elements of a sub-matrix that this process has.

    Attributes:
        xp: the module of their array.
        local: that array.
        rows, cols: their rows and columns in the sub-matrix, counted from 0, ascending.
    """

    xp: Any
    local: Any
    rows: NDArray[np.int64]
    cols: NDArray[np.int64]

    @classmethod
    def of(cls, x: DistributedMatrix) -> OwnElements | None:
        """Return a matrix's; None if this process has no element of it. Local."""
        ctx, d = x.context, x.descriptor
        if ctx.coords(d) is None or not x.local.size:
            return None
        return cls(ctx.engine.xp, x.local, *d.global_indices(ctx.rank))

    @classmethod
    def of_part(cls, part: Part) -> OwnElements | None:
        """Return a part's on the host; None if this process has no element of it. Local."""
        x = SubMatrix(part)
        if not x.active:
            return None
        return cls(np, x.local(), _indices(x.rows, x.row), _indices(x.cols, x.col))


@sized_cache(lambda found: found.nbytes)
def _indices(span: Span, process: int) -> NDArray[np.int64]:
    return span.indices(process)


def with_same_places(a: Part, b: Part) -> bool:
    """Return whether each process has the same elements of two sub-matrices, which share no memory. Local."""
    apart = a[0].end <= b[0].address or b[0].end <= a[0].address
    return apart and SubMatrix(a).same_places(SubMatrix(b))


def element_place(part: Part) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the process that has the first element of a sub-matrix, and where in its local array. Local."""
    held, i, j, *_ = part
    (row, down), (col, right) = _owner(held.pattern.rows, i), _owner(held.pattern.cols, j)
    return (row, col), (down, right)


def _owner(axes: Axes, index: int) -> tuple[int, int]:
    """Return the process that has an index of a whole matrix, and its local index. Local."""
    blocks, within = divmod(index, axes.block)
    rounds, turn = divmod(blocks, axes.nprocs)
    return (axes.source + turn) % axes.nprocs, rounds * axes.block + within


def _slabs(piece: OwnElements, part: Trapezoid) -> Iterator[tuple[slice, Any, Any]]:
    """Yield which columns, with which elements count there, and how far these are right of the diagonal. Local."""
    rows, cols = piece.xp.asarray(piece.rows)[:, None], piece.xp.asarray(piece.cols)
    step = max(1, _SLAB // len(rows))
    for at in range(0, len(cols), step):
        apart = cols[None, at : at + step] - rows
        inside = apart >= part.diagonal if part.uplo == "U" else apart <= part.diagonal
        yield slice(at, at + step), inside, apart


def filled(piece: OwnElements, part: Trapezoid | None, alpha: Any, beta: Any) -> None:
    """Set the elements of a trapezoid, or all, to ``beta`` on the diagonal and to ``alpha`` off it. Local."""
    xp, local, rows, cols = piece
    if part is None:
        local[...] = alpha
        at = cols.searchsorted(rows)
        i = (cols.take(at, mode="clip") == rows).nonzero()[0]
        local[xp.asarray(i), xp.asarray(at[i])] = beta
        return
    alpha, beta = (local.dtype.type(each) for each in (alpha, beta))
    for where, inside, apart in _slabs(piece, part):
        local[:, where] = xp.where(inside, xp.where(apart == 0, beta, alpha), local[:, where])


def scaled(piece: OwnElements, part: Trapezoid | None, factor: Any) -> None:
    """Multiply the elements of a trapezoid, or all. Local."""
    xp, local, _, _ = piece
    if part is None:
        local *= factor
        return
    for where, inside, _ in _slabs(piece, part):
        local[:, where] = xp.where(inside, local[:, where] * factor, local[:, where])


def copied(source: OwnElements, target: OwnElements, part: Trapezoid | None) -> None:
    """Copy the elements of a trapezoid, or all, between sub-matrices ``with_same_places``. Local."""
    xp, local, _, _ = target
    if part is None:
        local[...] = source.local
        return
    for where, inside, _ in _slabs(target, part):
        local[:, where] = xp.where(inside, source.local[:, where], local[:, where])
