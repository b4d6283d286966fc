# SPDX-License-Identifier: Apache-2.0
"""What all ranks move in an exchange, counted from its two sides without making anybody's plan.

What a process of one layout and a process of the other share is (common rows) × (common columns), so sums over
processes are products of small matrices, and nothing grows with the number of pairs of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ..comm import Side
from ..comm.exchange import ends, message_elements, piece_of
from ..layout.intersection import Piece, Stretch, common_counts, intersect

__all__ = ["Counts", "counts_of"]

_PAIRS = 1 << 20  # pairs of cells looked at together

Numbers = NDArray[np.int64]
Factors = list[tuple[NDArray[np.float64], NDArray[np.float64]]]


@dataclass
class Counts:
    """What each rank moves, in arrays over the ranks. Sums of counts are counts.

    Attributes:
        sent, received: bytes in messages.
        sent_here: bytes in messages to ranks of the same node.
        messages, received_messages: how many messages a rank sends and receives.
        copied: bytes that a rank copies itself.
        shared: of these, bytes from or to memory that the ranks of its node share.
    """

    sent: Numbers
    received: Numbers
    sent_here: Numbers
    messages: Numbers
    received_messages: Numbers
    copied: Numbers
    shared: Numbers

    @classmethod
    def none(cls, size: int) -> Counts:
        """Return the counts of ranks that move nothing. Local."""
        return cls(*(np.zeros(size, np.int64) for _ in fields(cls)))

    def __iadd__(self, other: Counts) -> Counts:
        for each in fields(self):
            getattr(self, each.name)[...] += getattr(other, each.name)
        return self


def counts_of(
    src: Side, dst: Side, itemsize: int, size: int, nodes: Sequence[tuple[int, ...]], slots: int | None
) -> Counts:
    """Return what every rank moves in an exchange. Local.

    Args:
        src, dst: its sides, as of ``comm.Exchange``.
        itemsize: bytes of an element on the way.
        size: number of ranks.
        nodes: the ranks of each node.
        slots: as of ``Exchange.start``: messages are cut only if it is given.
    """
    node = np.zeros(size, np.int64)
    for i, ranks in enumerate(nodes):
        node[list(ranks)] = i
    limit = message_elements(itemsize) if slots is not None else 1 << 62
    if all(len(cell.ranks) == 1 for cell in src.cells):
        found = _by_periods(src, dst, node, limit)
    else:
        found = by_pairs(src, dst, node, limit)
    for name in ("sent", "received", "sent_here", "copied", "shared"):
        getattr(found, name)[...] *= itemsize
    return found


def by_pairs(src: Side, dst: Side, node: Numbers, limit: int) -> Counts:
    """Return the counts of an exchange in elements, pair of cells by pair of cells. Local."""
    found = Counts.none(len(node))
    rows, cols = common_counts(src.rows, dst.rows), common_counts(src.cols, dst.cols)
    for source in src.cells:
        (p, q), s = source.coords, source.ranks
        for target in dst.cells:
            elements = int(rows[p, target.coords[0]] * cols[q, target.coords[1]])
            if not elements:
                continue
            owner, writer = ends(s, target.ranks)
            if owner == writer:
                found.copied[owner] += elements
                if owner != s[0] or len(target.ranks) > 1:
                    found.shared[owner] += elements
                continue
            count = 1
            if elements > limit:
                count = len(piece_of(src, source, dst, target).split(limit, dst.order))
            found.sent[owner] += elements
            found.received[writer] += elements
            found.messages[owner] += count
            found.received_messages[writer] += count
            if node[owner] == node[writer]:
                found.sent_here[owner] += elements
    return found


def _by_periods(src: Side, dst: Side, node: Numbers, limit: int) -> Counts:
    """Return what ``by_pairs`` does if no two ranks share a cell of ``src``."""
    found = Counts.none(len(node))
    if not (src.cells and dst.cells):
        return found
    rows, cols = common_counts(src.rows, dst.rows), common_counts(src.cols, dst.cols)
    elements: Factors = [(rows.astype(np.float64), cols.astype(np.float64))]
    messages = _message_factors(src, dst, rows, cols, limit)
    weights = ((elements, found.sent, found.received), (messages, found.messages, found.received_messages))
    owners = np.array([cell.ranks[0] for cell in src.cells])
    sources = np.array([cell.coords for cell in src.cells])
    targets = np.array([cell.coords for cell in dst.cells])
    counts = np.array([len(cell.ranks) for cell in dst.cells])
    firsts = np.array([cell.ranks[0] for cell in dst.cells])
    everywhere = _histogram(targets, (rows.shape[1], cols.shape[1]))
    for factors, sent, received in weights:
        np.add.at(sent, owners, _summed(factors, everywhere, sources))
        for length in np.unique(counts):
            cells = np.flatnonzero(counts == length)
            ranks = np.array([dst.cells[j].ranks for j in cells])
            for turn in range(length):
                mine = _histogram(sources[owners % length == turn], (rows.shape[0], cols.shape[0]))
                turned = [(down.T, across.T) for down, across in factors]
                np.add.at(received, ranks[:, turn], _summed(turned, mine, targets[cells]))
    # Until here every rank also sends to itself: what it finds in cells that it can write is copied.
    flat = np.array([(j, rank) for j, cell in enumerate(dst.cells) for rank in cell.ranks])
    writers = _table(dst)
    for i, j in _joined(owners, flat[:, 1]):
        j = flat[j, 0]
        writer = writers[j, owners[i] % counts[j]]
        for factors, sent, received in weights:
            here = _each(factors, sources[i], targets[j])
            np.subtract.at(sent, owners[i], here)
            np.subtract.at(received, writer, here)
        here = _each(elements, sources[i], targets[j])
        np.add.at(found.copied, owners[i], here)
        np.add.at(found.shared, owners[i], np.where(counts[j] > 1, here, 0))
    if node.max() == 0:
        found.sent_here[...] = found.sent
    elif len(np.unique(node)) < len(node):
        for i, j in _joined(node[owners], node[firsts]):
            np.add.at(found.sent_here, owners[i], _each(elements, sources[i], targets[j]))
        found.sent_here -= found.copied
    return found


def _message_factors(src: Side, dst: Side, rows: Numbers, cols: Numbers, limit: int) -> Factors:
    """Return the number of messages between processes as a sum of products of a matrix of rows and one of columns."""
    turned = dst.order == "F"  # messages are cut across columns
    if turned:
        src, dst, rows, cols = src.T, dst.T, cols, rows
    factors: Factors = []
    known: dict[tuple[object, ...], int] = {}
    small = np.zeros(cols.shape, bool)  # pairs of columns with which every message is whole
    for width in np.unique(cols[cols > 0]).tolist():
        if rows.max() * width <= limit:
            small |= cols == width
            continue
        parts = (rows > 0).astype(np.float64)
        across = (Stretch(1, width, 0, 0, 0, 0),)
        for p, q in zip(*np.nonzero(rows * width > limit), strict=True):
            stretches = intersect(src.rows, int(p), dst.rows, int(q))
            lengths = (width, *((s.repeat, s.length) for s in stretches))
            if lengths not in known:
                known[lengths] = len(Piece(stretches, across).split(limit, "C"))
            parts[p, q] = known[lengths]
        factors.append((parts, (cols == width).astype(np.float64)))
    if small.any():
        factors.append(((rows > 0).astype(np.float64), small.astype(np.float64)))
    return [(across, down) for down, across in factors] if turned else factors


def _histogram(coords: Numbers, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Return how many cells there are of each process."""
    found = np.zeros(shape)
    np.add.at(found, (coords[:, 0], coords[:, 1]), 1)
    return found


def _summed(factors: Factors, cells: NDArray[np.float64], coords: Numbers) -> Numbers:
    """Return for each process what it shares with all ``cells`` together. The numbers are below 2^53, so exact."""
    total = np.zeros(len(coords))
    for down, across in factors:
        total += (down @ cells @ across.T)[coords[:, 0], coords[:, 1]]
    return total.astype(np.int64)


def _each(factors: Factors, of: Numbers, to: Numbers) -> Numbers:
    """Return what each process of ``of`` shares with the one at the same place of ``to``."""
    total = np.zeros(len(of))
    for down, across in factors:
        total += down[of[:, 0], to[:, 0]] * across[of[:, 1], to[:, 1]]
    return total.astype(np.int64)


def _table(side: Side) -> Numbers:
    """Return the ranks of each cell as rows of equal length."""
    longest = max(len(cell.ranks) for cell in side.cells)
    return np.array([(*cell.ranks, *[0] * (longest - len(cell.ranks))) for cell in side.cells])


def _joined(left: Numbers, right: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield the indices of all pairs of equal numbers, some at a time."""
    order = np.argsort(right, kind="stable")
    first, stop = (np.searchsorted(right[order], left, side) for side in ("left", "right"))
    counts = stop - first
    cuts = np.searchsorted(np.cumsum(counts), np.arange(_PAIRS, counts.sum() + _PAIRS, _PAIRS), "left") + 1
    at = 0
    for end in np.minimum(cuts, len(left)).tolist():
        if end <= at:
            continue
        here = counts[at:end]
        i = np.arange(at, end).repeat(here)
        within = np.arange(here.sum()) - (np.cumsum(here) - here).repeat(here)
        yield i, order[first[at:end].repeat(here) + within]
        at = end
