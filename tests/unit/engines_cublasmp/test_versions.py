# SPDX-License-Identifier: Apache-2.0
"""cuBLASMp 0.5 to 0.10: names, NVSHMEM or NCCL's windows, the operand that stands in for C, known faults."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest

import pblasmp as pb
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
    """Which operands pass through a stage first.

    On one row or column of processes: what is not in D's memory order is moved to D's grid. Since 0.9: op N times op T
    is made op N times op N where blocks differ.
    """
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
                    form = p.column_major()
                    nt = form.op_a == "N" and form.op_b != "N" and len(set(block)) > 1 and int(version) >= 900
                    several = grid.size > 1
                    expected = {
                        "Geadd": int(nt and several),
                        "Gemr2D": several * sum(x != order[2] for x in order[:2]),
                    }
                    before = {name: len(lib.of(name)) for name in expected}
                    fault = multiply(ctx, lib, p)
                    got = {name: len(lib.of(name)) - count for name, count in before.items()}
                    if not fault and got != (
                        expected if ctx.rank < grid.size else dict.fromkeys(expected, 0)
                    ):
                        fault = f"{got} stages, expected {expected}"
                    yield f"{version} {grid} {block} {op_a}{op_b} {order}", fault or None
            lib.assert_clean()
            lib.gpu.assert_clean()


@starts_ranks
def test_faults_of_the_library_are_avoided(stand_in):
    run_mpi(guarded_products, 2, paths={str(version): stand_in(version) for version in (700, 800, 900, 1000)})


def test_the_guard_is_told_of(alone, stand_in, monkeypatch):
    monkeypatch.setattr("pblasmp.engines.cublasmp.faults.nt_is_wrong", lambda *_: True)
    p = pb.MatmulProblem.gemm(9, 8, 7, Grid(1, 1), (2, 3, 4), op_b="T", order="F")
    with machine(stand_in(1000)) as lib, pb.Context(engine="cublasmp") as ctx:
        a, b = ctx.empty(p.a), ctx.empty(p.b)
        lib.gpu.allocations.clear()
        with pb.plan_matmul(a, b, op_b="T", out=ctx.empty(p.d)) as plan:
            report = plan.report()
            assert report.copied_bytes == b.local.nbytes
            assert any("B is transposed first by cublasMpGeadd" in note for note in report.notes)
            for _ in range(2):
                plan()
        assert [name for name in lib.names if name in ("cublasMpGeadd", "cublasMpMatmul")] == [
            "cublasMpGeadd", "cublasMpMatmul",
        ] * 2  # fmt: skip
    lib.assert_clean()
