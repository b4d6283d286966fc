# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism in 8 bits on GPUs that are played: scales, bytes, pieces in bfloat16; and graphs of plans."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers import float8
from tests.helpers.cases import refuses
from tests.helpers.copy_products import PRODUCTS
from tests.helpers.fakelt import MultiplyingLt
from tests.helpers.float8 import E4
from tests.helpers.fused_machines import Scaling
from tests.helpers.machine import context, machine
from tests.helpers.mpi import on_ranks
from tests.helpers.pairs import pairs
from tests.helpers.slow import in_turn, only_long
from tests.helpers.tensor_cases import FORMS, on_gpu, other_split
from tests.helpers.tensor_cases import Case as WideCase
from tests.helpers.tensor_float8 import TYPES, Case

WIDE = TYPES[:3]


@on_ranks(1, 2, *only_long(4), timeout=200)
def test_what_is_told_is_enough(comm: Any, path: str) -> None:
    rng = np.random.default_rng(81)
    p = comm.size
    with context(path, Scaling, comm=comm) as (ctx, lib):
        epilogues_of = (None, False), ("relu", True)
        for form, types, (activation, arrays) in pairs(FORMS, TYPES, epilogues_of):
            pieces = form == "matmul_allgather"
            eight = types not in WIDE
            pushed = eight and form == "matmul_allreduce"  # the library played here stores a sum as it is
            case = Case(ctx, rng, form, types, 16 * p, 32 * p, 48 * p, arrays=arrays, activation=activation)
            before = len(lib.of("Matmul"))
            how = {"algo": "push"} if pushed else {}
            case.check(case(**how), tolerance=2.0**-8)
            called = len(lib.of("Matmul")) > before
            assert called != (pieces or pushed), f"{form} {types} {activation}"
        for form, types in itertools.product(FORMS, WIDE):
            case = Case(ctx, rng, form, types, 16 * p, 32 * p, 48 * p, beta=-2.0, arrays=True)
            case.check(case(), tolerance=2.0**-8, case=f"{form} {types} with C")
        sizes = (16 * p + 1, 7 * p, 9 * p + 2), (1, 1, 1), (0, 3, 2), (3, 2, 0)
        for form, types, (t, n, k) in pairs(FORMS, TYPES, sizes):
            arrays = bool(rng.integers(2))
            case = Case(ctx, rng, form, types, t, n, k, arrays=arrays, split=other_split)
            how = {"comm_dtype": "float32"} if form == "matmul_reduce_scatter" else {}
            case.check(case(**how), tolerance=2.0**-8, case=f"{form} {types} {t}x{n}x{k}")
        for number, form in enumerate(FORMS):
            for types in in_turn(TYPES, keep=2, first=number + p // 2):
                case = Case(ctx, rng, form, types, 20, 24, 28, beta=1.0, activation="gelu", arrays=True)
                case.check(case(), tolerance=2.0**-7, case=f"{form} {types} uneven, gelu")
        for t in (16 * p, 16 * p + 1):
            case = Case(ctx, rng, "allgather_matmul", TYPES[1], t, 16, 32)
            y, gathered = case(return_gathered=True)
            same = np.array_equal(np.asarray(gathered), case.whole_x.view(np.uint8))
            case.check(y, tolerance=2.0**-8, case=f"gathered, {t}")
            assert same, f"gathered, {t}"


@on_ranks(1, 2)
def test_what_is_refused(comm: Any, path: str) -> None:
    """Pieces are no graphs; why the library was not asked is said."""
    rng = np.random.default_rng(82)
    p = comm.size
    with machine(path, Scaling, comm=comm), pb.Context(comm, engine="cublasmp") as ctx:
        for form in FORMS:
            case = Case(ctx, rng, form, TYPES[0], 16 * p + 8, 16 * p, 16 * p)
            with case.plan() as plan:
                pieces = [f"a CUDA graph: this plan cannot be recorded: {plan.report().path}"]
                refuses(ctx, pb.UnsupportedError, pieces, plan.graph)
                report = str(plan.report())
                said = "8-bit operands are multiplied in bfloat16" in report
                if form != "matmul_allgather":
                    said = said and ("expected multiples of 16" in report or "for equal shares" in report)
                assert said, f"{form} report: {report}"
        case = Case(ctx, rng, "matmul_allreduce", TYPES[3], 16, 16, 16 * p, activation="relu")
        fused = ["epilogue: relu bias cannot be fused", "by then an 8-bit D has been rounded"]
        refuses(ctx, pb.UnsupportedError, fused, lambda: case(algo="default"))
        case.check(case(), tolerance=2.0**-8, case="relu of a sum")
        case = WideCase(rng, comm, "matmul_allgather", "float32", 4, 6 * p, 8)
        on_gpu(case)
        with pb.plan(pb.matmul_allgather, case.local_x, case.local_w, ctx) as plan:
            refuses(ctx, pb.UnsupportedError, pieces, plan.graph)


@on_ranks(2)
def test_messages(comm: Any, path: str) -> None:
    """X travels in 8 bits and is widened where it arrives; partial sums in the result's type."""
    rng = np.random.default_rng(83)
    p = comm.size
    with context(path, Scaling, comm=comm) as (ctx, lib):
        for form, each in (("allgather_matmul", 5 * 32), ("matmul_reduce_scatter", 5 * 16 * 2)):
            case = Case(ctx, rng, form, TYPES[0], 5 * p, 16, 32)
            with case.plan() as plan:
                lib.gpu.events.clear()
                case.check(plan(), tolerance=2.0**-8)
                sent = {event[3] for event in lib.gpu.events if event[0] == "send"}
                assert sent == {each}, form


@pytest.fixture
def scaling(alone, stand_in):
    with machine(stand_in(1000), Scaling) as lib:
        yield lib
        lib.assert_clean()


def test_a_fused_bias_and_amax_after_it_are_those_of_each_run(scaling):
    rng = np.random.default_rng(85)
    with pb.Context(engine="cublasmp") as ctx:
        case = Case(ctx, rng, "allgather_matmul", TYPES[0], 16, 32, 48, activation="relu")
        with case.plan() as plan:
            assert any("amax is computed after the product" in note for note in plan.report().notes)
            for turn in (1, 2):
                other = Case(
                    ctx, rng, "allgather_matmul", TYPES[0], 16, 32, 48, activation="relu", arrays=turn == 2
                )
                y = plan(other.x, other.w, bias=other.arrays["bias"], scales=other.scales)
                other.check(y, tolerance=2.0**-8)
            with pytest.raises(pb.UnsupportedError, match="a CUDA graph: amax is computed after the product"):
                plan.graph()


def test_what_multiplies_nothing_has_an_amax(scaling):
    with pb.Context(engine="cublasmp") as ctx:
        case = Case(ctx, np.random.default_rng(90), "allgather_matmul", (E4, E4, E4), 16, 32, 48)
        for turn in range(2):
            case.amax[...] = np.nan
            case.how["alpha"], case.y = 0, 0 * case.y
            case.check(case(), turn)
        assert not scaling.of("Matmul")


@pytest.mark.parametrize("form", FORMS[:3])
def test_a_graph_is_one_call_recorded_once(lib, ctx, form):
    case = on_gpu(WideCase(np.random.default_rng(86), ctx.comm, form, "float32", 4, 6, 8))
    with pb.plan(form, case.local_x, case.local_w, ctx) as plan:
        y = plan()
        graph = plan.graph()
        names = [event[0] for event in lib.gpu.events]
        begin, end = names.index("capture begins"), names.index("capture ends")
        assert names[begin + 1 : end] == ["SetStream", "Matmul"]
        lib.clear()
        for _ in range(2):
            assert graph.replay() is y
        assert names[end + 1 :] == ["wait", "SetStream"]
        assert [event[0] for event in lib.gpu.events[len(names) :]] == ["graph launched"] * 2
        other = case.local_x.copy()
        mine = plan(other, out=y.copy())
        graph = plan.graph()  # of the arrays of the run before
        call = lib.of("Matmul")[-1]
        assert (call["b"], call["d"]) == (other.ctypes.data, mine.ctypes.data)
        assert graph.replay() is mine
        lib.workspace = (8192, 512)
        with pb.plan(form, case.local_x, case.local_w, ctx, alpha=2) as larger:
            larger()
        with pytest.raises(pb.ClosedError, match="the workspace has been replaced"):
            graph.replay()
    with pytest.raises(pb.ClosedError, match="this plan is closed"):
        plan.graph()


def test_rows_off_the_sixteen_bytes_are_left_to_another_algorithm(scaling):
    rng = np.random.default_rng(89)
    with pb.Context(engine="cublasmp") as ctx:
        for name, apart in (("x", 40), ("w", 40), ("out", 72)):
            case = Case(ctx, rng, "allgather_matmul", TYPES[0], 16, 32, 32)
            array, how = getattr(case, name, None), {}
            if name == "out":
                how["out"] = ctx.engine.empty((16, 32), pb.dtypes.as_dtype("bfloat16"), "C", 36)
            else:
                padded = ctx.engine.empty((array.shape[0], 32), array.dtype, "C", 40)
                padded[...] = array
                setattr(case, name, padded)
            with case.plan(**how) as plan:
                case.check(plan(), tolerance=2.0**-8)
                report = plan.report()
            assert report.algorithm == "push"
            assert f"{name}: rows are {apart} bytes apart, expected a multiple of 16" in str(report)


@on_ranks(2)
def test_before_ada(comm: Any, path: str) -> None:
    """GPUs without 8-bit products, if only that of one rank: "auto" computes in bfloat16, and names are refused."""
    rng = np.random.default_rng(84)
    p, capability = comm.size, "80" if comm.rank == comm.size - 1 else "90"
    words = ["8-bit floats need GPUs of compute capability 8.9 or above, found 8.0"]
    with machine(path, Scaling, comm=comm, capability=capability, lt=MultiplyingLt()) as lib:
        with pb.Context(comm, engine="cublasmp") as ctx:
            for form in FORMS:
                case = Case(ctx, rng, form, TYPES[0], 16 * p, 32 * p, 48 * p)
                case.check(case(), tolerance=2.0**-8, case=f"{form} auto")
                with case.plan() as plan:
                    assert plan.report().algorithm == "push", f"{form} auto"
                with case.plan(algo="push") as plan:
                    said = f"by messages: {words[0]}" in str(plan.report())
                    assert said, f"{form} push: {plan.report()}"
                for name in sorted(PRODUCTS[form].keys() - {"push", "one_kernel"}):
                    ranks = PRODUCTS[form][name].ranks
                    if ranks in (None, p):
                        refuses(ctx, pb.UnsupportedError, words, case, algo=name)
            problem = float8.problem("gemm", p, (E4, E4, "bfloat16"), "C")
            a, b = ctx.zeros(problem.a), ctx.zeros(problem.b)
            refuses(ctx, pb.UnsupportedError, words, pb.matmul, a, b, op_b="T", algo="push")
            with pb.plan(pb.matmul, a, b, op_b="T") as plan:
                assert plan.report().algorithm == "gathered", "matmul auto"
        assert lib.gpu.lt.calls, "cuBLASLt: is not asked"
        lib.assert_clean()
        lib.gpu.assert_clean()
