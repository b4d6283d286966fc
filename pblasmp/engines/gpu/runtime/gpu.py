# SPDX-License-Identifier: Apache-2.0
"""Gpu: the operations that the algorithms here use. Every method except ``reserve`` and ``close`` only queues work.

Streams have names. "main" is the stream that was CuPy's current one when a product began; the others are the engine's
own. They are forked from it and joined to it by events, so that a CUDA graph that records "main" records them all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from ..kernels.compiler import check_driver
from ..kernels.kernels import Kernels
from ..kernels.lt import LocalProducts
from ..kernels.lt_product import PLAIN, Fused, Op
from ..kernels.one_kernel import KernelJob, OneKernel
from ..kernels.views import Blocks, Move, View, blocks, whole_move
from .arena import BY_ADDRESS
from .gpu_runtime import GpuRuntime
from .health import nccl_handle
from .nccl import NCCL_SUM, NCCL_TYPES, Nccl, grouped
from .windows import Windows, open_windows

_AMAX_BYTES = 4  # one float32
_URGENT = -5  # priority of the streams of sums, messages, and panels that other ranks wait for: the highest


class _NamedStreams(dict[str, Any]):
    """CuPy's streams by name, each made at its first use."""

    def __init__(self, cupy: Any) -> None:
        super().__init__()
        self._cupy = cupy

    def __missing__(self, name: str) -> Any:
        priority = _URGENT if name.startswith(("sum", "ahead", "net")) else 0
        self[name] = stream = self._cupy.cuda.Stream(non_blocking=True, priority=priority)
        return stream


class Gpu:
    """One GPU and its peers. Making and closing it is collective.

    Attributes:
        products: cuBLASLt.
        kernels: CUDA kernels.
        windows: symmetric memory of the ranks of this one's NVLink domain; None if there is none.
        why_no_windows: why there is no symmetric memory of all ranks, "" if there is.
        domains: the ranks that reach each other's memory, every rank in one.
        exchange, gather: NCCL's messages and its AllGather, by addresses, on any stream.
        arena, multiprocessors, capability, shared_gpus, agreement: as of ``GpuRuntime``.
    """

    def __init__(self, runtime: GpuRuntime, nccl: Nccl) -> None:
        self.rank, self.size, self.agreement = runtime.rank, runtime.size, runtime.agreement
        self.arena, self.multiprocessors = runtime.arena, runtime.multiprocessors
        self.capability, self.shared_gpus = runtime.capability, runtime.shared_gpus
        self._cupy, self._nccl = runtime.cupy, nccl.calls
        self._runtime = runtime.cupy.cuda.runtime
        self._comm, self._take_turn = nccl.handle, runtime.take_turn
        self.exchange, self.gather = nccl.exchange_at, nccl.gather_at
        self._streams = _NamedStreams(runtime.cupy)
        self._events = defaultdict[str, Any](partial(runtime.cupy.cuda.Event, disable_timing=True))
        with ExitStack() as self._closing:
            with runtime.agreement("GPU: cuBLASLt and kernels"):
                self.products = LocalProducts(runtime.cupy, self.scratch)
                self._closing.callback(self.products.close)
                self.products.reserve()
                self.kernels = Kernels(runtime.cupy)
            found = open_windows(runtime, nccl, self.kernels)
            self.windows: Windows | None = None if isinstance(found, str) else found
            self.why_no_windows = found if isinstance(found, str) else ""
            alone = [(rank,) for rank in range(self.size)]
            self.domains = alone if self.windows is None else self.windows.domains
            self._rail = self._made_rail(nccl)
            if self.windows is not None:
                self._closing.callback(self.windows.close)
                raisers, raise_own = runtime.health.raisers, self.windows.raise_own
                raisers.append(raise_own)
                self._closing.callback(raisers.remove, raise_own)
                if nccl.is_own:
                    runtime.health.frees.append(self.windows.let_go)
                if self.windows.size < self.size:
                    self.why_no_windows = (
                        "only GPUs of one NVLink domain reach each other, and there are several"
                    )
            queues, mine = runtime.health.queues, lambda: list(self._streams.values())
            queues.append(mine)
            self._closing.callback(queues.remove, mine)
            self._closing = self._closing.pop_all()

    def _made_rail(self, nccl: Nccl) -> Any:
        """Return NCCL's communicator of the ranks with this one's place in their domains, if these are alike."""
        sizes = {len(ranks) for ranks in self.domains}
        if sizes == {1} or len(sizes) > 1 or len(self.domains) == 1:
            return nccl.handle
        members = next(ranks for ranks in self.domains if self.rank in ranks)
        return nccl_handle(nccl.split(members.index(self.rank)))

    # -- memory

    @property
    def alone(self) -> bool:
        """Whether this GPU has no symmetric memory: what only this rank reads and writes of it is scratch memory."""
        return self.windows is None

    def reserve(self, name: str, nbytes: int) -> None:
        """Make the symmetric buffer ``name`` at least that large, the same size on every rank. Collective."""
        assert self.windows is not None
        self.windows.reserve(name, nbytes)

    def symmetric(self, name: str, rank: int) -> int:
        """Return the address of a rank's symmetric buffer, as this rank sees it. Local.

        Whatever is done with a buffer, its own rank asks for it, too, and keeps it if a user's graph records that.
        """
        if self.windows is None:
            return self.scratch(name, 0)
        buffer = self.windows.buffer(name)
        if rank == self.rank and self.arena.captured:
            buffer.captured = True
        return buffer.peers[rank]

    def symmetric_of_all(self, name: str) -> Mapping[int, int]:
        """Return by rank what ``symmetric`` returns. Local."""
        if self.windows is None:
            return dict.fromkeys(range(self.size), self.scratch(name, 0))
        buffer = self.windows.buffer(name)
        if self.arena.captured:
            buffer.captured = True
        return buffer.peers

    def symmetric_bytes(self, name: str) -> int:
        """Return the size of a symmetric buffer, the same on every rank. Local."""
        assert self.windows is not None
        return self.windows.buffer(name).nbytes

    def scratch(self, name: str, nbytes: int) -> int:
        """Return the address of this GPU's own buffer of that name, which all products share. Local.

        Products reserve theirs when they are prepared: a buffer must not grow while a graph records.
        """
        return int(self.arena.buffer(BY_ADDRESS, name, nbytes).data.ptr)

    def scalar(self, value: Any) -> int:
        """Return the device address of a float32, given as an array or a number; 0 for None. Local."""
        if value is None:
            return 0
        array = self.arena.number(value) if isinstance(value, float) else value
        return int(array.data.ptr)

    # -- order

    def use_current_stream(self) -> None:
        """Let "main" be CuPy's current stream. Local."""
        self._streams["main"] = self._cupy.cuda.get_current_stream()

    def begin(self, *names: str) -> None:
        """Begin a product on CuPy's current stream, and fork streams of these names from it. Local."""
        self._streams["main"] = stream = self._cupy.cuda.get_current_stream()
        if self.windows is not None and self.windows.size > 1:
            self.windows.await_all(stream)
        for name in names:
            self.follow(name, "main")

    def end(self, *names: str) -> None:
        """Join the streams of these names to the main one, and end the product. Local."""
        for name in names:
            self.follow("main", name)
        if self.windows is not None and self.windows.size > 1:
            self.windows.arrive(self._streams["main"])

    def meet(self) -> None:
        """Wait on the main stream until every rank's has reached this point; no GEMM may run meanwhile. Local."""
        assert self.windows is not None
        self.windows.meet(self._streams["main"])

    def follow(self, later: str, earlier: str) -> None:
        """Let later work on ``later`` wait for all work so far on ``earlier``. Local."""
        event = self._events[earlier]
        event.record(self._streams[earlier])
        self._streams[later].wait_event(event)

    def mark(self, name: str, stream: str) -> None:
        """Set a mark for all work so far on a stream. Local."""
        self._events[name].record(self._streams[stream])

    def await_mark(self, stream: str, name: str) -> None:
        """Let later work on a stream wait for a mark. Local."""
        assert name in self._events, name  # or nothing would be waited for
        self._streams[stream].wait_event(self._events[name])

    def raise_flag(self, stream: str, rank: int, number: int) -> None:
        """Signal ``rank`` that all earlier work on this stream is done. Local."""
        assert self.windows is not None
        self.windows.raise_flag(self._streams[stream], rank, number)

    def raise_flags(self, stream: str, flags: Sequence[tuple[int, int]]) -> None:
        """Signal ranks likewise, each with a number, without waiting for copy engines. Local."""
        if flags:
            assert self.windows is not None
            self.windows.raise_flags(self._streams[stream], flags)

    def await_flag(self, stream: str, rank: int, number: int) -> None:
        """Wait for ``rank``'s flag, next to a GEMM. Local."""
        assert self.windows is not None
        self.windows.await_flag(self._streams[stream], rank, number)

    def await_flags(self, stream: str, flags: Sequence[tuple[int, int]]) -> None:
        """Wait for flags, each a rank and a number, sooner than ``await_flag``; no GEMM may run meanwhile. Local."""
        if flags:
            assert self.windows is not None
            self.windows.await_flags(self._streams[stream], flags)

    def stream(self, name: str) -> Any:
        """Return CuPy's stream of that name, made the first time. Local."""
        return self._streams[name]

    # -- work

    def multiply(
        self,
        stream: str,
        x: View,
        w: View,
        d: View,
        *,
        op_w: Op,
        alpha: complex = 1,
        beta: complex = 0,
        c: View | None = None,
        finish: Fused = PLAIN,
        compute: str | None = None,
        once: bool = False,
    ) -> None:
        """Queue D = alpha X op(W) + beta C and the epilogue; without inputs the product is 0. Local."""
        if not d.rows * d.cols:
            return
        if x.cols:
            self.products.multiply(
                self.stream(stream).ptr, x, w, d,
                op_w=op_w, alpha=alpha, beta=beta, c=c, finish=finish, compute=compute, lane=stream, once=once,
            )  # fmt: skip
            return
        if finish.amax:  # a product overwrites it, a sum raises it
            self.clear(stream, finish.amax, _AMAX_BYTES)
        bias = View(finish.bias, 1, d.cols, d.cols, finish.bias_dtype or d.dtype) if finish.bias else None
        self.add(
            stream, [], [d], beta=beta, c=c or d, bias=bias, activation=finish.activation, scale=finish.scale_d,
            amax=finish.amax,
        )  # fmt: skip

    def clear(self, stream: str, at: int, nbytes: int) -> None:
        """Set memory to zero. Local."""
        self._runtime.memsetAsync(at, 0, nbytes, self._streams[stream].ptr)

    def one_kernel(self, kernel: OneKernel, job: KernelJob, blocks: int) -> None:
        """Launch a kernel that multiplies and communicates, on the main stream. Local to queue, collective to run.

        ``blocks`` is how many there may be: one on a multiprocessor.
        """
        self._take_turn()
        kernel.launch(job, blocks, self._streams["main"])

    def push(self, stream: str, to: View, of: View, count: int = 1, steps: tuple[int, int] = (0, 0)) -> None:
        """Copy a matrix from or to a peer, by a copy engine. Local.

        Args:
            count: how many equal matrices are copied.
            steps: the entries from one to the next, in ``to`` and in ``of``.
        """
        at, kind = self._streams[stream].ptr, self._runtime.memcpyDefault
        if count == 1 and to.ld == of.ld == of.cols:
            if of.rows * of.cols:
                self._runtime.memcpyAsync(to.address, of.address, of.nbytes, kind, at)
            return
        for b in blocks(to, of, count, steps):
            if b.depth > 1:
                self._copy_3d(b, at)
            elif b.height > 1:
                self._runtime.memcpy2DAsync(
                    b.to, b.pitches[0], b.of, b.pitches[1], b.width, b.height, kind, at
                )
            else:
                self._runtime.memcpyAsync(b.to, b.of, b.width, kind, at)

    @staticmethod
    def _copy_3d(b: Blocks, stream: int) -> None:
        from cuda.bindings import driver

        copy = driver.CUDA_MEMCPY3D()
        copy.dstMemoryType = copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        copy.dstDevice, copy.srcDevice = b.to, b.of
        copy.WidthInBytes, copy.Height, copy.Depth = b.width, b.height, b.depth
        copy.dstPitch, copy.srcPitch = b.pitches
        copy.dstHeight, copy.srcHeight = (s // p for s, p in zip(b.slices, b.pitches, strict=True))
        check_driver(driver.cuMemcpy3DAsync(copy, stream))

    def copy(self, stream: str, to: View, of: View) -> None:
        """Copy a matrix by a kernel. Local."""
        if of.rows * of.cols:
            self.kernels.copy(self._streams[stream], to, of)

    def spread(self, stream: str, to: Sequence[int], of: View) -> None:
        """Copy a matrix to several addresses, without gaps between rows there, by a kernel. Local."""
        if of.contiguous and of.rows * of.cols:
            self.kernels.spread(self._streams[stream], to, of.address, of.nbytes)
        elif not of.contiguous:
            places = (View(at, of.rows, of.cols, of.cols, of.dtype) for at in to)
            self.move(stream, [whole_move(place, of) for place in places])

    def move(self, stream: str, moves: Iterable[Move]) -> None:
        """Copy blocks by a kernel; see ``Kernels.move``. Local."""
        self.kernels.move(self._streams[stream], moves)

    def add(self, stream: str, parts: Sequence[View], outs: Sequence[View], **how: Any) -> None:
        """Add matrices and finish them; see ``Kernels.add``. Local."""
        self.kernels.add(self._streams[stream], parts, outs, **how)

    # -- NCCL's collectives, on contiguous matrices; the main stream

    def _collective(self, across: bool) -> tuple[Any, int]:
        """Return the communicator and the stream of a collective: of all ranks, or of this one's rail. Local."""
        return (self._rail, self._streams["net"].ptr) if across else (self._comm, self._streams["main"].ptr)

    def reduce_scatter(self, of: View, to: View, rows: Sequence[int], *, across: bool = False) -> None:
        """Add the ranks' ``of``; each gets its ``rows`` in ``to``. Local to queue, collective to run.

        With ``across``, here and below, on the stream "net", of the ranks with this one's place in their domains.
        """
        count, kind = _words(of.dtype) * of.cols, NCCL_TYPES[of.dtype.name]
        comm, at = self._collective(across)
        if len(set(rows)) == 1:
            self._nccl.reduce_scatter(of.address, to.address, rows[0] * count, kind, NCCL_SUM, comm, at)
            return
        start = 0
        with grouped(self._nccl):
            for rank, n in enumerate(rows):
                part = of.lines(start, start + n)
                self._nccl.reduce(part.address, to.address, n * count, kind, NCCL_SUM, rank, comm, at)
                start += n

    def all_reduce(self, matrix: View, *, across: bool = False) -> None:
        """Add the ranks' matrices, in place. Local to queue, collective to run."""
        count, kind = matrix.rows * matrix.cols * _words(matrix.dtype), NCCL_TYPES[matrix.dtype.name]
        comm, at = self._collective(across)
        self._nccl.all_reduce(matrix.address, matrix.address, count, kind, NCCL_SUM, comm, at)

    def all_gather(self, of: View, to: int, nbytes: Sequence[int], *, across: bool = False) -> None:
        """Gather every rank's ``of`` end to end at ``to``. Local to queue, collective to run."""
        (comm, at), kind = self._collective(across), 1
        if len(set(nbytes)) == 1:
            self._nccl.all_gather(of.address, to, nbytes[0], kind, comm, at)
            return
        in_place = to <= of.address and of.address + of.nbytes <= to + sum(nbytes)
        with grouped(self._nccl):
            for rank, n in enumerate(nbytes):
                self._nccl.broadcast(to if in_place else of.address, to, n, kind, rank, comm, at)
                to += n

    def close(self) -> None:
        """Free everything, every step even if one fails. Collective."""
        self._closing.callback(self._runtime.deviceSynchronize)
        self._closing.close()


def _words(dtype: np.dtype) -> int:
    """Return how many NCCL elements an entry takes."""
    return 2 if dtype.kind == "c" else 1
