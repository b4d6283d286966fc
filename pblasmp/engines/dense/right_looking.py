# SPDX-License-Identifier: Apache-2.0
"""The order of a factorisation of panels: right-looking, one panel ahead of the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .factor_panels import FactorPanels

__all__ = ["right_looking"]

Array = Any


def right_looking(
    panels: FactorPanels,
    steps: int,
    finish: Callable[[int], None],
    update: Callable[[int, Array, Sequence[int]], None],
    *,
    ends_at_fault: bool = False,
    delays: bool = False,
) -> None:
    """Factor panels, one after another, and update the later ones with each. Collective over the workers.

    The next panel is updated and factored first, so that the other ranks have it before they need it.

    Args:
        panels: the matrix.
        steps: how many panels are factored.
        finish: ``finish(k)`` factors panel k, one of this rank's, which has been updated.
        update: ``update(k, panel, group)`` updates adjacent panels of this rank with panel k, from its diagonal on, and
            with ``delays`` also with the panels after it, which follow it in the same array.
        ends_at_fault: what comes after a panel with a fault is useless. If not, as in LU, where U's diagonal may have a
            zero, all panels are factored.
        delays: an update may wait for more panels: what two have in common is multiplied at once.
    """
    if panels.rank >= panels.shape.workers:
        return
    panels.begin(delays=delays)
    if steps and panels.has(0):
        with panels.ahead():
            finish(0)
            panels.publish(0)
    for k in range(steps):
        panel = panels.fetch(k)
        if ends_at_fault and panels.failed(k):
            break
        for first, group in panels.later(k):
            known = panel if first == k else panels.joined(first, k)
            if group[0] > k + 1:
                update(first, known, group)
                continue
            with panels.ahead():
                update(first, known, group)
                if k + 1 < steps:
                    finish(k + 1)
                    panels.publish(k + 1)
