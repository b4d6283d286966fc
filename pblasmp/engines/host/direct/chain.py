# SPDX-License-Identifier: Apache-2.0
"""Triangular systems with one right-hand side: the matrix stays where it is; the solution and partial sums move.

Block after block of the diagonal, the rank that has it subtracts what the ranks of its process row have summed up, and
solves. The ranks of its process column then multiply their parts of these columns, and begin with the rows of the next
blocks. Each says by a flag in shared memory when others can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ...direct.spans import Span, whole_span
from ...direct.sub_matrix import SubMatrix, UnfitError
from .local_triangle import Triangular
from .products import gemm, side_by_side
from .program import Preparation
from .slabs import Factor, SharedSlabs, Step, Steps, integer, scalar
from .staircase import check_tiles

__all__ = ["solved_in_place"]

_FEW = 16  # blocks
_HANDOFF = 1 << 14
"""Elements of the matrix that are copied while a block's solution is handed on, when nobody computes."""


class _Diagonal(NamedTuple):
    """Rows and columns ``start`` to ``stop`` of the matrix, and the process row and column that have their square."""

    start: int
    stop: int
    row: int
    col: int


def solved_in_place(call: Preparation, to: SubMatrix) -> Callable[[], Steps]:
    """Prepare trsm from the left for one column. The ranks vote, and meet no more: flags tell who waits.

    Raises:
        UnfitError: it takes longer than to copy the matrix, or BLAS has no such mixture of memory orders.
    """
    asked = call.asked
    assert asked.b is not None
    turned = asked.op_a != "N"
    a = SubMatrix(asked.a, turned=turned, conjugated=asked.op_a == "C")
    check_tiles(a)
    blocks = list(_blocks(a.rows, a.cols))
    n = a.rows.extent
    if asked.alpha != 1 or (a.conjugated and a.by_columns) or len(blocks) > max(_FEW, n * n // _HANDOFF):
        raise UnfitError
    if (asked.uplo == "L") == turned:
        blocks.reverse()
    whole, tile = whole_span(n), Triangular(call, a.by_columns != turned, by_columns=True)
    right = call.stage(SubMatrix(asked.b), whole, whole_span(1), by_columns=True)
    sums = call.room(a, a.rows, side_by_side(1, a.cols.nprocs), by_columns=True)
    chain = _Chain(call, a, blocks, right, sums, tile)

    def compute() -> Steps:
        steps = chain.steps() if a.active else []
        if to.active:
            steps += [chain.wait_for_all(), *call.taken_from(right, to)]
        return steps

    return compute


def _blocks(rows: Span, cols: Span) -> Iterator[_Diagonal]:
    """Yield the blocks of the diagonal, each of which is on one rank."""
    span = cols if rows.whole else rows
    everyones = sorted((start, stop) for p in range(span.nprocs) for start, stop, _ in span.blocks(p))
    for start, stop in everyones:
        yield _Diagonal(start, stop, rows.process(start), cols.process(start))


class _Chain:
    """What a rank does, block after block.

    Args:
        call: the call.
        a: op(A), of which this rank has a part.
        blocks: in the order in which they are solved.
        right: the right-hand side, which becomes the solution.
        sums: what each rank has summed up for its rows.
        tile: solves with a block of the diagonal.
    """

    def __init__(
        self,
        call: Preparation,
        a: SubMatrix,
        blocks: list[_Diagonal],
        right: SharedSlabs,
        sums: SharedSlabs,
        tile: Triangular,
    ) -> None:
        self._call, self._a, self._blocks, self._tile = call, a, blocks, tile
        self._right, self._sums = right, sums
        self._item, self._one = a.held.pattern.itemsize, scalar(1, call.letter)
        self._less, self._axpy = scalar(-1, call.letter), call.function("axpy")
        # By block: it is solved; then, by process column, the sums for its rows are complete.
        call.raise_flags(len(blocks) * (1 + a.cols.nprocs), self._raised())

    def _solved(self, k: int) -> int:
        """Return the flag that says that a block is solved."""
        return k * (1 + self._a.cols.nprocs)

    def _summed(self, k: int, col: int) -> int:
        """Return the flag that says that the sums of a process column are complete for a block's rows."""
        return self._solved(k) + 1 + col

    def _raised(self) -> list[int]:
        """Return the flags that this rank raises."""
        a, found = self._a, []
        for k, block in enumerate(self._blocks):
            if block.row == a.row:
                found.append(self._solved(k) if block.col == a.col else self._summed(k, a.col))
        return found

    def wait_for_all(self) -> Step:
        """Return the step that waits for the solution."""
        return self._call.progress().wait, (self._solved(len(self._blocks) - 1),)

    def steps(self) -> Steps:
        """Return the steps of this rank."""
        call, a = self._call, self._a
        steps: Steps = [(call.slab_array(self._sums, a.row, a.col).fill, (0,))]
        begun: set[int] = set()  # process columns that have had a block
        for k, block in enumerate(self._blocks):
            here = block.col == a.col
            if here and block.row == a.row:
                steps += self._solve(k, block, begun)
            begun.add(block.col)
            if here:
                steps += self._multiply(k, block)
        return steps

    def _solve(self, k: int, block: _Diagonal, begun: set[int]) -> Steps:
        """Return the steps that solve with this rank's block of the diagonal."""
        call, a = self._call, self._a
        i, width = a.rows.below(block.start, a.row), block.stop - block.start
        x = call.slab(self._right).below(block.start, self._item)
        steps: Steps = []
        for col in sorted(begun, key=lambda col: (col != a.col, col)):
            if col != a.col:
                steps.append((self._call.progress().wait, (self._summed(k, col),)))
            found = call.slab(self._sums, a.row, col).below(i, self._item)
            one = integer[1]
            steps.append((self._axpy, (integer[width], self._less, found.at, one, x.at, one)))
        steps += self._tile.steps(self._part(i, a.cols.below(block.start, a.col)), width, 1, x)
        return [*steps, (self._call.progress().done, (self._solved(k),))]

    def _multiply(self, k: int, block: _Diagonal) -> Steps:
        """Return the steps that add this rank's columns beside a block to its sums, first what is needed first."""
        a, blocks = self._a, self._blocks
        last = len(blocks) - 1
        following = (t for t in range(k + 1, last + 1) if blocks[t].col == a.col)
        soon = next(following, min(k + a.cols.nprocs, last))
        follows = any(blocks[t].col == a.col for t in range(k + 1, last + 1))
        progress = self._call.progress()
        near, far = self._product(block, k + 1, soon), self._product(block, soon + 1, last)
        steps: Steps = []
        if block.row != a.row and (near or far):
            steps.append((progress.wait, (self._solved(k),)))
        for product, first, final in ((near, k + 1, soon), (far, soon + 1, soon if follows else last)):
            steps += product
            steps += [
                (progress.done, (self._summed(t, a.col),))
                for t in range(first, final + 1)
                if blocks[t].row == a.row and blocks[t].col != a.col
            ]
        return steps

    def _product(self, block: _Diagonal, first: int, final: int) -> Steps:
        """Return the step that multiplies the columns of a block in the rows of other ones, if this rank has any."""
        call, a = self._call, self._a
        if first > final:
            return []
        start = min(self._blocks[first].start, self._blocks[final].start)
        stop = max(self._blocks[first].stop, self._blocks[final].stop)
        i, i1 = a.rows.below(start, a.row), a.rows.below(stop, a.row)
        if i == i1:
            return []
        x = call.slab(self._right).below(block.start, self._item)
        sums = call.slab(self._sums, a.row, a.col).below(i, self._item)
        part, row = self._part(i, a.cols.below(block.start, a.col)), Factor(x.at, False, 1)
        return [gemm(call, i1 - i, 1, block.stop - block.start, self._one, part, row, self._one, sums)]

    def _part(self, i: int, j: int) -> Factor:
        """Return op(A) from a local row and column on."""
        a = self._a
        first = i + j * a.ld if a.by_columns else i * a.ld + j
        return Factor(a.at + first * self._item, a.by_columns, a.ld, a.conjugated)
