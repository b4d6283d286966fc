# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory: the same number of bytes on every rank, reachable by the others.

cuBLASMp 0.8 and later take NCCL windows: memory of ncclMemAlloc, registered with the grids that use it. Older versions
take NVSHMEM's heap. Everything here is collective, in the same order on every rank, with the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol


class SymmetricHeap(Protocol):
    """Where symmetric memory comes from."""

    def allocate(self, nbytes: int) -> int:
        """Return the address of ``nbytes`` of new memory. Collective."""

    def free(self, address: int) -> None:
        """Free memory, after withdrawing it from every grid. Collective."""

    def offer(self, address: int, grid: int) -> None:
        """Make memory usable by a grid (a handle); may be repeated. Collective over the grid."""

    def withdraw(self, grid: int) -> None:
        """Withdraw all memory from a grid that is about to be destroyed. Collective over the grid."""

    def holds(self, address: int) -> int:
        """Return the start of the allocation that contains ``address``, 0 if there is none. Local."""

    def close(self) -> None:
        """Free everything, last made first. Collective."""


class NcclWindows:
    """Memory of ncclMemAlloc, registered with cuBLASMp's grids.

    Args:
        allocate: ``allocate(nbytes)`` returns an object with ``handle`` (an address) and ``close()``.
        register: ``register(grid, address, nbytes)``.
        deregister: ``deregister(grid, address)``.
    """

    def __init__(
        self,
        allocate: Callable[[int], Any],
        register: Callable[[int, int, int], None],
        deregister: Callable[[int, int], None],
    ) -> None:
        self._allocate, self._register, self._deregister = allocate, register, deregister
        self._buffers: dict[int, tuple[Any, int]] = {}  # in the order of allocation
        self._offers: list[tuple[int, int]] = []

    def allocate(self, nbytes: int) -> int:
        """Return the address of ``nbytes`` of new memory. Collective."""
        buffer = self._allocate(nbytes)
        address = int(buffer.handle)
        self._buffers[address] = (buffer, nbytes)
        return address

    def free(self, address: int) -> None:
        """Deregister and free. Collective."""
        buffer, _ = self._buffers.pop(address)
        with ExitStack() as last_first:  # every step, even if one fails
            last_first.callback(buffer.close)
            for offer in self._offers:
                if offer[0] == address:
                    last_first.callback(self._take_back, offer)

    def offer(self, address: int, grid: int) -> None:
        """Register memory with a grid, once. Collective over the grid."""
        if (address, grid) not in self._offers:
            self._register(grid, address, self._buffers[address][1])
            self._offers.append((address, grid))

    def withdraw(self, grid: int) -> None:
        """Deregister all of a grid's memory. Collective over the grid."""
        with ExitStack() as last_first:
            for offer in self._offers:
                if offer[1] == grid:
                    last_first.callback(self._take_back, offer)

    def _take_back(self, offer: tuple[int, int]) -> None:
        self._offers.remove(offer)
        address, grid = offer
        self._deregister(grid, address)

    def holds(self, address: int) -> int:
        """Return the start of the allocation that contains ``address``, 0 if there is none. Local."""
        return next((s for s, (_, nbytes) in self._buffers.items() if s <= address < s + nbytes), 0)

    def close(self) -> None:
        """Free everything, last made first. Collective."""
        with ExitStack() as last_first:
            for address in self._buffers:
                last_first.callback(self.free, address)
