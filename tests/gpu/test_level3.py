# SPDX-License-Identifier: Apache-2.0
"""The level-3 routines on GPUs against float64 NumPy, cuBLASMp's and those that "auto" takes.

PBLASMP_TRACE=1 says which call is under way; `-m slow` tries all options with all types and memory orders.
"""

import itertools
from contextlib import nullcontext
from dataclasses import replace

import cupy
import numpy as np
import pytest

import pblasmp as pb
from pblasmp.layout.level3_problem import ROUTINES
from tests.helpers.calls import legal_options
from tests.helpers.gpu.calls import call_job, check_random_call
from tests.helpers.gpu.products import integers, part_of, place, poisoned
from tests.helpers.slow import draws, in_turn

COUNT = draws(3, long=25)  # of each routine, in layouts that fit and in any


TYPES = "float64", "float32", "complex128", "complex64"


def checked(ctx, calls, routine, algo):
    """Make calls, given by seeds and what is not drawn. Collective."""
    for seed, how in calls:
        check_random_call(ctx, routine, algo, seed, **how)


def every_option(routine, sizes, dtypes, keep):
    """Calls with all options, in layouts that fit: types and memory orders take turns; in long forms, all."""
    for number in range(max(len(legal_options(routine, dtype)) for dtype in dtypes)):
        for dtype, order in in_turn(itertools.product(dtypes, "CF"), keep=keep, first=number):
            if number < len(options := legal_options(routine, dtype)):
                how = {"dtype": dtype, "options": options[number], "order": order}
                yield number, {**how, "sizes": sizes, "layouts": "sources"}


@pytest.mark.parametrize("algo", ["auto", "cublasmp"])
@pytest.mark.parametrize("routine", ROUTINES)
def test_every_option(ctx, routine, algo):
    checked(ctx, every_option(routine, (37, 34, 42), TYPES, 3), routine, algo)


@pytest.mark.parametrize("algo", ["auto", "cublasmp"])
@pytest.mark.parametrize("mode", ["fits", "sources", "any"])
@pytest.mark.parametrize("routine", ROUTINES)
def test_random_calls(ctx, routine, mode, algo):
    checked(ctx, ((seed, {"layouts": mode}) for seed in range(COUNT)), routine, algo)


@pytest.mark.parametrize("algo", ["auto", "cublasmp"])
@pytest.mark.parametrize("routine", ROUTINES)
def test_larger_ones(ctx, routine, algo):
    """Many blocks to a process, and several processes to a row."""
    chosen = every_option(routine, (300, 297, 305), ("float64", "complex64"), 2)
    checked(ctx, itertools.islice(chosen, 0, None, 6), routine, algo)


@pytest.mark.parametrize("sizes", [(600, 3, 5), (13, 600, 5)])
@pytest.mark.parametrize("algo", ["auto", "stationary"])
@pytest.mark.parametrize("routine", ["symm", "hemm", "trmm"])
def test_few_columns_or_rows(ctx, routine, algo, sizes):
    """A kernel of ours multiplies them if A is large, and if it is on the other side of B than the few."""
    checked(ctx, every_option(routine, sizes, TYPES, 2), routine, algo)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("routine", ROUTINES)
def test_narrow_types_are_right_or_refused(ctx, routine, dtype):
    how = {"dtype": dtype, "options": legal_options(routine)[0], "sizes": (24, 21, 29), "layouts": "fits"}
    refused = nullcontext() if routine == "geadd" else pytest.raises(pb.LayoutError, match="does not have")
    with refused:  # before it runs
        check_random_call(ctx, routine, "cublasmp", 1, **how)


@pytest.mark.parametrize("algo", ["cublasmp", "gathered", "panels", "full"])
def test_a_plan_is_run_again_on_another_stream_and_as_a_graph(ctx, algo):
    n, grid = 256, pb.Grid.squarest(ctx.size)
    d = pb.MatrixDescriptor((n, n), (32, 32), grid, dtype="float32")
    out = poisoned(ctx, d)
    a = place(ctx, np.zeros((n, n)), d)
    with pb.plan(pb.blas.syrk, a, uplo="U", out=out, algo=algo) as plan:
        graph = plan.graph()
        for turn, run in enumerate((plan, plan, graph.replay, plan, plan)):
            values = integers(d.shape, d.dtype, turn)
            part = part_of(ctx, values, d)
            if part is not None:
                ctx.engine.from_host(a.local, part.astype(d.dtype))
            cupy.cuda.runtime.deviceSynchronize()
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                run()
            stream.synchronize()
            expected = np.where(np.triu(np.ones((n, n), bool)), values @ values.T, np.nan)
            got, part = ctx.engine.to_host(out.local), part_of(ctx, expected, d)
            if part is not None:
                np.testing.assert_array_equal(got, part.astype(d.dtype), f"run {turn}")
        assert "cublasMpSyrk" in str(plan.report()) or algo != "cublasmp" or "sing" in plan.report().path


@pytest.mark.parametrize("algo", ["gathered", "panels"])
@pytest.mark.parametrize(("side", "order"), [("L", "F"), ("R", "C")])
def test_a_solve_is_run_again_and_as_a_graph(ctx, algo, side, order):
    n, grid = 256, pb.Grid.squarest(ctx.size)
    d = pb.MatrixDescriptor((n, n), (32, 32), grid, dtype="float64", order=order)
    triangle = np.tril(integers((n, n), d.dtype, 9), -1) / n + 2 * np.eye(n)
    a, b, out = place(ctx, triangle, d), place(ctx, np.zeros((n, n)), d), poisoned(ctx, d)
    with pb.plan(pb.blas.trsm, a, b, side=side, uplo="L", out=out, algo=algo) as plan:
        graph = plan.graph()
        for turn, run in enumerate((plan, plan, plan, graph.replay, plan)):
            x = integers(d.shape, d.dtype, turn)
            part = part_of(ctx, triangle @ x if side == "L" else x @ triangle, d)
            if part is not None:
                ctx.engine.from_host(b.local, part)
            run()
            got, part = ctx.engine.to_host(out.local), part_of(ctx, x, d)
            if part is not None:
                np.testing.assert_allclose(got, part, rtol=0, atol=1e-9, err_msg=f"run {turn}")


def test_a_factorization_by_blocks(ctx):
    """Cholesky of an SPD matrix from sub-matrices, syrk, gemm and trsm, checked by its residual."""
    n, nb, grid = 320, 32, pb.Grid.squarest(ctx.size)
    d = pb.MatrixDescriptor((n, n), (nb, nb), grid)
    half = integers(d.shape, d.dtype, 3)
    spd = half @ half.T + n * np.eye(n)
    a = place(ctx, spd, d)
    for at in range(0, n, nb):
        here, rest = slice(at, at + nb), slice(at + nb, n)
        block = a[here, here]
        factor = np.linalg.cholesky(block.allgather())
        pb.DistributedMatrix.move_to(place(ctx, factor, replace(block.descriptor, ld=None)), block)
        if at + nb < n:
            pb.blas.trsm(block, a[rest, here], side="R", uplo="L", op_a="T", out=a[rest, here])
            pb.blas.syrk(a[rest, here], a[rest, rest], uplo="L", alpha=-1, beta=1, out=a[rest, rest])
    lower = np.tril(a.allgather())
    assert np.abs(lower @ lower.T - spd).max() < 1e-10 * np.abs(spd).max()


def test_the_reference_can_fail(ctx):
    job = call_job(ctx, np.random.default_rng(2), "trmm", layouts="fits", sizes=(12, 9, 17))
    found = ctx.engine.to_host(job.run(0))
    job.close()
    wrong = ctx.comm.allgather(job.wrong(found, 1))
    job.check(found, 0)
    assert any(wrong)
