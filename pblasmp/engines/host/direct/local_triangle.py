# SPDX-License-Identifier: Apache-2.0
"""BLAS's products with a triangle that a rank has, and its solves."""

from __future__ import annotations

from ...sub_matrix import SubMatrix, UnfitError
from .program import Preparation
from .slabs import Factor, Steps, integer, scalar

__all__ = ["MIRRORED", "OTHER_SIDE", "Triangular"]

MIRRORED = {"L": "U", "U": "L"}
OTHER_SIDE = {"L": "R", "R": "L"}


class Triangular:
    """BLAS's trsm or trmm: it sees both matrices in Fortran order, and one in C order is the transpose of that.

    Args:
        call: the call.
        of_columns, by_columns: whether the triangular matrix, and the other one, are in Fortran order.
    """

    def __init__(self, call: Preparation, of_columns: bool, by_columns: bool) -> None:
        asked = call.asked
        op = "T" if asked.op_a == "C" and not asked.d[0].pattern.is_complex else asked.op_a
        if of_columns != by_columns:
            if op == "C":
                raise UnfitError
            op = "T" if op == "N" else "N"
        side = asked.side if by_columns else OTHER_SIDE[asked.side]
        uplo = asked.uplo if of_columns else MIRRORED[asked.uplo]
        self._options = side.encode(), uplo.encode(), op.encode(), asked.diag.encode()
        self._function, self._alpha = call.function(asked.routine), scalar(asked.alpha, call.letter)
        self._by_columns = by_columns
        self._of_vector = call.function("trsv" if asked.routine == "trsm" else "trmv")
        self._vectors = asked.alpha == 1 and side == "L"

    def steps(self, a: Factor | SubMatrix, m: int, n: int, b: Factor | SubMatrix) -> Steps:
        """Return the step that replaces ``b``, of m × n, by the result."""
        if not self._by_columns:
            m, n = n, m
        if n == 1 and self._vectors:  # for one column the others are slow
            one = integer[1]
            return [(self._of_vector, (*self._options[1:], integer[m], a.at, integer[a.ld], b.at, one))]
        sizes = integer[m], integer[n]
        return [
            (
                self._function,
                (*self._options, *sizes, self._alpha, a.at, integer[a.ld], b.at, integer[b.ld]),
            )
        ]
