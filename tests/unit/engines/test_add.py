# SPDX-License-Identifier: Apache-2.0
"""Sums of matrices on ranks that are threads: in place, in memory that ranks share, and by messages."""

import scipy.linalg.cython_blas  # noqa: F401 - threads cannot import it at the same time

import pblasmp as pb
from pblasmp.engines.dense import add
from pblasmp.engines.host.host_operations import HostOperations
from tests.helpers import inside
from tests.helpers.threads import on_ranks

SQUARE = pb.MatrixDescriptor((12, 12), (3, 3), pb.Grid(2, 2))


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
                    stripes = inside.product(plan)._stripes
                    if comm.rank == 0:
                        told.append(([stripe.columns for stripe in stripes], plan.workspace.host_bytes))

    on_ranks(4, work)
    page = 4096
    assert told == [([slice(0, 3), slice(3, 6)], 2 * page), ([slice(0, 3)], page)]
