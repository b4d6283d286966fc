# SPDX-License-Identifier: Apache-2.0
"""Arena: the GPU memory that an engine's products share, one product at a time, and one count of its replacements."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np

from ....logs import logger


class current:  # noqa: N801 - it is called like a function
    """``with current(stream):`` a stream is CuPy's current one, and the previous one is again afterwards. Local.

    CuPy's own ``with stream:`` restores the stream of the surrounding ``with`` block: a stream that the user chose with
    ``use()`` would be lost.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        import cupy

        self._before = cupy.cuda.get_current_stream()
        self._stream.use()

    def __exit__(self, *_: object) -> None:
        self._before.use()


def capture_of(stream: Any) -> int:
    """Return the number of the capture that records a stream. Local."""
    from cuda.bindings import driver

    _, _, number, *_ = driver.cuStreamGetCaptureInfo(stream.ptr)
    return int(number)


@lru_cache(64)
def external(handle: int, device: int) -> Any:
    """Return another library's stream as a CuPy stream. Local."""
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_StreamHandle(handle))
    return cupy.cuda.ExternalStream(handle, device)  # before CuPy 14


class _StreamHandle:
    """A CUDA stream in the protocol with which libraries share streams."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


Array = Any
Memory = TypeVar("Memory")
_Key = tuple[str, str]

BY_ADDRESS = "gpu"
"""The owner of buffers that are known by their addresses, not as arrays."""

_NUMBERS = 64  # numbers in GPU memory that are remembered for later products


class GraphMemory:
    """Memory of the arrays that products make while graphs are recorded; it lasts as long as a graph keeps it. Local.

    Graphs run one after another, as products do, so the arrays of one may lie where those of another one lay. A pool of
    CuPy's gives memory that no array has back to CUDA when there is little left; since graphs still hold its address,
    the pool gets all memory from here.

    Args:
        give_up: frees what others can do without.

    Attributes:
        malloc: what allocates, for CuPy.
    """

    def __init__(self, cupy: Any, give_up: Callable[[], bool]) -> None:
        self._blocks: list[Any] = []
        self.malloc = cupy.cuda.MemoryPool(partial(_allocated, cupy, give_up, self._blocks)).malloc

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(block.size for block in self._blocks)


def _allocated(cupy: Any, give_up: Callable[[], bool], blocks: list[Any], nbytes: int) -> Any:
    """Return new memory, which is added to ``blocks``; if there is none, others first give up what they can."""
    cuda = cupy.cuda
    try:
        memory = cuda.Memory(nbytes)
    except cuda.runtime.CUDARuntimeError:
        give_up()
        try:
            memory = cuda.Memory(nbytes)
        except cuda.runtime.CUDARuntimeError as error:
            held = sum(block.size for block in blocks)
            raise MemoryError(
                f"{nbytes} bytes for a graph of a plan, next to {held} of graphs: {_left(cupy)}"
            ) from error
    blocks.append(memory)
    return cuda.MemoryPointer(memory, 0)


def _lives(graph: weakref.ref[Any]) -> bool:
    """Return whether a recorded graph is not destroyed yet."""
    return getattr(graph(), "graph", None) is not None


def _left(cupy: Any) -> str:
    """Return how much memory there is, for messages."""
    free, total = cupy.cuda.runtime.memGetInfo()
    used = cupy.get_default_memory_pool().used_bytes()
    return f"the GPU has {free} of {total} bytes free, and CuPy's arrays take {used}"


class Arena:
    """Buffers with an owner and a name, which grow, and numbers in GPU memory. Local.

    Products use them one after another, on whatever streams. An owner is the code that uses a buffer: two owners may
    take the same name. A buffer grows on one rank, perhaps, and not on another, so it must not end a graph, which all
    ranks replay or none does: an outgrown buffer lasts as long as the graphs that use it. When memory is short, buffers
    are given up that no graph uses, nor what is prepared or runs now: the next product that needs them makes them anew.

    Args:
        settle: ``settle(stream)`` lets later work on a stream wait for all that was queued so far: CuPy gives the
            memory of a freed array to the next array that is made on the same stream.

    Attributes:
        generation: counts the replacements of symmetric memory and of workspaces, which all ranks replace together. A
            CUDA graph made before one may hold its address, and must not run again.
    """

    def __init__(self, cupy: Any, settle: Callable[[Any], None]) -> None:
        self._cupy, self._settle = cupy, settle
        self._buffers: dict[_Key, tuple[Array, Any]] = {}  # each with the stream that it was made on
        # the most recently used one is the last
        self._numbers: OrderedDict[float, tuple[Array, Any]] = OrderedDict()
        self._recorded: list[Array] = []  # memory whose addresses CUDA graphs hold until the end
        self._graphs: weakref.WeakKeyDictionary[Any, set[_Key] | None] = weakref.WeakKeyDictionary()
        self._noted: set[_Key] | None = None  # buffers of the graph that is being recorded
        self._pinned: set[_Key] = set()  # buffers that graphs of others hold
        self._used: dict[_Key, int] = {}  # when each buffer was asked for last
        self._clock = self._begun = 0
        # each with the graphs that may hold its address, and its stream
        self._outgrown: list[tuple[list[weakref.ref[Any]], Array, Any]] = []
        self._of_graphs: weakref.ref[GraphMemory] | None = None
        self.generation = 0

    def graph_memory(self) -> GraphMemory:
        """Return the memory of all graphs that are not destroyed yet, for one that is about to be recorded."""
        found = None if self._of_graphs is None else self._of_graphs()
        if found is None:
            found = GraphMemory(self._cupy, self.give_up)
            self._of_graphs = weakref.ref(found)
        return found

    def replaced(self) -> None:
        """Count the replacement of memory whose address a CUDA graph may hold, by all ranks."""
        self.generation += 1

    @contextmanager
    def noting(self) -> Iterator[set[_Key]]:
        """Return a ``with`` block in which a graph is recorded: the buffers that it uses."""
        noted: set[_Key] = set()
        self._noted = noted
        try:
            yield noted
        finally:
            self._noted = None

    def keep_for(self, recorded: Any, used: set[_Key] | None = None) -> None:
        """Keep the memory of today's buffers as long as a recorded graph, whose ``graph`` is None at its end.

        Args:
            used: the buffers that it uses, by default all; those that are known by their addresses count anyway.
        """
        self._graphs[recorded] = used

    def begin(self) -> None:
        """Note that something is about to be prepared: what it asks for is not given up before the next begins."""
        self._begun = self._clock + 1

    @property
    def captured(self) -> bool:
        """Whether a graph that is not one of plans records what is queued now: it may be replayed at any time."""
        return self._noted is None and bool(self._cupy.cuda.get_current_stream().is_capturing())

    def buffer(self, owner: str, name: str, nbytes: int) -> Array:
        """Return at least ``nbytes`` of an owner's buffer, as an uninitialized array of bytes.

        Products get theirs when they are prepared, too: a buffer must not grow while a graph records.

        Raises:
            MemoryError: there is no room.
        """
        key = owner, name
        stream = self._cupy.cuda.get_current_stream()
        self._clock += 1
        self._used[key] = self._clock
        if self._noted is not None:
            self._noted.add(key)
        elif stream.is_capturing():
            self._pinned.add(key)
        found = self._buffers.get(key)
        if found is not None and found[0].size >= nbytes:
            return found[0]
        if found is not None:
            del found
            self._outgrow(key)
        self._free_outgrown()  # before more is allocated
        try:
            buffer = self.with_memory(lambda: self._cupy.empty(max(1, nbytes), np.uint8))
        except MemoryError as error:
            raise MemoryError(
                f"{nbytes} bytes for buffer {name!r} of {owner}: {_left(self._cupy)}"
            ) from error
        self._buffers[key] = buffer, stream
        logger.debug("GPU buffer %s of %s: %d bytes", name, owner, nbytes)
        return buffer

    def with_memory(self, allocate: Callable[[], Memory]) -> Memory:
        """Return what ``allocate`` does; if it raises MemoryError, give up what can be, and try once more."""
        try:
            return allocate()
        except MemoryError:
            if not self.give_up():
                raise
        return allocate()

    def give_up(self) -> bool:
        """Free the buffers that no graph uses, nor what is prepared or runs now; return whether there are any."""
        before = len(self._buffers), len(self._outgrown)
        for key in [key for key in self._buffers if key[0] != BY_ADDRESS and self._used[key] < self._begun]:
            if key not in self._pinned and not any(map(_lives, self._users(key))):
                self._outgrow(key)
        self._free_outgrown()
        pool = self._cupy.get_default_memory_pool()
        found = (len(self._buffers), len(self._outgrown)) != before or pool.free_bytes() > 0
        pool.free_all_blocks()
        return found

    def _users(self, key: _Key) -> list[weakref.ref[Any]]:
        """Return the graphs that may hold the address of a buffer."""
        return [
            weakref.ref(graph)
            for graph, used in self._graphs.items()
            if used is None or key in used or key[0] == BY_ADDRESS
        ]

    def _outgrow(self, key: _Key) -> None:
        """Keep a buffer only as long as graphs do."""
        buffer, stream = self._buffers.pop(key)
        if key in self._pinned:
            self._pinned.remove(key)
            self._recorded.append(buffer)
        else:
            self._outgrown.append((self._users(key), buffer, stream))

    def _free_outgrown(self) -> None:
        """Free the outgrown buffers that no graph holds any more."""
        kept = []
        for graphs, buffer, stream in self._outgrown:
            if any(map(_lives, graphs)):
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

    def let_go(self) -> None:
        """Free the buffers that no graph of others holds; no work may be in flight, and none may follow."""
        for key in set(self._buffers) - self._pinned:
            del self._buffers[key]
        self._outgrown.clear()

    def close(self) -> None:
        """Free everything; no work may be in flight."""
        self._buffers.clear()
        self._outgrown.clear()
        self._numbers.clear()
        self._recorded.clear()
