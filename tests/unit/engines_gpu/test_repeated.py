# SPDX-License-Identifier: Apache-2.0
"""Repeated calls of tensor-parallel products: one vote and one launch by the core, or what else (graphs.py)."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import _core
from pblasmp.engines.gpu.runtime import graphs
from pblasmp.engines.gpu.runtime.graphs import Relaunch
from pblasmp.engines.gpu.tensor import base
from pblasmp.runtime.kept_plans import held_bytes
from pblasmp.tensor_parallel import call, made
from tests.helpers import inside
from tests.helpers.fakelt import FakeLt
from tests.helpers.machine import Multiplying, machine
from tests.helpers.mpi import on_ranks

pytestmark = pytest.mark.skipif(
    _core.load() is None, reason="without the compiled core nothing is launched by it"
)


@pytest.fixture
def multiply(ctx, gpu, monkeypatch) -> Callable[[], None]:
    """Make one call, always on the same arrays; it has been made until a graph is recorded, which is launched twice."""
    import cupy

    x, w, y = (cupy.asarray(np.ones(shape)) for shape in ((6, 4), (5, 4), (6, 5)))
    monkeypatch.setattr(made, "new_like", lambda *_: y)  # as an allocator does that gives memory again

    def multiply() -> None:
        assert pb.matmul_reduce_scatter(x, w, ctx, algo="pull") is y

    for _ in range(5):
        multiply()
    return multiply


@pytest.fixture
def in_python(multiply, monkeypatch) -> list[int]:
    """Has an entry for each graph that Python launches."""
    found, launch = [], graphs._Recorded.launch
    monkeypatch.setattr(graphs._Recorded, "launch", lambda self: (found.append(1), launch(self)))
    return found


def test_the_core_launches(lib, multiply, in_python):
    launched = len(lib.gpu.did("graph launched"))
    for _ in range(3):
        multiply()
    assert len(lib.gpu.did("graph launched")) == launched + 3
    assert not in_python


FORMS = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("large", [False, True])
def test_nccl_s_products_are_replayed_unless_it_works_on_arrays_of_the_user(
    ctx, lib, gpu, monkeypatch, form, large
):
    """A graph with which NCCL has registered memory must not outlive that."""
    import cupy

    if large:
        monkeypatch.setattr(base, "STAGED", 0)
    x, w, y = (cupy.asarray(np.ones(shape)) for shape in ((6, 4), (5, 4), (6, 5)))
    monkeypatch.setattr(made, "new_like", lambda *_: y)
    launched = []
    for _ in range(6):
        getattr(pb, form)(x, w, ctx, algo="nccl")
        launched.append(len(lib.gpu.did("graph launched")))
    assert launched == ([0] * 6 if large and form != "matmul_allgather" else [0, 0, 0, 1, 2, 3])


def test_results_that_get_memory_again_are_launched_with(ctx, lib, gpu, monkeypatch):
    """An allocator gives the memory of a dropped result again: the call drops its own, too, before it reads on."""
    import cupy

    x, w, *rooms = (cupy.asarray(np.ones(shape)) for shape in ((6, 4), (5, 4), (6, 5), (6, 5)))
    given: list[Any] = [lambda: None, lambda: None]

    def new_like(*_: Any) -> Any:
        free = next(i for i, each in enumerate(given) if each() is None)
        array = rooms[free][...]
        given[free] = weakref.ref(array)
        return array

    monkeypatch.setattr(made, "new_like", new_like)
    for _ in range(5):
        pb.matmul_reduce_scatter(x, w, ctx, algo="pull")
    assert len(lib.gpu.did("capture ends")) == 1
    launched = len(lib.gpu.did("graph launched"))
    monkeypatch.setattr(graphs._Recorded, "launch", None)
    pb.matmul_reduce_scatter(x, w, ctx, algo="pull")
    assert len(lib.gpu.did("graph launched")) == launched + 1


def test_a_kept_plan_holds_nothing_of_its_engine(ctx, gpu):
    """All of its engine is some 3000 objects, which take 10 ms to count. This one counts the least without a look."""
    import cupy

    with mock.patch.object(ctx.kept, "keep", wraps=ctx.kept.keep) as keep:
        for _ in range(5):
            pb.matmul_reduce_scatter(*(cupy.asarray(np.ones(x)) for x in ((6, 4), (5, 4))), ctx, algo="pull")
    ((_, plan), _) = keep.call_args
    assert held_bytes(plan, ctx.engine) < 1 << 15
    assert ctx.kept.nbytes == 1 << 17
    assert not inside.product(plan).has_tables


def test_another_stream_waits_first(lib, multiply, in_python):
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        multiply()
        assert len(in_python) == 1
        assert lib.gpu.did("wait")[-1][0] == stream.ptr
        multiply()
    assert len(in_python) == 1
    assert lib.gpu.driver_for_c.on == stream.ptr
    multiply()
    assert len(in_python) == 2


def test_another_gpu_is_not_launched_on(lib, multiply, in_python):
    launched = len(lib.gpu.did("graph launched"))
    lib.gpu.current = 3
    multiply()
    assert lib.gpu.current == 3
    lib.gpu.current = 0
    assert len(lib.gpu.did("graph launched")) == launched + 1
    assert len(in_python) == 1


def test_what_the_user_records_is_queued(lib, multiply, in_python):
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        multiply()
        launched = len(lib.gpu.did("graph launched"))
        stream.begin_capture("relaxed")
        multiply()
        stream.end_capture()
    assert len(lib.gpu.did("graph launched")) == launched
    assert len(in_python) == 1


@pytest.mark.parametrize("takes", [False, True])
def test_another_context_s_turn_is_waited_for(ctx, lib, multiply, in_python, takes):
    let_wait = lambda self, stream, other: True  # noqa: E731
    other = type("Member", (), {"stream": ctx.engine.session.runtime.stream, "let_wait": let_wait})()
    turns = ctx.engine.session.runtime.turns
    turns.join(other)
    multiply()
    assert not in_python
    if takes:
        turns.take(other, other.stream)
        multiply()
        assert len(in_python) == 1
    turns.leave(other)


def test_replaced_memory_is_not_launched_with(ctx, multiply, in_python, lib):
    ctx.engine.session.runtime.arena.replaced()
    captured = len(lib.gpu.did("capture ends"))
    multiply()
    assert len(lib.gpu.did("capture ends")) == captured + 1


def test_an_error_of_the_driver(lib, multiply):
    lib.gpu.driver_for_c.error = 700
    with pytest.raises(pb.StatusError, match="CUDA driver: error 700"):
        multiply()
    lib.gpu.driver_for_c.error = 0
    multiply()


def test_what_cannot_be_asked_of_a_graph_is_an_error():
    with pytest.raises(pb.StatusError, match="error 1"):
        Relaunch.check(object.__new__(Relaunch), 1)


@pytest.mark.parametrize("cases", ["unlike_calls", "unlike_tokens", "direct_calls"])
@on_ranks(2)
def test_ranks_that_differ(comm: Any, path: str, cases: str) -> None:
    with machine(path, Multiplying, comm=comm, lt=FakeLt()) as lib, pytest.MonkeyPatch.context() as patch:
        with pb.Context(comm, engine="cublasmp") as ctx:
            globals()[cases](ctx, lib, patch)
        lib.assert_clean()
        lib.gpu.assert_clean()


def unlike_calls(ctx: pb.Context, lib: Multiplying, patch: pytest.MonkeyPatch) -> Any:
    """Ranks that are late, that have nothing recorded, or make another call."""
    import cupy

    x, w, other = (cupy.asarray(np.ones(shape, np.float32)) for shape in ((8, 4), (6, 4), (8, 4)))
    y = cupy.asarray(np.ones((4, 6), np.float32))
    patch.setattr(made, "new_like", lambda *_: y)

    def multiply(x: Any = x, algo: str = "push") -> int:
        before = len(lib.gpu.did("graph launched"))
        pb.matmul_reduce_scatter(x, w, ctx, algo=algo)
        return len(lib.gpu.did("graph launched")) - before

    for _ in range(5):
        last = multiply()
    assert last == 1, f"replayed: {last} launches"
    if ctx.rank:
        time.sleep(0.05)  # longer than a vote waits in the core
    assert multiply() == 1, "one rank is late: not launched"
    found = multiply(other if ctx.rank else x)
    assert found == 0, f"one rank's array is elsewhere: {found} launches"
    assert multiply() == 1, "again: not launched"
    with pytest.raises(pb.RankMismatchError, match="algo"):
        multiply(algo="pull" if ctx.rank else "push")
    assert multiply() == 1, "after it: not launched"


def unlike_tokens(ctx: pb.Context, _: Multiplying, patch: pytest.MonkeyPatch) -> Any:
    """Ranks that each make an earlier call of theirs again, but not the same one: none takes it for that later on."""
    import cupy

    room = cupy.asarray(
        np.zeros(16 * 5, np.float32)
    )  # results are at one address, as an allocator may place them
    patch.setattr(made, "new_like", lambda *given: room[: math.prod(given[2])].reshape(given[2]))
    w = cupy.asarray(np.ones((5, 4), np.float32))
    xs = {count: cupy.asarray(np.full((count, 4), 1 + ctx.rank, np.float32)) for count in (8, 6)}
    again: dict[int, Any] = {}  # as the functions of pblasmp.torch keep them
    turns = [*[(8, 8)] * 4, *[(6, 6)] * 4, *[(8, 6)] * 4, (8, 8), (6, 6), *[(6, 8)] * 4]
    for counts in turns:
        x = xs[counts[ctx.rank]]
        known = again.get(len(x))
        how = {"algo": "push", "transposed": False}
        y, again[len(x)] = known(x, w, None) if known else call.multiply("allgather_matmul", ctx, x, w, **how)
        assert y.shape == (sum(counts), 5), f"{counts[0]} and {counts[1]} tokens"


def direct_calls(ctx: pb.Context, lib: Multiplying, _: pytest.MonkeyPatch) -> Any:
    """A repeated direct call replays a graph for each set of slabs."""
    a, b, c = (ctx.zeros((64, 64), block=16, order="F", dtype="float32") for _ in range(3))
    kinds = ("graph launched", "cuBLAS", "capture ends")

    def multiply(beta: float = 0) -> list[int]:
        before = [len(lib.gpu.did(kind)) for kind in kinds]
        pb.matmul(a, b, c, beta=beta, out=c)
        return [len(lib.gpu.did(kind)) - n for kind, n in zip(kinds, before, strict=True)]

    sets = 2 if ctx.size > 1 else 1
    found = [multiply() for _ in range(3 * sets)]
    recorded = [[0, 1, 0]] * (2 * sets) + [[0, 2, 1]] * sets
    assert found == recorded, "until it is recorded"
    found = [multiply() for _ in range(4)]
    assert found == [[1, 0, 0]] * 4, "after it"
    if ctx.rank:
        time.sleep(0.05)
    found = [multiply() for _ in range(2)]
    assert found == [[1, 0, 0]] * 2, "one rank is late"
    ctx.engine.session.runtime.arena.replaced()
    found = multiply()
    assert found == [0, 2, 1], "memory was replaced"
    multiply()
    if ctx.rank == ctx.size - 1:
        inside.bound_calls(ctx).clear()
    found = [multiply() for _ in range(2)]
    assert found == [[0, 1, 0]] * 2, "one rank has forgotten it"
    if ctx.size > 1:
        with pytest.raises(pb.RankMismatchError, match="beta"):
            multiply(beta=ctx.rank)


def test_direct_calls_of_one_rank(alone, stand_in):
    with machine(stand_in(1000), Multiplying, lt=FakeLt()) as own, pb.Context(engine="cublasmp") as ctx:
        direct_calls(ctx, own, pytest.MonkeyPatch())
