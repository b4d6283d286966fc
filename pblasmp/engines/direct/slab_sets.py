# SPDX-License-Identifier: Apache-2.0
"""The memory of direct calls: two sets of slabs that calls use in turn."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["SlabSets"]


class SlabSets:
    """The sizes of an engine's two sets of slabs, the same on every rank, and whose turn it is. Local to make.

    Args:
        reserve: makes room for two sets of so many bytes each. Collective over the context; raises MemoryError on every
            rank if there is none, and then leaves the sets as they were.
        least: bytes of a set, at least.
        most: bytes of a set, at most.

    Attributes:
        half: the set of the next call that has slabs, 0 or 1.
        capacity: bytes of a set.
        most: as above; no more than there are, once there was no room for more.
    """

    def __init__(self, reserve: Callable[[int], None], least: int, most: int) -> None:
        self._reserve, self._least, self.most = reserve, least, most
        self.half = self.capacity = 0

    def fit(self, nbytes: int) -> bool:
        """Make sets of at least ``nbytes``, and return whether that was possible. Collective over the context."""
        if nbytes <= self.capacity:
            return True
        nbytes = max(self._least, 1 << (nbytes - 1).bit_length())
        try:
            self._reserve(nbytes)
        except MemoryError:
            self.most = self.capacity
            return False
        self.capacity = nbytes
        return True

    def turn(self) -> None:
        """Let the next call use the other set. Local."""
        self.half ^= 1

    def start_over(self) -> None:
        """Let the next call use the first set: since the last call that has slabs, all ranks have met. Local.

        Calls that come again in the same order then find the set that they had before.
        """
        self.half = 0
