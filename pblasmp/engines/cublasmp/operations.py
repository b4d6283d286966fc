# SPDX-License-Identifier: Apache-2.0
"""The cublasmp engine's lane: cuBLAS on CuPy's current stream, NCCL's messages on a stream of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...bindings import Operation
from ...dtypes import DTYPES, accumulation_dtype, is_float8
from ...errors import LayoutError
from ..base import Workspace
from ..lane import blas_operand
from .types import DATA_TYPES, compute_type

__all__ = ["CublasmpLane"]

Array = Any

_INT_MAX = 2**31 - 1
_DEFAULT_ALGO = -1  # CUBLAS_GEMM_DEFAULT


class CublasmpLane:
    """See ``engines.lane.Lane``. Local to make.

    Args:
        rank, size: of the context.
        nccl: nccl4py's communicator of all ranks.
        follow_stream: makes CuPy's current stream wait for what was queued on another one before.
    """

    stores_float8 = False
    panel_flops = 1e11  # 0.15 ms of an H200 in 16 bits, as long as the host takes to queue a panel

    def __init__(self, rank: int, size: int, nccl: Any, follow_stream: Callable[[], None]) -> None:
        import cupy
        import nccl.core as nccl_core
        from cupy_backends.cuda.libs import cublas

        self.rank, self.size, self._follow_stream = rank, size, follow_stream
        self.xp, self._cublas, self._nccl, self._nccl_core = cupy, cublas, nccl, nccl_core
        self._handle = cupy.cuda.device.get_cublas_handle()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._buffers: dict[str, Array] = {}
        self._values: dict[np.dtype, Array] = {}  # of every byte as an 8-bit float, by type

    def workspace(self, nbytes: int) -> Workspace:
        """Return ``nbytes`` on the device. Local."""
        return Workspace(nbytes, 0)

    def scratch(self, name: str, shape: tuple[int, int], dtype: np.dtype) -> Array:
        """Return a C-ordered array in the buffer ``name``, which all products share. Local."""
        self._follow_stream()
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < nbytes:
            self._buffers[name] = buffer = self.xp.empty(max(1, nbytes), np.uint8)
        return buffer[:nbytes].view(dtype).reshape(shape)

    def multiplies(self, dtype: np.dtype) -> np.dtype:
        """Return ``dtype``, of 8-bit floats bfloat16: cuBLAS has them in another interface. Local."""
        return DTYPES["bfloat16"] if is_float8(dtype) else dtype

    def operand(self, array: Array, dtype: np.dtype, name: str = "") -> Array:
        """Return ``array``, or in the buffer ``name`` the values that its bytes stand for. Local."""
        wide = self.multiplies(dtype)
        if wide == dtype:
            return array
        if dtype not in self._values:
            bits = np.arange(256, dtype=np.uint8).view(dtype).astype(wide).view(np.uint16)
            self._values[dtype] = self.xp.asarray(bits)
        values = self.scratch(f"wide {name}", array.shape, wide)
        if array.size:
            self.xp.take(self._values[dtype], array, out=values.view(np.uint16))
        return values

    def carries(self, dtype: np.dtype, asked: np.dtype | None) -> np.dtype:
        """Return the type asked for, by default the result's. Local."""
        return asked or dtype

    def check(self, dtype: np.dtype, compute: str | None) -> None:
        """Raise UnsupportedError where there is no such way to sum. Local."""
        compute_type(dtype, compute)

    def gemm(
        self, alpha: complex, a: Array, b: Array, beta: complex, d: Array, compute: str | None = None
    ) -> None:
        """Queue ``d = alpha a b + beta d``. Local."""
        flag, ldd = blas_operand(d)
        if flag == "T":  # d is in C order: compute its transpose
            a, b, d = b.T, a.T, d.T
        (m, n), k = d.shape, a.shape[1]
        (trans_a, lda), (trans_b, ldb) = blas_operand(a), blas_operand(b)
        if max(m, n, k, lda, ldb, ldd) > _INT_MAX:
            raise LayoutError(
                f"a local product of {m} x {n} x {k} does not fit the 32-bit integers of cuBLAS"
            )
        kind, result = DATA_TYPES[a.dtype.name], DATA_TYPES[d.dtype.name]
        scalars = np.array([alpha, beta], dtype=accumulation_dtype(a.dtype))
        at = scalars.ctypes.data
        self._cublas.gemmEx(
            self._handle, int(Operation[trans_a]), int(Operation[trans_b]), m, n, k,
            at, a.data.ptr, int(kind), lda, b.data.ptr, int(kind), ldb,
            at + scalars.itemsize, d.data.ptr, int(result), ldd,
            int(compute_type(a.dtype, compute)), _DEFAULT_ALGO,
        )  # fmt: skip

    def start(self, sends: Sequence[tuple[Array, int]], receives: Sequence[tuple[Array, int]]) -> Any:
        """Queue messages, as one group, behind what CuPy's current stream has so far. Local."""
        event = self.xp.cuda.Event(disable_timing=True)
        event.record(self.xp.cuda.get_current_stream())
        self._stream.wait_event(event)
        address = self._stream.ptr
        self._nccl_core.group_start()
        try:
            for array, rank in sends:
                self._nccl.send(_bytes(array), rank, stream=address)
            for array, rank in receives:
                self._nccl.recv(_bytes(array), rank, stream=address)
        finally:
            self._nccl_core.group_end()
        done = self.xp.cuda.Event(disable_timing=True)
        done.record(self._stream)
        return done

    def wait(self, messages: Any) -> None:
        """Let CuPy's current stream wait for them. Local."""
        self.xp.cuda.get_current_stream().wait_event(messages)


def _bytes(array: Array) -> Array:
    """Return the bytes of a contiguous array: NCCL knows them whatever its type is."""
    return array.reshape(-1).view(np.uint8)
