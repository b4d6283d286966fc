# SPDX-License-Identifier: Apache-2.0
"""What factorizations find, right and slightly wrong, for ``pb.verify``, on CPU ranks and on GPUs."""

from functools import partial

import numpy as np

import pblasmp as pb
from tests.helpers.factor_cases import only, placed, positive, random


def found_by(ctx, rng, dtype, n=17):
    """What functions find: (name, function, matrices, found, options)."""
    whole = positive(rng, n, dtype)
    square, tall = random(rng, (n, n), dtype), random(rng, (n, n - 6), dtype)
    hermitian = ((square + square.conj().T) / 2).astype(dtype)
    s, x, r = (placed(ctx, rng, each) for each in (whole, square, tall))
    b = placed(ctx, rng, random(rng, (n, 2), dtype))
    wide = placed(ctx, rng, tall.T.copy())
    for uplo, lower in (("L", True), ("U", False)):
        h, p = placed(ctx, rng, only(uplo, hermitian)), placed(ctx, rng, only(uplo, whole))
        yield "eigh", pb.linalg.eigh, (h,), pb.linalg.eigh(h, lower=lower), {"lower": lower}
        how = {"b": p, "uplo": uplo, "check": True}
        yield "pair", pb.linalg.eigh, (h,), pb.linalg.eigh(h, **how), how
        yield "cholesky", pb.linalg.cholesky, (p, lower), pb.linalg.cholesky(p, lower), {"out": None}
        how = {"lower": lower} if lower else {}
        yield "cho_factor", pb.linalg.cho_factor, (p,), pb.linalg.cho_factor(p, lower), how
    yield (
        "subset",
        pb.linalg.eigh,
        (s,),
        pb.linalg.eigh(s, subset_by_index=(2, 5)),
        {"subset_by_index": (2, 5)},
    )
    for full in (False, True):
        for a in (r, wide, *([r[:, :0], r[:0, :4]] if full else [])):
            yield f"svd {full}", pb.linalg.svd, (a, full), pb.linalg.svd(a, full), {}
    how = {"refine": "float32", "return_info": True}
    if dtype in ("float64", "complex128"):
        yield "refined", pb.linalg.solve, (s, b, "pos"), pb.linalg.solve(s, b, "pos", **how), how
    for assume, a, trans in (("gen", x, True), ("pos", s, True), ("upper triangular", s, "C"), ("gen", x, 0)):
        how = {"assume_a": assume, "transposed": trans}
        yield f"solve {assume}", pb.linalg.solve, (a, b), pb.linalg.solve(a, b, **how), how
    symmetric = placed(ctx, rng, only("L", (square + square.T + 20 * np.eye(n)).astype(dtype)))
    how = {"assume_a": "sym", "lower": True}
    yield "symmetric", pb.linalg.solve, (symmetric, b), pb.linalg.solve(symmetric, b, **how), how
    how = {"trans": 2, "lower": False, "unit_diagonal": True}
    yield "unit", pb.linalg.solve_triangular, (s, b), pb.linalg.solve_triangular(s, b, **how), how
    lower = placed(ctx, rng, only("L", whole))
    how = {"assume_a": "lower triangular"}
    yield "inv lower", pb.linalg.inv, (lower,), pb.linalg.inv(lower, **how), how
    yield "inv", pb.linalg.inv, (x,), pb.linalg.inv(x), {}
    for uplo, is_lower in (("L", True), ("U", False)):
        factor = pb.linalg.cho_factor(placed(ctx, rng, only(uplo, whole)), is_lower)
        pair = placed(ctx, rng, only(uplo, factor[0].allgather())), is_lower
        yield f"cho_solve {uplo}", pb.linalg.cho_solve, (pair, b), pb.linalg.cho_solve(pair, b), {}
    for trans in (0, "T", 2):
        pair, how = pb.linalg.lu_factor(x), {"trans": trans}
        yield (
            f"lu_solve {trans}",
            pb.linalg.lu_solve,
            (pair, b, trans),
            pb.linalg.lu_solve(pair, b, **how),
            {},
        )
    for name, a, trans in (("tall", r, "N"), ("wide", r, "C"), ("turned", wide, 1), ("of wide", wide, 0)):
        right = b if len(a) == n and trans == "N" else placed(ctx, rng, random(rng, (n - 6, 2), dtype))
        right = b if name == "turned" else right
        how = {"trans": trans}
        yield f"lstsq {name}", pb.linalg.lstsq, (a, right), pb.linalg.lstsq(a, right, **how), how
        how = {"trans": trans, "rcond": None}
        yield f"ranked {name}", pb.linalg.lstsq, (a, right), pb.linalg.lstsq(a, right, **how), how
    low = placed(ctx, rng, np.outer(whole[0], whole[1, :9]))
    yield "lstsq of rank 1", pb.linalg.lstsq, (low, b), pb.linalg.lstsq(low, b, None), {"rcond": None}
    for name, a in (("square", x), ("tall", r), ("wide", wide)):
        yield f"lu {name}", pb.linalg.lu_factor, (a,), pb.linalg.lu_factor(a), {}
        yield f"qr {name}", pb.linalg.qr, (a,), pb.linalg.qr(a), {}
        yield f"qr {name} as Q and R", pb.linalg.qr, (a,), tuple(pb.linalg.qr(a)), {}


def spoil(found):
    """Change one element, by a part of it, of a matrix in what was found."""
    matrix = found if isinstance(found, pb.DistributedMatrix) else getattr(found, "factors", None)
    if matrix is None:
        matrix = next(each for each in found if isinstance(each, pb.DistributedMatrix) and all(each.shape))
    whole = matrix.allgather()
    kept = np.where(np.isfinite(whole), np.abs(whole), 0)
    i, j = np.unravel_index(kept.argmax(), whole.shape)
    matrix[int(i), int(j)] = whole[i, j] * 1.1


def right_and_wrong(ctx, rng, dtype):
    """What every function finds passes, and with one element changed it does not."""
    for case, function, given, found, how in found_by(ctx, rng, dtype):
        before = pb.verify(function, *given, found=found, **how)
        spoil(found)
        after = pb.verify(function.__name__, *given, found=found, **how)
        assert before, f"{case} {dtype}: {before}"
        assert before.error < before.bound / 2, f"{case} {dtype}: {before}"
        assert not after, f"{case} {dtype}, spoiled: {after}"
        everyones = ctx.comm.allgather((before, after))
        assert len(set(everyones)) == 1, f"{case} {dtype}: the ranks differ"


def wrong_in_other_ways(ctx, rng):
    a = placed(ctx, rng, positive(rng, 12, "float64"))
    w, v = pb.linalg.eigh(a)
    u, s, vh = pb.linalg.svd(a)
    first_two = np.r_[w[1], w[0], w[2:]]
    for case, found in (
        ("one vector twice", (w[[0, 0]], _columns(ctx, v, [0, 0]))),
        ("not ascending", (first_two, _columns(ctx, v, [1, 0, *range(2, 12)]))),
        ("longer vectors", (w, 2 * v)),
        ("another value", (w * np.r_[1 + 1e-9, np.ones(11)], v)),
        ("NaN", (w, v * np.nan)),
    ):
        assert not pb.verify(pb.linalg.eigh, a, found=found), case
    assert pb.verify(pb.linalg.eigh, a, found=(w, -1 * v)), "signs are free"
    assert not pb.verify(pb.linalg.svd, a, found=(-1 * u, s, vh)), "svd: a sign"
    with_ill_conditioned(ctx, rng)
    eye = ctx.eye((12, 12), block=5)
    assert not pb.verify(pb.linalg.qr, a, found=(eye, a)), "R is not triangular"
    assert not pb.verify(pb.linalg.qr, a, found=(a, eye)), "Q is not orthonormal"
    x = pb.linalg.lstsq(a, a[:, :2], None)
    for case, found in (
        ("another rank", x._replace(rank=11)),
        ("another singular value", x._replace(s=x.s * np.r_[1 + 1e-9, np.ones(11)])),
        ("ascending", x._replace(s=x.s[::-1])),
    ):
        assert not pb.verify(pb.linalg.lstsq, a, a[:, :2], found=found), case
    x, of = pb.linalg.lstsq(a, a[:, :2], 0.4), partial(pb.verify, pb.linalg.lstsq, a, a[:, :2])
    assert of(found=x, rcond=0.4), f"rank {x.rank}"
    assert not of(found=x, rcond=None), f"rank {x.rank}"
    spoiled, zero = a.copy(), ctx.zeros((5, 5), block=2)
    spoiled[3, 3] = np.nan
    assert not pb.verify(pb.linalg.eigh, spoiled, found=(w, v)), "no NaN for NaN"
    for given in (spoiled, zero, zero[:0, :0]):
        assert pb.verify(pb.linalg.eigh, given, found=pb.linalg.eigh(given)), given
    at_the_ends(ctx, rng)


def with_ill_conditioned(ctx, rng, n=24):
    """Eigenpairs of two matrices, all and some: rounding makes larger errors if B is ill-conditioned."""
    q = np.linalg.qr(random(rng, (n, n), "float64"))[0]
    whole = random(rng, (n, n), "float64")
    a = placed(ctx, rng, only("L", whole + whole.T))
    for condition in (1e5, 1e10):
        b = placed(ctx, rng, only("L", (q * np.geomspace(1, 1 / condition, n)) @ q.T))
        for subset in (None, (15, 19)):
            case = f"{subset} with a B of condition {condition:g}"
            w, v = pb.linalg.eigh(a, b, subset_by_index=subset, check=True)
            found = pb.verify(pb.linalg.eigh, a, b, found=(w, v), subset_by_index=subset)
            assert found, f"{case}: {found}"
            found = pb.verify(pb.linalg.eigh, a, b, found=(w + abs(w).max() / 100, v))
            assert not found, f"{case}, other values: {found}"


def at_the_ends(ctx, rng):
    """Matrices, and what is found of them, near the largest and the smallest numbers."""
    for dtype in ("float64", "complex128"):
        whole = positive(rng, 12, dtype)
        whole /= 8 * np.abs(whole).sum(0).max()
        right = random(rng, (12, 2), dtype) / 100
        for exponent in (1024, 1020, -960, -1016):
            a, b, one = (placed(ctx, rng, x * 2.0 ** (e // 2) * 2.0 ** (e - e // 2)) for x, e in (
                (whole, exponent), (right, exponent), (right, 0)
            ))  # fmt: skip
            for name, given in (
                ("eigh", (a,)), ("svd", (a,)), ("solve", (a, b)), ("solve", (a, one)), ("inv", (a,)),
                ("cholesky", (a,)), ("lu_factor", (a,)), ("qr", (a,)),
            ):  # fmt: skip
                found = getattr(pb.linalg, name)(*given)
                before = pb.verify(name, *given, found=found)
                spoil(found)
                after = pb.verify(name, *given, found=found)
                assert before, f"{name} of {dtype} times 2^{exponent}: {before}"
                assert not after, f"{name} of {dtype} times 2^{exponent}, spoiled: {after}"
    large = ctx.scatter(1e300 * np.array([[1, 1], [1, 1 + 1e-10]]), block=1)
    b = ctx.scatter(np.array([[0], [-1e300]]), block=1)  # A x is small, though A and x are not
    x = ctx.scatter(np.array([[1e10], [-1e10]]), block=1)
    assert pb.verify(pb.linalg.solve, large, b, found=x)
    assert not pb.verify(pb.linalg.solve, large, b, found=x * 1.01)
    a, b = ctx.full((6, 6), 2.0**1010, block=2), ctx.full((6, 6), 3 * 2.0**-1074, block=2)
    d = a @ b
    assert pb.verify(a, b, None, d)
    assert not pb.verify(a, b, None, d * 1.01)


def _columns(ctx, v, columns):
    whole = v.allgather()[:, columns]
    return ctx.scatter(whole, block=3)
