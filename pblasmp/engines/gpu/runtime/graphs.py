# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the work that a product queues, valid as long as the product and the memory that they use.

Between nodes NCCL's calls stay outside: what a product queues is kept as graphs in turn with these.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

from .... import _core
from ...._core import Core, LaunchState
from ....errors import ClosedError, StatusError
from .arena import GraphMemory, current
from .gpu_runtime import GpuRuntime
from .nccl import Call, NcclCalls


class Recordings:
    """The graphs of one product. Local.

    Args:
        runtime: whose streams are used, and recorded on, and whose arena counts the replacements of memory whose
            addresses graphs hold.
        calls: NCCL's; None if none are queued that graphs must not have.
        pay: replaying one takes less time than queueing the same work again, also if NCCL's work is part of it.
    """

    def __init__(self, runtime: GpuRuntime, calls: NcclCalls | None = None, *, pay: bool = True) -> None:
        self._runtime, self._arena, self._calls, self.pay = runtime, runtime.arena, calls, pay
        # of ever new sizes most record nothing
        self._recorded: weakref.WeakSet[_Recorded] | None = None

    @property
    def capturing(self) -> bool:
        return self._runtime.capturing

    def follow_stream(self) -> None:
        self._runtime.follow_stream()

    def record(self, queue: Callable[[], None], *, allocates: bool = False, apart: bool = False) -> _Recorded:
        """Record a product that has run once. Local.

        Args:
            allocates: ``queue`` makes arrays, whose memory must last as long as the graph.
            apart: NCCL's calls, which are on the stream that is recorded, stay outside: the graph is in pieces, and all
                but the last one are queued meanwhile.
        """
        runtime, generation = self._runtime, self._arena.generation
        stream, memory = runtime.recording, None
        with ExitStack() as stack:
            stack.enter_context(current(stream))
            used = stack.enter_context(self._arena.noting())
            if allocates:
                import cupy

                memory = self._arena.graph_memory()
                stack.enter_context(cupy.cuda.using_allocator(memory.malloc))
            taken = runtime.turns.taken
            pieces = Pieces(stream, runtime.relaxed, runtime.stream) if apart else None
            if pieces is not None:
                assert self._calls is not None
                stack.enter_context(self._calls.noted(pieces.cut))
            stream.begin_capture(runtime.relaxed)
            try:
                queue()
            finally:
                graph = stream.end_capture()
            if pieces is not None:
                graph = pieces.ended(graph)
        runtime.follow_stream()  # back from the stream of the recording
        recorded = _Recorded(runtime, graph, generation, memory, takes_turn=runtime.turns.taken > taken)
        if self._recorded is None:
            self._recorded = weakref.WeakSet()
        self._recorded.add(recorded)
        self._arena.keep_for(recorded, used)
        return recorded

    def close(self) -> None:
        for recorded in self._recorded or ():
            recorded.drop()


class Pieces:
    """CUDA graphs, and NCCL's calls between them, that are queued in turn. Local.

    Recording is the first run, but for the last piece: what is behind a call of NCCL's follows from what that brings.

    Args:
        stream: that is being recorded.
        mode: of the capture.
        caller: CuPy's stream on which the work is queued.
    """

    def __init__(self, stream: Any, mode: Any, caller: Any) -> None:
        self._stream, self._mode, self._caller = stream, mode, caller
        self._parts: list[Any | list[Call]] = []
        self._done = 0  # parts that have been queued in this run

    def cut(self, calls: list[Call]) -> None:
        """End a piece before NCCL's calls, queue both, and begin the next piece.

        Raises:
            StatusError: they are on another stream, which has been forked from that of the piece.
        """
        at = int(self._stream.ptr)
        if any(args and args[-1] != at for _, args in calls):
            raise StatusError(
                "a graph in pieces: NCCL's work is on a stream other than the one being recorded"
            )
        self._parts += [self._stream.end_capture(), calls]
        try:
            with current(self._caller):
                self.launch()
            self._done = len(self._parts)
        finally:  # who records ends it, also after an error
            self._stream.begin_capture(self._mode)

    def ended(self, last: Any) -> Pieces:
        """Add the last piece, which the next launch queues alone; return itself."""
        self._parts.append(last)
        del self._stream, self._caller
        return self

    def launch(self) -> None:
        """Queue what has not been queued in this run on CuPy's current stream."""
        import cupy

        stream = int(cupy.cuda.get_current_stream().ptr)
        for part in self._parts[self._done :]:
            if not isinstance(part, list):
                part.launch()
                continue
            for function, args in part:
                function(*args[:-1], *([stream] if args else []))
        self._done = 0


class _Recorded:
    """A CUDA graph, until its product is closed, and the memory that it shares with others."""

    def __init__(
        self,
        runtime: GpuRuntime,
        graph: Any,
        generation: object,
        memory: GraphMemory | None,
        *,
        takes_turn: bool,
    ) -> None:
        self._runtime, self.graph, self.generation, self.memory = runtime, graph, generation, memory
        self._takes_turn = takes_turn
        core = _core.load() if hasattr(graph, "graphExec") else None
        self._again = None if core is None else Relaunch(graph, core)

    def drop(self) -> None:
        """Destroy it. Local."""
        self._again = self.graph = self.memory = None

    @property
    def current(self) -> bool:
        return self.graph is not None and self.generation == self._runtime.arena.generation

    def at_once(self, stream: int | None) -> Relaunch | None:
        runtime = self._runtime
        if stream is None:
            stream = int(runtime.cupy.cuda.get_current_stream().ptr)
        if not self.current or runtime.stream.ptr != stream:
            return None
        if not runtime.turns.nothing_to_order(runtime, takes=self._takes_turn):
            return None
        again = self._again
        return again if again is None or again.at == stream else again.on(stream)

    def launch(self) -> None:
        if self._takes_turn:
            self._runtime.take_turn()
        self.graph.launch()

    def replay(self) -> None:
        if self.graph is None:
            raise ClosedError("the plan of this graph is closed, or was prepared anew: make it again")
        if not self.current:
            raise ClosedError("the workspace has been replaced since this graph was made: make it again")
        self._runtime.follow_stream()
        self.launch()


class Relaunch:
    """A recorded graph, to be queued any number of times while it exists. Local.

    Attributes:
        core, launch, stream: as in ``comm.Ready``.
        at: the address of the stream.

    Raises:
        StatusError: the driver has no current context.
    """

    __slots__ = ("_state", "at", "core", "launch", "stream")

    def __init__(self, graph: Any, core: Core) -> None:
        self.core = core
        context, driver = ctypes.c_void_p(), _driver()
        self.check(driver.cuCtxGetCurrent(ctypes.byref(context)))
        functions = (
            ctypes.cast(function, ctypes.c_void_p).value
            for function in (driver.cuCtxGetCurrent, driver.cuStreamIsCapturing, driver.cuGraphLaunch)
        )
        self._state = LaunchState(*functions, context.value, graph.graphExec)
        self.launch = ctypes.c_void_p(ctypes.addressof(self._state))
        self.on(0)

    def on(self, stream: int) -> Relaunch:
        """Let it be queued on a stream, by its address; return it. Local."""
        self.at, self.stream = stream, ctypes.c_void_p(stream)
        return self

    def check(self, failed: int) -> None:
        """Raise StatusError for an error of the driver, by its number. Local."""
        if failed:
            raise StatusError(f"CUDA driver: error {failed}")


@cache
def _driver() -> Any:
    """Return CUDA's driver, which is loaded already."""
    return ctypes.CDLL("libcuda.so.1")
