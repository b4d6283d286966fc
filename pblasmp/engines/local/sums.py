# SPDX-License-Identifier: Apache-2.0
"""Reductions: what each rank finds in its part of a vector or matrix, and what all of these make, rank after rank.

Sums are made in double precision, in the order of the ranks: every rank gets the same bits. Sums of squares neither
overflow nor underflow where their square root does not: they are scaled, like LAPACK's lassq.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...comm import Side, gather_numbers
from ...dtypes import double_dtype
from ...layout import MatrixDescriptor, Trapezoid
from ..protocol import Engine

_SAFE = 2.0**-400, 2.0**400  # squares in between, and sums of them, neither underflow nor overflow
PLAIN = 2.0**-800, 2.0**1000
"""Sums of squares in between have lost nothing."""

Scaled = tuple[int, float]
"""``(e, s)``: s times 4 to the e."""


def squares(xp: Any, values: Any) -> Scaled:
    """Return the sum of the squares of the absolute values, in double precision, as ``(e, s)``. Local.

    Args:
        values: float64 or complex128, at least one.
    """
    parts = (values.real, values.imag) if values.dtype.kind == "c" else (values,)
    total = sum(_plain(xp, part) for part in parts)  # it may overflow, which math.fsum raises
    if PLAIN[0] < total < PLAIN[1]:
        return 0, total
    largest = max((float(xp.abs(part).max()) for part in parts), key=lambda x: (math.isnan(x), x))
    if largest == 0 or not math.isfinite(largest):
        return 0, largest
    exponent = 0
    if not _SAFE[0] < largest < _SAFE[1] and largest > 0:
        exponent = math.frexp(largest)[1]
        parts = tuple(xp.ldexp(part, -exponent) for part in parts)
    return exponent, math.fsum(_plain(xp, part) for part in parts)


def _plain(xp: Any, part: Any) -> float:
    """Return a sum of squares without scaling; a vector's by BLAS."""
    return float(xp.dot(part, part) if part.ndim == 1 else xp.sum(part * part))


def joined(sums: list[Scaled]) -> Scaled:
    """Return the sum of some ``(e, s)``, as one. Local."""
    if not any(e for e, _ in sums):
        return 0, math.fsum(s for _, s in sums)
    exponent = max((e for e, s in sums if s), default=0)
    return exponent, math.fsum(math.ldexp(s, 2 * (e - exponent)) for e, s in sums)


def root(total: Scaled) -> float:
    """Return the square root of ``(e, s)``; infinity if it is too large for double precision. Local."""
    exponent, sum_of_squares = total
    try:
        return math.ldexp(math.sqrt(sum_of_squares), exponent)
    except OverflowError:
        return math.inf


Array = Any
Place = Callable[[int], int]
Rows = Sequence[Sequence[float]]


class Reduction(NamedTuple):
    """A routine that makes a number of one vector or two.

    Attributes:
        part: ``part(xp, vectors, index)`` returns at most 4 numbers of this rank's elements, which have one dimension;
            ``index`` returns the global index of one of them. Local.
        total: makes the result of every rank's numbers. Local.
    """

    part: Callable[[Any, Sequence[Array], Place], Sequence[float]]
    total: Callable[[Rows], Any]


def _wide(values: Array) -> Array:
    """Return the elements in double precision, in one dimension."""
    return values.reshape(-1).astype(double_dtype(values.dtype), copy=False)


def _product(xp: Any, vectors: Sequence[Array], *, conjugate: bool) -> Sequence[float]:
    left, right = map(_wide, vectors)
    found = complex((xp.vdot if conjugate else xp.dot)(left, right)) if left.size else 0j
    return found.real, found.imag


def _sum_of_products(rows: Rows) -> complex:
    return _sum(rows) if len(rows[0]) == 1 else complex(_sum(rows), _sum(rows, 1))


def _sum(rows: Rows, at: int = 0) -> float:
    """Return the sum of the ranks' numbers in this order; infinities and NaN as in IEEE arithmetic."""
    total = 0.0
    for row in rows:
        total += row[at]
    return total


def _squares(xp: Any, vectors: Sequence[Array], _: Place) -> Sequence[float]:
    (x,) = vectors
    return squares(xp, _wide(x)) if x.size else (0, 0.0)


def _norm(rows: Rows) -> float:
    for exponent, _ in rows:
        if exponent:
            break
    else:
        return math.sqrt(math.fsum([total for _, total in rows]))
    return root(joined([(int(exponent), total) for exponent, total in rows]))


def _sizes(xp: Any, vectors: Sequence[Array], _: Place) -> Sequence[float]:
    (x,) = vectors
    return (float(_size(xp, _wide(x)).sum()) if x.size else 0.0,)


def _size(xp: Any, values: Array) -> Array:
    """Return |Re| + |Im| of each element."""
    return xp.abs(values.real) + xp.abs(values.imag) if values.dtype.kind == "c" else xp.abs(values)


def _largest(xp: Any, vectors: Sequence[Array], index: Place) -> Sequence[float]:
    """Return the size of the element to choose, its index and its value; an index of -1 without elements."""
    (x,) = vectors
    if not x.size:
        return -1.0, -1.0, 0.0, 0.0
    values = _wide(x)
    sizes = _size(xp, values)
    at = int(sizes.argmax())
    value = complex(values[at])
    return float(sizes[at]), float(index(at)), value.real, value.imag


def _chosen(rows: Rows) -> tuple[complex, int]:
    """Return the element with the largest |Re| + |Im|, NaN being the largest, and its index; -1 without elements."""
    size, index, real, imaginary = -1.0, -1.0, 0.0, 0.0
    for row in rows:
        of, at = row[0], row[1]
        if at < 0:
            continue
        if of > size or (of == size and at < index) or (of != of and (size == size or at < index)):
            size, index, real, imaginary = row
    return complex(real, imaginary), int(index)


def stored(
    xp: Any, values: Array, rows: Array, cols: Array, kind: str, uplo: str, diag: str
) -> tuple[Array, Array | None]:
    """Return what elements stand for, in double precision, and which of them count twice; None: none. Local.

    Args:
        values: elements of a matrix, a part of its rows and columns.
        rows, cols: which, counted from 0.
        kind: "all", "triangular", "symmetric", "hermitian", or "diagonal": the rest counts as 0.
        uplo: which triangle is read, if it is not all.
        diag: "U": the diagonal of a triangular matrix is ones, and is not read.
    """
    values = values.astype(double_dtype(values.dtype), copy=False)
    if kind == "all":
        return values, None
    on_diagonal = cols == rows[:, None]
    if kind == "diagonal":
        return xp.where(on_diagonal, values, 0), None
    found = xp.where(Trapezoid(uplo).mask(rows, cols), values, 0)
    if kind == "triangular":
        return (xp.where(on_diagonal, 1, found) if diag == "U" else found), None
    if kind == "hermitian" and found.dtype.kind == "c":
        found = xp.where(on_diagonal, found.real, found)
    return found, ~on_diagonal


def _if_any(find: Callable[..., Sequence[float]], empty: Sequence[float]) -> Callable[..., Any]:
    """Return the part of a reduction of what ``stored`` returns: ``empty`` without elements."""
    return lambda _, matrix, __: find(*matrix) if matrix[0].size else empty


def squares_of_stored(xp: Any, values: Array, twice: Array | None) -> Scaled:
    """Return the sum of the squares of what ``stored`` returns, as ``squares`` does. Local."""
    if twice is None:
        return squares(xp, values)
    exponent, total = squares(xp, xp.where(twice, values, 0))
    return joined([(exponent, 2 * total), squares(xp, xp.where(twice, 0, values))])


def _largest_sum(axis: int) -> Callable[..., Sequence[float]]:
    def find(values: Array, twice: Array | None) -> Sequence[float]:
        sizes = np.abs(values)
        sums = sizes.sum(axis=axis)
        if twice is not None:
            sums = sums + np.where(twice, sizes, 0).sum(axis=1 - axis)
        return (float(sums.max()),)

    return find


def _matrix_total(values: Array, _: Array | None) -> Sequence[float]:
    found = complex(values.sum())
    return found.real, found.imag


def _greatest(rows: Rows) -> float:
    """Return the largest of the ranks' numbers; NaN if one is."""
    return max((row[0] for row in rows), key=lambda x: (math.isnan(x), x))


def _element(values: Array, _: Array | None) -> Sequence[float]:
    number = complex(values[0, 0])
    return 1.0, number.real, number.imag


REDUCTIONS = {
    "dot": Reduction(lambda xp, vectors, _: _product(xp, vectors, conjugate=False), _sum_of_products),
    "dotc": Reduction(lambda xp, vectors, _: _product(xp, vectors, conjugate=True), _sum_of_products),
    "nrm2": Reduction(_squares, _norm),
    "asum": Reduction(_sizes, _sum),
    "amax": Reduction(_largest, _chosen),
}
"""By routine. nrm2 is scaled like LAPACK's."""

MATRIX_REDUCTIONS = {
    "norm fro": Reduction(_if_any(partial(squares_of_stored, np), (0, 0.0)), _norm),
    "norm max": Reduction(_if_any(lambda values, _: (float(np.abs(values).max()),), (0.0,)), _greatest),
    "norm 1": Reduction(_if_any(_largest_sum(0), (0.0,)), _greatest),
    "norm inf": Reduction(_if_any(_largest_sum(1), (0.0,)), _greatest),
    "sum": Reduction(_if_any(_matrix_total, (0.0, 0.0)), _sum_of_products),
    "element": Reduction(
        _if_any(_element, (0.0, 0.0, 0.0)), lambda rows: next(complex(*row[1:]) for row in rows if row[0])
    ),
}
"""Of what ``stored`` returns; the Frobenius norm is scaled like LAPACK's.

For "norm 1" a rank must have all of a column of which it has any, for "norm inf" all of a row; if elements count twice,
all of the matrix. "element" is of a matrix that has one.
"""


class Vector(NamedTuple):
    """A matrix of one column.

    Attributes:
        descriptor: its layout.
        local: this rank's part, of one column or none.
    """

    descriptor: MatrixDescriptor
    local: Array


def reduced(engine: Engine, routine: str, vectors: Sequence[Vector]) -> Any:
    """Return what one of ``REDUCTIONS`` makes of its vectors, the same on every rank. Collective over the ranks."""
    x, *others = vectors
    rank, rows, grid = engine.transport.rank, x.descriptor.rows, x.descriptor.grid

    def index(at: int) -> int:
        return int(rows.to_global(grid.coords(rank)[0], at))

    part, total = REDUCTIONS[routine]
    arrays = [x.local, *(_aligned(engine, y, x) for y in others)]
    return total(gather_numbers(engine.transport.comm, part(engine.xp, arrays, index)).tolist())


def _aligned(engine: Engine, y: Vector, x: Vector) -> Array:
    """Return the elements of ``y`` that are where this rank's elements of ``x`` are. Collective over the ranks."""
    if y.descriptor.same_places(x.descriptor):
        return y.local
    transport = engine.transport
    there = engine.operations.scratch("aligned", x.local.shape, y.descriptor.dtype, x.descriptor.order)
    exchange = transport.exchange(Side.of(y.descriptor), Side.of(x.descriptor), y.descriptor.dtype)
    transport.start_exchange(exchange, {transport.rank: y.local}, {transport.rank: there}).finish()
    return there
