# SPDX-License-Identifier: Apache-2.0
"""Ranks of which some have no compiled core: they agree and compute by messages, and everything is right."""

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.comm.votes import vote_on
from tests.helpers.cases import check_view, refuses
from tests.helpers.mpi import run_mpi


def computes(comm, without):
    """Agreements, products, level 2 and 1, solves and factorizations, twice: kept plans, too."""
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank in without:
            patch.setenv("PBLASMP_CORE", "0")
        with pb.Context(comm, engine="host") as ctx:
            assert ctx.control.board is None is ctx.comm.board, "board: there are boards"
            rng, last = np.random.default_rng(4), ctx.rank == ctx.size - 1
            x, y = (rng.integers(-4, 5, (20, n)).astype(float) for n in (20, 3))
            spd = x @ x.T + 400 * np.eye(20)
            grid = pb.Grid(1, ctx.size)
            a, b, s = (ctx.scatter(v, block=4, grid=grid, order="F") for v in (x, y, spd))
            out, vector = ctx.zeros(a.descriptor), ctx.zeros(b.descriptor)
            for turn in ("first", "again"):
                for name, call, expected in (
                    ("matmul", lambda: pb.matmul(a, a, out=out), x @ x),
                    ("sub-matrix", lambda: pb.matmul(a[3:9, :7], a[2:9, 5:]), x[3:9, :7] @ x[2:9, 5:]),
                    ("gemv", lambda: pb.blas.gemv(a, b[:, :1], out=vector[:, 1:2]), x @ y[:, :1]),
                    ("trsm", lambda: pb.blas.trmm(s, pb.blas.trsm(s, b)), y),
                    ("cholesky", lambda: pb.linalg.cho_solve((pb.linalg.cholesky(s), True), s), np.eye(20)),
                    ("lu", lambda: pb.linalg.solve(s, s), np.eye(20)),
                ):
                    found = call().allgather()
                    assert np.allclose(found, expected), f"{name}, {turn}: {found - expected}"
                dot = pb.blas.dot(b[:, :1], b[:, 2:])
                assert dot == y[:, 0] @ y[:, 2], f"dot, {turn}"
            if ctx.size > 1:
                refuses(ctx, pb.RankMismatchError, ["alpha"], pb.matmul, a, a, alpha=1 + last)
                refuses(ctx, pb.LayoutError, ["sizes"], pb.matmul, a, a[:9, :] if last else a)
                assert [vote_on(ctx.control, "call", n) for n in (7, int(last))] == [True, False], (
                    "votes: wrong"
                )
            check_view(a @ a, x @ x, "still right")


@pytest.mark.parametrize(
    ("nranks", "without", "per_node"), [(2, (0, 1), 2), (2, (1,), 2), (2, (1,), 1), (1, (0,), 1)]
)
def test_ranks_without_the_core(nranks, without, per_node, monkeypatch):
    monkeypatch.setenv("PBLASMP_RANKS_PER_NODE", str(per_node))
    run_mpi(computes, nranks, without=without)
