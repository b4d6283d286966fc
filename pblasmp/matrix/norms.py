# SPDX-License-Identifier: Apache-2.0
"""Norms of matrices of which only a triangle is stored: triangular, symmetric and Hermitian ones.

Everything is summed in double precision, in the order of the ranks: every rank gets the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engines.arrays import as_numpy
from ..engines.local.reductions import joined, root, squares
from ..errors import ArgumentError, short_repr
from ..layout.grid import one_of
from ..runtime.handle import Handle
from .reductions import kind_of_norm

__all__ = ["norm_of_stored"]

_SLAB = 1 << 18  # elements at a time

Sums = NDArray[np.float64]


def norm_of_stored(matrix: Handle, which: object, uplo: object, diag: object, kind: object) -> float:
    """Return a norm of what a triangle describes. Collective over the context; see ``DistributedMatrix.norm``."""
    ctx, d = matrix.context, matrix.descriptor
    with ctx.agreement("norm") as facts, np.errstate(all="ignore"):
        facts.update(matrix=d, ord=which, uplo=uplo, diag=diag, kind=kind)
        named = kind_of_norm(which)
        if named is None:
            raise ArgumentError(f"ord: expected 'fro', 1, 'inf' or 'max', got {short_repr(which)}")
        for name, value, legal in (
            ("uplo", uplo, ("L", "U")),
            ("diag", diag, ("N", "U")),
            ("kind", kind, ("triangular", "symmetric", "hermitian")),
        ):
            if not one_of(value, legal):
                raise ArgumentError(
                    f"{name}: expected {' or '.join(map(repr, legal))}, got {short_repr(value)}"
                )
        mirrored = kind != "triangular"
        if mirrored and d.shape[0] != d.shape[1]:
            raise ArgumentError(f"kind: a {kind} matrix is square, got {d.shape[0]}x{d.shape[1]}")
        if mirrored and diag == "U":
            raise ArgumentError(f"diag: 'U' is for triangular matrices, got {kind!r}")
        parts = _Parts(matrix, str(uplo), unit=diag == "U", real=kind == "hermitian")
        mine = {"max": parts.largest, "fro": parts.squares}.get(named, parts.sums)
        found = mine(mirrored=mirrored)
    everyones = ctx.comm.allgather(found)
    ones = min(d.shape) if diag == "U" else 0
    if named == "max":
        return float(np.max([*everyones, float(ones > 0)], initial=0))
    if named == "fro":
        return root(joined([*everyones, (0, float(ones))]))
    by_row, by_column = (reduce(np.add, each) for each in zip(*everyones, strict=True))
    sums: Sums = by_column if named == "1" else by_row
    sums[:ones] += 1
    return float(sums.max(initial=0))


class _Parts:
    """This rank's elements of a triangle, slab by slab. Local.

    Args:
        matrix: the matrix.
        uplo: "L" or "U".
        unit: the diagonal is left out.
        real: the imaginary parts of the diagonal are taken as 0.
    """

    def __init__(self, matrix: Handle, uplo: str, *, unit: bool, real: bool) -> None:
        ctx, self._d = matrix.context, matrix.descriptor
        ctx.engine.synchronize()  # before values are read: that would wait forever if a rank is gone
        self._xp, self._local = ctx.engine.xp, matrix.local
        self._upper, self._unit, self._real = uplo == "U", unit, real
        inside = ctx.coords(self._d) is not None and self._local.size
        self._rows, self._cols = self._d.global_indices(ctx.rank) if inside else (np.empty(0, np.int64),) * 2

    def _slabs(self) -> Iterator[tuple[slice, Any, Any]]:
        """Yield which columns, the elements with 0 outside the triangle, and which are on the diagonal."""
        if not len(self._rows) or not len(self._cols):
            return
        xp, step = self._xp, max(1, _SLAB // len(self._rows))
        wide = np.complex128 if self._local.dtype.kind == "c" else np.float64
        rows = xp.asarray(self._rows)[:, None]
        for at in range(0, len(self._cols), step):
            part = slice(at, at + step)
            apart = xp.asarray(self._cols[part])[None] - rows
            inside = (apart >= int(self._unit)) if self._upper else (apart <= -int(self._unit))
            values = xp.where(inside, self._local[:, part].astype(wide), 0)
            if self._real and values.dtype.kind == "c":
                values = xp.where(apart == 0, values.real, values)
            yield part, values, apart == 0

    def largest(self, *, mirrored: bool) -> float:  # noqa: ARG002
        """Return the largest absolute value."""
        return float(np.max([float(self._xp.abs(values).max()) for _, values, _ in self._slabs()], initial=0))

    def squares(self, *, mirrored: bool) -> tuple[int, float]:
        """Return the sum of squares, scaled; off the diagonal twice if ``mirrored``."""
        xp, found = self._xp, []
        for _, values, on_diagonal in self._slabs():
            exponent, total = squares(xp, xp.where(on_diagonal, 0, values))
            found += [
                (exponent, total * (2 if mirrored else 1)),
                squares(xp, xp.where(on_diagonal, values, 0)),
            ]
        return joined(found)

    def sums(self, *, mirrored: bool) -> tuple[Sums, Sums]:
        """Return the sums of absolute values by row and by column of the matrix."""
        xp, (m, n) = self._xp, self._d.shape
        by_row, by_column = np.zeros(m), np.zeros(n)
        for part, values, on_diagonal in self._slabs():
            sizes = xp.abs(values)
            columns, rows = (as_numpy(xp, sizes.sum(axis=axis)) for axis in (0, 1))
            by_row[self._rows] += rows
            by_column[self._cols[part]] += columns
            if mirrored:
                beside = xp.where(on_diagonal, 0, sizes)
                columns, rows = (as_numpy(xp, beside.sum(axis=axis)) for axis in (0, 1))
                by_column[self._rows] += rows
                by_row[self._cols[part]] += columns
        return by_row, by_column
