# SPDX-License-Identifier: Apache-2.0
"""Kernels that wait for other ranks on all multiprocessors, where others wait, too (gpu_runtime.py)."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

import pblasmp as pb
from pblasmp.dtypes import DTYPES
from pblasmp.engines.gpu.kernels.one_kernel import tiling, way_of_parts
from pblasmp.engines.gpu.runtime import arena
from pblasmp.engines.gpu.runtime.gpu_runtime import GpuRuntime, Turns, turns_on
from pblasmp.engines.gpu.runtime.graphs import Recordings
from pblasmp.engines.request import Options
from tests.helpers.copy_products import problem, product
from tests.helpers.fakelt import FakeLt
from tests.helpers.fakepeers import Peers
from tests.helpers.inside import takes_turns
from tests.helpers.kernel_order import Order
from tests.helpers.machine import Multiplying, machine

MULTIPROCESSORS = 132  # of an H100


# -- a GPU's streams


class Event:
    def __init__(self, *, disable_timing: bool) -> None:
        self.recorded: Any = None

    def record(self, stream: Stream) -> None:
        self.recorded = stream, len(stream.queued)


class Stream:
    """What is queued: names of kernels, and waits for what another stream has had queued."""

    def __init__(self, ptr: int) -> None:
        self.ptr, self.capture, self.queued = ptr, 0, []

    def is_capturing(self) -> bool:
        return self.capture > 0

    def wait_event(self, event: Event) -> None:
        self.queued.append(event.recorded)


class Gpu:
    """CuPy, on a GPU with some streams."""

    def __init__(self) -> None:
        self.streams = [Stream(ptr) for ptr in (1, 2, 3)]
        self.current = self.streams[0]
        self.cuda = SimpleNamespace(Event=Event, get_current_stream=lambda: self.current)

    def begun(self, delayed: int) -> list[str]:
        """Return the kernels in the order in which they begin where a stream runs nothing while another can."""
        done, order = [0] * len(self.streams), []
        lines = sorted(range(len(self.streams)), key=lambda i: i == delayed)

        def step(i: int) -> bool:
            if done[i] == len(self.streams[i].queued):
                return False
            what = self.streams[i].queued[done[i]]
            if isinstance(what, str):
                order.append(what)
            elif done[self.streams.index(what[0])] < what[1]:
                return False
            done[i] += 1
            return True

        while any(step(i) for i in lines):
            pass
        assert done == [len(stream.queued) for stream in self.streams], "streams wait for each other"
        return order


class Context:
    """A context's runtime, as far as the order of its work goes."""

    let_wait, follow_stream, take_turn = GpuRuntime.let_wait, GpuRuntime.follow_stream, GpuRuntime.take_turn

    def __init__(self, name: str, gpu: Gpu, turns: Turns) -> None:
        self.name, self.cupy, self.turns, self.followers = name, gpu, turns, []
        self.stream = gpu.streams["ABC".index(name)]
        turns.join(self)

    def queue(self, stream: int, *, alone: bool, call: str = "") -> None:
        """Queue a product on a stream, which takes the whole GPU or does not."""
        self.cupy.current = self.cupy.streams[stream]
        self.follow_stream()
        if alone:
            self.take_turn()
        self.cupy.current.queued.append(call or self.name)


class NoTurns(Turns):
    """No order between contexts."""

    def follow(self, member: Any, stream: Any) -> None: ...

    def take(self, member: Any, stream: Any) -> None: ...


def orders(calls: Sequence[tuple[str, int, bool]], kind: Callable[[], Turns] = Turns) -> list[list[str]]:
    """Return in which orders two GPUs begin what every rank calls.

    A call has a name, which begins with that of its context, a stream, and is alone or not.
    """
    found = []
    for delayed in (0, 1):
        gpu, turns = Gpu(), kind()
        contexts = {name: Context(name, gpu, turns) for name in "ABC"}
        for call, stream, alone in calls:
            contexts[call[0]].queue(stream, alone=alone, call=call)
        found.append(gpu.begun(delayed))
    return found


@pytest.mark.parametrize("alone", list(itertools.product([False, True], repeat=3)))
def test_what_takes_the_whole_gpu_has_one_place_among_all_others(alone):
    """Whichever of the contexts queue such kernels, and whatever streams the GPUs begin with."""
    names = "A1", "B1", "A2"
    calls = list(zip(names, (0, 1, 0), alone, strict=True))
    for begun in orders(calls):
        assert sorted(begun) == sorted(names)
        for i, j in itertools.combinations(range(3), 2):
            if alone[i] or alone[j]:
                assert begun.index(names[i]) < begun.index(names[j])
    one, other = orders(calls, NoTurns)
    assert one != other


def test_contexts_that_queue_none_do_not_wait_for_each_other():
    gpu, turns = Gpu(), Turns()
    a, b = (Context(name, gpu, turns) for name in "AB")
    for context, stream in ((a, 0), (b, 1), (a, 0), (b, 1)):
        context.queue(stream, alone=False)
    assert [stream.queued for stream in gpu.streams] == [["A", "A"], ["B", "B"], []]


def test_one_context_waits_for_nothing():
    gpu, turns = Gpu(), Turns()
    a, closed = (Context(name, gpu, turns) for name in "AB")
    closed.queue(1, alone=True)
    turns.leave(closed)
    for _ in range(2):
        a.queue(0, alone=True)
    assert gpu.streams[0].queued == ["A", "A"]


def test_one_wait_for_each_turn_is_enough():
    gpu, turns = Gpu(), Turns()
    a, b = (Context(name, gpu, turns) for name in "AB")
    a.queue(0, alone=True)
    for _ in range(3):
        b.queue(1, alone=False)
    assert len(gpu.streams[1].queued) == 4
    a.queue(0, alone=True)
    b.queue(1, alone=False)
    assert len(gpu.streams[1].queued) == 6


def test_contexts_take_turns_as_long_as_they_are_open(alone, stand_in):
    with machine(stand_in(1000), Multiplying, lt=FakeLt()) as lib:
        with pb.Context(engine="cublasmp") as one, pb.Context(engine="cublasmp") as other:
            runtimes = [context.engine.session.runtime for context in (one, other)]
            assert runtimes[0].turns is runtimes[1].turns is turns_on(lib.gpu.current)
            assert all(takes_turns(context.engine.session) for context in (one, other))
            runtimes[0].take_turn()
            lib.gpu.events.clear()
            runtimes[1].stream = SimpleNamespace(ptr=77, is_capturing=lambda: False)
            runtimes[0].take_turn()
            assert ("wait", lib.gpu.stream, 77) in lib.gpu.events
            runtimes[1].stream = runtimes[0].stream
            sessions = [context.engine.session for context in (one, other)]
        assert not any(map(takes_turns, sessions))


def test_gpus_have_turns_of_their_own():
    assert turns_on(7) is turns_on(7)
    assert turns_on(7) is not turns_on(8)


def test_a_capture_waits_for_work_inside_of_it_only(monkeypatch):
    monkeypatch.setattr("pblasmp.engines.gpu.runtime.gpu_runtime.capture_of", lambda stream: stream.capture)
    gpu, turns = Gpu(), Turns()
    a, b = (Context(name, gpu, turns) for name in "AB")
    a.queue(0, alone=True)
    gpu.streams[1].capture = 5
    b.queue(1, alone=False)
    assert gpu.streams[1].queued == ["B"]  # the capture is not broken
    gpu.streams[0].capture = 5  # the user has forked it
    b.queue(1, alone=False)
    assert gpu.streams[1].queued[1:] == [(gpu.streams[0], 2), "B"]
    gpu.streams[1].capture = 6
    a.queue(0, alone=True)
    assert gpu.streams[0].queued[1:] == ["A", "A"]


def test_captures_are_told_apart_by_the_driver(monkeypatch):
    asked = []
    driver = SimpleNamespace(
        cuStreamGetCaptureInfo=lambda ptr: asked.append(ptr) or (0, 1, 40 + ptr, 0, [], 0)
    )
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    assert [arena.capture_of(Stream(ptr)) for ptr in (1, 2)] == [41, 42]
    assert asked == [1, 2]


def test_a_graph_of_such_a_kernel_takes_turns_when_it_is_replayed():
    """Not when it is recorded; a graph of others takes none."""
    gpu, turns = Gpu(), Turns()
    a, b = (Context(name, gpu, turns) for name in "AB")
    recording = gpu.streams[2]
    recording.begin_capture = lambda mode: setattr(recording, "capture", 9)
    recording.end_capture = lambda: (
        setattr(recording, "capture", 0) or SimpleNamespace(launch=lambda: gpu.current.queued.append("graph"))
    )
    recording.use = lambda: setattr(gpu, "current", recording)
    gpu.streams[0].use = lambda: setattr(gpu, "current", gpu.streams[0])
    a.recording, a.relaxed = recording, "relaxed"
    a.arena = SimpleNamespace(generation=0, noting=lambda: nullcontext(set()), keep_for=lambda *_: None)
    store = Recordings(a)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", gpu)
        patch.setattr("pblasmp.engines.gpu.runtime.gpu_runtime.capture_of", lambda stream: stream.capture)
        b.queue(1, alone=False)
        gpu.current = gpu.streams[0]
        whole, small = store.record(a.take_turn), store.record(lambda: None)
        assert gpu.streams[0].queued == []
        small.replay()
        assert gpu.streams[0].queued == ["graph"]
        whole.replay()
        assert gpu.streams[0].queued[1:] == [(gpu.streams[1], 1), "graph"]
        b.queue(1, alone=False)
        assert gpu.streams[1].queued[1:] == [(gpu.streams[0], 3), "B"]


# -- a model of the kernel's blocks on GPUs that are not empty


class Model:
    """GPUs that run kernels of the same product, each of which waits for its twins on the other GPUs.

    Clusters of blocks begin in turn while multiprocessors are free, go through their tiles in the kernel's order, and
    leave when they have done all of them and have fetched all of their results.
    """

    def __init__(
        self, order: Order, form: str, share: tuple[int, int], blocks: int, left: int, lines: Any
    ) -> None:
        ranks, self.cluster, self.groups = order.ranks, order.cluster, blocks // order.cluster
        self.sums, self.fetches = form != "matmul_allgather", form != "matmul_reduce_scatter"
        blocks = self.groups * self.cluster
        # the tiles of a cluster lie one below the other
        self.tiles = [order.tiles(share, g, blocks)[:: self.cluster].tolist() for g in range(ranks)]
        self.results = [order.results(share, g, blocks).tolist() for g in range(ranks)]
        self.done: list[set[Any]] = [set() for _ in range(ranks)]  # tiles that each rank has multiplied
        self.added: set[Any] = set()
        self.free = [self.groups * self.cluster + left] * ranks
        self.waiting = [[(k, c) for k in line for c in range(self.groups)] for line in lines]
        self.running: list[dict[Any, list[int]]] = [{} for _ in range(ranks)]
        self.changed = False

    def step(self, g: int) -> None:
        """Let a GPU do what it can."""
        while self.waiting[g] and self.free[g] >= self.cluster:
            k, c = self.waiting[g].pop(0)
            first = c * self.cluster
            self.running[g][k, c] = [c, *range(first, first + self.cluster if self.fetches else first)]
            self.free[g] -= self.cluster
            self.changed = True
        blocks = self.groups * self.cluster
        for (k, c), at in list(self.running[g].items()):
            while at[0] < len(self.tiles[g]) and self._does(k, g, self.tiles[g][at[0]]):
                at[0] += self.groups
                self.changed = True
            for i in range(1, len(at)):  # what each block fetches
                while at[i] < len(self.results[g]) and (k, *self.results[g][at[i]]) in self.added:
                    at[i] += blocks
                    self.changed = True
            if at[0] >= len(self.tiles[g]) and all(each >= len(self.results[g]) for each in at[1:]):
                del self.running[g][k, c]
                self.free[g] += self.cluster
                self.changed = True

    def _does(self, k: Any, g: int, tile: list[int]) -> bool:
        owner, row, col = tile
        cluster = [(k, owner, row + i, col) for i in range(self.cluster)]
        if owner == g:
            others = [done for rank, done in enumerate(self.done) if rank != g] if self.sums else []
            if not all(each in done for done in others for each in cluster):
                return False
            self.added.update(cluster)
        self.done[g].update(cluster)
        return True

    def run(self, beside: Callable[[], None] = lambda: None) -> bool:
        """Return whether everything ends; ``beside`` lets something else go on."""
        while any(self.running) or any(self.waiting):
            self.changed = False
            for g in range(len(self.running)):
                self.step(g)
            beside()
            if not self.changed:
                return False
        return True


class Nccl:
    """Another communicator's kernel: begun before the product on some GPUs, and queued behind it on the others.

    A cluster of its blocks ends once it runs on all GPUs.
    """

    def __init__(self, model: Model, clusters: int, first: set[int], width: int = 4) -> None:
        everyone = range(len(model.free))
        self.model, self.width = model, width
        self.there = [set(range(clusters)) if g in first else set() for g in everyone]
        self.ahead = [[] if g in first else list(range(clusters)) for g in everyone]
        for g in first:
            model.free[g] -= clusters * width

    def go_on(self) -> None:
        model = self.model
        for g, ahead in enumerate(self.ahead):
            while not model.waiting[g] and ahead and model.free[g] >= self.width:
                self.there[g].add(ahead.pop(0))
                model.free[g] -= self.width
                model.changed = True
        for i in set.intersection(*self.there):
            for g, there in enumerate(self.there):
                there.discard(i)
                model.free[g] += self.width
            model.changed = True


FORMS = "matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather"


@pytest.fixture(scope="module")
def order(tmp_path_factory) -> Callable[..., Order]:
    """Make the kernel's orders once."""
    made: dict[Any, Order] = {}

    def of(form: str, ranks: int, cluster: int) -> Order:
        key = ranks, cluster, FORMS[0] if form in FORMS[:2] else form  # both have one order
        if key not in made:
            made[key] = Order(tmp_path_factory.mktemp("order"), *key)
        return made[key]

    return of


def cut(form: str, ranks: int, sizes: tuple[int, int, int], blocks: int) -> tuple[tuple[int, int], int]:
    """Return how the library cuts a product: row and column blocks of a rank's share, and blocks of a cluster."""
    rows, cols, inputs = sizes
    parts = way_of_parts(form, ranks, rows, cols, 2 * inputs, blocks)
    assert parts in ("sent", "fetched")
    share = (rows, cols // ranks) if form == "matmul_allgather" else (rows // ranks, cols)
    tiles = tiling(form, ranks, *share, 2 * inputs, parts, blocks)
    return (tiles.row_blocks, tiles.col_blocks), tiles.cluster


@pytest.mark.parametrize("form", FORMS)
def test_two_contexts_on_two_streams_end_in_the_order_of_the_calls(order, form):
    """And would not without it: each kernel waits for a twin that finds no multiprocessor."""
    share, cluster = cut(form, 2, (4096, 3584, 4096), MULTIPROCESSORS)
    calls = [("A", 0, True), ("B", 1, True)]

    def ends(lines: list[list[str]]) -> bool:
        return Model(order(form, 2, cluster), form, share, MULTIPROCESSORS, 0, lines).run()

    assert ends(orders(calls))
    assert not ends(orders(calls, NoTurns))


def left_by(form: str, ranks: int, sizes: tuple[int, int, int], *, beside_others: bool) -> int:
    """Return how many multiprocessors the library leaves to others."""
    peers = Peers(ranks, multiprocessors=MULTIPROCESSORS)
    t, n, k = sizes
    parts = {"tokens": (t,), "outputs": (n // ranks,) * ranks, "inputs": (k,)}
    if form != "matmul_allgather":
        parts |= {"outputs": (n,), "inputs": (k // ranks,) * ranks}
    if form == "matmul_reduce_scatter":
        parts["tokens"] = (t // ranks,) * ranks
    p = problem(form, ranks, parts, DTYPES["bfloat16"])
    return (
        MULTIPROCESSORS
        - product(peers.gpus[0], "one_kernel", p, Options(), beside_others=beside_others).blocks
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_beside_another_communicator_multiprocessors_are_left(order, form, ranks, monkeypatch):
    """So that all end, whatever the GPUs begin with; without them, some do not."""
    kernel = SimpleNamespace(sums=form != "matmul_allgather", gives=False)
    monkeypatch.setattr("pblasmp.engines.gpu.tensor.one_kernel_products.OneKernel", lambda *_: kernel)
    monkeypatch.setattr("tests.helpers.fakepeers.Peer.reserve", lambda *_: None)
    sizes, ends = (4096, 7168, 8192), {}
    for beside_others in (False, True):
        left = left_by(form, ranks, sizes, beside_others=beside_others)
        blocks = MULTIPROCESSORS - left
        share, cluster = cut(form, ranks, sizes, blocks)
        ends[beside_others] = set()
        for clusters, first in ((8, {0}), (8, set(range(ranks - 1)))):
            model = Model(order(form, ranks, cluster), form, share, blocks, left, [["A"]] * ranks)
            ends[beside_others].add(model.run(Nccl(model, clusters, first).go_on))
    assert left > 0
    assert ends[True] == {True}
    assert form != "matmul_allreduce" or ranks == 2 or False in ends[False]


def test_of_which_gpus_the_ranks_speak(monkeypatch):
    """One rank with other communicators is enough: all leave the same number."""
    said: list[bool] = []

    def comm(*others: bool, of_group: bool) -> Any:
        return SimpleNamespace(
            allgather=lambda mine: (said.append(mine), [mine, *others])[1], of_group=of_group
        )

    def beside(*others: bool, of_group: bool = False) -> bool:
        return GpuRuntime.beside_others(SimpleNamespace(comm=comm(*others, of_group=of_group)))  # type: ignore[arg-type]

    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    assert not beside()
    assert beside(True)
    assert "torch.distributed" not in sys.modules  # it is not imported for this
    dist = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True,
        distributed_c10d=SimpleNamespace(get_pg_count=lambda: dist.groups), groups=1,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch.distributed", dist)
    said.clear()
    assert [beside(of_group=of_group) for of_group in (True, False)] == [False, True]
    dist.groups = 2
    assert beside(of_group=True)
    dist.is_initialized = lambda: False
    assert not beside()
    assert said == [False, True, True, False]
