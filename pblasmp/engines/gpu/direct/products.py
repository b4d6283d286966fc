# SPDX-License-Identifier: Apache-2.0
"""Products, triangular routines and sums of matrices as direct calls on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...direct.blas_form import factors_of_product, moved_in_place, old_values, sided_words, triangular_words
from ...direct.spans import whole_span
from ...direct.sub_matrix import SubMatrix, UnfitError, same_elements, same_rank
from ..kernels.kernels import Tile
from ..types import DIAGONALS, FILLS, OPS, SIDES
from .builder import CallBuilder, Compute, Queue

_MOST_OF_PRODUCT = 64 << 20  # bytes: a larger product is better overlapped with what it needs
_LONGEST = 1e11  # operations of a product on each rank, 2 ms: then the time of the host no longer matters
_LARGER, _MOVED = 2, 1 << 22  # see stationary.py: when it is better to move results than operands
_TURNED = 1 << 20  # elements that the sum of matrices may read across the grain


def matmul(call: CallBuilder) -> Compute:
    """Prepare a product."""
    asked, to = call.asked, call.to
    x, y = factors_of_product(asked)
    m, n, k = to.rows.extent, to.cols.extent, x.cols.extent
    if 2.0 * m * n * k > _LONGEST * to.rows.nprocs * to.cols.nprocs:
        raise UnfitError
    inner = whole_span(k)
    left = call.stage(x, to.rows, inner, "row")
    right = call.stage(y, to.cols, inner, "col")
    if left.receivers or right.receivers:
        moved = (m * k if left.receivers else 0) + (n * k if right.receivers else 0)
        if moved >= max(_LARGER * moved_in_place(x, y, to), _MOVED) or right.end > _MOST_OF_PRODUCT:
            raise UnfitError
    copies = call.copied(old_values(asked, to))
    product = product_of(call, k, x.conjugated, y.conjugated, x.by_columns, y.by_columns)
    alpha, beta = call.scalar(asked.alpha), call.scalar(asked.beta)

    def compute(stream: Any, base: int) -> list[Queue]:
        rank = call.gpu.rank
        of_x = left.factor(rank, (to.row, 0), base)
        of_y = right.factor(rank, (to.col, 0), base)
        one = product(
            call.handle(stream), to.m, to.n, alpha, of_x.at, of_x.ld, of_y.at, of_y.ld, beta, to.at, to.ld
        )  # fmt: skip
        return [*call.queued(stream, copies), one]

    return compute


def product_of(
    call: CallBuilder, k: int, x_conjugated: bool, y_conjugated: bool, x_by_columns: bool, y_by_columns: bool
) -> Callable[..., Queue]:
    """Return what makes one product ``d = alpha x y^T + beta d``; x is m × k, y is n × k.

    It has the arguments: handle, m, n, alpha, x and its leading dimension, y and its, beta, d and its.

    Raises:
        UnfitError: cuBLAS conjugates only what it transposes.
    """
    function, by_columns = call.function("gemm"), call.to.by_columns
    if not by_columns:  # compute its transpose
        x_conjugated, y_conjugated = y_conjugated, x_conjugated
        x_by_columns, y_by_columns = y_by_columns, x_by_columns
    if (x_conjugated and x_by_columns) or (y_conjugated and not y_by_columns):
        raise UnfitError
    op_x = OPS["N" if x_by_columns else "C" if x_conjugated else "T"]
    op_y = OPS["N" if not y_by_columns else "C" if y_conjugated else "T"]

    def queue(
        handle: int,
        m: int,
        n: int,
        alpha: int,
        x: int,
        ldx: int,
        y: int,
        ldy: int,
        beta: int,
        d: int,
        ldd: int,
    ) -> Queue:
        if not by_columns:
            m, n, x, ldx, y, ldy = n, m, y, ldy, x, ldx
        return function, (handle, op_x, op_y, m, n, k, alpha, x, ldx, y, ldy, beta, d, ldd)

    return queue


def triangular(call: CallBuilder) -> Compute:
    """Prepare trsm or trmm, if each column of B (each row for "R") is on one rank."""
    asked, to = call.asked, call.to
    assert asked.b is not None
    x = SubMatrix(asked.a)
    source = None if same_elements(asked.b, asked.d) else SubMatrix(asked.b)
    if source is not None and not source.same_places(to):
        raise UnfitError
    copies = call.copied(source)
    if not (to.rows if asked.side == "L" else to.cols).whole:
        raise UnfitError
    everything = whole_span(x.rows.extent)
    slab = call.stage(x, everything, everything, "")
    side, uplo, op = triangular_words(asked, x.by_columns, to.by_columns)
    alpha, function = call.scalar(asked.alpha), call.function(asked.routine)
    options = SIDES[side], FILLS[uplo], OPS[op], DIAGONALS[asked.diag]
    m, n = (to.m, to.n) if to.by_columns else (to.n, to.m)
    after = () if asked.routine == "trsm" else (to.at, to.ld)

    def compute(stream: Any, base: int) -> list[Queue]:
        a = slab.factor(call.gpu.rank, (0, 0), base)
        one = function, (call.handle(stream), *options, m, n, alpha, a.at, a.ld, to.at, to.ld, *after)
        return [*call.queued(stream, copies), one]

    return compute


def sided(call: CallBuilder) -> Compute:
    """Prepare symm or hemm, if one rank has all operands."""
    asked, to = call.asked, call.to
    assert asked.b is not None
    x, y = SubMatrix(asked.a), SubMatrix(asked.b)
    if call.gpu.size > 1 and not (same_rank(x, to) and same_rank(y, to)):
        raise UnfitError
    name, side, uplo, m, n = sided_words(asked, x, y, to)
    copies = call.copied(old_values(asked, to))
    function = call.function(name)
    alpha, beta = call.scalar(asked.alpha), call.scalar(asked.beta)

    def compute(stream: Any, _: int) -> list[Queue]:
        one = function, (
            call.handle(stream), SIDES[side], FILLS[uplo], m, n,
            alpha, x.at, x.ld, y.at, y.ld, beta, to.at, to.ld,
        )  # fmt: skip
        return [*call.queued(stream, copies), one]

    return compute


def added(call: CallBuilder) -> Compute:
    """Prepare geadd: op(A) is read in place, or moved to where D is."""
    asked, to = call.asked, call.to
    x = SubMatrix(asked.a, turned=asked.op_a != "N", conjugated=asked.op_a == "C")
    old = old_values(asked, to) or to
    slab = call.stage(x, to.rows, to.cols, "row col")
    across = x.by_columns != to.by_columns or old.by_columns != to.by_columns
    if across and to.rows.extent * to.cols.extent > _TURNED:
        raise UnfitError

    def compute(stream: Any, base: int) -> list[Queue]:
        of = slab.factor(call.gpu.rank, (to.row, to.col), base)
        tile = Tile(to.at, of.at, old.at, to.m, to.n)
        launches = call.gpu.launches_of_sum(
            call.dtype, [tile], (to.by_columns, to.ld), (of.by_columns, of.ld), (old.by_columns, old.ld),
            asked.alpha, asked.beta, conjugate=x.conjugated,
        )  # fmt: skip
        return [(launch, (stream,)) for launch in launches]

    return compute
