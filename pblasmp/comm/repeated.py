# SPDX-License-Identifier: Apache-2.0
"""Calls that all ranks repeat: they take a single vote, however much the first such call had to compare."""

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
    ) -> tuple[int, T | U]:
        """Return the call's number and the result of ``again``, or 0 and the result of ``first``. Collective.

        A call that all ranks repeat takes one vote, and so does one that is new to all; the caller then remembers it.

        Args:
            agreement: makes an agreement on the call.
            key: what this rank was asked for; None for calls that are not remembered.
            again: is given what is remembered; an exception is a fault of the call.
            first: is given the facts of the agreement to fill; an exception is a fault of the call.
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
