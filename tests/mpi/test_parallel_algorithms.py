# SPDX-License-Identifier: Apache-2.0
"""Algorithms of the tensor-parallel functions on CPU ranks: memory, bits, the choice, and what is measured."""

import contextlib
import itertools
import json
import logging
import os
import re
import zlib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.product import Product
from pblasmp.engines.protocol import Method
from pblasmp.engines.request import Options
from tests.helpers import inside
from tests.helpers.cases import refuses
from tests.helpers.mpi import on_ranks, run_on_one_node
from tests.helpers.slow import only_long
from tests.helpers.tensor_cases import Case

SHARING = (
    ("allgather_matmul", "pull"),
    ("matmul_allreduce", "two_shot"),
    ("matmul_allreduce", "ring"),
    ("matmul_reduce_scatter", "pull"),
    ("matmul_reduce_scatter", "ring"),
    ("matmul_allgather", "pull"),
)


@pytest.mark.parametrize("name", ["two_shot", "ring"])
@on_ranks(3, runner=run_on_one_node)
def test_allreduce_has_the_same_bits_on_every_rank_and_in_every_run(comm, ctx, name):
    rng = np.random.default_rng(comm.rank)
    x, w = (rng.standard_normal((300, 50)).astype(np.float32) for _ in range(2))
    bits = {zlib.crc32(pb.matmul_allreduce(x, w, ctx, algo=name).tobytes()) for _ in range(5)}
    assert len(set().union(*comm.allgather(bits))) == 1


@on_ranks(3, runner=run_on_one_node)
def test_the_workspace_is_what_the_ranks_share(comm):
    """A plan reports the memory that its ranks share."""
    for (form, name), dtype in itertools.product(SHARING, ("float32", "bfloat16")):
        with pb.Context(comm, engine="host") as ctx:
            case = Case(np.random.default_rng(3), comm, form, dtype, 64, 48, 40)
            with pb.plan(form, case.local_x, case.local_w, ctx, algo=name) as plan:
                plan()
                held, _ = inside.buffers(ctx)
                assert held == plan.workspace.host_bytes, f"{form} {name} {dtype}"


@on_ranks(2, 4, *only_long(5), 6, runner=run_on_one_node)
def test_the_choice_by_rule(comm, ctx):
    """What docs/tensor-parallel.md says that "auto" takes."""
    small, large = (512, 256), (2048, 512)  # of the sum, 4 bytes each
    for function, (tokens, outputs), how, name in (
        (pb.allgather_matmul, small, {}, "pull"),
        (pb.allgather_matmul, (3 + comm.rank, 5), {"return_gathered": True}, "pull"),
        (pb.matmul_allgather, small, {}, "pull"),
        (pb.matmul_reduce_scatter, small, {}, "pull"),
        (pb.matmul_reduce_scatter, large, {}, "pull" if comm.size > 4 else "ring"),
        (pb.matmul_allreduce, small, {}, "two_shot"),
        (pb.matmul_allreduce, large, {}, "two_shot" if comm.size > 4 else "ring"),
    ):
        x, w = (np.ones((length, 8), np.float32) for length in (tokens, outputs))
        with pb.plan(function, x, w, ctx, **how) as plan:
            assert plan.report().algorithm == name, (function.__name__, tokens, how)


@on_ranks(2, 4, runner=run_on_one_node)
def test_the_choice_between_nodes(comm):
    """Partial sums travel if they are fewer bytes for each node than weights and tokens; those of a node as one."""
    sums = "pull" if comm.size > 2 else "push"
    nodes = mock.patch.dict(os.environ, PBLASMP_RANKS_PER_NODE=str(comm.size // 2))
    with nodes, pb.Context(comm, engine="host") as ctx:
        for inner, name in ((2, "shared"), (32, sums)):
            x, w = (np.ones((length, inner), np.float32) for length in (32, 24))
            with pb.plan(pb.matmul_reduce_scatter, x, w, ctx) as plan:
                assert plan.report().algorithm == name, inner
            with pb.plan(pb.matmul_allgather, x, w, ctx) as plan:
                assert plan.report().algorithm == sums
                one_panel = plan.report().path.endswith("is multiplied: 1")
                assert one_panel == (sums == "push")


@on_ranks(1, 3)
def test_products_without_tokens(comm, tuning_file):
    """A product without tokens has an empty result, and times that are not kept."""
    x, w = np.ones((0, 3)), np.ones((2, 3))
    with pb.Context(comm, engine="host") as ctx:
        for algo in ("push", "auto", "measure"):
            assert pb.matmul_allgather(x, w, ctx, algo=algo).shape == (0, 2 * comm.size)
        found = pb.tune(pb.matmul_allgather, x, w, ctx)
        assert set(found.seconds) >= {"push"}
        assert (found.file, "an extent is 0" in found.reason) == ("", True)
        a, b = ctx.zeros((0, 4)), ctx.zeros((4, 4))
        assert pb.tune(pb.matmul, a, b).best
        c = pb.matmul(a, b, algo="measure")
        assert c.shape == (0, 4)
        assert ctx.engine.measured.entries == {}
    assert not Path(tuning_file).exists()


@on_ranks(1, 2, timeout=120)
def test_tuning_writes_no_array_and_auto_goes_by_it(comm, tuning_file):
    x, w, out = np.ones((64, 8)), np.ones((32, 8)), np.full((64, 32), 7.0)
    how = {"beta": 1, "c": out, "out": out}
    with pb.Context(comm, engine="host") as ctx:
        found = pb.tune(pb.matmul_allreduce, x, w, ctx, **how)
        assert (out == 7).all()
        assert found.best in found.seconds
        assert found.file == tuning_file
        with pb.plan(pb.matmul_allreduce, x, w, ctx, **how) as plan:
            assert plan.report().algorithm == found.best
            assert "measured on this machine" in str(plan.report())
        a, b, d = (ctx.full((40, 40), 3.0, block=8) for _ in range(3))
        assert pb.tune(pb.matmul, a, a, d, beta=2, out=d).best
        assert pb.tune("trsm", a, b, out=b, uplo="L").best
        assert (b.local == 3).all()
        assert (d.local == 3).all()
        refuses(
            ctx, pb.ArgumentError, ["limit: expected a positive number"], pb.tune, pb.matmul, a, a, limit=0
        )
        progress, words = 3 if comm.rank == 0 else None, ["progress: expected a function", "got 3"]
        refuses(ctx, pb.ArgumentTypeError, words, pb.tune, pb.matmul, a, a, progress=progress)
        failing = (lambda done, total: total / done) if comm.rank == 0 else None  # done is 0 at first
        refuses(ctx, ZeroDivisionError, ["zero"], pb.tune, pb.matmul, a, a, progress=failing)
    with pb.Context(comm, engine="host") as later:  # reads the tuning_file
        with pb.plan(pb.matmul_allreduce, x, w, later, **how) as plan:
            verdict = plan.report().algorithms[found.best]
            assert verdict.taken
            assert "measured" in verdict.why
        far = np.ones((64 * 64, 8)), np.ones((32 * 64, 8))
        with pb.plan(pb.matmul_allreduce, *far, later) as plan:
            assert "by rule" in str(plan.report())
    if comm.rank == 0:
        assert len(json.loads(Path(tuning_file).read_text())["measurements"]) == 3


@on_ranks(2, runner=run_on_one_node, timeout=120)
def test_plain_functions_go_by_what_is_measured_after_their_first_call(comm, tuning_file):
    """Plain functions keep their plans, but not when more is known."""
    x, w = np.ones((64, 8)), np.ones((32, 8))
    with pb.Context(comm, engine="host") as ctx, taken() as names:
        for _ in range(2):
            pb.matmul_allreduce(x, w, ctx)
        before = {"two_shot": 2e-6, "push": 1e-6}  # none was measured so far
        with pb.plan(pb.matmul_allreduce, x, w, ctx) as plan:
            ctx.engine.measured.add(ctx.engine.measured.entry(plan.problem, Options(), before, "today"))
        for _ in range(2):
            pb.matmul_allreduce(x, w, ctx)
    if comm.rank == 0:  # the one that logs
        assert names == ["two_shot", "two_shot", "push"]  # one plan each, and that of the block


@contextlib.contextmanager
def taken():
    """The algorithms of the plans that are made within, by the log."""
    names, log = [], logging.getLogger("pblasmp")
    handler = logging.Handler()
    handler.emit = lambda record: names.extend(re.findall(r": algorithm (\w+) \(", record.getMessage()))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield names
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


class Falls(Product):
    """An algorithm whose run fails on the last rank alone."""

    path = "falls"

    def __init__(self, rank):
        self._rank = rank

    def _queue(self, operands):
        if self._rank == 1:
            raise RuntimeError("fell")


class FallsMethod(Method):
    name = "falls"

    def serves(self, problem):
        return True

    def refusal(self, engine, problem, options, operands):
        return ""

    def cost(self, engine, problem, options):
        return 0.0

    def prepare(self, engine, problem, options, operands):
        return Falls(engine.transport.rank)


@on_ranks(2, timeout=60, launch=True)
def test_a_measured_run_that_fails_on_one_rank_is_told_to_all(comm, tuning_file):
    ctx = pb.Context(comm, engine="host")
    ctx.engine.methods = (FallsMethod(),)
    expected = (RuntimeError, "fell") if comm.rank == 1 else (pb.ClosedError, "rank 1 left tune")
    with pytest.raises(expected[0], match=expected[1]):
        pb.tune(pb.matmul_allreduce, np.ones((16, 8)), np.ones((8, 8)), ctx)
    with contextlib.suppress(pb.ClosedError):
        ctx.close()
