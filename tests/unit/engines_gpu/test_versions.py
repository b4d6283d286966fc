# SPDX-License-Identifier: Apache-2.0
"""cuBLASMp 0.5 to 0.10: names, NVSHMEM or NCCL's windows, the operand that stands in for C, known faults."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import pblasmp as pb
from pblasmp.bindings import MatmulAttribute, Operation
from pblasmp.engines.gpu import open_library
from pblasmp.engines.gpu.cublasmp import faults
from pblasmp.layout import Grid
from tests.helpers.gpu.multiply import check_product
from tests.helpers.machine import Multiplying, context, machine
from tests.helpers.mpi import run_mpi
from tests.helpers.pairs import pairs
from tests.helpers.slow import in_turn

VERSIONS = [500, 700, 800, 900, 1000]

Sources = tuple[tuple[int, int], ...]


def check_on_a_new_stream(ctx: pb.Context, lib: Multiplying) -> None:
    """A product on a new stream."""
    with sys.modules["cupy"].cuda.Stream():
        check_product(ctx, lib, pb.MatmulProblem.gemm(7, 5, 6, Grid(1, 1), (2, 3, 4), op_a="T"))


@pytest.mark.parametrize("version", VERSIONS)
def test_products_of_every_version(alone, stand_in, version):
    with machine(stand_in(version), Multiplying) as lib:
        with pb.Context(engine="cublasmp") as ctx:
            check_on_a_new_stream(ctx, lib)
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
            check_on_a_new_stream(ctx, lib)
        names = [event[0] for event in lib.gpu.events]
        assert (
            names.index("symmetric released") < names.index("GridDestroy") < names.index("nvshmem released")
        )
        lib.gpu.assert_clean()


def test_nvshmem_of_somebody_else_is_used_and_left(alone, stand_in):
    with machine(stand_in(700), Multiplying, nvshmem_ranks=1) as lib:
        with pb.Context(engine="cublasmp") as ctx:
            check_on_a_new_stream(ctx, lib)
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


@pytest.mark.parametrize(("module", "package"), [("nvmath", "nvmath-python"), ("nccl", "nccl4py")])
def test_what_the_extra_brings_is_needed(alone, stand_in, module, package):
    """Said when a context is made, with what to install; "auto" takes CPU ranks, and says why."""
    with machine(stand_in(1000), without=[module]) as lib:
        with pytest.raises(pb.LibraryNotFoundError, match=rf"{package} is not installed .*pblasmp\[cu13\]"):
            pb.Context(engine="cublasmp")
        with pb.Context() as ctx:
            assert ctx.engine.name == "host"
            assert f"{package} is not installed" in ctx.engine.why
        lib.assert_clean()
        lib.gpu.assert_clean()


def test_symmetric_arrays_in_nvshmem(alone, stand_in):
    p = pb.MatmulProblem.allgather_matmul(4, 4, 4, 1, order="F", dtype="float32")
    with context(stand_in(700)) as (ctx, lib):
        b = ctx.empty(p.b, symmetric=True)
        assert lib.gpu.did("symmetric") == [(b.local.data.ptr, 64)]
        with pb.plan(pb.matmul, ctx.empty(p.a), b, op_a="T", scheme="allgather_matmul") as plan:
            assert "B, which is gathered, is in symmetric memory" in plan.report().notes


def guarded_products(comm: Any, paths: dict[str, str]) -> Any:
    """Products that have a fault: each is right, and what the library is asked for has none."""
    sources = [((0, 0), (0, 0), (0, 0)), ((0, 1), (1, 0), (1, 1)), ((1, 1), (0, 0), (0, 1))]
    for version, path in paths.items():
        with context(path, Multiplying, comm=comm) as (ctx, lib):
            combinations = pairs(
                (Grid(1, 1), Grid(2, 1), Grid(1, 2)),
                ((2, 2, 2), (2, 3, 4)),
                ("NN", "NT", "NC", "TN", "TT", "CT"),
                ("CCC", "FFF", "CFF", "CFC"),
            )
            for number, (grid, block, ops, order) in enumerate(combinations):
                of_grid = distinct(sources, grid)
                for source in in_turn(of_grid, keep=len(of_grid), first=number):
                    lib.clear()
                    p = pb.MatmulProblem.gemm(
                        9, 8, 7, grid, block, op_a=ops[0], op_b=ops[1], order=order, dtype="complex64"
                    )
                    p = replace(p, **{name: replace(getattr(p, name), source=of)
                                      for name, of in zip("abd", source, strict=True)})  # fmt: skip
                    for algo in ("auto", "default"):
                        check_product(ctx, lib, p, algo=algo)
                    if grid.size > 1 and ctx.rank < grid.size:
                        known = known_fault(lib, int(version), len(set(block)) > 1)
                        assert not known, f"{version} {grid} {block} {ops} {order} {source}"


def distinct(sources: Sequence[Sources], grid: Grid) -> list[Sources]:
    """The processes of the grid that matrices begin on, each choice once."""
    inside = (tuple((r % grid.nprow, c % grid.npcol) for r, c in source) for source in sources)
    return list(dict.fromkeys(inside))


def known_fault(lib: Multiplying, version: int, unequal: bool) -> str:
    """Which known fault the last call of cublasMpMatmul runs into."""
    call = lib.of("Matmul")[-1]
    attributes = lib.attributes(call["matmulDesc"])
    op_a, op_b = attributes[MatmulAttribute.TRANSA], attributes[MatmulAttribute.TRANSB]
    if unequal and op_b != Operation.N:
        return "op(B) = T with unequal blocks"
    if version < 900 and unequal and op_a != Operation.N:
        return "op(A) = T with unequal blocks"
    b, d = (lib.made[call[f"desc{x}"]] for x in "BD")
    shifted = lib.made[d["grid"]]["npcol"] > 1 and b["csrc"] != d["csrc"]
    return "B and D begin on other process columns" if unequal and op_a != Operation.N and shifted else ""


def test_faults_of_the_library_are_avoided(stand_in):
    run_mpi(
        guarded_products, 2, timeout=240, paths={str(version): stand_in(version) for version in (700, 1000)}
    )


GRID = Grid(2, 2)


def test_op_b_transposed_with_unequal_blocks_is_avoided():
    for op_a in "NTC":
        p = pb.MatmulProblem.gemm(9, 8, 7, GRID, (2, 3, 4), op_a=op_a, op_b="T", order="F")
        p = replace(p, d=replace(p.d, source=(1, 1)))
        mended, (reason,) = faults.avoided(p, 1000)
        assert (mended.a, mended.d, mended.faults()) == (p.a, p.d, [])
        assert (mended.b.order, mended.b.shape, mended.b.block) == ("C", p.b.shape, p.b.block)
        assert mended.b.T.source[1] == p.d.source[1]
        assert faults.avoided(mended, 1000) == (mended, ())
        assert reason.startswith("b is moved to the other memory order")
        swapped = faults.avoided(p.T, 1000)[0]  # the same product, with a and b exchanged
        assert (swapped.a.order, swapped.b) == ("F", p.T.b)
    equal = pb.MatmulProblem.gemm(9, 8, 7, GRID, 2, op_b="T", order="F")
    alone = pb.MatmulProblem.gemm(9, 8, 7, Grid(1, 1), (2, 3, 4), op_b="T", order="F")
    for p in (equal, alone):
        assert faults.avoided(p, 1000) == (p, ())


@pytest.mark.parametrize("op_b", "NT")
def test_before_0_9_op_a_transposed_is_avoided_too(op_b):
    p = pb.MatmulProblem.gemm(9, 8, 7, GRID, (2, 3, 4), op_a="T", op_b=op_b, order="F")
    p = replace(p, d=replace(p.d, source=(1, 1)))
    mended, reasons = faults.avoided(p, 801)
    form = mended.column_major()
    assert (form.op_a, form.op_b, mended.faults()) == ("N", "N", [])
    assert (mended.a.order, mended.a.shape, form.a.source) == ("C", p.a.shape, (1, 0))
    assert [reason.partition(" ")[0] for reason in reasons] == (["a"] if op_b == "N" else ["a", "b"])
    assert faults.avoided(mended, 801) == (mended, ())


def test_a_shifted_b_is_avoided():
    p = pb.MatmulProblem.gemm(9, 8, 7, GRID, (2, 3, 4), op_a="T", order="F")
    assert faults.avoided(p, 1000) == (p, ())
    shifted = replace(p, d=replace(p.d, source=(1, 1)))
    mended, (reason,) = faults.avoided(shifted, 1000)
    assert mended == replace(shifted, b=replace(p.b, source=(0, 1)))
    assert reason.startswith("b is moved to D's processes")
    swapped = faults.avoided(shifted.T, 1000)[0]
    assert swapped == replace(shifted.T, a=replace(p.T.a, source=(1, 0)))
    for right in (
        replace(shifted, d=replace(p.d, source=(1, 0))),  # another process row
        pb.MatmulProblem.gemm(9, 8, 7, GRID, 2, op_a="T", order="F"),
    ):
        assert faults.avoided(right, 1000) == (right, ())


@pytest.mark.parametrize("order", "CF")
def test_the_layouts_of_a_scheme_are_left_as_they_are(order):
    gathered = pb.MatmulProblem.allgather_matmul(8, 8, 8, 4, order=order, dtype="float32")
    assert faults.avoided(replace(gathered, scheme="gemm"), 1000) == (gathered, ())
    scattered = replace(
        pb.MatmulProblem.matmul_reduce_scatter(8, 8, 8, 4, order=order, dtype="float32"), scheme="gemm"
    )
    assert faults.avoided(scattered, 1000) == (scattered, ())


def test_an_nccl_with_which_products_die_is_refused(alone, stand_in):
    with machine(stand_in(1000), nccl_version=22902) as lib:
        with pytest.raises(
            pb.UnsupportedError, match=r"cuBLASMp 0.10.* needs NCCL 2.29.3 or newer, found 2.29.2"
        ):
            pb.Context(engine="cublasmp")
        with pb.Context() as ctx:
            assert "NCCL 2.29.3" in ctx.engine.why
        lib.assert_clean()
    with machine(stand_in(900), nccl_version=22902), pb.Context(engine="cublasmp") as ctx:
        assert "NCCL 2.29.2" in ctx.engine.libraries


def test_nvshmem_begins_with_a_grid_of_all_ranks(stand_in):
    run_mpi(first_grids, 2, path=stand_in(700))


def first_grids(comm: Any, path: str) -> Any:
    """The grids that a product on one rank of two makes on 0.7."""
    with machine(path, Multiplying, comm=comm) as lib, pb.Context(comm, engine="cublasmp"):
        first = lib.of("GridCreate")[0]
        assert first["nprow"] * first["npcol"] == comm.size, "first grid"


def test_without_nccl4py_the_engine_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "nccl", None)
    found = open_library()
    assert isinstance(found, pb.LibraryNotFoundError)
    assert "nccl4py is not installed" in str(found)
