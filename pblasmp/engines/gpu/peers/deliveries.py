# SPDX-License-Identifier: Apache-2.0
"""One rank's data for all others, by copy engines: each rank passes on what it gets, chunk by chunk.

No multiprocessor takes part, not even while a rank waits, so that a product which runs meanwhile has them all. The
kernel of a broadcast by NCCL holds some of them from the time when it is queued, until the data has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..kernels.views import View
from .flags import CHUNKS, ROOMS

if TYPE_CHECKING:
    from ..runtime.gpu import Gpu

__all__ = ["Deliveries"]

_CHUNKS = CHUNKS.count // ROOMS.count  # of a delivery: with more, ranks far from the root wait less
_ALIGNED = 256


class Deliveries:
    """Buffers in symmetric memory, and deliveries of what the root has in one to the same buffer of all ranks.

    Making one is local.

    Args:
        gpu: this rank's GPU, which must reach all others' memory.
        name: of the buffers.
    """

    count = ROOMS.count

    def __init__(self, gpu: Gpu, name: str) -> None:
        self._gpu, self._name = gpu, name

    def reserve(self, nbytes: int) -> None:
        """Make each buffer at least that large, the same size on every rank. Collective."""
        for i in range(self.count):
            self._gpu.reserve(f"{self._name} {i}", nbytes)

    def address(self, i: int) -> int:
        """Return where this rank's buffer ``i`` is, until buffers grow. Local."""
        return self._gpu.symmetric(f"{self._name} {i}", self._gpu.rank)

    @staticmethod
    def size(nbytes: int, beside: Sequence[int]) -> int:
        """Return how large buffers must be for deliveries of so many bytes, and arrays of so many beside them."""
        return _aligned(nbytes) + sum(map(_aligned, beside))

    def deliver(
        self,
        stream: str,
        i: int,
        root: int,
        nbytes: int,
        beside: Sequence[tuple[int, int]] = (),
        *,
        start: int = 0,
    ) -> None:
        """Queue a delivery of bytes of buffer ``i``. Every rank queues it. Local to queue.

        Args:
            stream: in which earlier uses of this rank's buffer have ended.
            i: which buffer.
            root: the rank whose data is delivered.
            nbytes: how many bytes it has there.
            beside: this rank's arrays that accompany them, by address and size: they become what the root's are. They
                travel in the buffer, after the data.
            start: where the data is in the buffer; the same on every rank.
        """
        gpu, at = self._gpu, self.address(i) + start
        before, after = (gpu.rank - 1) % gpu.size, (gpu.rank + 1) % gpu.size
        receives, passes = gpu.rank != root, after != root
        arrays, end = [], _aligned(nbytes)
        for address, length in beside:
            arrays.append((View.of_bytes(address, length), View.of_bytes(at + end, length)))
            end += _aligned(length)
        if receives:
            gpu.raise_flag(stream, before, ROOMS.at(i))
        else:
            for own, carried in arrays:
                gpu.push(stream, carried, own)
        if passes:
            gpu.await_flag(stream, after, ROOMS.at(i))
            there = gpu.symmetric(f"{self._name} {i}", after) + start
        size = _aligned(-(-end // (_CHUNKS if gpu.size > 2 else 1)))  # of two, none passes anything on
        for number, begin in enumerate(range(0, end, size)):
            flag = CHUNKS.at(i * _CHUNKS + number)
            if receives:
                gpu.await_flag(stream, before, flag)
            if passes:
                length = min(size, end - begin)
                gpu.push(stream, View.of_bytes(there + begin, length), View.of_bytes(at + begin, length))
                gpu.raise_flag(stream, after, flag)
        if receives:
            for own, carried in arrays:
                gpu.push(stream, own, carried)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
