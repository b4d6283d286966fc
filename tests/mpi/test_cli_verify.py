# SPDX-License-Identifier: Apache-2.0
"""Freivalds' test as ``--check`` uses it: right products pass in every type, wrong ones do not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.cli.verify import verify_product
from tests.helpers.mpi import run_mpi

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
        for number, (dtype, (m, n, k)) in enumerate(itertools.product(DTYPES, SHAPES)):
            op_a, op_b = "NTC"[number % 3], "NTC"[number // 3 % 3]
            scalars = {"alpha": 1.5, "beta": -0.5, "op_a": op_a, "op_b": op_b}
            make = (pb.Grid(*grid), dtype)
            a = matrix(ctx, 1, m, k, op_a, *make, "C", positive=number % 2 == 0)
            b = matrix(ctx, 2, k, n, op_b, *make, "F", positive=number % 2 == 0)
            c = matrix(ctx, 3, m, n, "N", *make, "C", positive=True)
            d = pb.matmul(a, b, c, **scalars)
            good = verify_product(a, b, c, d, **scalars)
            name = f"{dtype} {op_a}{op_b} {m} {n} {k}"
            yield f"{name} right", None if good.good else f"{good} though D is right"
            if m * n == 0:
                continue
            for value, expected in ((1.0, "wrong"), (np.nan, "NaN")):
                if d.local.size and ctx.rank == 0:
                    d.local[0, 0] = d.local[0, 0] + np.asarray(value * (k + 1)).astype(d.dtype)
                bad = verify_product(a, b, c, d, **scalars)
                yield f"{name} {expected}", f"{bad} though D is {expected}" if bad.good else None


@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (1, 3)])
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


def not_finite(comm, grid):
    """NaN, infinities and overflow in A, B or C: the product is right; with one element changed it is not."""
    m, n, k = 23, 19, 31
    rng = np.random.default_rng(5)
    with pb.Context(comm, engine="host") as ctx:
        for dtype, (where, kind), ops in itertools.product(
            ("float64", "complex64"), itertools.product("abc", SPOILED), ("NN", "TC")
        ):
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
            good = verify_product(a, b, c, d, **scalars)
            name = f"{dtype} {ops} {kind} in {where}"
            nans = np.isnan(whole)
            told = (good.nans, good.infinities) == (nans.sum(), (~np.isfinite(whole) & ~nans).sum())
            yield f"{name} right", None if good.good and told else f"{good} though D is right"
            i, j = (1, 2) if kind != "many" else (5, 6)
            finite = bool(np.isfinite(whole[i, j]))
            changes = [np.nan if finite else 7.0]
            if kind != "overflow":
                changes.append(whole[i, j] + 100 if finite else 3.0)
            for value in changes:
                wrong = whole.copy()
                wrong[i, j] = value
                bad = verify_product(a, b, c, ctx.scatter(wrong, d.descriptor), **scalars)
                yield f"{name}, {value:.0f} in D", f"{bad} though D is wrong" if bad.good else None


def test_not_finite():
    run_mpi(not_finite, 4, timeout=120, grid=(2, 2))
