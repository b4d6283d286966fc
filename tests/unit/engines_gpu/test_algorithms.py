# SPDX-License-Identifier: Apache-2.0
"""The library's own algorithms on GPUs that are played: right numbers, by messages, never through the host."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.comm.votes import late_vote
from pblasmp.engines.gpu.tensor.base import CopyProduct
from pblasmp.engines.product import Product
from pblasmp.layout.level3_problem import ROUTINES
from pblasmp.problems import files
from pblasmp.runtime import plans
from tests.helpers.calls import DTYPES, WRITERS, check_call, check_level_1, legal_options
from tests.helpers.cases import check_array
from tests.helpers.fakelt import FakeLt
from tests.helpers.gpu.algorithms import (
    EPILOGUES,
    KEPT,
    NOT_KEPT,
    PARALLEL,
    PRODUCTS,
    check_parallel,
    check_repeated_calls,
    check_scheme,
    every_epilogue,
    every_float8,
    small_panels,
)
from tests.helpers.gpu.calls import algorithms, check_random_call
from tests.helpers.gpu.moves import check_move
from tests.helpers.gpu.multiply import check_product
from tests.helpers.inside import RUNS, votes
from tests.helpers.machine import Multiplying, Witness, context, machine
from tests.helpers.mpi import on_ranks, run_mpi
from tests.helpers.slow import draws, in_turn, only_long
from tests.helpers.tensor_cases import Case

RANKS = [1, *only_long(2), 4]
KEEP = {1: 7, 2: 7, 4: 9}  # of how many combinations one is tried


@contextmanager
def played(
    path: str, comm: Any, *, queued: bool = True, width: int = 7
) -> Iterator[tuple[pb.Context, Multiplying]]:
    """A context on a machine of these ranks; clean at the end. Nothing that is ``queued`` goes through the host.

    Panels of k have ``width`` indices.
    """
    with machine(path, Multiplying, comm=comm) as lib, pytest.MonkeyPatch.context() as patch:
        if queued:
            for name in RUNS:
                patch.setattr(plans.Plan, name, on_the_gpu(lib, getattr(plans.Plan, name)))
        with pb.Context(comm, engine="cublasmp") as ctx, small_panels(ctx, width):
            yield ctx, lib
        lib.assert_clean()
        lib.gpu.assert_clean()


def on_the_gpu(lib: Witness, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run``, with a fault where it copies anything to the host."""

    def watched(*args: Any, **how: Any) -> Any:
        before = lib.gpu.copies.count("asnumpy")
        result = run(*args, **how)
        if lib.gpu.copies.count("asnumpy") != before:
            lib.gpu.faults.append("a run copied to the host")
        return result

    return watched


@on_ranks(*RANKS, count=draws(1, long=8))
def test_calls(comm: Any, path: str, count: int) -> None:
    with played(path, comm, width=16) as (ctx, _):
        for routine in ("matmul", *ROUTINES):
            for algo in algorithms(routine):
                for seed in range(count * (1 + (routine == "matmul"))):
                    check_random_call(ctx, routine, algo, seed)


@on_ranks(*RANKS, count=draws(1, long=8))
def test_schemes(comm: Any, path: str, count: int) -> None:
    with played(path, comm, width=16) as (ctx, _):
        for scheme, names in PRODUCTS.items():
            for algo in names if scheme != "gemm" else ():
                for seed in range(count):
                    check_scheme(ctx, scheme, algo, seed)


def what_follows(comm: Any, path: str, dtypes: list[str], keep: int) -> Any:
    rng = np.random.default_rng(81)
    with played(path, comm) as (ctx, _):
        for algo in EPILOGUES:
            for dtype in dtypes:
                for check in every_epilogue(ctx, algo, dtype, rng, keep=keep):
                    check()


def eight_bits(comm: Any, path: str, keep: int) -> Any:
    rng = np.random.default_rng(82)
    with played(path, comm, queued=False, width=40) as (ctx, _):  # scales that are arrays are read
        for algo in EPILOGUES:
            for check in every_float8(ctx, algo, rng, keep=keep):
                check()


@on_ranks(*RANKS, count=draws(2, long=8))
def test_tensor_parallel(comm: Any, path: str, count: int) -> None:
    with played(path, comm) as (ctx, _):
        for form, names in PARALLEL.items():
            for algo in names:
                for seed in range(count):
                    check_parallel(ctx, form, algo, seed)


@on_ranks(4)
def test_problem_files(comm: Any, path: str) -> None:
    """Whole products by a cuBLASMp that multiplies what it is told to, by pointers, descriptors and attributes alone.

    Grids in both orders and of fewer ranks, sources, ragged and empty parts, sub-matrices, the schemes.
    """
    with context(path, Multiplying, comm=comm) as (ctx, lib):
        for number, where in enumerate(files.find("problems")):
            file = files.load_problem_file(where)
            algo = ("auto", "default")[number % 2]
            if file.nranks <= comm.size and not file.problem.faults():
                within = {x: (parent, file.windows[x]) for x, parent in file.parents.items()}
                check_product(ctx, lib, file.problem, file.alpha, file.beta, within, algo)


@on_ranks(4)
def test_vectors(comm: Any, path: str) -> None:
    """Levels 1 and 2: every option, numbers on the host, and a gemv that leaves A where it is."""
    rng = np.random.default_rng(71)
    with context(path, Multiplying, comm=comm) as (ctx, _):
        for routine in WRITERS:
            for options in legal_options(routine):
                dtype = DTYPES[int(rng.integers(4))]
                check_call(ctx, rng, routine, options, dtype)
        for dtype in DTYPES:
            check_level_1(ctx, rng, dtype, 9)
        leaves_a_in_place(ctx)


def leaves_a_in_place(ctx: Any) -> None:
    """A product with one vector, and with no more, leaves A in place."""
    d = pb.MatrixDescriptor((64, 64), (8, 8), pb.Grid.squarest(ctx.size))
    a = ctx.zeros(d)
    seen = []
    for columns in (1, 2):
        b = ctx.zeros(pb.MatrixDescriptor((64, columns), (8, 1), d.grid))
        with pb.plan(pb.matmul, a, b) as plan:
            seen.append(plan.report().algorithm == "stationary")
    assert seen == [True, False]


@pytest.mark.parametrize("reach", [False, True])
@on_ranks(*RANKS, count=draws(24, long=60))
def test_moves_by_messages(comm: Any, path: str, count: int, reach: bool) -> None:
    with played(path, comm) as (ctx, _), pytest.MonkeyPatch.context() as patch:
        if reach:  # they say so; all that is played is messages
            patch.setattr(ctx.engine.session.gpu, "why_no_windows", "")
        ways = set()
        for seed in range(count):
            ways.add(check_move(ctx, seed).removesuffix(", converting 8-bit floats"))
        expected = {"by copy engines" if reach else "by NCCL"} if ctx.size > 1 else set()
        assert ways == expected | {"by a local copy"}, "ways"


@pytest.mark.parametrize(("ranks", "dtypes"), [(1, ["float64"]), (2, ["bfloat16"]), (4, ["float32"])])
def test_epilogues(stand_in, ranks, dtypes):
    run_mpi(what_follows, ranks, path=stand_in(1000), dtypes=dtypes, keep=draws(KEEP[ranks], long=1))


@pytest.mark.parametrize("ranks", RANKS)
def test_float8(stand_in, ranks):
    run_mpi(eight_bits, ranks, path=stand_in(1000), keep=draws(KEEP[ranks], long=1))


@on_ranks(*only_long(1), 2)
def test_arrays_are_let_go(comm: Any, path: str) -> None:
    """A plan that is closed, and what a plain call was given, keep no array; nor does a product that is prepared."""
    d = pb.MatrixDescriptor((12, 12), (3, 2), pb.Grid.squarest(comm.size), dtype="float32")
    every = [("matmul", "ab", algo) for algo in ("default", *algorithms("matmul"))]
    every += [
        (name, "a" if name in ("syrk", "herk") else "ac" if name in ("geadd", "tradd") else "ab", algo)
        for name in ROUTINES
        for algo in algorithms(name)
    ]
    with played(path, comm) as (ctx, _):
        for name, operands, algo in in_turn(every, keep=2):
            given = {x: ctx.eye(d) for x in operands}
            for _ in range(3):  # the last one by a plan that is kept
                function = pb.matmul if name == "matmul" else getattr(pb.blas, name)
                result = function(**given, algo=algo)
            gone = [weakref.ref(x.local) for x in (*given.values(), result)]
            with pb.plan(name, **given, algo=algo) as plan:
                gone.append(weakref.ref(plan().local))
            del given, result, plan
            gc.collect()
            held = [ref() is not None for ref in gone]
            assert not any(held), f"{name} {algo}"


@on_ranks(*only_long(1), 2, *only_long(4))
def test_repeated_calls(comm: Any, path: str) -> None:
    """Plans of plain calls are kept, but for those that hold memory."""
    with played(path, comm) as (ctx, _):
        for name, how in KEPT + NOT_KEPT:
            check_repeated_calls(ctx, name, how)


def python_calls(function: Callable[[], Any]) -> tuple[Any, int, int]:
    """The result, and how many calls of the package's Python there were: up to a run, and to queue it; none to wait."""
    counts, queueing, waiting = [0, 0], 0, 0
    runs, waits = (Product.run.__code__, CopyProduct.run.__code__), late_vote.__code__

    def seen(frame: Any, event: str, _: Any) -> None:
        nonlocal queueing, waiting
        code, step = frame.f_code, (event == "call") - (event == "return")
        queueing += (code in runs) * step
        waiting += (code is waits) * step
        if event == "call" and not waiting and "/pblasmp/" in code.co_filename:
            counts[queueing > 0] += 1

    sys.setprofile(seen)
    try:
        return function(), *counts
    finally:
        sys.setprofile(None)


@on_ranks(2)
def test_new_sub_matrices(comm: Any, path: str) -> None:
    """A direct call on a new sub-matrix, dealt out as others were, takes few calls of Python."""
    with context(path, Multiplying, comm=comm, lt=FakeLt()) as (ctx, _):
        a, b, c = (ctx.zeros((96, 96), block=4, grid=(1, 2), order="F") for _ in range(3))

        def product(i: int, j: int, k: int) -> None:
            to = c[i : i + 16, j : j + 16]
            pb.matmul(a[i : i + 16, k : k + 4], b[k : k + 4, j : j + 16], to, alpha=-1, beta=1, out=to)

        def update(i: int, _: int, k: int) -> None:
            to = c[i : i + 16, i : i + 16]
            pb.blas.syrk(a[i : i + 16, k : k + 4], to, uplo="L", alpha=-1, beta=1, out=to)

        for call, most in ((product, 90), (update, 76)):
            for at in (0, 8):  # a template, then calls of its pattern
                call(at, at, at + 8)
            _, calls, _ = python_calls(partial(call, 16, 24, 32))
            assert calls <= most, call.__name__


@on_ranks(2, on_nodes="blocks:2")
def test_a_repeated_product_between_hosts(comm: Any, path: str) -> None:
    """It takes one vote, and few calls of Python before it is queued; or in all, if it is a direct call."""
    devices = [f"0000:0{comm.rank}:00.0"]
    with context(path, Multiplying, comm=comm, lt=FakeLt(), devices=devices) as (ctx, lib):
        for dtype, algo, most in (
            ("float32", "gathered", 120),
            ("float32", "auto", 60),
            ("bfloat16", "auto", 60),
        ):
            a, b, c = (ctx.zeros((64, 64), block=16, grid=(1, 2), dtype=dtype) for _ in range(3))
            call = partial(pb.matmul, a, b, out=c, algo=algo)
            for _ in range(3):
                call()
            before, messages = votes(ctx), len(lib.gpu.did("send"))
            _, calls, _ = python_calls(call)
            found = votes(ctx) - before, calls <= most, len(lib.gpu.did("send")) - messages
            assert found == (1, True, int(algo == "auto")), f"{dtype} {algo}: {found}, {calls} calls"
        here = sys.modules["cupy"].cuda.get_current_stream().ptr
        assert {stream for stream, _ in lib.gpu.did("all_gather")} == {here}, "nothing is computed meanwhile"
        x, w = (ctx.engine.xp.zeros((32, 32)) for _ in range(2))
        planned = (pb.matmul, a, b), *((getattr(pb, form), x, w, ctx) for form in PARALLEL)
        for function, *operands in planned:
            with pb.plan(function, *operands) as plan:
                for _ in range(3):
                    plan()
                before = len(lib.gpu.events)
                _, *calls = python_calls(plan)
                done = [event[0] for event in lib.gpu.events[before:]]
                assert sum(calls) <= 45, f"{function.__name__}: {calls}"
                assert done.count("graph launched") == 2, f"{function.__name__}: {done}"
                assert not {"cuBLAS", "cuBLASLt", "kernel"} & {*done}, f"{function.__name__}: {done}"


_MOST_CALLS, _MOST_OF_QUEUES = 118, 106


@on_ranks(2)
def test_other_tokens(comm: Any, path: str) -> None:
    """Another number of tokens takes one vote on GPUs, no agreement of the engine, and few calls if there is memory."""
    rng = np.random.default_rng(83)
    for algos, queues in ((("push", "nccl"), False), (("auto",), True)):  # those with windows only queue here
        how = {"lt": FakeLt()} if queues else {}
        with context(path, Multiplying, comm=comm, **how) as (ctx, lib):
            for (i, form), algo in itertools.product(enumerate(PARALLEL), algos):
                for turn, some in enumerate((8, 6, 3, 9, 7, 7)):
                    tokens = (some + 20 * i**2) * comm.size  # more than the form before
                    case = Case(rng, comm, form, "float32", tokens, 4 * comm.size, 3 * comm.size)
                    x, w = map(ctx.engine.xp.asarray, (case.local_x, case.local_w))
                    before = votes(ctx)
                    call = partial(getattr(pb, form), x, w, ctx, algo=algo)
                    result, calls, of_queue = python_calls(call)
                    y = np.asarray(result)
                    what = f"{form} {algo}, {tokens} tokens"
                    if not queues:
                        check_array(y, case.expected(), what)
                    count = votes(ctx) - before
                    assert (count > 1) == (turn == 0 or (queues and some == 9)), f"{what}: {count} votes"
                    assert turn != 2 or calls <= _MOST_CALLS, f"{what}: {calls} calls"
                    assert turn != 2 or not queues or of_queue <= _MOST_OF_QUEUES, f"{what}: {of_queue} calls"
            if (
                queues
            ):  # products that come once do not look for an algorithm of their own, and have fewer pieces
                x, w, found = ctx.engine.xp.zeros((200, 2)), ctx.engine.xp.zeros((2, 2)), []
                for tokens in (200, 199, 198, 197, 198, 198):
                    before = how["lt"].searches
                    pb.allgather_matmul(x[:tokens], w, ctx, algo="push")
                    found.append(how["lt"].searches - before)
                assert found == [1, 1, 0, 0, 1, 0], "searches for algorithms"
                tall, found = ctx.engine.xp.zeros((6 * 128 * ctx.engine.session.gpu.multiprocessors, 2)), []
                for less in (0, 1, 2, 2, 2):
                    before = len(how["lt"].calls)
                    pb.matmul_allgather(tall[less:], w, ctx, algo="push")
                    found.append(len(how["lt"].calls) - before)
                assert found == [4, 2, 2, 4, 4], "pieces"
            ctx.engine.synchronize()
        lib.assert_clean()


@on_ranks(2)
def test_out_of_order(comm: Any, path: str) -> None:
    """The GPUs that are played see a stream that does not wait for what it sends, or that nothing waits for."""
    for name, message in (("start", "do not wait for what they send"), ("finish", "waits for messages")):
        with machine(path, Multiplying, comm=comm) as lib, pytest.MonkeyPatch.context() as patch:
            with pb.Context(comm, engine="cublasmp") as ctx:
                stream = type(sys.modules["cupy"].cuda.get_current_stream())
                mine = sys.modules["cupy"].cuda.get_current_stream().ptr
                wait = stream.wait_event

                def deaf(self: Any, event: Any, name: str = name, mine: int = mine, wait: Any = wait) -> None:
                    if (self.ptr != mine) != (name == "start"):
                        wait(self, event)

                patch.setattr(stream, "wait_event", deaf)
                here, there = (ctx.engine.xp.zeros(40) for _ in range(2))
                peer = 1 - comm.rank
                ctx.engine.transport.start([(here, peer)], [(there, peer)]).finish()
            with pytest.raises(AssertionError, match=message):
                lib.gpu.assert_clean()
