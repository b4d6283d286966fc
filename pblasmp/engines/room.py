# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks have memory to give: the part of a transport that is the same on every engine."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..comm import Communicator

__all__ = ["Room"]

_SHARE = 0.8  # of what is free


class Room(ABC):
    """What the ranks of a communicator have left. Local to make.

    Attributes:
        comm: the ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._held = 0  # was available once: it is in the buffers and not asked for again

    @abstractmethod
    def _free(self) -> int:
        """Return the bytes that are free here. Local."""

    def fits(self, nbytes: int) -> tuple[bool, int]:
        """Return whether every rank has ``nbytes`` to give, and how many the tightest one has. Collective."""
        if nbytes > self._held:
            everywhere: list[int] = self.comm.allgather(self._free())
            limit = self._held + int(min(everywhere) * _SHARE)
            if nbytes > limit:
                return False, limit
            self._held = nbytes
        return True, self._held
