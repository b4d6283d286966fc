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

    nodes: tuple[tuple[int, ...], ...]

    @abstractmethod
    def _memory(self) -> tuple[int, int, int]:
        """Return the bytes that are free on this node, and those of this rank's and of the node's buffers. Local."""

    def fits(self, nbytes: int) -> tuple[bool, int]:
        """Return whether every node has ``nbytes`` available, and the least that any has. Collective.

        Memory that buffers already have is used again, and so is available.
        """
        everyone = self.comm.allgather(self._memory())
        limits = []
        for node in self.nodes:
            free, own, shared = zip(*(everyone[rank] for rank in node), strict=True)
            limits.append(int(min(free) * _SHARE) + sum(own) + max(shared))
        return nbytes <= min(limits), min(limits)
