# SPDX-License-Identifier: Apache-2.0
"""Norms, sums and elements of matrices as direct calls: numbers that the ranks tell with their votes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...direct import Asked
from ...direct.sub_matrix import SubMatrix, UnfitError, vote_number
from ...local.reductions import MATRIX_REDUCTIONS, stored

__all__ = ["MatrixReducer"]


class MatrixReducer:
    """A reduction of a matrix. Making one is local.

    Args:
        asked: a kind of matrix and one of ``MATRIX_REDUCTIONS``, as in "symmetric: norm 1".
        single: there is one rank.

    Attributes:
        number: the ranks vote on it.
        total: makes the result of every rank's numbers.

    Raises:
        UnfitError: a rank would have to have more of the columns or rows that it sums up.
    """

    def __init__(self, asked: Asked, *, single: bool) -> None:
        x = SubMatrix(asked.a)
        self._kind, _, name = asked.routine.partition(": ")
        both = self._kind in ("symmetric", "hermitian")
        for norm, span in (("norm 1", x.rows), ("norm inf", x.cols)):
            if name == norm and not (x.rows.whole and x.cols.whole if both else span.whole):
                raise UnfitError
        self.number = 0 if single else vote_number(asked)
        self._find, self.total = MATRIX_REDUCTIONS[name]
        self._options = asked.uplo, asked.diag
        places = np.empty(0, np.int64)
        self._array, self._rows, self._cols = np.empty((0, 0)), places, places
        if x.active:
            self._array, self._rows, self._cols = x.local(), x.rows.indices(x.row), x.cols.indices(x.col)

    def part(self) -> Sequence[float]:
        """Return what this rank finds in its elements."""
        with np.errstate(all="ignore"):
            of = stored(np, self._array, self._rows, self._cols, self._kind, *self._options)
            return self._find(np, of, int)
