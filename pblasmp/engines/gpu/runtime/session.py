# SPDX-License-Identifier: Apache-2.0
"""Session: the GPU of a rank, its communicators, grids, workspaces, symmetric memory and streams: made once."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ....bindings import GridLayout, Library
from ....comm import Agreement, Communicator, is_agreed, nodes_of
from ....dtypes import is_float8
from ....errors import LibraryNotFoundError, PblasmpError, UnsupportedError
from ....extras import install
from ....layout import Grid
from ....memory import NcclWindows, NvshmemHeap, SharedWorkspace, SymmetricHeap, nvshmem_core
from ...arrays import overlap
from ...protocol import Engine
from ..cublasmp import faults
from .arena import Arena
from .device import Device
from .gpu import Gpu
from .graphs import Recordings
from .health import Health

__all__ = ["NO_MULTICAST", "Session", "open_library", "session_of", "stored_dtype"]

NO_MULTICAST = "CUBLASMP_DISABLE_MULTICAST"  # cuBLASMp obeys it, too
_WINDOWS_SINCE = 800


class _HasSession(Protocol):
    session: Session


def session_of(engine: Engine) -> Session:
    """Return the session of a GPU engine. Local."""
    return cast("_HasSession", engine).session


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """Return ``dtype``, or bytes for 8-bit floats, which CuPy lacks. Local."""
    return np.dtype(np.uint8) if is_float8(dtype) else dtype


class Session:
    """What is made once on a GPU and used by all prepared products. Making and closing one is collective over ``comm``.

    Args:
        comm: the ranks of the context.
        device: this rank's GPU.
        library: cuBLASMp, opened.
        nccl: an NCCL communicator over the same ranks: its address or nccl4py's object; never destroyed here.

    Attributes:
        capability: the least compute capability of all ranks' GPUs: 90 for 9.0.
        shared_gpus: whether ranks share a GPU.
        multicast: no rank's environment switches NVLink multicast off.
        multiprocessors: the fewest of all ranks' GPUs, as pieces and flags follow from it.
        arena: the memory that products share.
        gpu: local products, kernels, and symmetric memory if there is any; None: ``why_no_gpu`` says why.
        nodes: how many nodes the ranks are on.
        near: the ranks of this rank's node.
        held_with: objects that are kept alive with the session.
    """

    def __init__(self, comm: Communicator, device: Device, library: Library, nccl: Any = None) -> None:
        import cupy
        import nccl.core as nccl_core

        self.library, self.version = library, library.version
        self.rank, self.size, self.comm, self.device = comm.rank, comm.size, comm, device
        self._comm, self._cupy, self._nccl_core = comm, cupy, nccl_core
        self._grids: dict[Grid, int] = {}
        self._workspaces: dict[Grid, SharedWorkspace] = {}
        self._blocks: dict[int, tuple[int, int]] = {}  # symmetric memory, by the array that was handed out
        self._recycled: list[tuple[int, int]] = []
        self._recording: Any = None
        self.gpu: Gpu | None = None
        self.held_with: tuple[Any, ...] = ()
        with ExitStack() as self._closing:  # frees what was made, last first, every step even if one fails
            with self.agreement("Context: GPU"):
                before = cupy.cuda.runtime.getDevice()
                self._closing.callback(cupy.cuda.Device(before).use)
                cupy.cuda.Device(device.index).use()
                capability = int(cupy.cuda.Device(device.index).compute_capability)
                properties = cupy.cuda.runtime.getDeviceProperties(device.index)
                found = capability, int(properties["multiProcessorCount"])
                self._stream = cupy.cuda.get_current_stream()
                self.health = Health(comm, device, self._queues, self._raise_flags)
            multicast = os.environ.get(NO_MULTICAST, "0") in ("", "0")
            said = comm.allgather((*found, multicast, device.ranks))  # all ranks choose by the same facts
            capabilities, multiprocessors, allowed, sharing = zip(*said, strict=True)
            self.capability, self.multiprocessors = min(capabilities), min(multiprocessors)
            self.multicast, self.shared_gpus = all(allowed), max(sharing) > 1
            self.arena = Arena(cupy, self.settle)
            self._closing.callback(self.arena.close)
            self.heap: SymmetricHeap = self._windows() if self.version >= _WINDOWS_SINCE else self._nvshmem()
            self._closing.callback(self.heap.close)
            self._nccl = self._communicator(nccl)
            self._communicators = {comm.size: self._nccl}
            self.health.nccls.append(self._nccl)
            nodes = nodes_of(comm)
            self.nodes = len(nodes)
            self.near = frozenset(next(node for node in nodes if comm.rank in node))
            self.gpu, self.why_no_gpu = self._own_gpu()
            handle = ctypes.c_void_p()
            with self.agreement("Context: cuBLASMp"):
                self._nowhere = cupy.empty(256, np.uint8)
                library.cublasMpCreate(ctypes.byref(handle), self._stream.ptr)
                self._closing.callback(library.cublasMpDestroy, handle.value)
            if self.version < _WINDOWS_SINCE and comm.size > 1:
                # With NVSHMEM, later grids may hang if the first one has fewer ranks.
                self.grid(Grid(comm.size, 1))
            self._closing = self._closing.pop_all()
        assert handle.value is not None
        self.handle = handle.value
        comm.channel.device = self.health
        self.health.begin()

    # -- what is made once

    def _windows(self) -> NcclWindows:
        lib = self.library
        allocate = lambda nbytes: self._nccl_core.mem_alloc(nbytes, self.device.index)  # noqa: E731
        return NcclWindows(allocate, lib.cublasMpBufferRegister, lib.cublasMpBufferDeregister)

    def _nvshmem(self) -> NvshmemHeap:
        return NvshmemHeap(
            self._comm.rank, self._comm.size, self._comm.bcast, self.device.index, self.agreement
        )

    def _communicator(self, given: Any) -> Any:
        """Return nccl4py's communicator of all ranks: over the caller's handle, or a new one."""
        core, uid = self._nccl_core, None
        with self.agreement("Context: NCCL"):
            if given is not None:
                return core.Communicator(given) if isinstance(given, int) else given
            if self._comm.rank == 0:
                uid = core.get_unique_id()
        uid = self._comm.bcast(uid)
        with self.agreement("Context: NCCL", blocks=True):
            nccl = core.Communicator.init(self._comm.size, self._comm.rank, uid)
            self._closing.callback(nccl.destroy)
            self.health.own.append(nccl)
        return nccl

    def _own_gpu(self) -> tuple[Gpu | None, str]:
        """Return the Gpu that overlapped algorithms use, or None and the reason. Collective."""
        missing = "" if find_spec("nvmath") is not None else f"nvmath-python is missing: {install('cu13')}"
        why = next((each for each in self._comm.allgather(missing) if each), "")
        if why:
            return None, why
        peers = SimpleNamespace(
            rank=self.rank, size=self.size, device=self.device.index, nccl=self._nccl, cupy=self._cupy,
            capability=self.capability, shared_gpus=self.shared_gpus,
            agreement=self.agreement, synchronize=self.synchronize, wait=self.wait, arena=self.arena,
            multiprocessors=self.multiprocessors,
        )  # fmt: skip
        try:
            gpu = Gpu(peers)
        except UnsupportedError as error:  # there are more ranks than its kernels take
            return None, str(error)
        self._closing.callback(gpu.close)
        return gpu, ""

    @property
    def nccl(self) -> Any:
        """nccl4py's communicator of all ranks."""
        return self._nccl

    @property
    def nccl_version(self) -> int:
        """Version of the NCCL that is loaded, as NCCL numbers it: 22902 is 2.29.2."""
        return _nccl_version()

    @property
    def gpu_name(self) -> str:
        """What CUDA calls the GPU. Local."""
        name = self._cupy.cuda.runtime.getDeviceProperties(self.device.index)["name"]
        return str(name.decode() if isinstance(name, bytes) else name)

    def grid(self, grid: Grid) -> int:
        """Return cuBLASMp's handle of a grid over the first ranks, 0 outside it. Collective the first time."""
        if grid not in self._grids:
            nccl = self.communicator(grid.size)
            handle = ctypes.c_void_p()
            with Agreement(self._comm, "grid", blocks=True):
                if self.rank < grid.size:
                    layout = GridLayout.ROW_MAJOR if grid.order == "row" else GridLayout.COL_MAJOR
                    self.library.cublasMpGridCreate(
                        grid.nprow, grid.npcol, layout, nccl, ctypes.byref(handle)
                    )
                    assert handle.value is not None
                    self._closing.callback(self.library.cublasMpGridDestroy, handle.value)
                    self._closing.callback(self.heap.withdraw, handle.value)
            self._grids[grid] = handle.value or 0
        return self._grids[grid]

    def communicator(self, size: int) -> int:
        """Return the NCCL communicator of the first ``size`` ranks. Collective the first time."""
        if size not in self._communicators:
            with self.agreement("NCCL communicator", blocks=True):
                part = self._nccl.split(0 if self.rank < size else None, self.rank)
                if self.rank < size:
                    self._closing.callback(part.destroy)
                    self.health.own.append(part)
                    self.health.nccls.append(part)
            self._communicators[size] = part
        address: int = self._communicators[size].ptr
        return address

    def workspace(self, grid: Grid) -> SharedWorkspace:
        """Return the workspace of the plans whose D is on ``grid``. Local; growing it is collective."""
        if grid not in self._workspaces:
            self._workspaces[grid] = workspace = SharedWorkspace(
                partial(self._new_memory, grid=self.grid(grid)),
                partial(self._together, self.heap.free),
                partial(self._together, self._cupy.cuda.alloc_pinned_memory),
                partial(self._together, self.synchronize),
                self.arena.replaced,
            )
            self._closing.callback(workspace.close)
        return self._workspaces[grid]

    def _new_memory(self, nbytes: int, grid: int | None = None) -> int:
        """Return the address of new symmetric memory, or raise on every rank. Collective.

        Args:
            nbytes: how much.
            grid: the handle of the grid that will use it, 0 on ranks outside it; None: no grid, so far.
        """
        self._check_room(nbytes)
        address = 0
        try:
            with Agreement(self._comm, "symmetric memory", blocks=True):
                address = self.heap.allocate(nbytes)
            if grid is not None:
                with Agreement(self._comm, "symmetric memory: registering", blocks=True):
                    if grid:
                        self.heap.offer(address, grid)
        except Exception:
            if address:
                self.heap.free(address)
            raise
        return address

    def _together(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of ``function``, or raise on every rank what it raises on any. Collective."""
        with Agreement(self._comm, "workspace"):
            return function(*arguments)

    def _check_room(self, nbytes: int) -> None:
        """Raise MemoryError on every rank if one of them has no room for ``nbytes`` on its GPU. Collective."""
        with Agreement(self._comm, "symmetric memory") as facts:
            facts["bytes"] = nbytes
            free, _ = self._cupy.cuda.runtime.memGetInfo()
            if free < nbytes:
                self._cupy.get_default_memory_pool().free_all_blocks()
                free, _ = self._cupy.cuda.runtime.memGetInfo()
            if free < nbytes:
                raise MemoryError(
                    f"{nbytes} bytes of symmetric memory are needed, GPU {self.device.bus} has {free} free"
                )

    @property
    def available_bytes(self) -> int:
        """Bytes of GPU memory that this rank can have: its share of what is free, and what CuPy keeps. Local."""
        free, _ = self._cupy.cuda.runtime.memGetInfo()
        kept: int = self._cupy.get_default_memory_pool().free_bytes()
        return int(free) // self.device.ranks + kept

    def recordings(self) -> Recordings:
        """Return a store for the graphs of a product. Local."""
        return Recordings(self, self.arena)

    def agreement(self, what: str, *, blocks: bool = False) -> Agreement:
        """Return a ``with`` block in which an error on one rank is raised on every rank. Collective over the context.

        Args:
            what: what the ranks do in the block, for messages.
            blocks: a library call inside waits for the other ranks: see ``Agreement``.
        """
        return Agreement(self._comm, what, blocks=blocks)

    @contextmanager
    def queueing(self, what: str) -> Iterator[None]:
        """Return a ``with`` block like ``agreement``, for queueing work that waits for other ranks. Collective.

        If only some ranks fail, the GPUs of the others wait for work that never comes: then the context is broken.
        """
        failed = True
        try:
            with Agreement(self._comm, what):
                yield
                failed = False
        except Exception as error:
            if is_agreed(error, self._comm) and not all(self._comm.allgather(failed)):
                self._comm.channel.broken_by_agreement(f"{what} failed on some ranks only: {error}")
            raise

    def largest(self, sizes: Callable[[], tuple[int, int]]) -> tuple[int, int]:
        """Return the largest of every rank's ``sizes()``, or raise what it raises on any rank. Collective."""
        mine: tuple[int, int] = (0, 0)
        with Agreement(self._comm, "descriptors"):
            mine = sizes()
        everyone = self._comm.allgather(mine)
        return max(device for device, _ in everyone), max(host for _, host in everyone)

    # -- arrays

    def empty(
        self, shape: tuple[int, int], dtype: np.dtype, order: str, ld: int, *, symmetric: bool = False
    ) -> Any:
        """Return an uninitialised local array with leading dimension ``ld``. Local; collective if ``symmetric``."""
        rows, cols = shape
        padded = (rows, ld) if order == "C" else (ld, cols)
        block = self._symmetric(padded[0] * padded[1] * dtype.itemsize) if symmetric else None
        memory = None
        if block is not None:
            memory = self._cupy.cuda.MemoryPointer(
                self._cupy.cuda.UnownedMemory(*block, self, self.device.index), 0
            )
        array = self._cupy.ndarray(padded, stored_dtype(dtype), memory, order=order)
        array = array[:, :cols] if order == "C" else array[:rows]
        if block is not None:
            self._blocks[id(array)] = block
        return array

    def _symmetric(self, nbytes: int) -> tuple[int, int]:
        """Return address and size of symmetric memory: recycled memory if it fits, or new. Collective."""
        nbytes = max(self._comm.allgather(max(1, nbytes)))
        fitting = [block for block in self._recycled if nbytes <= block[1] <= 2 * nbytes]
        if fitting:
            self._recycled.remove(fitting[0])
            return fitting[0]
        return self._new_memory(nbytes), nbytes

    def recycle(self, array: Any) -> None:
        """Let later symmetric arrays reuse the memory of this one; queued work must be done. Collective."""
        self._recycled.append(self._blocks.pop(id(array)))

    def share(self, array: Any, grid: Grid) -> bool:
        """Make an array usable by a grid if it is symmetric memory on every rank; return whether it is. Collective."""
        start = self.heap.holds(int(array.data.ptr)) if array.size else 0
        inside = self.rank < grid.size
        if not all(self._comm.allgather(start != 0 or not inside or array.size == 0)):
            return False
        with Agreement(self._comm, "symmetric memory", blocks=True):
            if inside and start:
                self.heap.offer(start, self.grid(grid))
        return True

    def address(self, array: Any, operand: int = 0) -> int:
        """Return the device address of a local array; for an empty one, a distinct address for each operand. Local."""
        address: int = array.data.ptr if array.size else self._nowhere.data.ptr + 64 * operand
        return address

    def overlap(self, a: Any, b: Any) -> bool:
        """Return whether two local arrays have an element in common. Local."""
        return bool(a.size and b.size) and overlap(_addresses(a), _addresses(b))

    @property
    def capturing(self) -> bool:
        """Whether CuPy's current stream records a CUDA graph. Local."""
        return bool(self._cupy.cuda.get_current_stream().is_capturing())

    @property
    def recording(self) -> Any:
        """The stream on which plans record their graphs. Local."""
        if self._recording is None:
            self._recording = self._cupy.cuda.Stream(non_blocking=True)
        return self._recording

    @property
    def relaxed(self) -> Any:
        """CUDA's mode of recording that allows other work meanwhile. Local."""
        return self._cupy.cuda.runtime.streamCaptureModeRelaxed

    def share_largest(self, array: Any) -> None:
        """Queue, on CuPy's current stream, replacing an array by the maximum over all ranks. Collective."""
        stream = self._cupy.cuda.get_current_stream().ptr
        self._nccl.allreduce(array, array, self._nccl_core.MAX, stream=stream)

    def follow_stream(self) -> None:
        """Use CuPy's current stream from now on, and keep it alive as long as cuBLASMp's handle holds it. Local.

        It waits for what was queued on another stream before, since all products share workspaces and buffers.
        """
        stream = self._cupy.cuda.get_current_stream()
        if stream.ptr == self._stream.ptr:
            return
        # While a graph is recorded, it cannot wait for work outside it.
        if not stream.is_capturing() and not self._stream.is_capturing():
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self._stream)
            stream.wait_event(event)
        self.library.cublasMpSetStream(self.handle, stream.ptr)
        self._stream = stream

    def settle(self, stream: Any) -> None:
        """Let later work on a stream wait for what products have queued: memory made on it is about to be freed. Local.

        CuPy gives the memory of a freed array to the next array that is made on the same stream, whatever other
        streams still do with it.
        """
        last = self._stream
        if stream.ptr != last.ptr and not stream.is_capturing() and not last.is_capturing():
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(last)
            stream.wait_event(event)

    # -- waiting, and the end

    def _queues(self) -> list[Any]:
        return [self._stream, *([] if self.gpu is None else self.gpu.streams)]

    def _raise_flags(self, stream: Any) -> None:
        if self.gpu is not None and self.gpu.windows is not None:
            self.gpu.windows.raise_own(stream)
            stream.synchronize()

    def wait(self, *queues: Any) -> None:
        """Wait for CuPy's streams or events; raises as :meth:`Health.wait` does. Local."""
        self.health.wait(*queues)

    def synchronize(self) -> None:
        """Wait until the GPU has done all its work; raises as ``wait`` does. Local."""
        # The stream used last has waited for all others of ours.
        self.wait(self._stream, self._cupy.cuda.get_current_stream())
        self._cupy.cuda.runtime.deviceSynchronize()

    def close(self) -> None:
        """Free everything, last made first. Collective over the context.

        If the context breaks meanwhile, or this GPU is lost, nothing is freed.
        """
        with ExitStack() as behind:
            behind.callback(self._give_back)
            self.synchronize()

    def _give_back(self) -> None:
        channel = self._comm.channel
        if channel.cause or self.health.is_lost:
            self.health.abort()
            return
        channel.device = None
        self.health.end()
        self._closing.close()


def _addresses(array: Any) -> NDArray[Any]:
    """Return a NumPy array at the same addresses, only for comparing these: it must never be read."""

    class Described:
        __array_interface__ = {  # noqa: RUF012
            "data": (array.data.ptr, True),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.itemsize}",
            "version": 3,
        }

    return np.asarray(Described())


def _nccl_version() -> int:
    from nccl.bindings import nccl

    return int(nccl.get_version())


def open_library() -> Library | PblasmpError:
    """Return cuBLASMp, opened, or why it cannot be used here. Local."""
    try:
        import nccl.core  # noqa: F401
    except ImportError as error:
        return LibraryNotFoundError(f"nccl4py is not installed ({error}): {install('cu13')}")
    try:
        library = Library()
        if library.version < _WINDOWS_SINCE:
            nvshmem_core()
        faults.check_nccl(library.version, _nccl_version())
    except PblasmpError as error:
        return error
    except Exception as error:  # noqa: BLE001 - the other ranks have to hear of it, whatever it is
        return LibraryNotFoundError(f"cuBLASMp or NCCL cannot be used: {type(error).__name__}: {error}")
    return library
