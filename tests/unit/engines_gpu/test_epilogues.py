# SPDX-License-Identifier: Apache-2.0
"""Epilogues on GPUs: the arguments of the library, that they suffice to compute them, and what CuPy does instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.bindings import DataType, MatmulAttribute, MatmulEpilogue, ResultScheme
from tests.helpers import epilogues
from tests.helpers.fused_machines import Following
from tests.helpers.machine import Witness, context
from tests.helpers.mpi import on_ranks
from tests.helpers.pairs import pairs
from tests.helpers.schemes import AG, AR, MAKERS, RS
from tests.helpers.slow import only_long

KINDS = epilogues.KINDS
A = MatmulAttribute


def problem(scheme: str, size: int, order: str, dtype: str, ops: str) -> pb.MatmulProblem:
    if scheme == "gemm":
        return pb.MatmulProblem.gemm(
            21, 18, 10, pb.Grid.squarest(size), (4, 3), op_a=ops[0], op_b=ops[1], dtype=dtype, order=order
        )
    ops = ("TN" if order == "F" else "NT") if scheme == AR else ops
    return MAKERS[scheme](10 * size, 9 * size, 4 * size, size, *ops, dtype=dtype, order=order)


@on_ranks(1, *only_long(2), 4, timeout=240)
def test_what_is_told_is_enough(comm: Any, path: str) -> None:
    rng = np.random.default_rng(81)
    with context(path, Following, comm=comm) as (ctx, _):
        for scheme, kind, order, dtype in pairs(
            ("gemm", *MAKERS), KINDS, "CF", ("float64", "float32", "bfloat16")
        ):
            ops = ("NN", "TN", "NT", "TT")[int(rng.integers(4))]
            p = problem(scheme, ctx.size, order, dtype, ops)
            reports: list[Any] = []
            algo = "default" if scheme == "gemm" else "auto"  # which may take another algorithm
            epilogues.check_epilogue(ctx, rng, p, kind, reports=reports, algo=algo)
            fused = scheme in (AG, RS) or (scheme == "gemm" and ctx.size == 1)
            lacking = "gelu" in kind or (scheme == RS and kind.endswith("bias_grad"))
            fused = fused and not (dtype == "float64" and lacking)
            if "bias_grad_" in kind:  # cuBLASLt sums a column-major A that is not transposed, a B that is
                sums_a, form = (kind == "bias_grad_a") != (order == "C"), p.column_major()
                fused = fused and (form.op_a == "N" if sums_a else form.op_b != "N")
            told = any("is computed after the product" in note for note in reports[0].notes)
            assert told != fused, f"{scheme}: {kind} {order} {dtype} {ops}: {reports[0]}"


def asked(
    ctx: pb.Context, lib: Witness, epilogue: Any, order: str = "C", ops: str = "NN"
) -> dict[MatmulAttribute, int]:
    """The attributes that are set for an epilogue, but for the ops. ``epilogue`` is made by a function of D."""
    how = {"op_a": ops[0], "op_b": ops[1]}
    p = pb.MatmulProblem.gemm(24, 40, 16, pb.Grid(1, 1), 64, dtype="float16", order=order, **how)
    a, b, d = (ctx.empty(x) for x in (p.a, p.b, p.d))
    with pb.plan(pb.matmul, a, b, out=d, epilogue=epilogue(p), **how):
        stored = lib.attributes(lib.of("Matmul_bufferSize")[-1]["matmulDesc"])
    return {name: value for name, value in stored.items() if not name.name.startswith("TRANS")}


def vector(ctx: pb.Context, length: int) -> Any:
    return ctx.engine.empty((1, length), np.dtype(np.float16), "C", length)[0]


@pytest.mark.parametrize("order", "CF")
def test_every_attribute(ctx, lib, order):
    half, full = DataType.R_16F, ResultScheme.FULL
    long, across = (40, 24) if order == "C" else (24, 40)
    padded = 40 if order == "C" else 24
    v, r, c = (vector(ctx, length) for length in (long, 24, 40))
    d = pb.MatmulProblem.gemm(24, 40, 16, pb.Grid(1, 1), 64, dtype="float16", order=order).d
    mask, z = ctx.empty_aux(d, "relu"), ctx.empty_aux(d, "gelu")
    assert mask.nbytes == across * 16
    at = lambda x: x.ctypes.data  # noqa: E731
    bias = {A.BIAS_POINTER: at(v), A.BIAS_DATA_TYPE: half}
    bits = {A.EPILOGUE_AUX_POINTER: at(mask), A.EPILOGUE_AUX_LD: 128}
    same = {A.EPILOGUE_AUX_POINTER: at(z), A.EPILOGUE_AUX_LD: padded, A.EPILOGUE_AUX_DATA_TYPE: half}
    sums = {A.BIAS_RESULT_SCHEME: full}
    of_a, of_b = ("BGRADB", "BGRADA") if order == "C" else ("BGRADA", "BGRADB")
    for name, epilogue, expected in (
        ("BIAS", pb.Epilogue(bias=v), bias),
        ("RELU", pb.Epilogue("relu"), {}),
        ("RELU_BIAS", pb.Epilogue("relu", bias=v), bias),
        ("RELU_AUX", pb.Epilogue("relu", aux=mask), bits),
        ("RELU_AUX_BIAS", pb.Epilogue("relu", bias=v, aux=mask), bias | bits),
        ("GELU", pb.Epilogue("gelu", fused=True), {}),
        ("GELU_BIAS", pb.Epilogue("gelu", bias=v), bias),
        ("GELU_AUX", pb.Epilogue("gelu", aux=z), same),
        ("GELU_AUX_BIAS", pb.Epilogue("gelu", bias=v, aux=z), bias | same),
        ("DRELU", pb.Epilogue("drelu", aux=mask), bits),
        ("DRELU_BGRAD", pb.Epilogue("drelu", aux=mask, bias_grad=v), bias | bits | sums),
        ("DGELU", pb.Epilogue("dgelu", aux=z), same),
        ("DGELU_BGRAD", pb.Epilogue("dgelu", aux=z, bias_grad=v), bias | same | sums),
        (of_a, pb.Epilogue(bias_grad_a=r), {A.BIAS_POINTER: at(r), A.BIAS_DATA_TYPE: half} | sums),
        (of_b, pb.Epilogue(bias_grad_b=c), {A.BIAS_POINTER: at(c), A.BIAS_DATA_TYPE: half} | sums),
    ):
        ops = ("TN" if order == "C" else "NT") if name.startswith("BGRAD") else "NN"
        got = asked(ctx, lib, lambda p, epilogue=epilogue: epilogue, order, ops)
        assert got == {A.EPILOGUE: MatmulEpilogue[name]} | expected, name


def test_an_auxiliary_array_must_be_aligned(ctx, lib):
    flat = ctx.engine.empty((1, 24 * 40 + 8), np.dtype(np.float16), "C", 24 * 40 + 8)[0]
    start = (-flat.ctypes.data // 2) % 8
    aligned, odd = (flat[at : at + 24 * 40].reshape(24, 40) for at in (start, (start + 1) % 8))
    asked(ctx, lib, lambda p: pb.Epilogue("gelu", aux=aligned))
    with pytest.raises(
        pb.ArgumentError, match=r"epilogue: aux: starts at 0x.*, expected a multiple of 16 bytes"
    ):
        asked(ctx, lib, lambda p: pb.Epilogue("gelu", aux=odd))


VERSIONS = {500: "0.5.0", 700: "0.7.0", 800: "0.8.0", 801: "0.8.1", 1000: "0.10.0"}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_each_version_computes_with_the_product(alone, stand_in, version):
    rng = np.random.default_rng(82)
    with context(stand_in(version), Following) as (ctx, lib):
        for scheme, kind in (
            case[1:] for case in pairs(VERSIONS, ("gemm", AG, RS), KINDS) if case[0] == version
        ):
            p = problem(scheme, 1, "C", "float32", "TN" if "bias_grad_" in kind else "NT")
            since = 801 if "drelu" in kind else 700
            if scheme == RS and "bias_grad" in kind:
                since = max(since, 800)
            reports: list[Any] = []
            epilogues.check_epilogue(ctx, rng, p, kind, reports=reports)
            late = f"is computed after the product: cuBLASMp has it since {VERSIONS[since]}, found {VERSIONS[version]}"
            assert any(late in note for note in reports[0].notes) == (version < since), kind
            if version < since:
                message = f"epilogue: {kind} cannot be fused: cuBLASMp has it since {VERSIONS[since]}"
                with pytest.raises(pb.UnsupportedError, match=message.replace(".", r"\.")):
                    epilogues.check_epilogue(ctx, rng, p, kind, fused=True)
        lib.faults.clear()  # of partial sums, which are whole on one rank


def test_what_cannot_be_fused(ctx, lib):
    rng = np.random.default_rng(83)
    p = pb.MatmulProblem.matmul_allreduce(8, 8, 8, 1, order="F", dtype="float32")
    with pytest.raises(pb.UnsupportedError, match="relu cannot be fused: GEMM \\+ AllReduce would sum"):
        epilogues.check_epilogue(ctx, rng, p, "relu", fused=True)
    thin = pb.MatmulProblem.gemm(8, 8, 1, pb.Grid(1, 1), 8, dtype="float32")
    with pytest.raises(
        pb.UnsupportedError, match="dgelu aux cannot be fused: cuBLASLt has no dgelu for k = 1"
    ):
        epilogues.check_epilogue(ctx, rng, thin, "dgelu aux", fused=True)
    empty = pb.MatmulProblem.gemm(8, 8, 0, pb.Grid(1, 1), 8, dtype="float32")
    with pytest.raises(pb.UnsupportedError, match="cannot be fused: there is nothing to multiply"):
        epilogues.check_epilogue(ctx, rng, empty, "relu", fused=True)
    with pytest.raises(pb.UnsupportedError, match="cannot be fused: alpha is 0"):
        epilogues.check_epilogue(
            ctx, rng, problem("gemm", 1, "C", "float32", "NN"), "relu", alpha=0.0, fused=True
        )


def test_a_mask_is_cleared_before_each_run(ctx, lib):
    """Products of parts of D may write some bits of a byte alone."""
    p = problem("gemm", 1, "C", "float32", "NN")
    mask = ctx.empty_aux(p.d, "relu")
    with pb.plan(pb.matmul, ctx.zeros(p.a), ctx.zeros(p.b), epilogue=pb.Epilogue("relu", aux=mask)) as plan:
        for _ in range(2):
            mask.fill(255)
            plan()  # the library played here writes nothing
            assert not mask.any()
