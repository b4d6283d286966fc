# SPDX-License-Identifier: Apache-2.0
"""Arena: the GPU memory that an engine's products share, one product at a time, and one count of its replacements."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from ....logs import logger

__all__ = ["Arena"]

Array = Any

_NUMBERS = 64  # numbers in GPU memory that are remembered for later products


class Arena:
    """Buffers with an owner and a name, which grow, and numbers in GPU memory. Local.

    Products use them one after another, on whatever streams. An owner is the code that uses a buffer: two owners may
    take the same name.

    Args:
        cupy: the module.
        settle: ``settle(stream)`` lets later work on a stream wait for all that was queued so far: CuPy gives the
            memory of a freed array to the next array that is made on the same stream.

    Attributes:
        generation: counts the replacements of memory whose address a CUDA graph may hold: buffers here, symmetric ones,
            and workspaces. A graph made before one must not run again.
    """

    def __init__(self, cupy: Any, settle: Callable[[Any], None]) -> None:
        self._cupy, self._settle = cupy, settle
        self._buffers: dict[
            tuple[str, str], tuple[Array, Any]
        ] = {}  # each with the stream that it was made on
        self._numbers: OrderedDict[float, tuple[Array, Any]] = (
            OrderedDict()
        )  # the most recently used one is the last
        self._recorded: list[Array] = []  # numbers whose addresses CUDA graphs hold
        self.generation = 0

    def replaced(self) -> None:
        """Count the replacement of memory whose address a CUDA graph may hold."""
        self.generation += 1

    def buffer(self, owner: str, name: str, nbytes: int) -> Array:
        """Return at least ``nbytes`` of an owner's buffer, as an uninitialised array of bytes.

        Products get theirs when they are prepared, too: a buffer must not grow while a graph records.
        """
        key = owner, name
        found = self._buffers.get(key)
        if found is not None and found[0].size >= nbytes:
            return found[0]
        if found is not None:
            self.replaced()
            self._settle(found[1])
            del self._buffers[key], found  # before more is allocated
        stream = self._cupy.cuda.get_current_stream()
        buffer = self._cupy.empty(max(1, nbytes), np.uint8)
        self._buffers[key] = buffer, stream
        logger.debug("GPU buffer %s of %s: %d bytes", name, owner, nbytes)
        return buffer

    def held(self, owner: str) -> int:
        """Return the bytes of an owner's buffers."""
        return sum(buffer.size for (whose, _), (buffer, _) in self._buffers.items() if whose == owner)

    def number(self, value: float) -> Array:
        """Return a number as an array of one float32, which must not be written."""
        stream = self._cupy.cuda.get_current_stream()
        found = self._numbers.get(value)
        array = self._cupy.full(1, value, np.float32) if found is None else found[0]
        if stream.is_capturing():
            self._recorded.append(array)  # if it is new, it has its value only where the graph runs
        elif found is None:
            self._numbers[value] = array, stream
            if len(self._numbers) > _NUMBERS:
                _, (_, made_on) = self._numbers.popitem(last=False)
                self._settle(made_on)
        if found is not None:
            self._numbers.move_to_end(value)
        return array

    def close(self) -> None:
        """Free everything; no work may be in flight."""
        self._buffers.clear()
        self._numbers.clear()
        self._recorded.clear()
