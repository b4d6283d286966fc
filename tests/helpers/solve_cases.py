# SPDX-License-Identifier: Apache-2.0
"""Refined solves, least squares of any rank, and warnings of ill-conditioned matrices, in layouts at random."""

import warnings

import numpy as np
from scipy.linalg import LinAlgWarning

import pblasmp as pb
from tests.helpers.cases import pick, refuses
from tests.helpers.factor_cases import all_small, only, placed, positive, random, relative

la = pb.linalg


def refined_case(ctx, rng, dtype):
    """A solve refined from single precision, as exact as one without; numbers may be near the ends of the range."""
    dtype = "complex128" if np.dtype(dtype).kind == "c" else "float64"
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
    x, info = la.solve(a, b, kind, refine=pick(rng, ("float32", "tf32")), return_info=True, **how)
    case = f"refined {dtype} {kind} {op} {n} x {width} {scale}"
    assert out is None or x is out, f"{case}: X is not out"
    turned = {"N": whole, "T": whole.T, "C": whole.conj().T}[op]
    x = x.allgather() * scale
    all_small(case, solve=relative(turned @ x - right, abs(turned) @ abs(x) + abs(right), n, dtype))
    if np.linalg.cond(whole) < 1e5:
        assert not info.fallback, f"{case}: {info}"
        least = 1 if n > 4 and width else 0
        assert least <= info.iterations < 10, f"{case}: {info}"


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
        all_small(name, solve=relative(whole @ x - right, abs(whole) @ abs(x), n, "float64"))
        assert words in info.fallback, f"{name}: {info}"
        everyones = set(ctx.comm.allgather(str(info)))
        assert everyones == {str(info)}, name
    for value in (np.nan, np.inf):
        spoiled = positive(rng, n, "float64")
        spoiled[3, 4] = spoiled[4, 3] = value
        a = placed(ctx, rng, spoiled)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LinAlgWarning)  # infinity is ill-conditioned
            x, info = la.solve(a, b, refine="float32", return_info=True)
            plain = la.solve(a, b).allgather()  # by LU, which may lose an infinity, but not NaN
        assert np.array_equal(x.allgather(), plain, equal_nan=True), f"{value} in A"
        assert f"A is {value}" in info.fallback
        whole, of_right = positive(rng, n, "float64"), right.copy()
        of_right[2, 1] = value
        x = la.solve(placed(ctx, rng, whole), placed(ctx, rng, of_right), refine="float32").allgather()
        assert not np.isfinite(x[:, 1]).any(), f"{value} in B: {x}"
    nothing = ctx.zeros((0, 0), block=2)
    x, info = la.solve(nothing, ctx.zeros((0, 3), block=2), refine="float32", return_info=True)
    assert (x.shape, tuple(info)) == ((0, 3), (0, 0.0, ""))
    a, single = placed(ctx, rng, hilbert), ctx.eye((n, n), block=3, dtype="float32")
    refuses(
            ctx, pb.FactorizationError, ["solve: the matrix is exactly singular", "index 0"], la.solve,
            ctx.zeros((n, n), block=3), b, refine="float32")  # fmt: skip
    refine = {"refine": "float32"}
    for kind, words, args, how in (
        (pb.ArgumentError, ["expected None, 'float32' or 'tf32', got 'float16'"], (a, b), {"refine": "float16"}),
        (pb.ArgumentError, ["refine: expected 'float32' or 'tf32', got None"], (a, b), {"return_info": True}),
        (pb.ArgumentError, ["return_info: expected True or False, got 3"], (a, b), refine | {"return_info": 3}),
        (pb.ArgumentError, ["expected a matrix that is factored"], (a, b), {**refine, "assume_a": "lower triangular"}),
        (pb.ArgumentError, ["float64 or complex128 with refine, got float32"], (single, b), refine),
        (pb.ArgumentError, ["b: 7 rows, but a has 8 columns"], (a, b[1:, :]), refine),
    ):  # fmt: skip
        refuses(ctx, kind, words, la.solve, *args, **how)
    words = ["a refined solve is several calls: it has no plan"]
    refuses(ctx, pb.UnsupportedError, words, pb.plan, la.solve, a, b, refine="float32")
    if ctx.size > 1:
        refine = "float32" if ctx.rank else None
        refuses(ctx, pb.RankMismatchError, ["solve"], la.solve, a, b, refine=refine)


SCALES = ((1.0, 1.0), (1.0, 1.0), (1e30, 1e30), (1e-30, 1e-30), (1e30, 1.0), (1.0, 1e30))  # of A and of B


def ranked_case(ctx, rng, dtype):
    """Least squares of a matrix of any rank: X, residuals, rank and singular values beside NumPy's."""
    (m, n), width, op = rng.integers(1, 24, 2), pick(rng, (0, 1, 3)), pick(rng, "NTC")
    least, (of_a, of_b) = min(m, n), pick(rng, SCALES)
    rank = int(pick(rng, (least, least, max(0, least - 2), least // 2)))
    left, right = random(rng, (m, rank), dtype), random(rng, (rank, n), dtype)
    if rank:
        left, right = np.linalg.qr(left)[0], np.linalg.qr(right.conj().T)[0].conj().T
    whole = ((left * np.linspace(3, 1, rank)) @ right).astype(dtype)
    if rng.integers(6) == 0:
        whole = random(rng, (m, n), dtype)
    turned = {"N": whole, "T": whole.T, "C": whole.conj().T}[op]
    b = random(rng, (len(turned), width), dtype)
    wide = turned.astype("complex128" if turned.dtype.kind == "c" else "float64")
    rcond = pick(rng, (None, -1, 0.437, 1e-3)) if rank == least else pick(rng, (None, 0.437, 1e-3))
    numbers = rcond if rcond not in (None, -1) else np.finfo(dtype).eps * (1 if rcond else max(m, n))
    expected = np.linalg.lstsq(wide, b, rcond=numbers)
    out = pick(rng, (None, placed(ctx, rng, np.zeros((turned.shape[1], width), dtype))))
    given = placed(ctx, rng, whole * dtype_of(dtype, of_a)), placed(ctx, rng, b * dtype_of(dtype, of_b))
    found = la.lstsq(*given, rcond, trans=op, out=out)
    case = f"ranked {dtype} {op} {m} x {n}, {width}, rank {rank}, {rcond}, {of_a} {of_b}"
    assert out is None or found.x is out, f"{case}: X is not out"
    x, s = found.x.allgather() / of_b * of_a, found.s / of_a
    residuals = found.residuals.astype("float64") / of_b / of_b
    if dtype in ("float32", "complex64") and of_b != 1:  # out of its range
        residuals = expected[1]
    near = {"rtol": 2e4 * np.finfo(dtype).eps, "atol": 2e3 * np.finfo(dtype).eps}
    pairs = (x, expected[0]), (residuals, expected[1]), (found.rank, expected[2]), (s, expected[3])
    for got, wanted in pairs:
        assert np.shape(got) == np.shape(wanted), f"{case}: {got}, expected {wanted}"
        assert np.allclose(got, wanted, **near), f"{case}: {got}, expected {wanted}"
    everyones = set(ctx.comm.allgather((found.rank, s.tobytes(), residuals.tobytes())))
    assert len(everyones) == 1, f"{case}: the ranks differ"


def dtype_of(dtype, value):
    return np.dtype(dtype).type(value)


def ranks_at_the_ends(ctx, rng):
    """Matrices without elements, zeros, NaN, NumPy's order of arguments, and what is refused."""
    for m, n, k in ((4, 0, 2), (0, 4, 2), (0, 0, 2), (3, 2, 0), (2, 3, 0), (1, 1, 1), (3, 3, 1)):
        whole, right = np.zeros((m, n)), random(rng, (m, k), "float64")
        expected = np.linalg.lstsq(whole, right, None)
        found = la.lstsq(ctx.scatter(whole, block=2), ctx.scatter(right, block=2), None)
        for got, wanted in zip((found.x.allgather(), *found[1:]), expected, strict=True):
            assert np.shape(got) == np.shape(wanted), f"{m} x {n}, {k}"
            assert np.allclose(got, wanted), f"{m} x {n}, {k}: {got}, expected {wanted}"
    right = random(rng, (6, 2), "float64")
    spoiled = random(rng, (6, 4), "float64")
    for value in (np.nan, np.inf):
        whole, of_right = spoiled.copy(), right.copy()
        whole[2, 1] = of_right[4, 1] = value
        x, _, rank, s = la.lstsq(placed(ctx, rng, whole), placed(ctx, rng, right), rcond=None)
        assert rank == 0, f"{value} in A"
        assert not np.isfinite(x.allgather()).any(), f"{value} in A"
        assert np.isnan(s).all(), f"{value} in A"
        for given in (whole, whole.T):
            x = la.lstsq(placed(ctx, rng, given), placed(ctx, rng, right[: len(given)])).allgather()
            assert np.isnan(x).all(), f"{value} in A of full rank, {given.shape}: {x}"
        x, _, rank, _ = la.lstsq(placed(ctx, rng, spoiled), placed(ctx, rng, of_right), rcond=None)
        x, expected = x.allgather(), np.linalg.lstsq(spoiled, right, None)[0]
        assert rank == 4, f"{value} in B"
        assert np.allclose(x[:, 0], expected[:, 0]), f"{value} in B: {x}"
        assert not np.isfinite(x[:, 1]).all(), f"{value} in B: {x}"
    a, b = placed(ctx, rng, spoiled), placed(ctx, rng, right)
    for kind, words, args, how in (
        (pb.ArgumentError, ["rcond: expected None, a number or 'full rank', got 'x'"], (a, b, "x"), {}),
        (pb.ArgumentError, ["rcond: expected None, a number", "got nan"], (a, b, np.nan), {}),
        (pb.ArgumentError, ["rcond: expected None, a number", "got True"], (a, b, True), {}),
        (pb.ArgumentError, ["b: expected 6 rows of float64, got 5 x 2"], (a, b[1:, :], None), {}),
        (pb.ArgumentError, ["out: expected 4 x 2 of float64"], (a, b, None), {"out": b}),
        (pb.UnsupportedError, ["algo", "got 'panels'"], (a, b, None), {"algo": "panels"}),
    ):
        refuses(ctx, kind, words, la.lstsq, *args, **how)
    words = ["lstsq: with rcond it is several calls: it has no plan"]
    refuses(ctx, pb.UnsupportedError, words, pb.plan, la.lstsq, a, b, None)
    rcond = None if ctx.rank else "full rank"
    if ctx.size > 1:
        refuses(ctx, pb.RankMismatchError, ["lstsq"], la.lstsq, a, b, rcond)
    if ctx.engine.name != "host":
        return
    large = ctx.zeros((2010, 2001), block=300)
    words = ["scalapack: no ScaLAPACK at", "PBLASMP_SCALAPACK_LIBRARY", "up to 2000 rows and columns"]
    refuses(ctx, pb.UnsupportedError, words, la.svdvals, large)


def warned(ctx, call, *args, **how):
    """The texts of the warnings of ill-conditioned matrices that every rank gives, in the line that calls."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args, **how)
    found = [(str(w.message), w.filename) for w in caught if issubclass(w.category, LinAlgWarning)]
    everyones = ctx.comm.allgather(found)
    assert all(each == found for each in everyones), everyones
    assert all(file == __file__ for _, file in found), found
    return [text for text, _ in found]


def conditions_case(ctx, rng, dtype):
    """A warning where SciPy gives one, and no other."""
    n, kind, lower = (
        int(pick(rng, (2, 9, 30))),
        pick(rng, ("gen", "pos", "sym", "her")),
        bool(rng.integers(2)),
    )
    eps = np.finfo(dtype).eps
    u, v = (
        np.linalg.qr(random(rng, (n, n), "complex128" if dtype.startswith("c") else "float64"))[0]
        for _ in "uv"
    )
    s = np.linspace(1, 0.5, n)
    s[-1] = ill = pick(rng, (1e-2, eps * 300 * n, eps / 100))
    whole = (u * s) @ (v if kind == "gen" else u.conj().T)
    if kind == "sym":
        whole = (u * s) @ u.T
    whole = (whole if kind == "gen" else (whole + (whole.T if kind == "sym" else whole.conj().T)) / 2).astype(
        dtype
    )
    a = placed(ctx, rng, whole if kind == "gen" else only("L" if lower else "U", whole))
    b = placed(ctx, rng, random(rng, (n, 2), dtype))
    case = f"conditions {dtype} {kind} {n} {ill}"
    try:
        texts = warned(ctx, la.solve, a, b, kind, lower=lower)
    except np.linalg.LinAlgError:  # singular, or not positive definite, up to rounding
        assert ill < eps, case
        return
    if ill < eps:
        assert len(texts) == 1, f"{case}: {texts}"
        assert "solve: ill-conditioned matrix (rcond=" in texts[0]
    else:
        assert not texts, f"{case}: {texts}"


CASES = (refined_case, ranked_case, conditions_case)


def conditions_elsewhere(ctx, rng):
    """Plans and refined solves warn, too; a warning that is an error on one rank is one on all; NaN gives none."""
    hilbert = 1 / (1.0 + np.add.outer(np.arange(13), np.arange(13)))
    a, b = placed(ctx, rng, hilbert), placed(ctx, rng, random(rng, (13, 1), "float64"))
    with pb.plan(la.solve, a, b) as plan:
        assert len(warned(ctx, plan)) == 1
    assert len(warned(ctx, la.solve, a, b, refine="float32")) == 1
    nothing, huge = ctx.zeros((0, 0), block=2), 1e308 * (1 + 1j) * np.eye(2)
    one = ctx.full((1, 1), 1e-300), ctx.eye(1)
    for given in ((a * np.nan, b), one, (nothing, ctx.zeros((0, 2)))):
        assert not warned(ctx, la.solve, *given), given
    a = placed(ctx, rng, np.array([[np.inf, 1], [1, np.inf]]))
    la.solve(a, placed(ctx, rng, np.eye(2)))  # no RuntimeWarning, which would be an error here
    la.solve(placed(ctx, rng, huge), placed(ctx, rng, np.eye(2) + 0j))
    a = placed(ctx, rng, hilbert)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if ctx.rank == ctx.size - 1 else "ignore")
        refuses(ctx, LinAlgWarning, ["solve: ill-conditioned"], la.solve, a, b)
