# SPDX-License-Identifier: Apache-2.0
"""Checking a distributed product without computing it again: Freivalds' test, in O(n²) on the local arrays.

R. Freivalds, Probabilistic machines can use less running time, IFIP Congress 1977: D = op(A) op(B) is
checked on random vectors x of signs, D x = op(A) (op(B) x). A wrong D passes each check with probability at most 1/2.

NaN and infinities would spoil whole sums. The rows and columns of D that hold them are left out of the sums and
compared with what NumPy computes, as ``equal_nan`` does: all of them, or a random choice if there are many.
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
_LINES = 32  # rows, and as many columns, with NaN or infinities that are recomputed
_CHUNK_BYTES = 1 << 24

Array = NDArray[Any]
_TRANSPOSED = {"N": "T", "T": "N", "C": "R"}  # the op of a transpose; R conjugates only


class Verdict(NamedTuple):
    """The outcome; errors are relative to ``|alpha op(A)| |op(B)| |x| + |beta C| |x|``.

    Attributes:
        error: the largest difference found among finite numbers.
        allowed: the largest that rounding explains.
        nans, infinities: how many elements of D are NaN or infinite.
        misplaced: how many recomputed elements are of a different kind (NaN, infinite, finite) from NumPy's.
    """

    error: float
    allowed: float
    nans: int = 0
    infinities: int = 0
    misplaced: int = 0

    @property
    def good(self) -> bool:
        """Whether the product is correct within rounding."""
        return self.error <= self.allowed and not self.misplaced


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
    """Check ``D = alpha op(A) op(B) + beta C`` on random vectors. Collective over the context.

    Returns:
        The same verdict on every rank.
    """
    with np.errstate(all="ignore"):  # NaN and overflow are expected here
        product = _Product(a, b, c if beta else None, d, alpha, beta, op_a, op_b)
        k = a.shape[1 if op_a == "N" else 0]
        rounding, kept = element_type(accumulation_dtype(d.dtype)).roundoff, element_type(d.dtype).roundoff
        allowed = 8 * math.sqrt(max(k, 1)) * rounding + 4 * kept
        spoiled, counts = product.spoiled()
        error, misplaced = product.error_of_sums(spoiled), 0
        for axis in (0, 1):
            for lines in _some(np.flatnonzero(spoiled[axis])):
                one, others = product.error_of_lines(lines, axis, allowed)
                error, misplaced = max(error, one), misplaced + others
    return Verdict(error, allowed, *counts, misplaced)


def _some(lines: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the lines, or a random choice of them, in batches."""
    if lines.size > _LINES:
        lines = np.sort(np.random.default_rng(21).choice(lines, _LINES, replace=False))
    return [lines[start : start + _VECTORS] for start in range(0, lines.size, _VECTORS)]


class _Product(NamedTuple):
    """The matrices, scalars and ops of the product."""

    a: DistributedMatrix
    b: DistributedMatrix
    c: DistributedMatrix | None
    d: DistributedMatrix
    alpha: complex
    beta: complex
    op_a: str
    op_b: str

    def _tainted(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which rows of op(A) and which columns of op(B) hold NaN or infinities. Collective."""
        if not self.alpha:  # nothing is read
            m, n = self.d.shape
            return np.zeros(m, bool), np.zeros(n, bool)
        a, b = _not_finite(self.a), _not_finite(self.b)
        rows, cols = (a.rows if self.op_a == "N" else a.cols), (b.cols if self.op_b == "N" else b.rows)
        return rows > 0, cols > 0

    def spoiled(self) -> tuple[tuple[NDArray[np.bool_], NDArray[np.bool_]], tuple[int, int]]:
        """Return the rows and columns of D to leave out of sums, and how many NaN and infinities D has. Collective."""
        rows, cols = self._tainted()
        m, n = self.d.shape
        found = _not_finite(self.d)
        if m and n:
            rows, cols = rows | (found.rows == n), cols | (found.cols == m)
        rows = rows | (found.rows > np.count_nonzero(cols))  # single elements: from overflow, or from C
        if self.c is not None:
            rows = rows | (_not_finite(self.c).rows > 0)
        return (rows, cols), (found.nans, int(found.rows.sum()) - found.nans)

    def error_of_sums(self, spoiled: tuple[NDArray[np.bool_], NDArray[np.bool_]]) -> float:
        """Return the largest difference of random sums over all but the spoiled rows and columns. Collective."""
        rows, cols = spoiled
        n = self.d.shape[1]
        step = 0.5 ** math.ceil(math.log2(2 * n + 2))  # so that sums of large numbers stay finite
        x = np.random.default_rng(20).choice([-step, step], (n, _VECTORS))
        x[cols] = 0
        ones = np.where(cols, 0, step)
        bx, bx_size = _apply(self.b, self.op_b, x, ones)
        abx, abx_size = _apply(self.a, self.op_a, bx, bx_size)
        dx, _ = _apply(self.d, "N", x, ones)
        difference, size = dx - self.alpha * abx, abs(self.alpha) * abx_size
        if self.c is not None:
            cx, cx_size = _apply(self.c, "N", x, ones)
            difference, size = difference - self.beta * cx, size + abs(self.beta) * cx_size
        # below this, results are rounded to multiples of the smallest number
        size += element_type(self.d.dtype).smallest / element_type(self.d.dtype).roundoff * (max(n, 1) * step)
        # Where sums overflow on the way, rounding explains any difference.
        comparable = ~rows & np.isfinite(size)
        return float(np.max((np.abs(difference) / size[:, None])[comparable], initial=0.0))

    def error_of_lines(self, lines: NDArray[np.int64], axis: int, allowed: float) -> tuple[float, int]:
        """Compare some rows (axis 0) or columns of D with what they must be. Collective.

        Returns:
            The largest relative difference of finite elements, and how many elements are of a different kind.
        """
        got = _lines(self.d, "N", lines, axis)
        first, last = (
            ((self.b, self.op_b), (self.a, self.op_a)) if axis else ((self.a, self.op_a), (self.b, self.op_b))
        )
        expected, size = np.zeros_like(got), np.zeros(got.shape)
        row_taint, col_taint = self._tainted()
        tainted = (row_taint[:, None] | col_taint[lines]) if axis else (col_taint[:, None] | row_taint[lines])
        if self.alpha:
            ours = _lines(*first, lines, axis)
            matrix, op = last
            product, sizes = _apply(
                matrix, op if axis else _TRANSPOSED[op], ours, np.abs(ours), all_of_it=True
            )
            expected, size = self.alpha * product, abs(self.alpha) * sizes
        if self.c is not None:
            c = _lines(self.c, "N", lines, axis)
            expected, size = expected + self.beta * c, size + abs(self.beta) * np.abs(c)
            tainted = tainted | ~np.isfinite(c)
        size = size + element_type(self.d.dtype).smallest / element_type(self.d.dtype).roundoff
        finite = np.isfinite(got)
        error = np.abs(got - expected) / size
        may_overflow = ~(size * (1 + allowed) < element_type(self.d.dtype).largest)
        close = finite & (error <= allowed)
        plain = ~tainted & finite & np.isfinite(error)
        wrong = np.where(tainted, ~_same_kind(got, expected), ~finite & ~may_overflow)
        wrong &= ~close
        return float(np.max(error[plain], initial=0.0)), int(np.count_nonzero(wrong))


def _same_kind(got: Array, expected: Array) -> NDArray[np.bool_]:
    """Return where both arrays are NaN, both infinite with the same sign, or both finite."""
    if got.dtype.kind == "c":  # libraries differ in the other part of an infinite complex number
        return np.asarray(np.isfinite(got) == np.isfinite(expected))
    both_infinite = np.isinf(got) & (got == expected)
    return np.asarray(
        both_infinite | (np.isnan(got) & np.isnan(expected)) | (np.isfinite(got) & np.isfinite(expected))
    )


def _wide(*arrays: Any) -> np.dtype:
    return np.dtype(np.complex128 if any(x.dtype.kind == "c" for x in arrays) else np.float64)


class _Counts(NamedTuple):
    """How many NaN and infinities each row and each column has, and how many NaN there are in total."""

    rows: Array
    cols: Array
    nans: int


def _not_finite(matrix: DistributedMatrix) -> _Counts:
    """Count the NaN and infinities of a matrix. Collective."""
    comm, (m, n) = matrix.context.comm, matrix.shape
    counts = np.zeros(m + n + 1)
    local = matrix.on_host()
    if local.size:
        rows, cols = matrix.descriptor.global_indices(comm.rank)
        spoiled = ~np.isfinite(local)
        if spoiled.any():
            counts[rows] = np.count_nonzero(spoiled, axis=1)
            counts[m + cols] = np.count_nonzero(spoiled, axis=0)
            counts[-1] = np.count_nonzero(np.isnan(local))
    comm.sum_into(counts)
    return _Counts(counts[:m], counts[m:-1], int(counts[-1]))


def _lines(matrix: DistributedMatrix, op: str, lines: NDArray[np.int64], axis: int) -> Array:
    """Return rows (axis 0) or columns of op(M), as columns in double precision, the same on every rank. Collective."""
    descriptor, comm = matrix.descriptor, matrix.context.comm
    along = axis if op == "N" else 1 - axis
    found = np.zeros((descriptor.shape[1 - along], lines.size), _wide(descriptor))
    local = matrix.on_host()
    if local.size:
        indices = descriptor.global_indices(comm.rank)
        at = np.minimum(np.searchsorted(lines, indices[along]), lines.size - 1)
        mine = lines[at] == indices[along]
        part = local[:, mine] if along else local[mine].T
        found[np.ix_(indices[1 - along], at[mine])] = part.astype(found.dtype)
        if op == "C":
            np.conjugate(found, out=found)
    comm.sum_into(found)
    return found


def _apply(
    matrix: DistributedMatrix, op: str, x: Array, size: Array, *, all_of_it: bool = False
) -> tuple[Array, Array]:
    """Return ``op(M) x`` and ``|op(M)| size`` in double precision, the same on every rank. Collective.

    NaN and infinities of M count as zero unless ``all_of_it``.
    """
    descriptor, comm = matrix.descriptor, matrix.context.comm
    transposed = op in ("T", "C")
    length = descriptor.shape[1 if transposed else 0]
    y = np.zeros((length, x.shape[1]), _wide(descriptor, x))
    y_size = np.zeros((length, *size.shape[1:]))
    local = matrix.on_host()
    if local.size:
        rows, cols = descriptor.global_indices(comm.rank)
        if transposed:
            local, rows, cols = local.T, cols, rows
        step = max(1, _CHUNK_BYTES // (local.shape[1] * y.itemsize))
        for start in range(0, len(rows), step):
            part = local[start : start + step].astype(y.dtype)
            if op in ("C", "R"):
                np.conjugate(part, out=part)
            if not all_of_it:
                part[~np.isfinite(part)] = 0
            y[rows[start : start + step]] = part @ x[cols]
            y_size[rows[start : start + step]] = np.abs(part) @ size[cols]
    comm.sum_into(y)
    comm.sum_into(y_size)
    return y, y_size
