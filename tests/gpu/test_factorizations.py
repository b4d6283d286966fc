# SPDX-License-Identifier: Apache-2.0
"""Factorizations and solves on GPUs: every type and option in layouts at random, large matrices, failures."""

import itertools
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.dense import panel_shape, workbench
from pblasmp.engines.gpu import grid_panels as queued
from tests.helpers.cases import layout, pick
from tests.helpers.factor_cases import (
    CASES,
    TYPES,
    all_small,
    empty,
    exact,
    failures,
    least_squares_at_the_ends,
    lu_product,
    norm,
    only,
    panels_of,
    positive,
    random,
    relative,
    without_full_rank,
)
from tests.helpers.slow import draws, fewer, only_long


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", TYPES)
def test_every_layout(ctx, case, dtype):
    rng = np.random.default_rng(91)
    for turn in range(draws(4, long=12)):
        least = 0 if turn % 2 else queued.LARGE_PANEL  # copy engines deliver small panels, too
        with panels_of(ctx, int(rng.integers(1, 9))), mock.patch.object(queued, "LARGE_PANEL", least):
            case(ctx, rng, dtype)


@pytest.mark.parametrize("dtype", ["float32", "complex64", "float64"])
def test_columns_of_denormal_numbers(ctx, dtype):
    """Q is orthogonal and L at most 1, and their products are A up to the rounding of such numbers."""
    rng, (rows, cols) = np.random.default_rng(94), (200, 40)
    quantum = float(np.finfo(dtype).smallest_subnormal)
    for columns in (slice(None), slice(3, 4), slice(39, 40)):  # all of them, or one
        whole = random(rng, (rows, cols), dtype)
        whole[:, columns] = np.round(whole[:, columns] * 1000) * quantum
        grid = pb.Grid(1, ctx.size)
        a = ctx.scatter(whole, pb.MatrixDescriptor((rows, cols), (16, 16), grid, dtype=dtype, order="F"))
        rounding = 40 * quantum + 40 * np.finfo(dtype).eps * np.abs(exact(whole)).max(0)
        found = pb.linalg.qr(a)
        q, r = exact(found.q().allgather()), exact(found.r().allgather())
        assert np.abs(q.conj().T @ q - np.eye(cols)).max() < 100 * np.finfo(dtype).eps
        assert (np.abs(q @ r - whole).max(0) <= rounding).all()
        rebuilt, lower = lu_product(*pb.linalg.lu_factor(a))
        assert np.abs(np.tril(lower, -1)).max() < 1.01 * np.sqrt(2)  # sizes of complex numbers are sums
        assert (np.abs(rebuilt - whole).max(0) <= 100 * rounding).all()


def test_failures(ctx):
    with panels_of(ctx, 4):
        rng = np.random.default_rng(92)
        empty(ctx, rng)
        failures(ctx, rng)


@pytest.mark.parametrize("dtype", TYPES)
def test_least_squares_at_the_ends_of_the_range_and_without_full_rank(ctx, dtype):
    rng = np.random.default_rng(99)
    least_squares_at_the_ends(ctx, rng, dtype)
    without_full_rank(ctx, rng, dtype)


def matrix(ctx, rng, values):
    """``values`` in blocks of 64 to 300 on a grid at random."""
    block = tuple(int(x) for x in rng.integers(64, 300, 2))
    return ctx.scatter(values, layout(rng, values.shape, ctx.size, block=block, dtype=values.dtype.name))


def sizes(small, large):
    """Sizes with types: all of the small ones; of the large ones a real and a complex type, or all."""
    few = [dtype for dtype in TYPES if dtype in ("float64", "complex64")]
    others = [(each, dtype) for each in large for dtype in TYPES if dtype not in few]
    return [
        *((each, dtype) for number, each in enumerate(small) for dtype in fewer(TYPES, number)),
        *((each, dtype) for number, each in enumerate(large) for dtype in fewer(few, number)),
        *only_long(*others),
    ]


@pytest.mark.parametrize(("n", "dtype"), sizes([1025], [2300]))
def test_large_cholesky(ctx, n, dtype):
    """In panels of the engine's own choice."""
    rng = np.random.default_rng(93)
    whole, right = positive(rng, n, dtype), random(rng, (n, 70), dtype)
    for uplo in "LU":
        a, b = matrix(ctx, rng, only(uplo, whole)), matrix(ctx, rng, right)
        with ExitStack() as stack:
            if uplo == "U":  # as if it were large
                stack.enter_context(mock.patch.object(ctx.engine.operations, "inverts", (2, 2, 1)))
                stack.enter_context(mock.patch.object(workbench, "SLAB", 300))
            x = exact(pb.linalg.solve(a, b, "pos", lower=uplo == "L").allgather())
            factor = pb.linalg.cholesky(a, lower=uplo == "L", out=pick(rng, (None, a))).allgather()
        lower = exact(np.tril(factor) if uplo == "L" else np.triu(factor).conj().T)
        all_small(
            uplo,
            factor=relative(lower @ lower.conj().T - whole, exact(whole), n, dtype),
            solve=relative(exact(whole) @ x - right, exact(whole), n * norm(x), dtype),
        )


@pytest.mark.parametrize(
    ("shape", "dtype"), sizes([(1025, 1025), (700, 1500), (20_000, 40)], [(2300, 2300), (3000, 700)])
)
def test_large_lu(ctx, shape, dtype):
    rng = np.random.default_rng(94)
    m, n = shape
    whole = random(rng, shape, dtype)
    a = matrix(ctx, rng, whole)
    found, pivots = pb.linalg.lu_factor(a)
    rebuilt, lower = lu_product(found, pivots)
    errors = {
        "lu": relative(rebuilt - whole, exact(whole), max(shape), dtype),
        "growth": np.abs(lower).max() * 15,
    }
    if m == n:
        right = random(rng, (n, 70), dtype)
        b = matrix(ctx, rng, right)
        for op in "NTC":
            left = {"N": exact(whole), "T": exact(whole).T, "C": exact(whole).conj().T}[op]
            x = exact(pb.linalg.lu_solve((found, pivots), b, op).allgather())
            errors[op] = relative(left @ x - right, left, n * norm(x), dtype)
    all_small("", **errors)


@pytest.mark.parametrize(("shape", "dtype"), sizes([(1025, 1025), (700, 1500), (20_000, 40)], [(3000, 700)]))
def test_large_qr(ctx, shape, dtype):
    rng = np.random.default_rng(95)
    (m, n), least = shape, min(shape)
    whole = random(rng, shape, dtype)
    found = pb.linalg.qr(matrix(ctx, rng, whole))
    q, r = exact(found.q().allgather()), exact(found.r().allgather())
    errors = {
        "qr": relative(q @ r - whole, exact(whole), max(shape), dtype),
        "orthogonal": relative(q.conj().T @ q - np.eye(least), np.eye(least), max(shape), dtype),
    }
    if m > n:
        right = random(rng, (m, 70), dtype)
        x = exact(pb.linalg.lstsq(matrix(ctx, rng, whole), matrix(ctx, rng, right)).allgather())
        normal = exact(whole).conj().T @ (exact(whole) @ x - right)
        errors["lstsq"] = relative(normal, exact(whole), m * norm(exact(right)) * norm(exact(whole)), dtype)
    all_small("", **errors)


@pytest.mark.parametrize("dtype", TYPES)
def test_triangles(ctx, dtype):
    """Ones on the diagonal, by substitution; others by inverses: as they are, refined, or by substitution after all."""
    import cupy

    rng, operations, wrong = np.random.default_rng(95), ctx.engine.operations, []
    for n, columns, apart in ((1, 1, 0), (31, 9, 1), (64, 64, 0), (200, 17, 3), (512, 130, 0), (509, 5, 3)):
        below = np.tril(random(rng, (n, n), dtype), -1) / np.sqrt(n).astype(dtype)
        for size in (None, 4.0, 0.6, 0.1):  # of the diagonal; None: it is not read
            lower = below + np.eye(n, dtype=dtype) * (size or 1)
            stored = np.where(np.tri(n, k=-(size is None), dtype=bool), lower, np.nan).astype(dtype)
            a = cupy.empty((n + apart, n), dtype, order="F")[:n]
            a[...] = cupy.asarray(stored)
            x = exact(random(rng, (n, columns), dtype)) / 8
            right = (exact(lower) @ x).astype(dtype)
            found = cupy.asarray(right, order=pick(rng, "CF") if size else "F")
            with mock.patch.object(operations, "inverts", (2, 2, 1)):
                operations.trsm(1, a, found, lower=True, unit=size is None)
            y = exact(cupy.asnumpy(found))
            scale = np.abs(exact(lower)) @ np.abs(y) + np.abs(exact(right))
            error = (np.abs(exact(lower) @ y - exact(right)) / scale).max()
            if not error < 40 * n * np.finfo(dtype).eps:
                wrong.append((n, columns, size, error))
    assert not wrong


def test_panels_in_place(ctx):
    """A matrix that lies in panels already is factored where it is: the result is the same."""
    rng = np.random.default_rng(96)
    n, dtype = 2000, "float64"
    whole = positive(rng, n, dtype)
    for block in (256, 300):
        d = pb.MatrixDescriptor((n, n), (n, block), pb.Grid(1, ctx.size), dtype=dtype, order="F")
        a = ctx.scatter(only("L", whole), d)
        lower = np.tril(pb.linalg.cholesky(a, out=a).allgather())
        all_small(block, factor=relative(lower @ lower.T - whole, whole, n, dtype))
        b = ctx.scatter(whole, d)
        found, pivots = pb.linalg.lu_factor(b, out=b)
        right = matrix(ctx, rng, random(rng, (n, 3), dtype))
        x = pb.linalg.lu_solve((found, pivots), right).allgather()
        all_small(block, solve=relative(whole @ x - right.allgather(), whole, n * norm(x), dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_panels_that_process_rows_share(ctx, dtype):
    """Square blocks on several process rows stay where they are; what is above the diagonal is not written.

    Between hosts they move where GPUs wait less for each other then.
    """
    rng = np.random.default_rng(98)
    grids = {pb.Grid(ctx.size, 1), pb.Grid.squarest(ctx.size, "col").T, pb.Grid.squarest(ctx.size)}
    shapes = fewer(((2300, 256), (2100, 512), (1100, 300)), TYPES.index(dtype))
    for grid, (n, block) in itertools.product(sorted(grids, key=str), shapes):
        whole = positive(rng, n, dtype)
        d = pb.MatrixDescriptor((n, n), (block, block), grid, dtype=dtype, order="F")
        a = ctx.scatter(only("L", whole), d)
        with (
            mock.patch.object(panel_shape, "ROUNDS", 0),
            mock.patch.object(ctx.engine.operations, "shared_from", 0),
            mock.patch.object(ctx.engine.operations, "shared_width", 256),
            mock.patch.object(ctx.engine, "prepare_move", wraps=ctx.engine.prepare_move) as moves,
        ):
            pb.linalg.cholesky(a, out=a)
        assert not moves.call_count or len(ctx.engine.session.domains) > 1
        values = a.allgather()
        assert moves.call_count or np.isnan(values[np.triu_indices(n, 1)]).all()
        lower = exact(np.tril(values))
        all_small(f"{grid} {n}", factor=relative(lower @ lower.conj().T - whole, exact(whole), n, dtype))


def test_results_follow_the_callers_stream(ctx):
    """What is queued before a call on the caller's stream is read by it, and what comes after reads its result."""
    import cupy

    rng = np.random.default_rng(97)
    whole = positive(rng, 1500, "float64")
    d = pb.MatrixDescriptor((1500, 1500), (128, 128), pb.Grid.squarest(ctx.size))
    stream = cupy.cuda.Stream(non_blocking=True)
    before = cupy.cuda.get_current_stream()
    a = ctx.scatter(whole, d)
    ctx.engine.synchronize()
    stream.use()
    try:
        a.local[...] *= 4
        factor = pb.linalg.cholesky(a, out=a)
        factor.local[...] *= 0.5
        values = factor.allgather()
    finally:
        before.use()
    lower = np.tril(values)
    all_small("", factor=relative(lower @ lower.T - whole, whole, 1500, "float64"))
