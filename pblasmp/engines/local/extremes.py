# SPDX-License-Identifier: Apache-2.0
"""The ends of a type's range: powers of two that scale matrices away from them, and columns that depend on others.

All is local. Ranks agree on the sizes that they have found; exponents follow from these alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from ...layout import MatrixDescriptor

Array = Any


def _real_parts(x: Array) -> tuple[Array, ...]:
    return (x.real, x.imag) if x.dtype.kind == "c" else (x,)


def largest(xp: Any, arrays: Iterable[Array]) -> float:
    """Return the largest size of a real or imaginary part, which cannot overflow; NaN if there is one. Local.

    Sizes are compared by their bits: CuPy's kernels take float32 below 1.2e-38 for 0.
    """
    found = np.float64(0)
    for x in arrays:
        for part in _real_parts(x) if x.size else ():
            bits = part.dtype.itemsize * 8
            positive = int(xp.max(part.view(f"int{bits}")))
            negative = int(xp.max(part.view(f"uint{bits}"))) & ((1 << bits - 1) - 1)
            most = np.array([max(0, positive), negative], f"uint{bits}").view(part.dtype)
            found = np.max([found, *most.astype(np.float64)])
    return float(found)


def scaling(size: float, dtype: np.dtype, *, root: bool = False, exponents: range | None = None) -> int:
    """Return the exponent of the power of two that brings ``size`` into the range in which LAPACK computes. Local.

    Args:
        size: the largest element.
        root: the range in which squares, and those of their roundings, neither overflow nor underflow. That of ?SYEVD
            is wider by the root of eps: at its lower end bisection loses a third of the digits.
        exponents: of two, among which that of ``size`` is to be instead: any other becomes the first.

    Source: LAPACK, ?GELS and ?SYEVD, whose factors are no powers of two and so round.
    """
    if not (0 < size < math.inf):
        return 0
    info = np.finfo(dtype)
    least = int(info.minexp) // (1 + root) + int(info.nmant)
    exponent = math.frexp(size)[1] - 1
    if exponents is not None:
        return 0 if exponent in exponents else exponents.start - exponent
    return max(least - exponent, 0) + min(-least - 1 - exponent, 0)


def scale_by_power(x: Array, exponent: int) -> None:
    """Multiply an array by a power of two, in its place. Local."""
    most = int(np.finfo(x.dtype).maxexp) - 2
    with np.errstate(all="ignore"):
        while exponent:
            step = max(-most, min(most, exponent))
            x *= 2.0**step
            exponent -= step


SINGULAR = 20
"""Times eps: up to which the smallest singular value of columns of norm 1 is the rounding of 0.

Of 118,000 products of random matrices with 2 to 500 columns and rank n - 1, in all types, it was estimated as 9.3 eps
at most, in the median as about 1 eps. Of as many random matrices of full rank, with 3 rows more than columns, it was
140,000 eps at least, in float32. Of square ones of order 200 in float32, which may be ill-conditioned, it was 300 eps.
"""


def rank_tolerance(a: MatrixDescriptor) -> float:
    """Return up to which part of its column a diagonal element of R is the rounding of 0. Local.

    What is left of a column that depends on others grows neither with the rows nor, from about 100 on, with the
    columns. Of random matrices of rank n - 1 few have more, of those of full rank few less than 100 times as much.
    """
    return 100 * math.sqrt(min(*a.shape, 100)) * float(np.finfo(a.dtype).eps)


def column_sizes(xp: Any, x: Array) -> Array:
    """Return of each column the largest size of a real or imaginary part; x has at least one row. Local."""
    found = None
    for part in _real_parts(x):
        for each in (xp.max(part, axis=0), -xp.min(part, axis=0)):
            found = each if found is None else xp.maximum(found, each)
    return found


def is_dependent(xp: Any, diagonal: Array, sizes: Array, tolerance: float) -> Array:
    """Return which columns of R depend on the columns before them, up to rounding. Local.

    What is left of such a column, the diagonal element, is small beside the column. Not beside the whole of R: the
    columns of A may have units of their own.

    Args:
        diagonal: of R.
        sizes: of its columns.
        tolerance: 0: only exact zeros are meant.
    """
    return xp.less_equal(xp.abs(diagonal), tolerance * sizes)
