# SPDX-License-Identifier: Apache-2.0
"""Layouts that cuBLASMp refuses or gets wrong: taken as they are, by algorithms that need no other ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import pblas
from pblasmp.layout.level3_problem import ROUTINES
from tests.helpers.calls import DTYPES, FUNCTIONS, check_call, legal_options
from tests.helpers.cases import pick
from tests.helpers.gpu.calls import check_random_call
from tests.helpers.machine import Multiplying, context, machine
from tests.helpers.mpi import on_ranks, run_mpi
from tests.helpers.slow import draws, only_long

GRID = pb.Grid(1, 1)
D = pb.MatrixDescriptor((6, 6), (2, 2), GRID, dtype="float32")
OTHER = replace(D, block=(3, 2))


def calls(comm: Any, path: str, count: int, between: bool = False) -> Any:
    with context(path, Multiplying, comm=comm) as (ctx, lib):
        for routine in ("matmul", *ROUTINES):
            for seed in range(count * (1 + 4 * (routine == "matmul"))):
                check_random_call(ctx, routine, "auto", seed)
        gathered(ctx, lib, between)


def gathered(ctx: pb.Context, lib: Any, between: bool) -> Any:
    """Parts of one size that all ranks get: between nodes by one AllGather, also if they are packed and conjugated."""
    rng, size = np.random.default_rng(7), ctx.size
    for order, grid, op in itertools.product("CF", (pb.Grid(1, size), pb.Grid(size, 1)), "NC"):
        of_a, of_b = (
            pb.MatrixDescriptor((6 * size,) * 2, block, grid, dtype="complex64", order=order)
            for block in ((3, 2), (2, 3))
        )
        x, y = (rng.integers(-4, 5, (6 * size, 6 * size, 2)) @ [1, 1j] for _ in range(2))
        a, b = ctx.scatter(x.astype("complex64"), of_a), ctx.scatter(y.astype("complex64"), of_b)
        lib.gpu.events.clear()
        found = pb.matmul(a, b, op_a=op, algo="gathered").allgather()
        expected = (x if op == "N" else x.conj().T) @ y
        assert np.array_equal(found, expected), f"gathered {order} {grid} {op}"
        assert bool(lib.gpu.did("all_gather")) is between, f"gathered {order} {grid} {op}: in another way"


@on_ranks(1, 4, count=draws(1, long=8))
def test_pblas_names(comm: Any, path: str, count: int) -> None:
    """On NumPy's and on CuPy's arrays."""
    rng = np.random.default_rng(83)
    with context(path, Multiplying, comm=comm) as (ctx, lib):
        shapes = [(p, ctx.size // p) for p in range(1, ctx.size + 1) if ctx.size % p == 0]
        every = [(pb.Grid(*shape), pblas.gridinit(ctx, "Row", *shape)) for shape in shapes]
        for routine, dtype in itertools.product(FUNCTIONS, DTYPES * count):
            options, grid = pick(rng, legal_options(routine, dtype)), pick(rng, every)
            lib.clear()
            check_call(ctx, rng, routine, options, dtype, "pblas", (9, 7, 11), grid)
        for _, number in every:
            pblas.gridexit(number)


@on_ranks(2)
def test_local_names(comm: Any, path: str) -> None:
    """Rank 1 alone calls the local routines, on NumPy's and on CuPy's arrays; p?elget of a process row for both."""
    with machine(path, Multiplying, comm=comm) as lib:
        import cupy

        with pb.Context(comm, engine="cublasmp") as ctx:
            ictxt = pblas.gridinit(ctx, "Row", 1, 2)
            desc = pblas.descinit(4, 6, 2, 3, 0, 0, ictxt, 4)
            for device in (False, True):
                a, b = np.arange(1.0, 13).reshape(4, 3, order="F"), np.zeros((4, 3), order="F")
                a, b = (cupy.asarray(a), cupy.asarray(b)) if device else (a, b)
                of_a, of_b = (a, 1, 1, desc), (b, 1, 1, desc)
                want, found = [np.arange(1.0, 13).reshape(4, 3, order="F"), np.zeros((4, 3))], 0.0
                if comm.rank == 1:
                    pblas.pdelset(a, 2, 5, desc, -1.0)
                    pblas.pdelset(a, 2, 2, desc, -1.0)  # rank 0 has this one
                    pblas.pdlacpy("U", 4, 6, *of_a, *of_b)
                    pblas.pdlascl("G", 1.0, 2.0, 4, 6, *of_b, None)
                    pblas.pdlaset("A", 1, 6, 3.0, 0.0, b, 3, 1, desc)
                    found = pblas.pdelget(" ", " ", None, a, 2, 5, desc)
                    want[0][1, 1] = -1
                    want[1] = 2 * np.where(np.arange(3, 6) >= np.arange(4)[:, None], want[0], 0)
                    want[1][2] = 3
                held = [cupy.asnumpy(x) if device else x for x in (a, b)]
                good = all(map(np.array_equal, held, want)) and found == -comm.rank
                assert good, f"local {device}: {held} {found}"
                told = [pblas.pdelget(scope, " ", None, a, 1, 4, desc) for scope in "RA"]
                assert told == [1.0, 1.0], f"scopes {device}"
                norm = pblas.pdlange("M", 4, 6, *of_a, None), pblas.pdlatra(4, *of_a)
                assert norm == (12.0, 1 + 6 + 11 + 4), f"norm {device}"
            pblas.gridexit(ictxt)
        lib.assert_clean()
        lib.gpu.assert_clean()


@on_ranks(2)
def test_read_or_not(comm: Any, path: str) -> None:
    d = replace(D, grid=pb.Grid(1, comm.size))
    with machine(path, Multiplying, comm=comm), pb.Context(comm, engine="cublasmp") as ctx:
        a, c = ctx.zeros(d), ctx.zeros(replace(d, block=(2, 3)))
        for beta, moved in ((0, 0), (1, 1)):
            with pb.plan(pb.matmul, a, a, c, out=ctx.zeros(d), beta=beta) as plan:
                found = len(plan.report().moved), plan.report().algorithm
            assert found == (moved, "default"), f"beta {beta}"


@pytest.mark.parametrize("ranks", [1, *only_long(2), 4])
def test_calls(stand_in, ranks):
    run_mpi(calls, ranks, path=stand_in(1000), count=draws(1, long=8))


@pytest.mark.parametrize("ranks", [2, *only_long(3, 4)])
def test_calls_between_nodes(stand_in, ranks, monkeypatch):
    monkeypatch.setenv("PBLASMP_RANKS_PER_NODE", "1")
    run_mpi(calls, ranks, path=stand_in(1000), count=draws(1, long=8), between=True)


def test_the_report_says_why_cublasmp_is_not_taken_and_how_it_would_be(ctx, lib):
    a, b = ctx.zeros(D), ctx.zeros(OTHER)
    with pb.plan(pb.matmul, a, b) as plan:
        verdicts = plan.report().algorithms
        assert (plan.report().algorithm, plan.report().moved) == ("gathered", ())
    found = pb.algorithms(pb.MatmulProblem(D, OTHER, D), ctx)
    words = "cuBLASMp does not take these layouts: b: the rows of op(B) are in blocks of 3"
    assert words in str(found["default"])
    assert {name for name, verdict in found.items() if verdict.taken} == {"gathered"}
    assert {*verdicts} == {*found}
    with pb.plan(pb.matmul, a, b, algo="default") as plan:
        (line,) = plan.report().moved
        assert line.startswith("b is moved to 6x6 float32 in blocks of 2x2")
        assert "cuBLASMp does not take these layouts" in str(plan.report())


def test_a_result_that_cublasmp_moves_is_finished_afterwards(alone, stand_in):
    """An epilogue does not follow a product in another layout than the caller's."""
    with context(stand_in(1000), Multiplying) as (ctx, lib):
        x = ctx.eye(D)
        x.local[...] -= 2 * (np.arange(6) == 1)
        out = ctx.zeros(replace(D, shape=(7, 6)))[1:, :]
        how = {"out": out, "algo": "default"}
        with pb.plan(pb.matmul, ctx.eye(D), x, epilogue=pb.Epilogue("relu"), **how) as plan:
            assert np.array_equal(plan().gather(), np.maximum(x.gather(), 0))
            assert "relu is computed after the product: D is moved after the product" in str(plan.report())
        fused = pb.Epilogue("relu", fused=True)
        with pytest.raises(pb.UnsupportedError, match="relu cannot be fused: D is moved after the product"):
            pb.matmul(ctx.eye(D), x, epilogue=fused, **how)
    lib.assert_clean()
    lib.gpu.assert_clean()
