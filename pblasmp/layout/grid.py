# SPDX-License-Identifier: Apache-2.0
"""The process grid: ranks arranged in rows and columns."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..errors import LayoutError

__all__ = ["Grid", "integer"]

_MOST_RANKS = 2**31 - 1

RankOrder = Literal["row", "col"]


def integer(value: object, name: str, minimum: int) -> int:
    """Return ``value`` as an int, or raise LayoutError when it is no integer of at least ``minimum``."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise LayoutError(f"{name}: expected an integer, got {value!r}") from None
    if number < minimum:
        raise LayoutError(f"{name}: expected at least {minimum}, got {number}")
    return number


def one_of(value: object, legal: Iterable[str]) -> bool:
    """Return whether ``value`` is one of some texts, whatever else it may be. Local."""
    return isinstance(value, str) and value in (*legal,)


def _check_size(nranks: int, name: str) -> None:
    if nranks > _MOST_RANKS:
        raise LayoutError(f"{name}: MPI counts ranks in 32 bits, expected at most {_MOST_RANKS} processes")


@dataclass(frozen=True, slots=True)
class Grid:
    """``nprow`` × ``npcol`` processes, numbered along rows or down columns. Local.

    Args:
        nprow: number of process rows, at least 1.
        npcol: number of process columns, at least 1.
        order: how ranks are numbered: "row" counts along a process row first, "col" down a process column.

    Raises:
        LayoutError: an extent is not a positive integer, or the order is unknown.
    """

    nprow: int
    npcol: int
    order: RankOrder = "row"

    def __post_init__(self) -> None:
        object.__setattr__(self, "nprow", integer(self.nprow, "grid nprow", 1))
        object.__setattr__(self, "npcol", integer(self.npcol, "grid npcol", 1))
        _check_size(self.nprow * self.npcol, "grid")
        if self.order not in ("row", "col"):
            raise LayoutError(f"grid order: expected 'row' or 'col', got {self.order!r}")

    @classmethod
    def squarest(cls, nranks: int, order: RankOrder = "row") -> Grid:
        """Return the grid of ``nranks`` processes nearest to a square, never taller than wide. Local."""
        nranks = integer(nranks, "nranks", 1)
        _check_size(nranks, "nranks")
        nprow = next(p for p in range(math.isqrt(nranks), 0, -1) if nranks % p == 0)
        return cls(nprow, nranks // nprow, order)

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.nprow * self.npcol

    @property
    def shape(self) -> tuple[int, int]:
        """``(nprow, npcol)``."""
        return self.nprow, self.npcol

    @property
    def T(self) -> Grid:  # noqa: N802 - the name NumPy uses
        """The transposed grid: the rank at (prow, pcol) here is at (pcol, prow) there."""
        return Grid(self.npcol, self.nprow, "col" if self.order == "row" else "row")

    def coords(self, rank: int) -> tuple[int, int]:
        """Return ``(prow, pcol)`` of ``rank``, all counted from 0. Local.

        Raises:
            LayoutError: the rank is not in the grid.
        """
        rank = integer(rank, "rank", 0)
        if rank >= self.size:
            raise LayoutError(f"rank {rank} is not in a grid of {self}: expected 0 to {self.size - 1}")
        if self.order == "row":
            return divmod(rank, self.npcol)
        return rank % self.nprow, rank // self.nprow

    def rank(self, prow: int, pcol: int) -> int:
        """Return the rank at process row ``prow`` and process column ``pcol``, all counted from 0. Local.

        Raises:
            LayoutError: the coordinates are not in the grid.
        """
        prow, pcol = integer(prow, "prow", 0), integer(pcol, "pcol", 0)
        if prow >= self.nprow or pcol >= self.npcol:
            raise LayoutError(f"process ({prow}, {pcol}) is not in a grid of {self}")
        return prow * self.npcol + pcol if self.order == "row" else pcol * self.nprow + prow

    def same_ranks(self, other: Grid) -> bool:
        """Return whether both grids put every rank at the same coordinates, whatever their order. Local."""
        return self.shape == other.shape and (self.order == other.order or 1 in self.shape)

    def __str__(self) -> str:
        return f"{self.nprow}x{self.npcol} processes in {self.order} order"
