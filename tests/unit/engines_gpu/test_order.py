# SPDX-License-Identifier: Apache-2.0
"""Which stream waits for which: what keeps products, copies and memory that is replaced in order (gpu_operations.py).

The order of signals inside the algorithms is the model's (test_tensor_products.py, test_push.py), that of messages is
seen in test_algorithms.py. Here is what these are made of: events of CUDA, and the host's waits.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import defaultdict
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.composite import ExchangeMove
from pblasmp.engines.gpu.gpu_operations import GpuOperations
from pblasmp.engines.gpu.gpu_transport import GpuTransport
from pblasmp.engines.gpu.kernels.lt import WORKSPACE_BYTES
from pblasmp.engines.request import Operands
from tests.helpers.fakelapack import matrix, vector
from tests.helpers.fakelt import FakeLt
from tests.helpers.machine import Multiplying, context
from tests.helpers.slow import draws
from tests.helpers.stream_order import StreamOrder

SLABS = ["gathered", "panels"]
CALLS = [
    ("matmul", "ab", [*SLABS, "push", "default"]),
    *((routine, operands, [*SLABS, "full", "cublasmp"]) for routine, operands in (("symm", "ab"), ("syr2k", "ab"))),
    ("syrk", "a", [*SLABS, "full", "summed"]),
    *((routine, "ab", SLABS) for routine in ("trmm", "trsm")),
    *((routine, operands, ["moved"]) for routine, operands in (("geadd", "ac"), ("tradd", "bd"))),
]  # fmt: skip
D = pb.MatrixDescriptor((6, 6), (6, 6), pb.Grid(1, 1), dtype="float32")


@pytest.fixture
def played() -> dict[str, Any]:
    """A GPU with cuBLASLt, which computes nothing."""
    return {"kind": Multiplying, "lt": FakeLt()}


def test_streams_are_forked_from_the_main_one_and_joined_to_it(ctx, lib):
    gpu = ctx.engine.session.gpu
    stream = sys.modules["cupy"].cuda.Stream(non_blocking=True)
    with stream:
        gpu.begin("copy0", "copy1")
        forked = [gpu.stream(name).ptr for name in ("copy0", "copy1")]
        assert lib.gpu.did("wait") == [(each, stream.ptr) for each in forked]
        lib.gpu.events.clear()
        gpu.follow("copy1", "copy0")
        gpu.end("copy0", "copy1")
        assert lib.gpu.did("wait") == [(forked[1], forked[0]), *((stream.ptr, each) for each in forked)]


def test_a_buffer_is_replaced_and_the_host_waits_for_nothing(ctx, lib):
    gpu = ctx.engine.session.gpu
    first = gpu.scratch("partial", 100)
    assert gpu.scratch("partial", 50) == first
    gpu.scratch("partial", 200)
    assert not lib.gpu.did("synchronize")


@pytest.mark.parametrize("algo", ["push", "gathered", "panels", "default"])
def test_a_plan_queues_nothing_in_a_broken_context(ctx, lib, monkeypatch, algo):
    """Also where its runs are not agreed on."""
    a, b = ctx.zeros(D), ctx.zeros(D)
    with pb.plan(pb.matmul, a, b, algo=algo) as plan:
        plan()
        lib.gpu.events.clear()
        with monkeypatch.context() as broken:
            broken.setattr(ctx.control.channel, "cause", "rank 1 left")
            broken.setattr(ctx.control.channel, "raised", False)  # so that the fixture can close it
            with pytest.raises(pb.ClosedError, match="rank 1 left"):
                plan()
        assert lib.gpu.events == []
        plan()


def test_products_of_a_triangle_run_at_the_same_time(ctx, lib, monkeypatch):
    """On streams that are forked from the current one and joined to it, each with a workspace."""
    monkeypatch.setattr(GpuOperations, "tile", 1)
    a, stream = ctx.zeros(D), sys.modules["cupy"].cuda.Stream(non_blocking=True)
    with pb.plan(pb.blas.syrk, a, algo="gathered") as plan, stream:
        plan(a=a)
        for clear in (lib.gpu.events, lib.gpu.lt.calls):
            clear.clear()
        plan(a=ctx.zeros(D))
        waited = lib.gpu.did("wait")
    streams = [call["stream"] for call in lib.gpu.lt.calls]
    beside = sorted(set(streams) - {stream.ptr})
    assert len(beside) == 3 < len(streams)
    assert len({call["workspace"] for call in lib.gpu.lt.calls}) == len(set(streams))
    assert sorted(waited[:3]) == [(each, stream.ptr) for each in beside]
    assert sorted(waited[3:]) == [(stream.ptr, each) for each in beside]


@pytest.mark.parametrize(
    ("call", "algo", "lanes"),
    [
        (pb.blas.syrk, "gathered", 4), (pb.blas.syrk, "panels", 5), (pb.blas.syrk, "summed", 4),
        (pb.blas.syr2k, "gathered", 5), (pb.blas.trmm, "gathered", 4), (pb.blas.trmm, "panels", 4),
        (pb.blas.trmm, "stationary", 4), (pb.matmul, "panels", 1),
    ],
)  # fmt: skip
def test_a_plan_counts_the_workspaces_of_all_these_streams(ctx, lib, monkeypatch, call, algo, lanes):
    for name in ("tile", "band", "coarser", "panel"):
        monkeypatch.setattr(GpuOperations, name, 1)
    a, b = ctx.zeros(D), ctx.zeros(D)
    pb.matmul(a, b, algo="gathered")  # on the caller's stream, which always has a workspace
    with pb.plan(call, a, *[b] * (call is not pb.blas.syrk), algo=algo) as plan:
        plan()
        used = {each["workspace"][0] for each in lib.gpu.lt.calls}
        assert len(used) == lanes
        assert plan.workspace.device_bytes // WORKSPACE_BYTES == lanes


@pytest.mark.parametrize("lt", [True, False])
def test_whatever_is_queued_on_three_streams_takes_turns(alone, stand_in, monkeypatch, lt):
    """Plans of every algorithm, which record graphs and replay them, graphs of their own, and moves."""
    chance, graphs = random.Random(5), 0
    with (
        context(stand_in(1000), Multiplying, lt=FakeLt() if lt else None) as (ctx, lib),
        ExitStack() as closing,
    ):
        cupy = sys.modules["cupy"]
        # products at the same time, of several panels
        for name, size in (("tile", 2), ("lead", 1), ("panel", 2)):
            monkeypatch.setattr(GpuOperations, name, size)
        order = StreamOrder(lib.gpu, cupy, monkeypatch)
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
        a, b, c, d = (ctx.eye(replace(D, order=memory)) for memory in "CFCF")
        plans = []
        for function, operands, algos in CALLS:
            for algo in algos:
                with suppress(pb.UnsupportedError):  # without cuBLASLt
                    plan = pb.plan(function, *({"a": a, "b": b, "c": c, "d": d}[x] for x in operands),
                                   algo=algo, out=ctx.zeros(D))  # fmt: skip
                    plans.append(closing.enter_context(plan))
        move = ExchangeMove(ctx.engine, a.descriptor, b.descriptor)
        moved = Operands(a.local, None, None, b.local)
        queue = [*plans, *plans, lambda: move.run(moved), lambda: a.redistribute(b.descriptor)]
        for _ in range(2):
            chance.shuffle(queue)
            for run in queue:
                with chance.choice(streams):
                    run()
        for plan in plans:
            with chance.choice(streams), suppress(pb.UnsupportedError):
                queue.append(plan.graph().replay)
                graphs += 1
        for _ in range(draws(150, long=300)):
            with chance.choice(streams):
                chance.choice(queue)()
        assert order.faults == []
        assert order.uses > 200
        assert graphs > 10 if lt else graphs > 0


def test_moves_run_beside_the_product_before(ctx, lib, monkeypatch):
    """They wait for what was queued before the last ones, and what is queued later for those before a join."""
    order = StreamOrder(lib.gpu, sys.modules["cupy"], monkeypatch)
    ahead = ctx.engine.transport.ahead
    order.use("before")
    with ahead(follows=True) as join:
        order.use("before")
        order.use("first")
        join()
        order.use("meanwhile")
    order.use("first")
    order.use("product")
    assert order.faults == []
    order.use("meanwhile")
    assert len(order.faults) == 1
    order.faults.clear()
    assert order.faults == []
    with ahead() as join:
        order.use("before")
        assert order.faults == []
        order.use("product")  # it runs beside this
        assert len(order.faults) == 1
        order.use("second")
        join()
    order.use("second")
    with ahead(follows=True):
        order.use("second")
        order.use("third")
    assert len(order.faults) == 1
    order.use("third")
    assert len(order.faults) == 2
    with ahead(follows=True) as join:
        join()
    order.use("all")
    with ahead() as join:
        order.use("third")
        join()
    order.use("third")
    assert len(order.faults) == 2


def test_a_panel_leaves_beside_the_last_product_and_behind_the_one_that_had_its_memory(ctx, lib, monkeypatch):
    """Kernels that pack it begin where the last product leaves room, not behind it."""
    monkeypatch.setattr(GpuOperations, "panel", 1)
    a, b = (ctx.zeros(replace(D, dtype="complex64")) for _ in range(2))
    with pb.plan(pb.matmul, a, b, op_a="C", algo="panels") as plan:
        order = StreamOrder(lib.gpu, sys.modules["cupy"], monkeypatch)
        queued, started, beside = itertools.count(), itertools.count(), []
        multiply, start = GpuOperations.gemm, GpuTransport.start_exchange

        def multiplied(*arguments: Any, **named: Any) -> None:
            multiply(*arguments, **named)
            order.use(f"product {next(queued)}")

        def starts(*arguments: Any, **named: Any) -> Any:
            panel = next(started)
            order.use(f"product {panel - 3}")
            assert order.faults == []
            order.use(f"product {panel - 2}")
            beside.append(len(order.faults))
            order.faults.clear()
            return start(*arguments, **named)

        monkeypatch.setattr(GpuOperations, "gemm", multiplied)
        monkeypatch.setattr(GpuTransport, "start_exchange", starts)
        plan()
    assert next(queued) == 6
    assert beside == [0, 0, 1, 1, 1, 1]


def test_symmetric_memory_is_used_again_when_all_work_is_done(ctx, lib):
    x = ctx.empty(D, symmetric=True)
    address = x.local.data.ptr
    lib.gpu.events.clear()
    ctx.engine.recycle(x.local)
    assert lib.gpu.events[0][0] == "synchronize"
    assert ctx.empty(D, symmetric=True).local.data.ptr == address


class Lanes:
    """Streams of a GPU: what each has done or waits for, of the tasks queued so far."""

    def __init__(self, cupy: Any) -> None:
        self._stream = cupy.cuda.get_current_stream()
        self.known: dict[str, set[Any]] = defaultdict(set)
        self._marks: dict[str, set[Any]] = {}

    def stream(self, name: str) -> Any:
        return self._stream

    def use_current_stream(self) -> None: ...

    def follow(self, later: str, earlier: str) -> None:
        self.known[later] |= self.known[earlier]

    def mark(self, name: str, stream: str) -> None:
        self._marks[name] = set(self.known[stream])

    def await_mark(self, stream: str, name: str) -> None:
        self.known[stream] |= self._marks[name]


def test_work_between_tasks_that_follow_each_other_waits_for_those_before_the_last(
    lib: Any, ctx: Any
) -> None:
    operations, lanes = ctx.engine.operations, Lanes(ctx.engine.xp)

    def task(panel: int, number: int) -> None:
        known = lanes.known[operations._lane]
        assert panel == 0 or (panel - 1, number) in known
        assert ("arrived", panel) in known
        known.add((panel, number))

    with mock.patch.object(operations, "_session", SimpleNamespace(gpu=lanes)):
        for _ in range(2):
            for panel in range(4):
                lanes.known["main"].add(("arrived", panel))
                operations.concurrently([partial(task, panel, i) for i in range(6)], follows=panel < 3)
                before = {(i, number) for i in range(panel) for number in range(6)}
                own = {(panel, number) for number in range(6)}
                assert before <= lanes.known["main"]
                assert (own <= lanes.known["main"]) == (panel == 3)
            lanes.known.clear()


def test_a_factorization_has_its_products_from_cublas(lib: Any, ctx: Any) -> None:
    """On the stream and with the workspace of its lane, which the simulator checks; level 3 takes cuBLASLt's."""
    a = ctx.eye(replace(D, dtype="float64"))
    with mock.patch.object(ctx.engine.operations, "factor_width", 2):
        lib.gpu.events.clear()
        pb.linalg.cholesky(a)
    assert len(lib.gpu.did("cuBLAS")) >= 3
    assert not lib.gpu.lt.calls
    pb.matmul(a, a, algo="gathered")
    assert lib.gpu.lt.calls


def test_products_of_factorizations_take_every_memory_order(lib: Any, ctx: Any) -> None:
    """What cuBLAS is given, computed on the host's memory."""
    operations, xp, rng = ctx.engine.operations, ctx.engine.xp, np.random.default_rng(3)

    def gemm(_: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: int, a: int, lda: int, b: int, ldb: int,
             beta: int, d: int, ldd: int) -> None:  # fmt: skip
        left = matrix(a, *((k, m) if op_a else (m, k)), lda, "f8")
        right = matrix(b, *((n, k) if op_b else (k, n)), ldb, "f8")
        scale, keep = (vector(at, 1, "f8")[0] for at in (alpha, beta))
        out = matrix(d, m, n, ldd, "f8")
        out[...] = scale * (left.T if op_a else left) @ (right.T if op_b else right) + keep * out

    with (
        mock.patch.object(operations._products, "cublas", SimpleNamespace(dgemm=gemm)),
        mock.patch.object(operations._products, "solver", return_value=1),
        operations.factoring(),
    ):
        for orders, sizes in itertools.product(
            itertools.product("CF", repeat=3), ((5, 7, 3), (1, 7, 3), (5, 1, 3), (5, 7, 1))
        ):
            m, n, k = sizes
            wholes = (
                np.array(rng.random((rows + 2, cols + 3)), order=order)
                for order, (rows, cols) in zip(orders, ((m, k), (k, n), (m, n)), strict=True)
            )
            a, b, d = (xp.asarray(whole)[1:-1, 2:-1] for whole in wholes)
            wanted = 2 * np.asarray(a) @ np.asarray(b) - np.asarray(d)
            operations.gemm(2, a, b, -1, d)
            assert np.allclose(np.asarray(d), wanted), (orders, sizes)
    assert not lib.gpu.lt.calls


def test_large_tasks_have_streams_to_themselves(lib: Any, ctx: Any) -> None:
    operations, lanes = ctx.engine.operations, Lanes(ctx.engine.xp)
    on: dict[str, list[int]] = defaultdict(list)

    def task(number: int) -> None:
        on[operations._lane].append(number)

    with mock.patch.object(operations, "_session", SimpleNamespace(gpu=lanes)):
        work = [64, 32, 16, 16, 8, 4, 4, 2]
        operations.concurrently([partial(task, i) for i in range(len(work))], work=work)
    assert sorted(on.values()) == [[0], [1], [2, 4, 7], [3, 5, 6]]
