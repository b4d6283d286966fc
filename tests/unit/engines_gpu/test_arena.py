# SPDX-License-Identifier: Apache-2.0
"""The memory that a GPU's products share: who may use it next, what graphs hold of it, how much there is."""

from __future__ import annotations

import sys
import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.gpu.runtime.arena import Arena
from pblasmp.engines.gpu.runtime.gpu_runtime import Turns
from pblasmp.engines.gpu.runtime.graphs import Recordings
from pblasmp.runtime import plans
from tests.helpers.fakelt import FakeLt
from tests.helpers.inside import product
from tests.helpers.machine import Multiplying, context, machine
from tests.helpers.mpi import on_ranks

D = pb.MatrixDescriptor((8, 8), (4, 4), pb.Grid(1, 1))


@pytest.fixture
def played() -> dict[str, Any]:
    return {"kind": Multiplying, "lt": FakeLt()}


@pytest.fixture
def arena(ctx):
    return ctx.engine.session.runtime.arena


def streams(count=2):
    return [sys.modules["cupy"].cuda.Stream(non_blocking=True) for _ in range(count)]


def address(array):
    return array.data.ptr


def test_owners_have_buffers_of_their_own(arena):
    mine, theirs = arena.buffer("mine", "x", 100), arena.buffer("theirs", "x", 50)
    assert address(arena.buffer("mine", "x", 80)) == address(mine)
    assert address(arena.buffer("theirs", "x", 50)) == address(theirs) != address(mine)
    assert (arena.held("mine"), arena.held("theirs"), arena.held("nobody")) == (100, 50, 0)


class RecordedGraph:
    """A recorded graph, until its product is closed."""

    graph: str | None = "a graph"


def test_a_buffer_that_grows_ends_no_graph_and_lasts_as_long_as_those_recorded_before(arena):
    """It may grow on one rank alone, and all ranks replay a graph or none does."""
    generation = arena.generation
    outgrown = []
    recorded, closed, later = RecordedGraph(), RecordedGraph(), RecordedGraph()
    for nbytes, graphs in ((100, [recorded, closed]), (200, []), (300, [])):
        outgrown.append(weakref.ref(arena.buffer("mine", "x", nbytes)))
        for graph in graphs:
            arena.keep_for(graph)
    assert arena.generation == generation
    assert outgrown[0]() is not None
    assert outgrown[1]() is not None  # recorded before, the graph may hold it
    arena.keep_for(later)
    closed.graph = None
    del recorded, graph, graphs
    arena.buffer("mine", "x", 400)
    assert [buffer() is None for buffer in outgrown] == [True, True, False]
    assert arena.held("mine") == 400


def test_a_buffer_that_another_stream_reads_is_not_the_next_array_of_its_first_stream(ctx, lib):
    """CuPy gives it back to the stream that it was made on, which must wait for the stream that used it last."""
    operations, (first, last) = ctx.engine.operations, streams()
    with first:
        operations.bytes("x", 100)
    with last:
        operations.bytes("x", 100)
        lib.gpu.events.clear()
        operations.bytes("x", 200)
    assert lib.gpu.did("wait") == [(first.ptr, last.ptr)]
    assert not lib.gpu.did("synchronize")  # the host does not wait
    with last:
        operations.bytes("x", 300)
    assert lib.gpu.did("wait") == [(first.ptr, last.ptr)]  # made and used on one stream


def test_memory_of_a_plan_that_another_stream_reads_is_not_the_next_array_of_its_first_stream(ctx, lib):
    d = pb.MatrixDescriptor((8, 8), (4, 4), pb.Grid(1, 1), dtype="complex64", order="F")
    a, b, out, (first, last) = ctx.zeros(d), ctx.zeros(d), ctx.zeros(d), streams()
    with first:
        plan = pb.plan(pb.blas.symm, a, b, out=out, algo="full")
    with last:
        plan()
    lib.gpu.events.clear()
    plan.close()
    assert (first.ptr, last.ptr) in lib.gpu.did("wait")


def test_numbers_do_not_pile_up(ctx, arena):
    """Dynamic scaling has another number in every step."""
    gpu = ctx.engine.session.gpu
    places = {gpu.scalar(1.0 / step) for step in range(1, 1001)}
    assert len(arena._numbers) == 64
    at = gpu.scalar(0.001)
    assert at in places
    assert gpu.scalar(0.001) == at
    assert np.asarray(arena.number(0.001))[0] == np.float32(0.001)


def test_numbers_in_graphs_stay(ctx, arena):
    stream = streams(1)[0]
    before = arena.number(0.25)
    with stream:
        stream.begin_capture("relaxed")
        held, new = arena.number(0.25), arena.number(0.75)
        stream.end_capture()
    assert held is before
    for step in range(1, 1001):
        arena.number(1.0 / step + 10)
    assert any(each is before for each in arena._recorded)
    assert address(arena.number(0.75)) != address(new)  # that has its value only where the graph runs


@pytest.mark.parametrize("kind", [int, float, np.float64, np.float32, np.int32, "array", "0-d array"])
@pytest.mark.parametrize(
    "form", ["allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather"]
)
def test_scales_in_every_form(ctx, form, kind):
    cupy = sys.modules["cupy"]
    arrays = {"array": np.full(1, 2, np.float32), "0-d array": np.array(2, np.float32)}
    value = cupy.asarray(arrays[kind]) if isinstance(kind, str) else kind(2)
    x, w = (cupy.asarray(np.zeros((16, 16), np.uint8)) for _ in range(2))
    getattr(pb, form)(x, w, ctx, algo="nccl", scales=pb.Scales(a=value, b=value))


@on_ranks(2, timeout=60)
def test_budgets(comm: Any, path: str) -> None:
    with context(path, Multiplying, comm=comm, lt=FakeLt()) as (ctx, lib):
        lib.gpu.free = 1000 if comm.rank == 0 else 2000
        found = ctx.engine.transport.fits(801)
        assert found == (False, 800), "the least of all ranks"
        lib.gpu.free = 1 << 40
        d = pb.MatrixDescriptor((256, 256), (64, 64), pb.Grid(1, comm.size))
        problem = pb.MatmulProblem(a=d, b=d, d=d)
        for free, expected in ((1 << 40, True), (1 << 10, False)):
            lib.gpu.free = free
            applies = pb.algorithms(problem, ctx)["push"].applies
            assert applies == expected, f"push with {free}"


@on_ranks(2, timeout=60)
def test_unlike(comm: Any, path: str) -> None:
    """Pieces, slots and flags follow from the number of multiprocessors: it must be one number."""
    with machine(path, Multiplying, comm=comm, lt=FakeLt()) as lib:
        lib.gpu.multiprocessors = (132, 114)[comm.rank]
        with pb.Context(comm, engine="cublasmp") as ctx:
            session = ctx.engine.session
            found = session.runtime.multiprocessors, session.gpu.multiprocessors
            assert found == (114, 114), "the fewest"
            mine = session.gpu.kernels.multiprocessors
            assert mine == lib.gpu.multiprocessors, "launches"
            x = ctx.engine.empty((8192, 64), np.dtype(np.float32), "C", 64)
            w = ctx.engine.empty((8192, 64), np.dtype(np.float32), "C", 64)
            with pb.plan(pb.matmul_allreduce, x, w, ctx, algo="push") as plan:
                starts = comm.allgather(product(plan).starts)
            assert starts[0] == starts[1], "pieces"


class SmallGpu:
    """CuPy on a GPU with little memory, some of which CuPy keeps unused; a pool gets all that it gives from outside."""

    def __init__(self, free, kept):
        self.free, self.kept, self.given, self.capturing = free, kept, weakref.WeakSet(), False
        gpu = self

        class CUDARuntimeError(Exception):
            pass

        class Memory:
            def __init__(self, size):
                if size > gpu.free:
                    raise CUDARuntimeError
                gpu.free -= size
                self.size, self.freed = size, weakref.finalize(self, gpu.free_again, size)
                gpu.given.add(self)

        stream = SimpleNamespace(
            ptr=1,
            use=lambda: None,
            begin_capture=lambda mode: None,
            end_capture=lambda: "graph",
            is_capturing=lambda: self.capturing,
        )
        self.allocators = []
        self.cuda = SimpleNamespace(
            Memory=Memory, MemoryPointer=lambda memory, offset: memory, get_current_stream=lambda: stream,
            MemoryPool=lambda allocator: SimpleNamespace(malloc=allocator), using_allocator=self._using,
            runtime=SimpleNamespace(CUDARuntimeError=CUDARuntimeError, memGetInfo=lambda: (self.free, 1000)),
        )  # fmt: skip
        pool = SimpleNamespace(
            free_all_blocks=self._free_kept, used_bytes=lambda: 77, free_bytes=lambda: self.kept
        )
        self.get_default_memory_pool = lambda: pool
        self.arena = Arena(self, lambda stream: None)
        self.runtime = SimpleNamespace(
            arena=self.arena,
            recording=stream,
            relaxed="relaxed",
            follow_stream=lambda: None,
            capturing=False,
            turns=Turns(),
        )

    def empty(self, nbytes, dtype):
        """Return an array; CuPy's pool gives up what it keeps unused by itself."""
        if nbytes > self.free:
            self._free_kept()
        try:
            return self.cuda.Memory(nbytes)
        except self.cuda.runtime.CUDARuntimeError:
            raise MemoryError(f"Out of memory allocating {nbytes} bytes") from None

    def free_again(self, nbytes):
        self.free += nbytes

    def _free_kept(self):
        self.free, self.kept = self.free + self.kept, 0

    @contextmanager
    def _using(self, allocator):
        self.allocators.append(allocator)
        yield

    def record(self, store, nbytes):
        """Record a graph for which ``nbytes`` are allocated."""
        return store.record(lambda: self.allocators[-1](nbytes), allocates=True)


def test_graphs_share_the_memory_of_their_arrays_as_long_as_one_is_left(monkeypatch):
    """They run one after another. CuPy's pool gives it to the next recording; here each takes new memory."""
    gpu = SmallGpu(1000, 0)
    monkeypatch.setitem(sys.modules, "cupy", gpu)
    stores = [Recordings(gpu.runtime) for _ in range(2)]
    graphs = [gpu.record(store, nbytes) for store, nbytes in zip(stores, (100, 200), strict=True)]
    assert gpu.allocators[0] == gpu.allocators[1]
    gpu.allocators.clear()
    assert gpu.arena.graph_memory().nbytes == 300 == 1000 - gpu.free
    stores[1].close()
    assert gpu.free == 700  # the other graph may hold addresses of all of it
    stores[0].close()
    assert gpu.free == 1000
    assert [graph.graph for graph in graphs] == [None, None]
    graphs.append(gpu.record(stores[0], 50))
    assert gpu.arena.graph_memory().nbytes == 50


def test_a_graph_gets_what_cupy_keeps_unused_and_else_says_what_there_is(monkeypatch):
    """CuPy's own pool would give back what the graphs before still use."""
    gpu = SmallGpu(100, 500)
    monkeypatch.setitem(sys.modules, "cupy", gpu)
    store = Recordings(gpu.runtime)
    held = [gpu.record(store, 80), gpu.record(store, 300)]
    assert (gpu.kept, gpu.free) == (0, 220)
    words = "300 bytes for a graph of a plan, next to 380 of graphs: the GPU has 220 of 1000 bytes free, and .* take 77"
    with pytest.raises(MemoryError, match=words) as found:
        gpu.record(store, 300)
    assert type(found.value) is MemoryError  # else CuPy's pool would free what it has
    assert len(gpu.given) == len(held) == 2


def test_an_outgrown_buffer_lasts_as_long_as_the_graphs_that_use_it(monkeypatch):
    """Those that are known by their addresses as long as any graph."""
    gpu = SmallGpu(1000, 0)
    monkeypatch.setitem(sys.modules, "cupy", gpu)
    arena, stores = gpu.arena, [Recordings(gpu.runtime) for _ in range(2)]
    for owner, name in (("mine", "x"), ("mine", "y"), ("gpu", "z")):
        arena.buffer(owner, name, 100)
    held = [
        store.record(lambda name=name: arena.buffer("mine", name, 50))
        for store, name in zip(stores, "xy", strict=True)
    ]
    for owner, name in (("mine", "x"), ("mine", "y"), ("gpu", "z")):
        arena.buffer(owner, name, 110)
    assert 1000 - gpu.free == 300 + 330
    left = []
    for store in stores:
        store.close()
        arena.buffer("mine", "new", len(left) + 1)
        left.append(1000 - gpu.free - 330 - len(left) - 1)
    assert left == [200, 0]  # "y" and "z" are of the other graph
    assert len(held) == 2


def test_buffers_that_nothing_uses_are_given_up_when_memory_is_short(monkeypatch):
    gpu = SmallGpu(1000, 0)
    monkeypatch.setitem(sys.modules, "cupy", gpu)
    arena, store = gpu.arena, Recordings(gpu.runtime)
    for owner, name in (("mine", "idle"), ("mine", "recorded"), ("gpu", "address"), ("mine", "foreign")):
        arena.buffer(owner, name, 200)
    graph = store.record(lambda: arena.buffer("mine", "recorded", 200))
    gpu.capturing = True
    arena.buffer("mine", "foreign", 200)  # while someone else's graph is recorded
    gpu.capturing = False
    arena.begin()
    arena.buffer("mine", "now", 150)
    assert gpu.free == 50
    arena.buffer("mine", "more", 240)
    assert {name for _, name in arena._buffers} == {"recorded", "address", "foreign", "now", "more"}
    assert gpu.free == 10
    with pytest.raises(
        MemoryError, match=r"^100 bytes for buffer 'idle' of mine: the GPU has 10 of 1000 bytes free"
    ):
        arena.buffer("mine", "idle", 100)
    store.close()
    arena.begin()
    assert (
        arena.with_memory(lambda: gpu.empty(500, None)).size == 500
    )  # of a matrix: "recorded", "now" and "more" go
    assert {name for _, name in arena._buffers} == {"address", "foreign"}
    assert graph.graph is None


def test_kept_plans_give_way_to_a_call_that_finds_no_memory(ctx, monkeypatch):
    """Only then, and only once."""
    a, b = (ctx.full(D, value) for value in (1, 2))
    prepare, tries = plans.prepare, []

    def short(*given):
        tries.append(len(ctx.kept))
        if len(ctx.kept) or len(tries) > 2:
            raise MemoryError("no room")
        return prepare(*given)

    for _ in range(2):
        pb.matmul(a, b, algo="gathered")
    assert len(ctx.kept) == 1
    monkeypatch.setattr(plans, "prepare", short)
    pb.matmul(a, b, alpha=2, algo="gathered")
    assert tries == [1, 0]
    with pytest.raises(MemoryError, match="no room"):
        pb.matmul(a, b, alpha=3, algo="gathered")
    assert tries == [1, 0, 0]  # nothing is kept after the first run of a call


def test_a_user_s_capture_is_told_from_a_recording():
    gpu = SmallGpu(1000, 0)
    assert not gpu.arena.captured
    gpu.capturing = True
    assert gpu.arena.captured
    with gpu.arena.noting():  # of a plan's graph, which ends when memory is replaced
        assert not gpu.arena.captured
