# SPDX-License-Identifier: Apache-2.0
"""Sums of matrices on ranks that are threads: in place, in memory that ranks share, and by messages."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg.cython_blas  # noqa: F401 - threads cannot import it at the same time

import pblasmp as pb
from pblasmp.engines.dense import add
from pblasmp.engines.host.operations import HostOperations
from tests.helpers.cases import OPS, misplaced, numbers, scattered
from tests.helpers.slow import in_turn
from tests.helpers.threads import on_ranks

SQUARE = pb.MatrixDescriptor((12, 12), (3, 3), pb.Grid(2, 2))
OTHER = pb.MatrixDescriptor((12, 12), (5, 2), pb.Grid(1, 3), (0, 1))
WHOLE = {"geadd": np.ones((12, 12), bool), "tradd": np.tri(12, dtype=bool)}


def like(d, dtype, order):
    return pb.MatrixDescriptor(d.shape, d.block, d.grid, d.source, dtype, order)


@pytest.mark.parametrize(
    ("of_ranks", "dtype"),
    list(in_turn((("", 1), ("1", 1), ("1", 2), ("3", 1), ("3", 2)), ("float64", "complex64"), keep=2)),
)
def test_sums_of_any_two_layouts(of_ranks, dtype, monkeypatch):
    per_node, stripes = of_ranks
    monkeypatch.setenv("PBLASMP_RANKS_PER_NODE", per_node)
    monkeypatch.setattr(HostOperations, "stripes", stripes)
    monkeypatch.setattr(add, "_LEAST", 0)
    monkeypatch.setattr(add, "_MOST", 100)  # as many as there can be, of which as many are under way

    def work(comm):
        rng = np.random.default_rng(1)
        with pb.Context(comm, engine="host") as ctx:
            options = WHOLE, "NTC", ("CC", "FC"), (SQUARE, OTHER), ((1, 0), (2, -1))
            for name, op, orders, source, scalars in in_turn(*options, keep=2, first=stripes):
                x, y = (numbers(rng, (12, 12), dtype) for _ in range(2))
                a = scattered(ctx, like(source, dtype, orders[0]), x)
                c = scattered(ctx, like(SQUARE, dtype, orders[1]), y)
                options = {"uplo": "L"} if name == "tradd" else {}
                alpha, beta = scalars
                d = getattr(pb.blas, name)(a, c, op_a=op, alpha=alpha, beta=beta, **options)
                expected = np.where(WHOLE[name], alpha * OPS[op](x) + beta * y, y).astype(dtype)
                wrong = misplaced(d, expected) or misplaced(a, x)
                if wrong:
                    return f"{name} {op} {orders} {source.grid} {scalars}: {wrong}"
        return None

    assert on_ranks(4, work) == [None] * 4


def test_who_needs_a_part_of_another_copies_its_own():
    def work(comm):
        with pb.Context(comm, engine="host") as ctx:
            a, c = ctx.zeros(SQUARE), ctx.zeros(SQUARE)
            with pb.plan("geadd", a, c, op_a="T") as plan:
                report = plan.report()
                return report.path, report.sent_bytes, report.copied_bytes

    kept, shared = ("shared", 0, 0), ("shared", 0, 4096)  # a page holds a rank's 36 numbers
    assert on_ranks(4, work) == [kept, shared, shared, kept]


def test_large_sums_are_moved_in_stripes_of_which_every_process_has_a_part(monkeypatch):
    """The first one is added while the others are on their way; those that are under way are in memory."""
    monkeypatch.setenv("PBLASMP_RANKS_PER_NODE", "1")
    monkeypatch.setattr(HostOperations, "stripes", 3)
    monkeypatch.setattr(add, "_LEAST", 12 * 12 * 8 // 4)
    told = []

    def work(comm):
        with pb.Context(comm, engine="host") as ctx:
            for d in (SQUARE, SQUARE[:6, :6]):
                with pb.plan("geadd", ctx.zeros(d), ctx.zeros(d), op_a="T") as plan:
                    stripes = plan._product._stripes
                    if comm.rank == 0:
                        told.append(([stripe.columns for stripe in stripes], plan.workspace.host_bytes))

    on_ranks(4, work)
    page = 4096
    assert told == [([slice(0, 3), slice(3, 6)], 2 * page), ([slice(0, 3)], page)]
