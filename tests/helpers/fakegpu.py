# SPDX-License-Identifier: Apache-2.0
"""A machine with GPUs as CuPy, nccl4py and nvshmem4py show it to one rank, played on the host's memory.

with pytest.MonkeyPatch.context() as patch:
    gpu = FakeGpu()
    gpu.install(patch)
    import cupy  # arrays are NumPy's, at real addresses

It plays what the cublasmp engine uses and nothing else, and keeps a record: what was allocated, copied and
done in which order, and what was misused or never given back.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, partialmethod
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from pblasmp.engines.gpu.runtime.gpu import Gpu
from pblasmp.engines.gpu.session import session_of
from pblasmp.engines.gpu.tensor.copy_methods import CopyMethod
from tests.helpers import fakelapack
from tests.helpers.fakecublas import Cublas
from tests.helpers.fakelt import FakeLt, MultiplyingLt
from tests.helpers.fakenccl import COLLECTIVES, Collectives, Takes
from tests.helpers.gpu_memory import AtOnce, Place, at, lines
from tests.helpers.hardware import why_not_pitches

_QUEUED = (
    "gemm",
    "gemv",
    "gemm_strided_batched",
    "trmm",
    "symm",
    "hemm",
)  # of direct calls, which compute nothing here
_TAG = 4711  # of NCCL's messages, which MPI carries
_COLLECTIVE = (
    "init",
    "split",
    "all_reduce",
    "RegisteredWindowHandle",
)  # a rank that fails in these has taken part
_RELEASES = (
    *("destroy", "use", "finalize", "free"),
    *("matmul_desc_destroy", "matrix_layout_destroy", "matmul_preference_destroy"),
)  # what fails in these is given back all the same
_LOCAL = ("as_strided", "get_default_memory_pool", "is_capturing")  # which ask nothing of the GPU
_ANYWHERE = (
    *("getDevice", "setDevice", "use", "Device", "getDeviceCount", "getDeviceProperties"),
    *("deviceGetPCIBusId", "deviceGetByPCIBusId", "deviceCanAccessPeer", "deviceGetAttribute"),
    *("streamQuery", "synchronize", "wait_event"),
    *("UnownedMemory", "MemoryPointer", "ndarray", "get_version", "get_async_error", "cublasMpGetVersion"),
)  # what CUDA allows while another GPU is the current one
_KEPT: list[Any] = []  # what MPI may still write to
_NAN_BYTES = 1 << 20  # larger than any matrix of the tests
_POLLS = 50  # of messages, before a wait sleeps
_MEMCPY_DEFAULT = 4  # where memory is, CUDA finds by its address
_OF_THE_HOST = 1, 2  # copies to and from it


def nan_bytes(nbytes: int) -> np.ndarray:
    """New memory that is NaN in every type; zero after the first MiB, so that pages of workspaces are not touched."""
    memory = np.zeros(nbytes, np.uint8)
    memory[:_NAN_BYTES] = 0xFF
    return memory


class _Graph:
    """A graph; ``graphExec`` is its handle, as CuPy has it."""

    def __init__(self, events: list[tuple[Any, ...]]) -> None:
        self._events = events
        self.graphExec = id(self)

    def launch(self) -> None:
        self._events.append(("graph launched",))

    def __del__(self) -> None:
        self._events.append(("graph destroyed",))


class DriverForC:
    """What the compiled core calls of CUDA's driver.

    Attributes:
        error: what the driver returns where something is queued.
        on: the stream on which something was queued last.
    """

    def __init__(self, gpu: FakeGpu) -> None:
        at = ctypes.c_void_p
        self.error = self.on = 0

        def write(kind: Any, to: int, value: int) -> int:
            kind.from_address(to).value = value
            return 0

        def queue(graph: int, stream: int | None) -> int:
            gpu.stay_at_home("a launch")
            gpu.events.append(("graph launched",))
            self.on = stream or 0
            return self.error

        def captures(stream: int | None, to: int) -> int:
            return write(ctypes.c_int, to, (stream or 0) in gpu.capturing)

        of_one, of_two = (ctypes.CFUNCTYPE(ctypes.c_int, *[at] * count) for count in (1, 2))
        self.cuCtxGetCurrent = of_one(lambda to: write(at, to, 1 + gpu.current))
        self.cuStreamIsCapturing, self.cuGraphLaunch = of_two(captures), of_two(queue)


class NcclError(Exception):
    """nccl.bindings.nccl.NCCLError."""


class CUDARuntimeError(RuntimeError):
    """As cupy.cuda.runtime has it."""


class OutOfMemoryError(MemoryError):
    """As cupy.cuda.memory has it: no text makes one, so it cannot be unpickled."""

    def __init__(self, nbytes: int, total: int) -> None:
        super().__init__(f"Out of memory allocating {nbytes:,} bytes (allocated so far: {total:,} bytes).")


_LIKE_NUMPY = (
    "abs", "absolute", "add", "clip", "cos", "dot", "flatnonzero", "isclose", "ldexp", "less_equal", "vdot", "log",
    "max", "maximum", "min", "minimum", "multiply", "negative", "power", "rint", "sin", "sqrt", "subtract", "sum",
    "take", "tanh", "true_divide",
)  # fmt: skip
"""Functions of CuPy that are NumPy's, here too."""


class Array(np.ndarray):
    """cupy.ndarray: memory that is the GPU's to CuPy and the host's to everybody else."""

    gpu: FakeGpu

    def __new__(
        cls, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"
    ):
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape if isinstance(shape, tuple) else (shape,)) * dtype.itemsize
        if memptr is None:
            cls.gpu.enter("allocate")
            cls.gpu.stay_at_home("an allocation")
            cls.gpu.allocations.append(nbytes)
            cls.gpu.find_room(nbytes)
            memptr = cls.gpu.new_memory(nbytes)
        else:
            held = getattr(getattr(memptr, "mem", None), "size", nbytes)
            memptr = (ctypes.c_char * held).from_address(memptr.ptr)
        array = super().__new__(cls, shape, dtype, memptr, 0, strides, order)
        array.device_id = cls.gpu.current if cls.gpu.home is None else cls.gpu.home
        return array

    def __array_finalize__(self, of: Any) -> None:
        here = self.gpu.current if self.gpu.home is None else self.gpu.home
        self.device_id = of.device_id if isinstance(of, Array) else here

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data if self.size else 0)

    @property
    def values(self) -> np.ndarray:
        """For tests, which look at the memory without a copy."""
        return self.view(np.ndarray)

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=self.device_id)

    def copy(self, order: str = "C") -> Array:
        self.gpu.enter("copy")
        self.gpu.stay_at_home("copy")
        self.gpu.copies.append("copy")
        return super().copy(order)

    def conj(self) -> Array:
        self.gpu.enter("conj")
        self.gpu.stay_at_home("conj")
        self.gpu.copies.append("conj")
        return super().conj()

    def __setitem__(self, index: Any, value: Any) -> None:
        mine = getattr(self, "gpu", None)
        if isinstance(index, Array) and index.dtype == bool and mine is not None:
            mine.faults.append("CuPy waits for the GPU where an array of booleans is an index")
        if mine is not None:
            mine.stay_at_home("writing elements")
        super().__setitem__(index, value)

    def __array_wrap__(self, *of: Any) -> Any:
        self.gpu.stay_at_home("a kernel of CuPy's")
        return super().__array_wrap__(*of)


class _Pinned(np.ndarray):
    """Pinned memory on the host."""

    @property
    def ptr(self) -> int:
        return self.ctypes.data


def _elementwise_kernel(name: str, *arguments: Any) -> None:
    """Play the engine's elementwise kernels."""
    if name == "pblasmp_power":
        x, unit, d = arguments
        np.copyto(d, x * np.float64(unit), casting="unsafe")
    else:
        _sum_kernel(name, *arguments)


def _sum_kernel(name: str, x: Any, c: Any, alpha: Any, beta: Any, *places: Any) -> None:
    """Play ``d = alpha x + beta c``, where its name says so."""
    *places, d = places
    _, _, adds, keeps, conjugate, uplo, real = name.split("_")
    where: Any = True
    if uplo:
        rows, cols, diagonal = places
        where = cols - rows <= diagonal if uplo == "L" else cols - rows >= diagonal
    x, c = (np.where(where, each, 0) for each in (np.conj(x) if conjugate else x, c))
    if real:
        x, c = (np.where(rows == cols, each.real, each) for each in (x, c))
    total = (alpha * x if adds else 0) + (beta * c if keeps else 0)
    np.copyto(
        d, np.where(rows == cols, np.real(total), total) if real else total, where=where, casting="unsafe"
    )


def stream_operations(batch: Callable[..., tuple[Any]]) -> dict[str, Any]:
    """What cuda.bindings.driver has for stream memory operations; ``batch`` is called as cuStreamBatchMemOp."""
    kinds = {"CU_STREAM_MEM_OP_WAIT_VALUE_32": "wait", "CU_STREAM_MEM_OP_WRITE_VALUE_32": "write"}
    return {
        "CUstreamWaitValue_flags": SimpleNamespace(CU_STREAM_WAIT_VALUE_EQ=1),
        "CUstreamBatchMemOpType": SimpleNamespace(**kinds),
        "CUstreamBatchMemOpParams": lambda: SimpleNamespace(
            waitValue=SimpleNamespace(operation=""), writeValue=SimpleNamespace(operation="")
        ),
        "cuStreamBatchMemOp": batch,
    }


def _to_tf32(x: np.ndarray) -> np.ndarray:
    """Float32 or complex64 rounded to 11 bits."""
    parts = np.ascontiguousarray(x).view(np.float32)
    fractions, exponents = np.frexp(parts.astype(np.float64))
    return np.ldexp(np.round(fractions * 2048) / 2048, exponents).astype(np.float32).view(x.dtype)


class FakeGpu(Collectives):
    """What one rank sees, and what it did.

    Attributes:
        comm: the ranks of NCCL's communicators, an mpi4py communicator; None: one rank.
        devices: PCI addresses of the visible GPUs, by default one per rank; empty: none.
        deaf: pairs of GPUs that cannot reach each other.
        nccl_version: as NCCL numbers it.
        lt: cuBLASLt, and with it kernels, windows and flags, all of which compute nothing; by default everything is
            computed, there are neither windows nor direct calls, and "auto" takes cuBLASMp's tensor-parallel products.
        queues: what is done with what is queued, by default at once. If it is given, there are windows, too.
        computes: whether everything is computed.
        reaches: whether there are windows.
        capability: the GPUs' compute capability, as CuPy has it.
        multiprocessors: how many each has.
        shared_memory: bytes that a block of threads can have: cudaDevAttrMaxSharedMemoryPerBlockOptin.
        free: bytes that are free on the current GPU.
        fragmented: free memory is too fragmented to be allocated.
        current: index of the current GPU, at first the caller's.
        home: the GPU that all work of the package belongs on, and all arrays; None: nobody looks.
        streams: address of the current stream of each GPU that has another one than 0.
        events: what was done, in order: a name, and what it was done to.
        allocations: bytes of each array that CuPy allocated.
        copies: what CuPy copied, by the function that did.
        faults: what was misused: released twice, borrowed and released.
        alive: what was made and not given back.
        under_way: by stream, NCCL's messages that no event waits for yet.
        called: every call of a module's function, with where in the package it was made; None does not look.
        fails: which of them raises, the first time.
        patience: seconds that messages are waited for; then they are ``stuck``, and so is what the host waits for.
        hopeless: whether what has not come never will, as its sender has broken off: ``patience`` is over then.
        connecting: a first message waits for its peer until NCCL is aborted.
        lost: the CUDA error that every call returns from now on; 0: none.
        nccl_error: what ncclCommGetAsyncError finds.
        aborted: the communicators that were aborted, in order, and how.
        null_windows: what NCCL returns where GPUs do not reach each other's memory: a success, and no window.
        refuses: whether an array of so many bytes cannot be had; None: all can.
    """

    def __init__(
        self,
        *,
        comm: Any = None,
        devices: Sequence[str] | None = None,
        deaf: Sequence[tuple[int, int]] = (),
        current: int = 0,
        nvshmem_ranks: int = 0,
        capability: str = "89",  # no Hopper: nothing here computes what one_kernel.cu does
        shared_memory: int = 3000 + 16384,  # so little that panels are narrow
        nccl_version: int = 22903,
        null_windows: bool = False,
        lt: FakeLt | None = None,
        queues: AtOnce | None = None,
        multiprocessors: int = 4,
    ) -> None:
        self.comm = comm
        ranks = comm.size if comm else 1
        self.devices = [f"0000:0{n}:00.0" for n in range(ranks)] if devices is None else list(devices)
        self.deaf = deaf
        self.nccl_version = nccl_version
        self.free, self.fragmented = 1 << 40, False
        self.capability, self.multiprocessors = capability, multiprocessors
        self.shared_memory = shared_memory
        self.current = self.callers = current
        self.home: int | None = None
        self.streams: dict[int, int] = {}
        self.entered = [0]  # those of ``with`` blocks
        self.capturing: set[int] = set()
        self.nvshmem_ranks = nvshmem_ranks
        self.queues, self.reaches = queues or AtOnce(), bool(queues or lt)
        self.computes, self.lt = lt is None, lt or MultiplyingLt(self.queues)
        self.lt.capability = int(capability)
        self.events: list[tuple[Any, ...]] = []
        self.allocations: list[int] = []
        self.copies: list[str] = []
        self.faults: list[str] = []
        self.alive: dict[tuple[str, int], Any] = {}
        self._next = 0x100
        self.under_way: dict[int, list[Any]] = {}
        self.latest: list[Any] = []
        self.group: list[list[Any]] = []  # NCCL's messages in groups that have begun
        self.promised: list[Any] = []  # events that messages end with, until a stream waits for them
        self.behind: set[tuple[int, int]] = (
            set()
        )  # (stream, other): waits for the other since its last messages
        self.called: list[tuple[str, str]] | None = None
        self.fails: tuple[str, str] | None = None
        self.patience, self.stuck, self.connecting = 3600.0, False, False
        self.hopeless: Callable[[], bool] = lambda: False
        self.tf32 = False  # whether cuBLAS rounds float32
        self.solvers: dict[int, list[int]] = {}  # stream and workspace of cuBLAS, by handle
        self.lost, self.nccl_error, self.aborted = 0, 0, []
        self.null_windows = null_windows
        self.saying = ""  # what the next wait for an event is called
        self.refuses: Any = None

    @property
    def stream(self) -> int:
        """Address of the current GPU's current stream."""
        return self.streams.get(self.current, 0)

    @stream.setter
    def stream(self, address: int) -> None:
        self.streams[self.current] = address

    def stay_at_home(self, name: str) -> None:
        """Note work on another GPU than the one that it belongs to."""
        if self.home is None or self.current == self.home or name in _ANYWHERE:
            return
        place = _place()
        package, _, part = place.partition(".")
        if package == "pblasmp" and not part.startswith("testing:"):  # not the test's own work
            self.faults.append(f"{name} while GPU {self.current} is current, not {self.home}: {place}")

    def enter(self, name: str) -> None:
        """Count a call, and raise if it is the one that fails."""
        if self.called is None and self.fails is None:
            return
        place = name, _place()
        if self.called is not None:
            self.called.append(place)
        if place == self.fails:
            self.fails = None
            raise CUDARuntimeError(f"injected: {name}")

    def _watch(self, content: Any, name: str = "") -> Any:
        """Return a module, a class or a function called ``name`` whose calls are counted."""
        if isinstance(content, SimpleNamespace):
            names = {name: self._watch(x, name) for name, x in vars(content).items() if name not in _LOCAL}
            return SimpleNamespace(**{**vars(content), **names})
        if isinstance(content, type):
            if not issubclass(content, (np.ndarray, np.generic, Exception)):
                for name, x in list(vars(content).items()):
                    if (
                        not name.startswith("_")
                        and name not in _LOCAL
                        and callable(getattr(x, "__func__", x))
                    ):
                        of_class = isinstance(x, classmethod)
                        function = self._counted(name, x.__func__ if of_class else x)
                        setattr(content, name, classmethod(function) if of_class else function)
            return content
        return self._counted(name, content) if callable(content) else content

    def _counted(self, name: str, function: Any) -> Any:
        fails_after = name in _COLLECTIVE or name in _RELEASES

        def call(*args: Any, **how: Any) -> Any:
            self.stay_at_home(name)
            if self.called is None and self.fails is None:
                return function(*args, **how)
            if not fails_after:
                self.enter(name)
                return function(*args, **how)
            result = function(*args, **how)
            try:
                self.enter(name)
            except CUDARuntimeError:
                if name in ("init", "split") and getattr(result, "ptr", 0):
                    result.destroy()  # the library's own clean-up
                if name == "RegisteredWindowHandle":
                    result.close()
                raise
            return result

        return call

    def finish(self, requests: list[Any]) -> None:
        """Let messages end; those that never do leave the GPU stuck, of which the host learns nothing."""
        from mpi4py import MPI

        if self.stuck:  # what is queued behind does not even begin
            _KEPT.append(requests)
            return
        deadline = time.monotonic() + self.patience
        polls = 0
        while not MPI.Request.Testall(requests):
            polls += 1
            if polls < _POLLS:  # a sleep takes longer than most messages
                os.sched_yield()
                continue
            if self.hopeless():
                deadline = 0.0
                if MPI.Request.Testall(requests):  # it came just before its sender broke off
                    return
            if time.monotonic() > deadline:
                self.stuck = True
                _KEPT.append(requests)
                return
            time.sleep(0.0005)

    def _abort(self, communicator: int) -> None:
        """What waited in NCCL ends."""
        self.aborted.append((int(communicator), "comm_abort"))
        self.stuck = False

    def find_room(self, nbytes: int) -> None:
        """Raise where memory is refused."""
        if self.refuses is not None and self.refuses(nbytes):
            raise OutOfMemoryError(nbytes, 0)

    def is_done(self, stream: int) -> bool:
        """Whether what is queued has been done, as a query says that does not wait."""
        return not (self.stuck or self.lost) and self.queues.is_done(stream)

    def new_memory(self, nbytes: int) -> Any:
        """Memory for an array of CuPy's."""
        return nan_bytes(nbytes)

    def copy(
        self, to: int, to_pitch: int, of: int, of_pitch: int, width: int, height: int, kind: int, stream: int
    ) -> None:
        """Copy lines: to or from the host at once."""
        if why_not := why_not_pitches(width, height, (to_pitch, of_pitch)):
            raise CUDARuntimeError(why_not)
        there, here = lines(to, height, to_pitch, width), lines(of, height, of_pitch, width)
        if kind in _OF_THE_HOST:
            for line in range(height):
                ctypes.memmove(to + line * to_pitch, of + line * of_pitch, width)
        elif self.computes and there.nbytes:
            self.queues.copy(stream, there, here)

    def copy_3d(self, copy: Any, stream: int) -> tuple[int]:
        """Copy blocks, as cuMemcpy3DAsync is told to."""
        places = (
            (copy.dstDevice, copy.dstPitch, copy.dstHeight),
            (copy.srcDevice, copy.srcPitch, copy.srcHeight),
        )
        assert all(height >= copy.Height for *_, height in places)
        for k in range(copy.Depth):
            (to, to_pitch), (of, of_pitch) = (
                (at + k * pitch * height, pitch) for at, pitch, height in places
            )
            self.copy(to, to_pitch, of, of_pitch, copy.WidthInBytes, copy.Height, _MEMCPY_DEFAULT, stream)
        return (0,)

    def set_now(self, at: int, value: int, nbytes: int) -> None:
        """Nothing: all of this memory is NaN."""

    def set(self, at: int, value: int, nbytes: int, stream: int) -> None:
        def do(memory: Any) -> None:
            memory.write(memory_of)[...] = value

        memory_of = lines(at, 1, nbytes, nbytes)
        if self.computes and nbytes:
            self.queues.queue(stream, "clear", do)

    def wait_or_write(self, stream: int, count: int, operations: Sequence[Any], flags: int) -> tuple[int]:
        """cuStreamBatchMemOp: every pair waits for a flag, and lowers it."""
        assert count == len(operations)
        for wait, lower in zip(operations[::2], operations[1::2], strict=True) if self.computes else ():
            assert (wait.waitValue.operation, lower.writeValue.operation) == ("wait", "write")
            assert wait.waitValue.address == lower.writeValue.address
            assert (wait.waitValue.value, lower.writeValue.value) == (1, 0)
            self.queues.await_flag(stream, wait.waitValue.address)
        return (0,)

    def _wait_for_the_device(self) -> None:
        if self.lost:
            raise CUDARuntimeError(self.lost)
        if self.stuck:
            self.faults.append("the host waits for messages that never come")
        self.events.append(("synchronize",))

    def install(self, patch: pytest.MonkeyPatch, without: Sequence[str] = ()) -> None:
        """Put the modules where ``import`` finds them; those ``without`` are not installed."""
        nccl = SimpleNamespace(
            get_version=lambda: self.nccl_version,
            NCCLError=NcclError,
            comm_abort=self._abort,
            group_start=lambda: self.group.append([]),
            group_end=self._group_end,
            send=partial(self._message, "send"),
            recv=partial(self._message, "recv"),
            **{name: getattr(self, name) for name in COLLECTIVES},
        )
        if not self.reaches:
            self.lt.multiplied = lambda stream, m, n, k: self.events.append(("gemm", stream, (m, n, k)))
            patch.setattr("pblasmp.engines.gpu.gpu_engine.GpuDirect", lambda *_: None)
            patch.setattr(CopyMethod, "refusal", partialmethod(_named, CopyMethod.refusal))
        self.driver_for_c = DriverForC(self)
        patch.setattr("pblasmp.engines.gpu.runtime.graphs._driver", lambda: self.driver_for_c)
        patch.setattr("pblasmp.engines.gpu.kernels.compiler.loaded", self.load)
        patch.setattr("pblasmp.engines.gpu.kernels.compiler.Kernel", fakelapack.kernel)
        modules = {
            "cupy": self._cupy(),
            "cupy_backends.cuda.libs": SimpleNamespace(cusolver=fakelapack.cusolver()),
            "cupy_backends.cuda.api": SimpleNamespace(
                driver=SimpleNamespace(
                    launchKernel=fakelapack.launch_kernel,
                    launchCooperativeKernel=fakelapack.launch_cooperative_kernel,
                )
            ),
            "nccl.core": self._nccl(),
            "nvshmem.core": self._nvshmem(),
            "nccl.bindings": SimpleNamespace(nccl=nccl),
            "cuda.core": SimpleNamespace(Device=lambda index: ("device", index)),
        }
        members = {name: getattr(self.lt, name) for name in dir(self.lt) if not name.startswith("_")}
        modules["nvmath.bindings.cublasLt"] = SimpleNamespace(**members)
        modules["nvmath.bindings.cublas"] = self._solver()
        modules["cuda.bindings"] = SimpleNamespace(driver=self._driver())
        parents: dict[str, ModuleType] = {}
        for name, given in modules.items():
            content = self._watch(given)
            package, _, part = name.partition(".")
            missing = name in without or package in without
            module = ModuleType(name)
            vars(module).update(vars(content))
            patch.setitem(sys.modules, name, None if missing else module)
            while part:
                name, _, part = name.rpartition(".")
                parent = parents.setdefault(name, ModuleType(name))
                parent.__spec__ = ModuleSpec(name, None)
                setattr(parent, part, module)
                patch.setitem(sys.modules, name, parent)
                module, part = parent, name.partition(".")[2]

    def load(self, *kernel: Any) -> int:
        """compiler.loaded."""
        return fakelapack.loaded(
            *kernel, shared_memory=lambda: self.shared_memory, multiprocessors=lambda: self.multiprocessors,
            gpu=self.queues if self.computes else None,
        )  # fmt: skip

    def _driver(self) -> SimpleNamespace:
        return SimpleNamespace(
            CUDA_MEMCPY3D=SimpleNamespace,
            CUmemorytype=SimpleNamespace(CU_MEMORYTYPE_UNIFIED=4),
            cuMemcpy3DAsync=self.copy_3d,
            **stream_operations(self.wait_or_write),
        )

    def place_in(self, comm: Any) -> tuple[int, int]:
        ranks = self.communicators[int(comm)]
        return (0, 1) if ranks is None else (ranks.rank, ranks.size)

    def collective(
        self, name: str, comm: Any, stream: int, of: Place, takes: Takes, *, sends: bool = True
    ) -> None:
        """NCCL's, by MPI."""
        self.events.append((name, stream, of.nbytes))
        if name == "all_gather":
            self._connect()
        if self.computes or name == "all_reduce":  # elsewhere a GPU would wait, and no host
            ranks, mine = self.communicators[int(comm)], at(of)
            each = [mine] if ranks is None else [*self._everyones(mine, ranks)]
            for to, made in takes:
                at(to)[...] = made(each)

    def _message(self, name: str, at: int, nbytes: int, kind: int, peer: int, comm: Any, stream: int) -> None:
        """One of NCCL's messages, by MPI."""
        assert self.group, "a message outside a group waits for its other end"
        self.events.append((name, stream, peer, nbytes))
        assert kind == 1
        memory = (ctypes.c_char * nbytes).from_address(at)
        post = {"send": "Issend", "recv": "Irecv"}[name]
        ranks = self.communicators[int(comm)]
        self.group[-1].append((stream, lambda: getattr(ranks, post)(memory, peer, _TAG)))

    def _connect(self) -> None:
        """Wait as NCCL does for the peers of what it sends first."""
        while self.connecting:
            if any(how == "comm_abort" for _, how in self.aborted):
                raise RuntimeError("ncclInternalError")
            time.sleep(0.001)

    def _group_end(self) -> None:
        messages = self.group.pop()
        self._connect()
        for stream in {stream for stream, _ in messages} - {self.stream}:
            if (stream, self.stream) not in self.behind:
                self.faults.append("messages that do not wait for what they send")
            self.behind.discard((stream, self.stream))
        self.finish(self.latest)  # one group after the other
        self.latest = []
        for stream, post in messages:
            request = post()
            self.latest.append(request)
            self.under_way.setdefault(stream, []).append(request)
        if any(stream == self.stream for stream, _ in messages):  # what follows on it comes after them
            self.finish(self.under_way.pop(self.stream))

    def _everyones(self, array: np.ndarray, ranks: Any) -> np.ndarray:
        """All ranks' arrays, which each reads when all have come."""
        mine, everyones = np.ascontiguousarray(array).copy(), nan_bytes(ranks.size * array.nbytes)
        _KEPT.append((mine, everyones))
        self.finish([ranks.Iallgather((mine.view(np.uint8), _bytes()), (everyones, _bytes()))])
        if not self.stuck:
            _KEPT.pop()
        return everyones.view(array.dtype).reshape(ranks.size, *array.shape)

    def broadcast(self, of: int, to: int, nbytes: int, kind: int, root: int, comm: Any, stream: int) -> None:
        """One in place is under way until a stream waits for it."""
        if of != to or self.comm is None or not self.computes:
            super().broadcast(of, to, nbytes, kind, root, comm, stream)
            return
        self.events.append(("broadcast", stream, nbytes))
        memory = (ctypes.c_char * nbytes).from_address(of)
        request = self.communicators[int(comm)].Ibcast(memory, root)
        if stream == self.stream:
            self.under_way.setdefault(stream, []).append(request)
        else:
            self.finish([request])

    def _host(self) -> tuple[str, int]:
        """What tells this rank's host from others; PBLASMP_RANKS_PER_NODE divides one."""
        per_node = int(os.environ.get("PBLASMP_RANKS_PER_NODE") or self.comm.size)
        return os.uname().nodename, self.comm.rank // per_node

    def _window(self, nbytes: int, comm: Any) -> Any:
        """Memory that ranks register together: who does so alone waits for ever; between hosts there is none."""
        far = False
        if comm is not None:
            self.finish([comm.Ibarrier()])
            if self.stuck:
                self.faults.append("registered a window that other ranks do not")
            else:
                far = len(set(comm.allgather(self._host()))) > 1
        if self.null_windows or far:
            return SimpleNamespace(handle=0, get_peer_device_pointer=_null_window, close=lambda: None)
        at = self._make("registered", nbytes)
        return SimpleNamespace(
            handle=at, get_peer_device_pointer=lambda rank: 1 << 20,
            close=lambda: self._release("registered", at),
        )  # fmt: skip

    def assert_clean(self) -> None:
        """Nothing was misused, nothing is left, and the caller's GPU is current again."""
        assert not self.faults, self.faults
        assert not self.alive, f"leaked: {sorted(self.alive)}"
        assert not getattr(self.lt, "alive", None), f"leaked: {self.lt.alive}"
        assert not self.under_way, "nobody waits for messages"
        assert not self.promised, "no stream waits for messages"
        assert self.current == self.callers

    def did(self, name: str) -> list[tuple[Any, ...]]:
        """What was done by that name."""
        return [event[1:] for event in self.events if event[0] == name]

    def _make(self, kind: str, value: Any, address: int | None = None) -> int:
        self._next += 1
        address = address or self._next
        self.alive[kind, address] = value
        return address

    def _release(self, kind: str, address: int) -> None:
        self.events.append((f"{kind} released", address))
        if (kind, address) not in self.alive:
            self.faults.append(f"{kind} {address:#x} released, and is not alive")
        self.alive.pop((kind, address), None)

    def _buffer(self, kind: str, nbytes: int) -> Any:
        if self.fragmented:
            raise MemoryError(f"fake out of memory: {nbytes} bytes")
        memory = nan_bytes(nbytes)
        address = self._make(kind, memory, memory.ctypes.data)
        self.events.append((kind, address, nbytes))
        return SimpleNamespace(handle=address, close=lambda: self._release(kind, address))

    # -- CuPy

    def _cupy(self) -> SimpleNamespace:  # noqa: C901 (a table of functions)
        array_type = type("ndarray", (Array,), {"gpu": self})

        def counted(function: Any) -> Any:
            def call(x: Any, *, out: Any) -> Any:
                self.copies.append(function.__name__)
                return function(x, out=out)

            return call

        def copyto(to: Any, of: Any, *, casting: str, where: Any) -> None:
            self.copies.append("copyto")
            np.copyto(to, of, casting=casting, where=where)

        def where(mask: Any, yes: Any, no: Any) -> Any:
            return np.where(mask, yes, no).view(array_type)

        def triangle(function: Any) -> Any:
            return lambda x, k=0: function(x, k).view(array_type)

        def asarray(values: Any) -> Any:
            interface = getattr(values, "__cuda_array_interface__", None)
            if interface is not None:  # shared
                at = SimpleNamespace(ptr=interface["data"][0])
                return array_type(interface["shape"], interface["typestr"], at)
            if not isinstance(values, np.ndarray):
                raise TypeError(f"fake: no array: {type(values).__name__}")
            self.copies.append("asarray")
            self.find_room(values.nbytes)
            return np.array(values).view(array_type)

        def from_dlpack(x: Any) -> Any:
            if type(x) is np.ndarray:
                raise BufferError("fake: it is host memory")
            return np.from_dlpack(x).view(array_type)

        def asnumpy(array: Any, order: str = "C") -> Any:
            self.copies.append("asnumpy")
            if self.stuck:
                self.faults.append("asnumpy waits for messages that never come")
            return np.array(array, order=order, subok=False)

        def empty(shape: Any, dtype: Any = float, order: str = "C") -> Any:
            return array_type(shape, dtype, None, None, order)

        def solved(function: Callable[..., Any]) -> Callable[..., Any]:
            """Return what calls a function of numpy.linalg on an array's values, and returns the library's arrays."""

            def called(a: Any, **how: Any) -> Any:
                found = function(np.asarray(a).view(np.ndarray), **how)
                return tuple(each.view(array_type) for each in found) if isinstance(found, tuple) else found

            return called

        return SimpleNamespace(
            linalg=SimpleNamespace(svd=solved(np.linalg.svd)),
            ndarray=array_type, empty=empty, asarray=asarray, from_dlpack=from_dlpack, asnumpy=asnumpy,
            lib=SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=as_strided)), where=where,
            empty_like=lambda x: empty(x.shape, x.dtype, "F" if x.flags.f_contiguous else "C"),
            ones_like=lambda x: np.ones_like(x, subok=False).view(array_type),
            copyto=copyto, conjugate=counted(np.conjugate), positive=counted(np.positive), cuda=self._cuda(),
            tril=triangle(np.tril), triu=triangle(np.triu), arange=np.arange, uint8=np.uint8, uint64=np.uint64,
            tri=lambda n, **how: np.tri(n, **how).view(array_type),
            ElementwiseKernel=lambda inputs, outputs, code, name: partial(_elementwise_kernel, name),
            full=lambda n, value, dtype=float: np.full(n, value, dtype).view(array_type),
            ones=lambda n, dtype=float: np.ones(n, dtype).view(array_type),
            concatenate=lambda each: np.concatenate(each).view(array_type),
            stack=lambda each: np.stack(each).view(array_type),
            zeros=lambda shape, dtype=float, order="C": np.zeros(shape, dtype, order).view(array_type),
            **{name: getattr(np, name) for name in _LIKE_NUMPY},
            get_default_memory_pool=lambda: SimpleNamespace(
                free_all_blocks=lambda: self.events.append(("pool emptied",)), free_bytes=lambda: 0,
                used_bytes=lambda: 0,
            ),
        )  # fmt: skip

    def _cuda(self) -> SimpleNamespace:
        gpu = self

        def count() -> int:
            if not self.devices:
                raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
            return len(self.devices)

        class Device:
            compute_capability = gpu.capability

            def __init__(self, index: int) -> None:
                self.id = index

            def use(self) -> None:
                gpu.current = self.id

        stream, event = self._streams()

        def pinned(nbytes: int) -> Any:
            memory = np.empty(nbytes, np.uint8).view(_Pinned)
            self.events.append(("pinned", memory.ptr, nbytes))
            return memory

        runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            streamCaptureModeRelaxed="relaxed",
            getDevice=lambda: self.current,
            setDevice=lambda index: setattr(self, "current", index),
            getDeviceCount=count,
            deviceCanAccessPeer=lambda a, b: (a, b) not in self.deaf,
            getDeviceProperties=lambda _: {"name": b"fake GPU", "multiProcessorCount": self.multiprocessors},
            deviceGetPCIBusId=lambda index: self.devices[index],
            deviceGetByPCIBusId=self._by_bus,
            deviceSynchronize=self._wait_for_the_device,
            memGetInfo=lambda: (self.free, 1 << 40),
            memset=self.set_now,
            memcpyDefault=_MEMCPY_DEFAULT,
            memsetAsync=self.set,
            memcpyAsync=lambda to, of, nbytes, kind, stream: self.copy(
                to, nbytes, of, nbytes, nbytes, 1, kind, stream
            ),
            memcpyDeviceToDevice=3,
            memcpyHostToDevice=_OF_THE_HOST[0],
            memcpyDeviceToHost=_OF_THE_HOST[1],
            memcpy2DAsync=self.copy,
            deviceGetAttribute=lambda which, device: {97: self.shared_memory}[which],
            streamQuery=lambda _: self.lost or (600 if self.stuck else 0),
        )
        return SimpleNamespace(
            runtime=runtime, Device=Device, Stream=stream, Event=event, alloc_pinned_memory=pinned,
            get_current_stream=lambda: stream(self.stream),
            device=SimpleNamespace(get_cusolver_handle=fakelapack.cusolver_handle),
            UnownedMemory=lambda ptr, size, owner, device_id=-1: SimpleNamespace(ptr=ptr, size=size, owner=owner),
            MemoryPointer=lambda memory, offset: SimpleNamespace(ptr=memory.ptr + offset, mem=memory),
            MemoryPool=lambda _: SimpleNamespace(malloc=None), using_allocator=lambda _: nullcontext(),
        )  # fmt: skip

    def _by_bus(self, bus: str) -> int:
        if bus not in self.devices:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        return self.devices.index(bus)

    def _streams(self) -> tuple[Any, Any]:  # noqa: C901 (a table of functions)
        gpu = self

        class Event:
            def __init__(self, *, disable_timing: bool) -> None:
                assert disable_timing  # timing costs time
                self.stream, self.requests, self.seen = -1, [], None

            def record(self, stream: Stream) -> None:
                self.stream, self.requests = stream.ptr, gpu.under_way.pop(stream.ptr, [])
                self.seen = seen = []
                gpu.queues.queue(stream.ptr, "record", lambda memory: seen.append(memory.stamp()))
                if self.requests:
                    gpu.promised.append(self)

            @property
            def done(self) -> bool:
                assert not self.requests, "fake: the host waits for messages"
                return gpu.is_done(self.stream)

            def synchronize(self) -> None:
                assert self.done

        class Stream:
            machine = gpu

            def __init__(
                self, ptr: int | None = None, *, non_blocking: bool = False, priority: int = 0
            ) -> None:
                gpu._next += 1
                self.ptr = gpu._next if ptr is None else ptr

            def use(self) -> None:
                gpu.stream = self.ptr

            @property
            def done(self) -> bool:
                return gpu.is_done(self.ptr)

            def synchronize(self) -> None:
                gpu._wait_for_the_device()

            def __enter__(self) -> None:
                gpu.entered.append(self.ptr)
                gpu.stream = self.ptr

            def __exit__(self, *exception: object) -> None:
                gpu.entered.pop()
                gpu.stream = gpu.entered[-1]  # CuPy forgets what use() chose

            def wait_event(self, event: Event) -> None:
                gpu.events.append(("wait", self.ptr, event.stream))
                gpu.behind.add((self.ptr, event.stream))
                seen = event.seen
                if seen is not None:  # it was recorded
                    gpu.queues.queue(
                        self.ptr, gpu.saying or f"{self.ptr} waits for {event.stream}",
                        lambda memory: memory.after(seen[0], by_event=True), ready=lambda: bool(seen),
                        synchronizes=bool(gpu.saying),
                    )  # fmt: skip
                if self.ptr == gpu.stream and event.requests:
                    gpu.finish(event.requests)
                    if event in gpu.promised:
                        gpu.promised.remove(event)

            def begin_capture(self, mode: str) -> None:
                gpu.events.append(("capture begins", self.ptr, gpu.stream, mode))
                gpu.capturing.add(self.ptr)

            def is_capturing(self) -> bool:
                return self.ptr in gpu.capturing

            def end_capture(self) -> Any:
                gpu.events.append(("capture ends", self.ptr))
                gpu.capturing.remove(self.ptr)
                return _Graph(gpu.events)

        return Stream, Event

    def _solver(self) -> SimpleNamespace:
        """nvmath.bindings.cublas: its handles lose their workspace where they change their stream."""

        def create() -> int:
            handle = self._make("cuBLAS", None)
            self.solvers[handle] = [0, 0]
            return handle

        def set_stream(handle: int, stream: int) -> None:
            self.solvers[handle] = [stream, 0]

        def set_workspace(handle: int, address: int, nbytes: int) -> None:
            assert address
            self.solvers[handle][1] = nbytes

        def set_math_mode(handle: int, mode: int) -> None:
            self.events.append(("math mode", mode))
            self.tf32 = mode == 3

        def checked(solve: Any) -> Any:
            def call(handle: int, *arguments: Any) -> None:
                stream, nbytes = self.solvers[handle]
                assert (stream, bool(nbytes)) == (self.stream, True)
                solve(handle, *arguments)

            return call

        def queued(handle: int, *arguments: int) -> None:
            stream, nbytes = self.solvers[handle]
            assert (stream, bool(nbytes)) == (self.stream, True)
            self.events.append(("cuBLAS", stream))

        names = [f"{letter}{name}" for letter in "sdcz" for name in _QUEUED]
        computed = ["gemm_ex", *(f"{letter}trsm" for letter in "sdcz"), *(names if self.computes else ())]
        cublas = self._cublas()
        functions = dict.fromkeys(names, queued) | {name: checked(getattr(cublas, name)) for name in computed}
        return SimpleNamespace(
            create=create, destroy=lambda handle: self._release("cuBLAS", handle),
            set_stream=set_stream, set_workspace=set_workspace, set_math_mode=set_math_mode,
            Math=SimpleNamespace(DEFAULT_MATH=0, TF32_TENSOR_OP_MATH=3), **functions,
        )  # fmt: skip

    def _cublas(self) -> Cublas:
        def queue(name: str, sizes: Any, do: Any) -> None:
            self.events.append((name, self.stream, sizes))
            self.queues.queue(self.stream, name, do)

        return Cublas(queue, lambda x: _to_tf32(x) if self.tf32 and x.dtype.char in "fF" else x)

    # -- nccl4py

    def _nccl(self) -> SimpleNamespace:
        gpu = self

        class Communicator:
            """Ranks; over MPI where the machine has it, so that what is collective must be called by all."""

            def __init__(self, ptr: int) -> None:
                self.ptr, self.comm = ptr, gpu.communicators.get(ptr)

            @classmethod
            def init(cls, nranks: int, rank: int, unique_id: bytes) -> Communicator:
                assert unique_id == b"unique"
                if gpu.comm is not None:
                    assert (gpu.comm.size, gpu.comm.rank) == (nranks, rank)
                return cls._over(gpu.comm)

            @classmethod
            def _over(cls, comm: Any) -> Communicator:
                ptr = gpu._make("communicator", comm)
                gpu.communicators[ptr] = comm
                return cls(ptr)

            def split(self, color: int | None, key: int) -> Communicator:
                part = self.comm.Split(_undefined() if color is None else color, key)
                return type(self)(0) if color is None else self._over(part)

            def destroy(self) -> None:
                gpu._release("communicator", self.ptr)

            def abort(self) -> None:
                gpu.aborted.append((self.ptr, "abort"))
                gpu._release("communicator", self.ptr)

            def get_async_error(self) -> int:
                return gpu.nccl_error

        class RegisteredWindowHandle:
            """What windows are made by."""

            if gpu.reaches:
                get_peer_device_pointer = None

            def __new__(cls, comm: int, address: int, nbytes: int, flags: int) -> Any:
                return gpu._counted("RegisteredWindowHandle", gpu._window)(nbytes, gpu.communicators[comm])

        self.communicators: dict[int, Any] = {}
        return SimpleNamespace(
            Communicator=Communicator,
            RegisteredWindowHandle=RegisteredWindowHandle,
            WindowFlag=SimpleNamespace(COLL_SYMMETRIC=1),
            get_unique_id=lambda: b"unique",
            mem_alloc=lambda nbytes, device: self._buffer("window", nbytes),
        )

    # -- nvshmem4py

    def _nvshmem(self) -> SimpleNamespace:
        """NVSHMEM; ``nvshmem_ranks`` are those that it runs over already, 0 where nobody has started it."""

        def init(*, device: Any, uid: Any, rank: int, nranks: int, initializer_method: str) -> None:
            assert (initializer_method, list(uid._data)) == ("uid", [7] * 8)
            self.events.append(("nvshmem started", device, rank, nranks))
            self.nvshmem_ranks = nranks
            self._make("nvshmem", None, 1)

        def finalize() -> None:
            self._release("nvshmem", 1)
            self.nvshmem_ranks = 0

        return SimpleNamespace(
            InitStatus=SimpleNamespace(STATUS_IS_INITIALIZED=2),
            init_status=lambda: 2 if self.nvshmem_ranks else 0,
            n_pes=lambda: self.nvshmem_ranks,
            get_unique_id=lambda empty: SimpleNamespace(_data=np.full(8, 0 if empty else 7)),
            init=init, finalize=finalize,
            buffer=lambda nbytes: self._buffer("symmetric", nbytes), free=lambda buffer: buffer.close(),
        )  # fmt: skip


def _named(row: CopyMethod, refusal: Any, engine: Any, p: Any, options: Any, operands: Any) -> str:
    """Refuse a tensor-parallel product of the engine's own unless it is asked for, or plays with other GPUs."""
    if options.algo == "auto" and type(session_of(engine).gpu) is Gpu:
        return "the test is of other algorithms"
    return str(refusal(row, engine, p, options, operands))


def _null_window(rank: int) -> int:
    raise RuntimeError("InvalidArgument (4)")


def _place() -> str:
    """Return where in the package a call was made."""
    frame = sys._getframe(1)
    while frame.f_back is not None and "pblasmp" not in frame.f_globals["__name__"].split("."):
        frame = frame.f_back
    return f"{frame.f_globals['__name__']}:{frame.f_code.co_name}"


def _undefined() -> int:
    from mpi4py import MPI

    return int(MPI.UNDEFINED)


def _bytes() -> Any:
    from mpi4py import MPI

    return MPI.BYTE
