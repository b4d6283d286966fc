# SPDX-License-Identifier: Apache-2.0
"""CuBLASMp opened for a context, and its log."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ....bindings import GridLayout, Library, LoggerCallback
from ....errors import LibraryNotFoundError, PblasmpError, install, opened
from ....layout import Grid
from ...arrays import overlap
from ...direct import alias
from ..runtime.gpu_runtime import GpuRuntime
from ..runtime.nccl import Nccl, nccl_version
from ..runtime.symmetric_memory import NvshmemHeap, SymmetricHeap, nvshmem_core, roomy
from ..types import stored_dtype
from . import faults

if TYPE_CHECKING:
    from typing_extensions import Self

_TRACE = 5


class Listening:
    """Within the ``with`` block, collects in ``said`` the log lines that name the algorithm that the library takes.

    If the user has set the log's level, it stays as it is, and lines that it excludes are not collected.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self.said: list[str] = []
        self._callback = LoggerCallback(self._hear)
        self._users_own = any(name in os.environ for name in ("CUBLASMP_LOG_LEVEL", "CUBLASMP_LOG_MASK"))

    def _hear(self, _level: int, _function: bytes | None, message: bytes | None) -> None:
        text = (message or b"").decode(errors="replace").strip()
        if "using " in text.lower() and text not in self.said:
            self.said.append(text)

    def __enter__(self) -> Self:
        library = self._library
        with ExitStack() as undo:
            if not self._users_own:  # otherwise the log would also go to the user's standard output
                library.cublasMpLoggerOpenFile(os.devnull.encode())
                undo.callback(library.cublasMpLoggerSetLevel, 0)
                library.cublasMpLoggerSetLevel(_TRACE)
            undo.callback(library.cublasMpLoggerSetCallback, None)
            library.cublasMpLoggerSetCallback(self._callback)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()


_WINDOWS_SINCE = 800


def symmetric_heap(runtime: GpuRuntime, library: Library) -> SymmetricHeap:
    """Return the memory that cuBLASMp of this version takes as symmetric. Collective."""
    if library.version < _WINDOWS_SINCE:
        comm = runtime.comm
        return NvshmemHeap(comm.rank, comm.size, comm.bcast, runtime.device.index, runtime.agreement)
    import nccl.core

    return SymmetricHeap(
        lambda nbytes: nccl.core.mem_alloc(nbytes, runtime.device.index),
        library.cublasMpBufferRegister,
        library.cublasMpBufferDeregister,
    )


class SharedWorkspace:
    """Two growing buffers. Plans hold ``device`` and ``host``, whose values are the current addresses.

    Args:
        library: whose symmetric memory is used.
        grid: the handle of the grid that uses it, 0 on ranks outside it.
    """

    def __init__(self, library: Cublasmp, grid: int) -> None:
        self._library, self._grid, self._runtime = library, grid, library.runtime
        self.device, self.host = ctypes.c_void_p(), ctypes.c_void_p()
        self._device_bytes = self._host_bytes = 0
        self._host_memory: Any = None

    def covers(self, device_bytes: int, host_bytes: int) -> bool:
        """Return whether the buffers are already that large. Local."""
        return device_bytes <= self._device_bytes and host_bytes <= self._host_bytes

    def grow(self, device_bytes: int, host_bytes: int) -> None:
        """Make the buffers at least that large, the same on every rank. Collective.

        The buffer on the device gets some spare room, since registering a new one takes far longer than a
        product. Waits for work in flight before a buffer is replaced.
        """
        if self.covers(device_bytes, host_bytes):
            return
        with self._runtime.agreement("workspace"):
            self._runtime.synchronize()
        if self.device.value or self._host_memory is not None:
            self._runtime.arena.replaced()
        if device_bytes > self._device_bytes:
            self._free_device()
            device_bytes = roomy(device_bytes)
            self.device.value = self._library.new_memory(device_bytes, self._grid)
            self._device_bytes = device_bytes
        if host_bytes > self._host_bytes:
            with self._runtime.agreement("workspace"):
                self._host_memory = self._runtime.cupy.cuda.alloc_pinned_memory(host_bytes)
            self.host.value, self._host_bytes = self._host_memory.ptr, host_bytes

    def _free_device(self) -> None:
        if self.device.value:
            address, self.device.value, self._device_bytes = self.device.value, None, 0
            with self._runtime.agreement("workspace"):
                self._library.heap.free(address)

    def close(self) -> None:
        """Free both buffers. Collective."""
        self._free_device()
        self._host_memory, self.host.value, self._host_bytes = None, None, 0


class Cublasmp:
    """cuBLASMp on one GPU of a context. Making and closing one is collective over the context.

    Args:
        nccl: the communicators that grids are made of.
        heap: where symmetric memory comes from; closed by the caller.

    Attributes:
        c: the functions of the library.
        version: its version: 1000 is 0.10.0.
        handle: cuBLASMp's handle, whose stream follows the runtime's.
    """

    def __init__(self, runtime: GpuRuntime, nccl: Nccl, library: Library, heap: SymmetricHeap) -> None:
        self.runtime, self.c, self.version, self.heap = runtime, library, library.version, heap
        self._nccl, self._cupy = nccl, runtime.cupy
        self._grids: dict[Grid, int] = {}
        self._workspaces: dict[Grid, SharedWorkspace] = {}
        self._blocks: dict[int, tuple[int, int]] = {}  # symmetric memory, by the array that was handed out
        self._recycled: list[tuple[int, int]] = []
        handle = ctypes.c_void_p()
        with ExitStack() as self._closing:
            with runtime.agreement("Context: cuBLASMp"):
                self._nowhere = runtime.cupy.empty(256, np.uint8)
                library.cublasMpCreate(ctypes.byref(handle), runtime.stream.ptr)
                self._closing.callback(library.cublasMpDestroy, handle.value)
            if library.version < _WINDOWS_SINCE and runtime.size > 1:
                # With NVSHMEM, later grids may hang if the first one has fewer ranks.
                self.grid(Grid(runtime.size, 1))
            self._closing = self._closing.pop_all()
        assert handle.value is not None
        self.handle = handle.value
        runtime.followers.append(lambda stream: library.cublasMpSetStream(self.handle, stream.ptr))
        if nccl.is_own:
            runtime.health.frees.append(self._let_go)

    @property
    def why_no_memory(self) -> str:
        """Why its workspace cannot be registered, "" if that is not known to fail; the same on every rank. Local."""
        return self.runtime.why_unregistered if self.version >= _WINDOWS_SINCE else ""

    def grid(self, grid: Grid) -> int:
        """Return cuBLASMp's handle of a grid over the first ranks, 0 outside it. Collective the first time."""
        if grid not in self._grids:
            nccl, handle = self._nccl.communicator(grid.size), ctypes.c_void_p()
            with self.runtime.agreement("grid", blocks=True):
                if self.runtime.rank < grid.size:
                    layout = GridLayout.ROW_MAJOR if grid.order == "row" else GridLayout.COL_MAJOR
                    self.c.cublasMpGridCreate(grid.nprow, grid.npcol, layout, nccl, ctypes.byref(handle))
                    assert handle.value is not None
                    self._closing.callback(self.c.cublasMpGridDestroy, handle.value)
                    self._closing.callback(self.heap.withdraw, handle.value)
            self._grids[grid] = handle.value or 0
        return self._grids[grid]

    def workspace(self, grid: Grid) -> SharedWorkspace:
        """Return the workspace of the plans whose D is on ``grid``. Local; growing it is collective."""
        if grid not in self._workspaces:
            self._workspaces[grid] = workspace = SharedWorkspace(self, self.grid(grid))
            self._closing.callback(workspace.close)
        return self._workspaces[grid]

    def barrier(self, grid: Grid) -> Callable[[], None]:
        """Return what queues a barrier of a grid's ranks on CuPy's current stream; the grid exists. Local."""
        return partial(self._nccl.meet, grid.size)

    def largest(self, sizes: Callable[[], tuple[int, int]]) -> tuple[int, int]:
        """Return the largest of every rank's ``sizes()``, or raise what it raises on any rank. Collective."""
        mine: tuple[int, int] = (0, 0)
        with self.runtime.agreement("descriptors"):
            mine = sizes()
        everyone = self.runtime.comm.allgather(mine)
        return max(device for device, _ in everyone), max(host for _, host in everyone)

    # -- memory

    def new_memory(self, nbytes: int, grid: int | None = None) -> int:
        """Return the address of new symmetric memory, or raise on every rank. Collective.

        Args:
            nbytes: how much.
            grid: the handle of the grid that will use it, 0 on ranks outside it; None: no grid, so far.
        """
        self._check_free_memory(nbytes)
        address = 0
        try:
            with self.runtime.agreement("symmetric memory", blocks=True):
                address = self.heap.allocate(nbytes)
            if grid is not None:
                with self.runtime.agreement("symmetric memory: registering", blocks=True):
                    if grid:
                        self.heap.offer(address, grid)
        except Exception:
            if address:
                self.heap.free(address)
            raise
        return address

    def _check_free_memory(self, nbytes: int) -> None:
        """Raise MemoryError on every rank if one of them has no room for ``nbytes`` on its GPU. Collective."""
        with self.runtime.agreement("symmetric memory") as facts:
            facts["bytes"] = nbytes
            free, _ = self._cupy.cuda.runtime.memGetInfo()
            if free < nbytes:
                self.runtime.arena.give_up()
                free, _ = self._cupy.cuda.runtime.memGetInfo()
            if free < nbytes:
                gpu = self.runtime.device.bus
                raise MemoryError(f"{nbytes} bytes of symmetric memory are needed, GPU {gpu} has {free} free")

    # -- arrays

    def empty(
        self, shape: tuple[int, int], dtype: np.dtype, order: str, ld: int, *, symmetric: bool = False
    ) -> Any:
        """Return an uninitialized local array with leading dimension ``ld``. Local; collective if ``symmetric``."""
        rows, cols = shape
        padded = (rows, ld) if order == "C" else (ld, cols)
        block = self._symmetric(padded[0] * padded[1] * dtype.itemsize) if symmetric else None
        memory = None
        if block is not None:
            unowned = self._cupy.cuda.UnownedMemory(*block, self, self.runtime.device.index)
            memory = self._cupy.cuda.MemoryPointer(unowned, 0)
        kind = stored_dtype(dtype)
        array = self.runtime.arena.with_memory(lambda: self._cupy.ndarray(padded, kind, memory, order=order))
        array = array[:, :cols] if order == "C" else array[:rows]
        if block is not None:
            self._blocks[id(array)] = block
        return array

    def _symmetric(self, nbytes: int) -> tuple[int, int]:
        """Return address and size of symmetric memory: recycled memory if it fits, or new. Collective."""
        nbytes = max(self.runtime.comm.allgather(max(1, nbytes)))
        fitting = [block for block in self._recycled if nbytes <= block[1] <= 2 * nbytes]
        if fitting:
            self._recycled.remove(fitting[0])
            return fitting[0]
        return self.new_memory(nbytes), nbytes

    def recycle(self, array: Any) -> None:
        """Let later symmetric arrays reuse the memory of this one; queued work must be done. Collective."""
        self._recycled.append(self._blocks.pop(id(array)))

    def share(self, array: Any, grid: Grid) -> bool:
        """Make an array usable by a grid if it is symmetric memory on every rank; return whether it is. Collective."""
        start = self.heap.holds(int(array.data.ptr)) if array.size else 0
        inside = self.runtime.rank < grid.size
        if not all(self.runtime.comm.allgather(start != 0 or not inside or array.size == 0)):
            return False
        with self.runtime.agreement("symmetric memory", blocks=True):
            if inside and start:
                self.heap.offer(start, self.grid(grid))
        return True

    def address(self, array: Any, operand: int = 0) -> int:
        """Return the device address of a local array; for an empty one, a distinct address for each operand. Local."""
        address: int = array.data.ptr if array.size else self._nowhere.data.ptr + 64 * operand
        return address

    @staticmethod
    def overlap(a: Any, b: Any) -> bool:
        """Return whether two local arrays have an element in common. Local."""
        if not (a.size and b.size):
            return False
        (a_first, a_end), (b_first, b_end) = _span(a), _span(b)
        return a_first < b_end and b_first < a_end and overlap(_addresses(a), _addresses(b))

    def _let_go(self) -> None:
        """Free workspaces, in a broken context whose work has ended and whose communicators are aborted. Local."""
        for workspace in self._workspaces.values():
            if workspace.device.value:
                self.heap.drop(workspace.device.value)

    def close(self) -> None:
        """Free workspaces, grids and the handle, last made first. Collective."""
        self._closing.close()


def _span(array: Any) -> tuple[int, int]:
    """Return the address of an array's first byte, and the one after its last."""
    first: int = array.data.ptr
    last = first
    for extent, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            first += (extent - 1) * stride
        else:
            last += (extent - 1) * stride
    return first, last + array.itemsize


def _addresses(array: Any) -> NDArray[Any]:
    """Return a NumPy array at the same addresses, only for comparing these: it must never be read."""
    return alias(array.data.ptr, array.shape, array.strides, f"|V{array.itemsize}")


def open_library() -> Library | PblasmpError:
    """Return cuBLASMp, opened, or why it cannot be used here. Local."""
    try:
        package = "nccl4py"
        import_module("nccl.core")
        package = "nvmath-python"
        import_module("nvmath.bindings.cublasLt")
    except ImportError as error:
        return LibraryNotFoundError(f"{package} is not installed ({error}): {install('cu13')}")
    return opened("cuBLASMp or NCCL", _library)


def _library() -> Library:
    library = Library()
    if library.version < _WINDOWS_SINCE:
        nvshmem_core()
    faults.check_nccl(library.version, nccl_version())
    return library
