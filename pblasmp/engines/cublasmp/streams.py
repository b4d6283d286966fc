# SPDX-License-Identifier: Apache-2.0
"""Which CUDA stream is CuPy's current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["current", "external"]


@contextmanager
def current(stream: Any) -> Iterator[None]:
    """Make a stream CuPy's current one, and afterwards the one that was. Local.

    CuPy's own ``with stream:`` goes back to the stream of the ``with`` block around it: a stream that the user chose
    by ``use()`` would be forgotten.
    """
    import cupy

    before = cupy.cuda.get_current_stream()
    stream.use()
    try:
        yield
    finally:
        before.use()


def external(handle: int, device: int) -> Any:
    """Return another library's stream as CuPy's. Local."""
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Handle(handle))
    return cupy.cuda.ExternalStream(handle, device)  # before CuPy 14


class _Handle:
    """A CUDA stream as libraries show each other theirs."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle
