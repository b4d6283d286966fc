# SPDX-License-Identifier: Apache-2.0
"""One dimension of a block-cyclic layout: who owns an index, and its local index there. 0-based.

Everything takes constant time and memory, except methods that return arrays.
Source of the arithmetic: ScaLAPACK TOOLS (numroc, indxg2p, indxg2l, indxl2g).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, LayoutError
from .grid import integer


def numroc(n: int, nb: int, iproc: int, isrcproc: int, nprocs: int) -> int:
    """Return how many of ``n`` indices, dealt out in blocks of ``nb``, process ``iproc`` owns. Local.

    Args:
        n: extent, at least 0.
        nb: block size, at least 1.
        iproc: the process asked about, counted from 0.
        isrcproc: the process that owns the first block.
        nprocs: number of processes.

    Raises:
        LayoutError: an argument is out of range.

    Source: ScaLAPACK TOOLS, NUMROC.

    Example:
        >>> [pb.numroc(10, 2, p, 0, 3) for p in range(3)]
        [4, 4, 2]

    See Also:
        MatrixDescriptor.local_shape, of both dimensions; ``pblasmp.pblas.numroc``, which takes arrays.
    """
    return Axis(n, nb, isrcproc, nprocs).count(iproc)


@dataclass(frozen=True, slots=True)
class Axis:
    """``extent`` indices in blocks of ``block``, dealt round ``nprocs`` processes from ``source``. Local.

    ``lead`` indices of the first block come before index 0: non-zero only if a sub-matrix starts inside one.

    Raises:
        LayoutError: an argument is out of range.
    """

    extent: int
    block: int
    source: int = 0
    nprocs: int = 1
    lead: int = 0

    def __post_init__(self) -> None:
        extent, block, source, nprocs, lead = self.extent, self.block, self.source, self.nprocs, self.lead
        plain = type(extent) is type(block) is type(source) is type(nprocs) is type(lead) is int
        if plain and extent >= 0 and 0 <= lead < block and 0 <= source < nprocs:
            return  # nearly always
        for name, minimum in (("extent", 0), ("block", 1), ("source", 0), ("nprocs", 1), ("lead", 0)):
            object.__setattr__(self, name, integer(getattr(self, name), name, minimum))
        if self.source >= self.nprocs:
            raise LayoutError(f"source: process {self.source} is not among {self.nprocs} processes")
        if self.lead >= self.block:
            raise LayoutError(f"lead: {self.lead} is not inside a block of {self.block}")

    @classmethod
    def even(cls, extent: int, nprocs: int) -> Axis:
        """Return ``extent`` indices dealt out evenly in blocks of ceil(extent / nprocs); the last may be smaller."""
        extent, nprocs = integer(extent, "extent", 0), integer(nprocs, "nprocs", 1)
        return cls(extent, max(1, -(-extent // nprocs)), 0, nprocs)

    @classmethod
    def whole(cls, extent: int) -> Axis:
        """Return ``extent`` indices that one process has all of."""
        return cls(extent, max(1, extent))

    def _check(self, process: int) -> int:
        if type(process) is int and 0 <= process < self.nprocs:
            return process  # nearly always
        process = integer(process, "process", 0, ArgumentError)
        if process >= self.nprocs:
            raise ArgumentError(f"process {process} is not among {self.nprocs} processes")
        return process

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.extent:
            raise ArgumentError(f"range {start}:{stop} is not inside 0:{self.extent}")

    def count(self, process: int) -> int:
        """Return how many indices ``process`` owns."""
        return self.below(self.extent, self._check(process))

    @property
    def on_one(self) -> bool:
        """Whether one process owns all indices: ``source``."""
        return self.nprocs == 1 or self.lead + self.extent <= self.block

    def below(self, stop: int, process: int) -> int:
        """Return how many of the indices below ``stop`` a process owns; neither is checked."""
        return owned_below(stop, process, self.block, self.nprocs, self.source, self.lead)

    def same_places(self, other: Axis) -> bool:
        """Return whether every index is on the same process, at the same local index, on both axes."""
        if self == other:
            return True
        if (self.extent, self.nprocs) != (other.extent, other.nprocs):
            return False
        if self.nprocs == 1 or self.extent == 0:
            return True
        first, same = (min(each.block - each.lead, each.extent) for each in (self, other))
        in_second = self.extent - first <= min(self.block, other.block)
        return self.source == other.source and first == same and (in_second or self.block == other.block)

    def counts(self) -> list[int]:
        """Return how many indices each process owns."""
        return [self.below(self.extent, process) for process in range(self.nprocs)]

    def index(self, i: int) -> int:
        """Return ``i`` checked to be an index of this axis."""
        i = integer(i, "index", 0, ArgumentError)
        if i >= self.extent:
            raise ArgumentError(f"index {i} is out of range: the extent is {self.extent}")
        return i

    def owner(self, i: int) -> int:
        """Return the process that owns index ``i``."""
        return (self.source + (self.index(i) + self.lead) // self.block) % self.nprocs

    def local(self, i: int) -> tuple[int, int]:
        """Return ``(process, local index)`` of index ``i``."""
        block, within = divmod(self.index(i) + self.lead, self.block)
        rounds, turn = divmod(block, self.nprocs)
        before = self.lead if turn == 0 else 0
        return (self.source + turn) % self.nprocs, rounds * self.block + within - before

    def to_global(self, process: int, local: int) -> int:
        """Return the global index of ``local`` on ``process``."""
        process, local = self._check(process), integer(local, "local index", 0, ArgumentError)
        owned = self.count(process)
        if local >= owned:
            raise ArgumentError(f"local index {local} is out of range: process {process} owns {owned}")
        turn = (process - self.source) % self.nprocs
        rounds, within = divmod(local + (self.lead if turn == 0 else 0), self.block)
        return (rounds * self.nprocs + turn) * self.block + within - self.lead

    def blocks(self, process: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return ``(starts, stops)``: the index ranges of the blocks that ``process`` owns, ascending."""
        turn = (self._check(process) - self.source) % self.nprocs
        reach = max(1, self.lead + self.extent)
        block = min(self.block, reach)  # gives the same blocks without overflow
        step = min(self.nprocs * block, reach)
        first = min(turn * block - self.lead, self.extent)
        starts = np.arange(first if self.extent else 0, self.extent, step, dtype=np.int64)
        stops = starts + block
        if len(starts):
            starts[0] = max(first, 0)
            stops[-1] = min(int(stops[-1]), self.extent)
        return starts, stops

    def globals(self, process: int) -> NDArray[np.int64]:
        """Return the indices that ``process`` owns, ascending, as int64."""
        if self.nprocs == 1:
            return np.arange(self.count(process), dtype=np.int64)
        starts, stops = self.blocks(process)
        lengths = stops - starts
        ends = lengths.cumsum()
        owned = int(ends[-1]) if len(ends) else 0
        shifts: NDArray[np.int64] = (starts - (ends - lengths)).repeat(lengths)
        return shifts + np.arange(owned, dtype=np.int64)

    def window(self, start: int, stop: int) -> Axis:
        """Return the axis of the indices ``start`` to ``stop`` (half-open), each on its process."""
        self._check_range(start, stop)
        block, lead = divmod(start + self.lead, self.block)
        return axis(stop - start, self.block, (self.source + block) % self.nprocs, self.nprocs, lead)

    def local_window(self, process: int, start: int, stop: int) -> slice:
        """Return the local indices of ``process`` for ``start`` to ``stop`` (half-open)."""
        self._check_range(start, stop)
        process = self._check(process)
        return slice(self.below(start, process), self.below(stop, process))


def owned_below(stop: int, process: int, block: int, nprocs: int, source: int, lead: int) -> int:
    """Return how many of the indices below ``stop`` a process owns, as ``Axis.below``, of plain integers. Local."""
    turn = (process - source) % nprocs
    blocks, rest = divmod(lead + stop, block)
    rounds, extra = divmod(blocks, nprocs)
    owned = rounds * block + (block if turn < extra else rest if turn == extra else 0)
    return owned - min(lead, owned) if turn == 0 else owned


@lru_cache(256)
def even_counts(extent: int, nprocs: int) -> tuple[int, ...]:
    """Return how many indices each process owns of ``extent`` ones that are dealt out as by ``Axis.even``. Local."""
    block = max(1, -(-extent // nprocs))
    full, rest = divmod(extent, block)
    return ((block,) * full + (rest,) + (0,) * nprocs)[:nprocs]


def fault_of_shares(held: Sequence[int], of: str = "") -> str:
    """Return what is wrong with how many indices, tokens for example, each rank holds, "" if they are even. Local."""
    held, expected = [*held], [*even_counts(sum(held), len(held))]
    total, how = (
        f"{sum(held)} {of}".rstrip(),
        f"expected {expected}, as pblasmp.tensor_parallel.shard splits them",
    )
    return "" if held == expected else f"the ranks hold {held} of {total}, {how}"


axis = lru_cache(4096)(Axis)
"""Returns a cached axis: every call needs those of its matrices several times. Local."""
