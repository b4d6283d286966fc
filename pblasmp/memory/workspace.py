# SPDX-License-Identifier: Apache-2.0
"""The workspace that all plans of a grid share: a growing buffer on the device and a pinned one on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

_STEP_BYTES = 32 << 20


class SharedWorkspace:
    """Two growing buffers. Plans hold ``device`` and ``host``, whose values are the current addresses.

    The functions that it is given are collective; if one raises on a rank, it raises on every rank.

    Args:
        new_device: ``new_device(nbytes)`` returns the address of new symmetric memory.
        free_device: ``free_device(address)`` frees it.
        new_host: ``new_host(nbytes)`` returns pinned memory: an object with ``ptr``.
        idle: waits until all work on the device is done.
        replaced: is called before a buffer is replaced: whoever holds its address (a CUDA graph) must not use it again.
    """

    def __init__(
        self,
        new_device: Callable[[int], int],
        free_device: Callable[[int], None],
        new_host: Callable[[int], Any],
        idle: Callable[[], None],
        replaced: Callable[[], None],
    ) -> None:
        self._new_device, self._give_back = new_device, free_device
        self._new_host, self._idle, self._replaced = new_host, idle, replaced
        self.device, self.host = ctypes.c_void_p(), ctypes.c_void_p()
        self._device_bytes = self._host_bytes = 0
        self._host_memory: Any = None

    def covers(self, device_bytes: int, host_bytes: int) -> bool:
        """Return whether the buffers are already that large. Local."""
        return device_bytes <= self._device_bytes and host_bytes <= self._host_bytes

    def grow(self, device_bytes: int, host_bytes: int) -> None:
        """Make the buffers at least that large, the same on every rank. Collective.

        The buffer on the device gets some spare room, since registering a new one takes far longer than a
        product. Waits for work in flight before a buffer is replaced.
        """
        if self.covers(device_bytes, host_bytes):
            return
        self._idle()
        if self.device.value or self._host_memory is not None:
            self._replaced()
        if device_bytes > self._device_bytes:
            self._free_device()
            device_bytes = roomy(device_bytes)
            self.device.value, self._device_bytes = self._new_device(device_bytes), device_bytes
        if host_bytes > self._host_bytes:
            self._host_memory = self._new_host(host_bytes)
            self.host.value, self._host_bytes = self._host_memory.ptr, host_bytes

    def _free_device(self) -> None:
        if self.device.value:
            address, self.device.value, self._device_bytes = self.device.value, None, 0
            self._give_back(address)

    def close(self) -> None:
        """Free both buffers. Collective."""
        self._free_device()
        self._host_memory, self.host.value, self._host_bytes = None, None, 0


def roomy(nbytes: int) -> int:
    """Return how much to allocate for ``nbytes``: from 32 MiB on, up to a quarter or 32 MiB more. Local."""
    step = max(_STEP_BYTES, 1 << max(0, nbytes.bit_length() - 3))
    return nbytes if nbytes < _STEP_BYTES else -(-nbytes // step) * step
