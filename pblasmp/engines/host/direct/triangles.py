# SPDX-License-Identifier: Apache-2.0
"""Triangular and symmetric products and solves as direct calls: what this rank does once the ranks have agreed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ...direct.blas_form import MIRRORED, old_values, sided_words
from ...direct.spans import Span, whole_span
from ...direct.sub_matrix import SubMatrix, UnfitError, check_overlap, same_elements, same_rank
from .chain import solved_in_place
from .in_place import multiplied_in_place
from .local_triangle import Triangular
from .products import copied
from .program import Preparation
from .slabs import SharedSlabs, Step, Steps, along, integer, scalar
from .tiny import is_tiny, sided_everywhere, triangular_everywhere

__all__ = ["sided", "triangular"]

_FEW = 4  # columns of B, for so many times as many rows
_SMALL = 1 << 14
"""Elements of a result, up to which computing in place takes less time than making a plan."""


def triangular(call: Preparation) -> Callable[[], Steps]:
    """Prepare trsm or trmm: a rank solves for, or multiplies, its columns of B (rows for "R") if it has all of each.

    If no rank has all of a column, the columns are dealt out anew, in slabs, or all are computed by each rank.
    """
    asked = call.asked
    assert asked.b is not None
    check_overlap(asked, asked.b)
    x, to = SubMatrix(asked.a), SubMatrix(asked.d)
    tiny = is_tiny(call, x.rows.extent, to.rows.extent, to.cols.extent)
    if not (call.single or tiny or same_rank(x, to)):
        if asked.routine == "trmm" and 1 in (to.rows.extent, to.cols.extent) and x.rows.extent > 1:
            return multiplied_in_place(call, x, to)
        if asked.routine == "trsm" and to.cols.extent == 1 and asked.side == "L":
            with suppress(UnfitError):
                return solved_in_place(call, to)
    if not (call.single or (to.rows if asked.side == "L" else to.cols).whole):
        return (triangular_everywhere if tiny else _dealt_out)(call, x, to)
    source = None if same_elements(asked.b, asked.d) else SubMatrix(asked.b)
    if source is not None and not source.same_places(to):
        raise UnfitError
    slabs: SharedSlabs | None = None
    by_columns = x.by_columns
    if asked.op_a == "C" and not call.single:
        by_columns = to.by_columns  # BLAS conjugates only what it transposes
    if not call.single and (by_columns != x.by_columns or not same_rank(x, to)):
        everything = whole_span(x.rows.extent)
        slabs = call.stage(x, everything, everything, by_columns=by_columns)
    run = Triangular(call, by_columns, to.by_columns)

    def compute() -> Steps:
        if not to.active:
            return []
        return copied(source, to) + run.steps(x if slabs is None else call.slab(slabs), to.m, to.n, to)

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
    run = Triangular(call, to.by_columns, to.by_columns)
    place = (0, call.rank) if asked.side == "L" else (call.rank, 0)

    def compute() -> Steps:
        m, n = slabs.shape(*place)
        return run.steps(call.slab(factors), m, n, call.slab(slabs, *place)) if m and n else []

    call.finish = lambda: call.taken_from(slabs, to)
    return compute


def sided(call: Preparation) -> Callable[[], Steps]:
    """Prepare symm or hemm: on the rank that has all operands; or A stays where it is if there are few columns."""
    asked = call.asked
    assert asked.b is not None
    check_overlap(asked, asked.c)
    x, y, to = SubMatrix(asked.a), SubMatrix(asked.b), SubMatrix(asked.d)
    if not call.single and not (same_rank(x, to) and same_rank(y, to)):
        if is_tiny(call, x.rows.extent, to.rows.extent, to.cols.extent):
            return sided_everywhere(call, x, y, to)
        long, short = (to.rows, to.cols) if asked.side == "L" else (to.cols, to.rows)
        if _FEW * short.extent > long.extent and to.rows.extent * to.cols.extent > _SMALL:
            raise UnfitError
        return multiplied_in_place(call, x, to)
    before = copied(old_values(asked, to), to)
    hermitian = asked.routine == "hemm" and x.held.pattern.is_complex
    of_vector = call.letter in "sd" or (hermitian and x.by_columns and y.by_columns and to.by_columns)
    if asked.side == "L" and to.cols.extent == 1 and of_vector:  # for one column the others are slow
        uplo = asked.uplo if x.by_columns else MIRRORED[asked.uplo]
        step: Step = call.function("hemv" if hermitian else "symv"), (
            uplo.encode(), integer[to.m], scalar(asked.alpha, call.letter), x.at, integer[x.ld],
            *along(y), scalar(asked.beta, call.letter), *along(to),
        )  # fmt: skip
        return lambda: [*before, step] if to.active else []
    name, side, uplo, m, n = sided_words(asked, x, y, to)
    function = call.function(name)
    arguments = (
        side.encode(), uplo.encode(), integer[m], integer[n], scalar(asked.alpha, call.letter), x.at, integer[x.ld],
        y.at, integer[y.ld], scalar(asked.beta, call.letter), to.at, integer[to.ld],
    )  # fmt: skip
    return lambda: [*before, (function, arguments)] if to.active else []
