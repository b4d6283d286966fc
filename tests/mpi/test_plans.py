# SPDX-License-Identifier: Apache-2.0
"""Plans: what they refuse and report, what memory they take, how they end; ``test_calls.py`` runs them."""

import re
import tracemalloc
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.comm import Agreement
from pblasmp.engines.host import host_transport
from pblasmp.engines.host.host_operations import HostOperations
from tests.helpers import inside
from tests.helpers.cases import check_matrix, numbers, refuses, scattered
from tests.helpers.mpi import on_ranks, run_on_one_node


def run_again(plan):
    """Run a plan twice; return what the second run returns, and the most bytes that Python had meanwhile."""
    plan()
    tracemalloc.start()
    result = plan()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return result, peak


def _square(ctx, extent, block, dtype="float64", grid=None, **more):
    return pb.MatrixDescriptor(
        (extent, extent), (block, block), grid or pb.Grid.squarest(ctx.size), dtype=dtype, **more
    )


@on_ranks(3)
def test_plans_refuse_what_does_not_lie_as_planned(comm):
    rng = np.random.default_rng(42)
    with pb.Context(comm, engine="host") as ctx, pb.Context(comm, engine="host") as other:
        d = _square(ctx, 12, 3)
        x = numbers(rng, d.shape, "float64")
        a, b = scattered(ctx, d, x), scattered(ctx, d, x)
        coarse = scattered(ctx, _square(ctx, 12, 4), x)
        foreign = scattered(other, d, x)
        plan = pb.plan(pb.matmul, a, b)
        for words, matrices in (
            (["a: its layout is", "4x4", "3x3"], (coarse,)),
            (["b: belongs to another context"], (None, foreign)),
            (["a: expected a DistributedMatrix, got ndarray"], (x,)),
            (["c: its layout is", "no matrix"], (None, None, a)),
            (["out: shares memory with a"], (plan(),)),
        ):
            refuses(ctx, pb.ArgumentError, words, plan, *matrices)
        for words, how in (
            (["plan: expected at most 3 operands, a, b, c, got 4"], ((a, a, a, a), {})),
            (["x: expected one of the planned operands a, b, c"], ((), {"x": a})),
            (["a: is given twice"], ((a,), {"a": b})),
        ):
            refuses(ctx, TypeError, words, plan, *how[0], **how[1])
        words = ["input_buffer: only for tensor-parallel products, the plan is of matmul"]
        refuses(ctx, pb.UnsupportedError, words, plan.input_buffer)
        check_matrix(plan(b=b), x @ x, "and it still runs")
        plan.close()
        plan.close()
        refuses(ctx, pb.ClosedError, ["is closed"], plan.input_buffer)
        refuses(ctx, pb.ClosedError, ["this plan is closed"], plan)
        mine = a if comm.rank else b
        words = ["belongs to another context"]
        refuses(ctx, pb.ArgumentError, words, pb.matmul, mine, foreign)
        frozen = np.zeros(d.local_shape(comm.rank))
        frozen.flags.writeable = False
        out = ctx.from_local(frozen, d)
        refuses(ctx, pb.ArgumentError, ["read-only"], pb.matmul, a, b, out=out)
        check_matrix(pb.matmul(out, b), np.zeros(d.shape), "a read-only operand is fine")
        positive = scattered(ctx, d, x @ x.T + 999 * np.eye(12))
        shard = np.zeros((4, 3))
        for name, args, written in (
            ("matmul", (pb.matmul, a, b), ctx.zeros(d)),
            ("trsm", (pb.blas.trsm, positive, b), ctx.zeros(d)),
            ("cholesky", (pb.linalg.cholesky, positive), ctx.zeros(d)),
            ("matmul_allreduce", (pb.matmul_allreduce, np.ones((4, 2)), np.ones((3, 2)), ctx), shard),
        ):
            plan = pb.plan(*args, out=written)
            plan()
            local = written if written is shard else written.local
            local[...] = 0
            local.flags.writeable = comm.rank > 0
            refuses(ctx, pb.ArgumentError, ["out:", "read-only", "(on rank 0)"], plan)
            assert not local.any(), name
            local.flags.writeable = True
            plan()
            assert local.any(), name
            plan.close()


@on_ranks(2)
def test_a_repeated_call_by_a_kept_plan_takes_one_vote(ctx):
    """Its arguments are not agreed on again, until one of the ranks gives others or finds a fault."""
    rng = np.random.default_rng(43)
    d = _square(ctx, 12, 3)
    x, y = (numbers(rng, d.shape, "float64") for _ in range(2))
    a, b, c = (scattered(ctx, d, each) for each in (x, y, np.triu(x)))
    spread = {"algo": "gathered"}
    with_c = {"uplo": "U", "beta": 1, **spread}
    for name, expected, call in (
        ("matmul", x @ y, lambda: pb.matmul(a, b, **spread)),
        ("into", x @ y, lambda: pb.matmul(a, b, out=c, **spread)),
        ("other matrices", y @ x, lambda: pb.matmul(b, a, **spread)),
        ("a part of a copy", x @ x.T + x, lambda: pb.blas.syrk(a, scattered(ctx, d, x), **with_c)),
    ):  # fmt: skip
        for turn in range(4):
            with mock.patch.object(
                Agreement, "__enter__", autospec=True, side_effect=Agreement.__enter__
            ) as agreed:
                found = call()
            found = found.allgather()
            assert np.allclose(np.triu(found), np.triu(expected)), f"{name}, {turn}"
            once = turn < 2 or name == "a part of a copy" or not agreed.mock_calls
            assert once, f"{name}, {turn}: agreements: {agreed.mock_calls}"
    words = ["out: shares memory with a"]
    refuses(ctx, pb.ArgumentError, words, lambda: pb.matmul(a, b, out=a if ctx.rank else c, **spread))
    words = ["matmul: the ranks gave different arguments", "op_b"]
    refuses(ctx, pb.RankMismatchError, words, lambda: pb.matmul(a, b, op_b="NT"[ctx.rank], **spread))
    check_matrix(pb.matmul(a, b, **spread), x @ y, "and on")


@on_ranks(1, 3)
def test_how_plans_and_contexts_end(comm):
    closed = []
    with pb.Context(comm, engine="host") as ctx:
        d = _square(ctx, 8, 2)
        a = ctx.zeros(d)
        plans = [pb.plan(pb.matmul, a, a) for _ in range(4)]
        for i, plan in enumerate(plans):
            inside.product(plan).close = lambda i=i: closed.append(i)
        plans[2].close()
    assert closed == [2, 3, 1, 0], "plans are closed last made first, each once"
    ctx.close()
    for name, call in (
        ("zeros", lambda: ctx.zeros(d)),
        ("empty", lambda: ctx.empty(d)),
        ("scatter", lambda: ctx.scatter(np.zeros((8, 8)), d)),
        ("from_function", lambda: ctx.from_function(lambda i, j: i, d)),
        ("from_local", lambda: ctx.from_local(a.local, d)),
        ("load", lambda: ctx.load("x.npy")),
        ("gather", a.gather),
        ("allgather", a.allgather),
        ("redistribute", lambda: a.redistribute(d)),
        ("save", lambda: a.save("x.npy")),
        ("matmul", lambda: a @ a),
        ("a plan", plans[0]),
    ):
        with pytest.raises(pb.ClosedError) as caught:
            call()
        assert re.search(r"made at .*test_plans.py:\d+, is closed", str(caught.value)), name
    assert "closed" in repr(ctx), "it says so"
    with pb.Context(comm, engine="host") as ctx:
        check_matrix(ctx.zeros(d), np.zeros((8, 8)), "another one can be opened")


@on_ranks(4, runner=run_on_one_node)
def test_auto_goes_by_memory_and_says_why(comm):
    """What "auto" takes: by the memory of the node that has least, and it says why."""
    HostOperations.panel = 64
    available = [1 << 40]
    host_transport.available_bytes = lambda: available[0] if comm.rank == comm.size - 1 else 1 << 40
    with pb.Context(comm, engine="host") as ctx:
        # Buffers of the case before are not counted as available.
        inside.have_available(ctx, lambda: int(0.8 * host_transport.available_bytes()))
        d = _square(ctx, 256, 32)
        x, y = numbers(np.random.default_rng(43), (2, 256, 256), "float64")
        a, b = scattered(ctx, d, x), scattered(ctx, d, y)
        sharing = ctx.engine.transport.why_not_shared
        for case, nbytes, why_not, path, words in (
            ("enough", 1 << 30, "", "shared", []),
            ("no room", 1 << 20, "", "panels",
             ["a shared copy of the operands would need 1048576 bytes per node, only 838860 available",
              "gathered operands would need"]),
            ("no sharing", 1 << 30, "no memfd here", "gathered", ["no memfd here"]),
            ("neither", 1 << 20, "no memfd here", "panels", ["no memfd here", "gathered operands would need"]),
        ):  # fmt: skip
            available[0], ctx.engine.transport.why_not_shared = nbytes, why_not
            with pb.plan(pb.matmul, a, b) as plan:
                check_matrix(plan(), x @ y, case)
                report = plan.report()
            assert (report.path, report.asked) == (path, "auto"), case
            for word in (f"path       {path}", *words):
                assert word in str(report), case
            assert words or not report.notes, case
        words = ["algo 'shared'", "no memfd here"]
        refuses(ctx, pb.UnsupportedError, words, pb.matmul, a, b, algo="shared")
        words = [
            "algo: the host engine has 'auto', 'shared', 'gathered', 'panels', 'stationary' here, got 'summa'"
        ]
        refuses(ctx, pb.UnsupportedError, words, pb.matmul, a, b, algo="summa")
        ctx.engine.transport.why_not_shared = sharing
        check_matrix(a @ b, x @ y, "and it still runs")


@on_ranks((4, 4), (4, 2), (4, 1), runner=run_on_one_node)
def test_bytes_and_memory(comm, ctx, per_node):
    """Bytes sent and copied, workspace, and the buffers themselves: one shared copy a node, or one for each rank."""
    d = _square(ctx, 256, 32, grid=pb.Grid(2, comm.size // 2))
    x, y = numbers(np.random.default_rng(44), (2, 256, 256), "float64")
    a, b = scattered(ctx, d, x), scattered(ctx, d, y)
    nodes = -(-comm.size // per_node)
    grid = d.grid
    # A node needs the rows of A and the columns of B of its process rows and columns.
    ranks_of_nodes = [range(i, min(i + per_node, comm.size)) for i in range(0, comm.size, per_node)]
    coords = [[grid.coords(rank) for rank in ranks] for ranks in ranks_of_nodes]
    slab_a, slab_b = x.nbytes // grid.nprow, y.nbytes // grid.npcol
    of_nodes = [len({c[0] for c in node}) * slab_a + len({c[1] for c in node}) * slab_b for node in coords]
    for path, total, held in (
        ("shared", sum(of_nodes), of_nodes[comm.rank // per_node]),
        ("gathered", comm.size * (slab_a + slab_b), slab_a + slab_b),
    ):
        with pb.plan(pb.matmul, a, b, algo=path) as plan:
            result, peak = run_again(plan)
            report = plan.report()
        moved = sum(comm.allgather(report.bytes_moved))
        shared, private = inside.buffers(ctx)
        found = shared if path == "shared" else private
        sent = sum(comm.allgather(report.sent_bytes))
        check_matrix(result, x @ y, f"{path}, {nodes} nodes")
        assert moved == total, f"{path}, {nodes} nodes"
        assert report.workspace == plan.workspace, f"{path}, {nodes} nodes"
        assert plan.workspace.host_bytes == held, f"{path}, {nodes} nodes"
        assert found == held, f"{path}, {nodes} nodes"
        assert path == "gathered" or private == 0, f"{path}, {nodes} nodes"
        assert path == "gathered" or nodes > 1 or sent == 0, f"{path}, {nodes} nodes"
        assert peak < 50_000 or sent, f"{path}, {nodes} nodes"
        inside.release_buffers(ctx)
    a += 256.0 * ctx.eye(d.shape, block=d.block, grid=d.grid)
    for call in (pb.linalg.lu_factor, pb.linalg.qr, pb.linalg.inv):
        with pb.plan(call, a) as plan:
            plan()
            told = plan.workspace.host_bytes
        held = sum(inside.buffers(ctx))
        assert held <= told <= (held if nodes == 1 else 4 * held), f"{call}, {nodes} nodes"
        inside.release_buffers(ctx)


@on_ranks((4, 2))
def test_messages_take_little_memory(comm, ctx):
    """What a rank packs and unpacks at once is bounded, however much it sends to other nodes."""
    from pblasmp.comm import exchange

    exchange.MESSAGE_BYTES = 1 << 16
    d = _square(ctx, 768, 16)
    x = numbers(np.random.default_rng(45), (768, 768), "float64")
    a = scattered(ctx, d, x)
    for path in ("shared", "gathered"):
        with pb.plan(pb.matmul, a, a, algo=path) as plan:
            result, peak = run_again(plan)
        limit = (exchange.SLOTS + comm.size) * (1 << 16) * 2
        check_matrix(result, x @ x, path)
        assert peak < limit, path
