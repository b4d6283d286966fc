# SPDX-License-Identifier: Apache-2.0
"""Several nodes, made of this machine: every kind of call, with the ranks of a node side by side and interleaved."""

import contextlib
import errno
import functools
import gc
import itertools
import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import _core
from pblasmp.cli.reports import Reporter
from pblasmp.cli.seats import Seat, faults_of_seats, lines_of_seats, seats_of_ranks
from pblasmp.comm import gather_on, open_boards, vote_on, wrap
from pblasmp.comm.mpi_communicator import MpiCommunicator
from tests.helpers import inside
from tests.helpers.cases import check_array, check_matrix, grids, layout, numbers, pick, scattered
from tests.helpers.limits import changed_limits
from tests.helpers.mpi import on_ranks, run_mpi, run_torch, starts_ranks
from tests.helpers.pairs import pairs
from tests.helpers.slow import draws, only_long
from tests.helpers.tensor_cases import FORMS, Case, other_split, shard, sizes

pytestmark = starts_ranks


def seen(ctx, comm):
    """The nodes that pblasmp sees, and how many ranks MPI sends messages to through shared memory."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    size = node.size
    node.Free()
    return [list(ranks) for ranks in ctx.engine.transport.nodes], size


@on_ranks(
    (4, "interleaved:2"), (3, "blocks:2"), *only_long((4, "blocks:2"), (6, "interleaved:3"), (6, "blocks:4"))
)
def test_every_kind_of_call(comm, ctx, nodes, directory):
    """What the random calls between nodes, in test_calls.py, have not."""
    rng = np.random.default_rng(68)
    found, together = seen(ctx, comm)
    mine = next(ranks for ranks in nodes if comm.rank in ranks)
    assert (found, together) == (nodes, len(mine)), f"nodes: {found}, MPI: {together}"

    whole = numbers(rng, (37, 29), np.dtype("float64"))
    a = scattered(ctx, layout(rng, whole.shape, comm.size), whole)
    for grid in grids(comm.size):
        b = a.redistribute(grid=grid, block=(3, 5), order="F")
        check_matrix(b, whole, f"move to {grid}")
    check_array(a.allgather(), whole, "allgather")
    a.save(f"{directory}/a.npy")
    check_matrix(ctx.load(f"{directory}/a.npy", block=(4, 4)), whole, "file")
    for algo in ("gathered", "shared", "panels", "stationary"):
        check_matrix(pb.matmul(a, a, op_b="T", algo=algo), whole @ whole.T, algo)

    for form in FORMS:
        case = Case(rng, comm, form, "float32", 13, 9, 11)
        check_array(case(ctx), case.expected(), form)


@contextlib.contextmanager
def counted(ctx, found):
    """Write into ``found`` how the ranks exchange something: by functions, and by meetings and sums of the core."""
    names = {
        ctx.control: ("imax", "allgather", "bcast", "barrier", "isend"),
        ctx.comm: ("imax", "allgather", "bcast", "barrier", "isend"),
    }
    post = inside.of_the_core(ctx)
    post.meetings = post.exchanges = 0
    with contextlib.ExitStack() as stack:
        for of, each in names.items():
            for name in each:
                function = functools.partial(lambda name, do, *given: found.append(name) or do(*given), name)
                do = getattr(of, name)
                stack.enter_context(mock.patch.object(of, name, functools.partial(function, do)))
        yield
    found += ["meeting"] * post.meetings + ["sums"] * post.exchanges


@pytest.mark.skipif(_core.load() is None, reason="there is no core")
@on_ranks((3, "blocks:2"), *only_long((2, "blocks:2"), (4, "blocks:2"), (4, "interleaved:3")))
def test_direct_calls_take_one_exchange_each_way(comm, ctx):
    """Small calls take one exchange between nodes, those that sum up parts of several ranks one more, back."""
    rng = np.random.default_rng(3)
    once, twice = ["meeting"], ["meeting", "sums"]
    n, r = 24, slice(3, 20)
    for a_grid, b_grid in itertools.product((grids(comm.size)[0], *grids(comm.size)[-2:]), repeat=2):
        x, y, z = (rng.integers(-4, 5, (n, n)).astype(float) for _ in range(3))
        lower = np.tril(x)
        a, b, c, t = (
            ctx.scatter(values, pb.MatrixDescriptor(values.shape, (4, 4), grid))
            for values, grid in ((x, a_grid), (y, b_grid), (z, a_grid), (lower, b_grid))
        )
        sides, factor = np.tril(z[r, r]) + np.tril(z[r, r], -1).T, np.tril(x[r, r], -1) + 4 * np.eye(17)
        d = pb.MatrixDescriptor(factor.shape, (4, 4), a_grid)
        p, f, right = (ctx.scatter(each, d) for each in (factor @ factor.T, factor, factor @ z[r, r]))
        for name, exchanges, expected, call, *given in (
            ("matmul", [once], x[r, r] @ y[r, r], pb.matmul, a[r, r], b[r, r]),
            ("geadd", [once], x[r, r] + z[r, r], pb.blas.geadd, a[r, r], c[r, r]),
            ("dot", [once], x[r, 0] @ z[r, 0], pb.blas.dot, a[r, :1], c[r, :1]),
            ("symm", [once], sides @ y[r, r], pb.blas.symm, c[r, r], b[r, r]),
            ("ger", [once], np.outer(x[r, 0], y[r, 2]), pb.blas.ger, a[r, :1], b[r, 2:3]),
            ("cholesky", [twice], factor, pb.linalg.cholesky, p),
            ("trsm", [once, twice], z[r, r], pb.blas.trsm, f, right),
            ("trmm", [once], lower[r, r] @ x[r, r], pb.blas.trmm, t[r, r], a[r, r]),
            ("gemv", [once, twice], y[r, r] @ x[r, 1:2], pb.blas.gemv, b[r, r], a[r, 1:2]),
        ):
            ways = []
            with counted(ctx, ways):
                found = call(*given)
            found = found.allgather() if hasattr(found, "allgather") else found
            check_array(np.asarray(found), np.asarray(expected), f"{name} on {a_grid}, {b_grid}")
            assert ways in exchanges, f"{name} on {a_grid}, {b_grid}"


@pytest.mark.skipif(_core.load() is None, reason="there is no core")
@on_ranks((4, "blocks:4"), (4, "interleaved:2"), *only_long((3, "blocks:2"), (6, "blocks:3")))
def test_products_of_parts(comm, ctx):
    """Of operands whose k is dealt out alike each rank multiplies what each process has, where it has come."""
    rng = np.random.default_rng(66)
    with changed_limits(dealt=1, tiny=0):
        post = inside.of_the_core(ctx)
        cases = pairs("NTC", "NTC", "FC", "FC", "dz", (0, 1), (0, -1), range(draws(5, long=10)))
        for number, (op_a, op_b, order, other, letter, source, beta, _) in enumerate(cases):
            dtype, (m, n, k) = np.dtype({"d": "f8", "z": "c16"}[letter]), rng.integers(9, 40, 3)
            grid, of_d = pick(rng, grids(comm.size)[1:]), pick(rng, grids(comm.size)[1:])
            values = [numbers(rng, shape, dtype) for shape in ((m, k), (k, n), (m, n))]
            turn = {"N": lambda x: x, "T": np.transpose, "C": lambda x: x.conj().T}
            last = grid.nprow - 1, grid.npcol - 1
            a, b, c = (
                ctx.scatter(x, pb.MatrixDescriptor(x.shape, block, to, at, dtype, lies))
                for x, block, to, at, lies in (
                    (turn[op_a](values[0]), (3, 3), grid, last if source else (0, 0), order),
                    (turn[op_b](values[1]), (3, 3), grid, (0, 0), other),
                    (values[2], (4 - number % 2, 3), of_d, (0, 0), order),
                )
            )
            post.meetings = 0
            pb.matmul(a, b, c, alpha=2, beta=beta, op_a=op_a, op_b=op_b, out=c)
            case = f"{op_a}{op_b} {order}{other} {dtype} {(m, n, k)} on {grid} to {of_d}"
            check_array(c.allgather(), 2 * values[0] @ values[1] + beta * values[2], case)
            assert post.meetings == 2, case  # this call's, and of allgather


def direct_calls_without_mpi(group, ranks_per_node):
    """The same of a process group of PyTorch: messages go over sockets of the core's own."""
    with mock.patch.dict("os.environ", PBLASMP_RANKS_PER_NODE=str(ranks_per_node)):
        comm = wrap(group)
        test_direct_calls_take_one_exchange_each_way.on_rank(comm)
        with mock.patch("pblasmp.comm.process_group.connect", return_value=None), pb.Context(comm) as ctx:
            values = np.arange(36.0).reshape(6, 6)
            a = ctx.scatter(values, block=2)
            check_matrix(a @ a, values @ values, "product by gloo")
            assert ctx.control.board is None, "no sockets: they are connected"
        comm.free()


@pytest.mark.skipif(_core.load() is None, reason="there is no core")
@on_ranks((3, "blocks:2"), *only_long((4, "interleaved:2")))
def test_every_engine_votes_in_one_exchange(comm):
    """Also an engine that shares no memory, as that of GPUs, votes in one exchange."""
    control = wrap(comm)
    ranks = control.split([range(comm.size)])
    open_boards(ranks, control)
    board = control.board
    assert ranks.node is ranks.board is None
    assert board is not None
    numbers = [vote_on(control, "a call", 7), vote_on(control, "a call", 8 + comm.rank)]
    assert numbers == [True, False], "votes"
    told = gather_on(control, "a call", 9, [comm.rank])
    assert told == [(rank,) for rank in range(comm.size)], "what ranks tell"
    ranks.free()
    control.free()


@pytest.mark.skipif(_core.load() is None, reason="there is no core")
@on_ranks((4, "blocks:2"), *only_long((3, "blocks:3"), (4, "interleaved:2"), (6, "blocks:3")))
def test_a_solve_for_one_column_moves_no_matrix(comm, ctx):
    """A solve for one column leaves the matrix where it is: of each block its solution travels, and sums for it."""
    rng, n, block = np.random.default_rng(12), 41, 4
    blocks = -(-n // block)
    whole, x = rng.standard_normal((n, n)) / n + np.eye(n), rng.standard_normal((n, 1))
    with changed_limits(handoff=1, tiny=0):
        post = inside.of_the_core(ctx)
        for grid, (uplo, op, diag) in itertools.product(grids(comm.size), pairs("LU", "NT", "UN")):
            a = ctx.scatter(whole, pb.MatrixDescriptor((n, n), (block, block), grid, order="CF"[uplo == "L"]))
            b = ctx.scatter(x, pb.MatrixDescriptor((n, 1), (block, 1), grid))
            triangle = np.tril(whole) if uplo == "L" else np.triu(whole)
            if diag == "U":
                np.fill_diagonal(triangle, 1)
            post.exchanges = 0
            pb.blas.trsv(a, b, uplo=uplo, op_a=op, diag=diag, out=b)
            turns = post.exchanges
            error = abs(b.allgather() - np.linalg.solve(triangle if op == "N" else triangle.T, x)).max()
            case = f"{grid}, {uplo} {op} {diag}"
            assert error < 1e-12, case
            alone = grid.size == 1  # then it has all, and the right-hand side
            assert alone or turns == 2 * blocks - 1, case


def needed(of, ranks, reads):
    """How many elements of a matrix are read by ranks of a node that does not have them."""
    d, read = of.descriptor, np.zeros(of.shape, bool)
    for rank in ranks:
        read[np.ix_(*reads(rank))] = True
    for rank in ranks:
        if rank < d.grid.size:
            read[np.ix_(*d.global_indices(rank))] = False
    return int(read.sum())


def dealt(d, nodes, width, workers):
    """How many elements cross in a Cholesky factorization whose rows are dealt out to all nodes.

    First a node gets the rows that it solves for; then those that others have solved, and blocks of the diagonal.
    """
    n, ranks = d.shape[0], len(nodes) * workers
    starts = [0, *range(n % width or width, n + 1, width)]
    blocks = [slice(*each) for each in itertools.pairwise(starts)]
    crossing = (len(nodes) - 1) * sum((each.stop - each.start) * each.stop for each in blocks[1:])
    for node, together in enumerate(nodes):
        read = np.zeros((n, n), bool)
        for turn, rows in enumerate(reversed(blocks)):  # from the last rows on, to and fro
            turn %= 2 * ranks
            if rows.start == 0 or min(turn, 2 * ranks - 1 - turn) % len(nodes) == node:
                read[rows, : rows.stop] = True
        for rank in together:
            if rank < d.grid.size:
                read[np.ix_(*d.global_indices(rank))] = False
        crossing += int(read.sum())
    return crossing


def in_own_memory(ctx, sent_by_mpi, nodes, *grids):
    """The same holds for large matrices when each rank has its own slabs: ranks pass on what they receive."""
    n = 520
    whole = np.arange(n * n).reshape(n, n) % 7 - 3.0
    a, b = (ctx.scatter(whole, pb.MatrixDescriptor((n, n), (52, 40), grid)) for grid in grids)
    out = ctx.empty(a.descriptor)
    rows, cols = zip(*map(out.descriptor.global_indices, range(out.descriptor.grid.size)), strict=True)
    least = 8 * sum(
        needed(a, ranks, lambda rank: (rows[rank], range(n)))
        + needed(b, ranks, lambda rank: (range(n), cols[rank]))
        for ranks in nodes
    )
    for algo in ("gathered", "panels"):
        with pb.plan(pb.matmul, a, b, out=out, algo=algo) as plan:
            found = sent_by_mpi(plan)
        right = np.array_equal(out.allgather(), whole @ whole)
        assert (found, right) == (least, True), f"{algo} on {grids}"


@pytest.mark.skipif(_core.load() is None, reason="there is no core")
@on_ranks((4, "interleaved:2"), *only_long((4, "blocks:2"), (6, "blocks:3"), (6, "interleaved:2")))
def test_each_element_crosses_between_two_nodes_once(comm, ctx, nodes):
    """Each element crosses between two nodes once, however many ranks read it there, and what is not read does not."""
    heads = 8 * (_core.VALUES + 1) * comm.size * (len(nodes) - 1)
    post, n = inside.of_the_core(ctx), 60
    every, nothing = range(n), range(0)

    def sent(call, *given, **how):
        post.sent_bytes = post.meetings = 0
        call(*given, **how)
        return comm.allreduce(post.sent_bytes) - heads * post.meetings

    def sent_by_mpi(call):
        mine, carrier = next(ranks for ranks in nodes if comm.rank in ranks), ctx.engine.transport.comm
        with mock.patch.object(carrier, "isend", side_effect=carrier.isend) as send:
            call()
        sizes = [array.nbytes for array, to in (each.args for each in send.mock_calls) if to not in mine]
        return comm.allreduce(sum(sizes))

    large = ctx.scatter(np.eye(128), pb.MatrixDescriptor((128, 128), 32, grids(comm.size)[-1]))
    x = ctx.scatter(np.ones((128, 1)), pb.MatrixDescriptor((128, 1), 32, grids(comm.size)[-1]))
    found = sent(pb.blas.trsv, large, x, out=x)  # vectors alone
    most = 8 * 128 * comm.size * (len(nodes) - 1)
    assert found <= most, "trsv of four blocks"
    for a_grid, b_grid in itertools.product((grids(comm.size)[0], *grids(comm.size)[-2:]), repeat=2):
        whole = np.eye(n) * n + 1.0
        a, b = (ctx.scatter(whole, pb.MatrixDescriptor((n, n), (4, 4), grid)) for grid in (a_grid, b_grid))
        out = ctx.empty(a.descriptor)

        def of_result(rank, d=out.descriptor):
            return d.global_indices(rank) if rank < d.grid.size else (nothing, nothing)

        least = 8 * sum(
            needed(a, ranks, lambda rank: (of_result(rank)[0], every))
            + needed(b, ranks, lambda rank: (every, of_result(rank)[1]))
            for ranks in nodes
        )
        with pb.plan(pb.matmul, a, b, out=out, algo="shared") as plan:
            ways = {"matmul": sent(pb.matmul, a, b, out=out), "messages of MPI": sent_by_mpi(plan)}
        for way, found in ways.items():
            assert found == least, f"{way} on {a_grid}, {b_grid}"
        if a_grid == b_grid and a_grid.size == comm.size:
            in_own_memory(ctx, sent_by_mpi, nodes, a_grid, b_grid)
        x = ctx.scatter(whole[:, :1], pb.MatrixDescriptor((n, 1), (4, 4), b_grid))
        for name in ("trmv", "symv"):  # x, and sums of the ranks of a process row or two
            found = sent(getattr(pb.blas, name), a, x, out=x if name == "trmv" else None)
            most = 8 * n * comm.size * (len(nodes) - 1)
            assert found <= most, f"{name} on {a_grid}, {b_grid}"
        if a_grid == b_grid and a_grid.size > 1:  # one rank sends its part whole
            most = 8 * sum(needed(a, ranks, lambda _: (every, every)) for ranks in nodes)
            found = sent(pb.linalg.cholesky, a, out=out)
            half = most // 2 < found < 0.6 * most + 8 * n * 4 * len(nodes)
            assert half, f"Cholesky on {a_grid}: {found} bytes, of all elements {most}"
            workers = min(ctx.engine.operations.workers, comm.size, n // 4)
            for width in (4, 7):
                with changed_limits(width=width, part=4):
                    found = sent(pb.linalg.cholesky, a, out=out)
                most = 8 * dealt(a.descriptor, nodes, width, workers)
                least = (
                    most if width == 4 else 0.95 * most
                )  # what is above the diagonal of a block is left out
                assert least <= found <= most, f"dealt Cholesky on {a_grid}, {width} columns: {found} bytes"


@on_ranks((3, "blocks:2"), (4, "interleaved:2"), *only_long((5, "blocks:2"), (6, "interleaved:3")))
def test_results_cross_between_two_nodes_once(comm, ctx, nodes):
    """Each element of X, of a result, or of a sum in the type in which it is added, crosses to a node once."""
    rng = np.random.default_rng(15)
    mine = next(ranks for ranks in nodes if comm.rank in ranks)
    carrier = ctx.engine.transport.comm
    ways = [(form, shard, {"algo": "pull"}) for form in FORMS if form != "matmul_allreduce"]
    if comm.size > len(nodes):  # then "auto" takes it where slabs cannot be taken
        ways.append(("allgather_matmul", shard, {"return_gathered": True}))
        ways += [(form, other_split, {}) for form in FORMS if form != "matmul_allreduce"]
    for (form, split, how), dtype, size in itertools.product(ways, ("float64", "bfloat16"), sizes(comm)):
        (tokens, outputs, inputs), about = size, f"{form} {split.__name__} {how}"
        case = Case(rng, comm, form, dtype, *size, split=split)
        with mock.patch.object(carrier, "isend", side_effect=carrier.isend) as send:
            found = case(ctx, **how)
        if "return_gathered" in how:
            found, gathered = found
            check_array(gathered, case.x, f"X of {about} {dtype} {size}")
        check_array(found, case.expected(), f"{about} {dtype} {size}")
        sent = [array.nbytes for array, to in (each.args for each in send.mock_calls) if to not in mine]
        everyones = sum(map(sum, comm.allgather(sent)))
        item = 8 if dtype == "float64" else 4 if form == "matmul_reduce_scatter" else 2
        elements = tokens * (inputs if form == "allgather_matmul" else outputs)
        most = elements * item * (len(nodes) - 1)  # slabs of no inputs are not sent
        assert everyones <= most if inputs == 0 else everyones == most, f"{about} {dtype} {size}"
        assert len(sent) == len(send.mock_calls), "within a node there are no messages"
    case = Case(rng, comm, "matmul_reduce_scatter", "float64", 11, 7, 5)
    found = case(ctx, algo="pull", alpha=2, beta=3, c=case.local_c, bias=case.local_bias)
    check_array(found, case.expected(2, 3, bias=True), "C and bias are added once")


@on_ranks(4, on_nodes="interleaved:2")
def test_a_node_waits_for_none_of_another(comm, ctx):
    """What ranks share, they share within a node: others come later, once they hear that these went on."""
    if comm.rank % 2:
        assert comm.recv(source=comm.rank - 1, tag=3) == "went on"
    ctx.engine.transport.fence()
    if not comm.rank % 2:
        comm.send("went on", comm.rank + 1, tag=3)


@on_ranks(2, on_nodes="blocks:2")
def test_a_rank_without_room_for_messages(comm):
    """A rank without memory for messages: all go without them, and nobody waits."""

    def refuses(*_):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    values = np.arange(36.0).reshape(6, 6)
    with contextlib.ExitStack() as stack:
        if comm.rank == comm.size - 1:
            full = SimpleNamespace(**{**vars(mmap), "mmap": refuses})
            stack.enter_context(mock.patch("pblasmp.comm.post.mmap", full))
        with pb.Context(comm, engine="host") as ctx:
            a = ctx.scatter(values, block=2)
            check_matrix(a @ a, values @ values, "product")
            assert ctx.control.board is None, "messages of the core: one rank has room"


@on_ranks(2, on_nodes="blocks:2")
def test_contexts_give_their_memory_back(comm):
    """What a context between nodes has touched is not left to the heap, where each would touch other pages."""

    def resident():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    held = []
    for opened in range(61):
        with pb.Context(comm, engine="host") as ctx:
            assert ctx.ones((8, 8)).norm() == 8
        if opened in (20, 40, 60):
            held.append(sum(comm.allgather(resident())))
    # what other tests of this process have left may move once, but contexts would add to it each time
    grown = min(later - before for before, later in itertools.pairwise(held))
    assert grown < 6 << 20


def sat(comm):
    seats = [Seat(**each) for each in seats_of_ranks(False, Reporter())["seats"]]
    faults = [fault for fault, _ in faults_of_seats(seats)]
    return list(lines_of_seats(seats)), faults, seats[comm.rank].together


def test_where_doctor_finds_ranks(monkeypatch):
    """Nodes that are one machine are a fault."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    lines, faults, together = run_mpi(sat, 4, on_nodes="interleaved:2")[1]
    assert [line.split(", ")[:2] for line in lines] == [["node0: ranks 0", "2"], ["node1: ranks 1", "3"]]
    assert faults == ["node0 and node1 are one machine: their ranks share no memory"]
    assert list(together) == [1, 3]


def collective_calls(comm):
    """Which functions of MPI this rank calls together with all others: to open a context, and to plan and compute."""
    from mpi4py import MPI

    calls = []

    def counted(name):
        def call(self, *args, **how):
            calls.extend([name] if self.size == comm.size else [])
            return getattr(MPI.Intracomm, name)(self, *args, **how)

        return call

    moves = ("Dup", "Split", "Bcast", "Barrier", "Allgather", "Allgatherv", "Allreduce", "Alltoall", "Reduce")
    names = [name for each in (*moves, "Send", "Recv") for name in (each, f"I{each.lower()}")]
    names = [name for name in names if hasattr(MPI.Intracomm, name)]
    counting = type("Counting", (MPI.Intracomm,), {name: counted(name) for name in names})
    made = MpiCommunicator.__init__
    with (
        mock.patch.object(
            MpiCommunicator,
            "__init__",
            lambda self, comm, *args, **how: made(self, counting(comm), *args, **how),
        ),
        pb.Context(comm) as ctx,
    ):
        opening = sorted(calls)
        a = scattered(
            ctx, layout(np.random.default_rng(1), (30, 30), comm.size), np.eye(30) * np.arange(1.0, 31)
        )
        calls.clear()
        plan = pb.plan(pb.matmul, a, a, algo="panels")
        largest = a.norm("max")
        fault = plan is None or None if largest == 30 else f"{largest}"
        return opening, sorted(calls), fault


def test_setting_up_takes_as_many_calls_however_many_ranks_there_are():
    """Of these one alone has parts from all ranks, and brings them to all: where they are. So it is with 4,096."""
    everyones = run_mpi(collective_calls, 4, on_nodes="interleaved:2") + run_mpi(
        collective_calls, 2, on_nodes="blocks:2"
    )
    called, *others = [opening for opening, *_ in everyones]
    assert others == [called] * 5
    assert called.count("Iallgather") == 1
    assert not {"Isend", "Irecv", "Send", "Recv", "Iallgatherv"} & {*called}
    assert len(called) < 16
    for _, calls, fault in everyones:
        assert fault is None
        assert {*calls} <= {"Iallreduce", "Ibarrier", "Isend", "Irecv", "Ibcast"}, (
            "nothing comes from all ranks to all"
        )


@pytest.mark.skipif(_core.load() is None, reason="there is no core")
@pytest.mark.parametrize(("nranks", "ranks_per_node"), [(4, 2), *only_long((2, 1), (3, 2), (4, 1))])
def test_direct_calls_take_one_exchange_each_way_without_mpi(nranks, ranks_per_node):
    pytest.importorskip("torch")
    run_torch(direct_calls_without_mpi, nranks, ranks_per_node=ranks_per_node)
