# SPDX-License-Identifier: Apache-2.0
"""Direct calls: many calls on ever new sub-matrices, which need neither a plan nor details to agree on."""

import itertools
import weakref
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import pblas
from pblasmp.engines.host.direct import calls
from pblasmp.engines.host.host_transport import Buffers
from pblasmp.pblas import moves
from tests.helpers import inside
from tests.helpers.cases import check_array, check_near, check_view, layout, part, refuses, scattered
from tests.helpers.mpi import on_ranks, run_on_one_node
from tests.helpers.slow import only_long

N, NB = 40, 6


@on_ranks(2, 4)
def test_ranks_that_look_closer_and_ranks_that_do_not(comm, ctx):
    """Ranks that need a closer look at their arguments, and ranks that do not, make the same calls."""
    last = comm.rank == comm.size - 1
    rng = np.random.default_rng(6)
    x = rng.integers(-4, 5, (20, 20)).astype(float)
    a, c = (scattered(ctx, layout(rng, v.shape, comm.size), v) for v in (x, np.zeros((20, 20))))
    expected = 2 * x[:10] @ x
    for count in range(3):
        alpha = np.array(2.0) if last else 2
        pb.matmul(a[:10, :], a, out=c[:10, :], alpha=alpha)
        check_view(c[:10, :], expected, f"alpha as an array on one rank, {count}")
        pb.blas.syrk(a[4:8, :], out=c[4:8, 4:8], alpha=alpha)
        found = np.tril(c[4:8, 4:8].allgather())
        check_array(found, np.tril(2 * x[4:8] @ x[4:8].T), f"syrk, {count}")
    for call, words in (
        (lambda: pb.matmul(a[: 10 + last, :], a), ["matmul: the ranks gave different", "\n  a:"]),
        (lambda: pb.matmul(a, a, alpha=-1 - last), ["\n  alpha:", "-1.0 on rank", "-2.0 on rank"]),
        (lambda: pb.blas.syrk(a, uplo="UL"[last]), ["syrk: the ranks gave different", "\n  uplo:"]),
        (lambda: pb.blas.trmm(a, a) if last else pb.blas.trsm(a, a), ["different calls", "trmm", "trsm"]),
        (lambda: a.norm() if last else a @ a, ["different calls", "norm", "matmul"]),
        (lambda: a.redistribute(block=4 + last), ["redistribute: the ranks gave different", "\n  to:"]),
        (
            lambda: a.redistribute(block=4) if last else pb.blas.geadd(a, c, out=c),
            ["different calls", "redistribute", "geadd"],
        ),
        (lambda: c.__setitem__(slice(4), a[last : 4 + last]), ["the ranks gave different", "\n  value:"]),
    ):
        refuses(ctx, pb.RankMismatchError, words, call)
    twin = ctx.zeros(a.descriptor)
    refuses(ctx, pb.ArgumentError, ["shares memory"], lambda: a.redistribute(out=twin if comm.rank else a))
    c[:10, :], moved = a[10:, :], a[:, 3:].redistribute(block=(3, 2), dtype="float64" if last else None)
    check_view(c[:10, :], x[10:], "rows in the place of others")
    check_view(moved, x[:, 3:], "moved, a type on one rank")
    words, faulty = ["sizes", f"rank {comm.size - 1}"], a[:9, :] if last else a
    refuses(ctx, pb.LayoutError, words, pb.matmul, a, faulty)
    ictxt = pblas.gridinit(ctx, "Row", *pb.Grid.squarest(comm.size).shape)
    f = ctx.scatter(x, block=4, grid=pb.Grid.squarest(comm.size), order="F")
    g = ctx.zeros(f.descriptor)
    desc = pblas.descinit(20, 20, 4, 4, 0, 0, ictxt, max(1, f.local.shape[0]))
    m = np.int64(10) if last else 10

    def product(ja=1, desc=desc, descb=desc, m=m):
        pblas.pdgemm(
            "N", "T", m, 20, 20, 1.0, f.local, 1, ja, desc, f.local, 1, 1, descb, 0.0, g.local, 1, 1, desc
        )

    product()
    check_view(g[:10, :], x[:10] @ x.T, "pdgemm")
    refuses(ctx, pblas.ParameterError, ["argument 9 (ja)"], product, 1 + last)
    for wrong in (7, [[1]] * 9, None, desc[:7]):
        given = wrong if last else desc
        refuses(ctx, pblas.ParameterError, ["(descb)"], product, descb=given, m=10)
    product(descb=list(map(int, desc)) if last else desc)
    check_view(g[:10, :], x[:10] @ x.T, "descriptor as a list")


@on_ranks(1, 4)
def test_the_same_call_again(comm, ctx):
    """Programs that are kept know what changes between equal calls: values, alpha, memory, and what may be written."""
    rng = np.random.default_rng(9)
    x = rng.integers(-4, 5, (24, 24)).astype(float)
    of_a, of_c = (layout(rng, x.shape, comm.size) for _ in "ac")
    a, c = scattered(ctx, of_a, x), ctx.zeros(of_c)
    for count in range(6):
        alpha = 1 + count // 3
        a.local[...] += 1
        x += 1
        pb.matmul(a[:9, :], a, out=c[:9, :], alpha=alpha)
        check_view(c[:9, :], alpha * x[:9] @ x, f"run {count}")
    held = [weakref.ref(each.local) for each in (a, c)]
    del a, c
    assert not any(each() is not None for each in held), "memory"
    for count in range(3):  # likely at the same addresses
        b, c = scattered(ctx, of_a, x + count), ctx.zeros(of_c)
        pb.matmul(b[:9, :], b, out=c[:9, :])
        check_view(c[:9, :], (x + count)[:9] @ (x + count), f"new matrix {count}")
    _sums_again(ctx)
    c.local.flags.writeable = False
    refuses(ctx, pb.ArgumentError, ["read-only"], pb.matmul, b[:9, :], b, out=c[:9, :])


def _sums_again(ctx):
    """Sums of the same vectors are not prepared again, whatever was called between; of others they are."""
    n, started = 4 * ctx.size, []
    v, w = (ctx.scatter(np.arange(n * 1.0)[:, None] + k, block=4, grid=(ctx.size, 1)) for k in range(2))
    whole = np.diag(np.arange(1.0, n + 1))
    square = ctx.scatter(whole, block=4, grid=pb.Grid.squarest(ctx.size))
    start = getattr(ctx.engine.direct, inside.START)
    setattr(ctx.engine.direct, inside.START, lambda asked: started.append(asked) or start(asked))
    for count in range(3):
        x, y = (each.allgather()[:, 0] for each in (v, w))
        found = [pb.blas.dot(v, w), pb.blas.dot(v, w), pb.blas.dot(v, v), pb.blas.asum(v), pb.blas.dot(v, w)]
        check_array(np.array(found), np.array([x @ y, x @ y, x @ x, x.sum(), x @ y]), f"sums {count}")
        check_view(pb.linalg.inv(square), np.linalg.inv(whole), f"inverse {count}")
        v.local[...] += 1
    for count in range(3):  # and so are routines that write vectors: a change of any argument is seen
        alpha = float(1 + count // 2)
        for op in "NT":
            pb.blas.gemv(square, v, op_a=op, alpha=alpha, out=w)
            check_view(w, alpha * whole @ v.allgather(), f"gemv {count} {op}")
        before = w.allgather()
        pb.blas.axpy(v, w, alpha=alpha, out=w)
        pb.blas.scal(w, alpha=alpha, out=w)
        pb.blas.swap(v, w)
        check_view(v, alpha * (before + alpha * w.allgather()), f"axpy, scal, swap {count}")
        v.local[...] = np.arange(len(v.local))[:, None] - 3
    v.local.flags.writeable = ctx.rank > 0
    refuses(ctx, pb.ArgumentError, ["read-only"], pb.blas.gemv, square, w, out=v)
    v.local.flags.writeable = True
    if ctx.size > 1:  # the same as before on one rank only
        pb.blas.gemv(square, v, out=w)
        given = {"alpha": 2.0} if ctx.rank == 0 else {}
        refuses(ctx, pb.RankMismatchError, ["alpha"], pb.blas.gemv, square, v, out=w, **given)
    sums = [
        each.routine
        for each in {id(each): each for each in started}.values()
        if each.routine in ("dot", "asum")
    ]
    expected = ["dot", "dot", *3 * ["dot", "asum", "dot"]]  # the first one is only noted
    assert sums == expected, "prepared"
    del w
    w = ctx.scatter(np.ones((n, 1)), block=4, grid=(ctx.size, 1))  # likely where the other one was
    assert pb.blas.dot(v, w) == v.allgather().sum(), "another vector"


class Counted:
    """Direct calls of an engine, and how many of them were done."""

    def __init__(self, direct):
        self._direct, self.done = direct, 0

    def factors(self, *args):
        return self._direct.factors(*args)

    def __getattr__(self, way):
        def call(*args):
            found = getattr(self._direct, way)(*args)
            self.done += found is not None and found is not False
            return found

        return call


def small_calls(ctx):
    """By name, small calls of each kind, under public names and under PBLAS's."""
    a, b, c, spd = (ctx.full((48, 48), value, block=12) for value in (1.0, 2.0, 0.0, 0.0))
    spd.local[...] = ctx.scatter(np.eye(48) * 50, block=12).local
    x, y = (ctx.full((48, 1), 1.0, block=12) for _ in range(2))
    ictxt = pblas.gridinit(ctx, "Row", 1, ctx.size)
    desc = pblas.descinit(16, 16, 4, 4, 0, 0, ictxt, 16)
    p, q, r = (
        np.asfortranarray(np.eye(16)[:, : pblas.numroc(16, 4, ctx.rank, 0, ctx.size)]) for _ in range(3)
    )
    whole = (1, 1, desc)
    ipiv, tau = np.zeros(32, np.int32), np.zeros(16)
    return {
        "matmul": lambda: pb.matmul(a, b, out=c),
        "@": lambda: a @ b,
        "syrk": lambda: pb.blas.syrk(a, beta=1, c=c, out=c),
        "trsm": lambda: pb.blas.trsm(spd, b, out=b),
        "geadd": lambda: pb.blas.geadd(a, b, out=b),
        "assignment": lambda: b.__setitem__((slice(20), slice(3, 40)), a[5:25, 3:40]),
        "redistribute": lambda: a.redistribute(block=7),
        "redistribute out": lambda: a.redistribute(out=b),
        "gemv": lambda: pb.blas.gemv(a, x, out=y),
        "nrm2": lambda: pb.blas.nrm2(x),
        "cholesky": lambda: pb.linalg.cholesky(spd),
        "cho_solve": lambda: pb.linalg.cho_solve((spd, True), x),
        "lu_factor": lambda: pb.linalg.lu_factor(spd),
        "lu_solve": lambda: pb.linalg.lu_solve((spd, np.arange(48)), x, "T"),
        "solve_triangular": lambda: pb.linalg.solve_triangular(spd, x),
        "inv": lambda: pb.linalg.inv(spd),
        "inv pos": lambda: pb.linalg.inv(spd, "pos"),
        "inv triangular": lambda: pb.linalg.inv(spd, "lower triangular"),
        "solve": lambda: pb.linalg.solve(spd, x),
        "pdgemm": lambda: pblas.pdgemm("N", "N", 16, 16, 16, 1.0, p, *whole, q, *whole, 0.0, r, *whole),
        "pdgemv": lambda: pblas.pdgemv("N", 16, 16, 1.0, p, *whole, q, *whole, 1, 0.0, r, *whole, 1),
        "pdpotrf": lambda: pblas.pdpotrf("L", 16, p, *whole, None),
        "pdgetrf": lambda: pblas.pdgetrf(16, 16, q, *whole, ipiv, None),
        "pdgetrs": lambda: pblas.pdgetrs("N", 16, 16, q, *whole, ipiv, r, *whole),
        "pdgetri": lambda: pblas.pdgetri(16, q, *whole, ipiv),
        "pdpotrs": lambda: pblas.pdpotrs("L", 16, 16, p, *whole, r, *whole),
        "pdtrtrs": lambda: pblas.pdtrtrs("L", "N", "N", 16, 16, p, *whole, r, *whole),
        "pdtrtri": lambda: pblas.pdtrtri("L", "N", 16, p, *whole),
        "pdpotri": lambda: pblas.pdpotri("L", 16, p, *whole),
        "pdgeqrf": lambda: pblas.pdgeqrf(16, 16, p, *whole, tau),
        "pdormqr": lambda: pblas.pdormqr("R", "T", 16, 16, 16, p, *whole, tau, r, *whole),
        "pdorgqr": lambda: pblas.pdorgqr(16, 16, 16, p, *whole, tau),
        "pdgels": lambda: pblas.pdgels("N", 16, 16, 16, q, *whole, r, *whole),
        "pdgemr2d": lambda: pblas.pdgemr2d(16, 16, p, *whole, r, *whole, ictxt),
    }  # fmt: skip


@on_ranks(2, runner=run_on_one_node)
def test_small_calls_stay_direct_after_measurements(comm, tuning_file):
    """What is measured decides between plans: a call that needs none stays direct, in later contexts as well."""
    for tuned in (True, False):
        with pb.Context(comm, engine="host") as ctx:
            if tuned:
                pb.tune(pb.matmul_allreduce, np.ones((64, 8)), np.ones((32, 8)), ctx)
                a = ctx.full((48, 48), 1.0, block=12)  # the sizes that are called below
                pb.tune(pb.matmul, a, a)
                pb.tune(pb.blas.trsm, a, a)
            else:
                assert len(ctx.engine.measured.entries) == 3, "the tuning_file is read"
            for name, call in small_calls(ctx).items():
                direct = ctx.engine.direct
                ctx.engine.direct = counted = Counted(direct)
                call()
                ctx.engine.direct = direct
                assert counted.done, f"{name}, {'tuned' if tuned else 'later'}"


@on_ranks(1, 4)
def test_scalars_beyond_single_precision(ctx):
    """Scalars beyond single precision count as infinite."""
    for dtype in ("float32", "complex64"):
        a = ctx.full((6, 6), 1.0, block=2, dtype=dtype)
        for name, call in (
            ("matmul", lambda a: pb.matmul(a, a, alpha=-1e300)),
            ("syrk", lambda a: pb.blas.syrk(a, a, alpha=1e39, beta=1)),
            ("herk", lambda a: pb.blas.herk(a, a, beta=1e300)),
            ("trsm", lambda a: pb.blas.trsm(a, a, alpha=1e300)),
            ("gemv", lambda a: pb.blas.gemv(a, a[:, :1], a[:1], beta=1e300)),
        ):
            found = call(a).allgather()[0, 0]
            assert not np.isfinite(found), f"{name} {dtype}"


@on_ranks(1)
def test_moved_alone(comm):
    """p?gemr2d between grids of one process: what is illegal is found as ever."""
    with pb.Context(comm, engine="host") as ctx:
        first_grid, other = (pblas.gridinit(ctx, "Row", 1, 1) for _ in range(2))
        desc = [1, first_grid, 9, 8, 2, 3, 0, 0, 10]
        x = np.asfortranarray(np.arange(80.0).reshape(10, 8))
        y = np.zeros(108)
        for words, change in (
            (["argument 7 (b)", "read-only"], {6: np.broadcast_to(0.0, (12, 9))}),
            (["argument 7 (b)", "shares memory"], {6: x, 9: desc}),
            (["argument 5 (ja)", "end at 10"], {4: 6}),
            (["argument 1 (m)"], {0: -1}),
            (["argument 3 (a)", "float64"], {2: x.astype("f4")}),
            (["argument 6 (desca)", "LLD_"], {5: [*desc[:8], 4]}),
            (["argument 11 (ictxt)"], {10: 12345}),
        ):
            given = [2, 5, x, 1, 1, desc, y, 1, 1, [1, other, 12, 9, 4, 4, 0, 0, 12], other]
            for at, value in change.items():
                given[at] = value
            with pytest.raises(pblas.ParameterError) as caught:
                pblas.pdgemr2d(*given)
            assert all(word in str(caught.value) for word in words), f"{words}: {caught.value}"
            assert not y.any(), f"{words}: written"
    with pytest.raises(pblas.ParameterError):
        pblas.pdgemr2d(2, 5, x, 1, 1, desc, y, 1, 1, desc, other)


@on_ranks(4, runner=run_on_one_node)
def test_moved_together(comm, ctx):
    """p?gemr2d and p?trmr2d between grids take one vote; what the processes do not say alike is found as ever."""
    everybody = pblas.gridinit(ctx, "Row", 1, comm.size)
    every = {
        shape: pblas.gridinit(ctx, "Col", *shape)
        for shape in ((1, comm.size), (comm.size, 1), (1, 2), (1, 1))
    }
    last = comm.rank == comm.size - 1

    def held(shape, x, block, source):
        """The arguments of a matrix on a grid; its local array is a copy."""
        ictxt = every[shape]
        if ictxt == -1:
            return [np.zeros((1, 1)), 1, 1, np.full(9, -1)]
        d = pb.MatrixDescriptor(x.shape, block, pb.Grid(*shape, order="col"), source, "f8", "F")
        local = np.asfortranarray(x[np.ix_(*d.global_indices(comm.rank))])
        desc = pblas.descinit(*x.shape, *block, *source, ictxt, max(1, local.shape[0]))
        return [local, 3, 2, desc]

    x, y = np.arange(400.0).reshape(20, 20), np.zeros((20, 20))
    planned, moves.move_planned = moves.move_planned, None
    try:
        for count, (of, to) in enumerate(itertools.permutations(every, 2)):
            m, n = 5 + count, 17 - count
            a, b = held(of, x, (3, 2), (0, of[1] - 1)), held(to, y, (2, 4), (to[0] - 1, 0))
            expected = y.copy()
            part, options = np.ones((m, n), bool), ()
            if count % 2:
                options = "LU"[count % 4 // 2], "N"
                i, j = np.indices((m, n))
                part = j - i <= max(n - m, 0) if options[0] == "L" else j - i >= min(n - m, 0)
            expected[2 : 2 + m, 1 : 1 + n][part] = x[2 : 2 + m, 1 : 1 + n][part]
            getattr(pblas, "pdtrmr2d" if options else "pdgemr2d")(*options, m, n, *a, *b, everybody)
            there = held(to, expected, (2, 4), (to[0] - 1, 0))
            check_array(b[0], there[0], f"{of} to {to} {options}")
    finally:
        moves.move_planned = planned
    a, b = held((1, comm.size), x, (3, 2), (0, 0)), held((1, 2), y, (2, 4), (0, 0))

    def move(m=5, i=3, uplo="L"):
        pblas.pdtrmr2d(uplo, "N", m, 6, a[0], i, *a[2:], *b, everybody)

    refuses(ctx, pb.RankMismatchError, ["\n  m:"], move, m=5 + last)
    refuses(ctx, pb.RankMismatchError, ["trapezoid"], move, uplo="UL"[last])
    refuses(ctx, pb.RankMismatchError, ["A: ", "in 2 ways"], move, i=3 - last)
    refuses(ctx, pblas.ParameterError, ["argument"], move, i=18 if last else 3)
    check_array(b[0], held((1, 2), y, (2, 4), (0, 0))[0], "nothing is written")
    large = np.arange(410.0**2).reshape(410, 410)
    a, b = held((comm.size, 1), large, (3, 2), (0, 0)), held((1, 2), np.zeros((410, 410)), (9, 4), (0, 0))
    capacity = ctx.engine.direct.sets.capacity
    pblas.pdgemr2d(400, 400, *a, *b, everybody)
    expected = np.zeros((410, 410))
    expected[2:402, 1:401] = large[2:402, 1:401]
    check_array(b[0], held((1, 2), expected, (9, 4), (0, 0))[0], "a large one")
    assert ctx.engine.direct.sets.capacity == capacity, "a large one"
    for ictxt in (everybody, *every.values()):
        pblas.gridexit(ictxt)


@on_ranks(1, *only_long(2), 4, *only_long(6))
def test_small(comm):
    """Small factorizations, solves and inverses: what they write, and what they leave as it was."""
    rng = np.random.default_rng(15)
    n, grid = 30, pb.Grid.squarest(comm.size)
    whole = rng.standard_normal((n, n)) + 6 * np.eye(n)
    for order, block in (("F", (4, 3)), ("C", (5, 40))):
        with pb.Context(comm, engine="host") as ctx:

            def matrix(values, ctx=ctx, order=order, block=block):
                return scattered(ctx, pb.MatrixDescriptor(values.shape, block, grid, order=order), values)

            x = matrix(whole)
            expected = np.linalg.solve(whole[:9, :9], whole[2:11, :9])
            pb.linalg.solve(x[:9, :9], x[2:11, :9], out=x[1:10, 1:10])
            d = x[1:10, 1:10]
            check_near(
                d.local, part(expected, d.descriptor, comm.rank), f"D overlaps A and B {order}", atol=1e-12
            )
            for dtype in ("float32", "complex128"):  # with them the memory of a rank is full
                i, j = (
                    ctx.zeros(pb.MatrixDescriptor((127, cols), block, grid, dtype=dtype, order=order))
                    for cols in (127, 131)
                )
                i[:, :] = np.eye(127)
                check_array(pb.linalg.solve(i, j).allgather(), j.allgather(), f"the largest {order} {dtype}")
            planned = inside.plans_kept(ctx)
            pb.linalg.lu_factor(matrix(np.eye(220)))
            assert inside.plans_kept(ctx) > planned, f"a large one {order}: it needed no plan"


@on_ranks(1, *only_long(2), 4, *only_long(6))
def test_pivots(comm, ctx):
    """IPIV in 64 bits, as in 32; one that is illegal, on one rank or on all; one that is too short."""
    n, at, grid = 24, 4, pb.Grid.squarest(comm.size)
    rng = np.random.default_rng(17)
    whole, right = rng.standard_normal((n + at, n + at)), rng.standard_normal((n + at, 5))
    ictxt = pblas.gridinit(ctx, "Row", *grid.shape)

    def held(values, i, j):
        x = scattered(ctx, pb.MatrixDescriptor(values.shape, (5, 3), grid, order="F"), values)
        rows = max(1, x.local.shape[0])
        return x, (x.local, i, j, pblas.descinit(*values.shape, 5, 3, 0, 0, ictxt, rows))

    (a, of_a), (x, of_x), found = held(whole, at, at + 1), held(right, at, 1), []
    begin = a.local.copy(), x.local.copy()
    for dtype in (np.int32, np.int64):
        ipiv = np.zeros(a.local.shape[0] + 5, dtype)
        for _ in range(2):  # the second is a call that is known
            a.local[...], x.local[...] = begin
            pblas.pdgetrf(n, n, *of_a, ipiv)
            pblas.pdgetrs("T", n, 5, *of_a, ipiv, *of_x)
            pblas.pdgetri(n, *of_a, ipiv)
            found.append((ipiv.astype(int), x.allgather(), a.allgather()))
    for other, (what, expected) in itertools.product(found[1:], enumerate(found[0])):
        check_array(other[what], expected, ("IPIV", "X", "the inverse")[what])
    expected = np.linalg.inv(whole[at - 1 : at - 1 + n, at : at + n])
    check_near(found[0][2][at - 1 : at - 1 + n, at : at + n], expected, "inverse", atol=1e-10)
    assert not inside.plans_kept(ctx), "direct"
    x, of_x = held(right, at, 1)
    for wrong, everywhere in itertools.product((at - 1, at + n), (True, False)):
        illegal = ipiv.copy()
        if everywhere or comm.rank == comm.size - 1:
            illegal[illegal > 0] = wrong
        numbers = f"expected numbers of rows of A from {at} to {at + n - 1}, got {wrong}"
        words = ["pdgetrs", "argument 8 (ipiv)", numbers, "INFO = -8"]
        given = ("N", n, 5, *of_a, illegal, *of_x)
        refuses(ctx, pblas.ParameterError, words, pblas.pdgetrs, *given)
        check_view(x, right, f"{wrong} {everywhere}")
        words = ["pdgetri", "argument 6 (ipiv)", numbers, "INFO = -6"]
        refuses(ctx, pblas.ParameterError, words, pblas.pdgetri, n, *of_a, illegal)
    short = np.zeros(max(0, a.local.shape[0] - 1), np.int32)  # enough for sub(A), which ends before A does
    words = ["INFO = -7", "ipiv", "integers, one for each row"]
    given = (n, n, *of_a, short if comm.rank == 0 else ipiv)
    refuses(ctx, pblas.ParameterError, words, pblas.pdgetrf, *given)
    pblas.gridexit(ictxt)


@on_ranks(4, runner=run_on_one_node)
def test_without_more_shared_memory_calls_that_fit_stay_direct(comm, ctx):
    """A node that has no more shared memory: calls that need more are planned, those that fit go on as before."""
    rng = np.random.default_rng(77)
    x = rng.integers(-4, 5, (800, 400)).astype(float)
    a = ctx.scatter(x, block=16, grid=pb.Grid.squarest(comm.size))
    few, get = slice(0, 64), Buffers.get
    check_array(pb.matmul(a[few, :], a[few, :].T).allgather(), x[few] @ x[few].T, "before")

    def refuses(buffers, name, nbytes, *, shared):
        if name == calls.SLABS:
            raise MemoryError
        return get(buffers, name, nbytes, shared=shared)

    Buffers.get = refuses
    try:
        found = pb.matmul(a, a.T)
    finally:
        Buffers.get = get
    check_view(found, x @ x.T, "refused")
    assert inside.plans_kept(ctx) != 0, "refused"
    planned = inside.plans_kept(ctx)
    for count in range(3):
        check_array(pb.matmul(a[few, :], a[few, :].T).allgather(), x[few] @ x[few].T, f"fits {count}")
    assert inside.plans_kept(ctx) == planned, "still direct"
    check_array(pb.matmul(a, a.T).allgather(), x @ x.T, "large again")


@on_ranks(2)
def test_failures_before_anything_has_happened(comm, ctx):
    """Where one rank cannot begin a call, all take the ordinary way, and the context goes on."""
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, N, N))

    def fails(*_args, **_options):
        raise error

    a, b = (ctx.scatter(v if ctx.rank == 0 else None, block=NB, dtype="float64") for v in (x, y))
    d = ctx.zeros((N, N), block=3)
    tall, wide = pblas.gridinit(ctx, "Row", 2, 1), pblas.gridinit(ctx, "Row", 1, 2)
    mine = slice(4 * comm.rank, 4 * comm.rank + 4)
    rows, cols = np.asfortranarray(x[mine, :8]), np.zeros((8, 4), order="F")

    def move():
        cols[...] = 0
        pblas.pdgemr2d(
            8, 8, rows, 1, 1, [1, tall, 8, 8, 4, 8, 0, 0, 4],
            cols, 1, 1, [1, wide, 8, 8, 8, 4, 0, 0, 8], tall,
        )  # fmt: skip
        return cols

    cases = {
        "product": (calls.HostDirect, "_load", lambda: pb.matmul(a, b, out=d), x @ y),
        "reduced": (
            *(calls.HostDirect, "_load", lambda: np.array([pb.blas.dot(a[:, :1], b[:, :1])])),
            x[:, 0] @ y[:, 0],
        ),
        "norm": (calls, "MatrixReducer", lambda: np.array([pb.linalg.norm(a)]), np.linalg.norm(x)),
        "moved": (calls, "Move", move, x[:8, mine]),
        "without": (None, "", lambda: pb.matmul(a, b, out=d), x @ y),
    }
    for error in (MemoryError("no room"), pb.LibraryNotFoundError("no routine")):
        for name, (of, made, compute, expected) in cases.items():
            with ExitStack() as patched:
                if of and comm.rank == 1:
                    patched.enter_context(mock.patch.object(of, made, fails))
                found = compute()
            if isinstance(found, pb.DistributedMatrix):
                found, expected = found.local, part(expected, found.descriptor, comm.rank)
            check_near(found, np.atleast_1d(expected), f"{name}, {error}", atol=1e-12)
    pblas.gridexit(wide)
    pblas.gridexit(tall)
