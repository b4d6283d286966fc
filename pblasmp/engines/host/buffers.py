# SPDX-License-Identifier: Apache-2.0
"""The host engine's buffers: named, growing, and kept between products; private, or shared by a node's ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...comm import Communicator, SharedMemory
from ...logs import logger

__all__ = ["Buffers"]


class Buffers:
    """Named buffers that all products of an engine use, one product at a time.

    Args:
        node: the ranks of this node.
    """

    def __init__(self, node: Communicator) -> None:
        self._node = node
        self._shared: dict[str, SharedMemory] = {}
        self._private: dict[str, NDArray[np.uint8]] = {}

    def get(self, name: str, nbytes: int, *, shared: bool) -> NDArray[np.uint8]:
        """Return at least ``nbytes`` of buffer ``name``. With ``shared``: collective over the node."""
        if shared:
            nbytes = max(1, nbytes)
            if name not in self._shared:
                self._shared[name] = SharedMemory(self._node, nbytes)
            return self._shared[name].array(nbytes)
        if name not in self._private or self._private[name].size < nbytes:
            self._private[name] = np.empty(max(1, nbytes), np.uint8)
            logger.debug("buffer %s grown to %d bytes", name, nbytes)
        return self._private[name]

    def held(self, prefix: str) -> tuple[int, int]:
        """Return the bytes of private and of shared buffers whose names begin with ``prefix``. Local."""
        private = sum(array.size for name, array in self._private.items() if name.startswith(prefix))
        return private, sum(m.nbytes for name, m in self._shared.items() if name.startswith(prefix))

    def why_not_shared(self, name: str, nbytes: int) -> str:
        """Make a shared buffer; return an empty string, or why ranks cannot share memory. Collective over the node."""
        memory = self._shared[name] = SharedMemory(self._node, nbytes)
        return memory.why_not

    def close(self) -> None:
        """Free everything."""
        for memory in self._shared.values():
            memory.close()
        self._shared.clear()
        self._private.clear()
