# SPDX-License-Identifier: Apache-2.0
"""The process grid: ranks arranged in rows and columns."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from ..dtypes import plain
from ..errors import ArgumentError, ArgumentTypeError, LayoutError, short_repr

_MOST_RANKS = 2**31 - 1

RankOrder = Literal["row", "col"]

LARGEST = 10**100
"""The largest extent: every number that is computed from such ones can be printed."""

_GRID_TEXT = re.compile(r"([1-9][0-9]{0,99})x([1-9][0-9]{0,99})(?:-(row|col))?")


def integer(value: object, name: str, minimum: int, error: type[ArgumentError] = LayoutError) -> int:
    """Return ``value`` as an int of at least ``minimum``, or raise an error that calls it ``name``. Local.

    ArgumentTypeError if it is no integer, ``error`` if it is too small or too large.
    """
    if type(value) is int and minimum <= value <= LARGEST:
        return value  # the usual case, and frequent while plans are made
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentTypeError(f"{name}: expected an integer, got {short_repr(value)}") from None
    if number < minimum:
        raise error(f"{name}: expected at least {minimum}, got {short_repr(number)}")
    if number > LARGEST:
        raise error(f"{name}: expected at most 10**100, got {short_repr(number)}")
    return number


PAIR_OF_SHAPE = "a pair of integers, (n, 1) for a vector"


def pair(
    value: Sequence[int], name: str, minimum: int, expected: str = "a pair of integers"
) -> tuple[int, int]:
    """Return two integers, each at least ``minimum``, or raise LayoutError. Local."""
    if type(value) is tuple and len(value) == 2:
        first, second = value
        if (
            type(first) is type(second) is int
            and minimum <= first <= LARGEST
            and minimum <= second <= LARGEST
        ):
            return value  # nearly always
    try:
        first, second = () if isinstance(value, (str, bytes)) else value
    except (TypeError, ValueError):
        raise LayoutError(f"{name}: expected {expected}, got {short_repr(value)}") from None
    return integer(first, f"{name}[0]", minimum), integer(second, f"{name}[1]", minimum)


def as_block(value: int | Sequence[int], name: str = "block") -> tuple[int, int]:
    """Return ``(mb, nb)`` for one integer, which is both, or a pair; else raise LayoutError. Local."""
    expected = "an integer or a pair of integers"
    if type(value) is tuple:
        return pair(value, name, 1, expected)  # nearly always
    try:
        size = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return pair(value, name, 1, expected)  # type: ignore[arg-type]
    return (integer(size, name, 1),) * 2


def as_grid(value: Grid | str | Sequence[int] | dict[str, Any], name: str = "grid") -> Grid:
    """Return the process grid meant by ``value``; else raise LayoutError. Local.

    That is a ``Grid``; ``(2, 3)``; ``"2x3"``, whose ranks are numbered along rows, as in ``"2x3-row"``, or
    ``"2x3-col"``, whose ranks are numbered down columns; or a table of descriptor files, ``{"nprow": 2, "npcol": 3,
    "order": "col"}``.
    """
    if isinstance(value, Grid):
        return value
    if isinstance(value, dict):
        return Grid(value.get("nprow"), value.get("npcol"), value.get("order", "row"))  # type: ignore[arg-type]
    if isinstance(value, str) and (match := _GRID_TEXT.fullmatch(value)):
        return Grid(
            integer(int(match[1]), f"{name} nprow", 1),
            integer(int(match[2]), f"{name} npcol", 1),
            "col" if match[3] == "col" else "row",
        )
    return Grid(*pair(value, name, 1, "a Grid, a pair like (2, 3) or a text like '2x3'"))  # type: ignore[arg-type]


def one_of(value: object, legal: Iterable[str]) -> bool:
    """Return whether ``value``, which may have any type, is one of some texts. Local."""
    return isinstance(value, str) and plain(value) in (*legal,)


def _check_size(nranks: int, name: str) -> None:
    if nranks > _MOST_RANKS:
        raise LayoutError(f"{name}: MPI counts ranks in 32 bits, expected at most {_MOST_RANKS} processes")


@dataclass(frozen=True, slots=True, repr=False)
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
        if not one_of(self.order, ("row", "col")):
            raise LayoutError(f"grid order: expected 'row' or 'col', got {short_repr(self.order)}")

    @classmethod
    def squarest(cls, nranks: int, order: RankOrder = "row") -> Grid:
        """Return the grid of ``nranks`` processes that is nearest to a square, and not taller than wide. Local."""
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
            ArgumentError: the rank is not in the grid.
        """
        rank = integer(rank, "rank", 0, ArgumentError)
        if rank >= self.size:
            raise ArgumentError(f"rank {rank} is not in a grid of {self}: expected 0 to {self.size - 1}")
        if self.order == "row":
            return divmod(rank, self.npcol)
        return rank % self.nprow, rank // self.nprow

    def rank(self, prow: int, pcol: int) -> int:
        """Return the rank at process row ``prow`` and process column ``pcol``, all counted from 0. Local.

        Raises:
            ArgumentError: the coordinates are not in the grid.
        """
        prow, pcol = integer(prow, "prow", 0, ArgumentError), integer(pcol, "pcol", 0, ArgumentError)
        if prow >= self.nprow or pcol >= self.npcol:
            raise ArgumentError(f"process ({prow}, {pcol}) is not in a grid of {self}")
        return prow * self.npcol + pcol if self.order == "row" else pcol * self.nprow + prow

    def same_ranks(self, other: Grid) -> bool:
        """Return whether both grids have every rank at the same coordinates, whatever their orders. Local."""
        return self.shape == other.shape and (self.order == other.order or 1 in self.shape)

    @property
    def label(self) -> str:
        """The grid as ``as_grid`` and descriptor files read it: "2x3", or "2x3-col"."""
        return f"{self.nprow}x{self.npcol}{'' if self.order == 'row' else '-col'}"

    def __repr__(self) -> str:
        order = "" if self.order == "row" else f", {self.order!r}"
        return f"Grid({self.nprow}, {self.npcol}{order})"

    def __str__(self) -> str:
        return f"{self.nprow}x{self.npcol} processes in {self.order} order"


@lru_cache(64)
def coordinates(grid: Grid) -> tuple[tuple[int, int], ...]:
    """Return ``(prow, pcol)`` of every rank of a grid, in the order of the ranks. Local."""
    down, across = range(grid.nprow), range(grid.npcol)
    if grid.order == "row":
        return tuple(itertools.product(down, across))
    return tuple((prow, pcol) for pcol, prow in itertools.product(across, down))
