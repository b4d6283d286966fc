# SPDX-License-Identifier: Apache-2.0
"""Checking a distributed product without computing it again: Freivalds' test, in O(n²) on the local arrays.

R. Freivalds, Probabilistic machines can use less running time, IFIP Congress 1977: D = op(A) op(B) is tried
on random vectors x of signs, D x = op(A) (op(B) x). A wrong D passes each with a probability of at most 1/2.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..dtypes import accumulation_dtype, element_type
from ..matrix import DistributedMatrix

__all__ = ["Verdict", "verify_product"]

_VECTORS = 8
_CHUNK_BYTES = 1 << 24


class Verdict(NamedTuple):
    """The outcome, relative to ``|alpha op(A)| |op(B)| |x| + |beta C| |x|``.

    Attributes:
        error: the largest difference found.
        allowed: the largest that rounding explains.
    """

    error: float
    allowed: float

    @property
    def good(self) -> bool:
        """Whether the product may be called right; a NaN is not."""
        return self.error <= self.allowed


def verify_product(
    a: DistributedMatrix,
    b: DistributedMatrix,
    c: DistributedMatrix | None,
    d: DistributedMatrix,
    *,
    alpha: complex = 1,
    beta: complex = 0,
    op_a: str = "N",
    op_b: str = "N",
) -> Verdict:
    """Try ``D = alpha op(A) op(B) + beta C`` on random vectors. Collective over the context.

    Returns:
        The same verdict on every rank.
    """
    n, k = d.shape[1], a.shape[1 if op_a == "N" else 0]
    x = np.random.default_rng(20).choice([-1.0, 1.0], (n, _VECTORS))
    bx, bx_size = _apply(b, op_b, x, np.ones(n))
    abx, abx_size = _apply(a, op_a, bx, bx_size)
    dx, _ = _apply(d, "N", x, np.ones(n))
    difference, size = dx - alpha * abx, abs(alpha) * abx_size
    if c is not None and beta:
        cx, cx_size = _apply(c, "N", x, np.ones(n))
        difference, size = difference - beta * cx, size + abs(beta) * cx_size
    rounding, kept = element_type(accumulation_dtype(d.dtype)).roundoff, element_type(d.dtype).roundoff
    # Below this, results round to multiples of the smallest number.
    size += max(n, 1) * element_type(d.dtype).smallest / kept
    error = float(np.max(np.abs(difference) / size[:, None], initial=0.0))
    return Verdict(error, 8 * math.sqrt(max(k, 1)) * rounding + 4 * kept)


def _apply(
    matrix: DistributedMatrix, op: str, x: NDArray[Any], size: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ``op(M) x`` and ``|op(M)| size`` in double precision, the same on every rank."""
    descriptor, comm = matrix.descriptor, matrix.context.comm
    wide = np.dtype(np.complex128 if descriptor.dtype.kind == "c" or x.dtype.kind == "c" else np.float64)
    length = descriptor.shape[0 if op == "N" else 1]
    y, y_size = np.zeros((length, x.shape[1]), wide), np.zeros(length)
    local = matrix.on_host()
    if local.size:
        rows, cols = descriptor.global_indices(comm.rank)
        if op != "N":
            local, rows, cols = local.T, cols, rows
        step = max(1, _CHUNK_BYTES // (local.shape[1] * wide.itemsize))
        for start in range(0, len(rows), step):
            part = local[start : start + step].astype(wide)
            if op == "C":
                np.conjugate(part, out=part)
            y[rows[start : start + step]] = part @ x[cols]
            y_size[rows[start : start + step]] = np.abs(part) @ size[cols]
    comm.sum_into(y)
    comm.sum_into(y_size)
    return y, y_size
