# SPDX-License-Identifier: Apache-2.0
"""Where gpu_matmul.py's clock ticks: a GPU, or the host in a rehearsal without one."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from pblasmp.bindings import version_text
from pblasmp.engines.gpu.runtime.nccl import nccl_version
from pblasmp.tuning.timing import device_seconds, host_seconds

_PERIOD = 4194301  # numbers until they repeat; a prime, so that rows and blocks never look alike
_PACKAGES = (
    *("cupy-cuda13x", "cupy-cuda12x", "torch", "nvmath-python", "nccl4py", "mpi4py", "numpy"),
    *("nvidia-cublas", "nvidia-cublasmp-cu13", "nvidia-nccl-cu13"),
)


@lru_cache(8)
def bits(dtype: np.dtype, seed: int | None, count: int) -> np.ndarray:
    """Return normally distributed numbers of ``dtype``, ones without a seed, as integers of its size."""
    values = (
        np.ones(count) if seed is None else np.random.default_rng(seed).standard_normal(count, np.float32)
    )
    return values.astype(dtype).view(f"i{dtype.itemsize}")


def fill(array: Any, seed: int | None, to_device: Callable[[np.ndarray], Any]) -> None:
    """Write random numbers into a contiguous local array, ones without a seed."""
    if array.size == 0:
        return
    flat = array.view(f"i{array.itemsize}").reshape(-1)
    base = to_device(bits(array.dtype, seed, min(_PERIOD, array.size)))
    for start in range(0, array.size, base.size):
        part = flat[start : start + base.size]
        part[...] = base[: part.size]


class Gpu:
    """The GPU of this rank; work is queued on one stream, which becomes CuPy's current one.

    A new stream by default: on CUDA's default stream, blocking streams inside a library wait for each other.
    """

    def __init__(self, ctx: Any, *, null_stream: bool = False) -> None:
        import cupy

        self.cupy, self.index = cupy, ctx.engine.device.index
        self.stream = cupy.cuda.Stream.null if null_stream else cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self.stream_address = int(self.stream.ptr)

    def fill(self, array: Any, seed: int | None) -> None:
        """Write random numbers, ones without a seed."""
        fill(array, seed, self.cupy.asarray)

    def poison(self, array: Any) -> None:
        """Write NaN."""
        array.view("u1")[...] = 0xFF

    def wait(self) -> None:
        """Wait until the GPU is idle."""
        self.cupy.cuda.runtime.deviceSynchronize()

    def samples(self, comm: Any, run: Callable[[], Any], count: int) -> list[float]:
        """Return the times of ``count`` runs by the device's events, in microseconds. Collective over comm."""
        times = []
        for _ in range(count):
            self.wait()
            comm.Barrier()
            times.append(device_seconds(run, self.stream) * 1e6)
        return times


class Rehearsal:
    """The host in place of a GPU: the same steps, and times that mean nothing."""

    index = stream_address = 0

    def fill(self, array: Any, seed: int | None) -> None:
        """Write random numbers, ones without a seed."""
        fill(array, seed, np.asarray)

    def poison(self, array: Any) -> None:
        """Write NaN."""
        array.view("u1")[...] = 0xFF

    def wait(self) -> None:
        """Nothing is in flight."""

    def samples(self, comm: Any, run: Callable[[], Any], count: int) -> list[float]:
        """Return the times of ``count`` runs in microseconds. Collective over comm."""
        times = []
        for _ in range(count):
            comm.Barrier()
            times.append(host_seconds(run) * 1e6)
        return times


def c_call(plan: Any) -> Callable[[], int]:
    """Return the bare call of cublasMpMatmul that a plan makes, its ctypes arguments built once. Run the plan first."""
    product = plan._product
    function = product._lib.raw("cublasMpMatmul")
    device, host = product._needs
    shared = product._workspace
    values = (*product._arguments, shared.device, device, shared.host, host)
    prebuilt = [kind.from_param(value) for kind, value in zip(function.argtypes, values, strict=True)]
    function.argtypes = None  # nothing is converted any more
    status = function(*prebuilt)
    if status:
        raise RuntimeError(f"cublasMpMatmul returned {status}")
    return lambda: function(*prebuilt)


def gpu_machine(ctx: Any) -> dict[str, Any]:
    """Return the GPU, how many ranks share it, the processor and the hosts of a context's ranks. Local."""
    import cupy

    from benchmarks.ranks import machine

    device = ctx.engine.device
    facts = {"gpu": cupy.cuda.runtime.getDeviceProperties(device.index)["name"].decode()}
    shared = {"shared": device.ranks} if device.ranks > 1 else {}
    return facts | machine() | {"hosts": len(ctx.engine.runtime.nodes)} | shared


def gpu_versions(ctx: Any) -> dict[str, str]:
    """Return the versions that times on GPUs depend on. Local."""
    import cupy

    number = cupy.cuda.runtime.runtimeGetVersion()
    facts = {
        "cuBLASMp": version_text(ctx.engine.version),
        "NCCL": version_text(nccl_version()),
        "CUDA": f"{number // 1000}.{number % 1000 // 10}",
    }
    try:
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        done = subprocess.run(ask, check=True, capture_output=True, text=True, timeout=20)
        facts["driver"] = done.stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        facts["driver"] = f"unknown ({type(error).__name__})"
    packages = {name: found for name in _PACKAGES if (found := _version(name))}
    return {"Python": platform.python_version()} | facts | packages


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
