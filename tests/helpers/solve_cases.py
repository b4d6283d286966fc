# SPDX-License-Identifier: Apache-2.0
"""Refined solves, least squares of any rank, and warnings of ill-conditioned matrices, in layouts at random."""

from __future__ import annotations

import numpy as np

import pblasmp as pb
from tests.helpers.cases import agreed_error, pick
from tests.helpers.factor_cases import MOST, only, placed, positive, random, relative

la = pb.linalg


def refined_case(ctx, rng, dtype):
    """A solve refined from single precision, as exact as one without; numbers may be near the ends of the range."""
    n, width = pick(rng, (1, 2, 9, 30)), pick(rng, (0, 1, 4))
    kind, lower, op = pick(rng, ("gen", "pos", "sym", "her")), bool(rng.integers(2)), pick(rng, "NTC")
    scale = pick(rng, (1.0, 1.0, 1e200, 1e-200))
    whole, right = random(rng, (n, n), dtype) + 4 * np.eye(n), random(rng, (n, width), dtype)
    if kind == "pos":
        whole = positive(rng, n, dtype)
    elif kind != "gen":
        whole = whole + (whole.T if kind == "sym" else whole.conj().T)
    given = whole if kind == "gen" else only("L" if lower else "U", whole)
    a, b = placed(ctx, rng, given * scale), placed(ctx, rng, right)
    out = pick(rng, (None, b, placed(ctx, rng, np.zeros_like(right))))
    how = {"lower": lower, "transposed": op, "out": out}
    x, info = la.solve(a, b, kind, refine="float32", return_info=True, **how)
    name = f"{dtype} {kind} {op} {n} x {width} {scale}"
    if out is not None and x is not out:
        return name, "X is not out"
    turned = {"N": whole, "T": whole.T, "C": whole.conj().T}[op]
    x = x.allgather() * scale
    if not relative(turned @ x - right, abs(turned) @ abs(x) + abs(right), n, dtype) < MOST:
        return name, f"{x}"
    well = np.linalg.cond(whole) < 1e5
    if well and (info.fallback or not 0 <= info.iterations < 10 or (n > 4 and width and not info.iterations)):
        return name, f"{info}"
    return name, None


def refinement_ends(ctx, rng):
    """What float32 cannot factor, what does not converge, NaN, matrices without elements, and what is refused."""
    n = 8
    hilbert = 1 / (1.0 + np.add.outer(np.arange(n), np.arange(n)))
    hidden = np.eye(n)  # singular in single precision
    hidden[:2, :2] = [[1, 1], [1, 1 + 1e-12]]
    right = random(rng, (n, 2), "float64")
    b = placed(ctx, rng, right)
    for name, whole, kind, words in (
        ("Hilbert's", hilbert, "gen", "steps the error is"),
        ("singular in float32", hidden, "gen", "in single precision the matrix is exactly singular"),
        ("indefinite in float32", hidden, "pos", "in single precision the matrix is not positive definite"),
    ):
        x, info = la.solve(placed(ctx, rng, whole), b, kind, refine="float32", return_info=True)
        x = x.allgather()
        small = relative(whole @ x - right, abs(whole) @ abs(x), n, "float64") < MOST
        same = len(set(ctx.comm.allgather(str(info)))) == 1
        yield name, None if small and same and words in info.fallback else f"{info} {x}"
    for value in (np.nan, np.inf):
        spoiled = positive(rng, n, "float64")
        spoiled[3, 4] = spoiled[4, 3] = value
        a = placed(ctx, rng, spoiled)
        x, info = la.solve(a, b, refine="float32", return_info=True)
        plain = la.solve(a, b).allgather()  # by LU, which may lose an infinity, but not NaN
        fine = np.array_equal(x.allgather(), plain, equal_nan=True) and f"A is {value}" in info.fallback
        yield f"{value} in A", None if fine else f"{info}"
        whole, of_right = positive(rng, n, "float64"), right.copy()
        of_right[2, 1] = value
        x = la.solve(placed(ctx, rng, whole), placed(ctx, rng, of_right), refine="float32").allgather()
        yield f"{value} in B", None if not np.isfinite(x[:, 1]).any() else f"{x}"
    nothing = ctx.zeros((0, 0), block=2)
    x, info = la.solve(nothing, ctx.zeros((0, 3), block=2), refine="float32", return_info=True)
    yield "no elements", None if (x.shape, tuple(info)) == ((0, 3), (0, 0.0, "")) else f"{x.shape} {info}"
    a, single = placed(ctx, rng, hilbert), ctx.eye((n, n), block=3, dtype="float32")
    yield (
        "singular",
        agreed_error(
            ctx, pb.FactorizationError, ["solve: the matrix is exactly singular", "index 0"], la.solve,
            ctx.zeros((n, n), block=3), b, refine="float32",
        ),
    )  # fmt: skip
    refine = {"refine": "float32"}
    for kind, words, args, how in (
        (pb.ArgumentError, ["refine: expected None or 'float32', got 'float16'"], (a, b), {"refine": "float16"}),
        (pb.ArgumentError, ["refine: expected 'float32', got None"], (a, b), {"return_info": True}),
        (pb.ArgumentError, ["return_info: expected True or False, got 3"], (a, b), refine | {"return_info": 3}),
        (pb.ArgumentError, ["expected a matrix that is factored"], (a, b), {**refine, "assume_a": "lower triangular"}),
        (pb.ArgumentError, ["float64 or complex128 with refine, got float32"], (single, b), refine),
        (pb.ArgumentError, ["b: 7 rows, but a has 8 columns"], (a, b[1:, :]), refine),
    ):  # fmt: skip
        yield words[0], agreed_error(ctx, kind, words, la.solve, *args, **how)
    words = ["a refined solve is several calls: it has no plan"]
    yield "plan", agreed_error(ctx, pb.UnsupportedError, words, pb.plan, la.solve, a, b, refine="float32")
    if ctx.size > 1:
        refine = "float32" if ctx.rank else None
        yield "one rank", agreed_error(ctx, pb.RankMismatchError, ["solve"], la.solve, a, b, refine=refine)
