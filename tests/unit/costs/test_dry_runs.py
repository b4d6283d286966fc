# SPDX-License-Identifier: Apache-2.0
"""Every algorithm on all of 16 to 64 ranks in one process: no deadlock, nothing unmatched, the right results."""

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.costs.dry_engine import Ranks
from pblasmp.costs.pretend import PretendedRanks, RanksInTurn, dry_run
from pblasmp.layout import ParallelProblem
from tests.helpers.cases import numbers
from tests.helpers.layouts import random_product
from tests.helpers.slow import only_long

SLABS = ("shared", "gathered", "panels", "stationary")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Several panels, and several messages between two ranks."""
    monkeypatch.setattr("pblasmp.engines.host.host_operations.HostOperations.panel", 16)
    monkeypatch.setattr("pblasmp.engines.host.host_operations.HostOperations.solved", (16, 0))
    monkeypatch.setattr("pblasmp.comm.exchange.MESSAGE_BYTES", 256)


def filled(of):
    """Writes the values of whole matrices into local arrays."""

    def fill(rank, operands):
        for name, (x, whole) in of.items():
            if rank < x.grid.size:
                rows, cols = x.global_indices(rank)
                getattr(operands, name)[...] = whole[rows[:, None], cols]

    return fill


@pytest.mark.parametrize("nranks", [16, *only_long(32, 64)])
def test_products(nranks):
    rng = np.random.default_rng(nranks)
    for turn, algo in enumerate(SLABS * 2):
        p, _ = random_product(rng, nranks, 70)
        if turn >= len(SLABS):
            p = pb.MatmulProblem.gemm(70, 50, 60, pb.Grid.squarest(nranks), (4, 3, 5))
        a, b = (numbers(rng, x.shape, "float64") for x in (p.a, p.b))
        run = dry_run(p, algo, nranks=nranks, ranks_per_node=8, fill=filled({"a": (p.a, a), "b": (p.b, b)}))
        expected = (a if p.op_a == "N" else a.T) @ (b if p.op_b == "N" else b.T)
        for rank in range(p.d.grid.size):
            rows, cols = p.d.global_indices(rank)
            assert np.array_equal(run.operands[rank].d, expected[rows[:, None], cols]), (algo, p, rank)
        counts = p.traffic(algo, nranks=nranks, ranks_per_node=8)
        assert run.sent_bytes.tolist() == counts.sent_bytes.tolist(), (algo, p)
        assert run.messages.tolist() == counts.messages.tolist(), (algo, p)
        assert run.algorithm == algo


def routines(nranks):
    square = pb.MatrixDescriptor((48, 48), (4, 4), pb.Grid.squarest(nranks))
    thin = pb.MatrixDescriptor((48, 7), (4, 3), pb.Grid.squarest(nranks))
    yield pb.Level3Problem("trsm", square, thin, thin), ("shared", "gathered", "panels", "stationary")
    yield pb.Level3Problem("symm", square, thin, thin), ("gathered", "full", "stationary")
    yield pb.Level3Problem("syrk", thin, square), ("summed", "panels", "full")
    yield pb.Level3Problem("geadd", square, square, op_a="T"), ("moved",)


@pytest.mark.parametrize("nranks", [16, *only_long(32, 64)])
def test_routines_and_forms(nranks):
    for p, algorithms in routines(nranks):
        eye = {"a": (p.a, np.eye(*p.a.shape))}
        for algo in algorithms:
            run = dry_run(p, algo, ranks_per_node=8, fill=filled(eye))
            assert run.sent_bytes.sum() or algo == "summed"
    tokens, real = (4,) * nranks, np.dtype(np.float64)
    whole, some = (4 * nranks,) * nranks, (6,) * nranks
    for form, sizes in (
        ("allgather_matmul", (tokens, some, some, whole)),
        ("matmul_reduce_scatter", (whole, some, some, tokens)),
        ("matmul_allreduce", (whole, some, some, whole)),
        ("matmul_allgather", (whole, some, some, whole)),
    ):
        p = ParallelProblem(form, *sizes, real, real, real)
        run, counts = dry_run(p, "push", ranks_per_node=8), p.traffic("push", ranks_per_node=8)
        assert run.sent_bytes.tolist() == counts.sent_bytes.tolist()
        assert run.messages.tolist() == counts.messages.tolist()


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("rrss", "the ranks wait for each other"),
        ("ss", "nobody does the other half"),
        ("s", "waited for 0 times"),
        ("c", "collective call 1 is barrier and sum"),
        ("l", "meets"),
    ],
)
def test_faults_are_found(order, words):
    """Ranks that both receive first; that both only send; that do not wait; that disagree about calls and sizes."""
    world = RanksInTurn(Ranks(2, 2))

    def run(rank):
        comm, data = PretendedRanks(world, rank), np.zeros(3 + (rank if order == "l" else 0))
        other = 1 - rank
        if order == "rrss":
            comm.wait(comm.irecv(np.zeros(3), other)[0])
            comm.wait(comm.isend(data, other)[0])
        elif order == "ss":
            comm.isend(data, other)
        elif order == "s":
            comm.isend(data, other)
            comm.irecv(np.zeros(3), other)
        elif order == "c":
            (comm.sum_into if rank else lambda _: comm.barrier())(data)
        else:
            sent = comm.isend(data, other)
            comm.wait(comm.irecv(data.copy(), other)[0])
            comm.wait(sent[0])

    with pytest.raises(pb.PblasmpError, match=words):
        world.run(run)
