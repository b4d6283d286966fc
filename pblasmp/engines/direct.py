# SPDX-License-Identifier: Apache-2.0
"""What direct calls know of their operands: plain integers, so that a call on a new sub-matrix costs little.

A *direct call* is computed at once, without a problem, a choice of algorithms and a plan. In a block-cyclic layout
everything that it needs to know about a sub-matrix is a few integers.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..dtypes import element_type
from ..layout import MatrixDescriptor
from ..layout.axis import Axis
from ..layout.axis import axis as cached_axis
from ..layout.caches import sized_cache
from ..layout.intersection import Stretch, intersect

__all__ = [
    "FAMILIES",
    "Asked",
    "Axes",
    "Direct",
    "Held",
    "Part",
    "Pattern",
    "Span",
    "alias",
    "aligned_spans",
    "pattern_of",
    "spread",
    "whole_span",
]

_LARGEST = 2**31 - 1  # BLAS's integers


class Axes(NamedTuple):
    """One dimension of a layout, and this rank's place in it.

    Attributes:
        block, nprocs, source, lead: as those of ``Axis``.
        mine: this rank's process; -1 outside the grid.
    """

    block: int
    nprocs: int
    source: int
    lead: int
    mine: int


class Pattern(NamedTuple):
    """What is known of a layout on this rank.

    Attributes:
        rows, cols: its dimensions.
        grid: rows, columns and, if it matters, the order of its process grid.
        size: how many ranks have a part.
        by_columns: whether local arrays are in Fortran order.
        letter: of BLAS's routines for its type.
        dtype, itemsize, is_complex: that type.
        digest: equal on two ranks if the layouts are.
    """

    rows: Axes
    cols: Axes
    grid: tuple[int, int, str]
    size: int
    by_columns: bool
    letter: str
    dtype: np.dtype
    itemsize: int
    is_complex: bool
    digest: bytes


class Held:
    """A matrix that is no view, as this rank holds it. It does not keep the matrix's memory. Local.

    Attributes:
        pattern: its layout.
        array: on the host, an array over the memory of this rank's local array; None on a GPU.
        address: of its first element.
        ld: elements from one column to the next, or from one row to the next in C order.
        end: the address after its last element.
    """

    __slots__ = ("_memory", "address", "array", "end", "ld", "pattern")

    def __init__(self, pattern: Pattern, array: Any, address: int, ld: int, nbytes: int) -> None:
        self.pattern, self.address, self.ld, self.end = pattern, address, ld, address + nbytes
        self.array: Any = alias(array.__array_interface__) if type(array) is np.ndarray else None
        self._memory: Any = None

    @classmethod
    def of(cls, pattern: Pattern, array: Any) -> Held | None:
        """Return a matrix over a local array; None if direct calls do not take it. Local."""
        if type(array) is np.ndarray:
            address = array.__array_interface__["data"][0]
        else:  # CuPy's
            address = getattr(array.data, "ptr", None)
        if address is None or array.dtype != pattern.dtype or array.ndim != 2:
            return None
        rows, cols = array.shape
        down, across = array.strides
        if not pattern.by_columns:
            rows, cols, down, across = cols, rows, across, down
        item = array.itemsize
        ld = across // item if cols > 1 and rows else max(1, rows)
        contiguous = down == item or rows <= 1 or not cols
        if not contiguous or ld < rows or ld > _LARGEST or (cols > 1 and rows and ld * item != across):
            return None
        return cls(pattern, array, int(address), ld, item * (ld * (cols - 1) + rows) * (cols > 0))

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The bytes from the first element to the last, on the host."""
        found = self._memory
        if found is None:
            nbytes = self.end - self.address
            found = self._memory = alias(
                {"data": (self.address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
            )
        return found  # type: ignore[no-any-return]


class _Interface:
    """What NumPy makes an array of."""

    __slots__ = ("__array_interface__",)

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def alias(interface: dict[str, Any]) -> NDArray[Any]:
    """Return an array over memory that it does not keep."""
    return np.asarray(_Interface(interface))


Part = tuple[Held, int, int, int, int, bool]
"""A sub-matrix: its matrix, first row and column, how many rows and columns; whether these are exchanged."""


@lru_cache(1024)
def pattern_of(descriptor: MatrixDescriptor, rank: int) -> Pattern | None:
    """Return what is known of a layout on this rank; None if BLAS lacks the type or an integer is too large. Local."""
    d = descriptor
    letter = element_type(d.dtype).blas
    if not letter or max(*d.shape, *d.block) > _LARGEST:
        return None
    coords = d.grid.coords(rank) if rank < d.grid.size else (-1, -1)
    rows, cols = (
        Axes(x.block, x.nprocs, x.source, x.lead, p) for x, p in zip((d.rows, d.cols), coords, strict=True)
    )
    grid = (*d.grid.shape, "" if 1 in d.grid.shape else d.grid.order)
    digest = hashlib.blake2b(repr(d).encode(), digest_size=8).digest()
    is_complex = d.dtype.kind == "c"
    return Pattern(
        rows, cols, grid, d.grid.size, d.order == "F", letter, d.dtype, d.dtype.itemsize, is_complex, digest
    )


class Span(NamedTuple):
    """The indices of one dimension of a sub-matrix, as they are dealt out: an ``Axis`` in its simplest form.

    Spans are equal if, and only if, each index is on the same process at the same place among its own.
    """

    extent: int
    block: int
    source: int
    nprocs: int
    lead: int

    @classmethod
    def of(cls, axes: Axes, start: int, extent: int) -> Span:
        """Return the span of ``extent`` indices from ``start`` on. Local."""
        block, nprocs, source, lead, _ = axes
        if nprocs == 1:
            return whole_span(extent)
        blocks, lead = divmod(lead + start, block)
        source = (source + blocks) % nprocs
        if lead + extent <= block:
            return cls(extent, extent or 1, source, nprocs, 0)
        return cls(extent, block, source, nprocs, lead)

    @property
    def whole(self) -> bool:
        """Whether one process has all of them: ``source``."""
        return self.nprocs == 1 or self.lead + self.extent <= self.block

    def below(self, stop: int, process: int) -> int:
        """Return how many of the indices below ``stop`` a process has. Local."""
        if self.nprocs == 1:
            return stop
        turn = (process - self.source) % self.nprocs
        blocks, rest = divmod(self.lead + stop, self.block)
        rounds, extra = divmod(blocks, self.nprocs)
        owned = rounds * self.block + (self.block if turn < extra else rest if turn == extra else 0)
        return owned if turn else owned - min(self.lead, owned)

    def at_place(self, process: int, place: int) -> int:
        """Return the index that is at a place among those of a process. Local."""
        if self.nprocs == 1:
            return place
        turn = (process - self.source) % self.nprocs
        blocks, rest = divmod(place + (0 if turn else self.lead), self.block)
        return (blocks * self.nprocs + turn) * self.block + rest - self.lead

    def count(self, process: int) -> int:
        """Return how many indices a process has. Local."""
        return self.below(self.extent, process)

    def counts(self) -> list[int]:
        """Return how many indices each process has; just the extent if they are not dealt out. Local."""
        if self.nprocs == 1:
            return [self.extent]
        return [self.below(self.extent, p) for p in range(self.nprocs)]

    def blocks(self, process: int) -> list[tuple[int, int, int]]:
        """Return the blocks of a process: the first index, the index after the last, and the first's place. Local."""
        if self.nprocs == 1:
            return [(0, self.extent, 0)]
        found, at = [], 0
        start = (process - self.source) % self.nprocs * self.block - self.lead
        while start < self.extent:
            first, stop = max(start, 0), min(start + self.block, self.extent)
            found.append((first, stop, at))
            at += stop - first
            start += self.block * self.nprocs
        return found

    def axis(self) -> Axis:
        """Return it as an axis. Local."""
        return cached_axis(self.extent, self.block, self.source, self.nprocs, self.lead)


@lru_cache(4096)
def whole_span(extent: int) -> Span:
    """Return the span of indices that are not dealt out. Local."""
    return Span(extent, extent or 1, 0, 1, 0)


def aligned_spans(a: Span, b: Span) -> bool:
    """Return whether the indices are dealt out alike, perhaps beginning with different processes. Local."""
    return a.extent == b.extent and a.block == b.block and a.nprocs == b.nprocs and a.lead == b.lead


@sized_cache(lambda found: 350 * len(found))
def spread(of: Span, process: int, to: Span) -> list[tuple[int, Stretch]]:
    """Return where the indices of a process go in another distribution: processes, with what each of them gets. Local.

    The place in ``of`` is the source of a stretch, that in ``to`` its destination.
    """
    if aligned_spans(of, to):
        count = of.count(process)
        target = (process - of.source + to.source) % of.nprocs
        return [(target, Stretch(1, count, 0, 0, 0, 0))] if count else []
    if to.nprocs == 1:
        return [(0, s) for s in _regular(of, process)]
    if of.nprocs == 1:
        turned = [(q, s) for q in range(to.nprocs) for s in _regular(to, q)]
        return [
            (q, s._replace(src=s.dst, src_step=s.dst_step, dst=s.src, dst_step=s.src_step)) for q, s in turned
        ]
    mine, other = of.axis(), to.axis()
    return [(q, s) for q in range(to.nprocs) for s in intersect(mine, process, other, q)]


def _regular(span: Span, process: int) -> list[Stretch]:
    """Return the blocks of a process as stretches from their places to their indices: the full ones are one."""
    block, step = span.block, span.block * span.nprocs
    start, at = (process - span.source) % span.nprocs * block - span.lead, 0
    found = []
    if start < 0:
        at = min(start + block, span.extent)
        found.append(Stretch(1, at, 0, 0, 0, 0))
        start += step
    full = max(0, (span.extent - start - block) // step + 1) if start + block <= span.extent else 0
    if full:
        found.append(Stretch(full, block, at, block, start, step))
        start, at = start + full * step, at + full * block
    if start < span.extent:
        found.append(Stretch(1, span.extent - start, at, 0, start, 0))
    return found


FAMILIES = {
    "matmul": "product",
    **dict.fromkeys(("trsm", "trmm"), "triangular"),
    **dict.fromkeys(("symm", "hemm"), "sided"),
    **dict.fromkeys(("syrk", "herk", "syr2k", "her2k"), "updated"),
    "geadd": "added",
    "scal": "scaled",
    "swap": "exchanged",
    **dict.fromkeys(("dot", "dotc", "nrm2", "asum", "amax"), "reduced"),
}
"""The routines that may be direct calls: those of one family are computed by one function of an engine."""


class Asked(NamedTuple):
    """A direct call. Options that the routine lacks have their defaults.

    Attributes:
        call: its name in messages.
        routine: "matmul", one of ``ROUTINES``, or one of level 1: "scal" of D, "swap" of A and D, or one of
            ``REDUCTIONS`` of A, and of B if it takes two vectors.
        a, b, c, d: sub-matrices, vectors as columns; None for those that are absent. With ``beta == 0`` C is not read.
        new: D is a new matrix: where it is not computed, it gets the values of C.
        side, uplo, op_a, op_b, diag: as in PBLAS.
        alpha, beta: as the type of D has them. Alpha is not 0: some BLAS then read A and B nevertheless.
    """

    call: str
    routine: str
    a: Part
    b: Part | None
    c: Part | None
    d: Part
    new: bool
    side: str = "L"
    uplo: str = "L"
    op_a: str = "N"
    op_b: str = "N"
    diag: str = "N"
    alpha: complex = 1
    beta: complex = 0


class Direct(Protocol):
    """How an engine computes direct calls."""

    def run(self, control: Any, asked: Asked) -> bool | None:
        """Compute a call. Collective over the context.

        Returns:
            True: it is done. None: it is not for direct calls, as far as this rank knows; nothing has happened. False:
            the ranks have voted, and not all of them agree; nothing has been written.

        Raises:
            Exception: what the ranks agreed to raise.
        """

    def reduce(self, control: Any, asked: Asked) -> Any:
        """Return the result of one of ``REDUCTIONS``; None or False as ``run`` does. Collective over the context.

        Raises:
            Exception: what the ranks agreed to raise.
        """
