# SPDX-License-Identifier: Apache-2.0
"""Plans of level-3 routines, their reports, what ranks refuse together, and triangles that move alone."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.host import host_transport
from pblasmp.layout import Trapezoid
from tests.helpers.cases import check_matrix, layout, numbers, pick, refuses, scattered
from tests.helpers.mpi import on_ranks
from tests.helpers.slow import only_long


def square(ctx, extent, block, dtype="float64", **more):
    return pb.MatrixDescriptor(
        (extent, extent), (block, block), pb.Grid.squarest(ctx.size), dtype=dtype, **more
    )


@on_ranks((1, 1), *only_long((4, 4)), (4, 2))
def test_sums(ctx, per_node):
    """Sums of matrices that are dealt out alike: op(A) is read from the rank that has it, sent from other nodes."""
    for order, uplo, op_a in itertools.product("CF", (None, "L", "U"), "NTC"):
        d = square(ctx, 80, 30, "complex128", order=order, source=(0, 1) if ctx.size > 1 else (0, 0))
        other = replace(d, order="F", source=(d.source[1], d.source[0]))
        a, c = ctx.zeros(d if op_a == "N" else other), ctx.zeros(d)
        call, flags = (pb.blas.geadd, {}) if uplo is None else (pb.blas.tradd, {"uplo": uplo})
        with pb.plan(call, a, c, op_a=op_a, **flags, beta=1, out=ctx.zeros(d)) as plan:
            plan()
            report = plan.report()
        alone = op_a == "N" or ctx.size == 1
        sent = sum(ctx.comm.allgather(report.sent_bytes)) > 0
        told = report.path == ("in place" if alone else "shared") and sent == (
            per_node < ctx.size and not alone
        )
        assert told, f"{call.__name__} {order} {uplo} {op_a}: {report}"


@on_ranks(1, 3)
def test_refusals(comm, ctx):
    d = square(ctx, 8, 2)
    a, b, c = (ctx.zeros(d) for _ in range(3))
    z = ctx.zeros(replace(d, dtype="complex64"))
    half = ctx.zeros(replace(d, dtype="float16"))
    wide = ctx.zeros(pb.MatrixDescriptor((8, 6), (2, 2), d.grid))
    mine = "L" if comm.rank else "U"
    for kind, words, call in (
        (pb.ArgumentError, ["uplo: expected 'L' or 'U', got 'X'"], lambda: pb.blas.trsm(a, b, uplo="X")),
        (pb.ArgumentError, ["a: shape is 8x8, expected 6x6"], lambda: pb.blas.trmm(a, wide, side="R")),
        (pb.ArgumentError, ["a: dtype is complex64"], lambda: pb.blas.symm(z, b)),
        (pb.ArgumentError, ["alpha: 1j is complex, but it must be"],
         lambda: pb.blas.herk(z, alpha=1j)),
        (pb.ArgumentError, ["beta: 1j is complex, but it must be"],
         lambda: pb.blas.her2k(z, z, z, beta=1j)),
        (pb.ArgumentError, ["alpha: 1j is complex"], lambda: pb.blas.trsm(a, b, alpha=1j)),
        (pb.ArgumentError, ["op_a: syrk of complex", "herk's"], lambda: pb.blas.syrk(z, op_a="C")),
        (pb.ArgumentError, ["op_a: expected"], lambda: pb.blas.syrk(a, op_a=np.eye(2))),
        (pb.ArgumentError, ["c: beta is 2, expected a matrix"], lambda: pb.blas.syrk(a, beta=2)),
        (pb.ArgumentError, ["b: expected a DistributedMatrix, got float"],
         lambda: pb.blas.trsm(a, 1.0)),
        (pb.ArgumentError, ["c: expected a DistributedMatrix"], lambda: pb.blas.geadd(a, None)),
        (pb.ArgumentError, ["out: shares memory with a"], lambda: pb.blas.syrk(a, out=a)),
        (pb.ArgumentError, ["out: shares memory with b"], lambda: pb.blas.symm(a, b, out=b)),
        (pb.ArgumentError, ["out: shares memory with b; expected b itself"],
         lambda: pb.blas.trsm(a[:4, :4], b[:4, :4], out=b[2:6, :4])),
        (pb.UnsupportedError, ["geadd is for float32, float64, complex64 and complex128, got float16"],
         lambda: pb.blas.geadd(half, half)),
        (pb.LayoutError, ["dtype is float16, which syrk does not have, expected one of float64, float32,"],
         lambda: pb.blas.syrk(half)),
        (pb.UnsupportedError, ["'shared', 'gathered', 'panels', 'stationary' here, got 'summed'"],
         lambda: pb.blas.trsm(a, b, algo="summed")),
        (pb.UnsupportedError, ["has 'auto', 'moved' here, got 'shared'"],
         lambda: pb.blas.geadd(a, c, algo="shared")),
    ):  # fmt: skip
        refuses(ctx, kind, words, call)
    if comm.size > 1:
        words = ["trsm: the ranks gave different arguments", "uplo", "on rank 0"]
        refuses(ctx, pb.RankMismatchError, words, pb.blas.trsm, a, b, uplo=mine)
        words = ["the ranks made different calls", "syrk", "herk"]
        call = pb.blas.syrk if comm.rank else pb.blas.herk
        refuses(ctx, pb.RankMismatchError, words, call, a)
    with pytest.raises(pb.ArgumentError, match="a: expected a DistributedMatrix"):
        pb.blas.trsm(1, 2)


@on_ranks(1, 4)
def test_new_results(ctx):
    """The layout of a new result, and its values outside the triangle."""
    grid = pb.Grid(1, ctx.size)
    a = ctx.zeros(pb.MatrixDescriptor((9, 14), (2, 3), grid, order="F"))
    for op, order, block in (("N", 9, 2), ("T", 14, 3)):
        d = pb.blas.syrk(a, op_a=op).descriptor
        expected = pb.MatrixDescriptor((order, order), (block, block), grid, order="F")
        assert d == expected, f"syrk {op}"
    c = ctx.zeros(square(ctx, 9, 4, order="C", ld=9))
    d = pb.blas.syrk(a, c).descriptor
    assert d == replace(c.descriptor, ld=None), "like C"
    t = ctx.zeros(square(ctx, 9, 4))
    d = pb.blas.trmm(t, a).descriptor
    assert d == a.descriptor, "like B"
    result = pb.blas.herkx(a, a, uplo="U")
    assert not result.local.any(), "zeros outside: something else"


@on_ranks(4)
def test_paths(comm, ctx):
    """What "auto" takes for long matrices, and where memory is short."""
    rng = np.random.default_rng(63)
    tall = pb.MatrixDescriptor((400, 6), (50, 6), pb.Grid(ctx.size, 1))
    x = numbers(rng, tall.shape, "float64")
    with pb.plan(pb.blas.syrk, scattered(ctx, tall, x), op_a="T") as plan:
        check_matrix(plan(), np.tril(x.T @ x), "long")
        report = plan.report()
    assert report.path == "summed", f"long: {report}"
    assert report.copied_bytes == 0, "long"
    spread = ctx.zeros(pb.MatrixDescriptor((400, 40), (50, 5), pb.Grid(2, 2)))
    for c, path in ((square(ctx, 40, 5), "shared"), (square(ctx, 40, 64), "summed")):
        with pb.plan(pb.blas.syrk, spread, op_a="T", out=ctx.zeros(c)) as plan:
            report = plan.report()
        assert report.path == path, f"long, {c}"
    d = square(ctx, 256, 64)
    available = host_transport.available_bytes
    for nbytes, path in ((1 << 30, "shared"), (10_000, "panels")):
        host_transport.available_bytes = lambda nbytes=nbytes: nbytes
        with pb.Context(comm, engine="host") as short:
            a, b = short.zeros(d), short.zeros(d)
            for call in (pb.blas.trsm, pb.blas.trmm, pb.blas.symm, pb.blas.syr2k):
                with pb.plan(call, a, b) as plan:
                    report = plan.report()
                    told = path == "shared" or all(
                        "bytes per node, only" in report.algorithms[name].why
                        for name in ("shared", "gathered")
                    )
                    assert report.path == path, f"{call.__name__}, {path}"
                    assert told, f"{call.__name__}, {path}"
    host_transport.available_bytes = available


@on_ranks(1, 2, 6)
def test_triangles_move(ctx):
    """A.redistribute with uplo: only the triangle moves, trapezoids as in trmr2d."""
    rng = np.random.default_rng(64)
    for shape, uplo, diag in itertools.product(((9, 9), (11, 5), (4, 10), (0, 3)), "LU", "NU"):
        x = numbers(rng, shape, pick(rng, ("float64", "complex64")))
        part = Trapezoid.of_shape(shape, uplo, diag).mask(*map(np.arange, shape))
        read = np.where(part, x, np.nan)
        a = scattered(ctx, layout(rng, shape, ctx.size, dtype=x.dtype), read.astype(x.dtype))
        to = layout(rng, shape, ctx.size, dtype=x.dtype)
        case = f"{shape} {uplo}{diag}"
        check_matrix(a.redistribute(to, uplo=uplo, diag=diag), np.where(part, x, 0), case)
        other = numbers(rng, shape, x.dtype)
        out = scattered(ctx, to, other)
        back = a.redistribute(uplo=uplo, diag=diag, out=out)
        assert back is out, f"{case} into out"
        check_matrix(out, np.where(part, x, other), f"{case} into out")
    d = square(ctx, 6, 2)
    x = numbers(rng, d.shape, "float64")
    a, out = scattered(ctx, d, x), ctx.zeros(square(ctx, 6, 3))
    check_matrix(a.redistribute(out=out), x, "all of it into out")
    other = square(ctx, 6, 1)
    for words, call in (
        (["uplo: expected 'L', 'U' or None, got 'X'"], lambda: a.redistribute(other, uplo="X")),
        (["diag: expected 'N' or 'U', got 'L'"], lambda: a.redistribute(other, uplo="L", diag="L")),
        (["'N' without uplo"], lambda: a.redistribute(other, diag="U")),
        (["expected a descriptor, out=, or keywords"], a.redistribute),
        (["out: its layout is"], lambda: a.redistribute(other, out=out)),
        (["out: shares memory"], lambda: a.redistribute(out=a)),
        (["out: expected a DistributedMatrix"], lambda: a.redistribute(out=1)),
    ):
        refuses(ctx, pb.ArgumentError, words, call)
