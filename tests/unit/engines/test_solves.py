# SPDX-License-Identifier: Apache-2.0
"""Triangular solves on ranks that are threads: in the memory of the result, of B, or in slabs of their own."""

from __future__ import annotations

import scipy.linalg.cython_blas  # noqa: F401 - threads cannot import it at the same time

import pblasmp as pb
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
