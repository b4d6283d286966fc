# SPDX-License-Identifier: Apache-2.0
"""Where sequences run: CPU ranks, real GPUs, and simulated ones. Streams, sleeping kernels, thresholds, memory held."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar
from unittest import mock

import numpy as np

from tests.helpers import inside
from tests.helpers.process import held, resident_kib

STREAMS = 3  # the first is for matrices, the others are for plans

_SPIN = r"""
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < nanoseconds);
}
"""


class Host:
    """CPU ranks: calls return when they are done, so there are no streams, and a rank sleeps on the host.

    Attributes:
        engine: its name.
        graphs: whether there are CUDA graphs.
        excess: bytes that no machine has, whatever it promises.
        large: bytes of the smallest large matrix: such matrices are copied and sent in several parts.
        flops: of the largest product.
    """

    engine: ClassVar[str] = "host"
    graphs = False
    excess = 1 << 53
    large = 1 << 20
    flops = 2e8

    def thresholds(self) -> AbstractContextManager[Any]:
        """Within, large matrices are sent in many messages. Local."""
        from pblasmp.comm import exchange

        return mock.patch.object(exchange, "MESSAGE_BYTES", self.large // 16)

    def stream(self, number: int) -> AbstractContextManager[Any]:
        """Queue on a stream what is called within."""
        return nullcontext()

    def follow(self, number: int, earlier: int) -> None:
        """Let a stream wait for what is queued on another."""

    def sleep(self, seconds: float) -> None:
        """Let the current stream sleep."""
        time.sleep(seconds)

    def trim(self) -> None:
        """Give back what is free."""
        ctypes.CDLL(None).malloc_trim(0)

    def held(self) -> dict[str, int]:
        """Return what this process holds of the machine."""
        descriptors, threads = held()
        threads -= sum(
            thread.name.startswith("asyncio_") for thread in threading.enumerate()
        )  # zarr's, on demand
        return {"descriptors": descriptors, "threads": threads, "resident KiB": resident_kib()}


class Gpu(Host):
    """A rank with a GPU: streams that do not wait for CuPy's default one, and a kernel that sleeps.

    Args:
        number: of the rank on its node, whose GPU becomes the current one, also while there is no context.
    """

    engine = "cublasmp"
    graphs = True
    excess = 1 << 44
    large = 50 << 20  # more than three pinned buffers
    flops = 5e9

    def __init__(self, number: int | None) -> None:
        import cupy

        self._cupy = cupy
        if number is not None:
            cupy.cuda.Device(number % cupy.cuda.runtime.getDeviceCount()).use()
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(STREAMS)]
        self._spin = self.kernel()
        self.sleep(0)  # loads it, while nothing else runs

    def kernel(self) -> Any:
        """Return the kernel that sleeps for some nanoseconds."""
        return self._cupy.RawKernel(_SPIN, "spin")

    def thresholds(self) -> AbstractContextManager[Any]:
        """Those of the library. Local."""
        return nullcontext()

    def stream(self, number: int) -> AbstractContextManager[Any]:
        """Queue on a stream what is called within."""
        stream: AbstractContextManager[Any] = self._streams[number]
        return stream

    def follow(self, number: int, earlier: int) -> None:
        """Let a stream wait for what is queued on another."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self._streams[earlier])
        self._streams[number].wait_event(event)

    def sleep(self, seconds: float) -> None:
        """Queue the kernel on the current stream."""
        self._spin((1,), (1,), (np.uint64(seconds * 1e9),))

    def trim(self) -> None:
        """Give back what is free."""
        super().trim()
        self._cupy.get_default_memory_pool().free_all_blocks()

    def held(self) -> dict[str, int]:
        """Return what this process holds of the machine, and what is taken of the GPU, which ranks may share."""
        pool = self._cupy.get_default_memory_pool()
        free, total = self._cupy.cuda.runtime.memGetInfo()
        return {**super().held(), "CuPy KiB": pool.used_bytes() >> 10, "GPU KiB": (total - free) >> 10}


class Simulated(Gpu):
    """A rank with a simulated GPU, whose kernels and graphs do nothing, with small pinned buffers.

    Args:
        library: the recorder that plays cuBLASMp (``helpers.machine``).
    """

    graphs = False
    excess = Host.excess  # its memory is the host's
    large = 200 << 10
    flops = 2e7

    def __init__(self, library: Any) -> None:
        super().__init__(None)
        self._library = library

    def trim(self) -> None:
        """Forget what was called."""
        super().trim()
        self._library.clear()
        for record in (self._library.gpu.events, self._library.gpu.copies, self._library.gpu.allocations):
            record.clear()

    def kernel(self) -> Any:
        """Return nothing that sleeps."""
        return lambda *_: None

    @contextlib.contextmanager
    def thresholds(self) -> Iterator[None]:  # type: ignore[override]
        """Within, what is copied between host and GPU goes through buffers that are small. Local."""
        from pblasmp.engines.gpu.runtime import host_copies

        with (
            mock.patch.object(host_copies, "CHUNK", self.large // 4),
            mock.patch.object(*inside.WORTH_PINNING, self.large // 64),
        ):
            yield


class Away(Simulated):
    """A rank whose user has made another GPU the current one, in every step."""

    other: ClassVar[int] = 7  # which no rank has

    @contextlib.contextmanager
    def stream(self, number: int) -> Iterator[None]:  # type: ignore[override]
        """Make a step: all work of the package belongs on its own GPU, and the other one stays the current one."""
        gpu = self._library.gpu
        if gpu.home is not None:  # a step's own stream
            yield
            return
        with super().stream(number):
            gpu.home, gpu.current = gpu.current, self.other
            try:
                yield
            finally:
                if gpu.current != self.other:
                    gpu.faults.append(f"GPU {gpu.current} is left the current one")
                gpu.home, gpu.current = None, gpu.home
