# SPDX-License-Identifier: Apache-2.0
"""Factorizations under ScaLAPACK's names, beside NumPy and, if it is given, ScaLAPACK: local arrays, arguments, INFO.

A factor that the algorithm fixes, up to rounding, is compared element by element; solutions by their residuals.
ScaLAPACK wants square blocks and an offset of whole blocks: half of the cases have these, and are given to both; the
rest have any layout, and are compared with NumPy.
"""

import numpy as np

from pblasmp import pblas
from tests.helpers.calls import LETTERS
from tests.helpers.cases import pick
from tests.helpers.factor_cases import all_small, exact, norm, positive, random, relative
from tests.helpers.pblas_cases import Held


class Call:
    """Both libraries' arguments for a routine on matrices of one grid, and what they leave in the matrices."""

    def __init__(self, ctx, rng, dtype, grid, referee=None):
        self.ctx, self.rng, self.dtype, self.letter = ctx, rng, np.dtype(dtype), LETTERS[dtype]
        (of_ranks, self.own), self.referee = grid, referee
        self.shape, self.place = of_ranks.shape, pblas.gridinfo(self.own)[2:]
        self.aligned = bool(rng.integers(2))
        self.block = int(rng.integers(1, 7))
        self.source = tuple(int(rng.integers(x)) for x in self.shape)

    def held(self, part):
        """``part`` as a Fortran program holds it, within a larger matrix of NaN."""
        rng, block = self.rng, (self.block, self.block)
        before, source = rng.integers(0, 3, 2) * self.block, self.source
        before[1] = before[0]  # the same block row and column begin it
        if not self.aligned:
            before, block = rng.integers(0, 8, 2), tuple(int(x) for x in rng.integers(1, 7, 2))
            source = tuple(int(rng.integers(x)) for x in self.shape)
        after = rng.integers(0, 4, 2)
        whole = np.full(tuple(int(x) for x in before + part.shape + after), np.nan, self.dtype)
        held = Held(
            self.shape, whole, block, source, tuple(int(x) + 1 for x in before), part.shape, pick(rng, (0, 2))
        )
        whole[held.window] = part
        return held

    def run(self, name, *given):
        """Run a routine by both, if ScaLAPACK takes the layout; return INFO, the matrices and the arrays of each.

        ``given`` are its arguments, with one ``Held`` for a matrix and its place.
        """
        out = []
        libraries = [
            (None, self.own),
            (None, self.own),
            *([self.referee] if self.referee and self.aligned else []),
        ]
        for theirs, context in libraries:
            locals_, arrays, arguments = [], [], []
            for each in given:
                if isinstance(each, Held):
                    locals_.append((each, each.local(self.place)))
                    arguments += [locals_[-1][1], *each.at, each.desc(context, self.place)]
                elif isinstance(each, np.ndarray):
                    arrays.append(each.copy())
                    arguments.append(arrays[-1])
                else:
                    arguments.append(each)
            info = np.zeros(1, np.int32)
            full = f"p{self.letter}{name}"
            if theirs is None:
                returned = getattr(pblas, full)(*arguments, info)
                assert returned == info[0]
                assert all(self._kept_around(*each) for each in locals_), (
                    f"{full} has written around a matrix"
                )
            else:
                theirs(f"{full}_", *arguments, info)
            out.append((int(info[0]), [self._whole(x, array) for x, array in locals_], arrays))
        first_one, *out = out  # the second is a call that is known
        assert first_one[0] == out[0][0], f"{full}: INFO {first_one[0]}, then {out[0][0]}"
        # a Cholesky that failed leaves its rest as it was then
        done = slice(first_one[0] - 1 if first_one[0] and name.startswith("po") else None)
        for before, again in zip(first_one[1] + first_one[2], out[0][1] + out[0][2], strict=True):
            part = (done,) * before.ndim
            np.testing.assert_array_equal(before[part], again[part], err_msg=full)
        return out

    def space(self):
        """A workspace, large enough for any routine here, and its size."""
        return np.zeros(1 << 14, self.dtype), 1 << 14

    def whole(self, x, tau, count):
        """All of the ``count`` elements of an array of which each process has those of its columns of A."""
        columns, whole = x.indices(self.place)[1][: len(tau)] - (x.at[1] - 1), np.zeros(count, tau.dtype)
        for indices, values in self.ctx.comm.allgather((columns, tau)):
            kept = (indices >= 0) & (indices < count)
            whole[indices[kept]] = values[kept]
        return exact(whole)

    def _kept_around(self, x, array):
        """Whether what is not sub(A) is as it was, padding too."""
        rows, cols = x.indices(self.place)
        inside = np.zeros(array.shape, bool)
        within = [
            np.isin(each, np.arange(*part.indices(10**6)))
            for each, part in zip((rows, cols), x.window, strict=True)
        ]
        inside[: len(rows)] = np.logical_and.outer(*within)
        return np.array_equal(array[~inside], x.local(self.place)[~inside], equal_nan=True)

    def _whole(self, x, array):
        """Return sub(A), gathered from all processes."""
        rows, cols = x.indices(self.place)
        whole = np.full_like(x.whole, 0)
        parts = self.ctx.comm.allgather((rows, cols, array[: len(rows)]))
        for rows, cols, part in parts:
            whole[rows[:, None], cols] = part
        return whole[x.window]


def square_pair(call, a, b):
    """A and B held; in a layout that ScaLAPACK takes, sub(B) begins in the process row of sub(A)."""
    x, y = call.held(a), call.held(b)
    if call.aligned:
        n, m = b.shape
        y = Held(
            x.grid, np.full((x.at[0] - 1 + n, m), np.nan, b.dtype), x.block, x.source, (x.at[0], 1), (n, m), 1
        )
        y.whole[y.window] = b
    return x, y


def like(x, part):
    """``part`` held as ``x`` is."""
    whole = x.whole.copy()
    whole[x.window] = part
    return Held(x.grid, whole, x.block, x.source, x.at, x.shape, x.gap)


def pivots_of(call, x):
    """An empty IPIV for the rows of A that this process has."""
    return np.full(len(x.indices(call.place)[0]) + x.block[0], -99, np.int32)


def potrf_case(call):
    """Cholesky: the factor, that of matrices that are not positive definite, and the inverse."""
    rng, dtype = call.rng, call.dtype
    n, uplo = int(rng.integers(1, 25)), pick(rng, "UL")
    a = positive(rng, n, dtype)
    bad = int(rng.integers(n)) if rng.integers(4) == 0 else None
    if bad is not None:
        a[bad, bad] = -1
    kept = np.triu(np.ones((n, n), bool)) if uplo == "U" else np.tril(np.ones((n, n), bool))
    x = call.held(np.where(kept, a, 7).astype(dtype))
    results = call.run("potrf", uplo, n, x)
    case = f"potrf {uplo} {n} {bad} {x}"
    for info, (factor,), _ in results:
        assert info == (0 if bad is None else bad + 1), case
        assert (factor[~kept] == 7).all(), f"{case}: the other triangle is written"
    if bad is None:
        factors = [np.where(kept, exact(factor), 0) for _, (factor,), _ in results]
        lower = factors[0].conj().T if uplo == "U" else factors[0]
        all_small(case, potrf=relative(lower @ lower.conj().T - a, exact(a), n, dtype))
        all_small(case, beside=relative(factors[0] - factors[-1], factors[-1], n, dtype))
        halves = [
            np.where(kept, exact(half), 0)
            for _, (half,), _ in call.run("potri", uplo, n, like(x, results[0][1][0]))
        ]
        expected = np.where(kept, np.linalg.inv(exact(a)), 0)
        for half in halves:
            all_small(case, potri=relative(half - expected, expected, 10 * n, dtype))


def posv_case(call):
    """Solves with a positive definite matrix."""
    rng, dtype = call.rng, call.dtype
    n, nrhs, uplo = int(rng.integers(1, 25)), int(rng.integers(1, 7)), pick(rng, "UL")
    a, b = positive(rng, n, dtype), random(rng, (n, nrhs), dtype)
    x, y = square_pair(call, a, b)
    case = f"posv {uplo} {n} {nrhs} {x} {y}"
    for info, (factor, solution), _ in call.run("posv", uplo, n, nrhs, x, y):
        assert info == 0, case
        all_small(case, posv=relative(exact(a) @ solution - b, exact(a), n, dtype))
        for _, (_, again), _ in call.run("potrs", uplo, n, nrhs, like(x, factor), y)[:1]:
            all_small(case, potrs=relative(exact(a) @ again - b, exact(a), n, dtype))


def getrf_case(call):
    """LU of matrices that are not square, and of singular ones: factors, IPIV and INFO."""
    rng, dtype = call.rng, call.dtype
    m, n = (int(i) for i in rng.integers(1, 25, 2))
    a = random(rng, (m, n), dtype)
    singular = int(rng.integers(min(m, n))) if rng.integers(5) == 0 else None
    if singular is not None:
        a[:, singular] = 0
    x = call.held(a)
    results = call.run("getrf", m, n, x, pivots_of(call, x))
    case = f"getrf {m} {n} {singular} {x}"
    for info, _, _ in results:
        assert info == (0 if singular is None else singular + 1), case
    if len(results) == 2:
        (_, (own,), (mine,)), (_, (theirs,), (others,)) = results
        all_small(case, getrf=relative(exact(own) - theirs, exact(theirs), 10 * n, dtype))
        rows = x.indices(call.place)[0] - (x.at[0] - 1)
        counts = np.flatnonzero((rows >= 0) & (rows < min(m, n)))
        assert (mine[counts] == others[counts]).all(), f"{case}: IPIV {mine}, expected {others}"
        rest = np.setdiff1d(np.arange(len(mine)), counts)
        assert (mine[rest] == -99).all(), f"{case}: IPIV {mine} is written beyond {counts}"


def gesv_case(call):
    """Solves by LU, with the factors as each library leaves them, and inverses."""
    rng, dtype = call.rng, call.dtype
    n, nrhs, op = int(rng.integers(1, 25)), int(rng.integers(1, 7)), pick(rng, "NTC")
    a, b = random(rng, (n, n), dtype) + 3 * np.eye(n, dtype=dtype), random(rng, (n, nrhs), dtype)
    x, y = square_pair(call, a, b)
    left = {"N": exact(a), "T": exact(a).T, "C": exact(a).conj().T}[op]
    case = f"gesv {n} {nrhs} {op} {x} {y}"
    results = call.run("gesv", n, nrhs, x, pivots_of(call, x), y)
    for info, (factors, solution), (
        pivots,
    ) in results:  # ScaLAPACK's factors and IPIV, too, are for our getrs
        scale = max(1, norm(solution))
        assert info == 0, case
        all_small(case, gesv=relative(exact(a) @ solution - b, exact(a), n * scale, dtype))
        for _, (_, again), _ in call.run("getrs", op, n, nrhs, like(x, factors), pivots, y):
            all_small(case, getrs=relative(left @ again - b, left, n * max(1, norm(again)), dtype))
        sizes = np.zeros(1, dtype), -1, np.zeros(1, np.int32), -1
        asked = call.run("getri", n, like(x, factors), pivots, *sizes)[-1][2]
        work, iwork = (max(1, int(each[0].real)) for each in asked[1:])
        spaces = np.zeros(work, dtype), work, np.zeros(iwork, np.int32), iwork
        for _, (inverse,), _ in call.run("getri", n, like(x, factors), pivots, *spaces):
            scale = n * max(1, norm(inverse))
            all_small(case, getri=relative(exact(a) @ inverse - np.eye(n), exact(a), scale, dtype))


def trtrs_case(call):
    """Solves with a triangular matrix, perhaps a singular one, and its inverse."""
    rng, dtype = call.rng, call.dtype
    n, nrhs = int(rng.integers(1, 25)), int(rng.integers(1, 7))
    uplo, op, diag = pick(rng, "UL"), pick(rng, "NTC"), pick(rng, "NU")
    a = random(rng, (n, n), dtype) / n
    np.fill_diagonal(a, 2)
    zero = int(rng.integers(n)) if diag == "N" and rng.integers(4) == 0 else None
    if zero is not None:
        a[zero, zero] = 0
    b = random(rng, (n, nrhs), dtype)
    x, y = square_pair(call, a, b)
    triangle = exact(np.triu(a) if uplo == "U" else np.tril(a))
    if diag == "U":
        np.fill_diagonal(triangle, 1)
    left = {"N": triangle, "T": triangle.T, "C": triangle.conj().T}[op]
    case = f"trtrs {uplo}{op}{diag} {n} {nrhs} {zero} {x} {y}"
    for i, (info, (_, solution), _) in enumerate(call.run("trtrs", uplo, op, diag, n, nrhs, x, y)):
        if i == 0:  # ScaLAPACK's own overlooks some zeros on several processes
            assert info == (0 if zero is None else zero + 1), case
            assert zero is None or (solution == b).all(), f"{case}: B is written"
        if zero is None:
            all_small(case, trtrs=relative(left @ solution - b, left, n * max(1, norm(solution)), dtype))
    kept = (
        np.triu(np.ones((n, n), bool), diag == "U")
        if uplo == "U"
        else np.tril(np.ones((n, n), bool), -(diag == "U"))
    )
    for info, (found,), _ in call.run("trtri", uplo, diag, n, x) if zero is None else []:
        expected = np.linalg.inv(triangle)
        all_small(case, trtri=relative(np.where(kept, found - expected, 0), expected, 10 * n, dtype))
        assert info == 0, case
        assert (found[~kept] == a[~kept]).all(), f"{case}: more than the triangle is written"


def geqrf_case(call):
    """QR: R, whose signs the algorithm fixes, TAU, Q formed and applied, and least squares."""
    rng, dtype = call.rng, call.dtype
    m, n = (int(i) for i in rng.integers(1, 25, 2))
    a = random(rng, (m, n), dtype)
    x = call.held(a)
    work, least = call.space(), min(m, n)
    columns = x.indices(call.place)[1] - (x.at[1] - 1)
    tau = np.full((columns < least).sum(), np.nan, dtype)  # the length that ScaLAPACK documents
    results = call.run("geqrf", m, n, x, tau, *work)
    factors, found = results[0][1][0], results[0][2][0]
    case = f"geqrf {m} {n} {x}"
    if len(results) == 2:
        (_, (own,), (mine, _)), (_, (theirs,), (others, _)) = results
        all_small(case, geqrf=relative(exact(own) - theirs, exact(theirs), 10 * max(m, n), dtype))
        counts = np.flatnonzero((columns >= 0) & (columns < least))
        near = np.allclose(mine[counts], others[counts], atol=1e-3 if dtype.itemsize in (4, 8) else 1e-8)
        assert near, f"{case}: TAU {mine}, expected {others}"
    letters = "or" if dtype.kind == "f" else "un"
    k = int(rng.integers(0, least + 1))
    narrow = Held(x.grid, like(x, factors).whole, x.block, x.source, x.at, (m, least), x.gap)
    reflectors = np.eye(m, dtype=exact(a).dtype)
    for i, factor in enumerate(call.whole(x, found, least)[:k]):
        v = np.r_[np.zeros(i), 1, exact(factors)[i + 1 :, i]]
        reflectors = reflectors @ (np.eye(m) - factor * np.outer(v, v.conj()))
    tau = found[: (columns < k).sum()]
    for _, (q,), _ in call.run(f"{letters}gqr", m, least, k, narrow, tau, *work):
        expected = reflectors[:, :least]
        all_small(case, orgqr=relative(q - expected, expected, 10 * m, dtype))
    side, trans = pick(rng, "LR"), pick(rng, "NT" if dtype.kind == "f" else "NC")
    shape = (m, int(rng.integers(1, 9)))
    c = random(rng, shape if side == "L" else shape[::-1], dtype)
    q = reflectors if trans == "N" else reflectors.conj().T
    expected = q @ c if side == "L" else c @ q
    narrow = Held(x.grid, narrow.whole, x.block, x.source, x.at, (m, k), x.gap)
    aligned, call.aligned = call.aligned, False  # its demands on sub(C) depend on the side
    y = call.held(c)
    case = f"{case}: {k} {side}{trans} {y}"
    for _, matrices, _ in call.run(f"{letters}mqr", side, trans, *c.shape, k, narrow, tau, y, *work):
        all_small(case, ormqr=relative(matrices[-1] - expected, expected, 10 * m, dtype))
    call.aligned = aligned


def gels_case(call):
    """Least squares and least solutions, also of matrices of zeros and at the ends of the type's range."""
    rng, dtype = call.rng, call.dtype
    m, n, nrhs = int(rng.integers(1, 25)), int(rng.integers(1, 25)), int(rng.integers(1, 5))
    a = random(rng, (m, n), dtype)
    least = min(m, n)
    a[:least, :least] += 4 * np.eye(least, dtype=dtype)
    trans = pick(rng, "NT" if dtype.kind == "f" else "NC")
    left = exact(a) if trans == "N" else exact(a).conj().T
    b = np.full((max(m, n), nrhs), 5, dtype)
    b[: len(left)] = random(rng, (len(left), nrhs), dtype)
    expected = np.linalg.lstsq(left, exact(b[: len(left)]), rcond=None)[0]
    info = np.finfo(dtype)
    scale = dtype.type(pick(rng, (1, 1, 0, 8 * info.tiny, info.max / 64)))
    if scale:
        b *= scale
    x, y = square_pair(call, a * scale, b)
    expected = expected if scale else np.zeros_like(expected)
    case = f"gels {trans} {m} {n} {nrhs} {scale} {x} {y}"
    for info, (_, found), _ in call.run("gels", trans, m, n, nrhs, x, y, *call.space()):
        error = found[: left.shape[1]] - expected
        assert info == 0, case
        all_small(case, gels=relative(error, expected, 100 * max(m, n), dtype))


CASES = (potrf_case, posv_case, getrf_case, gesv_case, trtrs_case, geqrf_case, gels_case)
