# SPDX-License-Identifier: Apache-2.0
"""What a rank does between two polls of what it waits for: it keeps its core, leaves it to others, or sleeps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial

YIELDS = 500  # polls that yield the core before a wait sleeps: a sleep takes longer
WOKEN_YIELDS = 100  # the same if another rank ends the sleep: meanwhile, ranks that work have one core less
SPINS = 50_000  # polls of a wait that is not patient, before it sleeps nevertheless
_SLICE_SECONDS = 1e-3  # a process that keeps a core for longer after a yield does not wait, but computes
CROWDED = 32
"""Waits that then sleep at once. To Linux a yield gives up a whole turn of several milliseconds, a sleep does not."""

PAUSE_SECONDS = 2e-5
_SHARE, _LONGEST_SECONDS = 0.02, 5e-3  # length of a nap: a share of the time waited so far, and at most
POLLS = 64  # between two looks for notes


class Polling:
    """How the waits of a context poll. Local."""

    def __init__(self) -> None:
        self._crowded = 0  # waits to come that sleep at once

    def looks(
        self,
        began: float,
        *,
        patient: bool,
        pause: Callable[[], None] | None,
        sleep: Callable[[], None] | None,
        meets: bool,
    ) -> Iterator[bool]:
        """Yield after each poll of a wait that has failed, and some time, whether to look for notes now.

        ``meets``: all ranks wait for each other; the rest is as of ``SideChannel.until``.
        """
        yields = YIELDS if sleep is None else min(YIELDS, WOKEN_YIELDS)
        polls = 0
        if sleep is not None and self._crowded:
            self._crowded -= 1
            pause = sleep
        while True:
            polls += 1
            if pause is None and polls == (yields if patient else SPINS):
                # While all ranks wait at a place, no transfer needs this rank's core.
                pause = sleep or (partial(nap, began) if meets else None)
            if pause is not None:
                pause()
                yield True
                continue
            looks = not polls % POLLS
            kept = step_aside(polls) if patient else looks and _yield()
            if kept and sleep is not None:
                self._crowded, pause = CROWDED, sleep
            yield looks


def nap(since: float) -> None:
    """Sleep for a small share of a wait that began at ``since``, so that the wait ends only a little later. Local."""
    time.sleep(min(max(PAUSE_SECONDS, _SHARE * (time.monotonic() - since)), _LONGEST_SECONDS))


def step_aside(polls: int) -> bool:
    """Leave the core to other processes for a moment; return whether one of them has kept it for long."""
    if polls < YIELDS and hasattr(os, "sched_yield"):
        return _yield()
    time.sleep(PAUSE_SECONDS)
    return False


def _yield() -> bool:
    """Leave the core to a process that waits for it; return whether it has kept the core for long."""
    if not hasattr(os, "sched_yield"):
        return False
    since = time.perf_counter()
    os.sched_yield()
    return time.perf_counter() - since > _SLICE_SECONDS
