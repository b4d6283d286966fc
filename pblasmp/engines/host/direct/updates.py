# SPDX-License-Identifier: Apache-2.0
"""Rank-k and rank-2k updates as direct calls: what this rank does once the ranks have agreed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...direct import host_address
from ...direct.blas_form import MIRRORED, factors_of_update, start_of_update
from ...direct.spans import aligned_spans, whole_span
from ...direct.sub_matrix import SubMatrix, UnfitError, check_overlap, same_rank
from .products import copied, gemm
from .program import Preparation
from .slabs import Factor, Step, Steps, along, integer, real, scalar
from .staircase import Band, bands, check_tiles, staircase
from .tiny import Whole, all_of, is_tiny

__all__ = ["updated"]

_NARROW, _WIDTH = 16, 32  # blocks, and bands that are computed in one piece instead


def updated(call: Preparation) -> Callable[[], Steps]:
    """Prepare syrk, herk, syr2k or her2k: BLAS's for triangles of D that a rank has, products for the rest."""
    asked = call.asked
    check_overlap(asked, asked.c)
    to = SubMatrix(asked.d)
    start = copied(start_of_update(asked, to), to)
    lefts, k, hermitian = factors_of_update(asked)
    if call.single or all(same_rank(each, to) for each in lefts):
        by_columns = lefts[0].by_columns
        if any(each.by_columns != by_columns for each in lefts):
            raise UnfitError
        whole = _Update(call, to, k, by_columns=by_columns, hermitian=hermitian)
        return lambda: [*start, whole.step(to.m, lefts, to.at, to.ld)] if to.active else []
    rows, cols = to.rows, to.cols
    if is_tiny(call, rows.extent, rows.extent, k):
        return _updated_everywhere(call, lefts, to, k, hermitian=hermitian)
    if asked.d[0].pattern.is_complex:
        raise UnfitError
    check_tiles(to)
    update = _Update(call, to, k, by_columns=to.by_columns, hermitian=False)
    inner, alike = whole_span(k), aligned_spans(rows, cols)
    of_rows = [call.stage(each, rows, inner, by_columns=to.by_columns) for each in lefts]
    of_cols = (
        of_rows if alike else [call.stage(each, cols, inner, by_columns=to.by_columns) for each in lefts]
    )

    def compute() -> Steps:
        if not to.active:
            return []
        col = (to.col - cols.source + rows.source) % rows.nprocs if alike else to.col
        down = [call.slab(each, to.row) for each in of_rows]
        across = [call.slab(each, col) for each in of_cols]
        return [*start, *_Staircase(call, update, k, to, down, across).steps()]

    return compute


def _updated_everywhere(
    call: Preparation, lefts: list[SubMatrix], to: SubMatrix, k: int, *, hermitian: bool
) -> Callable[[], Steps]:
    """Prepare an update that each rank which has a part of D computes all of."""
    asked = call.asked
    old = start_of_update(asked, to) or to
    by_columns = to.by_columns != (hermitian and asked.op_a != "N")  # BLAS conjugates only what it transposes
    factors = [call.stage(x, *all_of(x), by_columns=by_columns) for x in lefts]
    update = _Update(call, to, k, by_columns=by_columns, hermitian=hermitian)

    def compute() -> Steps:
        if not to.active:
            return []
        result = Whole(call, to)
        d, given = result.factor, [call.slab(x) for x in factors]
        return [*result.start_as(old), update.step(to.rows.extent, given, d.at, d.ld), *result.hand_out(to)]

    return compute


class _Update:
    """BLAS's rank-k and rank-2k updates of a triangle in Fortran order: ``d = alpha x x^T + beta d``, or x y^T + y x^T.

    Args:
        call: the call.
        d: its result.
        k: the extent of the summation.
        by_columns: whether x and y are in Fortran order.
        hermitian: conjugate what is transposed.
    """

    def __init__(self, call: Preparation, d: SubMatrix, k: int, *, by_columns: bool, hermitian: bool) -> None:
        asked, letter, name = call.asked, call.letter, call.asked.routine
        if hermitian and ((asked.op_a != "N") != d.by_columns) != by_columns:
            raise UnfitError  # BLAS conjugates only what it transposes
        if not hermitian:
            name = name.replace("her", "syr")
        alpha = complex(asked.alpha).conjugate() if hermitian and not d.by_columns else asked.alpha
        # BLAS's level 2 has no symmetric updates of complex matrices, and conjugates nothing of a Hermitian one's.
        fit = letter in "sd" or (hermitian and d.by_columns and by_columns)
        self._vectors = k == 1 and asked.beta == 1 and fit
        if self._vectors:
            name = name.replace("rk", "r").replace("r2k", "r2")
        self._function = call.function(name)
        uplo = asked.uplo if d.by_columns else MIRRORED[asked.uplo]
        trans = b"N" if by_columns else b"C" if hermitian else b"T"
        self._options, self._k = (uplo.encode(), trans), integer[k]
        self._alpha = (real if hermitian and asked.b is None else scalar)(alpha, letter)
        self._beta = (real if hermitian else scalar)(asked.beta, letter)

    def step(self, n: int, factors: list[Any], at: int, ld: int) -> Step:
        """Return the step that updates n × n elements at an address."""
        if self._vectors:
            vectors = (each for x in factors for each in along(x))
            return self._function, (self._options[0], integer[n], self._alpha, *vectors, at, integer[ld])
        given: list[Any] = []
        for x in factors:
            given += [x.at, integer[x.ld]]
        return self._function, (
            *self._options, integer[n], self._k, self._alpha, *given, self._beta, at, integer[ld],
        )  # fmt: skip


class _Staircase:
    """The update of what this rank has of a triangle.

    Args:
        call: the call.
        update: of a tile.
        k: the extent of the summation.
        d: the result.
        down, across: A, and B if there is one, in the rows and in the columns of this rank's part.
    """

    def __init__(
        self,
        call: Preparation,
        update: _Update,
        k: int,
        d: SubMatrix,
        down: list[Factor],
        across: list[Factor],
    ) -> None:
        self._update, self._k, self._d, self._down, self._lower = update, k, d, down, call.asked.uplo == "L"
        self._call, self._item = call, d.held.pattern.itemsize
        self._scalars = [scalar(s, call.letter) for s in (call.asked.alpha, call.asked.beta, 1)]
        self._pairs = [(down[0], across[0])]
        if len(down) > 1:
            self._pairs = [(down[0], across[1]), (down[1], across[0])]

    def steps(self) -> Steps:
        """Return the steps that update it."""
        d, steps = self._d, []
        along = d.rows if d.cols.whole else d.cols
        if along.block < _NARROW and not (d.rows == d.cols and d.row == d.col):
            most = self._call.scratch.nbytes // self._item
            for band in bands(d, lower=self._lower, width=_WIDTH, most=most):
                steps += self._band(band)
            return steps
        for piece in staircase(d, lower=self._lower):
            i, i1, j, j1, tile = piece
            if tile:
                steps.append(self._tile(i, j, i1 - i))
            else:
                steps += self._rest(i, i1, j, j1)
        return steps

    def _at(self, i: int, j: int) -> int:
        """Return the address of an element of D."""
        d = self._d
        return d.at + self._item * (i + j * d.ld if d.by_columns else i * d.ld + j)

    def _tile(self, i: int, j: int, width: int) -> Step:
        """Return the step that updates a tile on the diagonal."""
        factors = [x.below(i, self._item) for x in self._down]
        return self._update.step(width, factors, self._at(i, j), self._d.ld)

    def _band(self, band: Band) -> Steps:
        """Return the steps that update what a mask has of a rectangle, in memory of this rank alone, or all of it."""
        i, i1, j, j1, mask = band
        if mask is None:
            return self._rest(i, i1, j, j1)
        memory, d = self._call.scratch, self._d
        shape, here = (i1 - i, j1 - j), d.local()[i:i1, j:j1]
        beside = np.ndarray(shape, here.dtype, memory, order="F" if d.by_columns else "C")
        at = Factor(host_address(memory), d.by_columns, shape[not d.by_columns])
        before: Steps = [(np.copyto, (beside, here))] if self._call.asked.beta != 0 else []
        return [*before, *self._products(i, i1, j, j1, at), (np.copyto, (here, beside, "same_kind", mask))]

    def _rest(self, i: int, i1: int, j: int, j1: int) -> Steps:
        """Return the steps that update a rectangle."""
        return self._products(i, i1, j, j1, Factor(self._at(i, j), self._d.by_columns, self._d.ld))

    def _products(self, i: int, i1: int, j: int, j1: int, at: Factor) -> Steps:
        """Return the steps that add to a rectangle that begins at ``at``, or to what stands for it there."""
        alpha, beta, one = self._scalars
        steps: Steps = []
        for x, y in self._pairs:
            of = x.below(i, self._item), y.below(j, self._item)
            steps.append(gemm(self._call, i1 - i, j1 - j, self._k, alpha, *of, beta, at))
            beta = one
        return steps
