# SPDX-License-Identifier: Apache-2.0
"""Levels 1 and 2 on ranks: every option and type, rows and columns and parts of matrices in any layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import pblas
from pblasmp.engines.host.direct import HostDirect
from pblasmp.engines.host.direct.limits import LIMITS
from pblasmp.pblas.routines import PblasRoutine
from pblasmp.runtime import matrix_calls
from tests.helpers.calls import DTYPES, vector
from tests.helpers.cases import agreed_error, first, layout, numbers, scattered
from tests.helpers.limits import changed_limits
from tests.helpers.mpi import run_mpi, run_on_one_node


def extremes(comm):
    """Norms that LAPACK's scaling saves; infinities and NaN; results that must not differ from rank to rank."""
    rng = np.random.default_rng(63)
    with pb.Context(comm, engine="host") as ctx:
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
                yield f"{dtype} {size}", None if near and abs(again / norm - 1) < 1e-6 else f"{norm}, {again}"
            for size in (1e-25, 3e18, 1.1e154):  # their squares, or sums of two, are no numbers of the type
                if size > huge:
                    continue
                value = size * (1 + 1j) if dtype.startswith("complex") else size
                a, _ = vector(ctx, rng, dtype, 67, np.full(67, value))  # BLAS sums 32 at a time
                norm, expected = float(pb.blas.nrm2(a.matrix)), abs(value) * 67**0.5
                yield (
                    f"{dtype} 67 of {size}",
                    None if abs(norm / expected - 1) < 1e-6 else f"{norm}, {expected}",
                )
            values = np.arange(17.0)
            values[5] = np.inf
            a, _ = vector(ctx, rng, dtype, 17, values)
            of_inf = float(pb.blas.nrm2(a.matrix)), float(pb.blas.asum(a.matrix)), *pb.blas.amax(a.matrix)
            values[[2, 9]] = np.nan
            a, _ = vector(ctx, rng, dtype, 17, values)
            of_nan = float(pb.blas.nrm2(a.matrix)), float(pb.blas.asum(a.matrix)), *pb.blas.amax(a.matrix)
            good = of_inf == (np.inf, np.inf, np.inf, 5) and np.isnan(of_nan[:3]).all() and of_nan[3] == 2
            yield f"{dtype} not finite", None if good else f"{of_inf}, {of_nan}"
        a, _ = vector(ctx, rng, "float64", 1000, rng.standard_normal(1000))
        found = {(pb.blas.nrm2(a.matrix).hex(), pb.blas.dot(a.matrix, a.matrix).hex()) for _ in range(3)}
        yield "the same bits", None if len({*comm.allgather(tuple(found))}) == 1 == len(found) else str(found)


def what_moves(comm):
    """A gemv sends its vectors and partial sums, never A."""
    d = pb.MatrixDescriptor((96, 96), (8, 8), pb.Grid(2, 2))
    column, row = ((96, 1), (8, 1)), ((1, 96), (1, 8))
    with pb.Context(comm, engine="host") as ctx:
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
        wrong = [each for each in sent if not 0 < each[2] <= most]
        yield "sent", str(wrong) if wrong else None


def by_one_vote(comm):
    """PBLAS's routines that write: one vote; products share vectors and partial sums alone."""
    n, block = 256, 16
    ictxt, needed, looked = pblas.gridinit(None, "Row", 2, 2, engine="host"), [], []
    closer, carried_out = PblasRoutine.run, HostDirect._status
    rng = np.random.default_rng(65)
    _, _, row, col = pblas.gridinfo(ictxt)
    rows = pblas.numroc(n, block, row, 0, 2)
    desc, column = (pblas.descinit(n, k, block, block, 0, 0, ictxt, rows) for k in (n, 1))
    whole, x, y = (numbers(rng, shape, "float64") for shape in ((n, n), (n, 1), (n, 1)))
    at = [(np.arange(n) // block) % 2 == p for p in (row, col)]
    a = np.asfortranarray(whole[at[0]][:, at[1]])
    of_x, of_y = (np.asfortranarray(z[at[0]][:, : 1 - col]) for z in (x, y))
    calls = {
        "pdgemv N": lambda: (
            "N",
            n,
            n,
            2.0,
            a,
            1,
            1,
            desc,
            of_x,
            1,
            1,
            column,
            1,
            -1.0,
            of_y,
            1,
            1,
            column,
            1,
        ),
        "pdgemv T": lambda: (
            "T",
            n,
            n,
            2.0,
            a,
            1,
            1,
            desc,
            of_x,
            1,
            1,
            column,
            1,
            0.0,
            of_y,
            1,
            1,
            column,
            1,
        ),
        "pdaxpy": lambda: (n, 3.0, of_x, 1, 1, column, 1, of_y, 1, 1, column, 1),
        "pdcopy": lambda: (n, of_x, 1, 1, column, 1, of_y, 1, 1, column, 1),
        "pdger": lambda: (n, n, 2.0, of_x, 1, 1, column, 1, of_y, 1, 1, column, 1, a, 1, 1, desc),
        "pdsyr": lambda: ("L", n, 1.0, of_x, 1, 1, column, 1, a, 1, 1, desc),
    }
    expected = {
        "pdgemv N": lambda: 2 * whole @ x - y, "pdgemv T": lambda: 2 * whole.T @ x, "pdaxpy": lambda: 3 * x + y,
        "pdcopy": lambda: x, "pdger": lambda: whole + 2 * x @ y.T, "pdsyr": lambda: whole + np.tril(x @ x.T),
    }  # fmt: skip
    PblasRoutine.run = lambda *given, **how: looked.append(given[1]) or closer(*given, **how)

    def carry_out(self, control, asked):
        status = carried_out(self, control, asked)
        twice = asked.routine == "symm"  # a triangle is read by rows and by columns
        needed.append(self._state.nbytes // 2 if twice else self._state.nbytes)
        return status

    HostDirect._status = carry_out
    try:
        for name, given in calls.items():
            if name == "pdgemv T":
                of_y[...] = np.nan  # with a beta of 0 it is not read
            getattr(pblas, name.split()[0])(*given())
            if name in ("pdger", "pdsyr"):
                whole = expected[name]()
                same_here = (a == whole[at[0]][:, at[1]]).all()
            else:
                y = expected[name]()
                same_here = (of_y == y[at[0]][:, : 1 - col]).all()
            yield name, None if same_here else "another result"
        yield from _small_calls(n, (of_x, column), (of_y, column), (x, y), at[0], col)
        yield from _triangle_calls(n, (a, desc), (of_x, column), (of_y, column), whole, at)
        taken = len(looked)
        last = np.int64(n) if row * 2 + col == 3 else n
        found = pblas.pdasum(last, None, of_x, 1, 1, column, 1)
        expected_sum = abs(of_x).sum() if col == 0 else 0
        near = bool(found) == (col == 0) and found >= expected_sum
        yield "one rank looks closer", None if near and len(looked) == taken + 1 else f"{found}, {looked}"
        del looked[taken:]
    finally:
        PblasRoutine.run, HostDirect._status = closer, carried_out
    pblas.gridexit(ictxt)
    yield "looked closer", str(looked) if looked else None
    most = 8 * n * (1 + 2) + 64 * 8  # x, and two partial sums of each element
    yield "shared memory", None if needed and max(needed) <= most else f"{needed}, at most {most}"


def known_calls(comm):
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
        yield "again", None if found == 6.0 * n * here else f"{found}"
    x[...] = 4
    yield "other values", None if dot() == 8.0 * n * here else "the old ones"
    yield "another array", None if dot(x=spare) == 10.0 * n * here else "the old one"
    for what, given in (
        ("a float for n", {"n": 64.0}), ("True for n", {"n": True}), ("too many", {"n": n + 1}),
        ("another type", {"x": np.asfortranarray(x, np.float32)}), ("short", {"x": x[: rows - 1]}),
        ("a descriptor of floats", {"desc": [*desc[:8], rows + 0.5]}),
    ):  # fmt: skip
        if what == "short" and not here:
            given = {}
        yield what, agreed_error(ctx, pblas.ParameterError, [], partial(dot, **given))
    for what, inc in (("a float", 1.0), ("None", None)):
        words = ["pdscal: argument 7 (incx): expected an integer"]
        yield f"{what} for incx", agreed_error(ctx, pblas.ParameterError, words, partial(scaled, inc=inc))
    yield "one n", agreed_error(ctx, pb.RankMismatchError, ["n:"], partial(dot, n=n - last))
    for _ in range(3):
        scaled()
    x.flags.writeable = not last
    yield "read-only", agreed_error(ctx, pblas.ParameterError, ["read-only"], scaled)
    x.flags.writeable = True
    yield "one alpha", agreed_error(ctx, pb.RankMismatchError, ["alpha"], partial(scaled, alpha=2.0 + last))
    yield "written once a call", None if (x == 32).all() else f"{x}"
    desc[2] -= 1
    yield "the descriptor changes in place", agreed_error(ctx, pblas.ParameterError, [], dot)
    desc[2] += 1
    before = x.ctypes.data
    x.resize((64 * rows, 1 - col), refcheck=False)
    x[...] = 1
    moved = x.ctypes.data != before
    yield "the array moves", None if dot() == 2.0 * n * here else f"the old place is read, {moved}"
    pblas.gridexit(ictxt)
    yield "the grid is gone", None if _raises(pblas.ParameterError, dot) else "no error"


def _raises(kind, call):
    try:
        call()
    except kind:
        return True
    return False


def _small_calls(n, of_x, of_y, values, at, col):
    """Reductions, scal and swap on vectors of one layout and, for swap, of two."""
    (x, desc_x), (y, desc_y) = of_x, of_y
    one, other = (z[:, 0] for z in values)
    one, other = one.copy(), np.zeros(n)
    y[...] = 0
    as_x, as_y = (x, 1, 1, desc_x, 1), (y, 1, 1, desc_y, 1)
    number, index = np.full(1, 7.0), np.full(1, 7, np.int32)
    for name, expected in (
        ("pdnrm2", np.sqrt((one * one).sum())), ("pdasum", abs(one).sum()), ("pddot", 0.0),
    ):  # fmt: skip
        found = getattr(pblas, name)(n, number, *as_x, *(as_y if name == "pddot" else ()))
        expected = expected if col == 0 else 0.0
        near = abs(number[0] - expected) <= 1e-14 * abs(expected) and found == number[0]
        yield name, None if near else f"{found}, {number}, expected {expected}"
    pblas.pdamax(n - 7, number, index, x, 8, 1, desc_x, 1)
    best = 7 + abs(one[7:]).argmax()
    expected = (one[best], best + 1) if col == 0 else (0, 0)
    yield "pdamax", None if (number[0], index[0]) == expected else f"{number}, {index}, expected {expected}"
    flat = x.reshape(-1, order="F")  # of one dimension, and empty where there is no part
    found = pblas.pdasum(n, None, flat, 1, 1, desc_x, 1)
    yield "one dimension", None if bool(found) == (col == 0) else f"{found}"
    pblas.pdscal(n, 3.0, *as_x)
    pblas.pdswap(n, *as_x, *as_y)
    same_here = (x == other[at][:, None][:, : 1 - col]).all() and (
        y == 3 * one[at][:, None][:, : 1 - col]
    ).all()
    yield "pdscal, pdswap", None if same_here else "another result"
    pblas.pdswap(n - 20, x, 1, 1, desc_x, 1, y, 21, 1, desc_y, 1)  # between ranks
    other[:-20], one[20:] = 3 * one[20:], one[20:] * 0
    same_here = (x == other[at][:, None][:, : 1 - col]).all() and (
        y == 3 * one[at][:, None][:, : 1 - col]
    ).all()
    yield "pdswap at another offset", None if same_here else "another result"
    if col == 0:
        x[...] = np.arange(n)[at][:, None] % 7 - 3
        y[...] = np.arange(n)[at][:, None] % 5 - 2


def _triangle_calls(n, of_a, of_x, of_y, whole, at):
    """Products of a symmetric or triangular matrix with a vector: its triangles stay where they are."""
    (a, desc), (x, desc_x), (y, desc_y) = of_a, of_x, of_y
    col = 0 if x.shape[1] else 1
    given = np.arange(n) % 7 - 3.0, np.arange(n) % 5 - 2.0
    as_x, as_y = (x, 1, 1, desc_x, 1), (y, 1, 1, desc_y, 1)
    for uplo in "LU":
        part = np.tril(whole) if uplo == "L" else np.triu(whole)
        unread = np.where((np.tril if uplo == "L" else np.triu)(np.ones((n, n))) > 0, whole, np.nan)
        a[...] = unread[at[0]][:, at[1]]
        full = part + part.T - np.diag(part.diagonal())
        if x.size:
            y[...] = np.nan
        for alpha, portion in ((2.0, LIMITS.portion), (3.0, 40)):  # elements; blocks have 64 or more
            with changed_limits(portion=portion):
                pblas.pdsymv(uplo, n, alpha, a, 1, 1, desc, *as_x, 0.0, *as_y)
            expected = alpha * full @ given[0]
            same_here = (y == expected[at[0]][:, None][:, : 1 - col]).all()
            yield f"pdsymv {uplo} in portions of {portion}", None if same_here else "another result"
        for trans in "NT":
            a[...] = (unread / 1024 + np.eye(n))[at[0]][:, at[1]]
            if x.size:
                y[...] = given[1][at[0]][:, None]
            pblas.pdtrsv(uplo, trans, "N", n, a, 1, 1, desc, *as_y)
            t = np.where(np.isnan(unread), 0, unread) / 1024 + np.eye(n)
            expected = np.linalg.solve(t if trans == "N" else t.T, given[1])[at[0]][:, None][:, : 1 - col]
            near = np.allclose(y, expected, rtol=1e-12, atol=1e-12)
            yield f"pdtrsv {uplo} {trans}", None if near else "another result"
            a[...] = unread[at[0]][:, at[1]]
            for diag in "NU":
                if x.size:
                    y[...] = given[1][at[0]][:, None]
                pblas.pdtrmv(uplo, trans, diag, n, a, 1, 1, desc, *as_y)
                t = part - np.diag(part.diagonal()) + np.eye(n) if diag == "U" else part
                expected = (t if trans == "N" else t.T) @ given[1]
                same_here = (y == expected[at[0]][:, None][:, : 1 - col]).all()
                yield f"pdtrmv {uplo}{trans}{diag}", None if same_here else "another result"


def without_plans(comm):
    """The 0-based routines, called for the first time on columns of one grid: one vote, and no plan."""
    n, d = 40, pb.MatrixDescriptor((40, 40), (8, 8), pb.Grid(2, 2))
    rng, looked, closer = np.random.default_rng(66), [], matrix_calls.run
    with pb.Context(comm, engine="host") as ctx:
        whole = np.tril(numbers(rng, (n, n), "float64")) + 9 * np.eye(n)
        given = [numbers(rng, (n, 1), "float64") for _ in range(2)]
        a, (x, y) = scattered(ctx, d, whole), (scattered(ctx, replace(d[:, :1], ld=None), z) for z in given)
        u, v = given
        full = whole + np.tril(whole, -1).T
        z = ctx.zeros((n, 1), block=8, grid=(2, 2))
        row = ctx.zeros((1, n), block=8, grid=(2, 2))
        calls = {
            "gemv": (partial(pb.blas.gemv, a, x), whole @ u),
            "gemv of a row": (partial(pb.blas.gemv, a, x, op_a="T", alpha=2, out=row), 2 * whole.T @ u),
            "symv": (partial(pb.blas.symv, a, x, y, beta=1.0, out=z), full @ u + v),
            "trmv": (partial(pb.blas.trmv, a, x, op_a="T"), whole.T @ u),
            "trsv": (partial(pb.blas.trsv, a, x), np.linalg.solve(whole, u)),
            "ger": (partial(pb.blas.ger, x, y, a, alpha=2), 2 * u @ v.T + whole),
            "syr": (partial(pb.blas.syr, x), np.tril(u @ u.T)),
            "syr2": (partial(pb.blas.syr2, x, y, a), np.tril(u @ v.T + v @ u.T) + whole),
            "axpy": (partial(pb.blas.axpy, x, y, alpha=3), 3 * u + v),
            "copy": (partial(pb.blas.copy, x), u),
            "scal": (partial(pb.blas.scal, x, alpha=2, out=x), 2 * u),
            "swap": (partial(pb.blas.swap, x, y), None),
        }
        matrix_calls.run = lambda *given, **how: looked.append(given[0].name) or closer(*given, **how)
        try:
            for name, (call, expected) in calls.items():
                before = ctx.control.channel._agreements
                found = call()
                votes = ctx.control.channel._agreements - before
                there = [comm.bcast(z.gather()) for z in ((x, y) if found is None else (found,))]
                right = np.hstack([v, 2 * u]) if expected is None else expected
                near = np.allclose(np.hstack(there).reshape(right.shape), right, rtol=1e-13, atol=1e-13)
                yield (
                    f"{name} without a plan",
                    None if near and votes == 1 else f"{votes} votes, right: {near}",
                )
        finally:
            matrix_calls.run = closer
        yield "planned", str(looked) if looked else None


def mistakes(comm):
    rng = np.random.default_rng(64)
    with pb.Context(comm, engine="host") as ctx, pb.Context(comm, engine="host") as other:

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
                yield f"{call.__name__} {words}", agreed_error(ctx, kind, words, partial(call, *given, **how))
        yield (
            "different alphas",
            agreed_error(
                ctx, pb.RankMismatchError, ["gemv", "alpha"], pb.blas.gemv, a, x, alpha=comm.rank + 1.0
            ),
        )
        frozen = ctx.zeros(pb.MatrixDescriptor((4, 1), (4, 1), pb.Grid(1, 1)))
        frozen.local.flags.writeable = comm.rank != 0
        for call, how in ((pb.blas.scal, {"alpha": 2, "out": frozen}), (pb.blas.swap, {"y": x})):
            words = ["its local array is read-only"]
            yield call.__name__, agreed_error(ctx, pb.ArgumentError, words, call, frozen, **how)


def planned(comm, file):
    """Functions of vectors that return one are planned and tuned like others; rows stay rows."""
    rng = np.random.default_rng(67)
    square, left, right = np.eye(12) * 20 + rng.random((12, 12)), rng.random((12, 1)), rng.random((12, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PBLASMP_TUNING", file)
        with pb.Context(comm, engine="host") as ctx:
            a = ctx.scatter(square, block=3)
            for turn in (np.asarray, np.transpose):
                x, y = (ctx.scatter(np.ascontiguousarray(turn(v)), block=3) for v in (left, right))
                for function, args, how in (
                    (pb.blas.gemv, (a, x, y), {"beta": 2}),
                    (pb.blas.symv, (a, x), {}),
                    (pb.blas.trmv, (a, x), {}),
                    (pb.blas.trsv, (a, x), {"uplo": "U"}),
                    (pb.blas.ger, (x, y, a), {}),
                    (pb.blas.syr, (x,), {}),
                    (pb.blas.axpy, (x, y), {"alpha": 2}),
                    (pb.blas.scal, (x,), {"alpha": 3}),
                    (pb.blas.copy, (x,), {}),
                ):
                    expected = function(*args, **how).allgather()
                    with pb.plan(function.__name__, *args, **how) as plan:
                        found = plan().allgather(), plan(x=pb.blas.copy(x)).allgather()
                        wrong = [each.shape != expected.shape or abs(each - expected).max() for each in found]
                        other = agreed_error(ctx, pb.LayoutError, ["x: its layout is"], plan, x=a[:5, :1])
                    case = f"{function.__name__} of {x.shape}"
                    yield case, first(max(wrong) > 1e-13 and f"{wrong}", other)
            found = pb.tune(pb.blas.gemv, a, x)
            with pb.plan(pb.blas.gemv, a, x) as plan:
                report = plan.report()
            taken = report.algorithm == found.best and "measured on this machine" in str(report)
            yield "gemv goes by its times", not taken and str(report)
            for call in (pb.plan, pb.tune):
                for function, given in ((pb.blas.dot, (x, y)), (pb.blas.nrm2, (x,)), (pb.blas.swap, (x, y))):
                    words = [f"{call.__name__}: {function.__name__} is computed at once"]
                    yield words[0], agreed_error(ctx, pb.ArgumentError, words, call, function, *given)
            asks = pb.tune if comm.rank == 0 else pb.plan
            words = ["what asks for it", "tune on rank 0", "plan on rank 1"]
            yield "tune beside plan", agreed_error(ctx, pb.RankMismatchError, words, asks, pb.matmul, a, a)


def test_plans_of_vectors(tmp_path):
    run_mpi(planned, 2, file=str(tmp_path / "tuning.json"))


@pytest.mark.parametrize("nranks", [1, 4])
def test_reductions_and_swap(nranks):
    run_mpi(numbers_and_extremes, nranks)


def numbers_and_extremes(comm):
    yield from extremes(comm)


def test_mistakes_and_what_moves():
    run_on_one_node(others, 4)


def others(comm):
    yield from mistakes(comm)
    yield from what_moves(comm)
    yield from by_one_vote(comm)
    yield from known_calls(comm)
    yield from without_plans(comm)
