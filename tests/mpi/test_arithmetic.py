# SPDX-License-Identifier: Apache-2.0
"""Matrices that behave like arrays: operators, copies and types, against NumPy, in every layout."""

from __future__ import annotations

import operator
import warnings
from enum import IntEnum

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.dtypes import DTYPES, FLOAT8
from tests.helpers.cases import (
    TYPES,
    agreed_error,
    first,
    layout,
    misplaced,
    misplaced_view,
    numbers,
    pick,
    scattered,
    unlike,
)
from tests.helpers.mpi import run_mpi
from tests.helpers.slow import draws, in_turn, only_long

Factor = IntEnum("Factor", {"THREE": 3})  # a number whose type is not Python's own
SYMBOLS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
IN_PLACE = {"+=": operator.iadd, "-=": operator.isub, "*=": operator.imul, "/=": operator.itruediv}
RANKS = (1, 2, *only_long(6), 4)
ALL_TYPES = (*TYPES, *FLOAT8)


def nonzero(values):
    return np.where(values == 0, np.ones_like(values), values)


def expected(function, x, y):
    """What NumPy says, where it says something; two narrow types that differ meet in float32."""
    try:
        return function(x, y)
    except TypeError:
        return function(x.astype(np.float32), y.astype(np.float32))


def operators(comm):
    rng = np.random.default_rng(31)
    with pb.Context(comm, engine="host") as ctx:
        for count in range(draws(12, long=20)):
            shape = pick(rng, ((17, 13), (1, 9), (8, 8), (0, 5)))
            da = layout(rng, shape, comm.size, dtype=pick(rng, TYPES))
            db = layout(rng, shape, comm.size, dtype=pick(rng, TYPES))
            x, y = numbers(rng, shape, da.dtype), nonzero(numbers(rng, shape, db.dtype))
            a, b = scattered(ctx, da, x), scattered(ctx, db, y)
            for symbol, function in SYMBOLS.items():
                result, right = function(a, b), expected(function, x, y)
                where = first(
                    None if result.descriptor.same_places(da) else "not laid out like the left operand",
                    None if result.descriptor.order == da.order else "another memory order",
                    unlike(result.dtype.type(0) + np.zeros(1), right.dtype.type(0) + np.zeros(1)),
                )
                yield f"{count}: {da} {symbol} {db}", first(misplaced(result, right), where)
            yield f"{count}: operands stay", first(misplaced(a, x), misplaced(b, y))
            yield f"{count}: negative", misplaced(-a, -x)
            copy = a.copy()
            copy.local[...] = 9
            yield f"{count}: copies", first(misplaced(a, x), misplaced(+a, x))


def scalars(comm):
    rng = np.random.default_rng(32)
    values = (
        2,
        2.5,
        True,
        1 + 2j,
        Factor.THREE,
        np.float32(3),
        np.float64(3),
        np.int64(3),
        np.array(2.0),
        np.complex64(1j),
    )
    with pb.Context(comm, engine="host") as ctx:
        for dtype in ALL_TYPES:
            d = layout(rng, (9, 7), comm.size, dtype=dtype)
            x = nonzero(np.abs(numbers(rng, d.shape, "float64"))).astype(d.dtype)
            a = scattered(ctx, d, x)
            for (s,) in in_turn(values, keep=1 if comm.size == 1 else 2, first=ALL_TYPES.index(dtype)):
                number = d.dtype.type(s) if isinstance(s, float) and not isinstance(s, np.generic) else s
                number = int(s) if isinstance(s, Factor) else number
                for symbol, function in SYMBOLS.items():
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # 8-bit floats overflow
                        left, right = function(x, number), function(number, x)
                    if left.dtype not in (DTYPES | FLOAT8).values():
                        continue
                    yield f"{dtype} {symbol} {s!r}", misplaced(function(a, s), left)
                    yield f"{s!r} {symbol} {dtype}", misplaced(function(s, a), right)


def in_place(comm):
    rng = np.random.default_rng(33)
    with pb.Context(comm, engine="host") as ctx:
        for count in range(draws(8, long=14)):
            shape = pick(rng, ((17, 13), (12, 12)))
            da = layout(rng, shape, comm.size, dtype=pick(rng, TYPES))
            db = layout(rng, shape, comm.size, dtype=pick(rng, TYPES))
            x, y = numbers(rng, shape, da.dtype), nonzero(numbers(rng, shape, db.dtype))
            a, b = scattered(ctx, da, x), scattered(ctx, db, y)
            for symbol, function in IN_PLACE.items():
                case = f"{count}: {da} {symbol} {db}"
                if db.dtype.kind == "c" and da.dtype.kind != "c":
                    words = [symbol, "does not fit into"]
                    yield case, agreed_error(ctx, pb.ArgumentError, words, function, a, b)
                    continue
                before, memory = a, a.local
                a = function(a, b)
                x = expected(SYMBOLS[symbol[0]], x, y).astype(da.dtype)
                same = a is before and a.local is memory
                yield case, first(misplaced(a, x), None if same else "not in place")
            a *= 2
            a -= 1
            yield f"{count}: scalars", misplaced(a, (x * 2 - 1).astype(da.dtype))
        for dtype in ("float64", "complex64"):
            d = layout(rng, (12, 12), comm.size, dtype=dtype)
            x = numbers(rng, d.shape, d.dtype)
            a = scattered(ctx, d, x)
            a += a.T
            x = x + x.T
            yield f"{d} += its transpose", misplaced(a, x)
            a[2:9, 3:10] -= a[3:10, 2:9]
            x[2:9, 3:10] = x[2:9, 3:10] - x[3:10, 2:9]
            yield f"{d}: a part -= another", misplaced(a, x)
            view = a.T[1:5, 2:8]
            view *= 3
            x.T[1:5, 2:8] *= 3
            yield f"{d}: a part of the transpose", misplaced(a, x)


def views(comm):
    rng = np.random.default_rng(34)
    with pb.Context(comm, engine="host") as ctx:
        for count in range(12):
            da, db = (layout(rng, shape, comm.size) for shape in ((14, 11), (20, 20)))
            x, y = numbers(rng, da.shape, "float64"), numbers(rng, db.shape, "float64")
            a, b = scattered(ctx, da, x), scattered(ctx, db, y)
            i, j = sorted(int(v) for v in rng.integers(0, 11, 2))
            part, other = a[i:j, i:j], b[9 : 9 + j - i, 3 : 3 + j - i]
            u, v = x[i:j, i:j], y[9 : 9 + j - i, 3 : 3 + j - i]
            yield (
                f"{count}: {da}, {db}, {i}:{j}",
                first(
                    misplaced_view(part + other.T, u + v.T),
                    misplaced_view(other.T - part, v.T - u),
                    misplaced_view(part.T * 2, u.T * 2),
                    misplaced_view(-part.T, -u.T),
                    misplaced_view(part.T.copy(), u.T),
                    misplaced_view(part.astype("complex64"), u.astype("complex64")),
                ),
            )
            a[i:j, i:j] = other
            x[i:j, i:j] = v
            a[0:3, 0:0] = 5
            b[1:4, 2:5] = 7
            y[1:4, 2:5] = 7
            yield f"{count}: written", first(misplaced(a, x), misplaced(b, y))


def types(comm):
    rng = np.random.default_rng(35)
    with pb.Context(comm, engine="host") as ctx:
        for of in ALL_TYPES:
            for to in ALL_TYPES:
                d = layout(rng, (9, 7), comm.size, dtype=of)
                x = numbers(rng, d.shape, "float64").astype(d.dtype)
                a = scattered(ctx, d, x)
                if d.dtype.kind == "c" and pb.dtypes.as_dtype(to).kind != "c":
                    words = [f"{of} does not convert to {to}"]
                    yield f"{of} as {to}", agreed_error(ctx, pb.ArgumentError, words, a.astype, to)
                else:
                    b = a.astype(to)
                    copied = b is not a and not np.shares_memory(a.local, b.local)
                    yield (
                        f"{of} as {to}",
                        first(misplaced(b, x.astype(b.dtype)), None if copied else "no copy"),
                    )
        yield (
            "a type that is none",
            agreed_error(ctx, pb.ArgumentError, ["float16", "int32"], a.astype, "int32"),
        )


def errors(comm):
    last = comm.size - 1
    d = pb.MatrixDescriptor((6, 8), (2, 2), pb.Grid.squarest(comm.size))
    with pb.Context(comm, engine="host") as ctx, pb.Context(comm, engine="host") as other:
        a, b, c = (
            ctx.zeros(d),
            ctx.zeros(d.T),
            ctx.zeros(
                d,
            )
            + 1j,
        )
        if comm.size == 4:
            square, line = (ctx.zeros((6, 6), grid=grid, block=2) for grid in ("2x2", "1x4"))
            yield "grids", misplaced(square @ line, np.zeros((6, 6)))
        yield "shapes", agreed_error(ctx, pb.ArgumentError, ["+", "(6, 8)", "(8, 6)"], operator.add, a, b)
        words = ["another context"]
        yield "contexts", agreed_error(ctx, pb.ArgumentError, words, operator.sub, a, other.zeros(d))
        yield "complex", agreed_error(ctx, pb.ArgumentError, ["*=", "complex128"], operator.imul, a, 2j)
        yield (
            "complex /=",
            agreed_error(ctx, pb.ArgumentError, ["complex128", "float64"], operator.itruediv, a, c),
        )
        yield "huge", agreed_error(ctx, pb.ArgumentError, ["scalar"], operator.mul, a, 10**400)
        frozen = a.local.copy(order=d.order)
        frozen.flags.writeable = comm.rank != last
        fixed = ctx.from_local(frozen, d)
        yield "read-only", agreed_error(ctx, pb.ArgumentError, ["read-only"], operator.iadd, fixed, 1)
        yield (
            "read-only part",
            agreed_error(ctx, pb.ArgumentError, ["read-only"], fixed.__setitem__, np.s_[:, :], 1),
        )
        for name, wrong in (("list", [1]), ("array", np.ones((6, 8))), ("text", "2"), ("None", None)):
            words = ["scatter"] if name == "array" else []
            for symbol, function in (SYMBOLS | IN_PLACE | {"@": operator.matmul}).items():
                yield f"{symbol} {name}", agreed_error(ctx, TypeError, words, function, a, wrong)
                if symbol not in IN_PLACE:
                    yield f"{name} {symbol}", agreed_error(ctx, TypeError, words, function, wrong, a)
        mixed = a if comm.rank != last else d
        yield "one layout", agreed_error(ctx, TypeError, ["MatrixDescriptor"], operator.add, a, mixed)
        yield "masked", agreed_error(ctx, TypeError, [], operator.add, a, np.ma.masked_array(1.0, True))
        yield "an item", agreed_error(ctx, TypeError, ["str"], a.__setitem__, np.s_[:, :], "7")
        shape = ["(6, 8)", "(8, 6)"]
        yield (
            "an item of another shape",
            agreed_error(ctx, pb.ArgumentError, shape, a.__setitem__, np.s_[:, :], b),
        )
        if comm.size > 1:
            mine = 2 if comm.rank != last else 3
            words = ["matrix *", f"3 on rank {last}"]
            yield "scalars differ", agreed_error(ctx, pb.RankMismatchError, words, operator.mul, a, mine)
            call = operator.add if comm.rank != last else operator.sub
            words = ["matrix -", "matrix +"]
            yield "operators differ", agreed_error(ctx, pb.RankMismatchError, words, call, a, a)
            ones = ctx.full(d, 1.0)
            moved = ones.redistribute(block=5)
            for name, write in (
                ("+=", lambda: a.__iadd__(mine)),
                ("a number in a part", lambda: a.__setitem__(np.s_[1:, 2:], mine)),
                ("-= of other matrices", lambda: a.__isub__(ones if comm.rank != last else moved)),
            ):
                yield f"{name}, ranks differ", agreed_error(ctx, pb.RankMismatchError, [], write)
                yield f"{name}, ranks differ, and nothing is written", misplaced(a, np.zeros(d.shape))
        yield "and all is well", misplaced(a + 1, np.ones(d.shape))
        small = ctx.full(d, 60000).astype("float16")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            part = small[5:6, 7:8]  # one rank has it
            wrong = agreed_error(ctx, RuntimeWarning, ["overflow"], operator.add, part, part)
        yield "a warning that is an error on one rank", wrong


def no_array(comm):
    with pb.Context(comm, engine="host") as ctx:
        a = ctx.zeros((6, 8), block=2)
        yield "asarray", agreed_error(ctx, TypeError, ["gather()"], np.asarray, a)
        yield "array", agreed_error(ctx, TypeError, ["gather()"], np.array, a)
        yield "a list of it", agreed_error(ctx, TypeError, ["gather()"], np.array, [a])
        for function in (np.sum, np.linalg.norm, np.transpose, np.copy, np.shape, np.dot, np.allclose):
            arguments = (a, a) if function in (np.dot, np.allclose) else (a,)
            words = ["numpy", function.__name__, "gather()"]
            yield function.__name__, agreed_error(ctx, TypeError, words, function, *arguments)
        yield "ufunc", agreed_error(ctx, TypeError, [], np.sin, a)
        yield "truth", agreed_error(ctx, TypeError, ["has no truth value"], bool, a)
        for compared in (operator.eq, operator.ne):
            for right in (a, ctx.eye(4), 1, None, np.zeros((6, 8))):
                words = ["A == B and A != B", "pb.allclose(A, B)", "`is`"]
                wrong = agreed_error(ctx, TypeError, words, compared, a, right)
                yield f"{compared.__name__} {type(right).__name__}", wrong
        yield (
            "an array on the left",
            agreed_error(ctx, TypeError, ["A == B"], operator.eq, np.zeros((6, 8)), a),
        )
        other = ctx.eye(4)
        same = a in [other, a][1:] and {a: 1}[a] == 1 and len({a, other}) == 2
        yield "identity", None if same else "not itself"
        yield "iteration", agreed_error(ctx, TypeError, ["not iterable"], list, a)
        found = (a.ndim, a.size, len(a), a.shape)
        yield "sizes", None if found == (2, 48, 6, (6, 8)) else f"{found}"
        text = repr(a), repr(a.T), repr(a[1:3, 2:5]), repr(ctx)
        words = ("6x8 float64", "8x6 float64", "2x3 float64", f"of {comm.size}")
        good = all(w in t and "\n" not in t for t, w in zip(text, words, strict=True))
        yield "repr", None if good else f"{text}"


def test_np_save_leaves_no_file(tmp_path):
    with pb.Context(engine="host") as ctx:
        with pytest.raises(TypeError, match=r"numpy\.save .* gather"):
            np.save(tmp_path / "x.npy", ctx.zeros((2, 2)))
        with pytest.raises(TypeError, match="gather"):
            np.savez(tmp_path / "x.npz", x=ctx.zeros((2, 2)))
    assert [x.name for x in tmp_path.iterdir() if x.stat().st_size] == []
    assert not (tmp_path / "x.npy").exists()


@pytest.mark.parametrize(("cases", "nranks"), list(in_turn((operators, in_place, views), RANKS, keep=2)))
def test_operators(cases, nranks):
    run_mpi(cases, nranks)


@pytest.mark.parametrize("nranks", [1, 3])
@pytest.mark.parametrize("cases", [scalars, types])
def test_every_type(cases, nranks):
    run_mpi(cases, nranks)


@pytest.mark.parametrize("nranks", [1, 4])
@pytest.mark.parametrize("cases", [errors, no_array])
def test_what_is_refused(cases, nranks):
    run_mpi(cases, nranks)
