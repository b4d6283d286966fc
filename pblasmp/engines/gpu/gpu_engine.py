# SPDX-License-Identifier: Apache-2.0
"""GpuEngine: CuPy arrays on the GPUs of all ranks, cuBLASMp's routines, and the algorithms of every engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ... import _core
from ...bindings import Library, version_text
from ...comm import Communicator
from ...dtypes import is_float8, named_like
from ...errors import ArgumentError
from ...layout import MatrixDescriptor
from ...layout.intersection import Piece, Stretch
from ...layout.pieces import Trapezoid
from .. import dense
from ..arrays import new_part
from ..composite import Composite, ExchangeMove, QueuedProduct
from ..direct import Direct
from ..product import Product
from ..protocol import Engine, Method, Traits
from ..request import Operands
from ..tensor.algorithms import MESSAGES
from . import cusolvermp, gpu_transport
from .cublasmp import cublasmp_product as cublasmp
from .cublasmp.prepared_call import part_mask
from .direct import GpuDirect
from .factor_operations import GpuFactorOperations
from .gpu_transport import GpuTransport
from .kernels.views import convert, copy_where
from .push import pushed_product as push
from .runtime import arena
from .runtime.device import Device, links_of
from .runtime.graphs import Recordings
from .runtime.host_copies import HostCopies
from .runtime.nccl import nccl_version
from .session import Session
from .tensor import copy_methods as tensor
from .types import stored_dtype

METHODS: tuple[Method, ...] = (
    *cublasmp.METHODS,
    *tensor.METHODS,
    *push.METHODS,
    *dense.METHODS,
    MESSAGES,
    *cusolvermp.METHODS,
)


class GpuEngine(Engine):
    """GPU ranks. Making and closing one is collective over ``comm``.

    Args:
        why: why this engine was taken.
        nccl: an NCCL communicator over the same ranks: its address or nccl4py's object; never destroyed here.

    Attributes:
        session: what is made only once: communicators, grids, workspaces, symmetric memory.
        runtime: its arena, waits and agreement.
    """

    name = "cublasmp"
    traits = Traits(
        on_gpus=True,
        queues=True,
        records=True,
        overlaps_messages=True,
        fast_products=True,
        computes_foreign=False,
    )
    direct: Direct | None
    methods: Sequence[Method] = METHODS
    put, get = gpu_transport.put, gpu_transport.get

    def __init__(
        self, comm: Communicator, device: Device, library: Library, why: str, nccl: Any = None
    ) -> None:
        import cupy

        self.why, self.xp = why, cupy
        core = _core.load() if all(each.core for each in comm.locations()) else None
        self.session = Session(comm, device, library, nccl)
        self.device, self.runtime = device, self.session.runtime
        with ExitStack() as closing:
            closing.callback(self.session.close)
            with self.runtime.agreement("Context: streams"):
                self.operations = GpuFactorOperations(self.session)
                self.transport = GpuTransport(self.session, self.operations)
                ranks_here = next(len(node) for node in self.runtime.nodes if self.runtime.rank in node)
                self._copies = HostCopies(cupy, ranks_here, self.runtime.wait)
                current, follow = cupy.cuda.get_current_stream, self.runtime.follow_stream
                record = self.session.recordings().record
                self.direct = GpuDirect(self.session.gpu, current, follow, core, record)
                self.session.held_with = (self.operations, self.transport, self._copies)
            closing.pop_all()

    @property
    def remarks(self) -> tuple[str, ...]:
        return self.operations.remarks

    @property
    def version(self) -> int:
        """CuBLASMp's version: 1000 is 0.10.0."""
        return self.session.cublasmp.version

    @cached_property
    def machine(self) -> str:
        """This rank's GPU, its links, and how many ranks share it. Local."""
        shared = f"{self.device.ranks} ranks on it" if self.device.ranks > 1 else ""
        return ", ".join(word for word in (self.runtime.gpu_name, links_of(self.device.bus), shared) if word)

    @property
    def libraries(self) -> str:
        """CuBLASMp and NCCL. Local."""
        nccl = nccl_version()
        return f"cuBLASMp {version_text(self.version)}, NCCL {nccl // 10000}.{nccl // 100 % 100}.{nccl % 100}"

    def empty(
        self, shape: tuple[int, int], dtype: np.dtype, order: str, ld: int, *, symmetric: bool = False
    ) -> Any:
        with self.on_device():
            return self.session.cublasmp.empty(shape, dtype, order, ld, symmetric=symmetric)

    def lifetime(self) -> Callable[[], None]:
        self.runtime.arena.begin()
        return partial(self.runtime.settle, self.xp.cuda.get_current_stream())

    def recycle(self, array: Any) -> None:
        """Let later symmetric arrays reuse the memory of this one, once queued work is done. Collective."""
        self.synchronize()
        self.session.cublasmp.recycle(array)

    def take_over(self, array: Any, dtype: np.dtype | None = None) -> Any:
        cupy = self.xp
        try:
            if not isinstance(array, cupy.ndarray):
                shared = _over_tensor(cupy, array)
                if shared is None:
                    shared = cupy.from_dlpack(array) if hasattr(array, "__dlpack__") else cupy.asarray(array)
                array = shared
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            raise ArgumentError(
                f"local array: {type(array).__name__} does not share GPU memory: {error}"
            ) from None
        if array.device.id != self.device.index:
            raise ArgumentError(
                f"local array: is on GPU {array.device.id}, this rank's is {self.device.index}"
            )
        return array

    def at(self, address: int, shape: tuple[int, int], dtype: np.dtype, ld: int = 0) -> Any:
        if 0 in shape:
            return self.xp.empty(shape, stored_dtype(dtype))
        (rows, cols), cuda, item = shape, self.xp.cuda, dtype.itemsize
        down = (ld or cols) * item
        memory = cuda.UnownedMemory(address, (rows - 1) * down + cols * item, None, self.device.index)
        return self.xp.ndarray(shape, stored_dtype(dtype), cuda.MemoryPointer(memory, 0), (down, item))

    def to_host(self, array: Any, out: NDArray[Any] | None = None) -> NDArray[Any]:
        room = out.view(np.uint8) if out is not None and is_float8(out.dtype) else out
        with self.on_device():
            if self._copies.takes(array):
                values = self._copies.read(array, room)
            else:
                self.runtime.wait(self.xp.cuda.get_current_stream())
                order = "F" if array.strides[0] < array.strides[1] else "C"
                values = self.xp.asnumpy(array, order=order)
                if room is not None:
                    room[...] = values
        return values if out is None else out

    def from_host(self, array: Any, values: NDArray[Any]) -> None:
        if not array.size:
            return
        if is_float8(values.dtype):
            values = values.view(np.uint8)
        with self.on_device():
            if self._copies.takes(array):
                self._copies.write(array, values)
            else:
                array[...] = self.xp.asarray(values.astype(array.dtype, copy=False))

    def like_on_host(self, array: Any) -> NDArray[Any]:
        return np.empty(array.shape, array.dtype, order="F" if array.strides[0] < array.strides[1] else "C")

    def overlap(self, a: Any, b: Any) -> bool:
        return self.session.cublasmp.overlap(a, b)

    def on_device(self) -> AbstractContextManager[Any]:
        """Return a context in which this rank's GPU is the current one, whichever the user has made so. Local."""
        return self.runtime.health.current()

    def on_stream(self, handle: int, device: int) -> AbstractContextManager[Any]:
        """Return a context in which another library's stream is CuPy's current one, if it is this GPU's. Local."""
        if device != self.device.index or self.xp.cuda.get_current_stream().ptr == handle:
            return nullcontext()
        return arena.current(arena.external(handle, device))

    def graphs(self) -> Recordings:
        return self.session.recordings()

    def synchronize(self) -> None:
        """Wait until the device has done all its work; raise if a rank is gone. Local."""
        with self.on_device():
            self.runtime.synchronize()

    def prepare_move(
        self,
        source: MatrixDescriptor,
        target: MatrixDescriptor,
        arrays: tuple[Any, Any],
        part: Trapezoid | None = None,
    ) -> Product:
        converts = source.dtype != target.dtype and (is_float8(source.dtype) or is_float8(target.dtype))
        if 0 in source.shape or (not converts and source.same_places(target)):
            return _LocalCopy(self, part_mask(part, target, self.runtime.rank))
        if converts:
            return _ConvertedMove(self, source, target, arrays, part)
        way = "by NCCL" if self.session.gpu.why_no_windows else "by copy engines"
        return ExchangeMove(self, source, target, part, way)

    def close(self) -> None:
        self._copies.close()
        self.session.close()


class _LocalCopy(QueuedProduct):
    """A move in which every element stays on its rank: only memory order or type change."""

    path = "by a local copy"

    def __init__(self, engine: Engine, mask: Any) -> None:
        self._engine, self._mask = engine, mask

    def _queue(self, operands: Operands) -> None:
        to, of = operands.d, operands.a
        if self._mask is None and to.size:
            rows, cols = (Stretch(1, extent, 0, 0, 0, 0) for extent in to.shape)
            cast("GpuTransport", self._engine.transport).copy_piece(to, of, Piece((rows,), (cols,)))
        else:
            copy_where(to, of, self._mask)


class _ConvertedMove(Composite):
    """A move that converts 8-bit floats. No library and none of our kernels converts them on the way: bytes travel.

    Elements are converted before they travel if they become 8-bit floats, otherwise after they have arrived.
    """

    def __init__(
        self,
        engine: Engine,
        source: MatrixDescriptor,
        target: MatrixDescriptor,
        arrays: tuple[Any, Any],
        part: Trapezoid | None,
    ) -> None:
        self._source, self._target, self._part = source, target, part
        self._late = not is_float8(target.dtype)
        self._mask = part_mask(part, target, engine.transport.rank)
        super().__init__(engine, Operands(arrays[0], None, None, arrays[1]))
        self.path = f"{self._products[0].path}, converting 8-bit floats"
        self.copied_bytes += self._own["between"].nbytes

    def _add_steps(self, operands: Operands) -> None:
        engine, source, target = self._engine, self._source, self._target
        like, other = (target, source) if self._late else (source, target)
        layout = replace(like, dtype=other.dtype, ld=None)
        between = self._own["between"] = new_part(engine, layout)
        arrays, layouts = ((operands.a, between), (source, layout)) if self._late else (
            (between, operands.d), (layout, target)
        )  # fmt: skip
        move = engine.prepare_move(*layouts, arrays, self._part)
        if self._late:
            self._add(move, lambda given: Operands(given.a, None, None, self._own["between"]))
            self._then(self._from_bytes)
        else:
            self._then(self._to_bytes)
            self._add(move, lambda given: Operands(self._own["between"], None, None, given.d))

    def _from_bytes(self, operands: Operands) -> None:
        if operands.d.size:
            values = convert(self._engine.xp, self._own["between"], self._source.dtype, self._target.dtype)
            copy_where(operands.d, values, self._mask)

    def _to_bytes(self, operands: Operands) -> None:
        if operands.a.size:
            self._own["between"][...] = convert(
                self._engine.xp, operands.a, self._source.dtype, self._target.dtype
            )

    @property
    def queues(self) -> bool:
        """False: converting allocates."""
        return False

    def misfit(self, name: str, array: Any) -> str:
        return self._products[0].misfit(name, array) if self._late else ""


def _over_tensor(cupy: Any, tensor: Any) -> Any:
    """Return a CuPy array over a PyTorch tensor; None if the streams of the two libraries must be ordered. Local.

    DLPack orders them in every call, which takes several times as long.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor) or not (tensor.is_cuda and tensor.numel()):
        return None
    dtype = named_like(str(tensor.dtype))
    raw = getattr(
        getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None
    )  # the object takes 50 us to make
    stream = torch.cuda.current_stream(tensor.device).cuda_stream if raw is None else raw(tensor.device.index)
    if dtype is None or dtype.isbuiltin != 1 or stream != cupy.cuda.get_current_stream().ptr:
        return None
    shape, strides, item = tuple(tensor.shape), tensor.stride(), dtype.itemsize
    nbytes = (1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))) * item
    memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), nbytes, tensor, tensor.device.index)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(shape, dtype, pointer, tuple(stride * item for stride in strides))
