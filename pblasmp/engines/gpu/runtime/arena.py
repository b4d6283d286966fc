# SPDX-License-Identifier: Apache-2.0
"""Arena: the GPU memory that an engine's products share, one product at a time, and one count of its replacements."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ....logs import logger

__all__ = ["Arena", "GraphMemory"]

Array = Any

_NUMBERS = 64  # numbers in GPU memory that are remembered for later products


class GraphMemory:
    """Memory of the arrays that products make while graphs are recorded; it lasts as long as a graph keeps it. Local.

    Graphs run one after another, as products do, so the arrays of one may lie where those of another one lay. A pool of
    CuPy's gives memory that no array has back to CUDA when there is little left; since graphs still hold its address,
    the pool gets all memory from here.

    Args:
        cupy: the module.

    Attributes:
        malloc: what allocates, for CuPy.
    """

    def __init__(self, cupy: Any) -> None:
        self._blocks: list[Any] = []
        self.malloc = cupy.cuda.MemoryPool(partial(_allocated, cupy, self._blocks)).malloc

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(block.size for block in self._blocks)


def _allocated(cupy: Any, blocks: list[Any], nbytes: int) -> Any:
    """Return new memory, which is added to ``blocks``; if there is none, CuPy first gives up what it keeps unused."""
    cuda, pool = cupy.cuda, cupy.get_default_memory_pool()
    try:
        memory = cuda.Memory(nbytes)
    except cuda.runtime.CUDARuntimeError:
        pool.free_all_blocks()
        try:
            memory = cuda.Memory(nbytes)
        except cuda.runtime.CUDARuntimeError as error:
            held = sum(block.size for block in blocks)
            raise MemoryError(
                f"{nbytes} bytes for a graph of a plan, next to {held} of graphs: {_left(cupy)}"
            ) from error
    blocks.append(memory)
    return cuda.MemoryPointer(memory, 0)


def _left(cupy: Any) -> str:
    """Return how much memory there is, for messages."""
    free, total = cupy.cuda.runtime.memGetInfo()
    used = cupy.get_default_memory_pool().used_bytes()
    return f"the GPU has {free} of {total} bytes free, and CuPy's arrays take {used}"


class Arena:
    """Buffers with an owner and a name, which grow, and numbers in GPU memory. Local.

    Products use them one after another, on whatever streams. An owner is the code that uses a buffer: two owners may
    take the same name. A buffer grows on one rank, perhaps, and not on another, so it must not end a graph, which all
    ranks replay or none does: an outgrown buffer lasts as long as the graphs that were recorded before.

    Args:
        cupy: the module.
        settle: ``settle(stream)`` lets later work on a stream wait for all that was queued so far: CuPy gives the
            memory of a freed array to the next array that is made on the same stream.

    Attributes:
        generation: counts the replacements of symmetric memory and of workspaces, which all ranks replace together. A
            CUDA graph made before one may hold its address, and must not run again.
        replacements: counts those, and the buffers that have grown on this rank: who holds addresses without a graph
            looks them up again.
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
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._outgrown: list[
            tuple[list[weakref.ref[Any]], Array, Any]
        ] = []  # each with the graphs that may hold its address, and its stream
        self._of_graphs: weakref.ref[GraphMemory] | None = None
        self.generation, self.replacements = 0, 0

    def graph_memory(self) -> GraphMemory:
        """Return the memory of all graphs that are not destroyed yet, for one that is about to be recorded."""
        found = None if self._of_graphs is None else self._of_graphs()
        if found is None:
            found = GraphMemory(self._cupy)
            self._of_graphs = weakref.ref(found)
        return found

    def replaced(self) -> None:
        """Count the replacement of memory whose address a CUDA graph may hold, by all ranks."""
        self.generation += 1
        self.replacements += 1

    def keep_for(self, recorded: Any) -> None:
        """Keep the memory of today's buffers as long as this recorded graph, whose ``graph`` is None at its end."""
        self._graphs.add(recorded)

    def buffer(self, owner: str, name: str, nbytes: int) -> Array:
        """Return at least ``nbytes`` of an owner's buffer, as an uninitialised array of bytes.

        Products get theirs when they are prepared, too: a buffer must not grow while a graph records.
        """
        key = owner, name
        found = self._buffers.get(key)
        if found is not None and found[0].size >= nbytes:
            return found[0]
        if found is not None:
            self._outgrown.append(([weakref.ref(graph) for graph in self._graphs], *found))
            del self._buffers[key], found
            self.replacements += 1
        self._free_outgrown()  # before more is allocated
        stream = self._cupy.cuda.get_current_stream()
        try:
            buffer = self._cupy.empty(max(1, nbytes), np.uint8)
        except MemoryError as error:
            raise MemoryError(
                f"{nbytes} bytes for buffer {name!r} of {owner}: {_left(self._cupy)}"
            ) from error
        self._buffers[key] = buffer, stream
        logger.debug("GPU buffer %s of %s: %d bytes", name, owner, nbytes)
        return buffer

    def _free_outgrown(self) -> None:
        """Free the outgrown buffers that no graph holds any more."""
        kept = []
        for graphs, buffer, stream in self._outgrown:
            if any(getattr(graph(), "graph", None) is not None for graph in graphs):
                kept.append((graphs, buffer, stream))
            else:
                self._settle(stream)
        self._outgrown = kept

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
        self._outgrown.clear()
        self._numbers.clear()
        self._recorded.clear()
