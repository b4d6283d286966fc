# SPDX-License-Identifier: Apache-2.0
"""Rank-k updates of small matrices by long ones: k is dealt out over the ranks, their triangles are summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm import Cell, Communicator, Exchange, Side
from ...layout import Level3Problem, MatrixDescriptor
from ...layout.axis import Axis
from ..base import Options, Workspace
from .common import HostProduct, Means
from .kernels import ResultPart, update

__all__ = ["SummedUpdate", "is_better"]

_LONG = 8  # times as much is summed over as the result has rows: then its sum costs little

Array = NDArray[Any]


def is_better(p: Level3Problem, size: int) -> bool:
    """Return whether k should be dealt out on ``size`` ranks rather than slabs be made. Local.

    That is where k is long and already dealt out, so that nothing moves, or most of the result is on one rank.
    """
    if p.traits.shape != "updated" or size == 1 or p.k < _LONG * p.n:
        return False
    sides = _sides(p)
    still = sides[0].rows.nprocs == 1 and len(sides[0].cells) == size and all(x == sides[0] for x in sides)
    largest = max(rows * cols for rows, cols in map(p.d.local_shape, range(p.d.grid.size)))
    return still or 2 * largest > p.n * p.n


def _sides(p: Level3Problem) -> list[Side]:
    """Return A, and B where there is one, as n × k."""
    sides = [Side.of(x) for x in (p.a, p.b) if x is not None]
    return [side.T for side in sides] if p.op_a != "N" else sides


@dataclass(frozen=True)
class _Dealt:
    """An operand as n × k with k dealt out: how it comes to lie so, and what a rank then has."""

    exchange: Exchange | None
    shape: tuple[int, int]
    cells: tuple[int, int]


class SummedUpdate(HostProduct):
    """A triangle from partial triangles. Making and running one is collective over the ranks."""

    path = "summed"

    def __init__(self, p: Level3Problem, options: Options, means: Means) -> None:
        assert p.written is not None
        self._p, self._part, self._means = p, p.written, means
        self._alpha, self._beta = options.alpha, options.beta
        comm, order = means.comm, p.d.shape[0]
        self._flip, self._conjugate = p.op_a != "N", p.op_a == "C" and p.is_hermitian
        self._size = order
        matrices = [p.a] if p.b is None else [p.a, p.b]
        sides = _sides(p)
        like = sides[0] if sides[0].rows.nprocs == 1 and len(sides[0].cells) == comm.size else None
        cells = tuple(Cell((0, rank), (rank,)) for rank in range(comm.size))
        self._dealt = []
        for side, matrix in zip(sides, matrices, strict=True):
            target = like or Side(
                Axis(order, max(1, order)),
                Axis.even(p.k, comm.size),
                cells,
                side.order,
            )
            self._dealt.append(_dealt(comm, side, target, matrix))
        moves = [x.exchange for x in self._dealt if x.exchange is not None]
        itemsize = p.d.dtype.itemsize
        self.sent_bytes = sum(x.sent_bytes for x in moves) + order * order * itemsize
        self.copied_bytes = sum(x.copied_bytes for x in moves)
        pieces = sum(x.shape[0] * x.shape[1] for x in self._dealt if x.exchange is not None)
        self.workspace = Workspace(0, (order * order + pieces) * itemsize)

    def run(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        """Compute D's triangle. Collective over the ranks."""
        p, rank = self._p, self._means.comm.rank
        partial = np.zeros((self._size, self._size), p.d.dtype, order="F")
        if self._alpha != 0:
            self._add_up(
                partial, *(self._mine(x, each) for x, each in zip((a, b), self._dealt, strict=False))
            )
            self._means.comm.sum_into(partial)
        if rank >= p.d.grid.size:
            return
        rows, cols = p.d.global_indices(rank)
        for down, across, mask in self._part.parts(rows, cols):
            view = d[down, across]
            if self._beta != 0 and c is not None and c is not d:
                np.copyto(view, c[down, across], where=True if mask is None else mask)
            real = rows[down][:, None] == cols[across] if mask is not None and p.is_hermitian else None
            update(view, partial[np.ix_(rows[down], cols[across])], self._beta, mask, real)

    def _mine(self, local: Array, dealt: _Dealt) -> Array:
        """Return this rank's part of k of an operand, as n × k."""
        if self._flip:
            local = local.T
        if dealt.exchange is None:
            return local.conj() if self._conjugate else local
        rank = self._means.comm.rank
        mine: Array = np.empty(dealt.shape, self._p.d.dtype, order=dealt.exchange.order)  # type: ignore[call-overload]
        arrays = [
            [x if i == rank else None for i in range(n)]
            for x, n in zip((local, mine), dealt.cells, strict=True)
        ]
        dealt.exchange.run(*arrays, conjugate=self._conjugate)
        return mine

    def _add_up(self, partial: Array, x: Array, y: Array | None = None) -> None:
        """Add this rank's products to ``partial``, of which only the triangle is computed."""
        p, blas, alpha = self._p, self._means.blas, self._alpha
        everything = np.arange(self._size)
        multiply = ResultPart(self._part, everything, everything, p.is_hermitian)

        def adjoint(z: Array) -> Any:
            return z.conj().T if p.is_hermitian else z.T

        pairs = [(alpha, x, x if y is None else y)]
        if y is not None and p.traits.swept_twice:
            pairs.append((complex(alpha).conjugate() if p.is_hermitian else alpha, y, x))
        with blas.seated():
            for i, (factor, left, right) in enumerate(pairs):
                multiply(blas, factor, left, adjoint(right), min(i, 1), partial, 0)


def _dealt(comm: Communicator, side: Side, target: Side, matrix: MatrixDescriptor) -> _Dealt:
    """Return how an operand on ``side`` comes to lie as ``target`` says; no exchange where it does already."""
    here = next((cell for cell in target.cells if cell.ranks[0] == comm.rank), None)
    shape = (target.rows.extent, target.cols.count(here.coords[1]) if here is not None else 0)
    same = (side.rows, side.cols, side.cells) == (target.rows, target.cols, target.cells)
    exchange = None if same else Exchange(comm, side, target, matrix.dtype)
    return _Dealt(exchange, shape, (len(side.cells), len(target.cells)))
