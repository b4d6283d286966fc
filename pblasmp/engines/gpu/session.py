# SPDX-License-Identifier: Apache-2.0
"""Session: the parts of a GPU engine that are made once: runtime, NCCL, local products and peers, cuBLASMp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from ...bindings import Library
from ...comm import Communicator
from ..protocol import Engine
from .cublasmp.library import Cublasmp, symmetric_heap
from .runtime.device import Device
from .runtime.gpu import Gpu
from .runtime.gpu_runtime import GpuRuntime
from .runtime.graphs import Recordings
from .runtime.nccl import Nccl


def session_of(engine: Engine) -> Session:
    """Return the session of a GPU engine. Local."""
    of_gpu: Any = engine
    session: Session = of_gpu.session
    return session


class Session:
    """What is made once on a GPU and used by all prepared products. Making and closing one is collective over ``comm``.

    Args:
        nccl: an NCCL communicator over the same ranks: its address or nccl4py's object; never destroyed here.

    Attributes:
        runtime: the GPU, its streams and waits.
        nccl: NCCL's communicators.
        gpu: local products, kernels, and peers' memory if it can be reached.
        cublasmp: cuBLASMp's handle, grids and workspaces.
        solver: cuSOLVERMp, or why it cannot be used; None until ``solver_of`` has been asked.
        held_with: objects that are kept alive with the session.
        refused: by kinds of tensor-parallel products, whether "push" has to send them by messages.
    """

    def __init__(self, comm: Communicator, device: Device, library: Library, nccl: Any = None) -> None:
        self.solver: Any = None
        self.held_with: tuple[Any, ...] = ()
        self.refused: dict[Any, bool] = {}
        with ExitStack() as self._closing:  # frees what was made, last first, every step even if one fails
            self.runtime = runtime = GpuRuntime(comm, device)
            self._closing.callback(runtime.close)
            heap = symmetric_heap(runtime, library)
            self._closing.callback(heap.close)
            self.nccl = Nccl(runtime, nccl)
            self._closing.callback(self.nccl.close)
            self.gpu = Gpu(runtime, self.nccl)
            self._closing.callback(self.gpu.close)
            self.cublasmp = Cublasmp(runtime, self.nccl, library, heap)
            self._closing.callback(self.cublasmp.close)
            self._closing = self._closing.pop_all()
        comm.channel.device = runtime.health
        runtime.health.begin()

    @property
    def domains(self) -> Sequence[tuple[int, ...]]:
        """The ranks whose GPUs reach each other's memory, or those of each node if none do."""
        return self.runtime.nodes if self.gpu.windows is None else self.gpu.domains

    @property
    def graphs_pay(self) -> bool:
        """Whether replaying a graph takes less time than queueing the same work again.

        Not between nodes, if NCCL's work is part of it: each time it is replayed, NCCL calls back to the host before it
        sends, which takes longer than to queue the collective.
        """
        return len(self.domains) == 1

    def recordings(self) -> Recordings:
        """Return a store for the graphs of a product. Local."""
        return Recordings(self.runtime, self.nccl.calls, pay=self.graphs_pay)

    def close_first(self, close: Callable[[], None]) -> None:
        """Have ``close`` called before what was made earlier is closed. Local."""
        self._closing.callback(close)

    def close(self) -> None:
        """Free everything, last made first. Collective over the context.

        If the context breaks meanwhile, or this GPU is lost, nothing is freed.
        """
        with ExitStack() as behind:
            behind.callback(self._give_back)
            self.runtime.synchronize()

    def _give_back(self) -> None:
        channel, health = self.runtime.comm.channel, self.runtime.health
        if channel.cause or health.is_lost:
            health.abort()
            return
        channel.device = None
        health.end()
        self._closing.close()
