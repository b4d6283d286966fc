# SPDX-License-Identifier: Apache-2.0
"""The attributes of a product: algorithm, epilogue, types of computing and of communicating, multiprocessors."""

from __future__ import annotations

import itertools
import os
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

import pblasmp as pb
from pblasmp.bindings import ComputeType, DataType, MatmulAlgoType, MatmulAttribute, MatmulEpilogue
from tests.helpers.cases import refuses
from tests.helpers.machine import Witness, context, machine
from tests.helpers.mpi import on_ranks
from tests.helpers.schemes import AG, AR, MAKERS, RS

SIXTEEN = {"float16": DataType.R_16F, "bfloat16": DataType.R_16BF}
TYPES = ["float64", "float32", *SIXTEEN, "complex64", "complex128"]
ALGORITHMS = {
    "default": (0, 500), "split_p2p": (1, 500), "split_multicast": (2, 500), "atomic_p2p": (3, 500),
    "atomic_multicast": (4, 500), "no_overlap": (5, 700), "fused": (6, 1000),
}  # fmt: skip
VERSIONS = {500: "0.5.0", 700: "0.7.0", 800: "0.8.0", 900: "0.9.0", 1000: "0.10.0"}


def problem(scheme: str, dtype: str = "float32", extent: int = 4) -> pb.MatmulProblem:
    if scheme == "gemm":
        return pb.MatmulProblem.gemm(extent, extent, extent, pb.Grid(1, 1), extent, dtype=dtype)
    return MAKERS[scheme](extent, extent, extent, 1, dtype=dtype, order="F")


def attributes(
    ctx: pb.Context, lib: Witness, scheme: str, dtype: str = "float32", **how: Any
) -> dict[MatmulAttribute, int]:
    """The attributes set for a product, but for the ops."""
    p = problem(scheme, dtype)
    with pb.plan(pb.matmul, ctx.empty(p.a), ctx.empty(p.b), op_a=p.op_a, op_b=p.op_b, scheme=p.scheme, **how):
        stored = lib.attributes(lib.of("Matmul_bufferSize")[-1]["matmulDesc"])
    return {name: value for name, value in stored.items() if not name.name.startswith("TRANS")}


def test_nothing_is_set_that_is_the_library_s_own_choice(ctx, lib):
    for scheme, algo in itertools.product(("gemm", AG, RS), ("auto", "default")):
        if algo == "default" or scheme == "gemm":
            assert attributes(ctx, lib, scheme, algo=algo) == {}


def test_an_allreduce_is_an_epilogue(ctx, lib):
    assert attributes(ctx, lib, AR, algo="default") == {MatmulAttribute.EPILOGUE: MatmulEpilogue.ALLREDUCE}


@pytest.mark.parametrize("version", [700, 800, 1000])
def test_partial_sums_travel_in_the_type_of_d(alone, stand_in, version):
    with context(stand_in(version)) as (ctx, lib):
        for scheme, dtype in itertools.product(("gemm", AG, RS, AR), TYPES):
            expected = {}
            if scheme in (RS, AR) and dtype in SIXTEEN and version >= 800:
                expected = {MatmulAttribute.COMMUNICATION_TYPE: SIXTEEN[dtype]}
            got = attributes(ctx, lib, scheme, dtype, algo="default")
            got.pop(MatmulAttribute.EPILOGUE, None)
            assert got == expected, (scheme, dtype)
        p = problem(RS, "float16")
        with pb.plan(pb.matmul, ctx.empty(p.a), ctx.empty(p.b), op_a="T", scheme=RS) as plan:
            told = any("partial sums travel in float32" in note for note in plan.report().notes)
            assert told == (version < 800)


def test_the_type_that_partial_sums_travel_in_can_be_asked_for(ctx, lib):
    for dtype, asked, expected in (
        ("float16", "float32", {}),  # the library's own choice
        ("float16", "float16", {MatmulAttribute.COMMUNICATION_TYPE: DataType.R_16F}),
        ("float32", "bfloat16", {MatmulAttribute.COMMUNICATION_TYPE: DataType.R_16BF}),
    ):
        assert attributes(ctx, lib, RS, dtype, algo="default", comm_dtype=asked) == expected


def test_it_cannot_before_0_8(alone, stand_in):
    message = r"comm_dtype: cuBLASMp has it since 0\.8, found 0\.7\.0"
    with machine(stand_in(700)) as lib:
        with pb.Context(engine="cublasmp") as ctx, pytest.raises(pb.UnsupportedError, match=message):
            attributes(ctx, lib, RS, comm_dtype="float16")
        lib.assert_clean()


def test_multiprocessors_that_communicate(ctx, lib):
    got = attributes(ctx, lib, RS, algo="default", comm_sms=12)
    assert got == {MatmulAttribute.COMMUNICATION_SM_COUNT: 12}


@pytest.mark.parametrize("version", VERSIONS)
def test_algorithms_by_name_and_version(alone, stand_in, version):
    with context(stand_in(version)) as (ctx, lib):
        for (name, (number, since)), scheme in itertools.product(ALGORITHMS.items(), ("gemm", AG, RS)):
            if version < since:
                message = rf"algo '{name}': it needs cuBLASMp {VERSIONS[since]}, found {VERSIONS[version]}"
                with pytest.raises(pb.UnsupportedError, match=message):
                    attributes(ctx, lib, scheme, algo=name)
                continue
            expected = {MatmulAttribute.ALGO_TYPE: number} if number else {}
            assert attributes(ctx, lib, scheme, algo=name) == expected
        names = ", ".join(map(repr, ("auto", *ALGORITHMS)))
        message = f"algo: the cublasmp engine has {names}, .*'stationary' here, got 'summa'"
        with pytest.raises(pb.UnsupportedError, match=message):
            attributes(ctx, lib, "gemm", algo="summa")
    lib.assert_clean()


@pytest.mark.parametrize("version", VERSIONS)
def test_auto_never_takes_multicast(alone, stand_in, version):
    """Nor what the version lacks."""
    harmless = {MatmulAlgoType.DEFAULT, MatmulAlgoType.SPLIT_P2P}
    if version >= 700:
        harmless.add(MatmulAlgoType.NO_OVERLAP)
    with context(stand_in(version)) as (ctx, lib):
        for scheme, dtype, extent in itertools.product(("gemm", *MAKERS), ("float16", "float64"), (4, 2048)):
            p = problem(scheme, dtype, extent)
            with pb.plan(
                pb.matmul, ctx.empty(p.a), ctx.empty(p.b), op_a=p.op_a, op_b=p.op_b, scheme=p.scheme
            ):
                stored = lib.attributes(lib.of("Matmul_bufferSize")[-1]["matmulDesc"])
            assert stored.get(MatmulAttribute.ALGO_TYPE, 0) in harmless


def test_multicast_that_the_environment_switches_off_is_refused(alone, stand_in, monkeypatch):
    monkeypatch.setenv("CUBLASMP_DISABLE_MULTICAST", "1")
    with context(stand_in(1000)) as (ctx, lib):
        for name in ("split_multicast", "atomic_multicast", "fused"):
            with pytest.raises(pb.UnsupportedError, match="which CUBLASMP_DISABLE_MULTICAST switches off"):
                attributes(ctx, lib, AG, algo=name)
        assert attributes(ctx, lib, AG, algo="split_p2p") == {MatmulAttribute.ALGO_TYPE: 1}
    lib.assert_clean()


@on_ranks(2)
def test_multicast_that_one_rank_switches_off_is_refused_on_all(comm, path):
    """What one rank's environment says counts on all: they must choose the same algorithm."""
    setting = {"CUBLASMP_DISABLE_MULTICAST": str(int(comm.rank == 1))}
    with patch.dict(os.environ, setting), context(path, comm=comm) as (ctx, _):
        os.environ["CUBLASMP_DISABLE_MULTICAST"] = "0"  # later changes do not count
        p = MAKERS[AG](8, 8, 8, comm.size)
        a, b = ctx.zeros(p.a), ctx.zeros(p.b)
        words = ["which CUBLASMP_DISABLE_MULTICAST switches off"]
        call = partial(pb.matmul, a, b, op_a=p.op_a, op_b=p.op_b, scheme=p.scheme, algo="split_multicast")
        refuses(ctx, pb.UnsupportedError, words, call)


COMPUTE = {
    None: dict.fromkeys(("float32", "complex64", *SIXTEEN), ComputeType.COMPUTE_32F)
    | dict.fromkeys(("float64", "complex128"), ComputeType.COMPUTE_64F),
    "tf32": dict.fromkeys(("float32", "complex64"), ComputeType.COMPUTE_32F_FAST_TF32),
    "bf16x9": dict.fromkeys(("float32", "complex64"), ComputeType.COMPUTE_32F_EMULATED_16BFX9),
    "fixedpoint": dict.fromkeys(("float64", "complex128"), ComputeType.COMPUTE_64F_EMULATED_FIXEDPOINT),
}  # fmt: skip


def test_what_products_are_summed_in(ctx, lib):
    for (compute, row), dtype in itertools.product(COMPUTE.items(), TYPES):
        if dtype in row:
            attributes(ctx, lib, "gemm", dtype, compute=compute)
            assert lib.of("MatmulDescriptorCreate")[-1]["computeType"] == row[dtype]
        else:
            with pytest.raises(pb.UnsupportedError, match=f"compute: '{compute}' is for"):
                attributes(ctx, lib, "gemm", dtype, compute=compute)
    with pytest.raises(pb.UnsupportedError, match=r"compute: expected None, .* got 'fp8'"):
        attributes(ctx, lib, "gemm", compute="fp8")
    assert not any(kind.endswith("descriptor") for kind, _ in lib.alive)
