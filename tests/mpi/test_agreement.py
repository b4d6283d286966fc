# SPDX-License-Identifier: Apache-2.0
"""Collective calls with bad input, other arguments or another call on one rank: one error on all ranks, at once."""

import contextlib
import functools
import gc
import itertools
import operator
import time
import weakref
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import _core, pblas
from tests.helpers.cases import check_matrix, only_last, refuses, scattered
from tests.helpers.mpi import on_ranks, run_mpi, run_on_one_node
from tests.helpers.slow import only_long

LIMIT = 5.0  # seconds; it takes milliseconds, but machines may be busy


class Timed:
    """Fails as ``refuses`` does, or where that took long."""

    def __init__(self, ctx):
        self.ctx = ctx

    def __call__(self, kind, words, call, *args, **kwargs):
        self.ctx.comm.barrier()
        start = time.monotonic()
        refuses(self.ctx, kind, words, call, *args, **kwargs)
        seconds = time.monotonic() - start
        assert seconds < LIMIT, f"{call}: took {seconds:.1f} s"


def votes(comm):
    with pb.Context(comm, engine="host") as ctx:
        in_memory = [each.board is not None for each in (ctx.comm, ctx.control)]
        a = ctx.eye(pb.MatrixDescriptor((6, 6), (2, 2), pb.Grid(1, comm.size)))
        with contextlib.ExitStack() as stack:
            if in_memory[1]:  # nothing asks for a reduction by messages
                stack.enter_context(mock.patch.object(ctx.control, "imax", None))
            if in_memory[0]:
                stack.enter_context(mock.patch.object(ctx.comm, "barrier", None))
            check_matrix(pb.matmul(a, a), np.eye(6))
            return in_memory


class BrokenError(Exception):
    """A user's exception, which wants more than a message."""

    def __init__(self, message, more):
        super().__init__(message, more)


@on_ranks(2, *only_long(4))
def test_bad_input_on_one_rank(comm, ctx, directory):
    last = comm.size - 1
    bad = comm.rank == last
    on = f"(on rank {last})"
    if not bad:
        np.save(f"{directory}/{comm.rank}.npy", np.ones((8, 6)))
    comm.Barrier()
    error = Timed(ctx)
    d = pb.MatrixDescriptor((8, 6), (2, 3), pb.Grid.squarest(comm.size))
    values = np.arange(48.0).reshape(8, 6)
    a = scattered(ctx, d, values)

    wrong = only_last(comm)

    def raising(exception):
        def function(i, j):
            if bad:
                raise exception
            return i + j

        return function

    for name in ("empty", "zeros"):
        words = [f"expected a MatrixDescriptor or a shape (rows, columns), got 'd' {on}"]
        error(pb.ArgumentError, words, getattr(ctx, name), wrong("d", d))
    error(pb.ArgumentError, ["array: ", on], ctx.scatter, None, d, last)
    array = np.ones((8, 7))
    words = [f"array: shape is (8, 7), expected the descriptor's (8, 6) {on}"]
    error(pb.ArgumentError, words, ctx.scatter, wrong(array, None), d, last)
    words = ["array: setting an array element with a sequence", on]
    error(pb.ArgumentError, words, ctx.scatter, [[1, 2], [3]], d, last)
    words = [f"array: expected numbers, got <U1 {on}"]
    error(pb.ArgumentError, words, ctx.scatter, np.full((8, 6), "a"), d, last)
    for root in (-1, comm.size, 0.5):
        error(pb.ArgumentError, ["root", on], ctx.scatter, values, d, wrong(root, 0))
        error(pb.ArgumentError, ["root", on], a.gather, wrong(root, 0))
    beyond = pb.MatrixDescriptor((8, 6), (2, 3), pb.Grid(comm.size + 1, 1))
    more = comm.size + 1
    words = [f"needs {more} ranks, got {comm.size}: mpirun -n {more} starts as many", on]
    error(pb.ArgumentError, words, ctx.from_function, np.add, wrong(beyond, d))
    for exception, kind, words in (
        (ValueError("mine"), ValueError, ["mine " + on]),
        (ZeroDivisionError(), ZeroDivisionError, [on]),
        (KeyError("k"), KeyError, ["'k'", on]),
        (OSError(2, "gone", "x.dat"), FileNotFoundError, [f"gone {on}", "x.dat"]),
        (BrokenError("mine", 3), pb.PblasmpError, ["BrokenError", "mine", on]),
        (type("Local", (Exception,), {})("mine"), pb.PblasmpError, ["Local: mine", on]),
    ):
        error(kind, words, ctx.from_function, raising(exception), d)
    error(
        pb.ArgumentError,
        [f"complex128 does not convert to float64 {on}"],
        ctx.from_function,
        lambda i, j: i * wrong(1j, 1),
        d,
    )
    for words, function in (
        ([f"function: expected a function of i and j, got None {on}"], wrong(None, np.add)),
        ([f"from_function: expected numbers, got object {on}"],
         lambda i, j: None if bad else i + j),
    ):  # fmt: skip
        error(pb.ArgumentError, words, ctx.from_function, function, d)
    shape = d.local_shape(last)
    words = ["from_function", f"expected values of shape {shape}", on]
    error(pb.ArgumentError, words, ctx.from_function, lambda i, j: np.ones((3, 99)) if bad else 1, d)
    mine = a.local.copy()
    for local, words in (
        (mine.tolist(), ["expected a NumPy array", "list"]),
        (np.ones((99, 1)), ["shape is (99, 1)", f"expected {shape}"]),
        (mine.astype("float32"), ["dtype is float32, expected float64"]),
        (np.ones(shape[::-1]).T, ["contiguous rows (C order)"]),
        (np.ones((shape[0], 2 * shape[1]))[:, ::2], ["contiguous rows"]),
        (np.ones(shape)[::-1], ["contiguous rows"]),
        (np.broadcast_to(np.ones(shape[1]), shape), ["contiguous rows"]),
        (_rows_with_a_tail(shape), ["a multiple of 8 bytes apart"]),
    ):
        error(pb.ArgumentError, [*words, on], ctx.from_local, wrong(local, mine), d)
    wide = pb.MatrixDescriptor((8, 7), (2, 3), d.grid)
    error(pb.ArgumentError, [on], a.redistribute, wrong(wide, d))
    error(pb.ArgumentError, [on], a.redistribute, wrong(None, d))
    either = np.array(["L", "U"])
    error(pb.ArgumentError, ["uplo", on], a.redistribute, d, uplo=wrong(either, None))
    error(pb.ArgumentError, ["diag", on], a.redistribute, d, uplo="L", diag=wrong(either, "N"))
    error(TypeError, ["path", "None", on], ctx.load, wrong(None, f"{directory}/0.npy"))
    error(TypeError, ["path", "None", on], a.save, wrong(None, f"{directory}/x.npy"))
    square = ctx.eye((6, 6), block=2)
    unhashable = type("Unhashable", (), {"__hash__": lambda _: 1 // 0})()
    kinds = ZeroDivisionError, pb.ArgumentError
    side = wrong(unhashable, "L")
    error(kinds, [on], pb.blas.trsm, square, square, side=side)
    error(FileNotFoundError, [on], ctx.load, f"{directory}/{comm.rank}.npy")
    error(
        (FileNotFoundError, pb.ArgumentError),
        [f"on rank {last}", "(on rank 0)", "on rank 1"] if comm.size > 2 else ["(on rank 0)"],
        ctx.load, f"{directory}/none{comm.rank}.npy")  # fmt: skip
    error(pb.ArgumentError, [on], a.save, f"{directory}/x.npy", order=wrong("X", "C"))
    check_matrix(a, values, "and after all that")


@on_ranks(*only_long(2), 4)
def test_bad_operand_on_one_rank(comm, ctx):
    last = comm.size - 1
    bad = comm.rank == last
    on = f"(on rank {last})"
    error = Timed(ctx)
    d = pb.MatrixDescriptor((8, 6), (2, 3), pb.Grid.squarest(comm.size))
    values = np.arange(48.0).reshape(8, 6)
    a = scattered(ctx, d, values)

    wrong = only_last(comm)
    b = scattered(ctx, pb.MatrixDescriptor((6, 8), (3, 2), d.grid), values.T)
    other = scattered(ctx, pb.MatrixDescriptor((6, 8), (2, 2), d.grid), values.T)
    error(pb.ArgumentError, ["b: expected a DistributedMatrix", on], pb.matmul, a, wrong(values, b))
    error(pb.RankMismatchError, ["b:", "(2, 2)"], pb.matmul, a, wrong(other, b))
    for option, value, kind, words in (
        ("alpha", "2", pb.ArgumentError, ["alpha: expected a number, got '2'"]),
        ("beta", 1j, pb.ArgumentError, ["beta: 1j is complex"]),
        ("beta", 1, pb.ArgumentError, ["c: beta is 1"]),
        ("comm_sms", "all", pb.ArgumentError, ["comm_sms: expected an integer, got 'all'"]),
        ("op_a", np.array(["N", "T"]), pb.ArgumentError, ["op_a: expected 'N', 'T' or 'C', got array("]),
        ("op_a", "X", pb.ArgumentError, ["op_a: expected 'N', 'T' or 'C', got 'X'"]),
        ("scheme", "ss", pb.ArgumentError, ["scheme"]),
        ("epilogue", "relu", pb.UnsupportedError, ["epilogue"]),
        ("out", a, pb.ArgumentError, ["out: shape is 8x6, expected 8x8"]),
        ("c", a, pb.ArgumentError, ["c: shape is 8x6, expected 8x8"]),
    ):
        options = {option: value} if bad else {}
        error(kind, [*words, on], pb.matmul, a, b, **options)
    words = ["op_a: expected 'N', 'T' or 'C', got 'X'"]
    error(pb.ArgumentError, [*words, on], pb.matmul, a.T, a, op_a=wrong("X", "N"))
    for name, call in (
        ("matmul", pb.matmul),
        ("dot", pb.blas.dot),
        ("cholesky", lambda x, _: pb.linalg.cholesky(x)),
    ):
        words = ["expected a DistributedMatrix, got ndarray: distribute"]
        error(pb.ArgumentError, words, call, values, values)
        column = a[:, :1] if name == "dot" else a[:6, :6]
        given = wrong(values, column), wrong(values, column)
        error(pb.ArgumentError, [*words, on], call, *given)
    for symbol, function in (("+", operator.add), ("-=", operator.isub), ("@", operator.matmul)):
        for what in (None, "2", [1.0], values):
            words = ["expected a DistributedMatrix", f"got {type(what).__name__}", on]
            error(TypeError, words, function, a, wrong(what, a if symbol != "@" else a.T))
            if symbol != "-=":
                left = wrong(what, a if symbol != "@" else a.T)
                error(TypeError, words, function, left, a)
    plan = pb.plan(pb.matmul, a, b)
    error(pb.ArgumentError, ["b: its layout is", on], plan, None, wrong(other, b))
    out = ctx.zeros(plan().descriptor)
    c = ctx.zeros(replace(out.descriptor, block=(1, 1), ld=None))  # is moved
    moved = functools.partial(pb.matmul, a, b, c=c, beta=1, out=out)
    empty = ctx.engine.empty
    if bad:

        def allocate_nothing(*args, **options):
            raise MemoryError("no room")

        ctx.engine.empty = allocate_nothing
    for call in (
        lambda: ctx.empty(d),
        lambda: ctx.scatter(values, d),
        lambda: a.redistribute(d),
        lambda: a @ b,
        moved,
    ):
        error(MemoryError, ["no room " + on], call)
    ctx.engine.empty = empty
    check_matrix(plan(), values @ values.T, "and after all that")
    check_matrix(moved(), values @ values.T, "and of another C")


class _Hashless(float):
    def __hash__(self):
        raise RuntimeError("no hash")


class _Indexless:
    def __index__(self):
        raise RuntimeError("no index")


@on_ranks(2)
def test_odd_values_on_one_rank(comm, ctx):
    """Values whose text, hash or conversion fails where no rank has agreed yet."""
    huge, span = 10**5000, np.timedelta64(3, "s")
    error = Timed(ctx)
    a = scattered(ctx, pb.MatrixDescriptor((6, 6), (2, 3), pb.Grid.squarest(comm.size)), np.eye(6))

    wrong = only_last(comm)
    for words, call, args, how in (
        ("algo: expected a string", pb.linalg.det, (a,), {"algo": wrong(span, "auto")}),
        ("lower: expected True", pb.linalg.eigvalsh, (a,), {"lower": wrong(span, True)}),
        ("op_a: expected", pb.matmul, (a, a), {"op_a": wrong(span, "N")}),
        ("different arguments: alpha", pb.blas.symm, (a, a), {"alpha": wrong(_Hashless(2), 1)}),
        ("too large to print", operator.setitem, (a, wrong(huge, 2), 1), {}),
        ("no index", operator.setitem, (a, wrong(slice(_Indexless()), 2), 1), {}),
    ):
        error(Exception, [words], call, *args, **how)


def _rows_with_a_tail(shape):
    kind = np.dtype([("row", np.float64, (shape[1],)), ("tail", np.int32)])
    return np.zeros(shape[0], kind)["row"]


class NoText:
    """What cannot be printed."""

    def __repr__(self):
        raise RuntimeError


@on_ranks(2, *only_long(3))
def test_bad_operand_beside_other_contexts(comm):
    """Which context a rank means that gives no matrix, or one of another context, it learns from the others."""
    last, alone = comm.size - 1, comm.Split(comm.rank)
    on = f"(on rank {last})"
    contexts = [
        pb.Context(comm, engine="host"),
        pb.Context(alone, engine="host"),
        pb.Context(comm, engine="host"),
    ]
    closed = pb.Context(comm, engine="host")
    gone = closed.eye((6, 6), block=2)
    closed.close()
    for which, ctx in enumerate(contexts):
        if ctx.size == 1:
            continue
        error = Timed(ctx)
        foreign = contexts[2 - which].eye((6, 6), block=2)
        a = ctx.eye((6, 6), block=2)
        y = np.ones((2, 2))
        b, product = a.copy(), a @ a
        d = a.descriptor
        problem = pb.MatmulProblem(d, d, d)

        wrong = only_last(comm)
        another, none, past = "belongs to another context", "expected a DistributedMatrix, got", "is closed"
        for case, kind, words, call, args in (
            ("a number", pb.ArgumentError, none, pb.matmul, (wrong(1, a), wrong(2, b))),
            ("no matrix anywhere", pb.ArgumentError, none, pb.matmul, (1, 2)),
            ("foreign", pb.ArgumentError, another, pb.matmul, (wrong(foreign, a), b)),
            ("foreign anywhere", pb.ArgumentError, another, pb.matmul, (foreign, b)),
            ("closed", pb.ClosedError, past, pb.matmul, (wrong(gone, a), b)),
            ("closed alone", pb.ClosedError, past, pb.matmul, (wrong(gone, a), wrong(gone, b))),
            ("level 3", pb.ArgumentError, none, pb.blas.syrk, (wrong(None, a),)),
            ("level 2", pb.ArgumentError, another, pb.blas.gemv, (wrong(foreign, a), b[:, 0:1])),
            ("level 1", pb.ArgumentError, another, pb.blas.dot, (wrong(foreign, b)[:, 0:1], b[:, 0:1])),
            ("level 1, closed", pb.ClosedError, past, pb.blas.nrm2, (wrong(gone, b)[:, 0:1],)),
            ("factorization", pb.ArgumentError, none, pb.linalg.cholesky, (wrong([[1.0]], a),)),
            ("solve", pb.ArgumentError, another, pb.linalg.solve, (wrong(foreign, a), b)),
            ("norm", pb.ArgumentError, none, pb.linalg.norm, (wrong("x", a),)),
            ("+", pb.ArgumentError, "left: " + another, operator.add, (wrong(foreign, a), b)),
            ("allclose", pb.ArgumentError, none, pb.allclose, (wrong(3, a), wrong(3, b))),
            ("plan", pb.ArgumentError, another, pb.plan, (pb.matmul, wrong(foreign, a), b)),
            ("plan of nothing", pb.ArgumentError, "one of the functions", pb.plan,
             wrong(("x", 1, 2), (pb.matmul, a, b))),
            ("plan of what cannot be printed", pb.ArgumentError, "that cannot be printed", pb.plan,
             wrong((NoText(), 1, 2), (pb.matmul, a, b))),
            ("tune", pb.ArgumentError, none, pb.tune, (pb.matmul, wrong(1, a), wrong(2, b))),
            ("algorithms", pb.ArgumentError, "expected a pblasmp.Context", pb.algorithms, (problem, wrong(1, ctx))),
            ("verify", pb.ArgumentError, "verify: expected a function", pb.verify, (wrong("x", a), b, None, product)),
            ("tensor parallel", pb.ArgumentError, "ctx: expected a pblasmp.Context", pb.matmul_allreduce,
             (y, y, wrong(None, ctx))),
            ("element", pb.ArgumentError, "index: expected", a.__getitem__, (wrong(("x", 0), (0, 0)),)),
            ("element of nothing", pb.ArgumentError, "index: expected", a.__getitem__, (wrong("x", (0, 0)),)),
            ("element of three", pb.ArgumentError, "index: expected", a.__getitem__, (wrong((0, 0, 0), (0, 0)),)),
        ):  # fmt: skip
            everywhere = case.endswith("anywhere")
            error(kind, [words, *([] if everywhere else [on])], call, *args)
        check_matrix(a @ b, np.eye(6), f"right, context {which}")
    grids = [pblas.gridinit(ctx, "Row", 1, ctx.size) for ctx in contexts if ctx.size > 1]
    for mine, other in (grids, grids[::-1]):
        desc, elsewhere = (pblas.descinit(6, 6, 6, 6, 0, 0, each, 6) for each in (mine, other))
        local = np.ones((6, 6), order="F")
        for words, given in (("(desca): expected nine", "x"), ("is not the context of the other", elsewhere)):
            args = (
                *("N", "N", 6, 6, 6, 1.0, local, 1, 1, wrong(given, desc), local, 1, 1, desc),
                *(0.0, local.copy("F"), 1, 1, desc),
            )
            error(pb.ArgumentError, [words, on], pblas.pdgemm, *args)
    for grid in grids:
        pblas.gridexit(grid)
    for ctx in contexts:
        ctx.close()
    alone.Free()
    a_matrix_of_another_context(comm)


@on_ranks(3)
def test_ranks_that_are_ahead_in_another_context(comm):
    """A rank without a matrix raises its error where others make this call, not where others are ahead of it."""
    outer, alone = pb.Context(comm, engine="host"), comm.Split(comm.rank)
    part = comm.Split(comm.rank < 2)
    with pb.Context(part, engine="host") as inner:
        if comm.rank < 2:
            a = inner.eye((4, 4), block=2)
            words = ["expected a DistributedMatrix, got NoneType", "(on rank 0)"]
            time.sleep(0.2)  # the third rank waits for these in another call
            if comm.rank == 1:
                time.sleep(0.2)
            call = functools.partial(pb.linalg.cholesky, None if comm.rank == 0 else a)
            refuses(inner, pb.ArgumentError, words, call)
            check_matrix(a @ a, np.eye(4))
        check_matrix(outer.eye((3, 3), block=1), np.eye(3))
        with pb.Context(alone, engine="host") as own:
            if comm.rank == 0:  # nobody else calls
                with pytest.raises(pb.ArgumentError, match="got NoneType") as error:
                    pb.linalg.cholesky(None)
                assert "rank" not in str(error.value)
            comm.barrier()
            check_matrix(own.eye((3, 3), block=1), np.eye(3))
        check_matrix(outer.eye((3, 3), block=1), np.eye(3))
    outer.close()
    for each in (alone, part):
        each.Free()
    with_a_closed_context(comm)


def with_a_closed_context(comm):
    """Which of two contexts was made last does not depend on whether a rank still has a closed one of the same name."""
    first_one = pb.Context(comm, engine="host")
    second = pb.Context(comm, engine="host")
    first_one.close()
    kept = first_one if comm.rank == 0 else None
    del first_one
    gc.collect()
    with pb.Context(comm, engine="host") as third:
        words = ["expected a DistributedMatrix, got NoneType"]
        refuses(third, pb.ArgumentError, words, pb.linalg.cholesky, None)
    second.close()
    del kept


def holding_an_array(call):
    """Call it with an array among a caller's variables; return a reference to that."""
    array = np.ones(3)
    with contextlib.suppress(pb.PblasmpError):
        call()
    return weakref.ref(array)


@on_ranks(2)
def test_errors_keep_no_variables_of_callers(comm, ctx):
    """Variables go with an error that a caller has caught, or the library: no search for cycles is waited for."""
    a = ctx.eye((6, 6), block=2)
    x, w = np.ones((4, 2)), np.ones((3, 2))
    pb.matmul_allreduce(x, w, ctx)
    if comm.rank:  # where that call is new, others repeat one: the ranks settle it between themselves
        x, w = np.ones((4, 3)), np.ones((3, 3))
    calls = {
        "settled": functools.partial(pb.matmul_allreduce, x, w, ctx),
        "unlike": functools.partial(pb.blas.trsm, a, a, uplo="LU"[comm.rank]),
        "one rank's": functools.partial(pb.matmul, a, None if comm.rank else a),
        "everyone's": functools.partial(pb.matmul, a, None),
    }
    gc.disable()
    try:
        held = [name for name, call in calls.items() if holding_an_array(call)() is not None]
    finally:
        gc.enable()
    assert not held


def a_matrix_of_another_context(comm):
    """One matrix of another open context is a legal call there: all ranks get an error, and both contexts end."""
    mine, other = (pb.Context(comm, engine="host") for _ in range(2))
    x, foreign = (ctx.full((6, 1), 1.0, block=2) for ctx in (mine, other))
    bad = comm.rank == comm.size - 1
    for ctx, call in (
        (mine, functools.partial(pb.blas.nrm2, foreign if bad else x)),
        (mine, x.sum),
        (other, foreign.sum),
    ):
        try:
            call()
            found = "no error"
        except pb.ClosedError as error:
            text = "the ranks use their contexts in different orders"
            found = None if text in str(error) else str(error)
        assert not found, f"one of another context, {ctx is mine}"
        comm.Barrier()  # else the first to be told is in the other context before that one has ended
    with pb.Context(comm, engine="host") as again:
        check_matrix(again.full((2, 2), 1.0, block=1), np.ones((2, 2)), "another context")
    for ctx in (mine, other):
        ctx.close()


@on_ranks(2, *only_long(4))
def test_other_arguments_on_one_rank(comm, ctx, directory):
    last = comm.size - 1
    bad = comm.rank == last
    others = "rank 0" if comm.size == 2 else f"ranks 0-{last - 1}"
    error = Timed(ctx)
    grid = pb.Grid.squarest(comm.size)
    d, e = pb.MatrixDescriptor((8, 8), (2, 2), grid), pb.MatrixDescriptor((8, 8), (4, 4), grid)
    mine = e if bad else d
    a, b, c = ctx.zeros(d), ctx.zeros(d), ctx.zeros(d)
    values = np.zeros((8, 8))
    if comm.rank == 0:
        np.save(f"{directory}/x.npy", values)
        np.save(f"{directory}/y.npy", values)
    comm.Barrier()

    blocks, files = ("(2, 2)", "(4, 4)"), (f"{directory}/x.npy", f"{directory}/y.npy")
    path, root, x = files[bad], last if bad else 0, ctx.zeros(e)
    plan, other = pb.plan(pb.matmul, a, b), pb.plan(pb.matmul, a, b, alpha=2)
    local = np.zeros(mine.local_shape(comm.rank))
    options = (
        ("alpha", 1.0, 2.0), ("op_a", "N", "T"), ("op_b", "N", "C"), ("algo", "auto", "panels"),
        ("compute", None, "tf32"), ("comm_sms", None, 4),
    )  # fmt: skip
    for call, name, told, function, args, how in (
        ("empty", "descriptor", blocks, ctx.empty, (mine,), {}),
        ("zeros", "descriptor", blocks, ctx.zeros, (mine,), {}),
        ("scatter", "descriptor", blocks, ctx.scatter, (values, mine), {}),
        ("scatter", "root", (0, last), ctx.scatter, (values, d, root), {}),
        ("from_function", "descriptor", blocks, ctx.from_function, (np.add, mine), {}),
        ("from_local", "descriptor", blocks, ctx.from_local, (local, mine), {}),
        ("gather", "root", (0, last), a.gather, (root,), {}),
        ("gather", "matrix", blocks, (x if bad else a).gather, (), {}),
        ("allgather", "matrix", blocks, (x if bad else a).allgather, (), {}),
        ("redistribute", "to", blocks, a.redistribute, (mine,), {}),
        ("load", "descriptor", blocks, ctx.load, (files[0], mine), {}),
        ("load", "path", files, ctx.load, (path,), {}),
        ("save", "path", files, a.save, (path,), {}),
        ("save", "order", "CF", a.save, (f"{directory}/z.npy",), {"order": "CF"[bad]}),
        ("matmul", "out", ("new", "given"), pb.matmul, (a, b), {"out": c if bad else None}),
        ("matmul", "beta", (0.0, 3.0), pb.matmul, (a, b, c), {"beta": 3 if bad else 0}),
        ("matmul", "a", blocks, pb.matmul, (x, x) if bad else (a, b), {}),
        ("plan", "plan", (1, 2), other if bad else plan, (), {}),
        *(
            ("matmul", name, told, pb.matmul, (a, b), {name: told[1]} if bad else {})
            for name, *told in options
        ),
    ):
        where = f" on {others}", f" on rank {last}"
        said = (
            (*blocks, *where) if told is blocks else [f"{x}{at}" for x, at in zip(told, where, strict=True)]
        )
        words = [f"{call}: the ranks gave different arguments:", f"\n  {name}:", *said]
        error(pb.RankMismatchError, words, function, *args, **how)
    error(pb.RankMismatchError, ["replaced"], plan, b if bad else None)
    words = [f"{rank} on rank {rank}" for rank in range(comm.size)]
    error(pb.RankMismatchError, words, ctx.scatter, values, d, comm.rank)
    assert not differs_in_engine(comm, bad), "engine"
    check_matrix(plan(), values, "and after all that")


def differs_in_engine(comm, bad):
    try:
        pb.Context(comm, engine="auto" if bad else "host")
    except pb.RankMismatchError as error:
        return None if "engine" in str(error) and "auto on rank" in str(error) else str(error)
    return "no RankMismatchError"


@on_ranks(*only_long(2), 4)
def test_another_call_on_one_rank(comm, ctx, directory):
    last = comm.size - 1
    error = Timed(ctx)
    d = pb.MatrixDescriptor((8, 8), (2, 2), pb.Grid.squarest(comm.size))
    values = np.arange(64.0).reshape(8, 8)
    a = scattered(ctx, d, values)
    plan = pb.plan(pb.matmul, a, a)
    path = Path(directory) / "x.npy"
    a.save(path)
    calls = {
        "empty": lambda: ctx.empty(d),
        "zeros": lambda: ctx.zeros(d),
        "scatter": lambda: ctx.scatter(values, d),
        "from_function": lambda: ctx.from_function(np.add, d),
        "from_local": lambda: ctx.from_local(a.local, d),
        "load": lambda: ctx.load(path, d),
        "gather": a.gather,
        "allgather": a.allgather,
        "redistribute": lambda: a.redistribute(d),
        "save": lambda: a.save(path),
        "matmul": lambda: a @ a,
        "plan": plan,
    }
    names = list(calls)
    for step in (1, 5):
        for here, there in zip(names, names[step:] + names[:step], strict=True):
            words = ["the ranks made different calls:", f"{here} on rank", f"{there} on rank {last}"]
            error(pb.RankMismatchError, words, calls[there if comm.rank == last else here])
    column, out = a[:, :1], ctx.zeros(d)
    for function, *given in (
        (pb.matmul, a, a, None), (pb.linalg.lu_factor, a), (pb.linalg.solve, a, a), (pb.blas.syrk, a),
        (pb.blas.gemv, a, column),
    ):  # fmt: skip
        how = {"out": out} if function is pb.matmul else {}
        with contextlib.suppress(pb.FactorizationError):
            function(*given, **how)  # a call that is repeated
        for planned in (comm.rank == last, comm.rank == 0):
            words = ["the ranks gave different arguments:", "what asks for it:", "plan on rank"]
            call = functools.partial(pb.plan, function) if planned else function
            error(pb.RankMismatchError, words, call, *given, **how)
    words = ["copy: the ranks gave different arguments:"]
    call = a.copy if comm.rank == last else functools.partial(pb.blas.copy, column)
    error(pb.RankMismatchError, words, call)
    if comm.size == 4:
        words = ["load on rank 0", "gather on rank 1", "save on rank 2", "plan on rank 3"]
        mine = ("load", "gather", "save", "plan")[comm.rank]
        error(pb.RankMismatchError, words, calls[mine])
    check_matrix(plan(), values @ values, "and after all that")
    assert sorted(x.name for x in path.parent.iterdir()) == ["x.npy"], "and after all that"
    for name in ("matmul", "gather", "plan"):
        leaves_early = pb.Context(comm, engine="host")
        b = leaves_early.zeros(d)
        its = {"matmul": lambda b=b: b @ b, "gather": b.gather, "plan": pb.plan(pb.matmul, b, b)}
        words = [f"{name} on rank", f"closing the context on rank {last}"]
        call = leaves_early.close if comm.rank == last else its[name]
        error(pb.RankMismatchError, words, call)
        words = ["this context is broken", "a rank has left this context"]
        error(pb.ClosedError, words, its[name])
        leaves_early.close()


@on_ranks(3, *only_long(6))
def test_exceptions_of_some_ranks(comm):
    """An exception that only some ranks see inside the block reaches the others in their next call."""
    for who, name in itertools.product(
        ({0}, {comm.size - 1}, set(range(1, comm.size))), ("matmul", "scatter")
    ):
        start = time.monotonic()
        text = ""
        try:
            with pb.Context(comm, engine="host") as ctx:
                a = ctx.zeros(pb.MatrixDescriptor((8, 8), (2, 2), pb.Grid.squarest(comm.size)))
                if comm.rank in who:
                    raise ZeroDivisionError("my own")
                if name == "matmul":
                    a @ a
                else:
                    ctx.scatter(np.zeros((8, 8)), a.descriptor)
        except ZeroDivisionError as error:
            text = str(error)
        seconds = time.monotonic() - start
        ranks = f"rank {min(who)}" if len(who) == 1 else f"ranks {min(who)}-{max(who)}"
        expected = "my own" if comm.rank in who else f"my own (on {ranks})"
        assert text == expected, f"{name}, raised on {ranks}"
        assert seconds < LIMIT, f"{name}, raised on {ranks}"


@on_ranks(3)
def test_interrupts_before_the_ranks_agree(comm):
    """An interrupt before the ranks agree, in a user's function or an argument's text, is told to those that wait."""

    def stop(*_):
        raise KeyboardInterrupt

    class Number(float):
        __repr__ = stop

    class Side(str):
        __hash__ = stop

    here = comm.rank == 1
    calls = {
        "trsm": lambda ctx: pb.blas.trsm(ctx.eye(4), ctx.eye(4), side=Side("L") if here else "L"),
        "from_function": lambda ctx: ctx.from_function(stop if here else np.add, (4, 4)),
        "map": lambda ctx: ctx.eye((4, 4)).map(stop if here else np.abs),
        "matrix +": lambda ctx: ctx.eye((4, 4)) + (Number(2) if here else 2.0),
    }
    for name, call in calls.items():
        with pb.Context(comm, engine="host") as ctx:
            try:
                call(ctx)
                text = "nothing was raised"
            except (KeyboardInterrupt, pb.ClosedError) as error:
                text = f"{error!r}"
            assert f"rank 1 left {name} with KeyboardInterrupt" in text or here, name
            with pytest.raises(pb.ClosedError, match="is broken"):
                ctx.zeros((2, 2))
    with pb.Context(comm, engine="host") as ctx, pytest.raises(pb.ClosedError, match="closed in this call"):
        ctx.from_function(lambda i, j: (ctx.close(), i + j)[1], (4, 4))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")
@on_ranks(3)
def test_contexts_that_end_with_an_exception_keep_no_descriptors(comm):
    """However a context ends, its memory goes with it, and what that has of the process."""
    kept = []
    for end in ("closed", "with an exception", "early on one rank", "broken"):
        try:
            with pb.Context(comm, engine="host") as ctx:
                if end == "with an exception" and comm.rank == 1:
                    raise ZeroDivisionError("my own")
                if end == "broken" and comm.rank == 1:
                    with ctx.running("redistribute"):
                        raise ZeroDivisionError("my own")
                if end != "early on one rank" or comm.rank != 1:
                    ctx.zeros((4, 4))
        except (ZeroDivisionError, pb.PblasmpError) as error:
            del error
        ctx = None
        gc.collect()
        kept.append(len(list(Path("/proc/self/fd").iterdir())))
    assert len({*kept}) == 1, kept


@pytest.mark.parametrize("per_node", [3, 1])
def test_ranks_of_one_node_vote_in_memory(per_node, monkeypatch):
    monkeypatch.setenv("PBLASMP_RANKS_PER_NODE", str(per_node))
    core = _core.load() is not None
    assert run_on_one_node(votes, 3) == [[per_node == 3 and core, core]] * 3


def wrong_nodes(comm, value, word):
    """PBLASMP_RANKS_PER_NODE that is no number, or not the same everywhere, is an error on every rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PBLASMP_RANKS_PER_NODE", value if comm.rank == comm.size - 1 else "1")
        with pytest.raises(pb.PblasmpError, match=word) as caught:
            pb.Context(comm, engine="host")
    assert len(set(comm.allgather(str(caught.value)))) == 1


@pytest.mark.parametrize("value", ["x", "0", "-1", "1.5", "2"])
def test_ranks_per_node_is_a_positive_integer(value):
    word = (
        "on rank 1" if value == "2" else f"PBLASMP_RANKS_PER_NODE: expected a positive integer, got '{value}'"
    )
    run_mpi(wrong_nodes, 2, value=value, word=word)
