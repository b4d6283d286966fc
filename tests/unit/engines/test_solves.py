# SPDX-License-Identifier: Apache-2.0
"""Triangular solves on ranks that are threads: in the memory of the result, of B, or in slabs of their own."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg.cython_blas  # noqa: F401 - threads cannot import it at the same time

import pblasmp as pb
from pblasmp.engines.host.operations import HostOperations
from tests.helpers.cases import OPS, misplaced, numbers, scattered
from tests.helpers.slow import in_turn
from tests.helpers.threads import on_ranks

A = pb.MatrixDescriptor((12, 12), (3, 3), pb.Grid(2, 2))
COLUMNS = pb.MatrixDescriptor((12, 12), (12, 3), pb.Grid(1, 4))
LAYOUTS = {
    "columns": (COLUMNS, COLUMNS),
    "blocks": (A, A),
    "moved": (A, COLUMNS),
    "few": (pb.MatrixDescriptor((12, 12), (12, 12), pb.Grid(1, 1)),) * 2,
}


@pytest.mark.parametrize("algo", ["shared", "gathered", "panels"])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_solves_of_any_layout(algo, dtype, monkeypatch):
    monkeypatch.setattr(HostOperations, "panel", 5)

    def work(comm):
        rng = np.random.default_rng(2)
        with pb.Context(comm, engine="host") as ctx:
            options = LAYOUTS.items(), "LR", (("L", "N"), ("U", "N"), ("L", "C")), ("new", "B")
            for (name, layouts), side, (uplo, op), out in in_turn(*options, keep=2, first=dtype == "float64"):
                if name == "moved" and out == "B":
                    continue
                b_layout, d_layout = (
                    pb.MatrixDescriptor(x.shape, x.block, x.grid, dtype=dtype) for x in layouts
                )
                t = numbers(rng, (12, 12), dtype)
                t = (np.tril if uplo == "L" else np.triu)(t, -1 if uplo == "L" else 1) + np.eye(12)
                x = numbers(rng, (12, 12), dtype)
                full = OPS[op](t)
                b = full @ x if side == "L" else x @ full
                given = scattered(ctx, b_layout, b)
                target = given if out == "B" else scattered(ctx, d_layout, np.full((12, 12), np.nan, dtype))
                a = scattered(ctx, pb.MatrixDescriptor(A.shape, A.block, A.grid, dtype=dtype), t)
                options = {"side": side, "uplo": uplo, "op_a": op, "algo": algo, "out": target}
                for alpha in (2, 0):
                    if alpha == 0 and out == "B":
                        break
                    d = pb.blas.trsm(a, given, alpha=alpha, **options)
                    wrong = misplaced(d, (alpha * x).astype(dtype))
                    if wrong is None and out == "new":
                        wrong = misplaced(given, b.astype(dtype))
                    if wrong:
                        return f"{name} {side} {uplo} {op} {out} {alpha}: {wrong}"
        return None

    assert on_ranks(4, work) == [None] * 4


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
