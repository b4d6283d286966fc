# SPDX-License-Identifier: Apache-2.0
"""Nccl: the NCCL communicators of a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from ....comm import interfaces, unlike_interfaces
from ....errors import StatusError, UnsupportedError
from .gpu_runtime import GpuRuntime
from .health import nccl_handle

Array = Any
Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of NCCL's and its arguments, the last one the stream if there are any."""

NCCL_TYPES = {
    "float8_e4m3fn": 1, "float8_e5m2": 1,  # bytes: NCCL moves 8-bit floats but does not add them
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9, "complex64": 7, "complex128": 8,
}  # fmt: skip
REDUCED_TYPES = {**NCCL_TYPES, "int32": 2, "int64": 4}  # of arrays that are summed over ranks
NCCL_SUM, _MAX = 0, 2
_BYTE = 1  # ncclUint8


def nccl_version() -> int:
    """Return the version of the NCCL that is loaded, as NCCL numbers it: 22902 is 2.29.2. Local."""
    from nccl.bindings import nccl

    return int(nccl.get_version())


class NcclCalls:
    """NCCL's functions that queue work, of nccl4py's bindings, or notes of them. Local.

    The bindings take a tenth of the host's time that nccl.core takes.

    Args:
        bindings: nccl.bindings.nccl.
    """

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings
        self._note: Callable[[list[Call]], None] | None = None
        self._group: list[Call] | None = None  # noted, but not ended yet

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._bindings, name)

        def call(*args: Any) -> None:
            if self._note is None:
                function(*args)
            else:
                self._noted(name, function, args)

        setattr(self, name, call)
        return call

    def _noted(self, name: str, function: Any, args: tuple[Any, ...]) -> None:
        assert self._note is not None
        calls = [(function, args)]
        if name == "group_start":
            self._group = calls
        elif self._group is None:
            self._note(calls)
        else:
            self._group += calls
            if name == "group_end":
                calls, self._group = self._group, None
                self._note(calls)

    @contextmanager
    def noted(self, note: Callable[[list[Call]], None]) -> Iterator[None]:
        """Return a block in which nothing is queued, but ``note`` is told of each call, or group of calls. Local."""
        self._note, self._group = note, None
        try:
            yield
        finally:
            self._note = self._group = None


@contextmanager
def grouped(calls: Any) -> Iterator[None]:
    """Return a block whose calls NCCL takes together; an error ends it, too, or later calls would belong to it."""
    calls.group_start()
    try:
        yield
    finally:
        calls.group_end()


class Nccl:
    """NCCL's communicators over the ranks of a context, and over some of them. Making one is collective.

    Args:
        given: a communicator over the same ranks: its address or nccl4py's object; never destroyed here.

    Attributes:
        all: nccl4py's communicator of all ranks.
        calls: what queues NCCL's work.
        is_own: it was made here, and is aborted if the context breaks.
    """

    def __init__(self, runtime: GpuRuntime, given: Any = None) -> None:
        import nccl.core
        from nccl.bindings import nccl as bindings

        self._runtime, self._core, self._bindings = runtime, nccl.core, bindings
        self.calls = NcclCalls(bindings)
        self.is_own = given is None
        with ExitStack() as self._closing:
            self.all = self._made(given)
            self._parts = {runtime.size: self.all}
            runtime.health.nccls.append(self.all)
            self._closing = self._closing.pop_all()

    def _made(self, given: Any) -> Any:
        """Return nccl4py's communicator of all ranks: over the caller's handle, or a new one."""
        runtime, uid = self._runtime, None
        with runtime.agreement("Context: NCCL"):
            self._word = runtime.cupy.zeros(1, np.int32)
            if given is not None:
                return self._core.Communicator(given) if isinstance(given, int) else given
            if fault := unlike_interfaces():  # NCCL fails with an internal error
                raise UnsupportedError(f"Context: {fault}")
            if runtime.rank == 0:
                uid = self._core.get_unique_id()
        uid = runtime.comm.bcast(uid)
        with runtime.agreement("Context: NCCL", blocks=True):
            try:
                made = self._core.Communicator.init(runtime.size, runtime.rank, uid)
            except self._bindings.NCCLError as error:
                raise StatusError(
                    f"Context: NCCL does not connect the ranks: {error}{_over(runtime)}"
                ) from error
            self._closing.callback(made.destroy)
            runtime.health.own.append(made)
        return made

    @cached_property
    def handle(self) -> Any:
        """What nccl4py's bindings take for the communicator of all ranks."""
        return nccl_handle(self.all)

    def communicator(self, size: int) -> int:
        """Return the NCCL communicator of the first ``size`` ranks. Collective the first time."""
        if size not in self._parts:
            self._parts[size] = self.split(0 if self._runtime.rank < size else None)
        address: int = self._parts[size].ptr
        return address

    def split(self, color: int | None) -> Any:
        """Return nccl4py's communicator of the ranks with this rank's color; None: it is in none. Collective."""
        runtime = self._runtime
        with runtime.agreement("NCCL communicator", blocks=True):
            part = self.all.split(color, runtime.rank)
            if color is not None:
                self._closing.callback(part.destroy)
                runtime.health.own.append(part)
                runtime.health.nccls.append(part)
        return part

    def meet(self, size: int) -> None:
        """Queue a barrier of the first ``size`` ranks, whose communicator exists. Collective to run."""
        self._all_reduce(self._word, _MAX, self._parts[size])

    def add_up(self, array: Array) -> None:
        """Queue replacing a contiguous real array by its sum over all ranks. Collective to run."""
        self._all_reduce(array, NCCL_SUM)

    def take_largest(self, array: Array) -> None:
        """Queue replacing a contiguous real array by its maximum over all ranks. Collective to run."""
        self._all_reduce(array, _MAX)

    def _all_reduce(self, array: Array, operation: int, among: Any = None) -> None:
        """Queue an all-reduce in place on CuPy's current stream."""
        handle = nccl_handle(among or self.all)
        at, kind = int(array.data.ptr), REDUCED_TYPES[array.dtype.name]
        stream = int(self._runtime.cupy.cuda.get_current_stream().ptr)
        self.calls.all_reduce(at, at, array.size, kind, operation, handle, stream)

    def exchange(
        self, stream: int, sends: Sequence[tuple[Array, int]], receives: Sequence[tuple[Array, int]]
    ) -> None:
        """Queue messages as one group: contiguous arrays. Local to queue, collective over the ranks involved to run."""
        messages = ((int(array.data.ptr), array.nbytes, rank) for array, rank in (*sends, *receives))
        self.exchange_at(stream, len(sends), *chain.from_iterable(messages))

    def exchange_at(self, stream: int, sends: int, *messages: int) -> None:
        """Queue messages by addresses likewise.

        Args:
            sends: how many are sent; the others are received.
            messages: of each the address, the bytes, and the other rank.
        """
        calls, handle = self.calls, self.handle
        with grouped(calls):
            for i in range(0, len(messages), 3):
                at, nbytes, rank = messages[i : i + 3]
                (calls.send if i < 3 * sends else calls.recv)(at, nbytes, _BYTE, rank, handle, stream)

    def gather_at(self, stream: int, of: int, to: int, nbytes: int) -> None:
        """Queue gathering as many bytes of each rank, end to end at all ranks, by addresses. Collective to run."""
        self.calls.all_gather(of, to, nbytes, _BYTE, self.handle, stream)

    def broadcast(self, stream: int, arrays: Sequence[Array], root: int) -> None:
        """Queue sending arrays, each contiguous in some order, from one rank to all. Collective to run."""
        calls, handle = self.calls, self.handle
        with grouped(calls):
            for array in arrays:
                at = int(array.data.ptr)
                calls.broadcast(at, at, array.nbytes, _BYTE, root, handle, stream)

    def sum_at(self, stream: int, of: int, to: int, count: int, dtype: str, root: int) -> None:
        """Queue the sum of every rank's ``count`` elements at ``of``, to ``to`` of one rank. Collective to run."""
        words = 2 * count if dtype.startswith("complex") else count
        self.calls.reduce(of, to, words, NCCL_TYPES[dtype], NCCL_SUM, root, self.handle, stream)

    def send_to_all(self, stream: int, of: int, to: int, nbytes: int, root: int) -> None:
        """Queue sending what one rank has at ``of`` to ``to`` of all ranks, also its own. Collective to run."""
        self.calls.broadcast(of, to, nbytes, _BYTE, root, self.handle, stream)

    def close(self) -> None:
        """Destroy the communicators that were made here, last made first. Collective."""
        self._closing.close()


def _over(runtime: GpuRuntime) -> str:
    """Return which variable says how NCCL connects this rank's host with others, "" if there are none. Local."""
    there = ", ".join(sorted({*interfaces().values()}))
    words = f"; of {there} NCCL_SOCKET_IFNAME must name what the hosts share, and NCCL_DEBUG=WARN says more"
    return words if len(runtime.nodes) > 1 else ""
