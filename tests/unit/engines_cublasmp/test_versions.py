# SPDX-License-Identifier: Apache-2.0
"""cuBLASMp 0.5 to 0.10: names, NVSHMEM or NCCL's windows, the operand that stands in for C, known faults."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import Any

import pytest

import pblasmp as pb
from pblasmp.bindings import MatmulAttribute, Operation
from pblasmp.engines.cublasmp import faults
from pblasmp.layout import Grid
from tests.helpers.mpi import run_mpi, starts_ranks

from .machine import Multiplying, machine
from .test_products import multiply

VERSIONS = [500, 700, 800, 900, 1000]


def product(ctx: pb.Context, lib: Multiplying) -> str:
    """Return what is wrong with a product on a stream of its own."""
    with sys.modules["cupy"].cuda.Stream():
        return multiply(ctx, lib, pb.MatmulProblem.gemm(7, 5, 6, Grid(1, 1), (2, 3, 4), op_a="T"))


@pytest.mark.parametrize("version", VERSIONS)
def test_products_of_every_version(alone, stand_in, version):
    with machine(stand_in(version), Multiplying) as lib:
        with pb.Context(engine="cublasmp") as ctx:
            assert product(ctx, lib) == ""
        symbols = {call.symbol for call in lib.calls}
        old = {"cublasMpStreamSet", "cublasMpMatmulDescriptorAttributeSet"}
        new = {"cublasMpSetStream", "cublasMpMatmulDescriptorSetAttribute"}
        assert symbols & (old | new) == (old if version < 800 else new)
        assert ("cublasMpBufferRegister" in symbols) == bool(lib.gpu.did("window")) == (version >= 800)
        assert bool(lib.gpu.did("symmetric")) == (version < 800)
        lib.assert_clean()
        lib.gpu.assert_clean()


def test_nvshmem_is_started_and_ended_where_nobody_has(alone, stand_in):
    with machine(stand_in(700), Multiplying) as lib:
        with pb.Context(engine="cublasmp") as ctx:
            assert lib.gpu.did("nvshmem started") == [(("device", 0), 0, 1)]
            assert product(ctx, lib) == ""
        names = [event[0] for event in lib.gpu.events]
        assert (
            names.index("symmetric released") < names.index("GridDestroy") < names.index("nvshmem released")
        )
        lib.gpu.assert_clean()


def test_nvshmem_of_somebody_else_is_used_and_left(alone, stand_in):
    with machine(stand_in(700), Multiplying, nvshmem_ranks=1) as lib:
        with pb.Context(engine="cublasmp") as ctx:
            assert product(ctx, lib) == ""
        assert not lib.gpu.did("nvshmem started")
        assert not lib.gpu.did("nvshmem released")
        lib.gpu.assert_clean()


def test_nvshmem_over_other_ranks_is_refused(alone, stand_in):
    with machine(stand_in(700), nvshmem_ranks=3) as lib:
        with pytest.raises(pb.UnsupportedError, match="NVSHMEM already runs over 3 ranks, the context has 1"):
            pb.Context(engine="cublasmp")
        lib.assert_clean()
        lib.gpu.assert_clean()


def test_without_nvshmem4py_old_versions_cannot_be_used(alone, stand_in):
    with machine(stand_in(700), without=["nvshmem"]) as lib:
        with pytest.raises(pb.LibraryNotFoundError, match=r"cuBLASMp before 0.8 needs .* nvshmem4py"):
            pb.Context(engine="cublasmp")
        with pb.Context() as ctx:
            assert ctx.engine.name == "host"
            assert "nvshmem4py" in ctx.engine.why
        lib.assert_clean()
        lib.gpu.assert_clean()


def test_symmetric_arrays_in_nvshmem(alone, stand_in):
    p = pb.MatmulProblem.allgather(4, 4, 4, 1)
    with machine(stand_in(700)) as lib:
        with pb.Context(engine="cublasmp") as ctx:
            b = ctx.empty(p.b, symmetric=True)
            assert lib.gpu.did("symmetric") == [(b.local.data.ptr, 64)]
            with pb.plan_matmul(ctx.empty(p.a), b, op_a="T", scheme="ag") as plan:
                assert "B, which is gathered, lies in symmetric memory" in plan.report().notes
        lib.gpu.assert_clean()


def guarded_products(comm: Any, paths: dict[str, str]) -> Any:
    """Products that have a fault: each is right, and what the library is asked for has none."""
    grids, blocks, ops = (
        (Grid(1, 1), Grid(2, 1), Grid(1, 2)),
        ((2, 2, 2), (2, 3, 4)),
        ("NN", "NT", "NC", "TN", "TT"),
    )
    for version, path in paths.items():
        with machine(path, Multiplying, comm=comm) as lib:
            with pb.Context(comm, engine="cublasmp") as ctx:
                for grid, block, (op_a, op_b), order in itertools.product(
                    grids, blocks, ops, ("CCC", "FFF", "CFF", "CFC")
                ):
                    p = pb.MatmulProblem.gemm(
                        9, 8, 7, grid, block, op_a=op_a, op_b=op_b, order=order, dtype="complex64"
                    )
                    fault = multiply(ctx, lib, p)
                    if not fault and grid.size > 1 and ctx.rank < grid.size:
                        fault = faulty(lib, int(version), len(set(block)) > 1)
                    yield f"{version} {grid} {block} {op_a}{op_b} {order}", fault or None
            lib.assert_clean()
            lib.gpu.assert_clean()


def faulty(lib: Multiplying, version: int, unequal: bool) -> str:
    """Which known fault the last call of cublasMpMatmul over one line of processes runs into."""
    call = lib.of("Matmul")[-1]
    attributes = lib.attributes(call["matmulDesc"])
    op_a, op_b = attributes[MatmulAttribute.TRANSA], attributes[MatmulAttribute.TRANSB]
    if version >= 900 and unequal and op_a == Operation.N and op_b != Operation.N:
        return "op N times op T with unequal blocks"
    made = [lib.made[lib.made[call[f"desc{x}"]]["grid"]] for x in "ABD"]
    shapes = {(grid["nprow"], grid["npcol"]) for grid in made}
    return "" if len(shapes) == 1 else f"grids {shapes} in one product"


@starts_ranks
def test_faults_of_the_library_are_avoided(stand_in):
    run_mpi(guarded_products, 2, paths={str(version): stand_in(version) for version in (700, 800, 900, 1000)})


def test_what_is_avoided():
    """Pure: which operand is laid out otherwise, and why."""
    nt = pb.MatmulProblem.gemm(9, 8, 7, Grid(2, 2), (2, 3, 4), op_b="T", order="F")
    mended, (reason,) = faults.avoided(nt, 1000)
    assert (mended.a, mended.d, mended.faults()) == (nt.a, nt.d, [])
    assert (mended.b.order, mended.b.shape, mended.b.block) == ("C", nt.b.shape, nt.b.block)
    assert not faults.nt_is_wrong(1000, mended.column_major())
    assert reason.startswith("b is moved to the other memory order")
    swapped = faults.avoided(nt.T, 900)[0]
    assert (swapped.a.order, swapped.b) == ("F", nt.T.b)
    equal = pb.MatmulProblem.gemm(9, 8, 7, Grid(2, 2), 2, op_b="T", order="F")
    for p, version in ((nt, 800), (equal, 1000)):
        assert faults.avoided(p, version) == (p, ())
    mixed = pb.MatmulProblem.gemm(9, 8, 7, Grid(1, 4), 2, order="FCF")
    mended, (reason,) = faults.avoided(mixed, 700)
    assert mended.b.grid.same_ranks(mixed.d.grid.T)
    assert mended.faults() == []
    assert reason.startswith("b is moved to D's grid")


@pytest.mark.parametrize("order", "CF")
def test_the_layouts_of_a_scheme_are_left_as_they_are(order):
    gathered = pb.MatmulProblem.allgather(8, 8, 8, 4, order=order)
    assert faults.avoided(replace(gathered, scheme="gemm"), 1000) == (gathered, ())
    scattered = replace(pb.MatmulProblem.reduce_scatter(8, 8, 8, 4, order=order), scheme="gemm")
    assert faults.avoided(scattered, 1000) == (scattered, ())
