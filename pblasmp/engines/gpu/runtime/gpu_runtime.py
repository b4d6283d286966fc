# SPDX-License-Identifier: Apache-2.0
"""GpuRuntime: a rank's GPU, the streams that its work is queued on, waits, and the agreement of the ranks."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

from ....comm import Agreement, Communicator, is_agreed, nodes_of
from .arena import Arena, capture_of, current
from .device import Device
from .health import Health

_on: dict[int, Turns] = {}


class Turns:
    """The order of the contexts of this process on one GPU. Local.

    A kernel that waits for other ranks on all multiprocessors must not meet what another context has wait for ranks on
    the same GPU: one GPU would begin with this, another with that, and each would wait for what has no room. So such a
    kernel runs behind all that the other contexts have queued, and what they queue later runs behind it: the ranks
    call in the same order, and so do their GPUs. Contexts that queue none are not ordered.

    Attributes:
        taken: how often a turn was taken.
    """

    def __init__(self) -> None:
        self._members: weakref.WeakSet[GpuRuntime] = weakref.WeakSet()
        self._alone = True
        # those whose work waits for the last turn
        self._behind: weakref.WeakSet[GpuRuntime] = weakref.WeakSet()
        self._last: GpuRuntime | None = None
        self.taken = 0

    def join(self, member: GpuRuntime) -> None:
        """Order a context from now on. Local."""
        self._members.add(member)
        self._alone = len(self._members) == 1

    def leave(self, member: GpuRuntime) -> None:
        """Forget a context, whose work has ended. Local."""
        self._members.discard(member)
        self._alone = len(self._members) <= 1
        if self._last is member:
            self._last = None

    def nothing_to_order(self, member: GpuRuntime, *, takes: bool) -> bool:
        """Return whether ``follow``, and ``take`` if the work ``takes`` a turn, would do nothing now. Local."""
        return (self._alone and self._last is member) if takes else self._last is None or self._last is member

    def follow(self, member: GpuRuntime, stream: Any) -> None:
        """Let what a context queues on a stream from now on wait for the last turn of another one. Local."""
        last = self._last
        if last is None or last is member or member in self._behind:
            return
        if member.let_wait(stream, last.stream):
            self._behind.add(member)

    def take(self, member: GpuRuntime, stream: Any) -> None:
        """Let what a context queues next on a stream wait for all others, and them for it. Local."""
        self.taken += 1
        self._last = member
        if self._alone:
            return
        for other in self._members:
            if other is not member:
                member.let_wait(stream, other.stream)
        self._behind.clear()


def turns_on(device: int) -> Turns:
    """Return the turns on a GPU of this process, by its CUDA index. Local."""
    return _on.setdefault(device, Turns())


_SHARED_MEMORY = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
NO_MULTICAST = "CUBLASMP_DISABLE_MULTICAST"  # cuBLASMp obeys it, too


class GpuRuntime:
    """One GPU of a context. Making and closing one is collective over ``comm``.

    Attributes:
        capability: the least compute capability of all ranks' GPUs: 90 for 9.0.
        multiprocessors: the fewest of all ranks' GPUs, as pieces and flags follow from it.
        shared_memory: bytes that a block of threads can have on any of them.
        shared_gpus: whether ranks share a GPU.
        multicast: no rank's environment switches NVLink multicast off.
        why_unregistered: why NCCL registers no memory of the ranks; "" as long as nobody has found that.
        arena: the memory that products share.
        health: whether the GPU still works, and what aborts it.
        followers: functions of a stream, called when work moves to it.
        turns: the order of this process's contexts on the GPU.
        stream: the stream that work was queued on last.
    """

    def __init__(self, comm: Communicator, device: Device) -> None:
        import cupy

        self.comm, self.rank, self.size, self.device, self.cupy = comm, comm.rank, comm.size, device, cupy
        self.followers: list[Callable[[Any], None]] = []
        self._others: tuple[Any, ...] = ()  # streams of work that is not ordered before that on ``stream``
        self._asked = (
            -1,
            False,
        )  # how many process groups there were when the ranks were asked, and what they said
        self.why_unregistered = ""
        with ExitStack() as self._closing:
            with self.agreement("Context: GPU"):
                before = cupy.cuda.runtime.getDevice()
                self._closing.callback(cupy.cuda.Device(before).use)
                cupy.cuda.Device(device.index).use()
                capability = int(cupy.cuda.Device(device.index).compute_capability)
                properties = cupy.cuda.runtime.getDeviceProperties(device.index)
                room = int(cupy.cuda.runtime.deviceGetAttribute(_SHARED_MEMORY, device.index))
                found = capability, int(properties["multiProcessorCount"]), room
                self.stream: Any = cupy.cuda.get_current_stream()
                self.health = Health(comm, device)
                self.health.queues.append(lambda: [self.stream])
                self.turns = turns_on(device.index)
                self.turns.join(self)
                self._closing.callback(self.turns.leave, self)
            multicast = os.environ.get(NO_MULTICAST, "0") in ("", "0")
            said = comm.allgather((*found, multicast, device.ranks))  # all ranks choose by the same facts
            capabilities, multiprocessors, rooms, allowed, sharing = zip(*said, strict=True)
            self.capability, self.multiprocessors = min(capabilities), min(multiprocessors)
            self.shared_memory = min(rooms)
            self.multicast, self.shared_gpus = all(allowed), max(sharing) > 1
            self.nodes = nodes_of(comm.locations())
            self.arena = Arena(cupy, self.settle)
            self._closing.callback(self.arena.close)
            self.health.frees.append(self._let_go)
            self._closing = self._closing.pop_all()

    @property
    def gpu_name(self) -> str:
        """What CUDA calls the GPU. Local."""
        name = self.cupy.cuda.runtime.getDeviceProperties(self.device.index)["name"]
        return str(name.decode() if isinstance(name, bytes) else name)

    @property
    def available_bytes(self) -> int:
        """Bytes of GPU memory that this rank can have: its share of what is free, and what CuPy keeps. Local."""
        free, _ = self.cupy.cuda.runtime.memGetInfo()
        kept: int = self.cupy.get_default_memory_pool().free_bytes()
        return int(free) // self.device.ranks + kept

    # -- agreement

    def agreement(self, what: str, *, blocks: bool = False) -> Agreement:
        """Return a ``with`` block in which an error on one rank is raised on every rank. Collective over the context.

        Args:
            what: what the ranks do in the block, for messages.
            blocks: a library call inside waits for the other ranks: see ``Agreement``.
        """
        return Agreement(self.comm, what, blocks=blocks)

    @contextmanager
    def queueing(self, what: str) -> Iterator[None]:
        """Return a ``with`` block like ``agreement``, for queueing work that waits for other ranks. Collective.

        If only some ranks fail, the GPUs of the others wait for work that never comes: then the context is broken.
        """
        failed = True
        try:
            with Agreement(self.comm, what):
                yield
                failed = False
        except Exception as error:
            if is_agreed(error, self.comm) and not all(self.comm.allgather(failed)):
                self.comm.channel.broken_by_agreement(f"{what} failed on some ranks only: {error}")
            raise

    # -- streams

    @property
    def capturing(self) -> bool:
        """Whether CuPy's current stream records a CUDA graph. Local."""
        return bool(self.cupy.cuda.get_current_stream().is_capturing())

    @cached_property
    def recording(self) -> Any:
        """The stream on which plans record their graphs. Local."""
        return self.cupy.cuda.Stream(non_blocking=True)

    @property
    def relaxed(self) -> Any:
        """CUDA's mode of recording that allows other work meanwhile. Local."""
        return self.cupy.cuda.runtime.streamCaptureModeRelaxed

    def follow_stream(self) -> None:
        """Use CuPy's current stream from now on, and keep it alive as long as libraries hold it. Local.

        It waits for what was queued on another stream before, since all products share workspaces and buffers, and for
        other contexts' work that takes the whole GPU.
        """
        stream = self.cupy.cuda.get_current_stream()
        self.turns.follow(self, stream)
        if stream.ptr == self.stream.ptr:
            return
        self.let_wait(stream, self.stream)
        for follow in self.followers:
            follow(stream)
        self.stream = stream

    def settle(self, stream: Any) -> None:
        """Let later work on a stream wait for what products have queued: memory made on it is about to be freed. Local.

        CuPy gives the memory of a freed array to the next array that is made on the same stream, whatever other
        streams still do with it.
        """
        for used in (self.stream, *self._others):
            self.let_wait(stream, used)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Queue the work of a block on a stream that the caller orders: nothing waits for it by itself. Local."""
        before, others = self.stream, self._others
        self.stream, self._others = stream, (*others, before)
        try:
            with current(stream):
                yield
        finally:
            self.stream, self._others = before, others

    def let_wait(self, stream: Any, other: Any) -> bool:
        """Let later work on a stream wait for what is on another one, if it can; return whether it does. Local.

        What a graph records cannot wait for work outside of it, nor the reverse.
        """
        if stream.ptr == other.ptr:
            return True
        records = stream.is_capturing()
        if records != other.is_capturing() or (records and capture_of(stream) != capture_of(other)):
            return False
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record(other)
        stream.wait_event(event)
        return True

    def take_turn(self) -> None:
        """Queue next, on CuPy's current stream, what takes the whole GPU and waits for other ranks. Local."""
        self.turns.take(self, self.cupy.cuda.get_current_stream())

    # -- other communicators

    def beside_others(self) -> bool:
        """Return whether a rank's process has communicators of PyTorch besides this context's own. Collective."""
        own = int(getattr(self.comm, "of_group", False))  # which only communicators of PyTorch's groups say
        groups = _process_groups()
        others = any(self.comm.allgather(groups > own))
        self._asked = groups, others
        return others

    @property
    def others_of_late(self) -> bool | None:
        """What ``beside_others`` has returned last; None if it may return something else on account of this rank."""
        groups, others = self._asked
        return others if groups == _process_groups() else None

    # -- waiting, and the end

    def wait(self, *queues: Any) -> None:
        """Wait for CuPy's streams or events; raises as :meth:`Health.wait` does. Local."""
        self.health.wait(*queues)

    def synchronize(self) -> None:
        """Wait until the GPU has done all its work; raises as ``wait`` does. Local."""
        # The stream used last has waited for all other streams of this runtime.
        self.wait(self.stream, self.cupy.cuda.get_current_stream())
        self.cupy.cuda.runtime.deviceSynchronize()

    def _let_go(self) -> None:
        """Free what the work of this broken context, which has ended, used. Local."""
        self.turns.leave(self)
        self.arena.let_go()
        self.followers.clear()

    def close(self) -> None:
        """Free the arena, and make the GPU current that was so before. Local."""
        self._closing.close()


def _process_groups() -> int:
    """Return how many process groups PyTorch has made in this process, if it is imported at all. Local."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        return 0
    return int(dist.distributed_c10d.get_pg_count())
