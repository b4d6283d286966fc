# SPDX-License-Identifier: Apache-2.0
"""Calls that all ranks repeat: they take a single vote, however much the first such call had to compare."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from ..errors import RankMismatchError
from .agreement import NUMBER, Agreement, differs_in

_KEPT = 512

T = TypeVar("T")
U = TypeVar("U")


class RepeatedCalls:
    """What the ranks of a context have agreed on, by call.

    Each call gets a number, the same on every rank. If all ranks find the same number, all repeat the same call.
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
        *,
        voted: bool = False,
    ) -> tuple[int, T | U]:
        """Return the call's number and the result of ``again``, or 0 and the result of ``first``. Collective.

        A call that all ranks repeat takes one vote, and so does one that is new to all; the caller then remembers it.

        Args:
            agreement: makes an agreement on the call.
            key: what this rank was asked for; None for calls that are not remembered.
            again: is given what is remembered; an exception is a fault of the call.
            first: is given the facts of the agreement to fill; an exception is a fault of the call.
            voted: whether ``vote_on`` has returned False for this call: now all ranks agree on the details.
        """
        number, known = (0, None) if voted else self.known(key)
        if known is None:
            return 0, agree_after(voted, agreement, first)
        try:
            with agreement() as facts:
                facts[NUMBER] = number
                return number, again(known)
        except RankMismatchError as error:
            if not differs_in(error, NUMBER):
                raise
        return 0, agree_after(True, agreement, first)

    def known(self, key: Hashable) -> tuple[int, Any]:
        """Return the number of a call and what is remembered of it; 0 and None if it is new. Local."""
        return self._known.get(key, (0, None))

    def remember(self, key: Hashable, value: Any) -> int:
        """Keep what the ranks have agreed on for a call; return its number, 0 if it is not remembered. Local.

        Every rank does so after the same calls.
        """
        self._count += 1
        if key is not None:
            self._known.pop(key, None)
            self._known[key] = self._count, value
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return 0 if key is None else self._count


def agree_after(voted: bool, agreement: Callable[[], Agreement], read: Callable[[dict[str, Any]], T]) -> T:
    """Return the result of ``read`` in an agreement on a call that other ranks may vote on by ``vote_on``. Collective.

    Args:
        voted: whether this rank has voted so, and not all agreed.
        agreement: makes an agreement on the call.
        read: is given the facts of the agreement to fill, perhaps twice; an exception is a fault of the call.
    """
    if not voted:
        try:
            with agreement() as facts:
                facts[NUMBER] = 0
                return read(facts)
        except RankMismatchError as error:
            if not differs_in(error, NUMBER):
                raise
    with agreement() as facts:
        return read(facts)
