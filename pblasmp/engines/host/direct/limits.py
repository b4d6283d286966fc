# SPDX-License-Identifier: Apache-2.0
"""Up to where which way of computing a direct call is faster.

``python -m benchmarks.factorization_ways`` measures those of factorizations, and times what is computed on both sides
of each.
"""

from __future__ import annotations

import ctypes


class Limits(ctypes.Structure):
    """``limits`` of call.h.

    Attributes:
        tiny: elements of all matrices of a call that each rank computes all of: to divide the work takes a second
            meeting, or hands results from rank to rank. To copy more elements takes longer than that.
        stay: elements that move in a product before it is worth looking whether fewer do if results move instead. All
            ranks that have a part of what stays then share the work.
        portion: elements of a symmetric matrix that a cache keeps between the product with them and the one with their
            transpose.
        handoff: elements of a triangular matrix that are copied while a block's solution is handed on, when nobody
            computes; or sent while it goes to another node.
        lapack: multiplications of a factorization that each rank computes all of. Larger calls are worth a plan, in
            which the ranks share the work.
        cholesky: rows and columns: larger matrices are factored in panels, whose updates move less memory.
        width: of a block of the diagonal, in Cholesky's.
        part: rows: the least that a rank has of a matrix there.
        rows: of which a part is a multiple, as those are that the kernels of OpenBLAS compute at a time.
        meeting: multiplications of an update that take as long as ranks that wait for each other.
        factoring: multiplications of an update that take as long as to factor a block of the diagonal.
    """

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("tiny", "stay", "portion", "handoff", "lapack"),
            *("cholesky", "width", "part", "rows", "meeting", "factoring"),
        )
    )


LIMITS = Limits(
    tiny=1 << 10, stay=1 << 13, portion=1 << 16, handoff=1 << 12, lapack=9_000_000,
    cholesky=1536, width=48, part=128, rows=8, meeting=470_000, factoring=240_000,
)  # fmt: skip
_ELEMENTS = 1 << 16  # that a rank has room for, in at most two matrices


def is_small(m: int, n: int, width: int) -> bool:
    """Return whether each rank may factor m × n elements, and solve for ``width`` columns, by itself. Local."""
    return m * n * (min(m, n) + width) <= LIMITS.lapack and m * (n + width) <= _ELEMENTS


def may_be_factored(n: int) -> bool:
    """Return whether a symmetric matrix of order ``n`` may be factored at once. Local."""
    return bool(n <= LIMITS.cholesky)
