# SPDX-License-Identifier: Apache-2.0
"""What the tests of factorizations share: matrices to factor, in layouts at random, and errors in units of rounding.

Every rank draws the same cases from generators with the same seed.
"""

import contextlib
import itertools
import math
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.host.host_operations import HostOperations
from pblasmp.linalg.systems import solve_keeping
from tests.helpers.cases import layout, pick, refuses, scattered
from tests.helpers.limits import changed_limits
from tests.helpers.slow import draws, in_turn

TYPES = ("float32", "float64", "complex64", "complex128")
KINDS = {"L": "lower triangular", "U": "upper triangular"}  # of triangles, as ``assume_a``
MOST = 30  # how large an error may be, in the units of ``relative``


@contextlib.contextmanager
def planned():
    """Within, no factorization is a direct call."""
    with changed_limits(cholesky=0, lapack=0):
        yield


@contextlib.contextmanager
def panels_of(ctx, width):
    """Within, factorizations have panels of ``width`` columns, and every rank works on them. None is a direct call."""
    if ctx.engine.name != "host":
        ctx.engine.operations.factor_width, saved = width, ctx.engine.operations.factor_width
        try:
            yield
        finally:
            ctx.engine.operations.factor_width = saved
        return
    saved, ctx.engine.operations.workers = ctx.engine.operations.workers, ctx.size
    try:
        with (
            planned(),
            mock.patch.multiple(HostOperations, factor_width=width, factor_alone=3, factor_wait=0),
        ):
            yield
    finally:
        ctx.engine.operations.workers = saved


@contextlib.contextmanager
def direct_blocks_of(ctx, width):
    """Within, direct factorizations have blocks of ``width`` columns, on which as many ranks of each node work."""
    most = min(map(len, ctx.engine.transport.nodes))
    how = {"width": width, "part": width, "meeting": width**3, "rows": 2, "factoring": 8 * width}
    with changed_limits(**how), mock.patch.object(ctx.engine.operations, "workers", most):
        yield


def random(rng, shape, dtype):
    """Numbers from a normal distribution."""
    values = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


def positive(rng, n, dtype):
    """A positive definite matrix, exactly Hermitian, with a condition number of about 5."""
    x = random(rng, (n, n), "complex128" if np.dtype(dtype).kind == "c" else "float64")
    x = x @ x.conj().T / max(1, n) + np.eye(n)
    return np.asarray((x + x.conj().T) / 2).astype(dtype)


def only(triangle, a):
    """``a`` with NaN outside a triangle."""
    kept = np.tril(np.ones(a.shape, bool)) if triangle == "L" else np.triu(np.ones(a.shape, bool))
    return np.where(kept, a, np.nan).astype(a.dtype)


def placed(ctx, rng, whole, **how):
    """``whole`` as a matrix in a layout at random, a part of a larger matrix of NaN, or the transpose of such a one."""
    if not how and ctx.engine.name == "host" and rng.integers(4) == 0:
        block = tuple(int(x) for x in rng.integers(1, 60, 2))  # perhaps larger than the matrix
        return placed(ctx, rng, whole.T, block=block).T
    shape, before, after = whole.shape, rng.integers(0, 5, 2), rng.integers(0, 4, 2)
    if rng.integers(3):
        before[:] = after[:] = 0
    larger = np.full(tuple(before + shape + after), np.nan, whole.dtype)
    window = tuple(slice(int(i), int(i) + n) for i, n in zip(before, shape, strict=True))
    larger[window] = whole
    d = layout(rng, larger.shape, ctx.size, dtype=whole.dtype.name, **how)
    return scattered(ctx, d, larger)[window]


@contextlib.contextmanager
def layouts_apart():
    """Within, no two of the matrices that are placed have a grid, blocks or a source in common; orders take turns."""
    made, drawn = [], layout

    def apart(rng, shape, size, **how):
        made.append(drawn(rng, shape, size, **{"order": "CF"[len(made) % 2], "unlike": made, **how}))
        return made[-1]

    with mock.patch(f"{__name__}.layout", apart):
        yield made


def exact(a):
    """``a`` in double precision."""
    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def unscaled(a, scale):
    """``a / scale`` in double precision; a complex division by a denormal number overflows."""
    return a.real / np.float64(scale) + (1j * (a.imag / np.float64(scale)) if a.dtype.kind == "c" else 0)


def norm(a):
    """The 1-norm of a matrix, 0 without elements."""
    return float(np.abs(a).sum(0).max(initial=0))


def relative(error, scale, n, dtype):
    """An error divided by ``scale``, n and the unit of rounding; infinite for NaN."""
    if not np.isfinite(error).all():
        return np.inf
    bound = norm(scale) * max(1, n) * np.finfo(dtype).eps
    return norm(error) / bound if bound else norm(error)


def all_small(case, **errors):
    """Fail unless errors, in units of rounding and by name, are small."""
    wrong = {name: error for name, error in errors.items() if not error < MOST}
    assert not wrong, f"{case}: errors {wrong}"


def sizes(ctx, rng):
    """An order, and a number of right-hand sides."""
    large = ctx.engine.name == "host" and rng.integers(12) == 0
    n = rng.integers(30, draws(70, long=130)) if large else rng.integers(0, 30)
    return int(n), pick(rng, (0, 1, 1, 5, 9, int(n)))


def cholesky_case(ctx, rng, dtype):
    n, m = sizes(ctx, rng)
    uplo, in_place = pick(rng, "LU"), bool(rng.integers(2))
    whole = positive(rng, n, dtype)
    a = placed(ctx, rng, only(uplo, whole))
    b = placed(ctx, rng, random(rng, (n, m), dtype))
    case = f"cholesky {dtype} {n} {m} {uplo} in place: {in_place} {a.descriptor} {b.descriptor}"
    out = a if in_place else pick(rng, (None, placed(ctx, rng, only(uplo, np.zeros_like(whole)))))
    right, kept = b.allgather(), a.allgather()
    solution = pb.linalg.solve(a, b, "pos", lower=uplo == "L").allgather()
    assert np.array_equal(a.allgather(), kept, equal_nan=True), f"{case}: A has changed"
    found = pb.linalg.cholesky(a, lower=uplo == "L", out=out)
    factor = found.allgather()
    outside = factor[np.triu_indices(n, 1) if uplo == "L" else np.tril_indices(n, -1)]
    untouched = out is not None and np.isnan(outside).all()
    assert untouched or (outside == 0).all(), f"{case}: the other triangle"
    again = pb.linalg.cho_solve((found, uplo == "L"), b, out=b).allgather()
    a = placed(ctx, rng, only(uplo, whole))
    inverse = exact(pb.linalg.inv(a, "pos", lower=uplo == "L", out=pick(rng, (None, a))).allgather())
    assert np.array_equal(inverse, inverse.conj().T), f"{case}: the inverse is not Hermitian"
    lower = exact(np.tril(factor) if uplo == "L" else np.triu(factor).conj().T)
    left = exact(whole)
    all_small(
        case,
        factor=relative(lower @ lower.conj().T - left, left, n, dtype),
        solve=relative(left @ solution - right, left, n, dtype),
        cho_solve=relative(left @ again - right, left, n, dtype),
        inv=relative(left @ inverse - np.eye(n), left, n * max(1, norm(inverse)), dtype),
    )


def lu_product(found, pivots):
    """The product of LU's factors with the rows back in their places, and L, in double precision. Collective."""
    factors = exact(found.allgather())
    least = min(factors.shape)
    lower = np.tril(factors, -1)[:, :least] + np.eye(len(factors), least)
    product = lower @ np.triu(factors)[:least]
    for i, other in reversed(list(enumerate(pivots.tolist()))):
        product[[i, other]] = product[[other, i]]
    return product, lower


def lu_case(ctx, rng, dtype):
    n, m = sizes(ctx, rng)
    rows = pick(rng, (n, n, int(rng.integers(0, 30))))
    in_place, op = bool(rng.integers(2)), pick(rng, "NTC")
    whole = random(rng, (rows, n), dtype)
    a = placed(ctx, rng, whole)
    found, pivots = pb.linalg.lu_factor(a, out=a if in_place else None)
    rebuilt, lower = lu_product(found, pivots)
    errors = {
        "lu": relative(rebuilt - whole, exact(whole), n, dtype),
        "growth": np.abs(lower).max(initial=0) * 20,
    }
    if rows == n:
        b = placed(ctx, rng, random(rng, (n, m), dtype))
        right = b.allgather()
        left = {"N": exact(whole), "T": exact(whole).T, "C": exact(whole).conj().T}[op]
        a = placed(ctx, rng, whole)
        solutions = {
            "solve": pb.linalg.solve(a, b, transposed=op),
            "lu_solve": pb.linalg.lu_solve((found, pivots), b, op, out=b),
        }
        for name, x in solutions.items():
            x = exact(x.allgather())
            scale = (
                np.outer(np.ones(n), [norm(left) * norm(column[:, None]) for column in x.T])
                if m and n
                else left
            )
            errors[name] = relative(left @ x - right, scale, n, dtype)
        inverse = exact(pb.linalg.inv(a, out=a if in_place else None).allgather())
        errors["inv"] = relative(exact(whole) @ inverse - np.eye(n), whole, n * max(1, norm(inverse)), dtype)
        if n:
            ratio = pb.linalg.cond_estimate(placed(ctx, rng, whole)) / np.linalg.cond(exact(whole), 1)
            errors["cond_estimate"] = 0 if 0.1 < ratio < 1.1 else np.inf
        sign, size = pb.linalg.slogdet(placed(ctx, rng, whole))
        expected = np.linalg.slogdet(exact(whole))
        near = np.allclose(sign, expected[0], atol=1e-3) and np.isclose(
            size, expected[1], rtol=1e-3, atol=1e-3
        )
        errors["slogdet"] = 0 if near and type(sign) is np.dtype(dtype).type else np.inf
    all_small(f"lu {dtype} {rows} {n} {m} {op} in place: {in_place} {a.descriptor}", **errors)


def triangular_case(ctx, rng, dtype):
    n, m = sizes(ctx, rng)
    uplo, op, diag = pick(rng, "LU"), pick(rng, "NTC"), pick(rng, "NU")
    whole = random(rng, (n, n), dtype) / max(1, n)
    np.fill_diagonal(whole, 1.5)
    read = only(uplo, whole)
    if diag == "U":
        np.fill_diagonal(read, np.nan)
        np.fill_diagonal(whole, 1)
    triangle = exact(np.tril(whole) if uplo == "L" else np.triu(whole))
    a, b = placed(ctx, rng, read), placed(ctx, rng, random(rng, (n, m), dtype))
    right = b.allgather()
    x = exact(pb.linalg.solve_triangular(a, b, op, lower=uplo == "L", unit_diagonal=diag == "U").allgather())
    left = {"N": triangle, "T": triangle.T, "C": triangle.conj().T}[op]
    inverse = exact(
        pb.linalg.inv(a, KINDS[uplo], unit_diagonal=diag == "U", out=pick(rng, (None, a))).allgather()
    )
    other = np.triu(inverse, 1) if uplo == "L" else np.tril(inverse, -1)
    case = f"triangular {dtype} {n} {m} {uplo}{op}{diag} {a.descriptor} {b.descriptor}"
    all_small(
        case,
        solve=relative(left @ x - right, left, n * max(1, norm(x)), dtype),
        inv=relative(triangle @ inverse - np.eye(n), triangle, n * max(1, norm(inverse)), dtype),
    )
    assert not other.any(), f"{case}: the other triangle"


def qr_case(ctx, rng, dtype):
    m, n = (int(i) for i in rng.integers(0, 30, 2))
    nrhs, op, in_place = pick(rng, (0, 1, 5)), pick(rng, "NTC"), bool(rng.integers(2))
    whole = random(rng, (m, n), dtype)
    a, least = placed(ctx, rng, whole), min(m, n)
    found = pb.linalg.qr(a, out=a if in_place else None)
    q, r = exact(found.q().allgather()), exact(found.r().allgather())
    c = random(rng, (m, nrhs), dtype)
    product = exact(found.apply(placed(ctx, rng, c), "C").allgather())
    back = exact(found.apply(found.apply(placed(ctx, rng, c)), "C").allgather())
    errors = {
        "qr": relative(q @ r - whole, exact(whole), max(m, n), dtype),
        "orthogonal": relative(q.conj().T @ q - np.eye(least), np.eye(least), max(m, n), dtype),
        "apply": relative(product[:least] - q.conj().T @ c, exact(c), max(m, n), dtype),
        "back": relative(back - c, exact(c), max(m, n), dtype),
        "triangle": np.abs(np.tril(r, -1)).max(initial=0),
    }
    if m and n:
        left = {"N": exact(whole), "T": exact(whole).T, "C": exact(whole).conj().T}[op]
        right = random(rng, (left.shape[0], nrhs), dtype)
        solved = pb.linalg.lstsq(placed(ctx, rng, whole), placed(ctx, rng, right), trans=op)
        x, expected = exact(solved.allgather()), np.linalg.lstsq(left, exact(right), rcond=None)[0]
        values = np.linalg.svd(left, compute_uv=False)
        condition = (values[0] / values[-1]) ** 2 * max(1, norm(expected))
        errors["lstsq"] = relative(
            x - expected, np.eye(1), max(m, n) * condition * max(1, norm(right)), dtype
        )
    all_small(f"qr {dtype} {m} {n} {nrhs} {op} in place: {in_place} {a.descriptor}", **errors)


def empty(ctx, rng, dtype="complex64"):
    """Matrices without rows, without columns, and without either."""

    def zeros(*shape):
        return placed(ctx, rng, np.zeros(shape, dtype))

    assert pb.linalg.cholesky(zeros(0, 0)).shape == (0, 0)
    for m, n in ((0, 0), (0, 5), (5, 0)):
        found, (lu, pivots) = pb.linalg.qr(zeros(m, n)), pb.linalg.lu_factor(zeros(m, n))
        q, r, c = found.q().allgather(), found.r().allgather(), random(rng, (m, 2), dtype)
        assert (q.shape, r.shape) == ((m, 0), (0, n)), f"qr of {m} x {n}"
        applied = found.apply(placed(ctx, rng, c), pick(rng, ("N", "C"))).allgather()
        assert np.array_equal(applied, c), f"apply of {m} x {n}"
        assert lu.shape == (m, n), f"lu of {m} x {n}"
        assert not pivots.size, f"lu of {m} x {n}"
    for assume in ("gen", "pos", "sym", "her", *KINDS.values()):
        assert pb.linalg.solve(zeros(0, 0), zeros(0, 3), assume).shape == (0, 3), assume
        assert pb.linalg.inv(zeros(0, 0), assume).shape == (0, 0), assume
    assert pb.linalg.solve(placed(ctx, rng, np.eye(4, dtype=dtype)), zeros(4, 0)).shape == (4, 0)
    assert pb.linalg.slogdet(zeros(0, 0)) == (1, 0)
    assert pb.linalg.lu_solve((zeros(0, 0), []), zeros(0, 3)).shape == (0, 3)


CASES = (cholesky_case, lu_case, triangular_case, qr_case)


def not_positive(ctx, rng):
    """What is not positive definite, and NaN; in panels or blocks of 4 columns."""
    calls = (
        lambda a: pb.linalg.cholesky(a, out=a),
        lambda a: solve_keeping(a, ctx.zeros(a.descriptor), a, lower=True),
    )
    for index, call in itertools.product((0, 5, 16), calls):
        whole = positive(rng, 17, "float64")
        whole[index, index] = -1
        a = scattered(ctx, layout(rng, (17, 17), ctx.size), whole)
        words = ["not positive definite", f"index {index}", f"order {index + 1}"]
        refuses(ctx, pb.FactorizationError, words, call, a)
        done = index // 4 * 4
        expected = np.linalg.cholesky(whole[:done, :done]) if done else whole[:0, :0]
        before = np.tril(a.allgather()[:done, :done])
        assert np.allclose(before, expected), f"L before index {index}"
    with pytest.raises(pb.FactorizationError) as caught:
        pb.linalg.cholesky(scattered(ctx, layout(rng, (3, 3), ctx.size), -np.eye(3)))
    assert caught.value.index == 0
    for at in ((0, 0), (9, 2), (9, 9)):
        whole = positive(rng, 17, "complex64")
        whole[at] = np.nan
        found = pb.linalg.cholesky(
            scattered(ctx, layout(rng, (17, 17), ctx.size, dtype="complex64"), whole)
        ).allgather()
        assert np.isnan(found[16, 16]), f"NaN at {at}"
        assert (np.triu(found, 1) == 0).all(), f"NaN at {at}: outside the triangle"
        if at != (0, 0):
            assert np.allclose(found[:4, :4], np.linalg.cholesky(whole[:4, :4])), f"before NaN at {at}"


def least_squares_at_the_ends(ctx, rng, dtype):
    """Tiny and large A and B, of every shape: what is solved in double precision, with both of ordinary size."""
    small, large = (1e-40, 3e38) if dtype in ("float32", "complex64") else (1e-310, 1.7e308)
    # denormal numbers have few digits
    for of_a, of_b in (
        (small, small),
        (small * 1e4, small * 1e4),
        (large, large),
        (large, 1),
        (1, small * 1e4),
    ):
        for shape, op in in_turn(itertools.product(((9, 4), (4, 9), (6, 6)), "NTC"), keep=2):
            whole = rng.uniform(0.1, 0.4, shape) + np.eye(*shape) / 2
            if np.dtype(dtype).kind == "c":
                whole = whole * np.exp(1j * rng.uniform(0, 1, shape))
            with np.errstate(under="ignore"):
                whole = (whole * of_a).astype(dtype)
                right = (rng.uniform(0.2, 1, (shape[op != "N"], 2)) * of_b).astype(dtype)
            left = unscaled(whole, of_a)
            left = {"N": left, "T": left.T, "C": left.conj().T}[op]
            x = np.linalg.lstsq(left, unscaled(right, of_b), rcond=None)[0]
            found = exact(
                pb.linalg.lstsq(placed(ctx, rng, whole), placed(ctx, rng, right), trans=op).allgather()
            )
            ratio = math.sqrt(of_b) / math.sqrt(of_a)
            near = np.allclose(
                unscaled(unscaled(found, ratio), ratio), x, atol=1e-2 if of_a == small else 1e-3
            )
            assert near, f"lstsq {dtype} {of_a} {of_b} {shape} {op}: {found}"


def without_full_rank(ctx, rng, dtype):
    """What is an error up to rounding, and what is none: columns that have units of their own."""
    product = random(rng, (20, 5), dtype) @ random(rng, (5, 8), dtype)
    product[:, :5] += np.eye(20, 5) * 3
    product[:, 5:] = product[:, :3] + product[:, 1:4]
    for index, whole in (
        (1, np.ones((6, 3))), (1, np.ones((3, 6))), (1, np.full((5, 5), 3e-30)), (0, np.zeros((4, 2))), (5, product),
        (2, np.arange(1.0, 10).reshape(3, 3)), (1, np.outer(np.arange(1, 30.0), [1, 1 / 3, 7])),
    ):  # fmt: skip
        a = placed(ctx, rng, whole.astype(dtype))
        b = placed(ctx, rng, np.ones((len(whole), 2), dtype))
        words = [
            "the matrix has no full rank",
            f"{'row' if a.shape[0] < a.shape[1] else 'column'} at index {index} ",
        ]
        refuses(ctx, np.linalg.LinAlgError, words, pb.linalg.lstsq, a, b)
    dependent_unseen(ctx, dtype)
    units = np.array([1, 1e10, 1e-10, 3])
    a, b = (placed(ctx, rng, (np.tri(7, 4) * units).astype(dtype)) for _ in "ab")
    found = exact(pb.linalg.lstsq(a, b).allgather()) * units[:, None] / units
    assert np.allclose(found, np.eye(4), atol=1e-3), f"columns with units of their own, {dtype}: {found}"
    whole = np.where(np.eye(6, 3) > 0, np.nan, 1)
    found = pb.linalg.lstsq(placed(ctx, rng, whole.astype(dtype)), placed(ctx, rng, np.ones((6, 1), dtype)))
    assert np.isnan(found.allgather()).any(), f"NaN in least squares, {dtype}"


def dependent_unseen(ctx, dtype):
    """The columns u, u + h w and w depend on each other, but no diagonal element of R is near the rounding of 0."""
    rng, eps = np.random.default_rng(62), float(np.finfo(dtype).eps)
    u, w, right = (random(rng, (24, 1), dtype) for _ in range(3))
    h = np.asarray(1000 * eps, dtype)
    others = random(rng, (24, 3), dtype)
    for whole in (
        np.hstack([u, u + h * w, w]),
        np.hstack([others, w * 1000, u + h * w, u / 1000]),  # among others, with units
    ):
        for a, b in ((whole, right), (whole.conj().T, right[: whole.shape[1]])):
            a, b = (placed(ctx, rng, each) for each in (a, b))
            words = ["the matrix has no full rank", "is a combination of others"]
            refuses(ctx, np.linalg.LinAlgError, words, pb.linalg.lstsq, a, b)
    near = np.hstack([others, others.sum(1, keepdims=True) + 200 * np.asarray(eps, dtype) * w]).astype(dtype)
    x = pb.linalg.lstsq(placed(ctx, rng, near), placed(ctx, rng, near)).allgather()
    assert np.allclose(x, np.eye(4), atol=0.2), f"ill-conditioned, but of full rank, {dtype}: {x}"


def failures(ctx, rng):
    """What is not positive definite, what is singular, NaN; in panels of 4 columns."""
    not_positive(ctx, rng)
    for turn, index in enumerate((0, 6, 16)):
        whole = random(rng, (17, 17), "float64")
        whole[:, index] = 0
        words = ["exactly singular", f"index {index}"]
        a, b = (scattered(ctx, layout(rng, (17, 17), ctx.size), whole) for _ in "ab")
        triangle = scattered(ctx, layout(rng, (17, 17), ctx.size), np.diag(np.arange(17.0) - index))
        calls = (
            *((pb.linalg.inv, a), (pb.linalg.lu_factor, a), (pb.linalg.solve, a, b)),
            *((pb.linalg.solve, triangle, b, kind) for kind in KINDS.values()),
            *((pb.linalg.inv, triangle, kind) for kind in KINDS.values()),
        )
        for call in in_turn(calls, keep=3, first=turn):
            refuses(ctx, pb.FactorizationError, words, *call)
        refuses(ctx, pb.FactorizationError, words, pb.linalg.lu_factor, a, out=b)
        assert pb.linalg.slogdet(a) == (0, -np.inf), f"singular at {index}"
        assert pb.linalg.cond_estimate(a) == np.inf, f"singular at {index}"
        upper = np.triu(b.allgather())
        assert np.flatnonzero(upper.diagonal() == 0).tolist() == [index], f"singular at {index}: U"
        whole = random(rng, (17, 17), "float32")
        whole[3, index] = np.nan
        a = scattered(ctx, layout(rng, (17, 17), ctx.size, dtype="float32"), whole)
        assert np.isnan(pb.linalg.lu_factor(a)[0].allgather()).any(), f"NaN in LU at {index}"
        numbers = pb.linalg.cond_estimate(a), pb.linalg.slogdet(a)[1]
        assert np.isnan(numbers).all(), f"{numbers} from NaN at {index}"
