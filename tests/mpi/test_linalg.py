# SPDX-License-Identifier: Apache-2.0
"""``pb.linalg`` beside NumPy and SciPy: every function, every order of arguments, and what it refuses, on two ranks."""

import numpy as np
import pytest
import scipy.linalg

import pblasmp as pb
from pblasmp import linalg as la
from tests.helpers.cases import check_near, refuses
from tests.helpers.factor_cases import planned, random
from tests.helpers.mpi import on_ranks

N = 12


def check(found, expected, case=""):
    """Fail unless a matrix or a number is near to what is expected. Collective."""
    found = found.allgather() if isinstance(found, pb.DistributedMatrix) else found
    check_near(found, expected, case, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@on_ranks(2)
def test_beside_numpy_and_scipy(ctx, dtype):
    """Each function gives what NumPy or SciPy gives for the same arguments."""
    rng = np.random.default_rng(64)

    def matrix(values, block=5):
        return ctx.scatter(np.asarray(values, dtype), block=block)

    whole = random(rng, (N, N), dtype) + 3 * np.eye(N)
    right = random(rng, (N, 3), dtype)
    square = whole @ whole.conj().T
    of_each_kind(matrix, whole, right)
    transposed(matrix, whole, right)
    factors(matrix, whole, square, right)
    vectors(matrix, whole, square, right[:, 0])
    numbers_of(matrix(whole), whole)


def of_each_kind(matrix, whole, right):
    """``solve`` and ``inv`` with every ``assume_a``, which reads no more than it says."""
    kinds = {
        "gen": whole,
        "general": whole,
        "pos": whole @ whole.conj().T,
        "positive definite": whole @ whole.conj().T,
        "sym": whole + whole.T,
        "symmetric": whole + whole.T,
        "her": whole + whole.conj().T,
        "hermitian": whole + whole.conj().T,
        "upper triangular": np.triu(whole),
        "lower triangular": np.tril(whole),
    }
    b = matrix(right, 4)
    for kind, full in kinds.items():
        for lower in (False, True):
            inside = np.tri(N) > 0 if lower else np.tri(N).T > 0
            if kind in ("gen", "general"):
                inside = np.ones((N, N), bool)
            if kind.endswith("triangular"):
                inside = np.tri(N) > 0 if kind.startswith("lower") else np.tri(N).T > 0
            given = np.where(inside, full, np.nan)
            if kind in ("her", "hermitian") and given.dtype.kind == "c":
                given[np.diag_indices(N)] += 7j  # as in LAPACK, not read
            a = matrix(given)
            case = f"{kind} {lower}"
            x = la.solve(a, b, assume_a=kind, lower=lower)
            check(x, np.linalg.solve(full, right), f"solve {case}")
            x = la.solve(a, b, kind, lower=lower, transposed=True)
            check(x, np.linalg.solve(full.T, right), f"solve transposed {case}")
            check(la.inv(a, assume_a=kind, lower=lower), np.linalg.inv(full), f"inv {case}")


def transposed(matrix, whole, right):
    """Every ``trans``."""
    b = matrix(right, 4)
    a = matrix(whole)
    for trans in (0, 1, 2, "N", "T", "C"):
        turned = (whole, whole.T, whole.conj().T)[trans if isinstance(trans, int) else "NTC".index(trans)]
        check(la.lu_solve(la.lu_factor(a), b, trans), np.linalg.solve(turned, right), f"lu_solve {trans}")
        x = la.lstsq(a, b, trans=trans)
        check(x, np.linalg.lstsq(turned, right, rcond=None)[0], f"lstsq {trans}")
        for lower, unit in ((False, False), (True, True)):
            x = la.solve_triangular(a, b, trans, lower, unit)
            expected = scipy.linalg.solve_triangular(whole, right, trans, lower, unit)
            check(x, expected, f"solve_triangular {trans} {lower}")


def factors(matrix, whole, square, right):
    """LU, Cholesky and QR."""
    a, b, p = matrix(whole), matrix(right, 4), matrix(square)
    lu, piv = la.lu_factor(a)
    for name, found, expected in zip("lp", (lu, piv), scipy.linalg.lu_factor(whole), strict=True):
        check(found, expected, f"lu_factor {name}")
    check(la.cholesky(p), np.linalg.cholesky(square), "cholesky is NumPy's")
    for lower in (False, True):
        check(la.cholesky(p, lower), scipy.linalg.cholesky(square, lower), f"cholesky {lower}")
        c, told = la.cho_factor(p, np.int64(1)) if lower else la.cho_factor(p)
        check(c, scipy.linalg.cholesky(square, lower), f"cho_factor {lower}")
        assert told is lower, f"cho_factor {lower}"
        check(la.cho_solve((c, told), b), np.linalg.solve(square, right), f"cho_solve {lower}")
    found = la.qr(a)
    q, r = found
    check(q @ r, whole, "q r")
    check(q.H @ q, np.eye(N), "q is orthogonal")
    check(r, np.triu(r.allgather()), "r")
    same = np.array_equal(found[1].allgather(), found.r().allgather()) and found[0].shape == found[-2].shape
    assert same, f"qr's parts: {found[1]}"
    assert repr(found).startswith("QrFactors(12x12"), "qr's repr"
    thin = la.qr(a[:, :4])
    assert [x.shape for x in thin] == [(N, 4), (4, 4)], "thin: other shapes"


def vectors(matrix, whole, square, right):
    """A vector that all ranks have is a right-hand side, and so is the solution; products with vectors."""
    a, p = matrix(whole), matrix(square)
    solution, real = np.linalg.solve(whole, right), right.real.astype("float32")
    least = np.linalg.lstsq(whole[:, :5], right, rcond=None)
    found = la.lstsq(a[:, :5], right, None)
    for case, x, expected in (
        ("solve", la.solve(a, right), solution), ("solve, by name", la.solve(b=right, a=a), solution),
        ("solve of float32", la.solve(a, real), np.linalg.solve(whole, real)),
        ("solve, refined", la.solve(a, right, refine="float32", return_info=True)[0], solution),
        ("out", la.solve(a, right, out=matrix(right[:, None])), solution),
        ("lu_solve", la.lu_solve(la.lu_factor(a), right, "T"), np.linalg.solve(whole.T, right)),
        ("cho_solve", la.cho_solve(la.cho_factor(p), right), np.linalg.solve(square, right)),
        ("triangular", la.solve_triangular(a, right, lower=True), np.linalg.solve(np.tril(whole), right)),
        ("lstsq", la.lstsq(a[:, :5], right), least[0]), ("residuals", found.residuals, least[1]),
        ("lstsq, rcond", found.x, least[0]),
        ("wide", la.lstsq(a[:4], right[:4]), np.linalg.lstsq(whole[:4], right[:4], rcond=None)[0]),
        ("A @ x", a[2:, 1:4] @ right[:3], whole[2:, 1:4] @ right[:3]),
        ("x @ A", right @ a[:, :3], right @ whole[:, :3]),
        ("A.T @ integers", a.T @ np.arange(N), whole.T @ np.arange(N)),
    ):  # fmt: skip
        assert type(x) is np.ndarray, case
        check(x, expected, case)
    for function, first, how in (
        (la.solve, a, {}), (la.solve, a, {"refine": "float32", "return_info": True}), (la.solve_triangular, a, {}),
        (la.lu_solve, la.lu_factor(a), {"trans": 1}), (la.cho_solve, la.cho_factor(p), {}),
        (la.lstsq, a[:, :5], {}), (la.lstsq, a[:, :5], {"rcond": None}),
    ):  # fmt: skip
        x = function(first, right, **how)
        verified = pb.verify(function, first, right, found=x, **how)
        wrong = pb.verify(function, first, right + 1, found=x, **how)
        assert verified, f"verify {function.__name__} {how}: {verified}"
        assert not wrong, f"verify {function.__name__} {how} of another vector: {wrong}"


def numbers_of(a, whole):
    """What is a number."""
    check(la.det(a), np.linalg.det(whole), "det")
    assert type(la.det(a)) is whole.dtype.type, "det's type"
    check(la.slogdet(a), np.linalg.slogdet(whole), "slogdet")
    for which in (None, "fro", 1, np.inf, 2, np.int64(2), np.float32(-2), "nuc"):
        check(la.norm(a, which), np.linalg.norm(whole, which), f"norm {which}")
    for which in (1, np.inf, "fro", np.int64(2), -2, "nuc", None):
        check(la.cond(a, which), np.linalg.cond(whole, which), f"cond {which}")
    check(la.cond(a), np.linalg.cond(whole, 1), "cond")
    ratio = la.cond_estimate(a) / np.linalg.cond(whole, 1)
    assert 0.1 < ratio < 1.1, "cond_estimate"


@on_ranks(2)
def test_ranks(ctx):
    """Rank and pseudoinverse of matrices of any rank and shape, the condition of those that are not square."""
    rng = np.random.default_rng(38)
    for dtype in ("float64", "complex128"):
        for m, n, rank in ((9, 5, 5), (5, 9, 3), (7, 7, 6), (6, 4, 0), (1, 1, 1), (0, 3, 0), (3, 0, 0)):
            whole = rng.standard_normal((m, rank)) @ rng.standard_normal((rank, n))
            whole = (whole + 1j * whole if dtype[0] == "c" else whole).astype(dtype)
            a, case = ctx.scatter(whole, block=2, order="F"), f"{dtype} {m} x {n} of rank {rank}"
            assert la.matrix_rank(a) == rank, f"rank, {case}"
            expected = np.linalg.pinv(whole, max(m, n) * np.finfo(dtype).eps)
            check(la.pinv(a), expected, f"pinv, {case}")
            if rank == min(m, n) > 0:
                check(la.cond(a, 2), np.linalg.cond(whole), f"cond, {case}")
    values = ctx.scatter(np.diag([4.0, 2, 1, 0.5]), block=1)
    assert [la.matrix_rank(values, tol) for tol in (0, 1, 1.5, 9)] == [4, 2, 2, 0], "tol: rank"
    check(la.pinv(values, 0.25), np.diag([0.25, 0.5, 0, 0]), "rcond")
    values[3, 3] = np.nan
    assert la.matrix_rank(values) == 0, "NaN"
    assert np.isnan(la.pinv(values).allgather()).all(), "NaN"
    ends = [la.cond(ctx.zeros((3, 3)), p) for p in (2, -2)], la.cond(ctx.zeros((0, 3)), 2)
    assert ends == ([np.inf, np.inf], 0), "nothing"
    nothing = [la.norm(ctx.zeros((0, 3)), which) for which in (2, -2, "nuc")]
    assert nothing == [0, 0, 0], "norms of nothing"


@on_ranks(1, 2)
def test_error_states_of_numpy(comm, ctx):
    """NumPy's error state on one rank changes nothing: what is computed inside of a call may over- and underflow."""
    rng = np.random.default_rng(39)
    whole = rng.standard_normal((9, 4))
    a, b = ctx.scatter(whole, block=2), ctx.scatter(whole[:, :2], block=2)
    square, single = a[:4, :], (a * 1e-30).astype("float32")
    with np.errstate(all="raise" if comm.rank == comm.size - 1 else "warn"):
        for case, call, expected in (
            ("tol", lambda: la.matrix_rank(single, 1e300), 0),
            ("pinv", lambda: np.isnan(la.pinv((a * 1j) * np.nan).allgather()).all(), True),
            ("large", lambda: la.lstsq(a * 1e305, b * 1e-305, None).rank, 4),
            ("small", lambda: la.lstsq(a * 1e-300, b * 1e-300, None).rank, 4),
            ("refine", lambda: la.solve(square * 1e300, b[:4, :] * 1e-300, refine="float32").shape, (4, 2)),
        ):
            found = call()
            assert found == expected, case


@on_ranks(2)
def test_determinants(ctx):
    """What is out of range before the last factor, what is out of range itself, and matrices without any."""
    for case, diagonal, expected in (
        ("large, then small", [1e200, 1e200, 1e-200, 1e-200, -3], -3),
        ("small, then large", [1e-200, 1e-200, 1e200, 1e200, 5], 5),
        ("too large", [1e200, -1e200], -np.inf),
        ("too small", [1e-200, 1e-200], 0),
        ("singular", [1, 0, 2], 0),
        ("many", np.tile([4, 0.25], 700), 1),
        ("all halves", np.full(1200, 0.5), 0),
        ("none", [], 1),
    ):
        n = len(diagonal)
        values = np.asarray(diagonal, float)
        a = ctx.from_function(lambda i, j, v=values: np.where(i == j, v[np.minimum(i, len(v) - 1)], 0)
                              if len(v) else 0.0 * i * j, (n, n))  # fmt: skip
        found = la.det(a)
        assert np.isclose(found, expected, rtol=1e-12, atol=0), f"det {case}"
    assert la.cond(ctx.zeros((3, 3))) == np.inf, "cond of a singular matrix: finite"


@on_ranks(2)
def test_refusals(ctx):
    """What is wrong, on one rank or on all, every rank hears; a rank's argument of another value, too."""
    a, b, wide, zeros = ctx.eye(4), ctx.zeros((4, 1)), ctx.zeros((4, 5)), ctx.zeros((4, 4))
    single, half = (ctx.zeros((4, 4), dtype=dtype) for dtype in ("float32", "float16"))
    frozen, rank = ctx.eye((4, 4), block=4, grid=(1, 1)), ctx.rank
    frozen.local.flags.writeable = False
    nothing, argument, kind, layout = (
        pb.UnsupportedError,
        pb.ArgumentError,
        pb.ArgumentTypeError,
        pb.LayoutError,
    )
    kinds = "assume_a: expected one of 'gen', 'pos', 'sym', 'her', 'lower triangular'"
    differ = pb.RankMismatchError
    for expected, words, call in (
        (AttributeError, ["numpy.linalg.eig of a.gather()"], lambda: la.eig),
        (AttributeError, ["scipy.linalg.expm of a.gather()"], lambda: la.expm),
        (layout, ["svdvals: a", "float16"], lambda: la.norm(half, 2)),
        (argument, ["tol: expected None or a number of at least 0, got -1"], lambda: la.matrix_rank(a, -1)),
        (argument, ["rcond: expected None or a number of at least 0, got nan"], lambda: la.pinv(a, np.nan)),
        (kind, ["rcond: expected a number, got '1'"], lambda: la.pinv(a, "1")),
        (kind, ["a: expected a DistributedMatrix, got ndarray"], lambda: la.pinv(np.eye(3))),
        (nothing, ["solve: there is no plan with assume_a='sym'"], lambda: pb.plan(la.solve, a, a, "sym")),
        (argument, ["ord: expected 'fro', 'nuc', 1, 2, -2, 'inf' or 'max', got 3"], lambda: la.norm(a, 3)),
        (argument, ["p: expected 'fro', 'nuc', 1, 2, -2 or 'inf', got 'max'"], lambda: la.cond(a, "max")),
        (argument, [kinds, "got 'tri'"], lambda: la.solve(a, a, "tri")),
        (argument, [kinds], lambda: la.solve(a, a, np.eye(2))),
        (argument, ["assume_a: expected one of", "got 'tri'"], lambda: la.inv(a, "tri")),
        (argument, ["lower: expected True or False, got 'L'"], lambda: la.inv(a, "pos", lower="L")),
        (argument, ["lower: expected True or False, got 2"], lambda: la.eigh(a, lower=2)),
        (argument, ["lower: expected True or False, got 'L'"], lambda: la.cho_solve((a, "L"), a)),
        (argument, ["lower: expected True or False, got 'X'"], lambda: la.cholesky(a, lower="X")),
        (argument, ["lower: expected True or False, got ['L']"], lambda: la.cholesky(a, lower=["L"])),
        (argument, ["a: expected a square matrix", "lower"], lambda: la.inv(wide, lower="lower")),
        (argument, ["unit_diagonal: expected True or False, got 'U'"],
         lambda: la.solve_triangular(a, a, 0, True, "U")),
        (argument, ["trans: expected 0, 1, 2, 'N', 'T' or 'C', got 3"],
         lambda: la.lu_solve(la.lu_factor(a), a, 3)),
        (argument, ["trans: expected 0, 1, 2"], lambda: la.lstsq(a, a, trans=np.array(["N", "T"]))),
        (argument, ["trans: expected 0, 1, 2", "timedelta64"],
         lambda: la.lstsq(a, a, trans=np.timedelta64(1, "s") if ctx.rank else 0)),
        (argument, ["transposed: expected 0, 1, 2, 'N', 'T' or 'C', got 'H'"],
         lambda: la.solve(a, a, transposed="H")),
        (argument, ["op: expected one of"], lambda: la.qr(a).apply(a, "T")),
        (argument, ["c_and_lower: expected a pair"], lambda: la.cho_solve(a, a)),
        (argument, ["lu_and_piv: expected a pair"], lambda: la.lu_solve(a, a)),
        *((argument, ["pivots: expected 4 integers"], lambda wrong=wrong: la.lu_solve((a, wrong), a))
          for wrong in ([0, 6, 1], "no", [[1], [2, 3]])),
        (argument, ["out: its local array is read-only"], lambda: la.cholesky(a, out=frozen)),
        (kind, ["lu: expected a DistributedMatrix, got int"], lambda: la.lu_solve((1, [0]), a)),
        (kind, ["c: expected a DistributedMatrix"], lambda: la.cho_solve((None, True), a)),
        (kind, ["a: expected a DistributedMatrix, got int"], lambda: la.svd(1)),
        (kind, ["a: expected a DistributedMatrix, got int"], lambda: la.cholesky(1)),
        (kind, ["b: expected a DistributedMatrix"], lambda: la.solve(a, 1, "pos", lower=True)),
        (layout, ["b: 5 rows, but a has 4 columns"], lambda: la.solve(a, np.ones(5))),
        (argument, ["b: complex128 does not convert to float64"], lambda: la.solve(a, np.ones(4) * 1j)),
        (kind, ["b: expected numbers, got <U1"], lambda: la.lstsq(a, np.array(list("abcd")))),
        (kind, ["a: expected a DistributedMatrix, got ndarray"], lambda: la.solve(np.eye(4), np.ones(4))),
        (kind, ["a: expected a DistributedMatrix, got ndarray"],
         lambda: la.solve(np.eye(4) if rank else a, np.ones(4))),
        (layout, ["op(A) is 4x5 and op(B) is 4x1"], lambda: wide @ np.ones(4)),
        (differ, ["the vector's shape, type and digest", "on rank 1"], lambda: la.solve(a, np.full(4, rank))),
        (differ, ["the vector's shape, type and digest", "on rank 1"], lambda: a @ np.full(4, rank)),
        (differ, ["on rank 1"], lambda: la.solve(a, np.ones(4) if rank else b)),
        (differ, ["on rank 1"], lambda: a @ (np.ones(4) if rank else b)),
        (kind, ["algo: expected a string"], lambda: la.solve(a, a, "pos", lower=True, algo=np.eye(2))),
        (kind, ["algo: expected a string"], lambda: la.cholesky(a, algo=np.eye(2))),
        (layout, ["cond: a: expected a square matrix, got 4 x 5"], lambda: la.cond(wide)),
        (layout, ["a: expected a square matrix, got 4 x 5"], lambda: la.cholesky(wide)),
        (layout, ["expected a square matrix"], lambda: la.det(wide)),
        (layout, ["a: expected a square matrix"], lambda: la.slogdet(wide)),
        (layout, ["expected a square matrix"], lambda: la.solve(wide, a, "sym")),
        (layout, ["a: expected one of float64", "float16"], lambda: la.cholesky(half)),
        (layout, ["b: expected float64"], lambda: la.solve(a, single, "pos", lower=True)),
        (layout, ["b: 5 rows"], lambda: la.solve(a, wide.T, "pos", lower=True)),
        (layout, ["out: expected 4 x 4 of float64"], lambda: la.cholesky(a, out=single)),
        (layout, ["b: expected 4 rows", "out: expected 5 x 4"], lambda: la.lstsq(wide, wide.T, out=a)),
        (pb.FactorizationError, ["index 0"], lambda: la.lstsq(zeros, zeros)),
        (differ, ["norm", "ord"], lambda: la.norm(a, (1, np.inf)[rank])),
        (differ, ["lower"], lambda: la.solve(a, a, "pos", lower=bool(rank))),
        (differ, ["lower"], lambda: la.cholesky(a, lower=bool(rank))),
        (differ, ["assume_a"], lambda: la.solve(a, a, ("pos", "gen")[rank])),
        (differ, ["pivots"], lambda: la.lu_solve((a, np.full(4, rank)), a)),
        (argument, ["pivots: expected"], lambda: la.lu_solve((a, [np.arange(4), a][rank]), a)),
    ):  # fmt: skip
        found = []
        refuses(ctx, expected, words, told_kind, call, found)
        assert found == [expected], f"{words}: LayoutError is for layouts"
    check(la.cho_solve((frozen, True), a), np.eye(4), "a factor is only read")
    check(la.solve(a, b + 1), np.ones((4, 1)), "the context goes on")


def told_kind(call, found):
    """Call, and add the type of the exception to those found."""
    try:
        call()
    except Exception as error:
        found.append(type(error))
        raise


@on_ranks(2)
def test_planned_refusals(comm):
    with planned():
        test_refusals.on_rank(comm)
