# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the work that a product queues, valid as long as the product and the memory that they use."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from ....errors import ClosedError
from ...request import Operands
from .streams import current

__all__ = ["Recordings"]


class _Session(Protocol):
    @property
    def recording(self) -> Any: ...

    @property
    def relaxed(self) -> Any: ...

    @property
    def capturing(self) -> bool: ...

    def follow_stream(self) -> None: ...


class Recordings:
    """The graphs of one product. Local.

    Args:
        session: the session whose streams are used, and recorded on.
        generation: changes when memory whose addresses graphs hold is replaced.
    """

    def __init__(self, session: _Session, generation: Callable[[], Any]) -> None:
        self._session, self._generation = session, generation
        self._recorded: weakref.WeakSet[_Recorded] = weakref.WeakSet()
        self._last: weakref.ref[Operands] | None = None  # of the previous run
        self._own: _Recorded | None = None  # the graph for these operands

    def run(self, operands: Operands, queue: Callable[[], None], *, allocates: bool = False) -> None:
        """Queue a product; from the second run on the same operands, by replaying its graph. Local.

        Args:
            operands: the operands of the run.
            queue: queues the product; it is also called while another graph is being recorded.
            allocates: ``queue`` makes arrays, whose memory must last as long as the graph.
        """
        self._session.follow_stream()
        if self._session.capturing:
            queue()
            return
        if self._last is None or self._last() is not operands:
            self._own, self._last = None, weakref.ref(operands, self._forget)
            queue()
            return
        if self._own is None or self._own.generation != self._generation():
            self._own = self._graph(queue, allocates=allocates)
        self._own.graph.launch()

    def _forget(self, reference: weakref.ref[Operands]) -> None:
        if self._last is reference:
            self._last = self._own = None

    def record(self, queue: Callable[[], None], *, allocates: bool = False) -> Callable[[], None]:
        """Record a product that has run once, and return what replays it on CuPy's current stream. Local.

        Args:
            queue: queues the product.
            allocates: ``queue`` makes arrays, whose memory must last as long as the graph.
        """
        recorded = self._graph(queue, allocates=allocates)

        def replay() -> None:
            if recorded.graph is None:
                raise ClosedError("the plan of this graph is closed, or was prepared anew: make it again")
            if recorded.generation != self._generation():
                raise ClosedError("the workspace has been replaced since this graph was made: make it again")
            self._session.follow_stream()
            recorded.graph.launch()

        return replay

    def _graph(self, queue: Callable[[], None], *, allocates: bool = False) -> _Recorded:
        session, generation = self._session, self._generation()
        stream, pool = session.recording, None
        with ExitStack() as stack:
            stack.enter_context(current(stream))
            if allocates:
                import cupy

                pool = cupy.cuda.MemoryPool()
                stack.enter_context(cupy.cuda.using_allocator(pool.malloc))
            stream.begin_capture(session.relaxed)
            try:
                queue()
            finally:
                graph = stream.end_capture()
        session.follow_stream()  # back from the stream of the recording
        recorded = _Recorded(graph, generation, pool)
        self._recorded.add(recorded)
        return recorded

    def close(self) -> None:
        """Destroy the graphs: NCCL destroys no communicator while a graph holds work on it."""
        for recorded in self._recorded:
            recorded.graph = recorded.pool = None
        self._own = self._last = None


class _Recorded:
    """A CUDA graph, until its product is closed, and the memory that was made for it."""

    def __init__(self, graph: Any, generation: Any, pool: Any) -> None:
        self.graph, self.generation, self.pool = graph, generation, pool
