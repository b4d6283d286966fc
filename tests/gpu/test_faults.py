# SPDX-License-Identifier: Apache-2.0
"""Known faults of cuBLASMp: each is shown to be still there, and shown to be avoided."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.gpu.cublasmp import epilogues, faults
from tests.helpers.epilogues import check_epilogue
from tests.helpers.gpu.calls import check_random_call
from tests.helpers.gpu.products import check_local, failure, integers, place, poisoned, product_part
from tests.helpers.schemes import AG, RS


def column_major(shape, blocks, grid, ops, sources=((0, 0), (0, 0), (0, 0)), dtype="float64"):
    p = pb.MatmulProblem.gemm(*shape, grid, blocks, op_a=ops[0], op_b=ops[1], dtype=dtype, order="F")
    a, b, d = (replace(x, source=source) for x, source in zip((p.a, p.b, p.d), sources, strict=True))
    return replace(p, a=a, b=b, d=d)


ROW, COLUMN = pb.Grid(1, 2), pb.Grid(2, 1)
PROBLEMS = {
    "NT": [column_major((256, 192, 320), (32, 48, 64), grid, "NT") for grid in (ROW, COLUMN)],
    # What these read is left in memory by the products before: some are right, now and then.
    "TT": [
        column_major((m, n, k), (mb, nb, kb), grid, "TT", sources)
        for m, n, k, mb, nb, kb in ((121, 28, 149, 4, 32, 44), (83, 44, 64, 14, 61, 60), (54, 40, 12, 2, 10, 12),
                                    (40, 43, 122, 2, 28, 22), (53, 33, 37, 5, 50, 53), (139, 72, 80, 6, 18, 16))
        for grid, sources in ((COLUMN, ((0, 0), (0, 0), (0, 0))), (COLUMN, ((0, 0), (1, 0), (0, 0))),
                              (COLUMN, ((1, 0), (0, 0), (0, 0))))
    ],
    "shifted": [
        column_major((146, 88, 31), (10, 60, 31), ROW, "TN", ((0, 0), (0, 1), (0, 0))),
        column_major((32, 14, 29), (1, 58, 34), ROW, "TN", ((0, 1), (0, 0), (0, 1))),
    ],
    "T on a row": [
        column_major((m, n, k), (mb, nb, kb), ROW, "TN")
        for m, n, k, mb, nb, kb in ((256, 192, 320, 32, 48, 64), (121, 28, 149, 4, 32, 44), (139, 72, 80, 6, 18, 16),
                                    (40, 43, 122, 2, 28, 22), (146, 88, 131, 10, 60, 31), (83, 44, 64, 14, 61, 60))
    ],
}  # fmt: skip
GONE = ("T on a row",)
"""Faults that 0.9 and later versions do not have."""
OLD = {
    "TT": "some of these products never end",
    "shifted": "these products are right",
    "T on a row": "few random products are wrong, and none of these is known to be",
}
"""Why a fault is not shown with 0.7 and 0.8."""


def first_fault(ctx: pb.Context, check: Callable[..., Any], *args: Any, **how: Any) -> str:
    """Return what a check says on the first rank where it fails, or an empty string. Collective."""
    return next(filter(None, ctx.comm.allgather(failure(check, *args, **how))), "")


def faults_of(ctx: pb.Context, problems: list[pb.MatmulProblem], algo: str = "auto") -> list[str]:
    """Multiply each three times; return what is wrong with the results."""
    found = []
    for p in problems:
        values = {name: integers(getattr(p, name).shape, p.a.dtype, i) for i, name in enumerate("ab")}
        a, b = (place(ctx, values[name], getattr(p, name)) for name in "ab")
        for _ in range(3):
            out = poisoned(ctx, p.d)
            try:
                pb.matmul(a, b, out=out, op_a=p.op_a, op_b=p.op_b, algo=algo)
            except pb.StatusError as error:  # on every rank, as 0.7 and 0.8 do
                found.append(str(error))
                continue
            found.append(first_fault(ctx, check_local, ctx, out, product_part(ctx, p, values, 1, 0)))
    return [fault for fault in found if fault]


def needs_two(ctx: pb.Context) -> None:
    if ctx.size == 1:
        pytest.skip("these faults need two processes")


@pytest.mark.parametrize("algo", ["auto", "default"])
@pytest.mark.parametrize("fault", PROBLEMS)
def test_a_fault_is_avoided(ctx, fault, algo):
    """By another algorithm, or by moving operands where the library's is asked for."""
    needs_two(ctx)
    assert faults_of(ctx, PROBLEMS[fault], algo) == []


@pytest.mark.parametrize("fault", PROBLEMS)
def test_a_fault_is_there_without_the_guard(ctx, fault, monkeypatch):
    """When this fails, the library has been mended, or broken anew: the guard is for the versions that need it."""
    needs_two(ctx)
    if fault in OLD and ctx.engine.version < 900:
        pytest.skip(f"with 0.7 and 0.8 {OLD[fault]}")
    monkeypatch.setattr(faults, "reads_a_transposed", lambda *_: False)
    monkeypatch.setattr(faults, "reads_b_transposed", lambda _: False)
    monkeypatch.setattr(faults, "is_shifted", lambda _: False)
    assert (faults_of(ctx, PROBLEMS[fault], "default") == []) == (fault in GONE), (
        f"cuBLASMp {ctx.engine.version}"
    )


def test_c_and_d_of_other_alignment(ctx):
    """16-bit C on the 16-byte grid, D off it: a misaligned address, after which this process has no GPU."""
    d = pb.MatrixDescriptor((64 * ctx.size, 64), (64, 64), pb.Grid(ctx.size, 1), dtype="float16", order="F")
    values = integers(d.shape, d.dtype, 1, 1)
    c = place(ctx, values, d)
    a = pb.MatrixDescriptor((64 * ctx.size, 64), (64, 64), d.grid, dtype="float16", order="F")
    b = pb.MatrixDescriptor((64, 64), (64, 64), d.grid, dtype="float16", order="F")
    factors = integers(a.shape, a.dtype, 2, 1), integers(b.shape, b.dtype, 3, 1)
    parent = poisoned(ctx, replace(d, shape=(64 * ctx.size + 1, 64)))  # an odd leading dimension on rank 0
    out = parent[: d.shape[0], :]
    a, b = place(ctx, factors[0], a), place(ctx, factors[1], b)
    with pb.plan(pb.matmul, a, b, c, out=out, beta=1, algo="default") as plan:
        assert any("C is copied" in note for note in plan.report().notes) == (ctx.rank == 0)
        plan()
    p = pb.MatmulProblem(a.descriptor, b.descriptor, d, c=d)
    expected = product_part(ctx, p, {"a": factors[0], "b": factors[1], "c": values}, 1, 1)
    check_local(ctx, out, expected, tolerance=2.0**-7)


@pytest.mark.parametrize(("scheme", "kind"), [(AG, "gelu"), (AG, "dgelu aux"), (RS, "drelu aux bias_grad")])
def test_epilogues_of_float64(ctx, monkeypatch, scheme, kind):
    """What cuBLASMp computes to 8 digits, or leaves 0; when the last line fails, the library has been mended."""
    if scheme == RS:
        needs_two(ctx)
    make = {AG: pb.MatmulProblem.allgather_matmul, RS: pb.MatmulProblem.matmul_reduce_scatter}[scheme]
    p = make(192 * ctx.size, 128 * ctx.size, 256 * ctx.size, ctx.size, "N", "T", dtype="float64", order="C")
    rng = np.random.default_rng(61)
    for algo in ("auto", "default"):  # "auto" may take an algorithm that is not cuBLASMp's
        check_epilogue(ctx, rng, p, kind, algo=algo)
    monkeypatch.setattr(epilogues, "why_not_fused", lambda *_: "")
    assert first_fault(ctx, check_epilogue, ctx, rng, p, kind, algo="default"), (
        f"cuBLASMp {ctx.engine.version}"
    )


def test_syr2k_of_a_complex_alpha(ctx, monkeypatch):
    options = {"uplo": "L", "op_a": "N"}
    how = {"dtype": "complex128", "options": options, "sizes": (20, 20, 20), "layouts": "fits"}
    for algo, seed in itertools.product(("auto", "cublasmp"), range(4)):
        check_random_call(ctx, "syr2k", algo, seed, **how)  # right, or refused
    if ctx.engine.version < 1000:
        monkeypatch.setattr(faults, "level3_is_wrong", lambda *_: "")
        found = [
            first_fault(ctx, check_random_call, ctx, "syr2k", "cublasmp", seed, **how) for seed in range(4)
        ]
        assert any(found), f"cuBLASMp {ctx.engine.version}"
