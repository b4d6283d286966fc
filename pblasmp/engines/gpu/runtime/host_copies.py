# SPDX-License-Identifier: Apache-2.0
"""Copies between arrays on the host and on a GPU, through pinned memory.

A GPU reads and writes only pinned memory at the speed of its link. So values go chunk by chunk through a few pinned
buffers: threads copy one while the link carries another. No memory beyond the buffers is needed on either side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ....resources import machine_cores, usable_cores
from ..kernels.views import LONGEST_PITCH

Array = Any

CHUNK = 16 << 20  # bytes
_BUFFERS = 3
_THREADS = 8  # one thread copies 10 GB/s, a link carries 50
_WORTH = 1 << 20  # bytes from which on this is faster than CuPy's copy


class HostCopies:
    """The pinned buffers of one GPU, made when they are first needed. Local.

    Args:
        ranks: how many ranks share the cores of this node.
        wait: waits for an event; by default the event's own method.
    """

    def __init__(self, cupy: Any, ranks: int = 1, wait: Callable[[Any], None] | None = None) -> None:
        self._cupy = cupy
        self._wait = wait or (lambda event: event.synchronize())
        self._threads = max(1, min(_THREADS, usable_cores(), machine_cores() // max(1, ranks)))
        self._pool: ThreadPoolExecutor | None = None
        self._buffers: list[tuple[Any, NDArray[Any], Any]] = []  # memory, its bytes, when it is free

    def takes(self, array: Array) -> bool:
        """Return whether an array on the GPU is large enough, and its lines fit into a buffer. Local."""
        lines = _lines(array)
        fits: bool = lines.strides[1] == array.itemsize and lines.shape[1] * array.itemsize <= CHUNK
        return bool(array.nbytes >= _WORTH and fits)

    def write(self, array: Array, values: NDArray[Any]) -> None:
        """Queue the copy of values on the host into an array on the GPU, converting their type. Local.

        ``values`` have been read when this returns.
        """
        lines, given = _lines(array), values if _is_by_rows(array) else values.T
        for i, (start, stop) in enumerate(self._chunks(lines)):
            memory, raw, free = self._buffer(i)
            self._wait(free)
            chunk = _as_lines(raw, stop - start, lines)
            self._copy(chunk, given[start:stop])
            self._carry(lines, start, stop, memory, to_device=True)
            free.record(self._cupy.cuda.get_current_stream())

    def read(self, array: Array, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the values of an array on the GPU, in its memory order, or ``out`` with them. Local."""
        lines = _lines(array)
        order: Literal["C", "F"] = "C" if _is_by_rows(array) else "F"
        whole = np.empty(array.shape, array.dtype, order) if out is None else out
        found = whole if order == "C" else whole.T
        waiting: list[tuple[int, int, NDArray[Any], Any]] = []
        for i, (start, stop) in enumerate(self._chunks(lines)):
            if len(waiting) == _BUFFERS:
                self._take(found, *waiting.pop(0))
            memory, raw, free = self._buffer(i)
            self._wait(free)  # an earlier write, perhaps on another stream, has ended
            self._carry(lines, start, stop, memory, to_device=False)
            free.record(self._cupy.cuda.get_current_stream())
            waiting.append((start, stop, raw, free))
        for each in waiting:
            self._take(found, *each)
        return whole

    def _take(self, found: NDArray[Any], start: int, stop: int, raw: NDArray[Any], came: Any) -> None:
        self._wait(came)
        self._copy(found[start:stop], _as_lines(raw, stop - start, found))

    def _chunks(self, lines: Array) -> Iterator[tuple[int, int]]:
        """Yield the half-open ranges of lines that fit into a buffer."""
        count, width = lines.shape
        step = max(1, CHUNK // (width * lines.itemsize))
        for start in range(0, count, step):
            yield start, min(count, start + step)

    def _buffer(self, i: int) -> tuple[Any, NDArray[Any], Any]:
        """Return the buffer of chunk ``i``: consecutive chunks have different ones."""
        i %= _BUFFERS
        while len(self._buffers) <= i:
            memory = self._cupy.cuda.alloc_pinned_memory(CHUNK)
            event = self._cupy.cuda.Event(disable_timing=True)
            self._buffers.append((memory, np.frombuffer(memory, np.uint8, CHUNK), event))
        return self._buffers[i]

    def _copy(self, to: NDArray[Any], of: NDArray[Any]) -> None:
        """Copy lines on the host with several threads."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "pblasmp-copies")
        cuts = np.linspace(0, len(to), self._threads + 1).astype(int)
        parts = [slice(*cut) for cut in pairwise(cuts)]
        list(self._pool.map(lambda part: np.copyto(to[part], of[part], casting="unsafe"), parts))

    def _carry(self, lines: Array, start: int, stop: int, memory: Any, *, to_device: bool) -> None:
        """Queue the copy of some lines between the GPU and a pinned buffer."""
        runtime, width = self._cupy.cuda.runtime, lines.shape[1] * lines.itemsize
        there = int(lines.data.ptr) + start * lines.strides[0], lines.strides[0]
        here = int(memory.ptr), width
        to, of = (there, here) if to_device else (here, there)
        kind = runtime.memcpyHostToDevice if to_device else runtime.memcpyDeviceToHost
        stream = self._cupy.cuda.get_current_stream().ptr
        if lines.strides[0] <= LONGEST_PITCH:
            runtime.memcpy2DAsync(*to, *of, width, stop - start, kind, stream)
            return
        for i in range(stop - start):
            runtime.memcpyAsync(to[0] + i * to[1], of[0] + i * of[1], width, kind, stream)

    def close(self) -> None:
        """Free the buffers. Local."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._buffers = []


def _is_by_rows(array: Array) -> bool:
    return bool(array.strides[1] == array.itemsize)


def _lines(array: Array) -> Array:
    """Return an array, transposed if necessary, whose rows are contiguous."""
    return array if _is_by_rows(array) else array.T


def _as_lines(raw: NDArray[Any], count: int, like: Array) -> NDArray[Any]:
    """Return the beginning of a buffer as lines of an array."""
    width = like.shape[1]
    lines: NDArray[Any] = raw[: count * width * like.itemsize].view(like.dtype)
    return lines.reshape(count, width)
