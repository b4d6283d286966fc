# SPDX-License-Identifier: Apache-2.0
"""Level 1 as direct calls: vectors that are scaled or exchanged, and numbers that the ranks tell with their votes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...direct import Asked
from ...local.reductions import REDUCTIONS
from ...sub_matrix import SubMatrix, UnfitError, check_overlap
from .products import quietly
from .program import Preparation
from .slabs import Steps

__all__ = ["exchanged", "part_of", "scaled"]


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


def part_of(asked: Asked, *, single: bool) -> Sequence[float]:
    """Return what this rank finds in its part of the vectors of a reduction. Local.

    Raises:
        UnfitError: the vectors are not on the same ranks.
    """
    vectors = [SubMatrix(part) for part in (asked.a, asked.b) if part is not None]
    x = vectors[0]
    if not (single or all(x.same_places(y) for y in vectors[1:])):
        raise UnfitError
    arrays = [y.local() if y.active else y.held.array.reshape(-1)[:0] for y in vectors]
    with np.errstate(all="ignore"):
        return REDUCTIONS[asked.routine].part(np, arrays, lambda at: x.rows.at_place(x.row, at))
