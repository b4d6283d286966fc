# SPDX-License-Identifier: Apache-2.0
"""Direct calls on GPUs by routine: products, triangular routines, sums and updates of matrices.

Rank-k and rank-2k updates are products of strips of columns, and tiles on the diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from ....layout import Trapezoid
from ....layout.axis import Axis
from ....layout.pieces import Rectangle, even_runs, pieces
from ...direct import Asked
from ...direct.asked import NARROW, whole_span
from ...direct.sub_matrix import (
    SubMatrix,
    UnfitError,
    factors_of_product,
    factors_of_update,
    moved_in_place,
    old_values,
    same_elements,
    same_rank,
    sided_words,
    start_of_update,
    triangular_words,
)
from ...local.slab_terms import THIN
from ..factor_operations import FEW_COLUMNS
from ..kernels.kernels import Deal, Tile
from ..kernels.lt import ANY_ALGORITHM
from ..types import DATA_TYPES, DIAGONALS, FILLS, OPS, SIDES, compute_type
from .builder import CallBuilder, Compute, CublasMatrix, Queue

_MOST_OF_PRODUCT = 64 << 20  # bytes: a larger product is better overlapped with what it needs
_LONGEST = 1e11  # operations of a product on each rank, 2 ms: then the time of the host no longer matters
_LONGEST_NARROW = 1e10  # of 16 bits, which are multiplied ten times as fast
_LARGER, _MOVED = 2, 1 << 22  # see stationary.py: when it is better to move results than operands
LARGE = 1 << 22  # elements of a matrix that cuBLAS takes longer to read than a plan takes the host
_TURNED = 1 << 20  # elements that the sum of matrices may read across the grain


def matmul(call: CallBuilder) -> Compute:
    """Prepare a product."""
    asked, to = call.asked, call.to
    x, y = factors_of_product(asked)
    m, n, k = to.rows.extent, to.cols.extent, x.cols.extent
    longest = _LONGEST_NARROW if call.item == NARROW else _LONGEST
    if 2.0 * m * n * k > longest * to.rows.nprocs * to.cols.nprocs:
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
    by_columns, kind = call.to.by_columns, (int(DATA_TYPES[call.dtype.name]),) * (call.item == NARROW)
    function = call.gpu.products.cublas.gemm_ex if kind else call.function("gemm")
    how = (int(compute_type(call.dtype, None)), ANY_ALGORITHM) if kind else ()
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
        factors = alpha, x, *kind, ldx, y, *kind, ldy
        return function, (handle, op_x, op_y, m, n, k, *factors, beta, d, *kind, ldd, *how)

    return queue


def _is_thin(asked: Asked) -> bool:
    """Return whether a large A is multiplied by so few columns that cuBLAS reads it ten times as slowly as it could."""
    order, few = asked.a[3], asked.d[4] if asked.side == "L" else asked.d[3]
    most = order // THIN if asked.routine == "trmm" else FEW_COLUMNS
    return few <= most and order * order >= LARGE


def triangular(call: CallBuilder) -> Compute:
    """Prepare trsm or trmm, if each column of B (each row for "R") is on one rank."""
    asked, to = call.asked, call.to
    assert asked.b is not None
    if asked.routine == "trmm" and _is_thin(asked):
        raise UnfitError
    x = SubMatrix(asked.a)
    source = None if same_elements(asked.b, asked.d) else SubMatrix(asked.b)
    if source is not None and not source.same_places(to):
        raise UnfitError
    copies = call.copied(source)
    if not (to.rows if asked.side == "L" else to.cols).on_one:
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
    if _is_thin(asked):
        raise UnfitError
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
        launches = call.gpu.kernels.sum(
            call.dtype, [tile], (to.by_columns, to.ld), (of.by_columns, of.ld), (old.by_columns, old.ld),
            asked.alpha, asked.beta, conjugate=x.conjugated,
        )  # fmt: skip
        return [(launch, (stream,)) for launch in launches]

    return compute


STRIP = 256  # columns of a triangle's tiles, at least
_STRIPS = 16  # of a triangle, at most
SCRATCH = 64 << 20  # bytes for the tiles of a triangle that are summed at a time


@lru_cache(1024)
def strips_of(rows: Axis, row: int, cols: Axis, col: int, uplo: str) -> tuple[Rectangle, ...]:
    """Return a rank's columns of a triangle, cut so that tiles on the diagonal get the same size."""
    lead = cols.lead if (col - cols.source) % cols.nprocs == 0 else 0
    n = cols.count(col)
    width = -(-max(STRIP, -(-n // _STRIPS)) // STRIP) * STRIP
    ends = [min(n, at - lead) for at in range(width, n + lead + width, width)]
    return tuple(pieces(Trapezoid(uplo), rows.globals(row), cols.globals(col), ends))


def portions(tiles: Sequence[Rectangle], item: int) -> Iterator[list[Rectangle]]:
    """Yield tiles whose sums fit into the scratch memory together."""
    some: list[Rectangle] = []
    nbytes = 0
    for tile in tiles:
        size = tile.size * item
        if some and nbytes + size > SCRATCH:
            yield some
            some, nbytes = [], 0
        some.append(tile)
        nbytes += size
    if some:
        yield some


def deal(span: Axis, process: int) -> Deal:
    """Return how the indices of a process are dealt out, as kernels take it."""
    turn = (process - span.source) % span.nprocs
    return Deal(span.block, span.nprocs, turn, span.lead, span.lead if turn == 0 else 0)


def updated(call: CallBuilder) -> Compute:
    """Prepare syrk, herk, syr2k or her2k."""
    asked, to = call.asked, call.to
    factors, k, hermitian = factors_of_update(asked)
    inner = whole_span(k)
    down = [call.stage(each, to.rows, inner, "row") for each in factors]
    across, column = down, to.row
    if not (to.rows.on_one and to.cols.on_one):  # otherwise one rank has all of D
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
            launches = gpu.kernels.sum(
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
