# SPDX-License-Identifier: Apache-2.0
"""HostEngine: NumPy arrays, MPI ranks, the CPU's BLAS."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm import (
    Agreement,
    CellArrays,
    Communicator,
    Exchange,
    Side,
    allgather_alike,
    machines_of,
    nodes_of,
    share_of_cores,
)
from ...dtypes import is_float8
from ...errors import ArgumentTypeError
from ...layout import MatrixDescriptor
from ...layout.pieces import Trapezoid
from .. import dense
from ..arrays import overlap
from ..composite import ExchangeMove
from ..direct import Direct, alias
from ..operations import Operations
from ..protocol import Engine, Method, Traits, Transport
from ..tensor import algorithms
from . import blas, spectral_libraries
from .blas import ThreadLimit
from .direct import FIRST_SLABS, HostDirect
from .host_operations import HostOperations
from .host_transport import Buffers, HostTransport

METHODS: tuple[Method, ...] = (
    *dense.METHODS,
    *spectral_libraries.METHODS,
    *algorithms.METHODS,
)


LITTLE = 16 << 20  # bytes of buffers that an engine which idles may keep


class HostEngine(Engine):
    """CPU ranks. Making and closing one is collective over ``comm``.

    BLAS gets the cores of the machine divided by the ranks of the job on it, unless an environment variable such as
    OMP_NUM_THREADS says otherwise. PBLASMP_RANKS_PER_NODE splits a machine into several nodes, to try communication
    between nodes on it.
    """

    name = "host"
    traits = Traits(
        on_gpus=False,
        queues=False,
        records=False,
        overlaps_messages=False,
        fast_products=False,
        computes_foreign=True,
    )
    xp: Any = np
    methods: Sequence[Method] = METHODS

    def __init__(self, comm: Communicator, why: str) -> None:
        self.why = why
        self._comm = comm
        self.mpi_libraries: dict[str, Any] = {}  # by name, or why it cannot be used: see ``library_of``
        with Agreement(comm, "HostEngine"):
            self._library = blas.library_name()
            blas.load(self._library, "d")  # now, so that its threads can be limited
            blas.address(self._library, "d", "potrf")  # and LAPACK, so that a first call need not
        locations = comm.locations()
        shares = {
            rank: share
            for ranks in machines_of(locations)
            for share in (share_of_cores([locations[rank] for rank in ranks]),)
            for rank in ranks
        }
        nodes = nodes_of(locations)
        # After everything that the ranks may agree to fail in.
        self._node = comm if len(nodes) == 1 else comm.split(nodes)
        comm.node = None if len(nodes) == 1 else self._node
        self._buffers = Buffers(self._node)
        why_not_shared = self._buffers.why_not_shared(*FIRST_SLABS)
        if len(nodes) > 1:
            why_not_shared = next((why for why in allgather_alike(comm, why_not_shared) if why), "")
        share = shares[comm.rank]
        comm.patient = self._node.patient = share < 1
        self.threads = max(1, int(share))
        self._limit = ThreadLimit(self.threads, self._library)
        self.resume()
        # A context that breaks, or is dropped without being closed, gives BLAS its threads back, too.
        comm.channel.on_break = self._limit.lift
        weakref.finalize(self, self._limit.lift).atexit = False
        # The same number on every node: what all of them compute is then rounded alike.
        workers = max(1, min(min(len(ranks), int(shares[ranks[0]] * len(ranks))) for ranks in nodes))
        operations = HostOperations(self._library, self._buffers, workers)
        self.operations: Operations = operations
        transport = HostTransport(comm, nodes, self._buffers, why_not_shared)
        self.transport: Transport = transport
        threads = blas.threads_set_by_user()
        rounding = blas.described(self._library), self.threads, sorted(threads)
        alike = len({*map(str, allgather_alike(comm, rounding))}) == 1
        one_thread = (threads or {str(self.threads)}) == {"1"}
        small_kernels = one_thread and blas.has_small_kernels(self._library)
        direct = HostDirect(
            self._library, self._buffers, operations, transport, alike=alike, small_kernels=small_kernels
        )
        self.direct: Direct | None = direct
        self._untouched = direct.untouched

    @property
    def machine(self) -> str:
        """This rank's processor. Local."""
        return f"{_processor()} with {os.cpu_count()} cores, {self.threads} threads per rank"

    @property
    def libraries(self) -> str:
        """BLAS and NumPy. Local."""
        return f"{blas.described(self._library)}, NumPy {np.__version__}"

    def empty(
        self,
        shape: tuple[int, int],
        dtype: np.dtype,
        order: str,
        ld: int,
        *,
        symmetric: bool = False,
    ) -> NDArray[Any]:
        rows, cols = shape
        try:
            if order == "C":
                return np.empty((rows, ld), dtype)[:, :cols]
            return np.empty((ld, cols), dtype, order="F")[:rows]
        except ValueError as error:  # more bytes than an address counts
            raise MemoryError(f"a local array of {rows} × {cols} {dtype.name}: {error}") from None

    def take_over(self, array: Any, dtype: np.dtype | None = None) -> NDArray[Any]:
        adopted = self._shared(array)
        if dtype is not None and is_float8(dtype) and adopted.dtype == np.uint8:
            return adopted.view(dtype)
        return adopted

    def at(self, address: int, shape: tuple[int, int], dtype: np.dtype, ld: int = 0) -> NDArray[Any]:
        if 0 in shape:
            return np.empty(shape, dtype)
        item = dtype.itemsize
        # NumPy does not know the names of short types
        return alias(address, shape, ((ld or shape[1]) * item, item), f"|V{item}").view(dtype)

    @staticmethod
    def _shared(array: Any) -> NDArray[Any]:
        if isinstance(array, np.ndarray):  # a derived class may compute otherwise, as np.matrix does
            return np.asarray(array)
        why = ""
        try:
            if hasattr(array, "__array_interface__"):
                return np.asarray(array)
            if hasattr(array, "__dlpack__"):
                return np.from_dlpack(array)
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            why = f", which does not share the host's memory: {error}"
        kind = f"{type(array).__module__.partition('.')[0]}.{type(array).__name__}"
        raise ArgumentTypeError(f"local array: expected a NumPy array on the host engine, got {kind}{why}")

    def put(
        self,
        src: Side,
        values: CellArrays,
        dst: Side,
        arrays: CellArrays,
        dtype: np.dtype,
    ) -> None:
        Exchange(self._comm, src, dst, dtype).run(values, arrays)

    def get(
        self,
        src: Side,
        arrays: CellArrays,
        dst: Side,
        values: CellArrays,
        dtype: np.dtype,
    ) -> None:
        Exchange(self._comm, src, dst, dtype).run(arrays, values)

    def to_host(self, array: NDArray[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
        if out is None:
            return array
        out[...] = array
        return out

    def like_on_host(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def from_host(self, array: NDArray[Any], values: NDArray[Any]) -> None:
        if array is not values:
            array[...] = values

    def overlap(self, a: NDArray[Any], b: NDArray[Any]) -> bool:
        return overlap(a, b)

    def prepare_move(
        self,
        source: MatrixDescriptor,
        target: MatrixDescriptor,
        arrays: tuple[NDArray[Any], NDArray[Any]],
        part: Trapezoid | None = None,
    ) -> ExchangeMove:
        return ExchangeMove(self, source, target, part)

    def can_idle(self) -> bool:
        """Return whether it holds little memory. Local."""
        return sum(self._buffers.held("")) - self._untouched() <= LITTLE

    def idle(self) -> None:
        """Give BLAS its threads back, until ``resume``. Local."""
        self._limit.lift()

    def resume(self) -> None:
        """Limit BLAS's threads, unless the user has said how many there are. Local."""
        if not blas.threads_set_by_user():
            self._limit.set()

    def limit_new_library(self) -> None:
        """Limit the threads of a BLAS that has been loaded since, too. Local."""
        ThreadLimit.look_again()
        self.resume()

    def close(self) -> None:
        for library in self.mpi_libraries.values():
            if not isinstance(library, str):
                library.close()
        self._buffers.close()
        self.idle()
        if self._node is not self._comm:
            self._node.free()


@functools.cache
def _processor() -> str:
    """Return the name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
