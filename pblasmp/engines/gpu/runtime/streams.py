# SPDX-License-Identifier: Apache-2.0
"""CuPy's current CUDA stream."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

__all__ = ["capture_of", "current", "external"]


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
