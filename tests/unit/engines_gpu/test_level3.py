# SPDX-License-Identifier: Apache-2.0
"""The level-3 routines of cuBLASMp: the arguments of each call, against a library that enforces its contracts.

"auto" takes our own algorithms: what cuBLASMp is told is asked for by name.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.bindings import FUNCTIONS, Status
from pblasmp.engines.gpu.cublasmp.level3_calls import nearest_level3
from pblasmp.engines.gpu.gpu_engine import METHODS
from pblasmp.engines.gpu.kernels.factor import FactorKernels
from pblasmp.layout import Level3Problem
from pblasmp.layout.level3_problem import ROUTINES
from tests.helpers.failing_calls import calls_that_failed
from tests.helpers.gpu.calls import check_random_call
from tests.helpers.machine import Multiplying, context, machine
from tests.helpers.mpi import run_mpi
from tests.helpers.pairs import pairs
from tests.helpers.slow import draws, only_long

SQUARE = pb.MatrixDescriptor((4, 4), (2, 2), pb.Grid(1, 1), dtype="complex64", order="F")
OF_CUBLASMP = [name for name in ROUTINES if f"cublasMp{name.capitalize()}" in FUNCTIONS]


def test_a_routine_that_cublasmp_lacks_is_left_to_our_algorithms(monkeypatch):
    """A new row of the table of routines needs nothing of the GPU engine."""
    monkeypatch.setitem(ROUTINES, "syrky", ROUTINES["syrkx"])
    d = pb.MatrixDescriptor((8, 8), (2, 2), pb.Grid(1, 1))
    row = next(row for row in METHODS if row.name == "cublasmp")
    served = [row.serves(Level3Problem(name, d, d, d)) for name in ("syrkx", "syrky")]
    assert served == [True, False]


def random_calls(comm: Any, path: str, version: int, routines: list[str], count: int) -> Any:
    with machine(path, Multiplying, comm=comm) as lib:
        lib.version = version
        with pb.Context(comm, engine="cublasmp") as ctx:
            modes, algorithms = ("fits", "sources", "any"), ("auto", "cublasmp")
            for routine, mode, algo in pairs(routines, modes, algorithms):
                for seed in range(count):
                    check_random_call(ctx, routine, algo, seed, layouts=mode)
        lib.assert_clean()
        lib.gpu.assert_clean()


@pytest.mark.parametrize(("version", "ranks"), [(1000, 4), *only_long((1000, 2)), (900, 2)])
def test_random_calls(stand_in, version, ranks):
    how = {"routines": OF_CUBLASMP, "count": draws(1, long=3)}
    run_mpi(random_calls, ranks, path=stand_in(version), version=version, **how)


def taken(routine: str) -> str:
    """Return what "auto" takes of small matrices."""
    traits = ROUTINES[routine]
    if traits.shape == "added":
        return "moved"
    return "full" if (traits.shape == "sided" and not traits.triangular) or traits.swept_twice else "gathered"


@pytest.mark.parametrize("routine", OF_CUBLASMP)
def test_auto_takes_ours_in_layouts_that_cublasmp_takes_too(ctx, lib, routine):
    """They were faster on H200; by cuBLASMp's routines only where they are asked for."""
    expected = taken(routine)
    problem = Level3Problem(routine, **dict.fromkeys((*ROUTINES[routine].operands, "d"), SQUARE))
    verdicts = pb.algorithms(problem, ctx)
    assert [name for name, verdict in verdicts.items() if verdict.taken] == [expected]
    assert str(verdicts["cublasmp"]) == f"applies: slower than {expected} by rule"
    with pb.plan(routine, **{x: ctx.eye(SQUARE) for x in ROUTINES[routine].operands}) as plan:
        assert plan.report().algorithm == expected
        plan()
    assert not lib.of(routine.capitalize())
    assert expected == "full" or not lib.calls


def test_what_only_cublasmp_computes_is_left_to_it(ctx):
    narrow = replace(SQUARE, dtype="float16")
    verdicts = pb.algorithms(Level3Problem("geadd", narrow, narrow, c=narrow), ctx)
    assert [name for name, verdict in verdicts.items() if verdict.taken] == ["cublasmp"]


NB, M, N, K = 2, 4, 6, 8


def call(routine: str, given: dict[str, Any], flags: dict[str, str], **how: Any) -> Any:
    """Plan a call of cuBLASMp that writes where its input is, so that nothing is copied."""
    out = how.pop("out", given["d"])
    operands = {name: given[name] for name in ROUTINES[routine].operands}
    return pb.plan(getattr(pb.blas, routine), **operands, **flags, **how, out=out, algo="cublasmp")


@pytest.mark.parametrize(
    ("routine", "start", "of_c_order", "expected"),
    [
        (pb.blas.trsm, "", "", ["B"]),  # the right-hand sides, to the result
        (pb.blas.trsm, "b", "", []),
        (pb.blas.trmm, "", "", []),
        (pb.blas.trmm, "b", "", ["B"]),  # from where the result goes
        (pb.blas.trmm, "", "b", ["B"]),
        (pb.blas.symm, "", "", ["C"]),
        (pb.blas.symm, "c", "", []),
        (pb.blas.hemm, "c", "a", ["A"]),  # conjugated
        (pb.blas.syrk, "", "", ["C"]),
        (pb.blas.syrk, "c", "a", []),
        (pb.blas.herk, "c", "a", ["A"]),
        (pb.blas.her2k, "c", "ab", ["A", "B"]),
        (pb.blas.syr2k, "c", "b", ["B"]),
        (pb.blas.geadd, "", "c", ["C"]),
        (pb.blas.tradd, "c", "a", []),
    ],
)  # fmt: skip
def test_copies_are_those_of_the_report(ctx, lib, routine, start, of_c_order, expected):
    traits = ROUTINES[routine.__name__]
    given = {
        name: ctx.empty(replace(SQUARE, order="C" if name in of_c_order else "F")) for name in traits.operands
    }
    out = given[start] if start else ctx.empty(SQUARE)
    how = {"beta": 1} if "c" in traits.operands else {}
    del lib.gpu.allocations[:], lib.gpu.copies[:]
    with pb.plan(routine, **given, **how, out=out, algo="cublasmp") as plan:
        temporaries = len(lib.gpu.allocations)
        report = plan.report()
        assert sorted(note.partition(" ")[0] for note in report.notes if "is copied" in note) == expected
        assert report.copied_bytes == len(expected) * out.local.nbytes
        assert not report.moved
        del lib.gpu.copies[:]
        for turn in (1, 2):
            plan()
            # what a solve or a sum starts from goes to the result without a temporary, a triangle by its mask
            assert lib.gpu.copies == (["copyto"] if traits.triangle == "d" and "C" in expected else
                                      ["conjugate" if routine.__name__.startswith("he") else "positive"]
                                      * temporaries) * turn  # fmt: skip


def test_a_solve_begins_inside_a_block(ctx, lib):
    """Which trsm takes: of matrices in whole blocks, from where they begin."""
    parents = [ctx.empty(replace(SQUARE, shape=(9, 9), ld=9 + i)) for i in range(2)]
    a, b = (x[3:7, 3:7] for x in parents)
    with pb.plan(pb.blas.trsm, a, b, out=b, algo="cublasmp") as plan:
        plan()
        assert not plan.report().moved
        (told,) = lib.of("Trsm")
    assert [told[i] for i in ("ia", "ja", "ib", "jb")] == [2] * 4
    assert [told[x] for x in "ab"] == [x.local[2:, 2:].ctypes.data for x in parents]
    made = [lib.made[told[f"desc{x}"]] for x in "AB"]
    assert [(desc["m"], desc["n"], desc["lld"]) for desc in made] == [(5, 5, 9), (5, 5, 10)]


def test_a_solve_in_memory_without_room_for_its_first_block(alone, stand_in):
    """The library counts the rows before the first one: a temporary has room for them."""
    d = replace(SQUARE, lead=(1, 1))
    with context(stand_in(1000), Multiplying) as (ctx, lib):
        a, b = ctx.empty(d), ctx.empty(d)
        a.local[...] = 2 * np.eye(4)
        b.local[...] = values = np.arange(16.0).reshape(4, 4)
        pb.blas.trsm(a, b, out=b, algo="cublasmp")
        assert np.array_equal(b.local, values / 2)
        assert [lib.made[lib.of("Trsm")[0][f"desc{x}"]]["lld"] for x in "AB"] == [5, 5]
    lib.assert_clean()


@pytest.mark.parametrize(
    ("routine", "layouts", "moved", "why"),
    [
        (pb.blas.trsm, {"a": {"lead": (1, 0)}}, "", ""),
        (pb.blas.trmm, {"a": {"lead": (1, 0)}}, "a", "A is moved: cublasMpTrmm needs it to start at a block boundary"),
        (pb.blas.symm, {"a": {"block": (2, 3)}}, "a", "A is moved: cublasMpSymm needs it in other blocks"),
        (pb.blas.trmm, {"a": {"grid": pb.Grid(2, 1)}}, "a", "A is moved: cublasMpTrmm needs it on the result's"),
        (pb.blas.trsm, {"b": {"block": (3, 3)}}, "b", "B is moved: it must have the result's layout"),
        (pb.blas.syrk, {"d": {"block": (2, 3)}}, "d", "the result is moved: cublasMpSyrk needs it in other blocks"),
        (pb.blas.syr2k, {"b": {"block": (2, 3)}}, "b", "B is moved: cublasMpSyr2k needs it in other blocks"),
        (pb.blas.geadd, {"a": {"block": (2, 3)}}, "a", "A is moved: cublasMpGeadd needs it in other blocks"),
        (pb.blas.tradd, {x: {"block": (2, 3)} for x in "acd"}, "acd", "needs it in other blocks"),
    ],
)  # fmt: skip
def test_what_is_moved(routine, layouts, moved, why):
    """Pure: layouts that cuBLASMp does not take, which it does, and why."""
    name = routine.__name__
    own = {x: replace(SQUARE, grid=pb.Grid(1, 2), **layouts.get(x, {})) if "grid" not in layouts.get(x, {})
           else replace(SQUARE, **layouts[x]) for x in (*ROUTINES[name].operands, "d")}  # fmt: skip
    for problem in (Level3Problem(name, **own), Level3Problem(name, **{x: d.T for x, d in own.items()})):
        mended, reasons = nearest_level3(problem, 1000)
        changed = "".join(x for x in own if getattr(mended, x) != getattr(problem, x))
        assert changed in (moved, moved.replace("c", ""))  # C follows the result where the plan is made
        assert why in "; ".join(reasons)
        assert bool(reasons) == bool(moved)
        assert nearest_level3(mended, 1000) == (mended, ())


def test_sums_that_may_hang_move_no_data():
    """Pure: A of a sum over several processes lies where the result does, and the call has no transpose."""
    for routine, order, op in itertools.product(("geadd", "tradd"), ("FF", "FC", "CF", "CC"), "NTC"):
        a, d = (pb.MatrixDescriptor((8, 8), (2, 2), pb.Grid(2, 1), (1, 0), "complex64", x) for x in order)
        problem = Level3Problem(routine, a, d, op_a=op)
        mended, reasons = nearest_level3(problem, 901)
        form = mended.column_major()
        assert form.problem.op_a == "N"
        assert form.problem.a.same_places(form.problem.d)
        assert mended.d == d
        assert len(reasons) == (mended.a != a) == (order[0] != order[1] or op != "N")
        one = Level3Problem(routine, replace(a, grid=pb.Grid(1, 1), source=(0, 0)),
                            replace(d, grid=pb.Grid(1, 1), source=(0, 0)), op_a=op)  # fmt: skip
        assert nearest_level3(one, 901) == (one, ())
    assert "A is moved to the result's layout: cublasMpTradd may hang if it moves data" in reasons
    turned = Level3Problem("geadd", d, d, op_a="T")
    assert nearest_level3(turned, 1000) == (turned, ())


def test_only_a_named_algorithm_moves_operands(ctx, lib):
    a = ctx.empty(replace(SQUARE, block=(2, 3)))
    b = ctx.empty(SQUARE)
    with pb.plan(pb.blas.trmm, a, b) as plan:
        assert (plan.report().algorithm, plan.report().moved) == ("gathered", ())
    with pb.plan(pb.blas.trmm, a, b, algo="cublasmp") as plan:
        (line,) = plan.report().moved
        assert line.startswith("a is moved to 4x4 complex64 in blocks of 2x2")


NEWER = ("symm", "hemm", "trmm", "herk", "syr2k", "her2k", "syrkx", "herkx")


@pytest.mark.parametrize("version", [500, 800, 900])
def test_versions_that_lack_a_routine(alone, stand_in, version):
    with context(stand_in(version)) as (ctx, lib):
        for routine in OF_CUBLASMP:
            operands = {x: ctx.empty(SQUARE) for x in ROUTINES[routine].operands}
            if version < 900 and routine in NEWER:
                expected = (
                    rf"{routine.capitalize()} needs cuBLASMp 0\.9\.0 or newer, found 0\.{version // 100}\.0"
                )
                with pytest.raises(pb.UnsupportedError, match=expected):
                    getattr(pb.blas, routine)(**operands, algo="cublasmp")
                with pb.plan(routine, **operands) as plan:  # by another algorithm
                    assert plan.report().algorithm == taken(routine)
                own = dict.fromkeys((*operands, "d"), SQUARE)
                verdict = pb.algorithms(Level3Problem(routine, **own), ctx)["cublasmp"]
                assert not verdict
                assert expected.replace("\\", "") in verdict.why
            else:
                getattr(pb.blas, routine)(**operands, algo="cublasmp")
                assert len(lib.of(routine.capitalize())) == 1


def test_what_is_refused(ctx):
    a, b = ctx.empty(SQUARE), ctx.empty(SQUARE)
    with pytest.raises(pb.UnsupportedError, match="algo 'shared': GPUs share no memory"):
        pb.blas.trsm(a, b, algo="shared")
    names = "'auto', 'cublasmp', 'shared', 'gathered', 'panels', 'stationary'"
    with pytest.raises(
        pb.UnsupportedError, match=f"algo: the cublasmp engine has {names} here, got 'default'"
    ):
        pb.blas.trsm(a, b, algo="default")


@pytest.mark.parametrize("version", [900, 1000])
def test_a_fault_of_syr2k_is_refused(alone, stand_in, version):
    """That of 0.9 takes a complex alpha for its conjugate in one of its products."""
    with machine(stand_in(version), Multiplying), pb.Context(engine="cublasmp") as ctx:
        a, b, d = (ctx.zeros(SQUARE) for _ in range(3))
        pb.blas.syr2k(a, b, alpha=2, out=d, algo="cublasmp")
        pb.blas.her2k(a, b, alpha=2j, out=d, algo="cublasmp")
        if version == 1000:
            pb.blas.syr2k(a, b, alpha=2j, out=d, algo="cublasmp")
            return
        with pytest.raises(
            pb.UnsupportedError, match=r"Syr2k of cuBLASMp 0\.9\.0 is wrong for a complex alpha"
        ):
            pb.blas.syr2k(a, b, alpha=2j, out=d, algo="cublasmp")
        with pb.plan(pb.blas.syr2k, a, b, alpha=2j, out=d) as plan:  # by another algorithm
            assert plan.report().algorithm == "full"


@pytest.mark.parametrize("routine", ["trsm", "trmm", "symm", "syrk", "syr2k", "syrkx", "tradd"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_types_are_refused_before_they_run(ctx, lib, routine, dtype):
    """cuBLASMp refuses them on some ranks only, which would break the context."""
    a, b = (ctx.zeros(pb.MatrixDescriptor((8, 8), (8, 8), pb.Grid(1, 1), dtype=dtype)) for _ in range(2))
    function, operands = getattr(pb.blas, routine), (a, b)[: len(ROUTINES[routine].required)]
    before = len(lib.calls)
    with pytest.raises(pb.LayoutError, match=f"dtype is {dtype}, which {routine} does not have"):
        function(*operands, algo="cublasmp")
    assert len(lib.calls) == before
    assert pb.algorithms(pb.blas.geadd, a, b)["cublasmp"]


@pytest.mark.parametrize("side", "LR")
@pytest.mark.parametrize(("columns", "expected"), [(15, "gathered"), (16, "full"), (300, "full")])
def test_a_matrix_is_not_filled_for_a_few_vectors(ctx, columns, expected, side):
    square, *shape = (256, 256), *((256, columns) if side == "L" else (columns, 256))
    a, b = (
        ctx.zeros(pb.MatrixDescriptor(x, (64, 64), pb.Grid(1, 1), dtype="float32"))
        for x in (square, tuple(shape))
    )
    with pb.plan(pb.blas.symm, a, b, side=side) as plan:
        assert plan.report().algorithm == expected


@pytest.mark.parametrize(("routine", "parts"), [("symm", 2), ("hemm", 2), ("trmm", 1)])
@pytest.mark.parametrize(("columns", "by_kernel"), [(1, True), (3, True), (4, True), (5, False)])
def test_few_columns_take_one_kernel_for_each_part(ctx, routine, parts, columns, by_kernel):
    """It reads what counts, and neither the other triangle nor imaginary parts of a Hermitian diagonal."""
    rng = np.random.default_rng(columns)
    square, shape = ((600, 600), (600, columns))
    a, b = (
        ctx.zeros(pb.MatrixDescriptor(x, (64, 64), pb.Grid(1, 1), dtype="complex64")) for x in (square, shape)
    )
    values = (rng.integers(-3, 4, square) + 1j * rng.integers(-3, 4, square)).astype("complex64")
    upper = np.triu(values)
    whole = upper if routine == "trmm" else upper + (upper.T if routine == "symm" else upper.conj().T)
    if routine != "trmm":
        np.fill_diagonal(whole, values.diagonal() if routine == "symm" else values.diagonal().real)
    a.local[...] = np.where(np.tri(600, k=-1), np.nan, values)
    b.local[...] = rng.integers(-3, 4, shape)
    with mock.patch.object(FactorKernels, "part", autospec=True, side_effect=FactorKernels.part) as part:
        found = getattr(pb.blas, routine)(a, b, uplo="U", alpha=2)
    assert np.array_equal(found.local, 2 * (whole @ b.local))
    assert part.call_count == (parts if by_kernel else 0)


@pytest.mark.parametrize("order", "CF")
def test_what_needs_no_computing_calls_nothing(ctx, lib, order):
    d = replace(SQUARE, order=order)
    a, c = ctx.empty(d), ctx.empty(d)
    c.local[...] = np.arange(16).reshape(4, 4) * (1 + 1j)
    outcome = pb.blas.herk(a, c, alpha=0, beta=2, algo="cublasmp").local
    expected = np.where(np.tri(4), 2 * c.local, c.local)
    np.fill_diagonal(expected, 2 * c.local.diagonal().real)
    assert np.array_equal(outcome, expected)
    assert np.all(pb.blas.trsm(a, a, alpha=0, algo="cublasmp").local == 0)
    none = ctx.empty(replace(d, shape=(4, 0)))
    assert np.array_equal(pb.blas.syrk(none, c, beta=1, uplo="U", algo="cublasmp").local, c.local)
    assert np.array_equal(pb.blas.trsm(a, none, algo="cublasmp").local, none.local)
    assert not lib.calls
    with (
        pb.plan(pb.blas.herk, a, c, alpha=0, out=c, algo="cublasmp") as plan,
        pytest.raises(
            pb.UnsupportedError, match="this plan cannot be recorded: D = beta C: there is nothing to compute"
        ),
    ):
        plan.graph()


LIFE = [
    "GetVersion", "Create", "GridCreate",
    *["MatrixDescriptorCreate"] * 2, "Trsm_bufferSize", "synchronize", "window", "BufferRegister", "pinned",
    "LoggerOpenFile", "LoggerSetLevel", "LoggerSetCallback", "Trsm", "LoggerSetCallback", "LoggerSetLevel",
    *["MatrixDescriptorDestroy"] * 2,
    *["MatrixDescriptorCreate"] * 3, "Her2k_bufferSize",
    "LoggerOpenFile", "LoggerSetLevel", "LoggerSetCallback", "Her2k", "LoggerSetCallback", "LoggerSetLevel",
    "wait", "SetStream", "Her2k", "wait", *["MatrixDescriptorDestroy"] * 3,
    "synchronize", "BufferDeregister", "window released", "GridDestroy", "Destroy",
    "synchronize", "cuBLAS released", "communicator released",
]  # fmt: skip


def life(_: Any) -> None:
    ctx = pb.Context(engine="cublasmp")
    try:
        a, b = ctx.empty(SQUARE), ctx.empty(SQUARE)
        pb.blas.trsm(a, b, algo="cublasmp")
        with pb.plan(pb.blas.her2k, a, b, algo="cublasmp") as plan:
            plan()
            with sys.modules["cupy"].cuda.Stream():
                plan()
    finally:
        ctx.close()


def test_the_order_of_calls(lib):
    life(lib)
    assert [event[0] for event in lib.gpu.events] == LIFE


def test_every_call_failing(alone, stand_in):
    assert calls_that_failed(life, stand_in(1000), len(Status) - 1)
