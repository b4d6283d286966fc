# SPDX-License-Identifier: Apache-2.0
"""Graphs in pieces, between which NCCL's calls are queued each time."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from pblasmp.engines.gpu.runtime.graphs import Recordings
from pblasmp.engines.gpu.runtime.nccl import NcclCalls
from pblasmp.errors import StatusError


class Gpu:
    """CuPy and NCCL on a GPU: ``queued`` has what its streams have, each with its stream."""

    def __init__(self) -> None:
        self.queued: list[tuple[Any, ...]] = []
        self.captured: list[tuple[Any, ...]] | None = None
        self.user, self.recording = (SimpleNamespace(ptr=ptr) for ptr in (5, 7))
        self.current = self.user
        for stream in (self.user, self.recording):
            stream.use = lambda stream=stream: setattr(self, "current", stream)
        self.recording.begin_capture, self.recording.end_capture = self._begin, self._end
        self.cuda = SimpleNamespace(get_current_stream=lambda: self.current)

    def _begin(self, mode: str) -> None:
        assert (self.captured, mode) == (None, "relaxed")
        self.captured = []

    def _end(self) -> Any:
        captured, self.captured = self.captured, None
        assert captured is not None
        return SimpleNamespace(
            launch=lambda: self.queued.extend((what, self.current.ptr) for what, _ in captured)
        )

    def kernel(self, name: str) -> None:
        (self.queued if self.captured is None else self.captured).append((name, self.current.ptr))

    def __getattr__(self, name: str) -> Any:  # NCCL's functions
        def call(*args: Any) -> None:
            assert self.captured is None, "a graph has NCCL's work"
            self.queued.append((name, *args))

        return call


@contextmanager
def recordings(gpu: Gpu) -> Any:
    arena = SimpleNamespace(generation=0, noting=lambda: nullcontext(set()), keep_for=lambda *_: None)
    runtime: Any = SimpleNamespace(
        arena=arena, recording=gpu.recording, relaxed="relaxed", turns=SimpleNamespace(taken=0),
        follow_stream=lambda: None, stream=gpu.user,
    )  # fmt: skip
    calls = NcclCalls(gpu)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", gpu)
        yield calls, Recordings(runtime, calls, pay=False)


def test_a_graph_in_pieces_queues_what_was_queued_in_the_same_order():
    gpu = Gpu()
    with recordings(gpu) as (calls, store):

        def queue() -> None:
            at = gpu.current.ptr
            gpu.kernel("pack")
            calls.group_start()
            try:
                for rank in range(2):
                    calls.broadcast("of", "to", rank, at)
            finally:
                calls.group_end()
            gpu.kernel("multiply")
            calls.all_gather("sums", at)
            gpu.kernel("add")

        queue()
        once, gpu.queued = gpu.queued, []
        graph = store.record(queue, apart=True)
        assert gpu.queued == once[:-1]  # the next run has begun
        graph.replay()
        assert gpu.queued == once
        gpu.queued = []
        assert [what[0] for what in once] == [
            *("pack", "group_start", "broadcast", "broadcast", "group_end", "multiply", "all_gather", "add")
        ]
        for _ in range(2):
            graph.replay()
            assert gpu.queued == once
            gpu.queued = []


def test_messages_beside_the_recorded_stream_cannot_be_cut_out():
    gpu = Gpu()
    with recordings(gpu) as (calls, store):
        with pytest.raises(StatusError, match="other than the one being recorded"):
            store.record(lambda: calls.all_gather("sums", gpu.user.ptr), apart=True)
        calls.all_gather("sums", gpu.user.ptr)
        assert gpu.queued == [("all_gather", "sums", gpu.user.ptr)]  # nothing is noted any more


def test_an_error_of_nccl_while_a_graph_is_recorded_is_raised():
    gpu = Gpu()

    def fails(*_: Any) -> None:
        raise RuntimeError("no route")

    gpu.all_reduce = fails  # type: ignore[attr-defined]
    with recordings(gpu) as (calls, store):
        with pytest.raises(RuntimeError, match="no route"):
            store.record(lambda: calls.all_reduce("sums", gpu.current.ptr), apart=True)
        assert gpu.captured is None
        assert gpu.current is gpu.user
