# SPDX-License-Identifier: Apache-2.0
"""What two layouts of one matrix have in common, as few regular pieces, and copying those pieces.

The pattern of two block-cyclic axes repeats with the least common multiple of their rounds. So a process of one and a
process of the other share a handful of *stretches*: equally long runs at equal distances. One NumPy copy
moves a stretch of rows × a stretch of columns, however many blocks it spans. 0-based.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ..dtypes import is_float8
from .axis import Axis
from .caches import sized_cache

# A transposing copy goes tile by tile. Tiles are short along the direction of writing, so that the caches can hold all
# the rows that are read at a time, even if rows are a power of two apart.
_SHORT, _LONG = 32, 512


class Stretch(NamedTuple):
    """``repeat`` runs of ``length``: run i is at ``src + i * src_step`` and at ``dst + i * dst_step``."""

    repeat: int
    length: int
    src: int
    src_step: int
    dst: int
    dst_step: int

    @property
    def back(self) -> Stretch:
        """The same from the destination to the source."""
        return Stretch(self.repeat, self.length, self.dst, self.dst_step, self.src, self.src_step)


Stretches = tuple[Stretch, ...]
Array = NDArray[Any]


@sized_cache(lambda found: 300 * len(found))  # stretches of six numbers each, about
def intersect(src: Axis, p: int, dst: Axis, q: int) -> Stretches:
    """Return the indices that both ``p`` of ``src`` and ``q`` of ``dst`` own, as local positions.

    Both axes have the same extent: they are two distributions of the same indices. Recent results are cached.
    """
    if src.same_places(dst):
        owned = src.count(p) if p == q else 0
        return (Stretch(1, owned, 0, 0, 0, 0),) if owned else ()
    src_starts, src_stops = src.blocks(p)
    dst_starts, dst_stops = dst.blocks(q)
    first = dst_stops.searchsorted(src_starts, side="right")
    overlaps = np.maximum(dst_starts.searchsorted(src_stops, side="left") - first, 0)
    of_src = np.arange(len(src_starts)).repeat(overlaps)
    if len(of_src) == 0:
        return ()
    of_dst = (first - _before(overlaps)).repeat(overlaps) + np.arange(len(of_src))

    start = np.maximum(src_starts[of_src], dst_starts[of_dst])
    stop = np.minimum(src_stops[of_src], dst_stops[of_dst])
    length = stop - start
    src_at = start + (_before(src_stops - src_starts) - src_starts)[of_src]
    dst_at = start + (_before(dst_stops - dst_starts) - dst_starts)[of_dst]

    # Merge runs that continue without a gap on both sides.
    gaps = (src_at[:-1] + length[:-1] != src_at[1:]) | (dst_at[:-1] + length[:-1] != dst_at[1:])
    if not gaps.all():
        tails = np.append(gaps.nonzero()[0], len(gaps))
        heads = np.append(0, tails[:-1] + 1)
        length = np.add.reduceat(length, heads)
        stop, src_at, dst_at = stop[tails], src_at[heads], dst_at[heads]
    if len(length) == 1:
        return (Stretch(1, int(length[0]), int(src_at[0]), 0, int(dst_at[0]), 0),)

    # The runs of one period, identified by where they stop: the first may start in the middle.
    rounds = [axis.block * axis.nprocs for axis in (src, dst) if axis.nprocs > 1]
    period = int(stop.searchsorted(min(int(stop[0]) + math.lcm(*rounds), src.extent + 1)))
    found: list[Stretch] = []
    for phase in range(period):
        found += regular(length[phase::period], src_at[phase::period], dst_at[phase::period])
    return tuple(found)


@sized_cache(lambda found: found.nbytes)
def common_counts(src: Axis, dst: Axis) -> NDArray[np.int64]:
    """Return how many indices each process of ``src`` (rows) and each process of ``dst`` (columns) both own.

    One period of the pattern is walked, in the larger blocks of the two axes. Recent results are cached, and read-only.
    """
    turned = src.nprocs > 1 and (dst.nprocs == 1 or src.block > dst.block)
    coarse, fine = (src, dst) if turned else (dst, src)
    period = math.lcm(*(axis.block * axis.nprocs for axis in (src, dst) if axis.nprocs > 1))
    periods, rest = divmod(src.extent, period)
    counts: NDArray[np.int64] = _counts_to(fine, coarse, rest)
    if periods:
        counts += periods * _counts_to(fine, coarse, period)
    found = counts.T if turned else counts
    found.flags.writeable = False
    return found


def _counts_to(fine: Axis, coarse: Axis, stop: int) -> NDArray[np.int64]:
    """Return how many of the indices below ``stop`` each process of ``fine`` and each process of ``coarse`` own."""
    first = coarse.block - coarse.lead
    inside = range(first, stop, coarse.block) if coarse.nprocs > 1 else range(0)
    bounds = np.array([0, *inside, stop], np.int64)
    block = min(fine.block, fine.lead + stop + 1)  # gives the same counts without overflow
    blocks, within = np.divmod(fine.lead + bounds[:, None], block)
    rounds, extra = np.divmod(blocks, fine.nprocs)
    turns = (np.arange(fine.nprocs) - fine.source) % fine.nprocs
    below = rounds * block + np.where(turns < extra, block, np.where(turns == extra, within, 0))
    owners = (coarse.source + np.arange(len(bounds) - 1)) % coarse.nprocs
    counts = np.zeros((coarse.nprocs, fine.nprocs), np.int64)
    np.add.at(counts, owners, np.diff(below, axis=0))
    found: NDArray[np.int64] = counts.T
    return found


def _before(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    ends: NDArray[np.int64] = lengths.cumsum()
    return ends - lengths


def regular(length: NDArray[np.int64], src: NDArray[np.int64], dst: NDArray[np.int64]) -> list[Stretch]:
    """Return runs as stretches: those of equal length at equal distances are one. Local."""
    found, i, n = [], 0, len(length)
    same = (length[1:] == length[:-1]).tolist()
    src_steps, dst_steps = (src[1:] - src[:-1]).tolist(), (dst[1:] - dst[:-1]).tolist()
    while i < n:
        j = i
        while j < n - 1 and same[j] and src_steps[j] == src_steps[i] and dst_steps[j] == dst_steps[i]:
            j += 1
        steps = (src_steps[i], dst_steps[i]) if j > i else (0, 0)
        found.append(Stretch(j - i + 1, int(length[i]), int(src[i]), steps[0], int(dst[i]), steps[1]))
        i = j + 1
    return found


def packed(stretches: Stretches) -> Stretches:
    """Return ``stretches`` with the destination laid end to end: the order of a message."""
    out, at = [], 0
    for s in stretches:
        out.append(s._replace(dst=at, dst_step=s.length))
        at += s.repeat * s.length
    return tuple(out)


def unpacked(stretches: Stretches) -> Stretches:
    """Return ``stretches`` with the source laid end to end: from a message to its destination."""
    out, at = [], 0
    for s in stretches:
        out.append(s._replace(src=at, src_step=s.length))
        at += s.repeat * s.length
    return tuple(out)


def back(stretches: Stretches) -> Stretches:
    """Return ``stretches`` from the destination to the source."""
    return tuple(s.back for s in stretches)


def extent(stretches: Stretches) -> int:
    """Return the number of indices in ``stretches``."""
    total = 0
    for s in stretches:  # twice as fast as a sum over a generator
        total += s.repeat * s.length
    return total


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements that a rank's part of one layout shares with a rank's part of another: rows × columns."""

    rows: Stretches
    cols: Stretches

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the piece."""
        return extent(self.rows), extent(self.cols)

    @property
    def size(self) -> int:
        """Number of elements."""
        rows, cols = self.shape
        return rows * cols

    @property
    def T(self) -> Piece:  # noqa: N802
        """The same elements of the transposed matrix."""
        return Piece(self.cols, self.rows)

    @property
    def back(self) -> Piece:
        """The copy from the destination to the source."""
        return Piece(back(self.rows), back(self.cols))

    def packed(self) -> Piece:
        """Return the copy from the source into a message of ``shape``."""
        return Piece(packed(self.rows), packed(self.cols))

    def unpacked(self) -> Piece:
        """Return the copy from a message of ``shape`` to the destination."""
        return Piece(unpacked(self.rows), unpacked(self.cols))

    def split(self, limit: int, order: str) -> list[Piece]:
        """Cut across ``order``'s contiguous dimension into pieces of about ``limit`` elements at most."""
        rows, cols = self.shape
        if rows * cols <= limit:
            return [self]
        if order == "C":
            return [Piece(part, self.cols) for part in _split(self.rows, max(1, limit // cols))]
        return [Piece(self.rows, part) for part in _split(self.cols, max(1, limit // rows))]

    def region(self, array: Array, order: str, *, source: bool) -> Array | None:
        """Return the part of ``array`` that is this piece, laid out as in a message; None if it is not contiguous."""
        rows, cols = one_range(self.rows, source=source), one_range(self.cols, source=source)
        if rows is None or cols is None:
            return None
        view = array[rows, cols]
        return view if (view.flags.c_contiguous if order == "C" else view.flags.f_contiguous) else None


def _split(stretches: Stretches, limit: int) -> list[Stretches]:
    """Cut stretches into lists of at most ``limit`` indices; a run is cut only if it is longer."""
    parts: list[list[Stretch]] = [[]]
    room = limit
    for s in stretches:
        i = within = 0
        while i < s.repeat:
            whole = 0 if within else min(room // s.length, s.repeat - i)
            src, dst = s.src + i * s.src_step + within, s.dst + i * s.dst_step + within
            if whole:
                parts[-1].append(s._replace(repeat=whole, src=src, dst=dst))
                i, room = i + whole, room - whole * s.length
            elif s.length > limit and room:
                length = min(room, s.length - within)
                parts[-1].append(Stretch(1, length, src, 0, dst, 0))
                i, within = divmod(i * s.length + within + length, s.length)
                room -= length
            else:
                parts.append([])
                room = limit
    return [tuple(part) for part in parts if part]


def one_range(stretches: Stretches, *, source: bool) -> slice | None:
    """Return the one range that ``stretches`` cover in order where they are read, or written; None: there is none."""
    start = at = stretches[0].src if source else stretches[0].dst
    for s in stretches:
        first, step = (s.src, s.src_step) if source else (s.dst, s.dst_step)
        if first != at or (s.repeat > 1 and step != s.length):
            return None
        at += s.repeat * s.length
    return slice(start, at)


def copy(
    dst: Array, src: Array, piece: Piece, *, conjugate: bool = False, where: Array | None = None
) -> None:
    """Copy ``piece`` of one rank's local array to its place in another's, converting the type. Local.

    Args:
        dst: 2D array to write to; what is outside the piece keeps its values.
        src: 2D array to read from.
        piece: where to read and where to write.
        conjugate: write the complex conjugates; no effect on real types.
        where: which elements, in the shape of a message; None: all.
    """
    conjugate = conjugate and src.dtype.kind == "c"
    masks = None if where is None else both_views(where, where, piece.unpacked().packed())
    for to, of in both_views(dst, src, piece):
        _copy(to, of, conjugate, None if masks is None else next(masks)[0])


def both_views(dst: Any, src: Any, piece: Piece) -> Iterator[tuple[Any, Any]]:
    """Yield views in 4 dimensions of what a piece has in two arrays, NumPy's or CuPy's, of one shape. Local."""
    for rows in piece.rows:
        for cols in piece.cols:
            shape = (rows.repeat, rows.length, cols.repeat, cols.length)
            to = _view(dst, shape, (rows.dst, rows.dst_step), (cols.dst, cols.dst_step))
            of = _view(src, shape, (rows.src, rows.src_step), (cols.src, cols.src_step))
            yield to, of


def copy_all(dst: Array, src: Array, *, conjugate: bool = False) -> None:
    """Copy a 2D array to another one of its shape and type, which may have the other memory order. Local."""
    _copy(dst[None, :, None, :], src[None, :, None, :], conjugate and src.dtype.kind == "c")


def _copy(to: Array, of: Array, conjugate: bool, where: Array | None = None) -> None:
    for tile in _tiles(to, of):
        mask: Any = True if where is None else where[tile]
        if conjugate:
            np.conjugate(of[tile], out=to[tile], where=mask)
        else:
            np.copyto(to[tile], of[tile], casting="unsafe", where=mask)


def _view(array: Any, shape: tuple[int, ...], row: tuple[int, int], col: tuple[int, int]) -> Any:
    """Return runs of rows × runs of columns in 4 dimensions; ``row`` and ``col`` are (start, step)."""
    repeat, length, columns, width = shape
    if repeat == columns == 1:  # as_strided takes several times as long
        return array[None, row[0] : row[0] + length, None, col[0] : col[0] + width]
    down, across = array.strides
    raw = array.view(np.uint8) if is_float8(array.dtype) else array  # as_strided does not take all types
    strides = (down * row[1], down, across * col[1], across)
    return strided(raw[row[0] :, col[0] :], shape, strides).view(array.dtype)


def strided(array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Return a view of an array's memory from its first element on, in another shape. Local."""
    if isinstance(array, np.ndarray):
        return as_strided(array, shape, strides, subok=True)
    return type(array)(shape, array.dtype, array.data, strides)  # CuPy's


def _tiles(to: Array, of: Array) -> Sequence[tuple[slice, ...]]:
    """Return the index of each part to copy on its own: everything at once unless one side is transposed."""
    if not to.size:
        return []
    down = to.strides[1] < to.strides[3]
    on_paper = type(to) is not np.ndarray  # where nothing is copied
    if on_paper or down == (of.strides[1] < of.strides[3]):
        return [()]
    count, length, columns, width = to.shape
    rows = _cuts(count, length, _SHORT if down else _LONG)
    return [(*row, *col) for row in rows for col in _cuts(columns, width, _LONG if down else _SHORT)]


def _cuts(count: int, length: int, tile: int) -> list[tuple[slice, slice]]:
    """Cut ``count`` runs of ``length`` into parts of about ``tile``: within the runs, or several runs."""
    if length >= tile:
        parts = range(0, length, tile)
        return [(slice(i, i + 1), slice(at, at + tile)) for i in range(count) for at in parts]
    several = -(-tile // length)
    return [(slice(i, i + several), slice(None)) for i in range(0, count, several)]
