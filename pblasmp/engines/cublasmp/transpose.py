# SPDX-License-Identifier: Apache-2.0
"""An operand transposed by cublasMpGeadd before the product, where cuBLASMp cannot multiply it as it lies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...bindings import Operation
from ...layout import MatrixDescriptor
from ...memory import SharedWorkspace
from .types import scale_dtype

if TYPE_CHECKING:
    from .engine import CublasmpEngine

__all__ = ["Transposed"]


class Transposed:
    """op(X) as a matrix of its own, on X's grid. Making one is local; running it is collective over the grid.

    Args:
        engine: where.
        x: an F-ordered matrix.
        op: "T" or "C".

    Attributes:
        descriptor: how op(X) lies, F-ordered.
        array: its local array.
        source: address of X's local array, to be set before each run.
    """

    def __init__(self, engine: CublasmpEngine, x: MatrixDescriptor, op: str) -> None:
        self._engine, self._x, self._op = engine, x, op
        self.descriptor = MatrixDescriptor(x.shape[::-1], x.block[::-1], x.grid, dtype=x.dtype, order="F")
        shape, lld = self.descriptor.local_shape(engine.rank), self.descriptor.lld(engine.rank)
        self.array = engine.empty(shape, x.dtype, "F", lld)
        self.source = ctypes.c_void_p()
        self._scalars = np.array([1, 0], dtype=scale_dtype(x.dtype))

    def query(self, source: int, result: int) -> tuple[int, int]:
        """Return the workspace it needs, in bytes on the device and on the host, given both descriptors. Local."""
        one = self._scalars.ctypes.data
        rows, cols = self.descriptor.shape
        target = self._engine.address(self.array)
        self._arguments: tuple[Any, ...] = (
            self._engine.handle, Operation[self._op], rows, cols, one, self.source, 1, 1, source,
            one + self._scalars.itemsize, target, 1, 1, result,
        )  # fmt: skip
        device, host = ctypes.c_size_t(), ctypes.c_size_t()
        self._engine.library.cublasMpGeadd_bufferSize(
            *self._arguments, ctypes.byref(device), ctypes.byref(host)
        )
        self._sizes = device.value, host.value
        return self._sizes

    def prepare(self, workspace: SharedWorkspace) -> Callable[[], None]:
        """Return the call. Local."""
        device, host = self._sizes
        return self._engine.library.prepare(
            "cublasMpGeadd", *self._arguments, workspace.device, device, workspace.host, host
        )
