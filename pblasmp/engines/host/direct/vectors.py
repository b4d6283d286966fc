# SPDX-License-Identifier: Apache-2.0
"""Level 1 as direct calls: vectors that are scaled or exchanged, and numbers that the ranks tell with their votes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...direct import Asked
from ...direct.sub_matrix import SubMatrix, UnfitError, check_overlap, vote_number
from ...local.reductions import REDUCTIONS
from .products import quietly
from .program import Preparation
from .slabs import Steps

__all__ = ["Reducer", "exchanged", "scaled"]


def scaled(call: Preparation) -> Callable[[], Steps]:
    """Prepare scal: each rank scales what it has."""
    to = SubMatrix(call.asked.d)
    factor = to.held.pattern.dtype.type(call.asked.alpha)

    def compute() -> Steps:
        if not to.active:
            return []
        x = to.local()
        return [(quietly, (np.multiply, x, factor, x))]

    return compute


def exchanged(call: Preparation) -> Callable[[], Steps]:
    """Prepare swap: where both vectors are on the same ranks, or through slabs."""
    asked = call.asked
    check_overlap(asked, None)
    x, y = SubMatrix(asked.a), SubMatrix(asked.d)
    if call.single or x.same_places(y):
        return lambda: [(_swap, (x.local(), y.local()))] if x.active else []
    of_x, of_y = call.stage(x, y.rows, y.cols), call.stage(y, x.rows, x.cols)
    return lambda: [*call.taken_from(of_x, y), *call.taken_from(of_y, x)]


def _swap(x: np.ndarray, y: np.ndarray) -> None:
    kept = y.copy()
    y[...] = x
    x[...] = kept


class Reducer:
    """A reduction, ready to run again. Making one is local.

    Args:
        asked: one of ``REDUCTIONS``.
        single: there is one rank.

    Attributes:
        number: the ranks vote on it.

    Raises:
        UnfitError: the vectors are not on the same ranks.
    """

    def __init__(self, asked: Asked, *, single: bool) -> None:
        vectors = [SubMatrix(part) for part in (asked.a, asked.b) if part is not None]
        x = vectors[0]
        if not (single or all(x.same_places(y) for y in vectors[1:])):
            raise UnfitError
        self.number = 0 if single else vote_number(asked)
        self._part, self.total = REDUCTIONS[asked.routine]
        nothing = np.empty(0, x.held.pattern.dtype)
        self._arrays = [y.local()[:, 0] if y.active else nothing for y in vectors]
        self._rows, self._row = x.rows, x.row

    def part(self) -> Sequence[float]:
        """Return what this rank finds in its part of the vectors. Local."""
        with np.errstate(all="ignore"):
            return self._part(np, self._arrays, self._index)

    def _index(self, at: int) -> int:
        """Return the global index of an element of this rank."""
        return self._rows.at_place(self._row, at)
