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


class RepeatedCalls:
    """What the ranks of a context have agreed on, by call.

    Each call gets a number, the same on every rank. Where all ranks find the same number, all repeat the same call.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()
        self._count = 0

    def repeat(self, agreement: Agreement, key: Hashable, prepare: Callable[[Any], T]) -> T | None:
        """Return what ``prepare`` makes of what is remembered; None unless all ranks repeat one call. Collective.

        Args:
            agreement: the call's.
            key: what this rank was asked for; None stands for calls that are not remembered.
            prepare: may raise, which is a fault of the call.
        """
        number, known = self._known.get(key, (0, None))
        try:
            with agreement as facts:
                facts[_NUMBER] = number
                return None if known is None else prepare(known)
        except RankMismatchError as error:
            if differs_in(error, _NUMBER):
                return None
            raise

    def agree(
        self,
        agreement: Callable[[], Agreement],
        key: Hashable,
        again: Callable[[Any], T],
        first: Callable[[dict[str, Any]], T],
    ) -> tuple[int, T]:
        """Return the call's number, 0 for a new one, and what ``again`` or ``first`` makes of it. Collective.

        A call that is new to all ranks takes one vote, as does one that all repeat.

        Args:
            agreement: makes one of the call.
            key: as for ``repeat``.
            again: gets what is remembered; may raise, which is a fault of the call.
            first: gets the facts of the agreement to fill; likewise. What it returns begins with what to remember.
        """
        number, known = self._known.get(key, (0, None))
        try:
            with agreement() as facts:
                facts[_NUMBER] = number
                found = first(facts) if known is None else again(known)
        except RankMismatchError as error:
            if not differs_in(error, _NUMBER):
                raise
            number = 0
            with agreement() as facts:
                found = first(facts)
        if not number:
            self.remember(key, found[0])  # type: ignore[index]
        return number, found

    def remember(self, key: Hashable, value: Any) -> None:
        """Keep what the ranks have agreed on for a call. Local; every rank does so after the same calls."""
        self._count += 1
        if key is not None:
            self._known.pop(key, None)
            self._known[key] = self._count, value
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
