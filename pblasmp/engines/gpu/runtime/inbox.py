# SPDX-License-Identifier: Apache-2.0
"""Messages between GPUs that reach each other: copy engines push them into the receivers' symmetric memory.

This needs no multiprocessor, so messages travel while a product runs. Each exchange under way has a box: memory on
every rank with a slot for each sender. A sender writes to a slot once the receiver has signaled that it is free: at
first, and when the previous message has been unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..kernels.views import View
from .windows import CHUNKS, MESSAGES, ROOMS, SLOTS

if TYPE_CHECKING:
    from .gpu import Gpu

_BOXES = MESSAGES.count  # most exchanges under way at once
_MOST = 4 << 30  # bytes of a box; larger exchanges go through NCCL
_ALIGNED = 256

Queue = Callable[[int], None]


class Inbox:
    """The boxes of this rank. Making one is local. Ranks start and finish the same exchanges in the same order.

    Args:
        gpu: this rank's GPU, which must have windows.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._slots = [0] * _BOXES  # bytes of a slot, by box
        self._free = list(range(_BOXES))

    def takes(self, largest: int) -> bool:
        """Return whether there is room for messages of up to ``largest`` bytes between any two ranks. Local."""
        return bool(self._free) and (self._gpu.size - 1) * largest <= _MOST

    def start(
        self, packs: Mapping[int, tuple[int, Queue]], largest: int
    ) -> Callable[[Mapping[int, Queue]], None]:
        """Queue what this rank sends in an exchange. Collective: it reserves symmetric memory.

        Args:
            packs: for each receiver, the bytes of its message, and a function that queues on "main" the writing of
                the message at an address; what several receivers get by one function is written once.
            largest: bytes of the largest message between any two ranks, the same on every rank.

        Returns:
            The function that finishes the exchange. Its argument has, for each sender, a function that queues the
            reading of its message at an address. Local.
        """
        gpu, box = self._gpu, min(self._free)
        slot = max(self._slots[box], -(-largest // _ALIGNED) * _ALIGNED)
        nbytes = (gpu.size - 1) * slot
        if slot > self._slots[box]:
            gpu.reserve(f"inbox {box}", nbytes)
            with gpu.agreement(f"{nbytes} bytes for messages"):
                gpu.scratch(f"outbox {box}", nbytes)
            self._slots[box] = slot
        packed = gpu.scratch(f"outbox {box}", nbytes)
        self._free.remove(box)
        gpu.use_current_stream()
        places: dict[Queue, int] = {}
        for to, (_, pack) in packs.items():
            if pack not in places:
                places[pack] = packed + self._place(gpu.rank, to) * slot
                pack(places[pack])
        gpu.await_flags("main", [(to, SLOTS.at(box)) for to in packs])
        if packs:
            gpu.follow("copy", "main")
        for to in ((gpu.rank + step) % gpu.size for step in range(1, gpu.size)):
            if to in packs:
                there = gpu.symmetric(f"inbox {box}", to) + self._place(to, gpu.rank) * slot
                nbytes, pack = packs[to]
                gpu.push("copy", View.of_bytes(there, nbytes), View.of_bytes(places[pack], nbytes))
                gpu.raise_flag("copy", to, MESSAGES.at(box))
        if packs:
            gpu.mark(f"box {box}", "copy")

        return partial(self._finish, box, slot, bool(packs))

    def _finish(self, box: int, slot: int, pushed: bool, unpacks: Mapping[int, Queue]) -> None:
        """Queue the reading of the messages that arrive. Local."""
        gpu = self._gpu
        gpu.use_current_stream()
        for source, unpack in unpacks.items():
            gpu.await_flags("main", [(source, MESSAGES.at(box))])
            unpack(gpu.symmetric(f"inbox {box}", gpu.rank) + self._place(gpu.rank, source) * slot)
        gpu.raise_flags("main", [(source, SLOTS.at(box)) for source in unpacks])
        if pushed:
            gpu.await_mark("main", f"box {box}")
        self._free.append(box)

    def _place(self, rank: int, other: int) -> int:
        """Return which slot of a rank's box is for messages from, or to, another one. Local."""
        return (other - rank) % self._gpu.size - 1


_CHUNKS = CHUNKS.count // ROOMS.count  # of a delivery: with more, ranks far from the root wait less


class Deliveries:
    """Buffers in symmetric memory, and deliveries of what the root has in one to the same buffer of all ranks.

    Making one is local.

    Args:
        gpu: this rank's GPU, which must reach all others' memory.
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
