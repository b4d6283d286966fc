# SPDX-License-Identifier: Apache-2.0
"""Levels 1 and 2 on ranks: every option and type, rows and columns and parts of matrices in any layout."""

import itertools
from functools import partial
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import _core, pblas
from tests.helpers import inside
from tests.helpers.calls import DTYPES, vector
from tests.helpers.cases import layout, numbers, refuses, scattered
from tests.helpers.mpi import on_ranks, run_on_one_node


@on_ranks(1, 4)
def test_reductions_and_swap(comm, ctx):
    """Norms that LAPACK's scaling saves; infinities and NaN; results that must not differ from rank to rank."""
    rng = np.random.default_rng(63)
    for dtype in DTYPES:
        info = np.finfo(dtype)
        huge, tiny = float(info.max) / 8, float(info.tiny)
        for size, factor in ((huge, 5), (tiny, 5), (float(info.smallest_subnormal) * 8, 5)):
            values = np.zeros(17)
            values[[3, 11]] = 3 * size, 4 * size
            a, _ = vector(ctx, rng, dtype, 17, values)
            norm = float(pb.blas.nrm2(a.matrix))
            near = abs(norm / (factor * size) - 1) < 1e-6
            again = a.matrix.norm()
            assert near, f"{dtype} {size}"
            assert abs(again / norm - 1) < 1e-6, f"{dtype} {size}"
        for size in (1e-25, 3e18, 1.1e154):  # their squares, or sums of two, are no numbers of the type
            if size > huge:
                continue
            value = size * (1 + 1j) if dtype.startswith("complex") else size
            a, _ = vector(ctx, rng, dtype, 67, np.full(67, value))  # BLAS sums 32 at a time
            norm, expected = float(pb.blas.nrm2(a.matrix)), abs(value) * 67**0.5
            assert abs(norm / expected - 1) < 1e-6, f"{dtype} 67 of {size}: {norm}, {expected}"
        values = np.arange(17.0)
        values[5] = np.inf
        a, _ = vector(ctx, rng, dtype, 17, values)
        of_inf = float(pb.blas.nrm2(a.matrix)), float(pb.blas.asum(a.matrix)), *pb.blas.amax(a.matrix)
        values[[2, 9]] = np.nan
        a, _ = vector(ctx, rng, dtype, 17, values)
        of_nan = float(pb.blas.nrm2(a.matrix)), float(pb.blas.asum(a.matrix)), *pb.blas.amax(a.matrix)
        good = of_inf == (np.inf, np.inf, np.inf, 5) and np.isnan(of_nan[:3]).all() and of_nan[3] == 2
        assert good, f"{dtype} not finite: {of_inf}, {of_nan}"
    a, _ = vector(ctx, rng, "float64", 1000, rng.standard_normal(1000))
    found = {(pb.blas.nrm2(a.matrix).hex(), pb.blas.dot(a.matrix, a.matrix).hex()) for _ in range(3)}
    assert len({*comm.allgather(tuple(found))}) == 1 == len(found), "the same bits"


@on_ranks(4, runner=run_on_one_node)
def test_factors(ctx):
    """A vector is scaled in place by a real number in any form, also if it has no elements."""
    for n, alpha in itertools.product((5, 0), (2, 2 + 0j, np.complex64(2), np.array(2), np.array(2 + 0j))):
        x = ctx.full((n, 1), 3.0, block=1)
        pb.blas.scal(x, alpha=alpha, out=x)
        good = np.array_equal(x.allgather(), np.full((n, 1), 6.0))
        assert good, f"{n} elements, {alpha!r}: {x.allgather()}"


@on_ranks(4, runner=run_on_one_node)
def test_what_moves(comm, ctx):
    """A gemv sends its vectors and partial sums, never A."""
    d = pb.MatrixDescriptor((96, 96), (8, 8), pb.Grid(2, 2))
    column, row = ((96, 1), (8, 1)), ((1, 96), (1, 8))
    sent = []
    run, moved = ctx.comm.isend, []

    def counted(array, dest):
        moved.append(array.nbytes)
        return run(array, dest)

    a = ctx.from_function(lambda i, j: i - 2 * j, d)
    for shape, block in (column, row):
        x = ctx.from_function(lambda i, j: 1 + i + j, pb.MatrixDescriptor(shape, block, d.grid))
        for routine in (pb.blas.gemv, pb.blas.symv, pb.blas.trmv):
            ctx.comm.isend = counted
            ctx.engine.direct, direct = None, ctx.engine.direct
            ctx.engine.transport.why_not_shared, saved = "tested", ctx.engine.transport.why_not_shared
            try:
                routine(a, x)
            finally:
                ctx.comm.isend, ctx.engine.direct = run, direct
                ctx.engine.transport.why_not_shared = saved
            everyones = sum(comm.allgather(sum(moved)))
            moved.clear()
            sent.append((routine.__name__, shape, everyones))
    most = (
        8 * 96 * 2 * 2 * 2
    )  # x along and partial sums back, twice for the two triangles of a symmetric matrix
    assert not [each for each in sent if not 0 < each[2] <= most], "sent"


@pytest.mark.skipif(_core.load() is None, reason="there is no core")
@on_ranks(4, runner=run_on_one_node)
def test_what_is_shared(ctx):
    """Direct products with a vector share it and partial sums alone, never A."""
    n, d, needed = 256, pb.MatrixDescriptor((256, 256), (16, 16), pb.Grid(2, 2)), []
    status = getattr(*inside.CARRY_OUT)

    def carry_out(self, *given):
        found = status(self, *given)
        needed.append(self._state.nbytes)
        return found

    with mock.patch.object(*inside.CARRY_OUT, carry_out):
        a, x = ctx.zeros(d), ctx.zeros(d[:, :1])
        for routine, twice in ((pb.blas.gemv, 1), (pb.blas.trmv, 1), (pb.blas.symv, 2)):
            needed.clear()
            routine(a, x, **{} if routine is pb.blas.trmv else {"alpha": 2.0})
            most = twice * (8 * n * (1 + 2) + 64 * 8)  # x, and two partial sums of each element
            # a triangle is read by rows and by columns
            assert needed, routine.__name__
            assert max(needed) <= most, routine.__name__


@on_ranks(4, runner=run_on_one_node)
def test_known_calls(comm):
    """What has changed since the same call is noticed, on whichever rank."""
    n, block = 64, 8
    ictxt = pblas.gridinit(None, "Row", 2, 2, engine="host")
    ctx = pblas.grids.of_number(ictxt).context
    _, _, row, col = pblas.gridinfo(ictxt)
    rows = pblas.numroc(n, block, row, 0, 2)
    desc = pblas.descinit(n, 1, block, block, 0, 0, ictxt, rows)
    x, y = (np.full((rows, 1 - col), value, order="F") for value in (3.0, 2.0))
    spare = np.full((rows, 1 - col), 5.0, order="F")
    here, last = col == 0, comm.rank == 3

    def dot(n=n, x=x, desc=desc):
        return pblas.pddot(n, None, x, 1, 1, desc, 1, y, 1, 1, desc, 1)

    def scaled(x=x, alpha=2.0, inc=1):
        pblas.pdscal(n, alpha, x, 1, 1, desc, inc)

    for _ in range(3):
        found = dot()
        assert found == 6.0 * n * here, "again"
    x[...] = 4
    assert dot() == 8.0 * n * here, "other values"
    assert dot(x=spare) == 10.0 * n * here, "another array"
    assert dot(x=x.reshape(-1, order="F")) == 8.0 * n * here, "of one dimension"
    assert dot(n=np.int64(n) if last else n) == 8.0 * n * here, "one rank looks closer"
    for what, given in (
        ("a float for n", {"n": 64.0}), ("True for n", {"n": True}), ("too many", {"n": n + 1}),
        ("another type", {"x": np.asfortranarray(x, np.float32)}), ("short", {"x": x[: rows - 1]}),
        ("a descriptor of floats", {"desc": [*desc[:8], rows + 0.5]}),
    ):  # fmt: skip
        if what == "short" and not here:
            given = {}
        refuses(ctx, pblas.ParameterError, [], partial(dot, **given))
    for inc in (1.0, None):
        words = ["pdscal: argument 7 (incx): expected an integer"]
        refuses(ctx, pblas.ParameterError, words, partial(scaled, inc=inc))
    refuses(ctx, pb.RankMismatchError, ["n:"], partial(dot, n=n - last))
    for _ in range(3):
        scaled()
    x.flags.writeable = not last
    refuses(ctx, pblas.ParameterError, ["read-only"], scaled)
    x.flags.writeable = True
    refuses(ctx, pb.RankMismatchError, ["alpha"], partial(scaled, alpha=2.0 + last))
    assert (x == 32).all(), "written once a call"
    desc[2] -= 1
    refuses(ctx, pblas.ParameterError, [], dot)
    desc[2] += 1
    line = np.full((1, pblas.numroc(n, block, col, 0, 2)), 2.0, order="F")
    of_line = pblas.descinit(1, n, 1, block, 0, 0, ictxt, 1)  # all of a matrix of one row
    for exact in (n, np.int64(n)):  # a direct call, and one that looks closer
        found = pblas.pdasum(exact, None, line, 1, 1, of_line, 1)
        assert found == (0 if row else 2.0 * n), f"{exact!r}: {found} in process row {row}"
    before = x.ctypes.data
    x.resize((64 * rows, 1 - col), refcheck=False)
    x[...] = 1
    moved = x.ctypes.data != before
    assert dot() == 2.0 * n * here, f"the array moves: the old place is read, {moved}"
    pblas.gridexit(ictxt)
    assert _raises(pblas.ParameterError, dot), "the grid is gone"


def _raises(kind, call):
    try:
        call()
    except kind:
        return True
    return False


@on_ranks(4, runner=run_on_one_node)
def test_mistakes(comm, ctx):
    rng = np.random.default_rng(64)
    with pb.Context(comm, engine="host") as other:

        def matrix(shape, dtype="float64", ctx=ctx):
            return scattered(ctx, layout(rng, shape, comm.size, dtype=dtype), numbers(rng, shape, dtype))

        a, square, x, y = matrix((6, 4)), matrix((4, 4)), matrix((4, 1)), matrix((1, 6))
        layouts, arguments, kinds = pb.LayoutError, pb.ArgumentError, pb.ArgumentTypeError
        cases = [
            (layouts, ["this gemv", "x: has 6 elements", "n = 4 like a"], pb.blas.gemv, (a, y), {}),
            (layouts, ["x: has 4 elements", "m = 6 like a"], pb.blas.gemv, (a, x), {"op_a": "T"}),
            (layouts, ["y: has 4 elements, expected m = 6"], pb.blas.gemv, (a, x, x), {"beta": 1}),
            (layouts, ["out: has 4 elements, expected m = 6"], pb.blas.gemv, (a, x), {"out": matrix((4, 1))}),
            (layouts, ["x: shape is 4x4, expected a vector"], pb.blas.gemv, (a, square), {}),
            (layouts, ["a: has 6x4", "a square matrix"], pb.blas.symv, (a, x), {}),
            (layouts, ["y: has 6 elements, expected n = 4 like x"], pb.blas.dot, (x, y), {}),
            (layouts, ["x: dtype is float16, expected float32"], pb.blas.nrm2, (matrix((3, 1), "float16"),), {}),
            (layouts, ["x: dtype is float32, expected float64 like a"], pb.blas.gemv,
             (a, matrix((4, 1), "float32")), {}),
            (layouts, ["x: has 6 elements, expected m = 4 like a"], pb.blas.ger,
             (matrix((6, 1)), x, matrix((4, 6))), {}),
            (arguments, ["y: beta is 2"], pb.blas.gemv, (a, x), {"beta": 2}),
            (arguments, ["op_a: expected 'N', 'T' or 'C'"], pb.blas.gemv, (a, x), {"op_a": "Q"}),
            (arguments, ["uplo: expected"], pb.blas.syr, (x,), {"uplo": "M"}),
            (arguments, ["alpha", "must be real"], pb.blas.her, (matrix((4, 1), "complex64"),), {"alpha": 1j}),
            (arguments, ["alpha", "complex"], pb.blas.scal, (x,), {"alpha": 1j, "out": x}),
            (kinds, ["alpha: expected a number"], pb.blas.scal, (x,), {"alpha": "2", "out": x}),
            (kinds, ["algo"], pb.blas.gemv, (a, x), {"algo": np.zeros(2)}),
            (kinds, ["algo"], pb.blas.syrk, (a,), {"algo": np.zeros(2)}),
            (kinds, ["algo"], pb.matmul, (a, square), {"algo": np.zeros(2)}),
            (kinds, ["epilogue: expected an Epilogue"], pb.matmul, (a, square), {"epilogue": np.zeros(2)}),
            (kinds, ["epilogue: expected an Epilogue"], pb.verify, (square,) * 4, {"epilogue": "relu"}),
            (arguments, ["x: belongs to another context"], pb.blas.gemv, (a, matrix((4, 1), ctx=other)), {}),
            (kinds, ["x: expected a DistributedMatrix, got ndarray"], pb.blas.gemv, (a, np.ones((4, 1))), {}),
            (kinds, ["x: expected a DistributedMatrix"], pb.blas.gemv, (a, x if comm.rank else "x"), {}),
            *((kinds, ["expected a DistributedMatrix, got NoneType"], call, (None, x), {})
              for call in (pb.blas.gemv, pb.blas.symv, pb.blas.axpy, pb.blas.ger)),
            *((kinds, ["y: expected a DistributedMatrix, got NoneType"], call, (x, None), {})
              for call in (pb.blas.axpy, pb.blas.dot, pb.blas.ger, pb.blas.syr2)),
            (kinds, ["alpha: expected a number, got 1000", "…"], pb.blas.axpy, (x, x), {"alpha": 10**4000}),
            (kinds, ["alpha: expected a number", "too large to print"], pb.blas.axpy, (x, x), {"alpha": 10**5000}),
            (kinds, ["x: expected a DistributedMatrix, got ndarray"], pb.blas.dot, (np.ones(3), np.ones(3)), {}),
            (arguments, ["out: shares memory with x"], pb.blas.gemv, (square, x), {"out": x}),
            (arguments, ["ord: expected 'fro'"], a.norm, ("nuc",), {"uplo": "L"}),
            (arguments, ["uplo: expected 'L' or 'U', got None"], a.norm, (), {"diag": "U"}),
            (arguments, ["kind: a symmetric matrix is square"], a.norm, (), {"uplo": "L", "kind": "symmetric"}),
            (arguments, ["diag: 'U' is for"], square.norm, (), {"uplo": "L", "diag": "U", "kind": "hermitian"}),
            (arguments, ["y: shares memory with x"], pb.blas.swap, (square[:1, :3], square[:1, 1:]), {}),
        ]  # fmt: skip
        for kind, words, call, given, how in cases:
            for _ in range(2):
                refuses(ctx, kind, words, partial(call, *given, **how))
        refuses(ctx, pb.RankMismatchError, ["gemv", "alpha"], pb.blas.gemv, a, x, alpha=comm.rank + 1.0)
        frozen = ctx.zeros(pb.MatrixDescriptor((4, 1), (4, 1), pb.Grid(1, 1)))
        frozen.local.flags.writeable = comm.rank != 0
        for call, how in ((pb.blas.scal, {"alpha": 2, "out": frozen}), (pb.blas.swap, {"y": x})):
            words = ["its local array is read-only"]
            refuses(ctx, pb.ArgumentError, words, call, frozen, **how)


@on_ranks(2)
def test_plans_of_vectors(comm, ctx, tuning_file):
    """Functions of vectors that return one are tuned like others; scal takes itself, or its transpose."""
    rng = np.random.default_rng(67)
    square, left = np.eye(12) * 20 + rng.random((12, 12)), rng.random((12, 1))
    a = scattered(ctx, layout(rng, square.shape, comm.size), square)
    for x in (ctx.scatter(left, block=3), ctx.scatter(left.T.copy(), block=3).T, ctx.full((1, 1), 7)):
        before = x.allgather()
        for out in (x, x.T):
            tuned = pb.tune(pb.blas.scal, x, alpha=3, out=out)
            same = np.array_equal(x.allgather(), before) and "moved" in tuned.seconds
            with pb.plan(pb.blas.scal, x, alpha=3, out=out) as plan:
                results = plan(), plan()
                same &= np.allclose(x.allgather(), 9 * before, rtol=1e-14) and results[1] is out
                plan(x=pb.blas.copy(x))  # another x, the same result
                same &= np.allclose(x.allgather(), 27 * before, rtol=1e-14)
            x[...] = before
            assert same, f"scal in place, {x.shape}, {out.shape}: {x.allgather()}"
    x = ctx.scatter(left, block=3)
    words = ["out: shares memory with x; expected x itself"]
    part = {"alpha": 2, "out": x[1:6]}
    refuses(ctx, pb.ArgumentError, words, pb.plan, pb.blas.scal, x[:5], **part)
    found = pb.tune(pb.blas.gemv, a, x)
    with pb.plan(pb.blas.gemv, a, x) as plan:
        report = plan.report()
        words = ["x: its layout is"]
        refuses(ctx, pb.LayoutError, words, plan, x=a[:5, :1])
    taken = report.algorithm == found.best and "measured on this machine" in str(report)
    assert taken, f"gemv goes by its times: {report}"
    for call in (pb.plan, pb.tune):
        for function, given in ((pb.blas.dot, (x, x)), (pb.blas.nrm2, (x,)), (pb.blas.swap, (x, x))):
            words = [f"{call.__name__}: {function.__name__} is computed at once"]
            refuses(ctx, pb.ArgumentError, words, call, function, *given)
    asks = pb.tune if comm.rank == 0 else pb.plan
    words = ["what asks for it", "tune on rank 0", "plan on rank 1"]
    refuses(ctx, pb.RankMismatchError, words, asks, pb.matmul, a, a)
