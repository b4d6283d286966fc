# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels that are compiled when they are first needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...direct.addresses import host_address

__all__ = ["CompiledKernels", "Repeated"]


class CompiledKernels:
    """Kernels, compiled for the current GPU when they are needed. Local.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._functions: dict[Any, Any] = {}

    def _compiled(self, name: str, code: str, *, room: int = 0, meets: bool = False, **macros: Any) -> Any:
        """Return a kernel, with so many bytes of shared memory that a launch may ask for.

        If its blocks meet, it is launched as a cooperative one: none begins before there is room for all, and the
        driver refuses more than there can be.
        """
        key = (name, *sorted(macros.items()))
        if key not in self._functions:
            options = ("-std=c++17", *(f"-D{macro}={value}" for macro, value in macros.items()))
            module = self._cupy.RawModule(code=code, options=options, enable_cooperative_groups=meets)
            kernel = module.get_function(name)
            if room:
                kernel.max_dynamic_shared_size_bytes = room
            self._functions[key] = kernel
        return self._functions[key]


class Repeated:
    """A kernel whose blocks meet, and which is queued again and again, with other numbers each time. Local.

    The first time CuPy compiles it and reads the numbers; from then on the driver gets their addresses, which costs the
    host much less.

    Args:
        kernel: CuPy's.
        blocks, threads: how many.
        kinds: NumPy's types of its arguments, addresses and integers.
    """

    def __init__(self, kernel: Any, blocks: int, threads: int, kinds: Sequence[Any]) -> None:
        self._kernel, self._kinds = kernel, tuple(kinds)
        self._shape = blocks, 1, 1, threads, 1, 1
        # a shorter integer is at the beginning of its word
        self._words = np.zeros(len(self._kinds), np.int64)
        self._places = host_address(self._words) + np.arange(len(self._kinds), dtype=np.uint64) * 8
        self._place = host_address(self._places)
        self._queue: Any = None

    def __call__(self, stream: Any, numbers: Sequence[int], shared: int = 0) -> None:
        """Queue it on a stream of CuPy, with so many bytes of shared memory. Local."""
        if self._queue is None:
            from cupy_backends.cuda.api import driver

            arguments = tuple(kind(number) for kind, number in zip(self._kinds, numbers, strict=True))
            (blocks, *_), threads = self._shape, self._shape[3]
            self._kernel((blocks,), (threads,), arguments, stream=stream, shared_mem=shared)
            self._queue, self._at = driver.launchCooperativeKernel, int(self._kernel.kernel.ptr)
            return
        self._words[:] = numbers
        self._queue(self._at, *self._shape, shared, stream.ptr, self._place)
