# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of what a product queues, as long as it and the memory that they name are there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ...errors import ClosedError
from .streams import current

__all__ = ["Recordings"]


class Recordings:
    """The graphs of one product. Local.

    Args:
        follow: queues what comes next on CuPy's current stream; see ``Session.follow_stream``.
        generation: changes when memory is replaced that graphs hold addresses of.
        prepare: is given the stream of a recording before it begins.
    """

    def __init__(
        self,
        follow: Callable[[], None],
        generation: Callable[[], Any],
        prepare: Callable[[Any], object] = lambda stream: None,  # noqa: ARG005
    ) -> None:
        self._follow, self._generation, self._prepare = follow, generation, prepare
        self._recorded: weakref.WeakSet[_Recorded] = weakref.WeakSet()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run once, record a second run, and return what replays it on CuPy's current stream.

        Collective where the run is.
        """
        import cupy

        run()  # what is done but once is done before recording
        stream = cupy.cuda.Stream(non_blocking=True)
        self._prepare(stream)
        with current(stream):
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
            try:
                run()
            finally:
                graph = stream.end_capture()
        self._follow()  # again, off the stream of the recording
        recorded = _Recorded(graph, self._generation())
        self._recorded.add(recorded)

        def replay() -> None:
            if recorded.graph is None:
                raise ClosedError("the plan of this graph is closed, or was prepared anew: make it again")
            if recorded.generation != self._generation():
                raise ClosedError("the workspace has been replaced since this graph was made: make it again")
            self._follow()
            recorded.graph.launch()

        return replay

    def close(self) -> None:
        """Destroy the graphs."""
        for recorded in self._recorded:
            recorded.graph = None


class _Recorded:
    """A CUDA graph, until its product is closed."""

    def __init__(self, graph: Any, generation: Any) -> None:
        self.graph, self.generation = graph, generation
