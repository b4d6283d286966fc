# SPDX-License-Identifier: Apache-2.0
"""Triangular and symmetric products and solves as direct calls: what this rank does once the ranks have agreed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...direct import Span, whole_span
from ...sub_matrix import SubMatrix, UnfitError, check_overlap, same_elements, same_rank
from .products import old_values
from .program import Preparation
from .slabs import Factor, SharedSlabs, Steps, integer, scalar

__all__ = ["MIRRORED", "sided", "triangular"]

MIRRORED = {"L": "U", "U": "L"}
_OTHER = {"L": "R", "R": "L"}


def triangular(call: Preparation) -> Callable[[], Steps]:
    """Prepare trsm or trmm: a rank solves for, or multiplies, its columns of B (rows for "R") if it has all of each.

    If no rank has all of a column, the columns are dealt out anew, in slabs.
    """
    asked = call.asked
    assert asked.b is not None
    check_overlap(asked, asked.b)
    x, to = SubMatrix(asked.a), SubMatrix(asked.d)
    if not (call.single or (to.rows if asked.side == "L" else to.cols).whole):
        return _dealt_out(call, x, to)
    source = to if same_elements(asked.b, asked.d) else SubMatrix(asked.b)
    if source is not to and not source.same_places(to):
        raise UnfitError
    slabs: SharedSlabs | None = None
    by_columns = x.by_columns
    if asked.op_a == "C" and not call.single:
        by_columns = to.by_columns  # BLAS conjugates only what it transposes
    if not call.single and (by_columns != x.by_columns or not same_rank(x, to)):
        if 1 in (to.rows.extent, to.cols.extent) and asked.routine == "trmm":
            raise UnfitError  # moving a vector and partial sums is better: "stationary"
        everything = whole_span(x.rows.extent)
        slabs = call.stage(x, everything, everything, by_columns=by_columns)
    run = _Triangular(call, by_columns, to.by_columns)

    def compute() -> Steps:
        if not to.active:
            return []
        steps: Steps = [] if source is to else [(np.copyto, (to.local(), source.local()))]
        return steps + run.steps(x if slabs is None else call.slab(slabs), to.m, to.n, to)

    return compute


def _dealt_out(call: Preparation, x: SubMatrix, to: SubMatrix) -> Callable[[], Steps]:
    """Prepare trsm or trmm of columns that no rank has all of: each rank computes some of them, in a slab."""
    asked = call.asked
    assert asked.b is not None
    whole = whole_span(x.rows.extent)
    count = (to.cols if asked.side == "L" else to.rows).extent
    shares = Span(count, -(-count // call.ranks), 0, call.ranks, 0)
    factors = call.stage(x, whole, whole, by_columns=to.by_columns)
    rows, cols = (whole, shares) if asked.side == "L" else (shares, whole)
    slabs = call.stage(SubMatrix(asked.b), rows, cols, by_columns=to.by_columns)
    run = _Triangular(call, to.by_columns, to.by_columns)
    place = (0, call.rank) if asked.side == "L" else (call.rank, 0)

    def compute() -> Steps:
        m, n = slabs.shape(*place)
        return run.steps(call.slab(factors), m, n, call.slab(slabs, *place)) if m and n else []

    call.finish = lambda: call.taken_from(slabs, to)
    return compute


class _Triangular:
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
        side = asked.side if by_columns else _OTHER[asked.side]
        uplo = asked.uplo if of_columns else MIRRORED[asked.uplo]
        self._options = side.encode(), uplo.encode(), op.encode(), asked.diag.encode()
        self._function, self._alpha = call.function(asked.routine), scalar(asked.alpha, call.letter)
        self._by_columns = by_columns

    def steps(self, a: Factor | SubMatrix, m: int, n: int, b: Factor | SubMatrix) -> Steps:
        """Return the step that replaces ``b``, of m × n, by the result."""
        if not self._by_columns:
            m, n = n, m
        sizes = integer[m], integer[n]
        return [
            (
                self._function,
                (*self._options, *sizes, self._alpha, a.at, integer[a.ld], b.at, integer[b.ld]),
            )
        ]


def sided(call: Preparation) -> Callable[[], Steps]:
    """Prepare symm or hemm, if one rank has all operands."""
    asked = call.asked
    assert asked.b is not None
    check_overlap(asked, asked.c)
    x, y, to = SubMatrix(asked.a), SubMatrix(asked.b), SubMatrix(asked.d)
    if not call.single and not (same_rank(x, to) and same_rank(y, to)):
        raise UnfitError
    hermitian = asked.routine == "hemm" and asked.d[0].pattern.is_complex
    if y.by_columns != to.by_columns or (hermitian and x.by_columns != to.by_columns):
        raise UnfitError
    before = old_values(call, asked.c, to)
    side = asked.side if to.by_columns else _OTHER[asked.side]
    uplo = asked.uplo if x.by_columns else MIRRORED[asked.uplo]
    m, n = (to.m, to.n) if to.by_columns else (to.n, to.m)
    function = call.function("hemm" if hermitian else "symm")
    arguments = (
        side.encode(), uplo.encode(), integer[m], integer[n], scalar(asked.alpha, call.letter), x.at, integer[x.ld],
        y.at, integer[y.ld], scalar(asked.beta, call.letter), to.at, integer[to.ld],
    )  # fmt: skip
    return lambda: [*before, (function, arguments)] if to.active else []
