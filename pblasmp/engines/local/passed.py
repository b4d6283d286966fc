# SPDX-License-Identifier: Apache-2.0
"""Slabs that several ranks of a node multiply, each in its own memory: they are sent to the node once.

Each of these ranks receives a share, some columns of its slab, and passes it on to the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ...comm import Cells, Side
from ...layout.axis import Axis
from ...layout.intersection import common_counts
from ..protocol import Transfer, Transport

Array = Any

_WORTH = 1 << 20  # bytes of a slab, from which on this takes less time than to send it to each of the ranks
_MOST = 1 << 20  # pairs of a share and a slab, of all nodes: with more, plans take longer than messages


@dataclass(frozen=True)
class Shares:
    """What comes to the nodes, and who passes it on.

    Attributes:
        count: the shares of a slab.
        nodes: how many there are.
        come: the cells of shares, those of each slab once on each node that needs it.
        given, wanted: the cells of shares and of slabs, in a matrix that has the slabs of each node side by side.
        most: bytes that a rank passes on to another one at most.
    """

    count: int
    nodes: int
    come: Cells
    given: Cells
    wanted: Cells
    most: int


@lru_cache(64)
def shares_of(
    side: Side,
    outer: Axis,
    needs: tuple[tuple[int, ...], ...],
    nodes: tuple[tuple[int, ...], ...],
    width: int,
    itemsize: int,
) -> Shares | None:
    """Return the shares of slabs, None if they are not worth it: the same on every rank. Local.

    Args:
        side: the operand.
        outer: how its rows are dealt out in slabs.
        needs: for every rank, the slabs that it multiplies.
        nodes: groups of ranks between which messages are fast.
        width: columns of a slab.
        itemsize: bytes of an element.
    """
    if len(nodes) ** 2 > _MOST:
        return None
    node = {rank: i for i, ranks in enumerate(nodes) for rank in ranks}
    sharing: dict[tuple[int, int], list[int]] = {}
    for rank, processes in enumerate(needs):
        for process in processes:
            sharing.setdefault((process, node[rank]), []).append(rank)
    counts, tall = [*map(len, sharing.values())], max(outer.counts())
    if max(counts, default=1) == 1 or tall * width * itemsize < _WORTH:
        return None
    filled = np.array(side.cols.counts())[side.cells.coords[:, 1]] > 0
    has = (common_counts(side.rows, outer) > 0)[side.cells.coords[:, 0]] & filled[:, None]
    home = np.array([node[rank] for rank in side.cells.owners.tolist()])
    if not any(len(ranks) > 1 and (home[has[:, p]] != at).any() for (p, at), ranks in sharing.items()):
        return None
    count = next(each for each in range(min(counts), 0, -1) if width % each == 0)
    if count * len(nodes) ** 2 > _MOST:
        return None
    cut = [(*at, i, rank) for at, ranks in sharing.items() for i, rank in enumerate(ranks[:count])]
    return Shares(
        count,
        len(nodes),
        _cells([(p, i, rank) for p, _, i, rank in cut]),
        _cells([(p, at * count + i, rank) for p, at, i, rank in cut]),
        _cells([(*at, rank) for at, ranks in sharing.items() for rank in ranks]),
        tall * (width // count) * itemsize * max(map(len, needs)),
    )


def _cells(found: Sequence[tuple[int, int, int]]) -> Cells:
    """Return cells, each with its coordinates and its only rank."""
    cells = np.array(found, np.int64)
    return Cells(cells[:, :2], cells[:, 2:])


class Passing:
    """The moves of a panel of an operand in shares. Making one is local.

    Args:
        transport: of the ranks.
        shares: see above.
        given: the panel as the operand has it.
        rows: how its rows are dealt out in slabs.
        order: memory order of slabs.
        dtypes: of the operand, and of slabs.

    Attributes:
        exchanges: the one that brings shares to nodes, and the one within each.
    """

    def __init__(
        self,
        transport: Transport,
        shares: Shares,
        given: Side,
        rows: Axis,
        order: str,
        dtypes: tuple[np.dtype, np.dtype],
    ) -> None:
        width, count, nodes = given.cols.extent, shares.count, shares.nodes
        self._transport, self._share, rank = transport, width // count, transport.rank
        come = Side(rows, Axis(width, self._share, 0, count), shares.come, order)
        cut = Side(rows, Axis(nodes * width, self._share, 0, nodes * count), shares.given, order)
        whole = Side(rows, Axis(nodes * width, width, 0, nodes), shares.wanted, order)
        within = copy(transport.exchange(cut, whole, dtypes[1]))  # others may have the cached one
        # A rank's share is in its slab already; all ranks must know how much room messages take.
        within.copies, within.copied_bytes, within.largest_bytes = [], 0, shares.most
        self.exchanges = transport.exchange(given, come, dtypes[0]), within
        mine, slabs = (np.flatnonzero(each.owners == rank).tolist() for each in (shares.come, shares.wanted))
        self._mine = [(i, *shares.come.coords[i].tolist()) for i in mine]
        self._slabs = [(i, int(shares.wanted.coords[i, 0])) for i in slabs]

    def start(
        self, given: Mapping[int, Array], slabs: Mapping[int, Array], *, conjugate: bool, slots: int | None
    ) -> Transfer:
        """Start bringing shares here, into slabs by process; ``finish`` passes them on. Collective over the ranks."""
        came = {i: slabs[p][:, at * self._share : (at + 1) * self._share] for i, p, at in self._mine}
        coming = self._transport.start_exchange(
            self.exchanges[0], given, came, conjugate=conjugate, slots=slots
        )
        return _UnderWay(self, coming, came, {i: slabs[p] for i, p in self._slabs}, slots)

    def pass_on(self, came: Mapping[int, Array], slabs: Mapping[int, Array], slots: int | None) -> Transfer:
        """Start passing on what has come. Collective over the ranks."""
        return self._transport.start_exchange(self.exchanges[1], came, slabs, slots=slots)


class _UnderWay:
    """Shares that come, to be passed on."""

    def __init__(self, passing: Passing, coming: Transfer, *about: Any) -> None:
        self._passing, self._coming, self._about = passing, coming, about
        self._ended = False

    def finish(self) -> None:
        """Pass on what has come, and wait for what others pass on. Collective over the ranks, but if it is done."""
        if not self._ended:
            self._ended = True
            self._coming.finish()
            self._passing.pass_on(*self._about).finish()
