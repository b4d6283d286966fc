# SPDX-License-Identifier: Apache-2.0
"""Cells: which ranks hold which process coordinates of a layout, kept as arrays so that 65,536 of them are cheap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..layout.grid import Grid

__all__ = ["Cell", "Cells", "NodeCells", "filled_up"]

Coords = tuple[int, int]
Numbers = NDArray[np.int64]


class Cell(NamedTuple):
    """One local array of a layout: its process coordinates, and the ranks that can access it (first its owner)."""

    coords: Coords
    ranks: tuple[int, ...]


class Cells(Sequence[Cell]):
    """The cells of a side: a sequence whose items are made once, when the first one is asked for. Local.

    Args:
        coords: the process row and column of each cell.
        ranks: see the property of that name.
    """

    def __init__(self, coords: Numbers, ranks: Numbers) -> None:
        self.coords, self._ranks = coords, ranks

    @property
    def ranks(self) -> Numbers:
        """The ranks of each cell, its owner first; shorter rows are filled up with -1."""
        return self._ranks

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> Cells:
        """Return a sequence of cells as arrays."""
        if isinstance(cells, Cells):
            return cells
        coords = np.array([cell.coords for cell in cells], np.int64).reshape(-1, 2)
        return cls(coords, filled_up([cell.ranks for cell in cells]))

    @staticmethod
    @lru_cache(256)
    def of_grid(grid: Grid) -> Cells:
        """Return one cell for each process of a grid, in the order of its ranks."""
        ranks = np.arange(grid.size)
        lines = grid.npcol if grid.order == "row" else grid.nprow
        coords = np.column_stack(np.divmod(ranks, lines))
        return Cells(coords if grid.order == "row" else coords[:, ::-1], ranks[:, None])

    @cached_property
    def counts(self) -> Numbers:
        """How many ranks each cell has."""
        found: Numbers = np.count_nonzero(self.ranks >= 0, axis=1)
        return found

    @property
    def T(self) -> Cells:  # noqa: N802
        """The same cells with their coordinates exchanged."""
        return Cells(self.coords[:, ::-1], self.ranks)

    def owned_by(self, rank: int) -> int | None:
        """Return the index of the first cell whose owner is ``rank``, None if there is none."""
        found = np.flatnonzero(self.ranks[:, 0] == rank)
        return int(found[0]) if found.size else None

    @cached_property
    def _made(self) -> tuple[Cell, ...]:
        every = zip(self.coords.tolist(), self.ranks.tolist(), self.counts.tolist(), strict=True)
        return tuple(Cell((row, col), tuple(ranks[:count])) for (row, col), ranks, count in every)

    def __len__(self) -> int:
        return len(self.coords)

    def __getitem__(self, index: Any) -> Any:
        return self._made[index]

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._made)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return self is other or self._made == tuple(other)

    def __hash__(self) -> int:
        return hash(self._made)


class NodeCells(Cells):
    """Cells that every rank of their owner's node can access, which takes memory only when it is asked for. Local.

    Args:
        coords: as of ``Cells``.
        owners: the owner of each cell.
        nodes: the ranks of each node.
    """

    def __init__(self, coords: Numbers, owners: Numbers, nodes: Sequence[tuple[int, ...]]) -> None:
        self.coords, self.owners, self.nodes = coords, owners, nodes

    @cached_property
    def ranks(self) -> Numbers:
        """The ranks of each cell."""
        node = {rank: ranks for ranks in self.nodes for rank in ranks}
        return filled_up(
            [(each, *(rank for rank in node[each] if rank != each)) for each in self.owners.tolist()]
        )

    @property
    def T(self) -> NodeCells:  # noqa: N802
        """The same cells with their coordinates exchanged."""
        return NodeCells(self.coords[:, ::-1], self.owners, self.nodes)


def filled_up(lists: Sequence[Sequence[int]]) -> Numbers:
    """Return lists of numbers as rows of equal length, filled up with -1. Local."""
    counts = np.fromiter(map(len, lists), np.int64, len(lists))
    found = np.full((len(lists), counts.max(initial=0)), -1)
    found[np.arange(found.shape[1]) < counts[:, None]] = np.fromiter(
        chain.from_iterable(lists), np.int64, int(counts.sum())
    )
    return found
