# SPDX-License-Identifier: Apache-2.0
"""Products and sums as direct calls: each function returns what this rank does once the ranks have agreed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...direct.blas_form import factors_of_product, moved_in_place, old_values
from ...direct.spans import Span, spread, whole_span
from ...direct.sub_matrix import SubMatrix, UnfitError, check_overlap, stays
from .program import Preparation
from .slabs import Array, Factor, SharedSlabs, Step, Steps, Strided, along, integer, scalar
from .tiny import is_tiny

__all__ = ["added", "collected", "copied", "gemm", "matmul", "quietly", "side_by_side"]

_LARGER, _LEAST = 2, 1 << 17  # see stationary.py: when it is better to move results than operands


def gemm(
    call: Preparation,
    m: int,
    n: int,
    k: int,
    alpha: bytes,
    x: Factor | SubMatrix,
    y: Factor | SubMatrix,
    beta: bytes,
    d: Factor | SubMatrix,
) -> Step:
    """Return the step that computes ``d = alpha x y^T + beta d``; x is m × k, y is n × k."""
    if not d.by_columns:  # compute its transpose
        x, y, m, n = y, x, n, m
    if k and n == 1 and not y.conjugated:
        return _gemv(call, m, k, alpha, x, y, beta, d.at, 1)
    if k and m == 1 and not (x.conjugated or y.conjugated):
        return _gemv(call, n, k, alpha, y, x, beta, d.at, d.ld)
    if k == 1 and not x.conjugated and beta == scalar(1, call.letter):
        name = "ger" if call.letter in "sd" else "gerc" if y.conjugated else "geru"
        arguments = integer[m], integer[n], alpha, *along(x), *along(y), d.at, integer[d.ld]
        return call.function(name), arguments
    of_x = b"N" if x.by_columns else b"C" if x.conjugated else b"T"
    of_y = b"N" if not y.by_columns else b"C" if y.conjugated else b"T"
    return call.function("gemm"), (
        of_x, of_y, integer[m], integer[n], integer[k],
        alpha, x.at, integer[x.ld], y.at, integer[y.ld], beta, d.at, integer[d.ld],
    )  # fmt: skip


def _gemv(
    call: Preparation,
    m: int,
    k: int,
    alpha: bytes,
    x: Factor | SubMatrix,
    y: Factor | SubMatrix,
    beta: bytes,
    at: int,
    step: int,
) -> Step:
    """Return the step that computes ``d = alpha x y^T + beta d`` for a y of one row: BLAS's gemm is slow there.

    ``at`` is the address of d's first element, ``step`` elements before the next one.
    """
    of_x, rows, cols = (b"N", m, k) if x.by_columns else (b"C" if x.conjugated else b"T", k, m)
    of_y = integer[y.ld if y.by_columns else 1]
    arguments = (
        of_x, integer[rows], integer[cols], alpha, x.at, integer[x.ld], y.at, of_y, beta, at, integer[step],
    )  # fmt: skip
    return call.function("gemv"), arguments


def copied(source: SubMatrix | None, to: SubMatrix) -> Steps:
    """Return the steps that make D start as another matrix, which is in the same places."""
    return [] if source is None or not to.active else [(np.copyto, (to.local(), source.local()))]


def matmul(call: Preparation) -> Callable[[], Steps]:
    """Prepare a product: what a rank lacks of its rows of op(A) and its columns of op(B) is in slabs.

    If that moves less, the larger operand stays where it is.
    """
    asked = call.asked
    check_overlap(asked, asked.c)
    x, y = factors_of_product(asked)
    to = SubMatrix(asked.d)
    before = copied(old_values(asked, to), to)
    k = x.cols.extent
    left: SharedSlabs | None = None
    right: SharedSlabs | None = None
    if not call.single:
        inner = whole_span(k)
        x_stays, y_stays = stays(x, to, to.cols), stays(y, to, to.rows, flipped=True)
        m, n = to.rows.extent, to.cols.extent
        moved = (0 if x_stays else m * k) + (0 if y_stays else n * k)
        here = moved_in_place(x, y, to)
        vector = min(m, n) == 1 and not is_tiny(call, m, n, k)
        if moved > here if vector else moved >= max(_LARGER * here, _LEAST):
            if n <= m:
                return _in_place(call, x, y, to, before)
            return _in_place(call, y, x, SubMatrix(asked.d, turned=True), before)
        if not x_stays:
            left = call.stage(x, to.rows, inner)
        if not y_stays:
            right = call.stage(y, to.cols, inner)
    # BLAS conjugates only what it transposes; slabs are conjugated when they are written.
    if left is None and x.conjugated and x.by_columns == to.by_columns:
        raise UnfitError
    if right is None and y.conjugated and y.by_columns != to.by_columns:
        raise UnfitError
    alpha, beta = scalar(asked.alpha, call.letter), scalar(asked.beta, call.letter)

    def compute() -> Steps:
        if not to.active:
            return []
        one = x if left is None else call.slab(left, to.row)
        other = y if right is None else call.slab(right, to.col)
        return [*before, gemm(call, to.m, to.n, k, alpha, one, other, beta, to)]

    return compute


def _in_place(
    call: Preparation, x: SubMatrix, y: SubMatrix, to: SubMatrix, before: Steps
) -> Callable[[], Steps]:
    """Prepare ``x y^T`` for an ``x`` that stays where it is: only y and partial sums are moved.

    Each rank multiplies what it has of x. After one more meeting the ranks that have D add the partial sums up, in the
    order of x's columns of processes.
    """
    asked = call.asked
    whole = whole_span(y.rows.extent)
    slabs = call.stage(y, whole, x.cols)
    # BLAS conjugates only what it transposes.
    sums = call.room(x, x.rows, side_by_side(whole.extent, x.cols.nprocs), by_columns=not x.by_columns)
    alpha, zero = scalar(asked.alpha, call.letter), scalar(0, call.letter)

    def compute() -> Steps:
        if not x.active:
            return []
        right, mine = call.slab(slabs, 0, x.col), call.slab(sums, x.row, x.col)
        return [gemm(call, x.m, whole.extent, x.n, alpha, x, right, zero, mine)]

    def finish() -> Steps:
        return [*before, *collected(call, to, [(sums, x.cols)], asked.beta)] if to.active else []

    call.finish = finish
    return compute


def side_by_side(width: int, parts: int) -> Span:
    """Return the columns of partial sums of ``width`` columns each, one after the other."""
    return Span(width * parts, width, 0, parts, 0) if parts > 1 else whole_span(width)


def collected(
    call: Preparation, to: SubMatrix, terms: Sequence[tuple[SharedSlabs, Span]], beta: complex
) -> Steps:
    """Return the steps that write ``beta d`` and the partial sums of this rank's rows of D into it.

    Args:
        call: the call.
        to: D, of which this rank has a part.
        terms: partial sums, along D's rows as an operand has them, and how what is summed is dealt out: a process that
            has none of it has no sums.
        beta: what D is scaled by.
    """
    steps: Steps = []
    d, whole = Strided.of_part(to), whole_span(to.cols.extent)
    runs = [
        (s.length, s.src + r * s.src_step, s.dst + r * s.dst_step)
        for _, s in spread(to.cols, to.col, whole)
        for r in range(s.repeat)
    ]
    for sums, parts in terms:
        counted = [q for q, count in enumerate(parts.counts()) if count]
        for n, j, of_sums in runs:
            for p, (repeat, m, i, down, there, down_there) in spread(to.rows, to.row, sums.rows):
                shape = repeat, m, 1, n
                found = [
                    call.slab_strided(sums, p, q).runs(shape, there, of_sums, down_there, 0) for q in counted
                ]
                steps += _additions(d.runs(shape, i, j, down, 0), beta, found)
        beta = 1
    return [(quietly, (_run, steps))]


def _additions(d: Array, beta: complex, parts: list[Array]) -> Steps:
    """Return the steps that write ``beta d`` and the sum of all parts into ``d``; with a beta of 0 it is not read."""
    # NumPy adds arrays of one dimension in half the time.
    d, *parts = (each.squeeze() for each in (d, *parts))
    if beta == 0 and len(parts) == 1:
        return [(np.copyto, (d, parts[0]))]
    steps: Steps = []
    if beta == 0:
        steps.append((np.add, (*parts[:2], d)))
        parts = parts[2:]
    elif beta != 1:
        steps.append((np.multiply, (d, beta, d)))
    return [*steps, *((np.add, (d, part, d)) for part in parts)]


def _run(steps: Steps) -> None:
    for function, arguments in steps:
        function(*arguments)


def added(call: Preparation) -> Callable[[], Steps]:
    """Prepare geadd: op(A) is read in place, or moved to where D is."""
    asked = call.asked
    check_overlap(asked, asked.c)
    x = SubMatrix(asked.a, turned=asked.op_a != "N", conjugated=asked.op_a == "C")
    to = SubMatrix(asked.d)
    old = old_values(asked, to) or to
    slabs = None
    if not call.single and not x.same_places(to):
        slabs = call.stage(x, to.rows, to.cols, by_columns=to.by_columns)

    def compute() -> Steps:
        if not to.active:
            return []
        if to.cols.extent == 1 and old is to and not (x.conjugated and slabs is None):
            steps = _added_column(call, x if slabs is None else call.slab(slabs, to.row, to.col), to)
            if steps:
                return steps
        d = to.local()
        of = x.local() if slabs is None else call.slab_array(slabs, to.row, to.col)
        c = d if old is to else old.local()
        conjugate = x.conjugated and slabs is None
        if asked.alpha == asked.beta == 1 and not conjugate and _alike(of, d):
            return [(quietly, (np.add, c, of, d))]
        return [(quietly, (_sum, call.operations, d, asked.alpha, of, asked.beta, c, conjugate))]

    return compute


def _added_column(call: Preparation, x: Factor | SubMatrix, to: SubMatrix) -> Steps:
    """Return the steps of the BLAS that write ``alpha x``, or add it to D; none if D is to be scaled, too."""
    asked, m = call.asked, integer[to.m]
    alpha, of_d = scalar(asked.alpha, call.letter), along(to)
    if asked.beta == 1:
        return [(call.function("axpy"), (m, alpha, *along(x), *of_d))]
    if asked.beta != 0:
        return []
    scaled: Steps = [] if asked.alpha == 1 else [(call.function("scal"), (m, alpha, *of_d))]
    return [(call.function("copy"), (m, *along(x), *of_d)), *scaled]


def _alike(x: Any, y: Any) -> bool:
    """Return whether two arrays have the same memory order."""
    return bool((x.strides[0] <= x.strides[1]) == (y.strides[0] <= y.strides[1]))


def quietly(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function without warnings of overflows and NaNs."""
    with np.errstate(all="ignore"):
        function(*arguments)


def _sum(operations: Any, d: Any, alpha: complex, x: Any, beta: complex, c: Any, conjugate: bool) -> None:
    """Write ``alpha x + beta c`` into ``d``."""
    operations.add(d, alpha, x, beta, c, None, conjugate=conjugate)
