# SPDX-License-Identifier: Apache-2.0
"""How the indices of a sub-matrix are dealt out, as a few integers."""

from __future__ import annotations

from typing import NamedTuple

from ...layout.axis import Axis, axis
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


def span_of(axes: Axes, start: int, extent: int) -> Axis:
    """Return how ``extent`` indices from ``start`` on are dealt out, in its simplest form. Local.

    Two are equal if, and only if, each index is on the same process at the same place among its own.
    """
    block, nprocs, source, lead, _ = axes
    if nprocs == 1:
        return whole_span(extent)
    blocks, lead = divmod(lead + start, block)
    source = (source + blocks) % nprocs
    if lead + extent <= block:
        return axis(extent, extent or 1, source, nprocs, 0)
    return axis(extent, block, source, nprocs, lead)


def whole_span(extent: int) -> Axis:
    """Return indices that are not dealt out. Local."""
    return axis(extent, extent or 1, 0, 1, 0)


@sized_cache(lambda found: 350 * len(found))
def spread(of: Axis, process: int, to: Axis) -> list[tuple[int, Stretch]]:
    """Return where the indices of a process go in another distribution: processes, with what each of them gets. Local.

    The place in ``of`` is the source of a stretch, that in ``to`` its destination.
    """
    if (of.extent, of.block, of.nprocs, of.lead) == (to.extent, to.block, to.nprocs, to.lead):
        # dealt out alike, perhaps beginning with different processes
        count = of.below(of.extent, process)
        target = (process - of.source + to.source) % of.nprocs
        return [(target, Stretch(1, count, 0, 0, 0, 0))] if count else []
    if to.nprocs == 1:
        return [(0, s) for s in _regular(of, process)]
    if of.nprocs == 1:
        return [(q, s.back) for q in range(to.nprocs) for s in _regular(to, q)]
    return [(q, s) for q in range(to.nprocs) for s in intersect(of, process, to, q)]


def _regular(span: Axis, process: int) -> list[Stretch]:
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
