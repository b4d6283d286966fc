# SPDX-License-Identifier: Apache-2.0
"""Tiny calls on several ranks: each rank that has a part of the result computes all of it.

That takes one meeting of the ranks. To divide the work takes a second one, or hands results from rank to rank, and
each of these takes longer than a tiny call.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...direct import host_address
from ...direct.blas_form import MIRRORED, OTHER_SIDE, old_values
from ...direct.spans import Span, whole_span
from ...direct.sub_matrix import SubMatrix
from .local_triangle import Triangular
from .program import Preparation
from .slabs import ALIGNED, Array, Factor, SharedSlabs, Steps, integer, scalar

__all__ = ["LARGEST", "Whole", "all_of", "is_tiny", "scratch", "sided_everywhere", "triangular_everywhere"]

_MOST, _LARGEST = 1 << 15, 1 << 13  # multiplications, and elements of all matrices
_ITEM = 16  # bytes of the largest element
LARGEST = 1 << 15
"""The most elements that ``scratch`` has room for, in at most two matrices."""


def scratch() -> Array:
    """Return memory for all matrices that a rank has for itself. Local.

    It is aligned, since a BLAS may round otherwise elsewhere: all ranks must find the same pivots.
    """
    nbytes = _ITEM * LARGEST + ALIGNED  # between two matrices there may be a gap
    memory = np.empty(nbytes + ALIGNED, np.uint8)
    start = -host_address(memory) % ALIGNED
    return memory[start : start + nbytes]


def is_tiny(call: Preparation, m: int, n: int, k: int) -> bool:
    """Return whether several ranks multiply m × k by k × n elements, so few that each rank may do all of it. Local."""
    return call.alike and not call.single and m * n * k <= _MOST and m * n + n * k + m * k <= _LARGEST


class Whole:
    """All of a matrix, in this rank's own memory, until the call ends. Making one is local.

    Args:
        call: the call.
        x: the matrix.
        by_columns: its memory order here, by default the matrix's.
        start: bytes of that memory which others have.

    Attributes:
        array, factor: it, and as BLAS takes it.
        end: bytes that are taken now.
    """

    def __init__(
        self, call: Preparation, x: SubMatrix, *, by_columns: bool | None = None, start: int = 0
    ) -> None:
        self._memory, self._start = call.scratch, start
        self._by_columns = x.by_columns if by_columns is None else by_columns
        self._slab = SharedSlabs(x, *all_of(x), start, self._by_columns)
        self.array: Array = self._slab.array(self._memory, 0, 0)
        self.factor: Factor = self._slab.factor(host_address(self._memory), 0, 0)
        self.end = self._slab.end

    def start_as(self, old: SubMatrix) -> Steps:
        """Return the steps that write this rank's part of a matrix into it."""
        return SharedSlabs(old, *all_of(old), self._start, self._by_columns).write(self._memory)

    def hand_out(self, to: SubMatrix) -> Steps:
        """Return the steps that write this rank's part of it into a matrix of its shape."""
        return self._slab.read(to, self._memory)


def all_of(x: SubMatrix) -> tuple[Span, Span]:
    """Return how rows and columns are dealt out if every rank gets all. Local."""
    return whole_span(x.rows.extent), whole_span(x.cols.extent)


def triangular_everywhere(call: Preparation, x: SubMatrix, to: SubMatrix) -> Callable[[], Steps]:
    """Prepare trsm or trmm by ``x``."""
    assert call.asked.b is not None
    factor = call.stage(x, *all_of(x), by_columns=to.by_columns)
    right = call.stage(SubMatrix(call.asked.b), *all_of(to), by_columns=to.by_columns)
    run = Triangular(call, to.by_columns, to.by_columns)

    def compute() -> Steps:
        if not to.active:
            return []
        result = Whole(call, to)
        return [
            (np.copyto, (result.array, call.slab_array(right))),
            *run.steps(call.slab(factor), to.rows.extent, to.cols.extent, result.factor),
            *result.hand_out(to),
        ]

    return compute


def sided_everywhere(call: Preparation, x: SubMatrix, y: SubMatrix, to: SubMatrix) -> Callable[[], Steps]:
    """Prepare symm or hemm of ``x``, which is symmetric, and ``y``."""
    asked = call.asked
    old = old_values(asked, to) or to
    factor, other = (call.stage(each, *all_of(each), by_columns=to.by_columns) for each in (x, y))
    hermitian = asked.routine == "hemm" and x.held.pattern.is_complex
    side, uplo, m, n = asked.side, asked.uplo, to.rows.extent, to.cols.extent
    if not to.by_columns:
        side, uplo, m, n = OTHER_SIDE[side], MIRRORED[uplo], n, m
    function = call.function("hemm" if hermitian else "symm")

    def compute() -> Steps:
        if not to.active:
            return []
        result = Whole(call, to)
        a, b, d = call.slab(factor), call.slab(other), result.factor
        step = function, (
            side.encode(), uplo.encode(), integer[m], integer[n], scalar(asked.alpha, call.letter), a.at, integer[a.ld],
            b.at, integer[b.ld], scalar(asked.beta, call.letter), d.at, integer[d.ld],
        )  # fmt: skip
        return [*(result.start_as(old) if asked.beta != 0 else []), step, *result.hand_out(to)]

    return compute
