# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory on pretended ranks: growth, agreement, flags, and what is given back."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.gpu.runtime.device import Device
from pblasmp.engines.gpu.runtime.gpu import Gpu
from pblasmp.engines.gpu.runtime.windows import (
    FLAGS,
    MESSAGES,
    ONE_KERNEL_CONTROL,
    ONE_KERNEL_FLAGS,
    ONE_KERNEL_INBOXES,
    Windows,
    open_windows,
)
from pblasmp.errors import StatusError, UnsupportedError
from tests.helpers.fakegpu import CUDARuntimeError, stream_operations
from tests.helpers.fakelt import FakeLt
from tests.helpers.machine import Multiplying
from tests.helpers.machine import machine as machine_of
from tests.helpers.mpi import on_ranks, run_mpi

_ALL, _NEAR = 1, 2  # communicators: of all ranks, of those of a node


class Machine:
    """Rank 0 of two. The other one agrees to everything unless a test says otherwise; its memory is elsewhere."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.memory: dict[int, np.ndarray] = {}
        self.refusals: dict[int, Exception] = {}  # what the other rank raises, by the number of the agreement
        self.votes = 0
        self.full = self.broken = self.unreachable = self.unregistrable = False
        self.peer, self.deaf = "0000:01:00.0", False
        self.null = False  # NCCL registers nothing
        self.status = 0
        self.signals: list[str] = []
        self.replaced: list[int] = []
        self.free = 1 << 30
        self.plays = False  # copies
        self.captured = False  # a graph on the other rank holds what is replaced
        self.sources: list[int] = []  # of those that were played
        self.pinned: set[int] = set()

    def runtime(self, nodes: Sequence[tuple[int, ...]] = ((0, 1),), *, by_hand: bool = False) -> Any:
        """Return the runtime of rank 0: on these nodes, as the machines are or PBLASMP_RANKS_PER_NODE says."""
        size = sum(map(len, nodes))
        machines = [tuple(range(size))] if by_hand else list(nodes)
        places = [
            SimpleNamespace(machine=next(each for each in machines if rank in each)) for rank in range(size)
        ]
        return SimpleNamespace(
            rank=0, size=size, device=Device(0, "0000:00:00.0", "here"), cupy=(cupy := self.cupy()), nodes=list(nodes),
            comm=SimpleNamespace(locations=lambda: places, allgather=self.allgather), agreement=self.agreement,
            why_unregistered="",
            synchronize=cupy.cuda.runtime.deviceSynchronize, wait=lambda *streams: None,
            arena=SimpleNamespace(
                replaced=lambda: self.replaced.append(1), give_up=lambda: self.log.append(("give up",))
            ),
        )  # fmt: skip

    def open(self, *nodes: tuple[int, ...], by_hand: bool = False) -> Windows | str:
        runtime = self.runtime(nodes or ((0, 1),), by_hand=by_hand)
        whole, near = SimpleNamespace(ptr=_ALL), SimpleNamespace(ptr=_NEAR)

        def split(color: int) -> Any:
            self.log.append(("split", color))
            return near

        nccl: Any = SimpleNamespace(all=whole, split=split)
        return open_windows(runtime, nccl, self)  # type: ignore[arg-type]

    def allgather(self, value: Any) -> list[Any]:
        """Return what two ranks give: the other one's GPU is another one of the machine, and reaches this one."""
        if isinstance(value, bool):
            return [value, self.captured]
        return [value, "" if isinstance(value, str) else (self.peer, value[1])]

    @contextmanager
    def agreement(self, what: str, *, blocks: bool = False) -> Iterator[None]:
        """Raise what is raised inside, or what the other rank says."""
        self.votes += 1
        yield
        if self.votes in self.refusals:
            raise self.refusals[self.votes]

    def install(self, patch: pytest.MonkeyPatch) -> None:
        register = self.register

        class Window:
            get_peer_device_pointer = None

            def __new__(cls, communicator: int, at: int, nbytes: int, flags: int) -> Any:
                return register(communicator, at, nbytes)

        core = {
            "mem_alloc": self.allocate, "RegisteredWindowHandle": Window,
            "WindowFlag": SimpleNamespace(COLL_SYMMETRIC=1),
        }  # fmt: skip
        bindings = {"nccl": SimpleNamespace()}
        for name, content in (("nccl.core", core), ("nccl.bindings", bindings), ("cuda.bindings", {})):
            parent, module = ModuleType(name.partition(".")[0]), ModuleType(name)
            vars(module).update(content)
            parent = sys.modules.get(parent.__name__, parent)
            setattr(parent, name.partition(".")[2], module)
            patch.setitem(sys.modules, parent.__name__, parent)
            patch.setitem(sys.modules, name, module)
        sys.modules["cuda.bindings"].driver = SimpleNamespace(**stream_operations(self.drive))

    def drive(self, stream: int, count: int, operations: Any, flags: int) -> tuple[Any]:
        assert (count, flags) == (len(operations), 0)
        for each in operations:
            done = each.waitValue if each.waitValue.operation else each.writeValue
            self.log.append((done.operation, stream, done.address, done.value))
        return (SimpleNamespace(name="CUDA_ERROR_X") if self.status else 0,)

    def cupy(self) -> Any:
        def array(n: int, value: int, dtype: Any) -> Any:
            values = np.full(n, value, dtype)
            self.memory[values.ctypes.data] = values

            class OnGpu:
                data = SimpleNamespace(ptr=values.ctypes.data)
                fill = staticmethod(values.fill)

                def __getitem__(self, i: int) -> Any:
                    return values[i]

            return OnGpu()

        runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError, deviceGetByPCIBusId={"0000:00:00.0": 0, "0000:01:00.0": 3}.__getitem__,
            deviceCanAccessPeer=lambda a, b: not ((a, b) == (0, 3) and self.deaf),
            deviceSynchronize=lambda: self.log.append(("idle",)), memcpyDefault=4,
            memset=ctypes.memset, memGetInfo=lambda: (0 if self.full else self.free, 1 << 40),
            memsetAsync=lambda at, value, n, stream: self.log.append(("set", at, value, n, stream)),
            memcpyAsync=self.copy,
        )  # fmt: skip
        return SimpleNamespace(
            cuda=SimpleNamespace(
                runtime=runtime, Stream=lambda **_: SimpleNamespace(ptr=5, synchronize=lambda: None),
                UnownedMemory=lambda *a: a, MemoryPointer=lambda memory, offset: memory,
                alloc_pinned_memory=self.pin,
            ),
            get_default_memory_pool=lambda: SimpleNamespace(
                free_all_blocks=lambda: self.log.append(("pool emptied",))
            ),
            zeros=lambda n, dtype: array(n, 0, dtype), full=array, ndarray=lambda n, dtype, memory: memory,
        )  # fmt: skip

    def copy(self, to: int, of: int, n: int, kind: int, stream: int) -> None:
        self.log.append(("copy", to, n, stream))
        if self.plays:
            self.sources.append(of)
            ctypes.memmove(to, of, n)

    def pin(self, nbytes: int) -> np.ndarray:
        memory = np.zeros(nbytes, np.uint8)
        self.pinned.add(memory.ctypes.data)
        return memory

    def allocate(self, nbytes: int, device: int) -> Any:
        if self.full or self.broken:
            raise RuntimeError("ncclUnhandledCudaError")
        memory = np.full(nbytes, 0xFF, np.uint8)
        at = memory.ctypes.data
        self.memory[at] = memory
        self.log.append(("allocated", nbytes))
        return SimpleNamespace(handle=at, close=lambda: self.log.append(("freed", nbytes)))

    def register(self, communicator: int, at: int, nbytes: int) -> Any:
        assert not self.memory[at].any()  # zero before any peer can reach it
        if self.unregistrable:
            raise RuntimeError("ncclInvalidUsage")
        return SimpleNamespace(
            handle=0 if self.null else 1 << 40,
            get_peer_device_pointer=lambda rank: (
                None if self.unreachable and rank and communicator == _ALL else at + (rank << 50)
            ),
            close=lambda: self.log.append(("deregistered", nbytes)),
        )

    def signal(self, what: str, flags: list[int], rank: int, kind: int, kinds: int) -> Any:
        return lambda stream: self.signals.append(f"{what} {kind}")

    def raise_flags(self, stream: Any, flags: list[int]) -> None:
        self.log.append(("raise_flags", stream.ptr, *flags))

    def await_flags(self, stream: Any, flags: list[int]) -> None:
        self.log.append(("await_flags", stream.ptr, *flags))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    machine.install(monkeypatch)
    return machine


def opened(machine: Machine) -> Windows:
    windows = machine.open()
    assert isinstance(windows, Windows)
    machine.log.clear()
    return windows


@pytest.mark.parametrize("nbytes", [0, 4096, (3 << 20) + 64])  # of inboxes
def test_own_flags_are_raised_as_if_the_peers_had(machine, nbytes):
    """All words that kernels and streams wait for, and no other: by copies from the host, which need no multiprocessor.

    Words that count calls stay, or the next call that is queued would wait for a number that nobody raises.
    """
    windows = opened(machine)
    buffers = [windows.buffer("flags"), windows.reserve(ONE_KERNEL_FLAGS, 512)]
    buffers += [windows.reserve(ONE_KERNEL_INBOXES, nbytes)] if nbytes else []
    machine.log.clear()
    for buffer in buffers:
        words(buffer)[:] = 3  # of every count and flag
    machine.plays = True
    windows.raise_own(SimpleNamespace(ptr=9))
    assert {what[0] for what in machine.log} == {"copy"}
    assert set(machine.sources) <= machine.pinned
    flags, one_kernel, *inboxes = (words(buffer) for buffer in buffers)
    awaited = 2 * 2  # kinds of barriers, ranks
    first = 2 * (2 + 2)
    assert (flags[:awaited] > 1 << 20).all()
    assert (flags[awaited:first] == 3).all()
    assert (flags[first:] == 1).all()
    assert (one_kernel[: ONE_KERNEL_CONTROL // 4] == 3).all()
    calls = int(one_kernel[:2].view(np.uint64)[0]) // 65536  # CALL in one_kernel.cu
    behind = one_kernel[ONE_KERNEL_CONTROL // 4 :].astype(np.int64) - (calls + 1)
    assert (behind.astype(np.int32) >= 0).all()
    assert all(each.all() for each in inboxes)


def words(buffer: Any) -> np.ndarray:
    """Return rank 0's memory of a buffer."""
    size = buffer.nbytes // 4
    return np.frombuffer((ctypes.c_uint32 * size).from_address(buffer.peers[0]), np.uint32)


def test_buffers_grow_and_are_shared(machine):
    windows = opened(machine)
    first = windows.reserve("parts", 1000)
    assert windows.reserve("parts", 500) is first is windows.buffer("parts")
    assert first.peers[1] - first.peers[0] == 1 << 50
    before = first.peers[0]
    windows.reserve("parts", 2000)
    assert first.nbytes == 2000
    assert first.peers[0] != before
    assert len(machine.replaced) == 1  # a first buffer replaces nothing
    grown = [("idle",), ("allocated", 2000), ("idle",), ("deregistered", 1000), ("freed", 1000)]
    assert machine.log == [("idle",), ("allocated", 1000), ("idle",), *grown]  # nothing is in flight


@pytest.mark.parametrize(("here", "there"), [(True, False), (False, True), (False, False)])
def test_what_a_user_s_graph_holds_is_kept_when_a_buffer_grows(machine, here, there):
    """On every rank if on any, until the end; later growth of what no graph has seen frees as ever."""
    windows = opened(machine)
    name, start = ONE_KERNEL_FLAGS, ONE_KERNEL_CONTROL
    buffer = windows.reserve(name, 1024)
    first = buffer.peers[0]
    buffer.captured, machine.captured = here, there
    windows.reserve(name, 2048)
    machine.captured = False
    windows.reserve(name, 4096)
    kept = here or there
    assert (("freed", 1024) in machine.log) != kept
    assert ("freed", 2048) in machine.log
    assert len(machine.replaced) == 2  # plans' graphs have ended
    machine.plays = True
    windows.raise_own(SimpleNamespace(ptr=9))  # a replay may wait there
    assert bool((machine.memory[first].view(np.uint32)[start // 4 :] == 0x3F3F3F3F).all()) == kept
    machine.log.clear()
    windows.close()
    assert (("deregistered", 1024) in machine.log) == (("freed", 1024) in machine.log) == kept


@pytest.mark.parametrize(("rank", "captured"), [(0, True), (0, False), (1, True)])
def test_a_rank_notes_that_a_user_s_graph_holds_its_memory(machine, rank, captured):
    """Its own: of all that a product uses, some rank is the owner, and asks."""
    windows = opened(machine)
    buffer = windows.reserve("parts", 1000)
    gpu: Any = SimpleNamespace(windows=windows, rank=0, arena=SimpleNamespace(captured=captured))
    assert Gpu.symmetric(gpu, "parts", rank) == buffer.peers[rank]
    assert buffer.captured == (captured and rank == 0)


@pytest.mark.parametrize("here", [False, True])
def test_no_room_on_any_rank_is_no_room_on_all(machine, here):
    windows = opened(machine)
    old = windows.reserve("parts", 1000).peers
    machine.full = here
    if not here:
        machine.refusals[machine.votes + 1] = MemoryError("another rank has no room")
    with pytest.raises(
        MemoryError, match="2000 bytes .* 'parts': the GPU has 0 free" if here else "another rank"
    ):
        windows.reserve("parts", 2000)
    assert windows.buffer("parts").peers == old  # it can continue with what it has
    assert (("freed", 2000) in machine.log) != here
    assert (("give up",) in machine.log) == here


def test_a_failure_for_another_reason_is_no_lack_of_memory(machine):
    windows = opened(machine)
    machine.broken = True
    with pytest.raises(StatusError, match=r"2000 bytes .* 'parts': RuntimeError: ncclUnhandledCudaError"):
        windows.reserve("parts", 2000)


@pytest.mark.parametrize("here", [False, True])
def test_a_buffer_stays_as_it_was_if_a_new_one_cannot_be_registered(machine, here):
    """Plans and graphs that hold its addresses go on; what is new is given back, and a later attempt may succeed."""
    windows = opened(machine)
    buffer = windows.reserve("parts", 1000)
    old = buffer.peers
    machine.log.clear()
    machine.unregistrable = here
    if not here:
        machine.refusals[machine.votes + 2] = RuntimeError("ncclInvalidUsage (on rank 1)")
    with pytest.raises(RuntimeError, match="ncclInvalidUsage"):
        windows.reserve("parts", 2000)
    assert (buffer.peers, buffer.nbytes, machine.replaced) == (old, 1000, [])
    undone = [("freed", 2000)] if here else [("deregistered", 2000), ("freed", 2000)]
    assert machine.log == [("idle",), ("allocated", 2000), ("idle",), *undone]
    machine.unregistrable = False
    windows.reserve("parts", 2000)
    assert (buffer.nbytes, machine.replaced) == (2000, [1])
    assert buffer.peers != old


def test_what_cupy_keeps_is_given_back_where_little_is_free(machine):
    windows = opened(machine)
    machine.free = 1500
    windows.reserve("parts", 1000)
    assert machine.log.index(("pool emptied",)) < machine.log.index(("allocated", 1000))


UNREACHABLE = "NCCL has no window over all ranks: rank 0 cannot reach rank 1's GPU memory"
TOLD = "rank 1 cannot reach rank 0's GPU memory (on rank 1)"


@pytest.mark.parametrize(("how", "nodes", "tried", "why"), [
    ({"unreachable": True}, [(0, 1)], True, UNREACHABLE),
    ({"unreachable": True}, [(0,), (1,)], True, f"{UNREACHABLE}; every rank is alone on its node"),
    ({"refusals": {4: UnsupportedError(TOLD)}}, [(0, 1)], True, f"NCCL has no window over all ranks: {TOLD}"),
    # nodes that no NVLink connects: NCCL reports a success, and is asked for no address then
    ({"null": True}, [(0, 1)], True, "NCCL has no window over all ranks: NCCL gave rank 0 a null window"),
    ({"deaf": True}, [(0, 1)], False, "rank 0's GPU cannot reach rank 1's (no peer access)"),
    ({}, [(0,)], False, "one rank has no peers"),
    ({}, [tuple(range(65))], False, "barriers take 64 ranks, not 65"),
])  # fmt: skip
def test_why_there_are_no_windows(machine, how, nodes, tried, why):
    vars(machine).update(how)
    assert machine.open(*nodes) == why
    assert [what[0] for what in machine.log][-1:] == ["freed"] * tried, "what was registered is given back"


@pytest.mark.parametrize(("nodes", "members"), [
    ([tuple(range(64))], 64),
    ([tuple(range(i, i + 8)) for i in range(0, 72, 8)], 8),  # 72 GPUs: one domain for each node
    ([(0, 1), (2,)], 3),
    ([(0, 1), (2, 3)], 4),  # NCCL lets ranks of several nodes reach each other
])  # fmt: skip
def test_the_ranks_of_a_domain(machine, nodes, members):
    windows = machine.open(*nodes)
    assert windows.members == tuple(range(members))
    assert windows.size == members
    assert (("split", 0) in machine.log) == (members == 8)


def test_variables_that_switch_windows_off_are_named(machine, monkeypatch):
    machine.null = "0"
    monkeypatch.setenv("NCCL_WIN_ENABLE", "0")
    assert machine.open().endswith("a null window, as NCCL_WIN_ENABLE=0 asks for")


def test_a_first_barrier_that_fails_on_another_rank(machine):
    machine.refusals[5] = RuntimeError("no kernel (on rank 1)")
    with pytest.raises(RuntimeError, match="no kernel"):
        machine.open()
    assert machine.log[-1][0] == "freed"


def test_nccl4py_may_be_too_old(machine, monkeypatch):
    monkeypatch.delattr(sys.modules["nccl.core"], "RegisteredWindowHandle")
    assert "nccl4py 0.4 or later" in machine.open()


@pytest.mark.parametrize("by_hand", [False, True])
def test_each_node_is_a_domain_if_windows_end_there(machine, by_hand):
    """Members have the numbers of the context; flags and barriers count the members alone."""
    machine.unreachable = True
    windows = machine.open((0, 2), (1, 3), by_hand=by_hand)
    assert isinstance(windows, Windows)
    tried = [what for what in machine.log if what[0] in ("split", "deregistered")]
    assert [what[0] for what in tried] == (["split"] if by_hand else ["deregistered", "split"])
    buffer = windows.reserve("parts", 1000)
    assert (windows.members, set(buffer.peers), windows.size) == ((0, 2), {0, 2}, 2)
    assert buffer.peers[2] - buffer.peers[0] == 1 << 50
    machine.log.clear()
    flags, stream = windows.buffer("flags"), SimpleNamespace(ptr=9)
    for rank, number in ((0, 3), (2, 3), (0, 4)):
        windows.await_flag(stream, rank, number)
    at = [what[2] - flags.peers[0] for what in machine.log if what[0] == "wait"]
    assert at == [at[0], at[0] + 4, at[0] + 4 * 2]
    machine.log.clear()
    windows.raise_flag(stream, 2, 1)
    assert machine.log == [("copy", flags.peers[2] + at[0] - 2 * 4 * 2, 4, 9)]
    assert flags.nbytes == 4 * (2 * (2 + 2) + FLAGS * 2)


@pytest.mark.parametrize("nodes", [[(0, 1), (2,)], [(0,), (1, 2)]])
def test_a_rank_that_is_alone_on_its_node_takes_nobodys_windows(machine, nodes):
    """It has memory of its own, which is registered nowhere, and grows it together with the others."""
    machine.unreachable = True
    windows = machine.open(*nodes)
    assert isinstance(windows, Windows)
    assert windows.members == nodes[0]
    machine.log.clear()
    assert set(windows.reserve("parts", 1000).peers) == {*nodes[0]}
    windows.close()
    assert ("deregistered" in {what[0] for what in machine.log}) is (len(nodes[0]) > 1)


def test_the_first_product_finds_that_everyone_arrived(machine):
    windows = opened(machine)
    assert machine.signals == ["arrive 0"]
    stream = SimpleNamespace(ptr=9)
    windows.await_all(stream)
    windows.meet(stream)
    windows.arrive(stream)
    assert machine.signals[1:] == ["await 0", "meet 1", "arrive 0"]


def test_flags_are_words_of_their_own(machine):
    """A rank raises its word at the peer; the peer waits for that rank's word in its own memory, and lowers it."""
    windows = opened(machine)
    stream = SimpleNamespace(ptr=9)
    base, far = windows.buffer("flags").peers.values()
    for number in (0, 1, FLAGS - 1):
        windows.raise_flag(stream, 1, number)
        windows.await_flag(stream, 1, number)
    raised = [what[1] - far for what in machine.log if what[0] == "copy"]
    done = [what for what in machine.log if what[0] in ("wait", "write")]
    waits = [what[2] - base for what in done[::2]]
    assert waits == [at + 4 for at in raised]  # rank 1's words follow rank 0's
    assert [(what[0], what[2] - base, what[3]) for what in done] == [
        x for at in waits for x in (("wait", at, 1), ("write", at, 0))
    ]
    assert len({*raised, *waits}) == 6
    assert min(raised) >= 4 * 2 * (2 + 2)  # behind the barriers' words
    assert max(waits) + 4 <= windows.buffer("flags").nbytes
    with pytest.raises(UnsupportedError, match=f"flag {FLAGS} of {FLAGS}"):
        windows.raise_flag(stream, 1, FLAGS)


def test_kernels_raise_and_await_the_same_words(machine):
    windows, flags = opened(machine), [(1, 0), (0, 3)]
    for flag in flags:
        windows.raise_flag(SimpleNamespace(ptr=9), *flag)
        windows.await_flag(SimpleNamespace(ptr=9), *flag)
    raised = [what[1] for what in machine.log if what[0] == "copy"]
    awaited = [what[2] for what in machine.log if what[0] == "wait"]
    windows.raise_flags(SimpleNamespace(ptr=7), flags)
    windows.await_flags(SimpleNamespace(ptr=7), flags)
    assert machine.log[-2:] == [("raise_flags", 7, *raised), ("await_flags", 7, *awaited)]


def test_the_drivers_errors_are_told(machine):
    windows = opened(machine)
    machine.status = 1
    with pytest.raises(StatusError, match="CUDA driver: CUDA_ERROR_X"):
        windows.await_flag(SimpleNamespace(ptr=9), 1, 0)


def test_everything_is_given_back_last_first(machine):
    windows = opened(machine)
    windows.reserve("parts", 1000)
    windows.reserve("sums", 3000)
    machine.log.clear()
    windows.close()
    freed = [what[1] for what in machine.log if what[0] == "freed"]
    assert freed[:2] == [3000, 1000]
    assert len(freed) == 3
    assert machine.log[0] == ("idle",)


def test_memory_is_given_back_whatever_fails(machine):
    windows = opened(machine)
    machine.refusals[machine.votes + 1] = RuntimeError("an error of before (on rank 1)")
    with pytest.raises(RuntimeError, match="of before"):
        windows.close()
    assert [what[0] for what in machine.log] == ["idle", "deregistered", "freed"]


@on_ranks(4, 3, timeout=60)
def test_windows_of_two_domains(comm: Any, path: str) -> None:
    """Windows of each node alone: cuBLASLt, kernels and NCCL's algorithms are there, and near ranks are pushed to."""
    with machine_of(path, Multiplying, comm=comm, lt=FakeLt()) as lib, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PBLASMP_RANKS_PER_NODE", "2")
        with pb.Context(comm, engine="cublasmp") as ctx:
            gpu, transport = ctx.engine.session.gpu, ctx.engine.transport
            mine = {0, 1} if comm.rank < 2 else {*range(2, comm.size)}
            alike = set(gpu.windows.members) == transport.near == mine
            assert alike, f"members: {transport.near}"
            d = pb.MatrixDescriptor((256, 256), (64, 64), pb.Grid.squarest(comm.size), dtype="float32")
            for problem, refused in (
                (pb.MatmulProblem(a=d, b=d, d=d), "push"),
                (pb.MatmulProblem.matmul_allreduce(96, 96, 96, comm.size, dtype="float32"), "two_shot"),
            ):
                found = pb.algorithms(problem, ctx)
                why = found[refused].why
                assert "NVLink domain" in why, refused
                assert not found[refused].applies, refused
            assert found["nccl"].applies, "nccl"
            a = ctx.zeros(d)
            for _ in range(MESSAGES.count + 1):
                a.redistribute(replace(d, block=(16, 16)))
            assert transport.inbox.takes(1), "boxes: none is given back"
            sent = {peer for _, peer, _ in lib.gpu.did("send")}
            assert sent
            assert not sent & mine
            x = ctx.engine.xp.zeros((96, 24), "float32")
            with pb.plan(pb.matmul_allreduce, x, x, ctx, algo="push") as plan:
                plan()
                said = str(plan.report())
            alike = "unlike numbers of GPUs" not in said
            assert alike == (comm.size == 4), f"push in two levels: {said}"
            graphs_between_nodes(ctx, lib.gpu, ctx.zeros(d), x)


def graphs_between_nodes(ctx: pb.Context, gpu: Any, a: pb.DistributedMatrix, x: Any) -> None:
    """They have no work of NCCL's, which takes longer so, but where they are asked for; none where engines push."""

    def counts() -> tuple[int, int]:
        return len(gpu.did("capture ends")), len(gpu.did("graph launched"))

    ways = ("gathered", 0, pb.matmul, a, a), ("nccl", 2, pb.matmul_allreduce, x, x, ctx)
    for algo, pieces, *call in ways:
        before, _ = counts()
        with pb.plan(*call, algo=algo) as plan:
            for _ in range(4):
                plan()
            after, launched = counts()
            assert after == before + pieces, f"{algo}: replayed"
            graph = plan.graph()
            assert counts()[0] == after + 1, f"{algo}: asked for"
            _, launched = counts()
            graph.replay()
            assert counts()[1] == launched + 1, f"{algo}: asked for"
        del gpu.events[:]
    for _ in range(6):
        pb.matmul_allreduce(x, x, ctx, algo="push" if ctx.size == 4 else "nccl")
    assert counts()[0] == (0 if ctx.size == 4 else 2), "repeated"


def without_windows(comm: Any, path: str, names: Sequence[str]) -> Any:
    """GPUs that do not reach each other: NCCL's messages carry what copy engines and cuBLASMp cannot."""
    machines: dict[str, dict[str, Any]] = {
        "null": {"null_windows": True},
        "deaf": {"deaf": [(1, 0)], "null_windows": True},
        "hosts": {"devices": [f"0000:0{comm.rank}:00.0"]},
    }
    words = {
        "hosts": "NCCL has no window over all ranks: NCCL gave rank 0 a null window",
        "null": "NCCL has no window over all ranks: NCCL gave rank 0 a null window",
        "deaf": "rank 1's GPU cannot reach rank 0's (no peer access)",
    }
    for name in names:
        with machine_of(path, Multiplying, comm=comm, lt=FakeLt(), **machines[name]) as lib:
            with pb.Context(comm, engine="cublasmp") as ctx:
                gpu = ctx.engine.session.gpu
                assert words[name] in gpu.why_no_windows, name
                d = pb.MatrixDescriptor((24, 20), (4, 4), pb.Grid(1, 2), dtype="float32")
                e = pb.MatrixDescriptor((20, 24), (5, 3), pb.Grid(2, 1), dtype="float32", order="F")
                a, b = ctx.zeros(d), ctx.zeros(e)  # the kernels of these GPUs compute nothing
                for case, call in {
                    "matmul": lambda a=a, b=b: pb.matmul(a, b),
                    "moves": lambda a=a, d=d: a.redistribute(replace(d, block=(3, 3), grid=pb.Grid(2, 1))),
                    "syrk": lambda a=a: pb.blas.syrk(a),
                    "cholesky": lambda ctx=ctx: pb.linalg.cholesky(ctx.eye(24, block=5, grid="2x1")),
                }.items():
                    lib.gpu.events.clear()
                    call()
                    sent = lib.gpu.did("send") or lib.gpu.did("broadcast")
                    assert sent, f"{name}: {case}: nothing is sent"
                found = pb.algorithms(pb.MatmulProblem(a=d, b=e, d=replace(d, shape=(24, 24))), ctx)
                for algo in ("push", "default"):
                    why = found[algo].why
                    assert words[name] in why, f"{name}: {algo}"
                    assert not found[algo].applies, f"{name}: {algo}"
            assert not [each for each in ("BufferRegister", "Matmul") if lib.of(each)], f"{name}: cuBLASMp"
            lib.assert_clean()
            lib.gpu.assert_clean()


def test_gpus_that_do_not_reach_each_other(stand_in):
    run_mpi(without_windows, 2, timeout=60, path=stand_in(1000), names=["null", "deaf"])
    run_mpi(without_windows, 2, timeout=60, path=stand_in(1000), names=["hosts"], on_nodes="blocks:2")


@on_ranks(4, timeout=60)
def test_slabs_come_to_a_node_once(comm: Any, path: str) -> None:
    """Messages of NCCL bring shares, which copy engines pass on."""
    with machine_of(path, Multiplying, comm=comm, lt=FakeLt()) as lib, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PBLASMP_RANKS_PER_NODE", "2")
        with pb.Context(comm, engine="cublasmp") as ctx:
            n, here = 520, comm.rank // 2
            a, b = (ctx.zeros((n, n), block=(52, 40), grid=(4, 1)) for _ in range(2))
            for algo in ("gathered", "panels"):
                with pb.plan(pb.matmul, a, b, algo=algo) as plan:
                    before = len(lib.gpu.did("send"))
                    plan()
                messages = lib.gpu.did("send")[before:]
                far = comm.allreduce(sum(nbytes for _, peer, nbytes in messages if peer // 2 != here))
                near = comm.allreduce(sum(nbytes for _, peer, nbytes in messages if peer // 2 == here))
                assert (far, near) == (8 * n * n, 0), algo  # of B what the other node has, to each of two
