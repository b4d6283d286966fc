# SPDX-License-Identifier: Apache-2.0
"""Messages between GPUs that reach each other: copy engines push them into the receivers' symmetric memory.

This needs no multiprocessor, so messages travel while a product runs. Each exchange under way has a box: memory on
every rank with a slot for each sender. A sender writes to a slot once the receiver has signalled that it is free: at
first, and when the previous message has been unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ..kernels.views import View
from .flags import MESSAGES, SLOTS

if TYPE_CHECKING:
    from ..runtime.gpu import Gpu

__all__ = ["Inbox"]

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
        return bool(self._free) and self._gpu.size * largest <= _MOST

    def start(
        self, packs: Mapping[int, tuple[int, Queue]], largest: int
    ) -> Callable[[Mapping[int, Queue]], None]:
        """Queue what this rank sends in an exchange. Collective: it reserves symmetric memory.

        Args:
            packs: for each receiver, the bytes of its message, and a function that queues on "main" the writing of
                the message at an address.
            largest: bytes of the largest message between any two ranks, the same on every rank.

        Returns:
            The function that finishes the exchange. Its argument has, for each sender, a function that queues the
            reading of its message at an address. Local.
        """
        gpu, box = self._gpu, min(self._free)
        slot = max(self._slots[box], -(-largest // _ALIGNED) * _ALIGNED)
        if slot > self._slots[box]:
            gpu.reserve(f"inbox {box}", gpu.size * slot)
            with gpu.agreement(f"{gpu.size * slot} bytes for messages"):
                gpu.scratch(f"outbox {box}", gpu.size * slot)
            self._slots[box] = slot
        packed = gpu.scratch(f"outbox {box}", gpu.size * slot)
        self._free.remove(box)
        gpu.use_current_stream()
        gpu.await_flags("main", [(to, SLOTS.at(box)) for to in packs])
        for to, (_, pack) in packs.items():
            pack(packed + to * slot)
        if packs:
            gpu.follow("copy", "main")
        for to in ((gpu.rank + step) % gpu.size for step in range(1, gpu.size)):
            if to in packs:
                there = gpu.symmetric(f"inbox {box}", to) + gpu.rank * slot
                gpu.push(
                    "copy",
                    View.of_bytes(there, packs[to][0]),
                    View.of_bytes(packed + to * slot, packs[to][0]),
                )
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
            unpack(gpu.symmetric(f"inbox {box}", gpu.rank) + source * slot)
        gpu.raise_flags("main", [(source, SLOTS.at(box)) for source in unpacks])
        if pushed:
            gpu.await_mark("main", f"box {box}")
        self._free.append(box)
