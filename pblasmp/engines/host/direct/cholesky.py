# SPDX-License-Identifier: Apache-2.0
"""Cholesky factorisations as direct calls: in place on one rank, else on a copy of the matrix that the ranks share.

Systems of equations are solved with such a copy, for a part of the right-hand sides on each rank.

Blocks of the diagonal are narrow: the solves beside them, in which a BLAS is slowest, are then a small part of the
work. If the matrix is large enough for several ranks, each solves for its part of the rows below a block of the
diagonal, and then updates its part of the triangle that is left. The first rank's part is smaller, since it also
factors the next block of the diagonal. The last columns it factors alone.

A matrix is meant as LAPACK sees it, in Fortran order: the lower triangle of one in C order is an upper triangle.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import numpy as np

from ...direct import Outcome, Part
from ...direct.spans import spread, whole_span
from ...direct.sub_matrix import SubMatrix, UnfitError, check_overlap, same_elements
from .lapack import within_triangle
from .program import Preparation
from .slabs import Array, Factor, Step, Steps, Strided, back, integer, real, scalar

__all__ = ["factored", "may_be_factored", "solved"]

# ``python -m benchmarks.factorisation_ways`` measures these, and times what is computed on both sides of each.
_MOST = 1536  # rows and columns: larger matrices are factored in panels, whose updates move less memory
_WIDTH = 48  # of a block of the diagonal
_PART = 128  # rows: the least that a rank has of a matrix
_MEETING = 470_000  # multiplications of an update that take as long as ranks that wait for each other
_FACTORING = 240_000  # multiplications of an update that take as long as to factor a block of the diagonal

_STRIP = 128  # columns of a triangle that are copied at a time
_TOGETHER = 8  # rows: parts of the ranks are multiples of them, as long as the kernels of a BLAS are

_NOT_A_NUMBER = -1  # a fault that is no error


def may_be_factored(n: int) -> bool:
    """Return whether a matrix of order ``n`` may be factored so. Local."""
    return n <= _MOST


def factored(call: Preparation) -> Callable[[], Steps]:
    """Prepare potrf: D becomes A's Cholesky factor in a triangle; outside it a new D is zero, another keeps its values.

    Raises:
        UnfitError: the matrix is large, or A and D overlap in another way than by being the same elements.
    """
    asked = call.asked
    check_overlap(asked, asked.a)
    in_place = same_elements(asked.a, asked.d)
    a, to = SubMatrix(asked.a), SubMatrix(asked.d)
    n = to.rows.extent
    if not may_be_factored(n):
        raise UnfitError
    work = _BlockedCholesky(call, n, lower=(asked.uplo == "L") == to.by_columns)

    def into_place(copies: Steps) -> Steps:
        return copies if in_place or not to.active else within_triangle(call, to, copies)

    if call.single:

        def compute_alone() -> Steps:
            moved = into_place([] if in_place else [(np.copyto, (to.local(), a.local()))])
            return [*moved, work.on(to.local(), to.at, to.ld)]

        return compute_alone
    slabs = call.room(a, whole_span(n), whole_span(n), by_columns=to.by_columns)
    work.raise_flags()

    def before() -> Steps:
        return _copied_strips(call, asked.a, call.slab_array(slabs), out=False)

    def compute() -> Steps:
        copy = call.slab(slabs)
        return [work.on(call.slab_array(slabs), copy.at, copy.ld)]

    def finish() -> Steps:
        copies = _copied_strips(call, asked.d, call.slab_array(slabs), out=True)
        return [(work.tell, ()), *into_place(copies)]

    call.before, call.finish = before, finish
    return compute


def solved(call: Preparation) -> Callable[[], Steps]:
    """Prepare posv on copies: D becomes the solution X of A X = B.

    Raises:
        UnfitError: the matrix is large, or D overlaps A, or B in another way than by being the same elements.
    """
    asked = call.asked
    assert asked.b is not None
    check_overlap(asked, asked.b)
    a, b, to = SubMatrix(asked.a), SubMatrix(asked.b), SubMatrix(asked.d)
    n, width = to.rows.extent, to.cols.extent
    in_place = same_elements(asked.b, asked.d)
    if not may_be_factored(n) or (call.single and not (to.by_columns and b.same_places(to))):
        raise UnfitError
    work = _BlockedCholesky(call, n, lower=asked.uplo == "L")
    if call.single:
        copy = call.operations.scratch("factored", (n, n), to.held.pattern.dtype, "F")

        def compute_alone() -> Steps:
            moved: Steps = [] if in_place else [(np.copyto, (to.local(), b.local()))]
            factored = work.on(copy, copy.ctypes.data, n)
            return [
                *_copied_strips(call, asked.a, copy, out=False),
                *moved,
                factored,
                *work.solving(to, width),
            ]

        return compute_alone
    whole = whole_span(n)
    slabs = call.room(a, whole, whole, by_columns=True)
    right = call.stage(b, whole, whole_span(width), by_columns=True)
    work.raise_flags()

    def compute() -> Steps:
        copy = call.slab(slabs)
        return [work.on(call.slab_array(slabs), copy.at, copy.ld), *work.solving(call.slab(right), width)]

    call.before = lambda: _copied_strips(call, asked.a, call.slab_array(slabs), out=False)
    call.finish = lambda: [(work.tell, ()), work.unless_fault(call.taken_from(right, to))]
    return compute


def _copied_strips(call: Preparation, part: Part, array: Array, *, out: bool) -> Steps:
    """Return the steps that copy this rank's part of a triangle into the copy that ranks share, or ``out`` of it.

    Of each strip of columns it is the rows from or to its square on the diagonal. What is there beyond the triangle
    comes back as it was.
    """
    steps: Steps = []
    held, i, j, n, _, transposed = part
    whole = Strided.of_array(array)
    for start in range(0, n, _STRIP):
        stop = min(start + _STRIP, n)
        top, end = (start, n) if call.asked.uplo == "L" else (0, stop)
        (down, right), (m, k) = (top, start), (end - top, stop - start)
        if transposed:
            (down, right), (m, k) = (right, down), (k, m)
        x = SubMatrix((held, i + down, j + right, m, k, transposed))
        if not x.active:
            continue
        local, there = Strided.of_part(x), whole.beginning(top, start)
        for _, rows in spread(x.rows, x.row, whole_span(end - top)):
            for _, cols in spread(x.cols, x.col, whole_span(stop - start)):
                if out:
                    copies = local.copied_from(there, back(rows), back(cols))
                else:
                    copies = there.copied_from(local, rows, cols)
                steps += [(np.copyto, each) for each in copies]
    return steps


class _BlockedCholesky:
    """The factorisation of an array by the first ranks. Making one is local.

    Args:
        call: the call.
        n: rows and columns.
        lower: which triangle.
    """

    def __init__(self, call: Preparation, n: int, *, lower: bool) -> None:
        letter, self._rank = call.letter, call.rank
        self._call, self._n, self._lower = call, n, lower
        self._item = call.asked.d[0].pattern.itemsize
        self._functions = tuple(call.function(name) for name in ("potrf", "trsm", "gemm"))
        self._syrk = call.function("syrk" if letter in "sd" else "herk")
        self._uplo, self._adjoint = b"L" if lower else b"U", b"T" if letter in "sd" else b"C"
        self._one, self._less = scalar(1, letter), scalar(-1, letter)
        self._reals = real(-1, letter), real(1, letter)
        self._starts = range(0, n, _WIDTH)
        self._workers = min(call.operations.workers, call.ranks, max(1, n // _PART))
        self._together = max(0, -(-(n - _alone(n, self._workers)) // _WIDTH))  # the first blocks
        self._factored = 2 * self._together + 1  # the last event
        self._of_lapack, self._failed, self._info = ctypes.c_int(0), 0, 0
        call.weight = 4 * len(self._starts)
        self._diagonal: Array | None = None
        call.outcome = lambda: Outcome(self._info, diagonal=self._diagonal)

    # -- flags, if there are several ranks: of ranks for events. The last one is for a fault.

    def raise_flags(self) -> None:
        """Have flags for the events of the run."""
        events, mine = self._factored + 1, []
        if self._rank < self._workers:
            mine = [self._flag(event, self._rank) for event in range(events)]
        if self._rank == 0:
            mine.append(events * self._workers)
        self._call.raise_flags(events * self._workers + 1, mine)

    def _flag(self, event: int, rank: int) -> int:
        """Return a rank's flag for an event: 2 k if it has updated for block k, 2 k + 1 if it has solved with it.

        ``_factored`` is one of the first rank only: all is done.
        """
        return event * self._workers + rank

    def _tell(self, event: int) -> Steps:
        """Return the step that tells the other ranks."""
        return [(self._call.progress().done, (self._flag(event, self._rank),))]

    def _hear(self, event: int) -> Steps:
        """Return the steps that wait until the other ranks have told."""
        others = (rank for rank in range(self._workers if event else 1) if rank != self._rank)
        return [(self._call.progress().wait, (self._flag(event, rank),)) for rank in others]

    # -- steps

    def on(self, array: Array, at: int, ld: int) -> Step:
        """Return the step that factors an array, which is at an address and has a leading dimension."""
        self._array, self._at, self._ld, of_ld = array, at, ld, integer[ld]
        first = self._rank == 0
        self._fault = np.zeros(1, np.int64) if self._call.single else self._call.flags()[-1:]
        self._factors = [
            (
                self._uplo,
                integer[self._width(start)],
                self._place(start, start),
                of_ld,
                ctypes.byref(self._of_lapack),
            )
            for start in self._starts
        ]
        self._begin: Steps = [(self._factor, (0,))] if first else []
        if first and self._together:
            self._begin += self._tell(0)
        blocks = range(len(self._starts) if first else self._together if self._rank < self._workers else 0)
        self._blocks = [self._block(k) for k in blocks]
        return self.run, ()

    def _block(self, k: int) -> tuple[Steps, Steps]:
        """Return what comes before it is known whether block k has a fault, and what comes then."""
        together = k < self._together
        waits = self._hear(2 * k) if together or (k == self._together and k) else []
        start = self._starts[k]
        below, stop = start + self._width(start), self._n
        share = self._workers if together else 1
        steps = self._solved(start, *self._part(_equal(stop - below, share), below))
        if together:
            steps += self._tell(2 * k + 1) + self._hear(2 * k + 1)
        steps += self._updated(start, below, *self._part(_triangles(stop - below, share), below))
        if self._rank == 0 and k + 1 < len(self._starts):
            steps.append((self._factor, (k + 1,)))
        if together:
            steps += self._tell(2 * k + 2)
        return waits, steps

    def _width(self, start: int) -> int:
        return min(_WIDTH, self._n - start)

    def _part(self, bounds: list[int], below: int) -> tuple[int, int]:
        """Return the rows of this rank."""
        return below + bounds[self._rank], below + bounds[self._rank + 1]

    def _place(self, i: int, j: int) -> int:
        """Return the address of an element of the lower triangle, or of the one that mirrors it."""
        if not self._lower:
            i, j = j, i
        return self._at + self._item * (i + j * self._ld)

    def _solved(self, start: int, i: int, i1: int) -> Steps:
        """Return the step that solves with a block of the diagonal for rows of its columns."""
        if i == i1:
            return []
        sizes, ld = (integer[i1 - i], integer[self._width(start)]), integer[self._ld]
        side, (m, n) = (b"R", sizes) if self._lower else (b"L", sizes[::-1])
        return [
            (
                self._functions[1],
                (
                    side, self._uplo, self._adjoint, b"N", m, n, self._one, self._place(start, start), ld,
                    self._place(i, start), ld,
                ),
            )
        ]  # fmt: skip

    def _updated(self, start: int, below: int, i: int, i1: int) -> Steps:
        """Return the steps that update rows of the triangle that begins below a block of the diagonal."""
        if i == i1:
            return []
        ld, k, (less, one) = integer[self._ld], integer[self._width(start)], self._reals
        of, adjoint = (b"N", self._adjoint) if self._lower else (self._adjoint, b"N")
        square = (
            self._uplo, of, integer[i1 - i], k, less, self._place(i, start), ld, one, self._place(i, i), ld,
        )  # fmt: skip
        steps: Steps = [(self._syrk, square)]
        if i > below:
            rows = integer[i1 - i], self._place(i, start)
            cols = integer[i - below], self._place(below, start)
            (m, x), (n, y) = (rows, cols) if self._lower else (cols, rows)
            beside = of, adjoint, m, n, k, self._less, x, ld, y, ld, self._one, self._place(i, below), ld
            steps.insert(0, (self._functions[2], beside))
        return steps

    def solving(self, x: Factor | SubMatrix, cols: int) -> Steps:
        """Return the steps that solve for this rank's columns of right-hand sides, unless there is a fault.

        They are in Fortran order, as the array is.
        """
        progress = None if self._call.single else self._call.progress()
        flag = self._flag(self._factored, 0)
        steps: Steps = []
        if progress is not None:
            steps.append((progress.done if self._rank == 0 else progress.wait, (flag,)))
        bounds = _equal(cols, self._workers)
        if self._rank >= self._workers or bounds[self._rank] == bounds[self._rank + 1]:
            return steps
        first, stop = bounds[self._rank : self._rank + 2]
        sizes = integer[self._n], integer[stop - first], self._one
        arrays = self._at, integer[self._ld], x.at + first * x.ld * self._item, integer[x.ld]
        return [
            *steps,
            self.unless_fault(
                [
                    (self._functions[1], (b"L", self._uplo, op, b"N", *sizes, *arrays))
                    for op in ((b"N", self._adjoint) if self._lower else (self._adjoint, b"N"))
                ]
            ),
        ]

    def unless_fault(self, steps: Steps) -> Step:
        """Return the step that takes steps unless the matrix is not positive definite."""

        def take() -> None:
            if self._fault[0] <= 0:
                for function, arguments in steps:
                    function(*arguments)

        return take, ()

    # -- one run

    def run(self) -> None:
        """Do this rank's part. The ranks meet before and after it."""
        fault = self._fault
        if self._call.single:
            fault[0] = 0
        for function, arguments in self._begin:
            function(*arguments)
        for waits, steps in self._blocks:
            for function, arguments in waits:
                function(*arguments)
            if fault[0]:
                break
            for function, arguments in steps:
                function(*arguments)
        if self._rank == 0 and fault[0] == _NOT_A_NUMBER:
            start = self._starts[self._failed]
            left = self._array[start:, start:]
            inside = np.tri(len(left), dtype=bool)
            left[inside if self._call.asked.uplo == "L" else inside.T] = np.nan
        if self._call.single:
            self.tell()

    def _factor(self, k: int) -> None:
        """Factor block k of the diagonal."""
        self._functions[0](*self._factors[k])
        found = self._of_lapack.value
        if found:  # libraries differ in whether NaN is a fault
            i = self._starts[k] + found - 1
            self._failed = k
            self._fault[0] = _NOT_A_NUMBER if np.isnan(self._array[i, i]) else i + 1

    def tell(self) -> None:
        """Note what the run has found: 0, or the order of the first leading minor that is not positive."""
        self._info = max(0, int(self._fault[0]))
        if self._call.asked.b is not None:
            self._diagonal = self._array.diagonal().copy()


def _alone(n: int, workers: int) -> int:
    """Return how many of the last columns one rank factors alone.

    A block of w columns that has m columns to its right takes w m (m + w) / 2 multiplications, for its solve and its
    update. Each of p ranks does a part of them, and they wait for each other twice: several are faster if
    (1 - 1/p) w m (m + w) / 2 > 2 ``_MEETING``.
    """
    if workers == 1:
        return n
    half, saved = _WIDTH / 2, (1 - 1 / workers) * _WIDTH
    return min(n, round(math.sqrt(half * half + 4 * _MEETING / saved) - half))


def _equal(extent: int, parts: int) -> list[int]:
    """Return where equal parts begin, and the end."""
    step = -(-extent // parts // _TOGETHER) * _TOGETHER
    return [min(extent, part * step) for part in range(parts + 1)]


def _triangles(extent: int, parts: int) -> list[int]:
    """Return where parts of the rows of a triangle begin, and the end: all take as long, with a block in the first."""
    ahead = _FACTORING / _WIDTH  # elements of the update
    share = (extent * extent / 2 + ahead) / parts
    ends = (math.sqrt(max(0, 2 * (part * share - ahead))) for part in range(1, parts))
    inner = [min(extent, max(_WIDTH, round(end / _TOGETHER) * _TOGETHER)) for end in ends]
    return [0, *inner, extent]
