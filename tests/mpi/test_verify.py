# SPDX-License-Identifier: Apache-2.0
"""pb.verify: right products pass in every type, wrong ones do not."""

import itertools

import numpy as np
import pytest

import pblasmp as pb
from tests.helpers.cases import refuses
from tests.helpers.mpi import on_ranks, run_mpi
from tests.helpers.pairs import pairs
from tests.helpers.slow import only_long

DTYPES = ("float64", "float32", "complex128", "complex64", "float16", "bfloat16")
SHAPES = ((40, 50, 300), (1, 1, 1), (30, 20, 0), (0, 5, 5), (5, 0, 5))


def matrix(ctx, seed, rows, cols, op, grid, dtype, order, positive):
    shape = (rows, cols) if op == "N" else (cols, rows)
    random = np.random.default_rng([seed, ctx.rank])

    def numbers(i, j):
        values = random.uniform(0.0 if positive else -1.0, 1.0, (i.size, j.size))
        return values * (1 + 0.5j) if dtype.startswith("complex") else values

    return ctx.from_function(numbers, pb.MatrixDescriptor(shape, (7, 7), grid, (0, 0), dtype, order))


def verdicts(comm, grid):
    """Every type and op; each product is right, and then wrong in one element."""
    with pb.Context(comm) as ctx:
        for dtype, shape in itertools.product(DTYPES, SHAPES):
            (m, n, k), number = shape, DTYPES.index(dtype) * len(SHAPES) + SHAPES.index(shape)
            op_a, op_b = "NTC"[number % 3], "NTC"[number // 3 % 3]
            scalars = {"alpha": 1.5, "beta": -0.5, "op_a": op_a, "op_b": op_b}
            make = (pb.Grid(*grid), dtype)
            a = matrix(ctx, 1, m, k, op_a, *make, "C", positive=number % 2 == 0)
            b = matrix(ctx, 2, k, n, op_b, *make, "F", positive=number % 2 == 0)
            c = matrix(ctx, 3, m, n, "N", *make, "C", positive=True)
            d = pb.matmul(a, b, c, **scalars)
            good = pb.verify(a, b, c, d, **scalars)
            name = f"{dtype} {op_a}{op_b} {m} {n} {k}"
            assert good.ok, f"{name} right: {good} though D is right"
            if m * n == 0:
                continue
            for value, expected in ((1.0, "wrong"), (np.nan, "NaN")):
                if d.local.size and ctx.rank == 0:
                    d.local[0, 0] = d.local[0, 0] + np.asarray(value * (k + 1)).astype(d.dtype)
                assert not pb.verify(a, b, c, d, **scalars), f"{name} {expected}"


@pytest.mark.parametrize("grid", [(1, 1), (2, 2), *only_long((1, 3))])
def test_verdicts(grid):
    run_mpi(verdicts, max(2, grid[0] * grid[1]), grid=grid)


def spoil(x, kind):
    """Put NaN, infinities or numbers whose products overflow into a few elements of an array."""
    if kind == "nan":
        x[1, 2] = np.nan
    elif kind == "inf":
        x[1, 2], x[0, 1] = np.inf, -np.inf
    elif kind == "overflow":
        x[2] = np.finfo(x.dtype).max / 2
    elif kind == "many":
        x[:, 1] = np.nan
    return x


SPOILED = ("nan", "inf", "overflow", "many")


@on_ranks(4, timeout=120, grid=(2, 2))
def test_not_finite(ctx, grid):
    """NaN, infinities and overflow in A, B or C: the product is right; with one element changed it is not."""
    m, n, k = 23, 19, 31
    rng = np.random.default_rng(5)
    for dtype, where, kind, ops in pairs(("float64", "complex64"), "abc", SPOILED, ("NN", "TC")):
        op = dict(zip("ab", ops, strict=True))
        shapes = {
            "a": (m, k) if op["a"] == "N" else (k, m),
            "b": (k, n) if op["b"] == "N" else (n, k),
            "c": (m, n),
        }
        values = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
        spoil(values[where], kind)
        matrices = {
            name: ctx.scatter(x, pb.MatrixDescriptor(x.shape, (5, 5), pb.Grid(*grid), dtype=dtype))
            for name, x in values.items()
        }
        a, b, c = matrices.values()
        scalars = {"alpha": 1.5, "beta": -0.5, "op_a": op["a"], "op_b": op["b"]}
        d = pb.matmul(a, b, c, **scalars)
        whole = d.allgather()
        good = pb.verify(a, b, c, d, **scalars)
        name = f"{dtype} {ops} {kind} in {where}"
        nans = np.isnan(whole)
        told = (good.nans, good.infinities) == (nans.sum(), (~np.isfinite(whole) & ~nans).sum())
        assert good.ok, f"{name} right"
        assert told, f"{name} right"
        i, j = (1, 2) if kind != "many" else (5, 6)
        finite = bool(np.isfinite(whole[i, j]))
        changes = [np.nan if finite else 7.0]
        if kind != "overflow":
            changes.append(whole[i, j] + 100 if finite else 3.0)
        for value in changes:
            wrong = whole.copy()
            wrong[i, j] = value
            assert not pb.verify(a, b, c, ctx.scatter(wrong, d.descriptor), **scalars), (
                f"{name}, {value:.0f} in D"
            )


@on_ranks(1, 4)
def test_exactly(ctx):
    """Every element is compared, also those of sub-matrices, of other orders and of all copies of an AllReduce."""
    rng = np.random.default_rng(8)
    for dtype, order in itertools.product(("float32", "complex128"), ("CCC", "CFC", "FCF")):
        shapes = (9, 7), (7, 11), (9, 11)
        values = [rng.integers(-4, 5, shape).astype(dtype) for shape in shapes]
        layouts = [
            pb.MatrixDescriptor(x.shape, (2, 3), pb.Grid.squarest(ctx.size), (0, 0), dtype, memory)
            for x, memory in zip(values, order, strict=True)
        ]
        a, b, c = (ctx.scatter(x, d) for x, d in zip(values, layouts, strict=True))
        d = pb.matmul(a, b, c, alpha=2, beta=-1)
        how = {"alpha": 2, "beta": -1, "exact": True}
        found = pb.verify(a, b, c, d, **how)
        right = (found.ok, found.error, found.bound, found.wrong) == (True, 0, 0, 0)
        assert right, f"{dtype} {order}: {found}"
        part = pb.verify(a[1:6, :], b, c[1:6, :], d[1:6, :], **how)
        assert part, f"{dtype} {order}, a part"
        nothing, doubled = ctx.full(c.descriptor, np.nan), pb.matmul(a, b, alpha=2)
        for exact in (False, True):
            found = pb.verify(a, b, nothing, doubled, alpha=2, beta=0, exact=exact)
            assert found, f"{dtype} {order}, a C of NaN that counts for nothing, {exact}"
        for i, j in ((0, 0), (8, 10)):
            if d.descriptor.owner(i, j) == ctx.rank:
                _, li, lj = d.descriptor.to_local(i, j)
                d.local[li, lj] += 1
        found = pb.verify(a, b, c, d, **how)
        assert not found, f"{dtype} {order}, wrong"
        assert found.wrong == 2, f"{dtype} {order}, wrong"
        refuses(ctx, TypeError, ["exact: expected True or False"], pb.verify, a, b, c, d, exact=np.ones(2))
        same = len({repr(each) for each in ctx.comm.allgather(repr(found))}) == 1
        assert same, f"{dtype} {order}, everywhere: the ranks have different answers"


@on_ranks(1, 2, *only_long(4))
def test_schemes(ctx):
    """The layouts of tensor-parallel products: every copy of the result of an AllReduce is checked."""
    for scheme, order in itertools.product(pb.layout.schemes.SCHEMES, "CF"):
        if scheme == "gemm":
            continue
        p = getattr(pb.MatmulProblem, scheme)(8, 12, 16, ctx.size, order=order)
        a, b = (ctx.random(x, seed=seed) for seed, x in enumerate((p.a, p.b)))
        ops = {"op_a": p.op_a, "op_b": p.op_b, "scheme": scheme}
        d = pb.matmul(a, b, **ops)
        for exact in (False, True):
            found = pb.verify(a, b, None, d, **ops, exact=exact)
            close = found.error < 1e-14 if exact else found.ok
            assert close, f"{scheme} {order} {exact}: {found}"
        if ctx.rank == ctx.size - 1:
            d.local[0, 0] += 1
        found = pb.verify(a, b, None, d, **ops)
        assert not found, f"{scheme} {order}, the last rank is wrong"


def test_a_verification_says_what_it_found():
    assert pb.Verification(1e-16, 1e-15)
    assert not pb.Verification(1e-14, 1e-15)
    assert not pb.Verification(float("nan"), 1e-15)
    assert not pb.Verification(0.0, 1e-15, wrong=1)


@on_ranks(1, 2, *only_long(4))
def test_epilogues_and_scales(comm, ctx):
    """A bias, activations and scales: what is right passes, and the same D does not pass as another product."""
    rng = np.random.default_rng(12)
    grid = pb.Grid.squarest(comm.size)

    def matrix(m, n, order="C", dtype="float32", block=(3, 5)):
        d = pb.MatrixDescriptor((m, n), block, grid, dtype=dtype, order=order)
        return ctx.scatter(rng.standard_normal((m, n)).astype(d.dtype), d)

    for order, activation, exact in itertools.product("CF", (None, "relu", "gelu"), (False, True)):
        if exact and activation == "gelu":  # whose values are not exact
            continue
        a, b, c = matrix(23, 31, order), matrix(31, 19, order), matrix(23, 19, order)
        for x in (a, b, c):
            x.local[...] = np.rint(4 * x.local)  # so that products are exact
        d = ctx.empty(c.descriptor)
        rows, cols = d.descriptor.global_indices(ctx.rank)
        values = np.arange(max(23, 19), dtype=np.float32) - 9
        bias = values[cols if order == "C" else rows]
        how = {"alpha": 2, "beta": -1, "epilogue": pb.Epilogue(activation, bias=bias)}
        pb.matmul(a, b, c, out=d, **how)
        name = f"{order} {activation} {'exactly' if exact else ''}"
        good = pb.verify(a, b, c, d, exact=exact, **how)
        assert good, name
        for other in (None, pb.Epilogue(activation, bias=bias + 1), pb.Epilogue(bias=-bias)):
            bad = pb.verify(a, b, c, d, exact=exact, **(how | {"epilogue": other}))
            assert not bad, f"{name}: {other}"
    a, b = (matrix(48, 64, dtype="float8_e4m3fn", block=16) for _ in "ab")
    two = np.array([2], np.float32)
    for dtype, scales, others in (
        ("float32", pb.Scales(0.25, two), (None, pb.Scales(0.25, 4.0))),
        ("float8_e4m3fn", pb.Scales(0.5, two, 0.25), (pb.Scales(0.5, 2.0, 0.01),)),
    ):  # rounding to 8 bits explains much
        d = ctx.empty(pb.MatrixDescriptor((48, 48), 16, grid, dtype=dtype))
        pb.matmul(a, b, op_b="T", out=d, scales=scales)
        good = pb.verify(a, b, None, d, op_b="T", scales=scales)
        assert good, f"scales to {dtype}: {good} though D is right"
        for number, other in enumerate(others):
            bad = pb.verify(a, b, None, d, op_b="T", scales=other)
            assert not bad, f"scales to {dtype}, others {number}"
    if comm.size > 1:  # with a scale of 0 nothing would be read, on this rank alone
        scales, words = pb.Scales(a=np.array([comm.rank], np.float32)), ["values of scales"]
        refuses(ctx, pb.RankMismatchError, words, pb.verify, a, b, None, d, op_b="T", scales=scales)
    a = matrix(9, 9)
    for how in (
        {"epilogue": pb.Epilogue(bias_grad_a=np.zeros(a.descriptor.local_shape(ctx.rank)[0], np.float32))},
        {"scales": pb.Scales(a=np.zeros(1, np.uint8), b=np.zeros(1, np.uint8), mode="block")},
    ):
        refuses(ctx, pb.UnsupportedError, ["verify: "], pb.verify, a, a, None, a, **how)
