# SPDX-License-Identifier: Apache-2.0
"""When the GPUs of a factorisation are done: two streams each, which slow each other down and wait for others' panels.

On "ahead" a panel is updated, factored and broadcast, while "main" updates the rest with the panel before. Kernels of
the one that run beside kernels of the other take longer.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..layout.traffic import Kernel
from .machines import Link
from .paper import Event
from .replay import Times

__all__ = ["replay_streams"]

_MAIN, _AHEAD = 0, 1
_NOTHING = 1e-13  # seconds, and after some time a part of that time: less may not change the sum


@dataclass(slots=True)
class _Step:
    """What a stream does: it waits for ``token``, and until ``since``, then works, then gives ``done``.

    Attributes:
        alone, more: seconds of the work, and how many more it takes beside work of the other stream.
        slows: the factor by which it slows down work on the other stream.
        fills: it leaves little of the GPU to the other stream.
        left: the part of the work that is left.
    """

    token: Hashable = None
    since: float = 0.0
    alone: float = 0.0
    more: float = 0.0
    slows: float = 1.0
    done: Hashable = None
    fills: bool = False
    left: float = 1.0

    def seconds(self, other: _Step | None) -> float:
        """Return how long all of the work takes beside other work, if there is some. Local."""
        return self.alone if other is None or not other.fills else self.alone * other.slows + self.more


def replay_streams(
    events: Sequence[Sequence[Event]],
    seconds: Callable[[Kernel], float],
    streams: Callable[[Kernel], tuple[float, float, float]],
    link: Link,
) -> tuple[Times, Times]:
    """Return when each rank is done, and how long each sends panels, whether it waits for that or not. Local.

    Args:
        events: of each rank.
        seconds: of a kernel.
        streams: how many more seconds a kernel ahead takes beside products, how many times as long these take then, and
            how many seconds the host takes to queue it.
        link: what panels travel over.
    """
    world = _StreamingRanks(len(events), lru_cache(None)(seconds), lru_cache(None)(streams), link)
    ranks = [_StreamingRank(world, number, each) for number, each in enumerate(events)]
    for rank in ranks:
        rank.go(0.0)
    time = 0.0
    while world.woken or world.agenda:
        if world.woken:
            ranks[world.woken.popleft()].go(time)
            continue
        end, number, version = heapq.heappop(world.agenda)
        if version == ranks[number].version:
            time = end
            ranks[number].go(time)
    assert not any(queue for rank in ranks for queue in rank.queues), "the ranks wait for each other"
    return np.array([rank.now for rank in ranks]), np.array([rank.passed for rank in ranks])


class _StreamingRanks:
    """What the ranks share: tokens that were given, who waits for others, and when steps end."""

    def __init__(
        self,
        size: int,
        seconds: Callable[[Kernel], float],
        streams: Callable[[Kernel], tuple[float, float, float]],
        link: Link,
    ) -> None:
        self.size, self.seconds, self.streams, self.link = size, seconds, streams, link
        self.hops = max(1, size - 1).bit_length()
        self.given: Counter[Hashable] = Counter()
        self.waiting: dict[Hashable, set[int]] = defaultdict(set)
        self.woken: deque[int] = deque()
        self.agenda: list[tuple[float, int, int]] = []

    def give(self, token: Hashable) -> None:
        """Wake those who wait for a token."""
        self.given[token] += 1
        self.woken.extend(sorted(self.waiting.pop(token, ())))
        if isinstance(token, tuple) and token[0] == "fence" and self.given[token] == self.size:
            self.give(("all", token[1]))


class _StreamingRank:
    """A GPU: two queues of steps, the first ones of which run at the same time."""

    def __init__(self, world: _StreamingRanks, number: int, events: Sequence[Event]) -> None:
        self._world, self._number = world, number
        self.queues: tuple[deque[_Step], deque[_Step]] = deque(), deque()
        self.now = self.passed = self._host = 0.0
        self.version = 0
        self._updates = self._fences = 0
        self._owned: set[Hashable] = set()
        self._mails: Counter[tuple[int, int]] = Counter()
        self._active: list[_Step | None] = [None, None]
        for event in events:
            getattr(self, f"_{event.kind}")(event)

    # -- steps of an event

    def _kernel(self, event: Event) -> None:
        alone, (more, slows, queueing) = self._world.seconds(event.what), self._world.streams(event.what)
        self._host += queueing
        if event.ahead:
            token = ("updated", self._number, self._updates) if self._updates else None
            self.queues[_AHEAD].append(_Step(token, self._host, alone, more, slows, fills=True))
        else:
            fills = event.what[0] == "gemm"
            self.queues[_MAIN].append(_Step(None, self._host, alone, fills=fills))

    def _publish(self, event: Event) -> None:
        way = self._world.link.time(event.nbytes, self._world.hops) if event.nbytes else 0.0
        self._owned.add(event.what)
        self.queues[event.ahead].append(_Step(alone=way, done=("ready", event.what)))

    def _fetch(self, event: Event) -> None:
        token = "ready", event.what
        self.queues[_MAIN].append(_Step(token))
        if event.what not in self._owned:  # it arrives on the stream for work ahead
            self.queues[_AHEAD].append(_Step(token))

    def _updated(self, _: Event) -> None:
        self._updates += 1
        self.queues[_MAIN].append(_Step(done=("updated", self._number, self._updates)))

    def _passed(self, event: Event) -> None:
        self.passed += self._world.link.time(event.nbytes, 1)

    def _messages(self, event: Event) -> None:
        sends, receives = event.what
        for nbytes, other in sends:
            took = self._world.link.time(nbytes, 1)
            self.passed += took
            self.queues[_MAIN].append(_Step(alone=took, done=self._mail(self._number, other)))
        self.queues[_MAIN].extend(_Step(self._mail(other, self._number)) for _, other in receives)

    def _mail(self, source: int, dest: int) -> Hashable:
        """Return the token of the next message between two ranks, as both count them."""
        self._mails[source, dest] += 1
        return "mail", source, dest, self._mails[source, dest]

    def _fence(self, _: Event) -> None:
        self._fences += 1
        here = "ahead", self._number, self._fences
        self.queues[_AHEAD].append(_Step(done=here))
        self.queues[_MAIN].extend([_Step(here, done=("fence", self._fences)), _Step(("all", self._fences))])

    # -- work

    def go(self, time: float) -> None:
        """Work until ``time``, begin what can be begun, and say when the first of that ends. Local."""
        self._work(time - self.now)
        self.now = time
        while any(self._next(stream) for stream in (_MAIN, _AHEAD)):
            pass
        self.version += 1
        main, ahead = self._active
        ends = [time + x.left * x.seconds(y) for x, y in ((main, ahead), (ahead, main)) if x is not None]
        ends += [queue[0].since for queue in self.queues if queue and queue[0].since > time]
        if ends:
            heapq.heappush(self._world.agenda, (min(ends), self._number, self.version))

    def _work(self, seconds: float) -> None:
        main, ahead = self._active
        parts = [(x, seconds / x.seconds(y)) for x, y in ((main, ahead), (ahead, main)) if x is not None]
        for step, part in parts:
            step.left -= part

    def _next(self, stream: int) -> bool:
        """Begin the first step of a stream, or end it if it is done; return whether it was ended."""
        self._active[stream] = None
        queue, world = self.queues[stream], self._world
        if not queue:
            return False
        step = queue[0]
        if step.token is not None and not world.given[step.token]:
            world.waiting[step.token].add(self._number)
            return False
        if step.since > self.now:
            return False
        if step.left * step.alone > _NOTHING * max(1.0, self.now):
            self._active[stream] = step
            return False
        queue.popleft()
        if step.done is not None:
            world.give(step.done)
        return True
