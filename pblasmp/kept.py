# SPDX-License-Identifier: Apache-2.0
"""Plans that a context keeps for repeated calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

from .engines.protocol import Engine

__all__ = ["Closable", "KeptPlans"]

_MOST = 32


class Closable(Protocol):
    """What a context closes: plans."""

    def close(self) -> None:
        """Free what it holds. Collective."""


T = TypeVar("T", bound=Closable)


class KeptPlans:
    """The most recently used plans, by key; after a new measurement, earlier plans are no longer found.

    Keys are the same on every rank, and come in the same order.

    Args:
        engine: where the plans run.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()

    def find(self, key: Hashable) -> Any:
        """Return the plan for ``key``, None if there is none. Local; the same on every rank."""
        key = self._whole(key)
        found = self._plans.get(key)
        if found is not None:
            self._plans.move_to_end(key)
        return found

    def keep(self, key: Hashable, plan: Closable) -> None:
        """Keep a plan. Collective over the context if another plan must make room."""
        self._make_room()
        self._plans[self._whole(key)] = plan

    def find_or_make(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the plan for ``key``, or make and keep it. Collective over the context, if it is made."""
        found: T | None = self.find(key)
        if found is None:
            self._make_room()
            found = make()
            self.keep(key, found)
        return found

    def _whole(self, key: Hashable) -> Hashable:
        return key, self._engine.measured.added

    def _make_room(self) -> None:
        """Close the least recently used plans until there is room for another. Collective over the context."""
        while len(self._plans) >= _MOST:
            self._plans.popitem(last=False)[1].close()
