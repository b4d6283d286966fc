# SPDX-License-Identifier: Apache-2.0
"""What all ranks move in an exchange, counted from its two sides without making anybody's plan.

What a process of one layout and a process of the other share is (common rows) × (common columns), so sums over
processes are products of small matrices, and nothing grows with the number of pairs of ranks.
Of ranks that do alike, which ``classes`` finds, one is counted for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..comm import Cells, Side
from ..comm.exchange import message_elements
from ..engines.request import AnyProblem
from ..layout import Level3Problem, MatmulProblem, MatrixDescriptor
from ..layout.axis import Axis
from ..layout.grid import coordinates
from ..layout.intersection import Piece, Stretch, common_counts, intersect
from ..layout.value import Numbers
from .dry_engine import Ranks

_PAIRS = 1 << 16  # pairs of cells looked at together

Move = tuple[Side, Side]
Factors = list[tuple[NDArray[np.float64], NDArray[np.float64]]]


@dataclass
class Counts:
    """What each rank moves, in arrays over the ranks, under the names that they have in ``Traffic``."""

    sent_bytes: Numbers
    received_bytes: Numbers
    node_bytes: Numbers
    node_received: Numbers
    messages: Numbers
    copied_bytes: Numbers
    shared_bytes: Numbers

    @classmethod
    def none(cls, size: int) -> Counts:
        """Return the counts of ranks that move nothing. Local."""
        return cls(*(np.zeros(size, np.int64) for _ in fields(cls)))

    def add(self, other: Counts) -> None:
        """Add what the ranks move in something else. Local."""
        for each in fields(self):
            getattr(self, each.name)[...] += getattr(other, each.name)


def counts_of(
    moves: Sequence[Move], itemsize: int, size: int, nodes: Sequence[tuple[int, ...]], slots: int | None
) -> Counts:
    """Return what every rank moves in exchanges between the same cells. Local.

    Moves are the two sides of each exchange; messages are cut only if ``slots`` are given, as to ``Exchange.start``.
    """
    found, node = Counts.none(size), np.zeros(size, np.int64)
    for i, ranks in enumerate(nodes):
        node[list(ranks)] = i
    moves = _narrowed(moves)
    (src, dst), limit = moves[0], message_elements(itemsize) if slots is not None else 1 << 62
    if not (src.cells and dst.cells):
        return found
    elements, messages = _factors(moves, limit)
    here, there = src.cells.coords, dst.cells.coords
    owners, writers, readable = src.cells.owners, dst.cells.owners, src.cells.nodes == nodes
    written = not readable and bool(dst.cells.counts.max() > 1)
    at_node = node[owners], node[writers]
    near, by = at_node if readable or written else (owners, writers)  # what is copied, not sent
    given, taken = _shared(elements, (here, near), (there, by))
    if readable:
        np.add.at(found.copied_bytes, writers, taken)
        np.add.at(found.shared_bytes, writers, taken - _shared(elements, (here, owners), (there, writers))[1])
    else:
        np.add.at(found.copied_bytes, owners, given)
        found.shared_bytes[...] = np.where(written & (np.bincount(node)[node] > 1), found.copied_bytes, 0)
        if not written:
            out, arriving = _shared(elements, (here, at_node[0]), (there, at_node[1]))
            np.add.at(found.node_bytes, owners, out - given)
            np.add.at(found.node_received, writers, arriving - taken)

    def far(factors: Factors, turns: tuple[Any, Any], cells: Any = slice(None)) -> list[Numbers]:
        """Return what is shared with others than those that are near, and have the same turn."""
        (mine, theirs), step = turns, size + 1
        every = _shared(factors, (here, near * 0 + mine), (there[cells], by[cells] * 0 + theirs))
        close = _shared(factors, (here, near * step + mine), (there[cells], by[cells] * step + theirs))
        return [x - y for x, y in zip(every, close, strict=True)]

    out, arriving = far(elements, (0, 0))
    np.add.at(found.sent_bytes, owners, out)
    np.add.at(found.messages, owners, far(messages, (0, 0))[0])
    if not written:
        np.add.at(found.received_bytes, writers, arriving)
    elif out.any():  # the ranks of a node take turns at what arrives
        counts, (cells, turn) = dst.cells.counts, np.nonzero(dst.cells.ranks >= 0)
        for count in np.unique(counts):
            which = counts[cells] == count
            of, turns = cells[which], turn[which]
            arriving = far(elements, (owners % count, turns), of)[1]
            np.add.at(found.received_bytes, dst.cells.ranks[of, turns], arriving)
    for each in fields(found):
        if each.name != "messages":
            getattr(found, each.name)[...] *= itemsize
    return found


def _narrowed(moves: Sequence[Move]) -> Sequence[Move]:
    """Return moves between processes that own anything: of grids with more processes than blocks, the others go."""
    narrow: list[list[Side]] = []
    for sides in zip(*moves, strict=True):
        cells = sides[0].cells
        coords, kept = cells.coords.copy(), np.ones(len(cells), bool)
        axes = []
        for k, of_sides in enumerate(([side.rows for side in sides], [side.cols for side in sides])):
            first, nprocs = of_sides[0].source, of_sides[0].nprocs
            apart = [(axis.source - first) % nprocs for axis in of_sides]
            blocks = [-(-(axis.lead + axis.extent) // axis.block) for axis in of_sides]
            width = max(1, *(start + count for start, count in zip(apart, blocks, strict=True)))
            if width < nprocs:  # in no move does a process own more than one block
                coords[:, k] = (coords[:, k] - first) % nprocs
                kept &= coords[:, k] < width
                of_sides = [
                    replace(axis, source=start, nprocs=width)
                    for axis, start in zip(of_sides, apart, strict=True)
                ]
            axes.append(of_sides)
        cells = cells.moved(coords, kept)
        narrow.append(
            [
                replace(side, rows=rows, cols=cols, cells=cells)
                for side, rows, cols in zip(sides, *axes, strict=True)
            ]
        )
    return [*zip(*narrow, strict=True)]


def _shared(
    factors: Factors, of: tuple[Numbers, Numbers], to: tuple[Numbers, Numbers]
) -> tuple[Numbers, Numbers]:
    """Return what each process of ``of``, and of ``to``, shares with all of the other side that have its key.

    Both are processes and their keys; two processes share the sum of (rows in common) × (columns in common).
    """
    (here, mine), (there, theirs) = of, to
    given, taken, keys = np.zeros(len(here), np.int64), np.zeros(len(there), np.int64), np.unique(mine)
    if len(keys) ** 2 > len(here):  # many small groups
        for i, j in _joined(mine, theirs):
            both = _each(factors, here[i], there[j])
            np.add.at(given, i, both)
            np.add.at(taken, j, both)
        return given, taken
    turned = [(down.T, across.T) for down, across in factors]
    for key in keys:
        i, j = np.flatnonzero(mine == key), np.flatnonzero(theirs == key)
        given[i], taken[j] = _summed(factors, here[i], there[j]), _summed(turned, there[j], here[i])
    return given, taken


def _factors(moves: Sequence[Move], limit: int) -> tuple[Factors, Factors]:
    """Return how many elements, and how many messages, processes of the two sides share in all moves together."""
    elements: Factors = []
    messages: Factors = []
    for (a, b), times in _different(moves):
        rows, cols = common_counts(a.rows, b.rows), common_counts(a.cols, b.cols)
        elements.append((rows.astype(np.float64), times * cols.astype(np.float64)))
        messages += [(down, times * across) for down, across in _message_factors(a, b, rows, cols, limit)]
    return _merged(elements), _merged(messages)


def _different(moves: Sequence[Move]) -> Iterator[tuple[Move, int]]:
    """Yield the different moves between the same cells, and how often each is made."""
    axes = Counter((src.rows, src.cols, dst.rows, dst.cols) for src, dst in moves)
    src, dst = moves[0]
    for (rows, cols, to_rows, to_cols), times in axes.items():
        yield (replace(src, rows=rows, cols=cols), replace(dst, rows=to_rows, cols=to_cols)), times


def _merged(factors: Factors) -> Factors:
    """Add up the factors whose matrices of rows are equal."""
    sums: dict[bytes, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
    for down, across in factors:
        key = down.tobytes()
        sums[key] = (down, sums[key][1] + across if key in sums else across)
    return list(sums.values())


def _message_factors(src: Side, dst: Side, rows: Numbers, cols: Numbers, limit: int) -> Factors:
    """Return the number of messages between processes as a sum of products of a matrix of rows and one of columns."""
    turned = dst.order == "F"  # messages are cut across columns
    lines, to_lines = (src.cols, dst.cols) if turned else (src.rows, dst.rows)
    if turned:
        rows, cols = cols, rows
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
            stretches = intersect(lines, int(p), to_lines, int(q))
            lengths = (width, *((s.repeat, s.length) for s in stretches))
            if lengths not in known:
                known[lengths] = len(Piece(stretches, across).split(limit, "C"))
            parts[p, q] = known[lengths]
        factors.append((parts, (cols == width).astype(np.float64)))
    if small.any():
        factors.append(((rows > 0).astype(np.float64), small.astype(np.float64)))
    return [(across, down) for down, across in factors] if turned else factors


def _summed(factors: Factors, of: Numbers, to: Numbers) -> Numbers:
    """Return for each process of ``of`` what it shares with all of ``to``. The numbers are below 2^53, so exact."""
    total = np.zeros(len(of))
    for down, across in factors:
        cells = np.zeros((down.shape[1], across.shape[1]))
        np.add.at(cells, (to[:, 0], to[:, 1]), 1)
        total += np.linalg.multi_dot((down, cells, across.T))[of[:, 0], of[:, 1]]
    return total.astype(np.int64)


def _each(factors: Factors, of: Numbers, to: Numbers) -> Numbers:
    """Return what each process of ``of`` shares with the one at the same place of ``to``."""
    total = np.zeros(len(of))
    for down, across in factors:
        total += down[of[:, 0], to[:, 0]] * across[of[:, 1], to[:, 1]]
    return total.astype(np.int64)


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


_OF_SLABS = ("shared", "gathered", "panels", "moved")
"""Algorithms in which a rank's part of a matrix counts only by its shape, and by what of it is in a triangle."""


def classes(problem: AnyProblem, ranks: Ranks, algorithm: str, calls: Collection[str]) -> Numbers:
    """Return for each rank the first one that computes as much and needs as much memory. Local.

    ``calls`` is what a rank does with others: messages go from each rank to certain others.
    """
    slabs = algorithm in _OF_SLABS or (isinstance(problem, MatmulProblem) and problem.scheme == "gemm")
    if "messages" in calls or not (slabs and isinstance(problem, (MatmulProblem, Level3Problem))):
        return np.arange(ranks.size)
    like = firsts = np.zeros(ranks.size, np.int64)
    for kind in _traits(problem, ranks, shares="fence" in calls):
        _, firsts, like = np.unique(like * (1 + kind.max()) + kind, return_index=True, return_inverse=True)
    return firsts[like]


def _traits(p: MatmulProblem | Level3Problem, ranks: Ranks, *, shares: bool) -> Iterator[Numbers]:
    """Yield, as numbers for each rank, all that decides what it does."""
    node_of = np.arange(ranks.size) // ranks.per_node
    yield np.array([len(node) for node in ranks.nodes])[node_of]
    for x in (getattr(p, name) for name in "abcd"):
        if x is None:
            continue
        extents = [np.array(axis.counts()) for axis in (x.rows, x.cols)]
        coords = Cells.of_grid(x.grid).coords
        for axis in (0, 1):
            yield _on_grid(extents[axis][coords[:, axis]], ranks)
        if shares:  # memory of a node depends on all its ranks
            yield _numbered([_extents(coords[n[0] : n[-1] + 1], extents) for n in ranks.nodes])[node_of]
    if isinstance(p, MatmulProblem):
        return
    if p.traits.solves:  # right-hand sides are dealt out
        yield np.array(Axis.even(p.d.shape[1 if p.side == "L" else 0], ranks.size).counts())
    elif p.traits.shape == "sided":  # the rows of a rank begin and end somewhere in A's triangle
        yield _on_grid(Cells.of_grid(p.d.grid).coords[:, 0 if p.side == "L" else 1], ranks)
    elif p.traits.shape == "added":  # a rank reads its own A, or another one's
        source = p.a.T if p.op_a != "N" else p.a
        both = min(source.grid.size, p.d.grid.size)
        mine, theirs = (Cells.of_grid(x.grid).coords[:both] for x in (source, p.d))
        yield _on_grid((mine == theirs).all(axis=1).astype(np.int64), ranks)
        if p.written is not None:
            yield _on_grid(_cuts(source), ranks)
    if p.written is not None:
        yield _on_grid(_cuts(p.d), ranks)


def _on_grid(numbers: Numbers, ranks: Ranks) -> Numbers:
    """Return numbers of the first ranks, which all others differ from."""
    return np.pad(1 + numbers, (0, ranks.size - len(numbers)))


def _cuts(x: MatrixDescriptor) -> Numbers:
    """Return a number for how the diagonal of a matrix cuts each rank's part: which rows each column has above it."""
    rows, cols = ([axis.globals(i) for i in range(axis.nprocs)] for axis in (x.rows, x.cols))
    return _numbered(
        np.stack([np.searchsorted(rows[p], cols[q], side) for side in ("left", "right")]).tobytes()
        for p, q in coordinates(x.grid)
    )


def _numbered(values: Iterable[Hashable]) -> Numbers:
    """Return a number for each value, the same for equal ones."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(each, len(known)) for each in values], np.int64)


def _extents(coords: Numbers, extents: Sequence[Numbers]) -> Hashable:
    """Return the extents of the different process rows, and columns, of some ranks, and of both together."""
    down, across = ({*coords[:, axis].tolist()} for axis in (0, 1))
    rows, cols = extents
    found = [sorted(rows[[*down]].tolist()), sorted(cols[[*across]].tolist())]
    if np.array_equal(rows, cols):  # a slab of rows may be one of columns
        found.append(sorted(rows[[*down | across]].tolist()))
    return tuple(map(tuple, found))
