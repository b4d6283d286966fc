# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks have enough memory: the part of a transport that is the same on every engine."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ...comm import Communicator

__all__ = ["Room"]

_SHARE = 0.8  # of the free memory


class Room(ABC):
    """The memory that the ranks of a communicator have left. Making one is local.

    Attributes:
        comm: the ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._held = 0  # bytes that the buffers already have, and so need not be available again

    @abstractmethod
    def _free(self) -> int:
        """Return the bytes that are free here. Local."""

    def fits(self, nbytes: int) -> tuple[bool, int]:
        """Return whether every rank has ``nbytes`` available, and the least that any rank has. Collective."""
        if nbytes > self._held:
            everywhere: list[int] = self.comm.allgather(self._free())
            limit = self._held + int(min(everywhere) * _SHARE)
            if nbytes > limit:
                return False, limit
            self._held = nbytes
        return True, self._held
