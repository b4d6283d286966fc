# SPDX-License-Identifier: Apache-2.0
"""Sums of squares that neither overflow nor underflow where their square root does not: scaled, like LAPACK's lassq."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["PLAIN", "joined", "root", "squares"]

_SAFE = 2.0**-400, 2.0**400  # squares in between, and sums of them, neither underflow nor overflow
PLAIN = 2.0**-800, 2.0**1000
"""Sums of squares in between have lost nothing."""

Scaled = tuple[int, float]
"""``(e, s)``: s times 4 to the e."""


def squares(xp: Any, values: Any) -> Scaled:
    """Return the sum of the squares of the absolute values, in double precision, as ``(e, s)``. Local.

    Args:
        xp: the module of the array.
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
