# SPDX-License-Identifier: Apache-2.0
"""The level-3 routines on GPUs against float64 NumPy, cuBLASMp's and those that "auto" takes.

PBLASMP_TRACE=1 says which call is under way; `-m slow` tries all options with all types and memory orders.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import cupy
import numpy as np
import pytest

import pblasmp as pb
from pblasmp.layout.level3_problem import ROUTINES
from tests.helpers.gpu.level3 import Case, cases, every_case, expected_of, one_case, values_of
from tests.helpers.gpu.moves import say
from tests.helpers.gpu.products import everywhere, integers, part_of, place, poisoned, wrong
from tests.helpers.slow import draws

COUNT = draws(3, long=25)  # of each routine, in layouts that fit and in any


def checked(ctx, calls, algo):
    """Make calls, each with a seed; fail with the first that are wrong. Collective."""
    faults = [fault for seed, case in calls if (fault := everywhere(ctx, one_case(ctx, case, seed, algo)))]
    assert not faults, f"{len(faults)} wrong:\n" + "\n".join(faults[:5])


@pytest.mark.parametrize("algo", ["auto", "cublasmp"])
@pytest.mark.parametrize("routine", ROUTINES)
def test_every_option(ctx, routine, algo):
    checked(ctx, enumerate(every_case(routine, ctx.size, 37, 8)), algo)


@pytest.mark.parametrize("algo", ["auto", "cublasmp"])
@pytest.mark.parametrize("mode", ["fits", "sources", "any"])
@pytest.mark.parametrize("routine", ROUTINES)
def test_random_calls(ctx, routine, mode, algo):
    checked(ctx, cases(routine, ctx.size, COUNT, 1000 * ctx.size, mode), algo)


@pytest.mark.parametrize("algo", ["auto", "cublasmp"])
@pytest.mark.parametrize("routine", ROUTINES)
def test_larger_ones(ctx, routine, algo):
    """Many blocks to a process, and several processes to a row."""
    chosen = (
        case for case in every_case(routine, ctx.size, 300, 24) if case.dtype in ("float64", "complex64")
    )
    checked(ctx, enumerate(itertools.islice(chosen, 0, None, draws(6, long=9))), algo)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("routine", ROUTINES)
def test_narrow_types_are_right_or_refused(ctx, routine, dtype):
    case = next(case for case in every_case(routine, ctx.size, 24, 8) if case.dtype == "float32")
    ends = {name: replace(end, parent=replace(end.parent, dtype=dtype)) for name, end in case.ends.items()}
    fault = ""
    try:
        fault = everywhere(ctx, one_case(ctx, replace(case, ends=ends, dtype=dtype), 1, "cublasmp"))
    except pb.UnsupportedError as error:
        say(ctx, f"{routine} {dtype}: {error}")
    except pb.StatusError as error:
        fault = "" if "NOT_SUPPORTED" in str(error) else str(error)
        say(ctx, f"{routine} {dtype}: {error}")
    assert fault == ""


@pytest.mark.parametrize("algo", ["cublasmp", "gathered", "panels", "full"])
def test_a_plan_is_run_again_on_another_stream_and_as_a_graph(ctx, algo):
    n, grid = 256, pb.Grid.squarest(ctx.size)
    d = pb.MatrixDescriptor((n, n), (32, 32), grid, dtype="float32")
    out = poisoned(ctx, d)
    zeros = place(ctx, np.zeros((n, n)), d)
    with pb.plan(pb.blas.syrk, zeros, uplo="U", out=out, algo=algo) as plan:
        a = plan._call._matrices["a"]
        assert a is not None
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
            fault = (
                ""
                if part is None or np.array_equal(got, part.astype(d.dtype), equal_nan=True)
                else f"run {turn}"
            )
            assert everywhere(ctx, fault) == ""
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
            close = part is None or np.allclose(got, part, rtol=0, atol=1e-9)
            assert everywhere(ctx, "" if close else f"run {turn}") == ""


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
    case: Case = next(every_case("trmm", ctx.size, 12, 4))
    values = values_of(case, 1)
    other = {**values, "b": values["b"] + 1}
    assert not np.array_equal(expected_of(case, values), expected_of(case, other))
    d = case.ends["d"].parent
    assert everywhere(ctx, wrong(ctx, place(ctx, values["b"], d), other["b"])) != ""
