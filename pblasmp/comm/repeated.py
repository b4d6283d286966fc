# SPDX-License-Identifier: Apache-2.0
"""Calls that all ranks repeat: they agree by a single vote, whatever the first such call had to compare."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from ..errors import RankMismatchError
from .agreement import Agreement, differs_in

__all__ = ["RepeatedCalls"]

_KEPT = 512
_NUMBER = "number of the call"

T = TypeVar("T")
U = TypeVar("U")


class RepeatedCalls:
    """What the ranks of a context have agreed on, by call.

    Each call gets a number, the same on every rank. Where all ranks find the same number, all repeat the same call.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()
        self._count = 0

    def agree(
        self,
        agreement: Callable[[], Agreement],
        key: Hashable,
        again: Callable[[Any], T],
        first: Callable[[dict[str, Any]], U],
    ) -> tuple[int, T | U]:
        """Return the call's number and what ``again`` makes of it, or 0 and what ``first`` does. Collective.

        A call that all ranks repeat takes one vote, as does one that is new to all: which is to be remembered then.

        Args:
            agreement: makes one of the call.
            key: what this rank was asked for; None stands for calls that are not remembered.
            again: gets what is remembered; may raise, which is a fault of the call.
            first: gets the facts of the agreement to fill; likewise.
        """
        number, known = self._known.get(key, (0, None))
        try:
            with agreement() as facts:
                facts[_NUMBER] = number
                return number, first(facts) if known is None else again(known)
        except RankMismatchError as error:
            if not differs_in(error, _NUMBER):
                raise
        with agreement() as facts:
            return 0, first(facts)

    def remember(self, key: Hashable, value: Any) -> None:
        """Keep what the ranks have agreed on for a call. Local; every rank does so after the same calls."""
        self._count += 1
        if key is not None:
            self._known.pop(key, None)
            self._known[key] = self._count, value
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
