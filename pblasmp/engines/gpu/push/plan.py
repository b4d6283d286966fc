# SPDX-License-Identifier: Apache-2.0
"""Who sends which part of the operands of a product to whom, with one order of k for both operands.

A rank multiplies a *slab* of A by a slab of B: their rows and columns of D, over the whole of k. The order of k does
not matter inside a product, as long as both slabs have the same one. k keeps its order if one operand is complete
on every rank and the other needs few copy commands. Otherwise k is ordered in
*sections*, each of the indices that one process column of A and one process row of B own. What a rank sends then
arrives as one range of k, however small the blocks are. If several processes own alternating blocks of a slab's rows,
the rows are in sections as well, one per owner, the rank's own first: each section is multiplied in place, as a batch
of blocks. Slabs arrive in chunks of their rows, each multiplied when it is there. Everything here is arithmetic on
layouts, the same on every rank. Both operands are treated as outer × k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np

from ....comm import Side
from ....dtypes import is_float8
from ....layout import MatmulProblem
from ....layout.axis import Axis
from ....layout.intersection import (
    Stretch,
    Stretches,
    back,
    extent,
    intersect,
    one_range,
    packed,
    regular,
    unpacked,
)
from ...local.panels import needs
from ..runtime.windows import PUSHED

_OWNERS = 4  # reorder rows by owner only if at most so many ranks own them
_FEW = 16  # pack a message that would take more copies than this
_LINE = 64  # entries of k; copy engines are slower with shorter lines
_ALIGNED = 16  # bytes
_APART = 128  # bytes; the leading dimension of a slab is a multiple of it
_TILE = (128, 256)  # of D, which a multiprocessor computes at a time
_SIDE = 2048  # of a square of D that occupies all multiprocessors of an H200 once
_SHARES: tuple[tuple[float, tuple[int, ...]], ...] = (
    (12, (1, 1, 2, 4, 8)), (6, (1, 1, 2, 4)), (3, (1, 1, 2)), (1.5, (1, 1)), (0, (1,)),
)  # fmt: skip
"""Relative sizes of an operand's chunks, by its least length in units of the first chunk."""


def clip(stretches: Stretches, start: int, stop: int) -> Stretches:
    """Return the part of the stretches from ``start`` to before ``stop``. Local."""
    found: list[Stretch] = []
    for s in stretches:
        first = 0  # first run that has not been returned yet
        while first < s.repeat:
            src, dst = s.src + first * s.src_step, s.dst + first * s.dst_step
            skipped, length = max(0, start - src), min(src + s.length, stop) - src
            count = 1
            if skipped == 0 and length == s.length:  # and all whole runs that follow
                count = min(s.repeat - first, (stop - src - length) // max(1, s.src_step) + 1)
            if skipped < length:
                steps = (s.src_step, s.dst_step) if count > 1 else (0, 0)
                found.append(
                    Stretch(count, length - skipped, src + skipped, steps[0], dst + skipped, steps[1])
                )
            first += count
    return tuple(found)


def runs(stretches: Stretches) -> list[tuple[int, int, int]]:
    """Return (source, destination, length) of every run; runs adjacent on both sides are merged. Local."""
    found: list[tuple[int, int, int]] = []
    for s in stretches:
        for i in range(s.repeat):
            src, dst = s.src + i * s.src_step, s.dst + i * s.dst_step
            if found and found[-1][0] + found[-1][2] == src and found[-1][1] + found[-1][2] == dst:
                found[-1] = (*found[-1][:2], found[-1][2] + s.length)
            else:
                found.append((src, dst, s.length))
    return found


def common_order(a: Axis, b: Axis) -> tuple[tuple[Stretches, ...], tuple[Stretches, ...]]:
    """Return where the local indices of every owner of k are in the slabs: of A, and of B. Local.

    k keeps its order if one operand has all of it on every process and the other one comes in few runs, or in equal
    blocks: then the former can be multiplied where it is. Otherwise k is in sections.
    """
    whole = (Stretch(1, a.extent, 0, 0, 0, 0),)
    for natural, other, a_first in ((a, b, True), (b, a, False)):
        if natural.nprocs > 1:
            continue
        dealt = tuple(intersect(other, process, natural, 0) for process in range(other.nprocs))
        even = other.extent % (other.block * other.nprocs) == 0
        if other.nprocs == 1 or all((_copies(x) if even else len(runs(x))) <= _FEW for x in dealt):
            return ((whole,), dealt) if a_first else (dealt, (whole,))
    of_a: list[list[Stretch]] = [[] for _ in range(a.nprocs)]
    of_b: list[list[Stretch]] = [[] for _ in range(b.nprocs)]
    at = 0
    for pa in range(a.nprocs):
        for pb in range(b.nprocs):
            for s in intersect(a, pa, b, pb):
                of_a[pa].append(Stretch(s.repeat, s.length, s.src, s.src_step, at, s.length))
                of_b[pb].append(Stretch(s.repeat, s.length, s.dst, s.dst_step, at, s.length))
                at += s.repeat * s.length
    return tuple(map(tuple, of_a)), tuple(map(tuple, of_b))


def _copies(stretches: Stretches) -> int:
    """Return how many commands copy these runs of every row: a single one copies equal blocks that are end to end."""
    s = stretches[0]
    return 1 if len(stretches) == 1 and s.src_step == s.length >= _LINE else len(runs(stretches))


def cuts(start: int, shares: Sequence[int], unit: int, stop: int) -> list[tuple[int, int]]:
    """Cut a range into chunks with these relative sizes, all but the last of them multiples of ``unit``. Local."""
    total, before, at = sum(shares), 0, start
    found = []
    for share in shares:
        before += share
        end = start + (stop - start) * before // total
        end = stop if before == total else min(stop, -(-end // unit) * unit)
        if end > at:
            found.append((at, end))
            at = end
    return found


@dataclass(frozen=True)
class Part:
    """The part of one rank's slab that another rank has.

    Attributes:
        source: the rank that has it.
        outer: its indices of the dimension shared with D, in the source's local array and in the slab.
        inner: its indices of k, in the same two places.
    """

    source: int
    outer: Stretches
    inner: Stretches

    @property
    def shape(self) -> tuple[int, int]:
        """Indices of the outer dimension, and of k."""
        return extent(self.outer), extent(self.inner)

    def within(self, start: int, stop: int) -> Part | None:
        """Return the part of it that is in these rows of the slab, None if there is none. Local."""
        outer = back(clip(back(self.outer), start, stop))
        return Part(self.source, outer, self.inner) if outer else None

    @cached_property
    def direct(self) -> bool:
        """Whether it is copied straight to its place in the slab; otherwise the receiver unpacks it."""
        few = self._straight or _copies(unpacked(self.inner)) <= _FEW
        return bool(few and one_range(self.outer, source=False))

    @cached_property
    def packed(self) -> bool:
        """Whether its source packs it first, because it would otherwise take many copies of short runs."""
        if self.direct:
            return not self._straight
        return not one_range(self.outer, source=True) or _copies(packed(self.inner)) > _FEW

    @property
    def _straight(self) -> bool:
        in_order = all(one_range(self.outer, source=source) for source in (True, False))
        return in_order and _copies(self.inner) <= _FEW

    @cached_property
    def copies(self) -> Stretches:
        """Runs of k: where they are read, in the source's memory or in what it packed, and where they are written."""
        inner = unpacked(self.inner) if self.packed else self.inner
        src, dst, length = np.array(runs(inner if self.direct else packed(inner))).T
        return tuple(regular(length, src, dst))

    def has_few_copies(self, ld: int) -> bool:
        """Return whether few commands copy it from rows ``ld`` entries apart. Local.

        One command can copy equal blocks of several rows only if ``ld`` is a multiple of their distance.
        """
        return all(s.repeat <= _FEW or ld % s.src_step == 0 for s in self.copies)


@dataclass(frozen=True)
class Slab:
    """The slabs of one operand that the ranks multiply.

    Attributes:
        side: the operand as it is distributed.
        itemsize: bytes of an element.
        needs: for every rank, the process of ``outer`` whose slab it multiplies, or None.
        outer: the dimension shared with D, distributed as in D.
        inner: for every process of the operand's k, where its local indices are in the slab.
        batches: whether its rows may be in sections of their owners.
    """

    side: Side
    itemsize: int
    needs: tuple[int | None, ...]
    outer: Axis
    inner: tuple[Stretches, ...]
    batches: bool = False

    @cached_property
    def _owners(self) -> list[dict[int, tuple[Stretches, Stretches]]]:
        return [self._sectioned(rank) for rank in range(len(self.needs))]

    def _sectioned(self, rank: int) -> dict[int, tuple[Stretches, Stretches]]:
        """Return the sections of the rows of ``rank``'s slab by owner, its own first; empty if the rows are in order.

        They also stay in order if blocks would be too short, too irregular or not aligned for a batch.

        Returns:
            For every process that owns rows: where they are in its local array and in the slab, and where they are in
            the slab and in ``rank``'s local part of D.
        """
        process = self.needs[rank]
        if process is None or not self.batches:
            return {}
        own = next((cell.coords[0] for cell in self.side.cells if cell.ranks[0] == rank), 0)
        count = self.side.rows.nprocs
        order = [(own + step) % count for step in range(count)]
        owned = {row: intersect(self.side.rows, row, self.outer, process) for row in order}
        owned = {row: stretches for row, stretches in owned.items() if stretches}
        if not 1 < len(owned) <= _OWNERS or all(one_range(x, source=False) for x in owned.values()):
            return {}
        if any(len(x) > 3 or any(s.repeat > 1 and s.length < _TILE[0] for s in x) for x in owned.values()):
            return {}
        at, found, unit = 0, {}, max(1, _ALIGNED // self.itemsize)
        for row, stretches in owned.items():
            of, to = [], []
            for s in stretches:
                if (at | s.src | s.dst | s.src_step | s.dst_step) % unit:
                    return {}  # cuBLASLt has no fast kernels for such blocks
                of.append(Stretch(s.repeat, s.length, s.src, s.src_step, at, s.length))
                to.append(Stretch(s.repeat, s.length, at, s.length, s.dst, s.dst_step))
                at += s.repeat * s.length
            found[row] = tuple(of), tuple(to)
        return found

    @property
    def in_sections(self) -> bool:
        """Whether some rank's slab is in sections of the owners of its rows."""
        return any(self._owners)

    def sections(self, rank: int) -> list[Stretches]:
        """Return where the rows of ``rank``'s slab are in its local part of D, by owner, or for all rows. Local."""
        count = self.shape(rank)[self.side.order != "C"]
        whole: list[Stretches] = [(Stretch(1, count, 0, 0, 0, 0),)] if count else []
        return [places for _, places in self._owners[rank].values()] or whole

    def parts(self, rank: int) -> list[Part]:
        """Return the parts of ``rank``'s slab, in the order of their sources. Local."""
        found = (self.part(i, rank) for i in range(len(self.side.cells)))
        return [part for part in found if part is not None]

    def part(self, cell: int, rank: int) -> Part | None:
        """Return the part of ``rank``'s slab that the owner of a cell has, None if it has none. Local."""
        process = self.needs[rank]
        if process is None:
            return None
        row, col = self.side.cells[cell].coords
        outer, inner = self._outer(row, rank, process), self.inner[col]
        return Part(self.side.cells[cell].ranks[0], outer, inner) if outer and inner else None

    def _outer(self, row: int, rank: int, process: int) -> Stretches:
        """Return where the rows of a process are in ``rank``'s slab."""
        owners = self._owners[rank]
        if not owners:
            return intersect(self.side.rows, row, self.outer, process)
        return owners[row][0] if row in owners else ()

    def read_in_place(self, rank: int) -> int | None:
        """Return the row of ``rank``'s local array where its section begins, if it can be multiplied there. Local."""
        own = [part for part in self.parts(rank) if part.source == rank]
        if not self._owners[rank] or len(own) != 1 or not one_range(own[0].outer, source=True):
            return None
        return own[0].outer[0].src if runs(own[0].inner) == [(0, 0, self.side.cols.extent)] else None

    def in_place(self, rank: int) -> bool:
        """Return whether ``rank``'s own local array is its slab. Local."""
        parts = self.parts(rank)
        if len(parts) != 1 or parts[0].source != rank:
            return False
        return all(runs(s) == [(0, 0, extent(s))] for s in (parts[0].outer, parts[0].inner))

    def shape(self, rank: int) -> tuple[int, int]:
        """Return rows and columns of ``rank``'s slab in row-major memory. Local."""
        process = self.needs[rank]
        outer = 0 if process is None else self.outer.count(process)
        k = self.side.cols.extent
        return (outer, k) if self.side.order == "C" else (k, outer)

    def ld(self, rank: int) -> int:
        """Return the entries from one row of ``rank``'s slab to the next. Local."""
        unit = _APART // self.itemsize
        return -(-self.shape(rank)[1] // unit) * unit

    def nbytes(self, rank: int) -> int:
        """Return the bytes that ``rank``'s slab takes. Local."""
        return 0 if self.in_place(rank) else self.shape(rank)[0] * self.ld(rank) * self.itemsize


class PushPlan:
    """Everything that ranks send each other for a product. Making one is local.

    Args:
        p: the product, of scheme "gemm".

    Attributes:
        slabs: of A and of B.
        nbytes: size of the receiving buffer, the same on every rank.
    """

    def __init__(self, p: MatmulProblem, size: int) -> None:
        a, b = Side.of(p.a), Side.of(p.b)
        a, b = a if p.op_a == "N" else a.T, b.T if p.op_b == "N" else b
        of_a, of_b = common_order(a.cols, b.cols)
        shapes = [p.d.local_shape(rank) if rank < p.d.grid.size else (0, 0) for rank in range(size)]
        slabs: list[Slab] = []
        for axis, (side, dtype, inner) in enumerate(((a, p.a.dtype, of_a), (b, p.b.dtype, of_b))):
            needed = tuple(need[0] if need else None for need in needs(p.d, size, axis))
            # in a batch, the blocks of only one operand differ
            batches = not is_float8(dtype) and not any(slab.in_sections for slab in slabs)
            slabs.append(
                Slab(side, dtype.itemsize, needed, (p.d.rows, p.d.cols)[axis], inner, batches=batches)
            )
        self.slabs = tuple(slabs)
        self.size = size
        self.shapes = shapes
        # senders and receivers ask for the same
        for method in (self.places, self.received, self.chunks, self.sequence):
            setattr(self, method.__name__, cache(method))
        self.nbytes = max(self.places(rank)[2] for rank in range(size))

    def places(self, rank: int) -> tuple[tuple[int, int], dict[tuple[int, int, int], int], int]:
        """Return how ``rank``'s buffer is laid out, in bytes. Local.

        Returns:
            Where its slabs of A and of B begin; by operand, chunk and source, where messages arrive that it unpacks;
            where the buffer ends.
        """
        starts, at, inboxes = [], 0, {}
        for slab in self.slabs:
            starts.append(at)
            at += _aligned(slab.nbytes(rank))
        for which, slab in enumerate(self.slabs):
            for chunk, parts in enumerate(self.received(which, rank)):
                for part in parts:
                    if not part.direct:
                        rows, cols = part.shape
                        inboxes[which, chunk, part.source] = at
                        at += _aligned(rows * cols * slab.itemsize)
        return (starts[0], starts[1]), inboxes, at

    def received(self, which: int, rank: int) -> list[list[Part]]:
        """Return what of each chunk of ``rank``'s slab other ranks push, in the order of their ranks. Local."""
        parts = [part for part in self.slabs[which].parts(rank) if part.source != rank]
        return [
            [some for part in parts if (some := part.within(*chunk)) is not None]
            for chunk in self.chunks(which, rank)
        ]

    def moves(self, which: int, rank: int) -> bool:
        """Return whether a part of ``rank``'s slab comes from other ranks. Local."""
        return any(part.source != rank for part in self.slabs[which].parts(rank))

    def chunks(self, which: int, rank: int) -> list[tuple[int, int]]:
        """Return the ranges of the outer dimension in which ``rank`` receives and multiplies its slab. Local.

        The first ones are small, so that it begins soon, but large enough to keep all multiprocessors busy.
        """
        m, n = self.shapes[rank]
        stop, other = ((m, n), (n, m))[which] if m * n else (0, 0)
        if not self.moves(which, rank):
            return [(0, stop)] if stop else []
        first = _SIDE if self.moves(1 - which, rank) else max(1, _SIDE**2 // other)
        slab, found, cut = self.slabs[which], [], False  # only the first section that is received is cut
        awaited = [part.outer[0].dst for part in slab.parts(rank) if part.source != rank]
        for section in slab.sections(rank):
            start, length = section[0].src, extent(section)
            shares: tuple[int, ...] = (1,)
            if any(start <= at < start + length for at in awaited) and not cut:
                shares, cut = next(shares for least, shares in _SHARES if length / first >= least), True
            unit = section[0].length if section[0].repeat > 1 else _TILE[0]
            found += [(start + i, start + j) for i, j in cuts(0, shares, unit, length)]
        if len(found) > PUSHED[which].count:
            raise IndexError(
                f"push: {len(found)} chunks of {'AB'[which]}, there are {PUSHED[which].count} flags"
            )
        return found

    def tiles(self, which: int, rank: int, start: int, stop: int) -> Stretches:
        """Return where these rows of ``rank``'s slab are in its local part of D. Local."""
        return tuple(x for section in self.slabs[which].sections(rank) for x in clip(section, start, stop))

    def sequence(self, rank: int) -> list[tuple[int, int]]:
        """Return the chunks of ``rank``'s slabs in the order in which it receives and multiplies them. Local.

        Its own chunks come first. After the first chunk of each operand, the next is always the one that allows the
        most multiplication per byte received: its rows by all columns so far, or its columns by all rows so far.

        Returns:
            (0 for A or 1 for B, number of the chunk) of each.
        """
        chunks = [self.chunks(which, rank) for which in (0, 1)]
        if not all(chunks):
            return []
        # bytes of a row of A, and of a column of B
        awaited = [self._awaited(which, rank) / chunks[which][-1][1] for which in (0, 1)]
        found = sorted(((0, 0), (1, 0)), key=lambda step: awaited[step[0]])
        following, there = [1, 1], [chunks[which][0][1] for which in (0, 1)]
        while left := [which for which in (0, 1) if following[which] < len(chunks[which])]:
            which = max(left, key=lambda which: there[1 - which] / max(awaited[which], 1))
            found.append((which, following[which]))
            there[which] = chunks[which][following[which]][1]
            following[which] += 1
        return found

    def _awaited(self, which: int, rank: int) -> int:
        """Return the bytes of ``rank``'s slab that come from other ranks. Local."""
        slab = self.slabs[which]
        shapes = [part.shape for part in slab.parts(rank) if part.source != rank]
        return sum(rows * cols for rows, cols in shapes) * slab.itemsize


push_plan = lru_cache(64)(PushPlan)
"""Returns the plan of a product of scheme "gemm"; the last few are cached. Local."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256
