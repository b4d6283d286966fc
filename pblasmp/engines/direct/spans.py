# SPDX-License-Identifier: Apache-2.0
"""How the indices of a sub-matrix are dealt out, as a few integers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...layout.axis import Axis
from ...layout.axis import axis as cached_axis
from ...layout.caches import sized_cache
from ...layout.intersection import Stretch, intersect


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

    def at_place(self, process: int, place: Any) -> Any:
        """Return the index that is at a place among those of a process, or an array of them at several. Local."""
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

    def indices(self, process: int) -> NDArray[np.int64]:
        """Return the indices of a process, ascending. Local."""
        found: NDArray[np.int64] = self.at_place(process, np.arange(self.count(process)))
        return found

    def axis(self) -> Axis:
        """Return it as an axis. Local."""
        return cached_axis(self.extent, self.block, self.source, self.nprocs, self.lead)


@lru_cache(4096)
def whole_span(extent: int) -> Span:
    """Return the span of indices that are not dealt out. Local."""
    return Span(extent, extent or 1, 0, 1, 0)


@sized_cache(lambda found: 350 * len(found))
def spread(of: Span, process: int, to: Span) -> list[tuple[int, Stretch]]:
    """Return where the indices of a process go in another distribution: processes, with what each of them gets. Local.

    The place in ``of`` is the source of a stretch, that in ``to`` its destination.
    """
    if of._replace(source=0) == to._replace(
        source=0
    ):  # dealt out alike, perhaps beginning with different processes
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
