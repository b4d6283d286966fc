# SPDX-License-Identifier: Apache-2.0
"""Level 1 as direct calls: vectors that are scaled or exchanged, and numbers that the ranks tell with their votes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...direct import Asked
from ...direct.sub_matrix import SubMatrix, UnfitError, check_overlap, vote_number
from ...local.reductions import MATRIX_REDUCTIONS, REDUCTIONS, stored
from ...local.sums import PLAIN
from .program import Preparation
from .slabs import Steps, along, integer, scalar

__all__ = ["MatrixReducer", "Reducer", "exchanged", "scaled"]


def scaled(call: Preparation) -> Callable[[], Steps]:
    """Prepare scal: each rank scales what it has."""
    to, alpha = SubMatrix(call.asked.d), scalar(call.asked.alpha, call.letter)
    function = call.function("scal")
    return lambda: [(function, (integer[to.m], alpha, *along(to)))] if to.active else []


def exchanged(call: Preparation) -> Callable[[], Steps]:
    """Prepare swap: where both vectors are on the same ranks, or through slabs."""
    asked = call.asked
    check_overlap(asked, None)
    x, y = SubMatrix(asked.a), SubMatrix(asked.d)
    if call.single or x.same_places(y):
        function = call.function("swap")
        return lambda: [(function, (integer[x.m], *along(x), *along(y)))] if x.active else []
    of_x, of_y = call.stage(x, y.rows, y.cols), call.stage(y, x.rows, x.cols)
    return lambda: [*call.taken_from(of_x, y), *call.taken_from(of_y, x)]


class Reducer:
    """A reduction, ready to run again. Making one is local.

    Args:
        asked: one of ``REDUCTIONS``.
        load: returns a routine of the BLAS, by letter and name.
        single: there is one rank.

    Attributes:
        number: the ranks vote on it.
        part: returns what this rank finds in its part of the vectors.
        total: makes the result of every rank's numbers.

    Raises:
        UnfitError: the vectors are not on the same ranks.
    """

    part: Callable[[], Sequence[float]]

    def __init__(self, asked: Asked, load: Callable[[str, str], Callable[..., Any]], *, single: bool) -> None:
        vectors = [SubMatrix(part) for part in (asked.a, asked.b) if part is not None]
        x = vectors[0]
        if not (single or all(x.same_places(y) for y in vectors[1:])):
            raise UnfitError
        self.number = 0 if single else vote_number(asked)
        self._rows, self._row = x.rows, x.row
        self._in_numpy, self.total = REDUCTIONS[asked.routine]
        nothing = np.empty(0, x.held.pattern.dtype)
        self._arrays = [y.local()[:, 0] if y.active else nothing for y in vectors]
        letter, routine = x.held.pattern.letter, asked.routine
        if letter in "sd" and routine in ("dot", "dotc"):
            self.total = REDUCTIONS["asum"].total  # it adds real numbers up, too
        name = _BLAS.get((letter, routine))
        self.part = self._by_numpy
        if not x.active:
            self._found = self._by_numpy()
            self.part = self._nothing
        elif name:
            both = vectors if len(vectors) == 2 or name == "asum" else [x, x]
            self._arguments = integer[x.m], *(argument for y in both for argument in along(y))
            self._function = load("d", name)
            self.part = self._squares if routine == "nrm2" else self._number
        elif letter == "s" and routine in ("dot", "dotc", "nrm2"):
            self._arguments, self._function = (), self._widened
            self.part = self._squares if routine == "nrm2" else self._number
        elif routine == "amax" and letter in "sd":
            self._sizes = np.empty(x.m, x.held.pattern.dtype)
            self.part = self._largest

    def _nothing(self) -> Sequence[float]:
        return self._found

    def _number(self) -> Sequence[float]:
        return (self._function(*self._arguments),)

    def _squares(self) -> Sequence[float]:
        total = self._function(*self._arguments)
        return (0, total) if PLAIN[0] < total < PLAIN[1] else self._by_numpy()

    def _widened(self) -> float:
        """Return the sum of products of two vectors, or of one with itself: BLAS's dsdot may sum in float32."""
        left, right = self._arrays[0], self._arrays[-1]
        total = 0.0
        for at in range(0, len(left), _SLAB):
            x = left[at : at + _SLAB].astype(np.float64)
            y = x if right is left else right[at : at + _SLAB].astype(np.float64)
            total += float(np.dot(x, y))
        return total

    def _largest(self) -> Sequence[float]:
        """See ``REDUCTIONS``: what is left of it for real numbers."""
        (x,), sizes = self._arrays, self._sizes
        at = np.abs(x, sizes).argmax()
        return sizes.item(at), self._index(int(at)), x.item(at), 0.0

    def _by_numpy(self) -> Sequence[float]:
        with np.errstate(all="ignore"):
            return self._in_numpy(np, self._arrays, self._index)

    def _index(self, at: int) -> int:
        """Return the global index of an element of this rank."""
        index: int = self._rows.at_place(self._row, at)
        return index


class MatrixReducer:
    """A reduction of a matrix, ready to run again. Making one is local.

    Args:
        asked: a kind of matrix and one of ``MATRIX_REDUCTIONS``, as in "symmetric: norm 1".
        single: there is one rank.

    Attributes:
        number, total: as those of ``Reducer``.

    Raises:
        UnfitError: a rank would have to have more of the columns or rows that it sums up.
    """

    def __init__(self, asked: Asked, *, single: bool) -> None:
        x = SubMatrix(asked.a)
        self._kind, _, name = asked.routine.partition(": ")
        both = self._kind in ("symmetric", "hermitian")
        for norm, span in (("norm 1", x.rows), ("norm inf", x.cols)):
            if name == norm and not (x.rows.whole and x.cols.whole if both else span.whole):
                raise UnfitError
        self.number = 0 if single else vote_number(asked)
        self._find, self.total = MATRIX_REDUCTIONS[name]
        self._options = asked.uplo, asked.diag
        places = np.empty(0, np.int64)
        self._array, self._rows, self._cols = np.empty((0, 0)), places, places
        if x.active:
            self._array, self._rows, self._cols = x.local(), x.rows.indices(x.row), x.cols.indices(x.col)

    def part(self) -> Sequence[float]:
        """Return what this rank finds in its elements."""
        with np.errstate(all="ignore"):
            of = stored(self._array, self._rows, self._cols, self._kind, *self._options)
            return self._find(np, of, int)


_SLAB = 1 << 13  # elements that are converted to double precision at a time: both vectors stay in cache

# The routines of the BLAS that make a number in double precision, by letter and reduction.
_BLAS = {
    ("d", "dot"): "dot", ("d", "dotc"): "dot", ("d", "nrm2"): "dot", ("d", "asum"): "asum",
}  # fmt: skip
