# SPDX-License-Identifier: Apache-2.0
"""Operands that arrive in slabs, panel by panel, at the ranks that share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from ...layout.caches import Hashed
from ..protocol import Engine
from ..request import Options
from .operand import Operand, Staging, domain_of

__all__ = ["FOLLOWS", "Panels", "cut", "domains", "memory_refusal"]

Array = Any

FOLLOWS = 4  # use a short first panel only if k is at least so many times as long


def domains(engine: Engine, way: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that share slabs. Local."""
    if way == "shared":
        return engine.transport.nodes
    return _alone(engine.transport.size)


@lru_cache(8)
def _alone(size: int) -> tuple[tuple[int, ...], ...]:
    return Hashed((rank,) for rank in range(size))


def cut(k: int, width: int, lead: int = 0, *, backwards: bool = False) -> list[tuple[int, int]]:
    """Return the panels of k of at most ``width`` indices, in order from either end. Local.

    Nothing is multiplied while the first one arrives: it has ``lead`` indices, if that is given and many more follow.
    Each later one has up to twice as many as the one that is multiplied while it arrives.
    """
    panels, at, wide = [], 0, lead if 0 < FOLLOWS * lead <= k else width
    while at < k:
        stop = min(at + wide, k)
        if 2 * (k - stop) < wide and k - at <= width:
            stop = k  # rather than another short one
        panels.append((at, stop))
        at, wide = stop, min(2 * wide, width)
    return [(k - stop, k - start) for start, stop in panels] if backwards else panels


def memory_refusal(
    engine: Engine,
    way: str,
    needs: Callable[[], tuple[Sequence[Operand], int]],
    options: Options,
    extra: int = 0,
) -> str:
    """Return why slabs cannot be shared or gathered, or an empty string. Collective over the context.

    Args:
        engine: where it runs.
        way: "shared", "gathered" or "panels".
        needs: returns the operands and the extent of the summation; called only if memory decides.
        options: an algorithm asked for by name is tried even if memory seems too small.
        extra: bytes that a rank needs besides the operands.
    """
    transport = engine.transport
    if way == "shared" and transport.why_not_shared:
        return transport.why_not_shared
    if options.algo != "auto" or way == "panels":
        return ""
    operands, k = needs()
    moved = [x for x in operands if not x.in_place]
    if not moved and not extra:
        return "" if way == "gathered" else "all operands are multiplied in place: there is nothing to share"
    if way == "shared":
        nbytes = max(
            sum(x.memory_bytes(node, k) for x in moved) + extra * len(node) for node in transport.nodes
        )
        what = "a shared copy of the operands"
    else:
        nbytes = max(
            sum(x.memory_bytes((rank,), k) for x in moved for rank in node) + extra * len(node)
            for node in transport.nodes
        )
        what = "gathered operands"
    enough, limit = transport.fits(nbytes)
    return "" if enough else f"{what} would need {nbytes} bytes per node, only {limit} available"


class Panels:
    """Operands that arrive in slabs, panel by panel, with two or three panels in memory. Collective.

    Args:
        engine: where it runs.
        way: "shared", "gathered" or "panels".
        operands: the operands that arrive.
        k: the extent that is cut into panels.
        backwards: the last panel comes first.
        lead: indices in the first panel; 0: as many as in the others.

    Attributes:
        panels: (start, stop) of each.
        sent_bytes, copied_bytes: bytes that this rank sends and copies for all panels.
        nbytes: memory of the slabs on this rank.
        fenced: whether the ranks of a node wait for each other before they use a panel.
    """

    def __init__(
        self,
        engine: Engine,
        way: str,
        operands: Sequence[Operand],
        k: int,
        *,
        backwards: bool = False,
        lead: int = 0,
    ) -> None:
        self._engine, self._operands, self._shared = engine, operands, way == "shared"
        in_panels = way == "panels"
        width = engine.operations.panel if in_panels else max(1, k)
        self.panels = cut(k, width, lead if in_panels else 0, backwards=backwards)
        groups = domains(engine, way)
        domain = groups[domain_of(groups)[engine.transport.rank]]
        in_place = [x.in_place for x in operands]
        self._stagings = [
            None if still or not self.panels else Staging(engine, x, groups, self.panels)
            for x, still in zip(operands, in_place, strict=True)
        ]
        made = [staging for staging in self._stagings if staging is not None]
        self.sent_bytes = sum(staging.sent_bytes for staging in made)
        self.copied_bytes = sum(staging.copied_bytes for staging in made)
        # Whether the ranks wait for each other after writing slabs: the same on every rank, even an idle one.
        self.fenced = self._shared and not all(in_place)
        widths = [stop - start for start, stop in self.panels]
        # While a panel is multiplied the next one arrives; on GPUs the one before may still be multiplied, too.
        self._parts = 3 if engine.traits.queues else 2
        self._bytes = [
            [
                0 if still else x.memory_bytes(domain, max(widths[part :: self._parts], default=0))
                for x, still in zip(operands, in_place, strict=True)
            ]
            for part in range(self._parts)
        ]
        self.nbytes = sum(map(sum, self._bytes)) if made else 0
        # two panels are under way at once
        self.nbytes += sum(sum(sorted(staging.message_bytes)[-2:]) for staging in made)
        if engine.traits.queues:  # the ranks agree now, but not in a run
            for i in range(min(self._parts, len(self.panels))):
                for which, staging in enumerate(self._stagings):
                    if staging is not None:
                        self._buffer(which, i)

    def _buffer(self, which: int, i: int) -> Array:
        """Return the memory of an operand's slabs of panel ``i``."""
        part = i % self._parts
        name = f"{'abcd'[which]}{part}"
        return self._engine.transport.buffer(name, self._bytes[part][which], shared=self._shared)

    def arrive(self, arrays: dict[str, Array]) -> Iterator[tuple[int, int, list[Array | dict[int, Array]]]]:
        """Start moving the first panel; return (start, stop, operands) of each in turn. Collective over the ranks.

        An operand is its slabs by process, each as outer × k, or this rank's own array if it stays in place. The ranks
        have agreed since the last run, so that no rank still multiplies what is overwritten here.
        """
        return self._arriving(self._start(0, arrays) if self.panels else [], arrays)

    def _arriving(
        self, coming: list[Any], arrays: dict[str, Array]
    ) -> Iterator[tuple[int, int, list[Array | dict[int, Array]]]]:
        """Yield each panel when it is there, after the next one has been started."""
        for i, (start, stop) in enumerate(self.panels):
            following = self._start(i + 1, arrays) if i + 1 < len(self.panels) else []
            slabs = [self._arrived(part) for part in coming]
            coming = following
            if self.fenced:
                self._engine.transport.fence()  # wait until every slab of the node has been written
            yield (
                start,
                stop,
                [
                    x.local(arrays[x.source])[:, start:stop] if slab is None else slab
                    for x, slab in zip(self._operands, slabs, strict=True)
                ],
            )

    def _start(self, i: int, arrays: dict[str, Array]) -> list[Any]:
        """Start moving panel ``i``; panels take turns in parts of the buffers."""
        ahead = len(self.panels) > 1
        return [
            staging and staging.start(i, arrays[x.source], self._buffer(which, i), ahead=ahead)
            for which, (x, staging) in enumerate(zip(self._operands, self._stagings, strict=True))
        ]

    @staticmethod
    def _arrived(part: Any) -> dict[int, Array] | None:
        """Return the slabs of an operand by process, None for one that stays in place."""
        if part is None:
            return None
        transfer, slabs = part
        transfer.finish()
        found: dict[int, Array] = slabs
        return found
