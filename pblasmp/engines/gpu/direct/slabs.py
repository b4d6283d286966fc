# SPDX-License-Identifier: Apache-2.0
"""Copies of operands' parts in symmetric memory, and matrices as cuBLAS takes them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from ....layout.intersection import Stretches
from ...direct.spans import Span, spread
from ...direct.sub_matrix import SubMatrix
from ..kernels.views import Move, View, moves


class CublasMatrix(NamedTuple):
    """A matrix as cuBLAS takes it: its address, whether it is in Fortran order, its leading dimension."""

    at: int
    by_columns: bool
    ld: int

    def below(self, i: int, item: int) -> int:
        """Return the address of row ``i``. Local."""
        return self.at + i * item * (1 if self.by_columns else self.ld)


class StagedOperand:
    """Copies of an operand's parts in the memory of those who need them, and do not have them in place. Local.

    Args:
        x: the operand.
        rows, cols: how its rows and columns are dealt out to those who need them.
        receivers: by rank, whose of the rows and of the columns it needs.
        start: its offset in a set of slabs.
        end: the offset after it.
    """

    def __init__(
        self,
        x: SubMatrix,
        rows: Span,
        cols: Span,
        receivers: dict[int, tuple[int, int]],
        start: int,
        end: int,
    ) -> None:
        self.x, self.rows, self.cols, self.start, self.end = x, rows, cols, start, end
        self.receivers = receivers

    def ld(self, p: int, q: int) -> int:
        """Return the leading dimension of the copy of rows ``p`` and columns ``q``."""
        return max(1, self.rows.count(p) if self.x.by_columns else self.cols.count(q))

    def moves(self, bases: dict[int, int]) -> Iterator[Move]:
        """Yield the copies of what this rank has; ``bases`` has the addresses of the ranks' sets of slabs."""
        x = self.x
        if not (x.active and self.receivers):
            return
        dtype = x.held.pattern.dtype
        down, across = (
            _by_process(*each) for each in ((x.rows, x.row, self.rows), (x.cols, x.col, self.cols))
        )
        of = View(x.at, 1, 1, x.ld, dtype)
        for rank, (p, q) in self.receivers.items():
            rows, cols = down.get(p), across.get(q)
            if rows and cols:
                to = View(bases[rank] + self.start, 1, 1, self.ld(p, q), dtype)
                yield from moves(to, of, *((cols, rows) if x.by_columns else (rows, cols)))

    def factor(self, rank: int, whose: tuple[int, int], base: int) -> CublasMatrix:
        """Return what a rank multiplies: its slab, or its local array."""
        x = self.x
        if rank in self.receivers:
            return CublasMatrix(base + self.start, x.by_columns, self.ld(*whose))
        return CublasMatrix(x.at, x.by_columns, x.ld)


@lru_cache(4096)
def _by_process(of: Span, process: int, to: Span) -> dict[int, Stretches]:
    """Return where the indices of a process go, by process."""
    found: dict[int, Stretches] = {}
    for p, stretch in spread(of, process, to):
        found[p] = (*found.get(p, ()), stretch)
    return found


def covers(of: Span, process: int, needed: Span, needing: int) -> bool:
    """Return whether a process's indices are just those that another distribution gives a process."""
    if process < 0:
        return False
    if needed.whole:
        return of.whole and process == of.source
    return of == needed and process == needing
