# SPDX-License-Identifier: Apache-2.0
"""Turns: the order on a GPU of what this process's contexts queue there, where one of them takes the whole GPU."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

_on: dict[int, Turns] = {}


class Member(Protocol):
    """What takes turns.

    Attributes:
        stream: CuPy's stream on which it queues, the one used last.
    """

    stream: Any

    def let_wait(self, stream: Any, other: Any) -> bool:
        """Let later work on a stream wait for another stream's, if it can; return whether it does. Local."""


class Turns:
    """The order of the contexts of this process on one GPU. Local.

    A kernel that waits for other ranks on all multiprocessors must not meet what another context has wait for ranks on
    the same GPU: one GPU would begin with this, another with that, and each would wait for what has no room. So such a
    kernel runs behind all that the other contexts have queued, and what they queue later runs behind it: the ranks
    call in the same order, and so do their GPUs. Contexts that queue none are not ordered.

    Attributes:
        taken: how often a turn was taken.
    """

    def __init__(self) -> None:
        self._members: weakref.WeakSet[Member] = weakref.WeakSet()
        self._alone = True
        self._behind: weakref.WeakSet[Member] = weakref.WeakSet()  # those whose work waits for the last turn
        self._last: Member | None = None
        self.taken = 0

    def join(self, member: Member) -> None:
        """Order a context from now on. Local."""
        self._members.add(member)
        self._alone = len(self._members) == 1

    def leave(self, member: Member) -> None:
        """Forget a context, whose work has ended. Local."""
        self._members.discard(member)
        self._alone = len(self._members) <= 1
        if self._last is member:
            self._last = None

    def nothing_to_order(self, member: Member, *, takes: bool) -> bool:
        """Return whether ``follow``, and ``take`` if the work ``takes`` a turn, would do nothing now. Local."""
        return (self._alone and self._last is member) if takes else self._last is None or self._last is member

    def follow(self, member: Member, stream: Any) -> None:
        """Let what a context queues on a stream from now on wait for the last turn of another one. Local."""
        last = self._last
        if last is None or last is member or member in self._behind:
            return
        if member.let_wait(stream, last.stream):
            self._behind.add(member)

    def take(self, member: Member, stream: Any) -> None:
        """Let what a context queues next on a stream wait for all others, and them for it. Local."""
        self.taken += 1
        for other in self._members:
            if other is not member:
                member.let_wait(stream, other.stream)
        self._last = member
        self._behind.clear()


def turns_on(device: int) -> Turns:
    """Return the turns on a GPU of this process, by its CUDA index. Local."""
    return _on.setdefault(device, Turns())
