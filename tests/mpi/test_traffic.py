# SPDX-License-Identifier: Apache-2.0
"""Dry counts against what ranks report and send: every descriptor file, routine, form, move and algorithm."""

import os
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.costs import move_traffic
from pblasmp.costs.dry_engine import pivots_anywhere
from pblasmp.engines.dense.elimination import permutation
from pblasmp.engines.host.host_operations import HostOperations
from pblasmp.layout import ParallelProblem
from pblasmp.layout.routines import ROUTINES
from pblasmp.problems.files import find, load_problem_file
from tests.helpers.cases import SIZES, grids, layout, pick, short_messages
from tests.helpers.level3 import legal_flags, shapes
from tests.helpers.mpi import on_ranks, run_on_one_node
from tests.helpers.slow import draws, in_turn, only_long
from tests.helpers.tensor_cases import FORMS


class Wire:
    """Counts the messages that a context's ranks send, where they are sent."""

    def __init__(self, ctx):
        self.comm = ctx.engine.transport.comm
        self.send, self.sent = self.comm.isend, []
        self.receive, self.received = self.comm.irecv, 0
        self.comm.isend, self.comm.irecv = self.isend, self.irecv

    def isend(self, array, dest):
        self.sent.append((array.nbytes, dest))
        return self.send(array, dest)

    def irecv(self, array, source):
        self.received += array.nbytes
        return self.receive(array, source)

    def take(self):
        """The bytes and the number of the messages since the last time."""
        sent, self.sent = self.sent, []
        return sum(nbytes for nbytes, _ in sent), len(sent)


def shared_out(ctx, cases):
    """Make the comparisons that come with cases, which need no other rank: each by one rank, all at once."""
    for compare in list(cases)[ctx.rank :: ctx.size]:
        compare()


def comparison(case, ctx, wire, run, plan, problem, algorithm, per_node, **how):
    """Run a plan, and return the comparison of what it sends and its report says with the dry counts."""
    wire.take()
    run()
    report, (sent, messages) = plan.report(), wire.take()
    workspace = report.workspace.host_bytes + report.workspace.device_bytes
    each = (report.algorithm, report.sent_bytes, report.copied_bytes, workspace, messages, sent)
    everyones = ctx.comm.allgather(each)
    return partial(as_counted, case, everyones, problem, algorithm, ctx.size, per_node, how)


def as_counted(case, everyones, problem, algorithm, nranks, per_node, how):
    """Fail unless the ranks sent and reported what the dry counts say."""
    counts = problem.traffic(algorithm, nranks=nranks, ranks_per_node=per_node, **how)
    for r, real in enumerate(everyones):
        on_wire = real[-1] if counts.collectives else counts.sent_bytes[r]
        space = counts.memory_bytes[r] - held(problem, r, how.get("beta"))
        dry = (
            counts.algorithm,
            counts.sent_bytes[r],
            counts.copied_bytes[r],
            space,
            counts.messages[r],
            on_wire,
        )
        if isinstance(problem, ParallelProblem):
            dry, real = (*dry[:3], *dry[4:]), (*real[:3], *real[4:])
        assert dry == real, f"{case}: rank {r}: planned {dry}, in fact {real}"
    balanced(case, counts)


def balanced(case, counts):
    """Fail unless as much is sent as received, and links add up."""
    assert counts.sent_bytes.sum() == counts.received_bytes.sum(), case
    moved = counts.sent_bytes.sum() + counts.copied_bytes.sum()
    assert sum(counts.links.values()) == moved, f"{case}: links: {counts.links}"


def held(problem, rank, beta):
    """The bytes of a rank's parts of the matrices, without a C that is not read."""
    total = 0
    if isinstance(problem, ParallelProblem):
        return total
    for x in (getattr(problem, name) for name in ("abcd" if beta else "abd")):
        if x is not None and rank < x.grid.size:
            rows, cols = x.local_shape(rank)
            total += x.lld(rank) * (rows if x.order == "C" else cols) * x.dtype.itemsize
    return total


def in_part(number, names, keep=8):
    """Some of the names of algorithms, one at least: cases take them in turn."""
    keep = min(draws(keep, long=1), len(names))
    return names[number % keep :: keep]


def run_files(comm, **given):
    with pb.Context(comm, engine="host") as ctx, short_messages(64):
        shared_out(ctx, of_files(ctx, **given))


def of_files(ctx, names, per_node):
    wire = Wire(ctx)
    for number, name in enumerate(names):
        file = load_problem_file(name)
        p = file.problem
        parents = {x: ctx.zeros(d) for x, d in file.parents.items()}
        a, b, d = (parents[x][file.windows[x]] for x in "abd")
        c = parents["c"][file.windows["c"]] if "c" in parents else None
        how = {"alpha": file.alpha, "beta": file.beta}
        algorithms = [each for each, verdict in pb.algorithms(p, ctx, **how).items() if verdict]
        for algo in in_part(number, algorithms):
            with pb.plan(
                pb.matmul, a, b, c, out=d, op_a=p.op_a, op_b=p.op_b, scheme=p.scheme, algo=algo, **how
            ) as plan:
                yield comparison(f"{name} {algo}", ctx, wire, plan, plan, p, algo, per_node, **how)


def _names(nranks):
    """The files that need so many ranks; on six ranks also some that leave ranks idle."""
    files = {path.stem: load_problem_file(path).nranks for path in find("problems")}
    return [
        name
        for i, (name, needed) in enumerate(files.items())
        if needed == nranks or nranks == 6 > 5 * (i % 8)
    ]


@pytest.mark.parametrize("nranks", SIZES)
def test_every_descriptor_file(nranks, monkeypatch):
    per_node = 2 if nranks > 3 else nranks
    monkeypatch.setenv("PBLASMP_RANKS_PER_NODE", str(per_node))
    names = in_turn(_names(nranks), keep=2 if nranks < 4 else 4)
    run_on_one_node(run_files, nranks, names=names, per_node=per_node)


def of_routines(ctx, per_node):
    rng = np.random.default_rng(62)
    wire = Wire(ctx)
    for name, has in ROUTINES.items():
        for number, flags in enumerate(
            legal_flags(name, "complex64")[:: draws(17 if ctx.size == 1 else 29, long=5)]
        ):
            grid = pick(rng, grids(ctx.size))
            of = {
                each: layout(rng, shape, ctx.size, grid=grid, dtype="complex64")
                for each, shape in shapes(name, flags, 17, 15, 16).items()
                if each in has.operands + "d" and (each != "c" or has.shape == "added" or rng.integers(3))
            }
            p = pb.Level3Problem(name, **of, **flags)
            x = {each: ctx.zeros(d) for each, d in of.items()}
            if "a" in x and has.solves:
                x["a"] = ctx.eye(of["a"])
            how = {"beta": 1} if "c" in of else {"beta": 0} if "c" in has.operands else {}
            algorithms = [each for each, verdict in pb.algorithms(p, ctx, **how).items() if verdict]
            for algo in in_part(number, algorithms):
                args = {each: x[each] for each in has.operands if each in x}
                with pb.plan(name, **args, out=x["d"], algo=algo, **flags, **how) as plan:
                    case, beta = f"{name} {flags} {algo}", how.get("beta", 0)
                    yield comparison(case, ctx, wire, plan, plan, p, algo, per_node, beta=beta)


@on_ranks((4, 2), *only_long((6, 2), (6, 3)))
def test_slabs_that_ranks_pass_on(comm, ctx):
    """Large slabs in memory of each rank come to a node in shares: those of its own a rank does not copy."""
    wire, n, per_node = Wire(ctx), 520, int(os.environ["PBLASMP_RANKS_PER_NODE"])
    d = pb.MatrixDescriptor((n, n), (52, 40), pb.Grid(comm.size, 1))
    a, out, p = ctx.eye(d), ctx.empty(d), pb.MatmulProblem(d, d, d)
    for algo in ("gathered", "panels"):
        with pb.plan(pb.matmul, a, a, out=out, algo=algo) as plan:
            comparison(algo, ctx, wire, plan, plan, p, algo, per_node)()


def of_forms(ctx, per_node):
    wire, size = Wire(ctx), ctx.size
    for form in FORMS:
        for number, (t, n, k) in enumerate(((4 * size, 6 * size, 5 * size), (7, 1030, 9))):
            tokens = len(range(t)[pb.tensor_parallel.shard(t, size, ctx.rank)])
            outputs = len(range(n)[pb.tensor_parallel.shard(n, size, ctx.rank)])
            inputs = len(range(k)[pb.tensor_parallel.shard(k, size, ctx.rank)])
            shape = {"allgather_matmul": (tokens, k, outputs), "matmul_allgather": (t, k, outputs)}
            rows, depth, cols = shape.get(form, (t, inputs, n))
            x, w = np.zeros((rows, depth)), np.zeros((cols, depth))
            with pb.plan(form, x, w, ctx) as plan:
                p = plan.problem
            algorithms = [each for each, verdict in pb.algorithms(p, ctx).items() if verdict]
            for algo in in_part(number, algorithms, 10):
                with pb.plan(form, x, w, ctx, algo=algo) as plan:
                    case, run = f"{form} {t} x {n} x {k} {algo}", partial(plan, x)
                    yield comparison(case, ctx, wire, run, plan, p, algo, per_node)


@on_ranks(6)
def test_moves(comm):
    rng = np.random.default_rng(7)
    with pb.Context(comm, engine="host") as ctx, short_messages(64):
        wire = Wire(ctx)
        for turn in range(draws(10, long=40)):
            shape = tuple(int(x) for x in rng.integers(1, 60, 2))
            source, target = (
                replace(layout(rng, shape, ctx.size), dtype=np.float16)  # others are copied by direct calls
                for _ in range(2)
            )
            a = ctx.zeros(source)
            wire.take()
            a.redistribute(target)
            sent = wire.take()
            counts = move_traffic(source, target)
            here = [(0, 0)] * ctx.size
            here[: counts.nranks] = zip(
                counts.sent_bytes.tolist(), counts.messages.tolist(), strict=True
            )  # fmt: skip
            assert comm.allgather(sent) == here, f"{turn}: {source} to {target}"


@on_ranks((1, 1), (4, 2), *only_long((6, 2)), runner=run_on_one_node)
def test_routines_and_forms(ctx, per_node):
    with short_messages(64):
        shared_out(ctx, of_routines(ctx, per_node))
        shared_out(ctx, of_forms(ctx, per_node))


# -- factorizations


def permuted(ctx, d):
    """The permutation matrix of which LU has the pivots of the dry counts."""
    n = d.shape[0]
    rows = permutation(pivots_anywhere(0, n, n) - 1, n)
    return ctx.from_function(lambda i, j: 1.0 * (i == rows[j]), d)


def of_factorizations(ctx, per_node):
    rng = np.random.default_rng(64)
    wire, workers = Wire(ctx), ctx.engine.operations.workers

    def of_factors(p, real):
        counts = p.traffic(nranks=ctx.size, ranks_per_node=per_node, cores=workers)
        dry = list(zip(counts.sent_bytes.tolist(), counts.messages.tolist(), strict=True))
        assert dry == real, f"{p}: planned {dry}, in fact {real}"
        balanced(f"{p}", counts)

    kinds = (("float64", "C"), ("complex64", "F"))
    for dtype, order in in_turn(kinds, keep=2, first=ctx.size + (per_node == ctx.size)):
        square, tall, thin, wide = (
            layout(rng, shape, ctx.size, dtype=dtype, order=order)
            for shape in ((29, 29), (29, 5), (29, 19), (19, 5))
        )
        a, b, x = ctx.eye(square), ctx.full(tall, 1), ctx.zeros(wide)
        thin = ctx.from_function(lambda i, j: 1.0 * (i == j), thin)
        p = permuted(ctx, square)
        factors, pivots = pb.linalg.lu_factor(p)
        la, plan = pb.linalg, pb.plan
        for planned in (
            plan(la.cholesky, a), plan(la.cholesky, a, lower=False), plan(la.cho_solve, (a, True), b),
            plan(la.lu_factor, p), plan(la.lu_solve, (factors, pivots), b, "T"), plan(la.solve, p, b),
            plan(la.qr, thin), plan(la.lstsq, thin, b, out=x), plan(la.solve_triangular, a, b, lower=True),
        ):  # fmt: skip
            wire.take()
            planned()
            yield partial(of_factors, planned.problem, ctx.comm.allgather(wire.take()))


NODES = [*((size, size) for size in SIZES), *((size, max(1, size // 2)) for size in SIZES)]


@on_ranks(*in_turn(NODES, keep=2), runner=run_on_one_node)
def test_factorizations(ctx, per_node):
    """Within a node all copies go to and from the panels that its ranks share; between nodes panels are sent."""
    limits = {"factor_width": 8, "factor_alone": 4, "factor_wait": 0}
    with short_messages(64), mock.patch.multiple(HostOperations, **limits):
        shared_out(ctx, of_factorizations(ctx, per_node))


# n^2 elements over the square root of the number of ranks; LU also exchanges rows, QR adds up products, and a solve
# with n right-hand sides needs the factors again, along process rows, and the unknowns twice
VOLUMES = {
    "cholesky": lambda n, p: n**2 / p**0.5,
    "lu": lambda n, p: n**2 / p**0.5 + 2 * n**2 / p,
    "qr": lambda n, p: 1.5 * n**2 / p**0.5,
    "solve": lambda n, p: VOLUMES["lu"](n, p) + 3 * n**2 / p**0.5 + 2 * n**2 / p,
}


@on_ranks((2, 1), (4, 1), (6, 1), runner=run_on_one_node)
def test_bytes_received_in_two_dimensions(comm, ctx):
    """The bytes that each rank receives in factorizations of square blocks where they are."""
    nprow, n, block = {2: 1, 4: 2, 6: 2}[comm.size], 384, 32
    with mock.patch.object(HostOperations, "factor_wait", 0):
        d = pb.MatrixDescriptor((n, n), (block, block), pb.Grid(nprow, comm.size // nprow), order="F")
        wire, la = Wire(ctx), pb.linalg
        a = permuted(ctx, d)
        calls = [
            ("cholesky", la.cholesky, ctx.eye(d)),
            ("lu", la.lu_factor, a),
            ("lu", la.lu_factor, permuted(ctx, replace(d, order="C"))),
            ("qr", la.qr, a),
            ("solve", la.solve, a, a),
        ]
        upper = partial(pb.plan, la.cholesky, ctx.eye(d), lower=False)
        plans = [("cholesky", upper), *((routine, partial(pb.plan, *call)) for routine, *call in calls)]
        for routine, make in plans:
            with make() as plan:
                wire.received = 0
                plan()
                got = ctx.comm.allgather(wire.received)
            dry = plan.problem.traffic(ranks_per_node=1).received_bytes.tolist()
            assert got == dry, routine
            most = max(got) / (8 * VOLUMES[routine](n, comm.size))
            assert most < 1, f"{routine}: {most:.2f} times the volume in two dimensions"
