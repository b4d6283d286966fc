# SPDX-License-Identifier: Apache-2.0
"""CuPy's current CUDA stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["capture_of", "current", "external"]


@contextmanager
def current(stream: Any) -> Iterator[None]:
    """Make a stream CuPy's current one, and restore the previous one afterwards. Local.

    CuPy's own ``with stream:`` restores the stream of the surrounding ``with`` block: a stream that the user chose with
    ``use()`` would be lost.
    """
    import cupy

    before = cupy.cuda.get_current_stream()
    stream.use()
    try:
        yield
    finally:
        before.use()


def capture_of(stream: Any) -> int:
    """Return the number of the capture that records a stream. Local."""
    from cuda.bindings import driver

    _, _, number, *_ = driver.cuStreamGetCaptureInfo(stream.ptr)
    return int(number)


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
