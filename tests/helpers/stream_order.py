# SPDX-License-Identifier: Apache-2.0
"""Whether all that uses the engine's shared memory comes one after the other, on whatever streams it is queued.

Vector clocks over the events of a played GPU: two uses that no chain of events orders are a fault. What a graph used
while it was recorded, it uses at every launch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from pblasmp.engines.gpu.cublasmp.prepared_call import PreparedCall
from pblasmp.engines.gpu.gpu_operations import GpuOperations
from pblasmp.engines.gpu.gpu_transport import GpuTransport
from pblasmp.engines.gpu.kernels.lt import LocalProducts
from pblasmp.engines.gpu.runtime.gpu import Gpu
from pblasmp.engines.gpu.runtime.graphs import Recordings
from tests.helpers.fakegpu import FakeGpu

Clock = dict[int, int]


class StreamOrder:
    """Watches a played GPU.

    Attributes:
        faults: uses that were not in order.
        uses: how many there were.
    """

    def __init__(self, gpu: FakeGpu, cupy: Any, patch: pytest.MonkeyPatch) -> None:
        self._gpu = gpu
        self._clocks: dict[int, Clock] = defaultdict(lambda: defaultdict(int))
        self._last: dict[Any, tuple[int, int]] = {}
        self._recorded: set[Any] = set()
        self.faults: list[str] = []
        self.uses = 0
        watched: list[tuple[type, str, Callable[..., Any]]] = [
            (cupy.cuda.Event, "record", self._record),
            (cupy.cuda.Stream, "wait_event", self._wait),
            (GpuTransport, "start_exchange", lambda *_, **__: self.use("boxes")),
            (GpuOperations, "bytes", lambda _, name, *__, **___: self.use(name)),
            (GpuOperations, "add", lambda _, d, *__, **___: self.use(int(d.data.ptr))),
            (Gpu, "begin", lambda *_, **__: self.use("flags")),
            (PreparedCall, "_make_results", lambda *_, **__: self.use("workspace")),
            (LocalProducts, "multiply", self._multiplied),
        ]
        for kind, name, then in watched:
            patch.setattr(kind, name, self._followed(getattr(kind, name), then))
        patch.setattr(Recordings, "record", self._recording(Recordings.record))

    @staticmethod
    def _followed(real: Callable[..., Any], then: Callable[..., None]) -> Callable[..., Any]:
        def both(*arguments: Any, **named: Any) -> Any:
            found = real(*arguments, **named)
            then(*arguments, **named)
            return found

        return both

    def _recording(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def graph(*arguments: Any, **named: Any) -> Any:
            self._recorded.clear()
            recorded = real(*arguments, **named)
            uses, launch = set(self._recorded), recorded.graph.launch

            def launched(*on: Any) -> None:
                launch(*on)
                for what in uses:
                    self.use(what)

            recorded.graph.launch = launched
            return recorded

        return graph

    def _multiplied(self, _: Any, stream: int, *__: Any, lane: str = "main", **___: Any) -> None:
        self.use(f"workspace of {lane}", stream)

    def _record(self, event: Any, stream: Any) -> None:
        event.clock = dict(self._clocks[stream.ptr])

    def _wait(self, stream: Any, event: Any) -> None:
        clock = self._clocks[stream.ptr]
        for other, count in getattr(event, "clock", {}).items():
            clock[other] = max(clock[other], count)

    def use(self, what: Any, stream: int | None = None) -> None:
        """Note a use of something on a stream, by default the current one."""
        here = self._gpu.stream if stream is None else stream
        if self._gpu.capturing:  # all streams that take part
            self._recorded.add(what)
            return
        self.uses += 1
        clock = self._clocks[here]
        clock[here] += 1
        stream, count = self._last.get(what, (here, 0))
        if clock[stream] < count:
            self.faults.append(f"{what!r} is used on stream {here}, not behind its use on stream {stream}")
        self._last[what] = here, clock[here]
