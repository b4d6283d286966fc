# SPDX-License-Identifier: Apache-2.0
"""What cuBLASMp does to an operand before the product, where it cannot multiply it as it lies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...bindings import Operation
from ...layout import Grid, MatrixDescriptor
from ...memory import SharedWorkspace
from .types import scale_dtype

if TYPE_CHECKING:
    from .engine import CublasmpEngine

__all__ = ["Moved", "Stage", "Transposed"]


class Stage:
    """An F-ordered operand made into another matrix. Making one is local, running it collective over its grid.

    Attributes:
        descriptor: how the new matrix lies, F-ordered, from process (0, 0).
        array: its local array.
        source: address of the operand's local array, to be set before each run.
    """

    function: str

    def __init__(
        self,
        engine: CublasmpEngine,
        dtype: np.dtype,
        shape: tuple[int, int],
        block: tuple[int, int],
        grid: Grid,
    ) -> None:
        self._engine = engine
        self.descriptor = MatrixDescriptor(shape, block, grid, dtype=dtype, order="F")
        local_shape, lld = self.descriptor.local_shape(engine.rank), self.descriptor.lld(engine.rank)
        self.array = engine.empty(local_shape, dtype, "F", lld)
        self.source = ctypes.c_void_p()

    def _call(self, source: int, result: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the arguments before and after the workspace, given both descriptors."""
        raise NotImplementedError

    def query(self, source: int, result: int) -> tuple[int, int]:
        """Return the workspace it needs, in bytes on the device and on the host, given both descriptors. Local."""
        self._arguments = before, after = self._call(source, result)
        device, host = ctypes.c_size_t(), ctypes.c_size_t()
        query = getattr(self._engine.library, f"{self.function}_bufferSize")
        query(*before, ctypes.byref(device), ctypes.byref(host), *after)
        self._sizes = device.value, host.value
        return self._sizes

    def prepare(self, workspace: SharedWorkspace) -> Callable[[], None]:
        """Return the call. Local."""
        (before, after), (device, host) = self._arguments, self._sizes
        return self._engine.library.prepare(
            self.function, *before, workspace.device, device, workspace.host, host, *after
        )


class Transposed(Stage):
    """op(X), for op "T" or "C", on X's grid."""

    function = "cublasMpGeadd"

    def __init__(self, engine: CublasmpEngine, x: MatrixDescriptor, op: str) -> None:
        super().__init__(engine, x.dtype, x.shape[::-1], x.block[::-1], x.grid)
        self._op = op
        self._scalars = np.array([1, 0], dtype=scale_dtype(x.dtype))

    def _call(self, source: int, result: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        one = self._scalars.ctypes.data
        arguments = (
            self._engine.handle, Operation[self._op], *self.descriptor.shape, one, self.source, 1, 1, source,
            one + self._scalars.itemsize, self._engine.address(self.array), 1, 1, result,
        )  # fmt: skip
        return arguments, ()


class Moved(Stage):
    """X on another grid of the same ranks, in the same blocks."""

    function = "cublasMpGemr2D"

    def __init__(self, engine: CublasmpEngine, x: MatrixDescriptor, grid: Grid) -> None:
        super().__init__(engine, x.dtype, x.shape, x.block, grid)

    def _call(self, source: int, result: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        engine = self._engine
        arguments = (
            engine.handle, *self.descriptor.shape, self.source, 1, 1, source,
            engine.address(self.array), 1, 1, result,
        )  # fmt: skip
        return arguments, (engine.communicator(self.descriptor.grid.size),)
