# SPDX-License-Identifier: Apache-2.0
"""Rank-k and rank-2k updates as direct calls on GPUs: products of strips of columns, and tiles on the diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....layout.pieces import Rectangle, even_runs
from ...direct.blas_form import factors_of_update, start_of_update
from ...direct.spans import whole_span
from ..kernels.kernels import Tile
from .builder import CallBuilder, Compute, Queue
from .products import product_of
from .slabs import CublasMatrix
from .strips import deal, portions, strips_of


def updated(call: CallBuilder) -> Compute:
    """Prepare syrk, herk, syr2k or her2k."""
    asked, to = call.asked, call.to
    factors, k, hermitian = factors_of_update(asked)
    inner = whole_span(k)
    down = [call.stage(each, to.rows, inner, "row") for each in factors]
    across, column = down, to.row
    if not (to.rows.whole and to.cols.whole):  # otherwise one rank has all of D
        across, column = [call.stage(each, to.cols, inner, "col") for each in factors], to.col
    pairs = [(asked.alpha, 0, 0)]
    if asked.b is not None:
        other = complex(asked.alpha).conjugate() if hermitian else asked.alpha
        pairs = [(asked.alpha, 0, 1), (other, 1, 0)]
    turned = asked.op_a != "N"
    first, second = hermitian and turned, hermitian and not turned  # which is conjugated
    products = [
        product_of(call, k, first, second, factors[i].by_columns, factors[j].by_columns) for _, i, j in pairs
    ]
    start = call.copied(start_of_update(asked, to))
    strips = strips_of(to.rows, to.row, to.cols, to.col, asked.uplo) if to.active else ()

    def compute(stream: Any, base: int) -> list[Queue]:
        rank = call.gpu.rank
        lefts = [slab.factor(rank, (to.row, 0), base) for slab in down]
        rights = [slab.factor(rank, (column, 0), base) for slab in across]
        terms = [
            (product, call.scalar(alpha), lefts[i], rights[j])
            for product, (alpha, i, j) in zip(products, pairs, strict=True)
        ]
        queue = call.queued(stream, start)
        queue += _whole_parts(call, stream, strips, terms)
        queue += _diagonal(call, stream, strips, terms, hermitian)
        return queue

    return compute


def _whole_parts(
    call: CallBuilder, stream: Any, strips: Sequence[Rectangle], terms: Sequence[Any]
) -> list[Queue]:
    """Return the products of what is entirely in the triangle, one for each strip of columns."""
    to, item, handle = call.to, call.item, call.handle(stream)
    queue: list[Queue] = []
    right, below = (to.ld, 1) if to.by_columns else (1, to.ld)
    beta, one = call.scalar(call.asked.beta), call.scalar(1)
    for i, i1, j, j1, cut in strips:
        if cut:
            continue
        at = to.at + item * (i * below + j * right)
        for number, (product, alpha, x, y) in enumerate(terms):
            queue.append(
                product(
                    handle, i1 - i, j1 - j, alpha, x.below(i, item), x.ld, y.below(j, item), y.ld,
                    one if number else beta, at, to.ld,
                )
            )  # fmt: skip
    return queue


def _diagonal(
    call: CallBuilder, stream: Any, strips: Sequence[Rectangle], terms: Sequence[Any], hermitian: bool
) -> list[Queue]:
    """Return the products of tiles on the diagonal, and the kernels that write their triangles."""
    to, item, gpu, asked = call.to, call.item, call.gpu, call.asked
    tiles = [strip for strip in strips if strip.cut]
    right, below = (to.ld, 1) if to.by_columns else (1, to.ld)
    queue: list[Queue] = []
    handle, one, zero = call.handle(stream), call.scalar(1), call.scalar(0)
    shares = list(portions(tiles, item))
    sizes = [sum(tile.size for tile in some) * item for some in shares]
    scratch = call.scratch(max(sizes)) if sizes else 0
    for some in shares:
        at, written = scratch, []
        for run in even_runs(some):
            first = run[0]
            rows, cols = first.shape
            ld = rows if to.by_columns else cols
            steps = (run[1].i - first.i, run[1].j - first.j) if len(run) > 1 else (0, 0)
            for number, (product, alpha, x, y) in enumerate(terms):
                one_of_them = product(
                    handle, rows, cols, alpha, x.below(first.i, item), x.ld,
                    y.below(first.j, item), y.ld, one if number else zero, at, ld,
                )  # fmt: skip
                queue.append(_batched(call, one_of_them, x, y, steps, first.size, len(run)))
            for count, tile in enumerate(run):
                d = to.at + item * (tile.i * below + tile.j * right)
                written.append((ld, Tile(d, at + count * first.size * item, d, rows, cols, tile.i, tile.j)))
            at += len(run) * first.size * item
        for ld in sorted({ld for ld, _ in written}):
            launches = gpu.launches_of_sum(
                call.dtype, [tile for of, tile in written if of == ld], (to.by_columns, to.ld), (to.by_columns, ld),
                (to.by_columns, to.ld), 1, asked.beta, uplo=asked.uplo, real=hermitian,
                deals=(deal(to.rows, to.row), deal(to.cols, to.col)),
            )  # fmt: skip
            queue += [(launch, (stream,)) for launch in launches]
    return queue


def _batched(
    call: CallBuilder,
    one: Queue,
    x: CublasMatrix,
    y: CublasMatrix,
    steps: tuple[int, int],
    size: int,
    count: int,
) -> Queue:
    """Return ``count`` products like one: what x, y and d begin with is so many rows, or elements, later."""
    if count == 1:
        return one
    _, (handle, op_x, op_y, m, n, k, alpha, a, lda, b, ldb, beta, d, ldd) = one
    step_x, step_y = (
        step * (1 if each.by_columns else each.ld) for step, each in zip(steps, (x, y), strict=True)
    )
    if not call.to.by_columns:
        step_x, step_y = step_y, step_x
    return call.function("gemm_strided_batched"), (
        handle, op_x, op_y, m, n, k, alpha, a, lda, step_x, b, ldb, step_y, beta, d, ldd, size, count,
    )  # fmt: skip
