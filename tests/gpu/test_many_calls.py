# SPDX-License-Identifier: Apache-2.0
"""Many calls on ever new sub-matrices, most of them direct calls, against NumPy."""

import itertools

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.dtypes import DTYPES
from tests.helpers import inside
from tests.helpers.slow import thinned

N, NB = 900, 64
GRIDS = [(p, q) for p in (1, 2, 4) for q in (1, 2, 4)]


def direct_calls(ctx):
    """How many calls this rank keeps bound."""
    return sum(call is not None for call in inside.bound_calls(ctx).values())


def start(n, dtype):
    """A well-conditioned matrix whose lower triangle is that of a Hermitian positive definite one."""
    i, j = np.indices((n, n))
    values = np.exp(-abs(i - j) / 50) + (i == j)
    return (values * np.exp(0.3j * (i - j)) if np.dtype(dtype).kind == "c" else values).astype(dtype)


def far(found, expected):
    """What is wrong unless all values are within a few roundings."""
    error = abs(found - expected).max() / abs(expected).max()
    limit = 1e-4 if np.finfo(found.dtype).eps > 1e-10 else 1e-11
    return "" if error < limit else f"error {error}"


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("grid", GRIDS)
def test_cholesky(ctx, grid, order, dtype):
    """Steps of different widths, which do not always begin with a block."""
    if grid[0] * grid[1] > ctx.size:
        pytest.skip(f"{grid} takes more ranks")
    xp = ctx.engine.xp
    values = start(N, dtype)
    a = ctx.scatter(values, block=NB, grid=grid, order=order)
    uplo, turn = "L", "C" if np.dtype(dtype).kind == "c" else "T"
    inside.bound_calls(ctx).clear()
    k = 0
    for width in [64] * 4 + [20, 44] + [64] * 20:
        here, rest = slice(k, min(k + width, N)), slice(min(k + width, N), N)
        block = a[here, here]
        if block.local.size:
            full = xp.tril(block.local) + xp.tril(block.local, -1).conj().T
            block.local[...] = xp.tril(xp.linalg.cholesky(full)) + xp.triu(block.local, 1)
        k = here.stop
        if k >= N:
            break
        pb.blas.trsm(block, a[rest, here], side="R", uplo=uplo, op_a=turn, out=a[rest, here])
        update = pb.blas.herk if turn == "C" else pb.blas.syrk
        update(a[rest, here], a[rest, rest], uplo=uplo, alpha=-1, beta=1, out=a[rest, rest])
    found = a.allgather()
    assert not far(np.tril(found), np.linalg.cholesky(values))
    assert np.array_equal(np.triu(found, 1), np.triu(values, 1)), "the other triangle was written"
    assert direct_calls(ctx)


@pytest.mark.parametrize("seed", range(12))
def test_sub_matrices_anywhere(ctx, seed):
    """Products, updates, solves and sums at odd offsets, of matrices laid out in different ways, again and again."""
    rng = np.random.default_rng(seed)
    dtype = ["float64", "float32", "complex128", "complex64"][seed % 4]
    n, kind = 300, np.dtype(dtype).kind

    def matrix():
        values = rng.integers(-3, 4, (n, n)).astype(dtype)
        if kind == "c":
            values = values + (1j * rng.integers(-3, 4, (n, n))).astype(dtype)
        nprow = int(rng.choice([p for p in range(1, ctx.size + 1) if ctx.size % p == 0]))
        block = (int(rng.integers(8, 70)),) * 2 if seed % 3 else (32, 32)
        grid = pb.Grid(nprow, ctx.size // nprow)
        return values, ctx.scatter(values, block=block, grid=grid, order=str(rng.choice(["C", "F"])))

    (x, a), (y, b), (z, c) = matrix(), matrix(), matrix()
    unit = np.tril(rng.integers(-1, 2, (n, n)), -1) * 0.01 + np.eye(n)
    t = ctx.scatter(unit.astype(dtype), block=32, grid=pb.Grid.squarest(ctx.size), order="F")
    for count in range(thinned(40)):
        m, w, k = (int(v) for v in rng.integers(1, 90, 3))
        i, j, p, q = (int(v) for v in rng.integers(0, n - 90, 4))
        rows, cols, inner, other = slice(i, i + m), slice(j, j + w), slice(p, p + k), slice(q, q + m)
        what = f"seed {seed}, call {count}"
        for _ in range(2):  # the second call is repeated
            if count % 4 == 0:
                pb.matmul(
                    a[rows, inner], b[inner, cols], c[rows, cols], alpha=0.5, beta=0.25, out=c[rows, cols]
                )
                z[rows, cols] = 0.5 * x[rows, inner] @ y[inner, cols] + 0.25 * z[rows, cols]
            elif count % 4 == 1:
                uplo = "LU"[count % 8 > 3]
                pb.blas.syrk(
                    a[rows, inner], c[other, other], uplo=uplo, alpha=0.5, beta=0.25, out=c[other, other]
                )
                tri = np.tri(m, dtype=bool) if uplo == "L" else np.tri(m, dtype=bool).T
                new = 0.5 * x[rows, inner] @ x[rows, inner].T + 0.25 * z[other, other]
                z[other, other] = np.where(tri, new, z[other, other])
            elif count % 4 == 2:
                d = slice(p, p + min(m, 32))
                left = slice(i, i + d.stop - d.start)
                pb.blas.trsm(t[d, d], c[left, cols], uplo="L", diag="U", alpha=0.5, out=c[left, cols])
                z[left, cols] = np.linalg.solve(unit[d, d], 0.5 * z[left, cols])
            else:
                pb.blas.geadd(a[cols, rows], c[rows, cols], op_a="T", alpha=0.5, beta=0.25, out=c[rows, cols])
                z[rows, cols] = 0.5 * x[cols, rows].T + 0.25 * z[rows, cols]
        assert not far(c.allgather(), z), what


def test_products_that_make_new_matrices(ctx):
    rng = np.random.default_rng(2)
    x = rng.integers(-3, 4, (256, 256)).astype("float64")
    a = ctx.scatter(x, block=32, order="F")
    for i in range(0, 192, 32):
        rows, cols = slice(i, i + 64), slice(0, i + 32)
        d = pb.matmul(a[rows, cols], a[cols, rows])
        assert np.array_equal(d.allgather(), x[rows, cols] @ x[cols, rows])
        s = pb.blas.syrk(a[rows, cols], uplo="U")
        assert np.array_equal(np.triu(s.allgather()), np.triu(x[rows, cols] @ x[rows, cols].T))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_of_16_bits(ctx, dtype):
    """Of sub-matrices, in any form: direct calls, of numbers whose sums are exact."""
    rng = np.random.default_rng(4)
    for order in "CF":
        x, y, z = (rng.integers(-1, 2, (200, 200)).astype(float) for _ in range(3))
        a, b, c = (ctx.scatter(v.astype(DTYPES[dtype]), block=32, order=order) for v in (x, y, z))
        before = direct_calls(ctx)
        for i, (op_a, op_b) in enumerate(itertools.product("NT", repeat=2)):
            rows, inner, cols = slice(32 * i, 32 * i + 61), slice(7, 64), slice(64, 130 + i)
            left = a[rows, inner] if op_a == "N" else a[inner, rows]
            right = b[inner, cols] if op_b == "N" else b[cols, inner]
            u = x[rows, inner] if op_a == "N" else x[inner, rows].T
            v = y[inner, cols] if op_b == "N" else y[cols, inner].T
            for turn in range(4):
                z[rows, cols] = (-1) ** turn * 2 * u @ v - z[rows, cols]
                to = c[rows, cols]
                pb.matmul(left, right, to, alpha=(-1) ** turn * 2, beta=-1, out=to, op_a=op_a, op_b=op_b)
        assert np.array_equal(c.allgather().astype(float), z)
        assert direct_calls(ctx) >= before + 4


def test_growing_slabs_and_other_algorithms_in_between(ctx):
    """Slabs grow while earlier calls are queued; products that use symmetric memory, too, come in between."""
    rng = np.random.default_rng(3)
    n = 2048
    x, y = (rng.integers(-3, 4, (n, n)).astype("float64") for _ in range(2))
    a, b = (ctx.scatter(v, block=128, order="F") for v in (x, y))
    c = ctx.zeros((n, n), block=128, order="F")
    want = np.zeros((n, n))
    for k in (64, 128, 512, 1024, 2048):
        pb.matmul(a[:, :k], b[:k, :], c, beta=1, out=c)
        plan = pb.plan(pb.matmul, a[:, :k], b[:k, :], c, alpha=2, beta=1, out=c)
        plan()
        plan.close()
        pb.blas.syrk(a[:, :k], c, uplo="L", beta=1, out=c)
        want += 3 * x[:, :k] @ y[:k, :]
        want += np.tril(x[:, :k] @ x[:, :k].T)
    assert np.array_equal(c.allgather(), want)
