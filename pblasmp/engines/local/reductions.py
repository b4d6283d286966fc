# SPDX-License-Identifier: Apache-2.0
"""Level-1 reductions: what each rank finds in its part of a vector, and what all of these make, rank after rank.

Sums are made in double precision, in the order of the ranks: every rank gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .sums import joined, root, squares

__all__ = ["OF_MATRICES", "REDUCTIONS", "Reduction"]

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
    return values.reshape(-1).astype(np.complex128 if values.dtype.kind == "c" else np.float64, copy=False)


def _product(xp: Any, vectors: Sequence[Array], *, conjugate: bool) -> Sequence[float]:
    left, right = map(_wide, vectors)
    found = complex((xp.vdot if conjugate else xp.dot)(left, right)) if left.size else 0j
    return found.real, found.imag


def _complex_sum(rows: Rows) -> complex:
    return complex(_sum(rows), _sum(rows, 1))


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


def _of_matrix(find: Callable[[Any, Array], Sequence[float]], empty: Sequence[float]) -> Callable[..., Any]:
    """Return the part of a reduction that is told of one matrix, and what is told of none of its elements."""

    def part(xp: Any, matrices: Sequence[Array], _: Place) -> Sequence[float]:
        (x,) = matrices
        if not x.size:
            return empty
        return find(xp, x.astype(np.complex128 if x.dtype.kind == "c" else np.float64, copy=False))

    return part


def _greatest(rows: Rows) -> float:
    """Return the largest of the ranks' numbers; NaN if one is."""
    return max((row[0] for row in rows), key=lambda x: (math.isnan(x), x))


def _value(_: Any, x: Array) -> Sequence[float]:
    number = complex(x[0, 0])
    return 1.0, number.real, number.imag


REDUCTIONS = {
    "dot": Reduction(lambda xp, vectors, _: _product(xp, vectors, conjugate=False), _complex_sum),
    "dotc": Reduction(lambda xp, vectors, _: _product(xp, vectors, conjugate=True), _complex_sum),
    "nrm2": Reduction(_squares, _norm),
    "asum": Reduction(_sizes, _sum),
    "amax": Reduction(_largest, _chosen),
    "norm fro": Reduction(_of_matrix(squares, (0, 0.0)), _norm),
    "norm max": Reduction(_of_matrix(lambda xp, x: (float(xp.abs(x).max()),), (0.0,)), _greatest),
    "norm 1": Reduction(_of_matrix(lambda xp, x: (float(xp.abs(x).sum(axis=0).max()),), (0.0,)), _greatest),
    "norm inf": Reduction(_of_matrix(lambda xp, x: (float(xp.abs(x).sum(axis=1).max()),), (0.0,)), _greatest),
    "element": Reduction(
        _of_matrix(_value, (0.0, 0.0, 0.0)), lambda rows: next(complex(*row[1:]) for row in rows if row[0])
    ),
}
"""By routine. nrm2 and the Frobenius norm are scaled like LAPACK's. Norms and the element are of matrices."""

OF_MATRICES = frozenset(name for name in REDUCTIONS if name == "element" or name.startswith("norm "))
"""Those of one matrix. Of "norm 1" a rank must have all of a column of which it has any, of "norm inf" all of a row."""
