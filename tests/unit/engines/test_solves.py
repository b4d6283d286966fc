# SPDX-License-Identifier: Apache-2.0
"""Triangular solves on ranks that are threads: in the memory of the result, of B, or in slabs of their own."""

import numpy as np
import pytest
import scipy.linalg.cython_blas  # noqa: F401 - threads cannot import it at the same time

import pblasmp as pb
from pblasmp.engines.host.host_operations import HostOperations
from tests.helpers.threads import on_ranks

A = pb.MatrixDescriptor((12, 12), (3, 3), pb.Grid(2, 2))


def test_solves_report_what_they_move_and_need():
    def work(comm):
        with pb.Context(comm, engine="host") as ctx:
            a, b = ctx.zeros(A), ctx.zeros(A)
            found = []
            for alpha in (1, 0):
                with pb.plan("trsm", a, b, alpha=alpha, algo="gathered") as plan:
                    report = plan.report()
                    found.append((report.sent_bytes, report.workspace.host_bytes))
            return found

    triangle, columns = (
        3 * 36 * 8,
        18 * 8,
    )  # of A to each other rank; half of B to where it is solved, and back
    needs = [(triangle + 2 * columns, 2 * 4096), (0, 0)]  # A whole and this rank's columns, in pages
    assert on_ranks(4, work) == [needs] * 4


# of a rank's 8 columns the other one of its process column solves 4; blocks of 4 are too uneven: 3 columns each
@pytest.mark.parametrize(
    ("shape", "block", "moved"),
    [((16, 16), (2, 2), 4 * 8 * 4), ((16, 9), (2, 4), 24 + 16 + 16 + 32 + 8)],
)
def test_right_hand_sides_move_inside_of_a_process_column_if_that_deals_them_out_evenly(shape, block, moved):
    def work(comm):
        with pb.Context(comm, engine="host") as ctx:
            a = ctx.from_function(lambda i, j: np.where(i >= j, 1.0 + (i == j), np.nan), (16, 16), block=2)
            b = ctx.from_function(lambda i, j: 1.0 * i - j, shape, block=block)
            with pb.plan("trsm", a, b, algo="gathered") as plan:
                return plan.report().sent_bytes, plan().allgather()

    i, j = np.indices(shape)
    wanted = np.linalg.solve(np.tril(np.ones((16, 16))) + np.eye(16), 1.0 * (i - j))
    found = on_ranks(4, work)
    assert sum(sent for sent, _ in found) == (4 * 3 * 64 + 2 * moved) * 8  # A to three others; B, and X back
    for _, x in found:
        np.testing.assert_allclose(x, wanted, atol=1e-12)


def test_of_a_panel_only_the_rows_of_the_triangle_travel(monkeypatch):
    """And right-hand sides that are where their unknowns will be are not copied before."""
    monkeypatch.setattr(HostOperations, "solved", (6, 0))
    row = pb.MatrixDescriptor((12, 12), (3, 3), pb.Grid(1, 4))

    def work(comm):
        with pb.Context(comm, engine="host") as ctx:
            a = ctx.from_function(lambda i, j: np.where(i >= j, 1.0 + (i == j), np.nan), A)
            b = ctx.from_function(lambda i, j: 1.0 * i - j, row)
            with pb.plan("trsm", a, b, alpha=2, algo="panels", out=ctx.empty(row)) as plan:
                report, x = plan.report(), plan().allgather()
        return report.sent_bytes, report.copied_bytes, x

    i, j = np.indices((12, 12))
    wanted = np.linalg.solve(np.tril(np.ones((12, 12))) + np.eye(12), 2.0 * (i - j))
    for sent, copied, x in on_ranks(4, work):
        assert (sent, copied) == (3 * (18 + 9) * 8, (18 + 9) * 8)  # to three others, and what stays
        np.testing.assert_allclose(x, wanted, atol=1e-12)
