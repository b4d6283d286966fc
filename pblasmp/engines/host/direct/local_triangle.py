# SPDX-License-Identifier: Apache-2.0
"""BLAS's products with a triangle that a rank has, and its solves."""

from __future__ import annotations

from ...direct.blas_form import triangular_words
from ...direct.sub_matrix import SubMatrix
from .program import Preparation
from .slabs import Factor, Steps, integer, scalar

__all__ = ["Triangular"]


class Triangular:
    """BLAS's trsm or trmm.

    Args:
        call: the call.
        of_columns, by_columns: whether the triangular matrix, and the other one, are in Fortran order.
    """

    def __init__(self, call: Preparation, of_columns: bool, by_columns: bool) -> None:
        asked = call.asked
        side, uplo, op = triangular_words(asked, of_columns, by_columns)
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
