# SPDX-License-Identifier: Apache-2.0
"""When the CPU ranks of a factorisation are done: what each does, in order, and what it waits for of the others."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..layout.traffic import Kernel
from .machines import Link
from .paper import Event

__all__ = ["replay"]

Times = NDArray[np.float64]


def replay(
    events: Sequence[Sequence[Event]], seconds: Callable[[Kernel], float], link: Link
) -> tuple[Times, Times]:
    """Return when each rank is done, and how long each sends panels, whether it waits for that or not. Local.

    Args:
        events: of each rank.
        seconds: of a kernel.
        link: what panels travel over.
    """
    world = _Replay(len(events), seconds, link)
    ranks = [_ReplayedRank(world, number, each) for number, each in enumerate(events)]
    while not all(rank.done for rank in ranks):
        before = _progress(world, ranks)
        for rank in ranks:
            rank.run()
        assert before != _progress(world, ranks), "the ranks wait for each other"
    return np.array([rank.main for rank in ranks]), np.array([rank.passed for rank in ranks])


def _progress(world: _Replay, ranks: Sequence[_ReplayedRank]) -> tuple[int, int]:
    return sum(rank.at for rank in ranks), sum(map(len, world.fences.values()))


class _Replay:
    """What the ranks share.

    Attributes:
        ready: when a panel has arrived everywhere.
        mail: when messages have arrived, by sender and receiver.
        fences: for each fence, when ranks came to it.
    """

    def __init__(self, size: int, seconds: Callable[[Kernel], float], link: Link) -> None:
        self.size, self.seconds, self.link = size, lru_cache(None)(seconds), link
        self.hops = max(1, size - 1).bit_length()
        self.ready: dict[Any, float] = {}
        self.mail: dict[tuple[int, int], deque[float]] = defaultdict(deque)
        self.fences: dict[int, dict[int, float]] = defaultdict(dict)


class _ReplayedRank:
    """A rank's place in its events, and its clock. Each kind of event has a method, which returns False to wait.

    Attributes:
        main: when it has done what it has.
        passed: how long it sends panels.
    """

    def __init__(self, world: _Replay, number: int, events: Sequence[Event]) -> None:
        self._world, self._number, self._events, self.at = world, number, events, 0
        self._count = 0  # of fences
        self.main = self.passed = 0.0

    @property
    def done(self) -> bool:
        """Whether nothing is left."""
        return self.at == len(self._events)

    def run(self) -> None:
        """Do events until one has to wait. Local."""
        while not self.done:
            event = self._events[self.at]
            if getattr(self, f"_{event.kind}")(event) is False:
                return
            self.at += 1

    def _kernel(self, event: Event) -> None:
        self.main += self._world.seconds(event.what)

    def _publish(self, event: Event) -> None:
        way = self._world.link.time(event.nbytes, self._world.hops) if event.nbytes else 0.0
        self._world.ready[event.what] = self.main + way

    def _fetch(self, event: Event) -> bool:
        since = self._world.ready.get(event.what)
        if since is None:
            return False
        self.main = max(self.main, since)
        return True

    def _passed(self, event: Event) -> None:
        self.passed += self._world.link.time(event.nbytes, 1)

    def _messages(self, event: Event) -> bool:
        (sends, receives), mail = event.what, self._world.mail
        if not all(mail[other, self._number] for _, other in receives):
            return False
        for nbytes, other in sends:
            took = self._world.link.time(nbytes, 1)
            self.main, self.passed = self.main + took, self.passed + took
            mail[self._number, other].append(self.main)
        for _, other in receives:
            self.main = max(self.main, mail[other, self._number].popleft())
        return True

    def _fence(self, _: Event) -> bool:
        met = self._world.fences[self._count]
        met.setdefault(self._number, self.main)
        if len(met) < self._world.size:
            return False
        self.main, self._count = max(met.values()), self._count + 1
        return True
