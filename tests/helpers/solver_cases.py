# SPDX-License-Identifier: Apache-2.0
"""Factorisations by cuSOLVERMp, one case at random each, on simulated and on real GPUs.

Every rank draws the same cases from generators with the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import pblasmp as pb
from pblasmp.linalg.orthogonal import apply_q
from tests.helpers.cases import first, pick
from tests.helpers.factor_cases import (
    TYPES,
    exact,
    norm,
    only,
    placed,
    positive,
    random,
    relative,
    too_large,
    unscaled,
)
from tests.helpers.lengths import in_turn

__all__ = ["CASES", "TYPES", "eigh_at_the_ends"]

Case = tuple[str, str | None]
ALGO: dict[str, Any] = {"algo": "cusolvermp"}


def cholesky(ctx: pb.Context, rng: np.random.Generator, dtype: str, n: int = 0) -> Case:
    """A factor, in place or not, and solutions with and without it."""
    n, uplo = n or int(rng.integers(1, 20)), pick(rng, "LU")
    whole = positive(rng, n, dtype)
    a, b = placed(ctx, rng, only(uplo, whole)), placed(ctx, rng, random(rng, (n, 3), dtype))
    right, op = b.allgather(), pick(rng, "NTC")
    left = {"N": exact(whole), "T": exact(whole).T, "C": exact(whole)}[op]
    solution = exact(pb.linalg.solve(a, b, "pos", lower=uplo == "L", transposed=op, **ALGO).allgather())
    out = a if rng.integers(2) else None
    found = pb.linalg.cholesky(a, lower=uplo == "L", out=out, **ALGO)
    factor = found.allgather()
    outside = factor[np.triu_indices(n, 1) if uplo == "L" else np.tril_indices(n, -1)]
    kept = np.isnan(outside).all() if out is not None else (outside == 0).all()
    again = exact(pb.linalg.cho_solve((found, uplo == "L"), b, out=b, **ALGO).allgather())
    lower = exact(np.tril(factor) if uplo == "L" else np.triu(factor).conj().T)
    errors = too_large(
        factor=relative(lower @ lower.conj().T - exact(whole), exact(whole), n, dtype),
        solve=relative(left @ solution - right, left * max(1, norm(solution)), n, dtype),
        cho_solve=relative(exact(whole) @ again - right, exact(whole) * max(1, norm(again)), n, dtype),
    )
    return f"cholesky {dtype} {n} {uplo} {op} {a.descriptor} {b.descriptor}", first(
        errors, None if kept else "the other triangle"
    )


def lu(ctx: pb.Context, rng: np.random.Generator, dtype: str, n: int = 0) -> Case:
    """Factors of any shape, and solutions with and without them."""
    n = n or int(rng.integers(1, 20))
    rows = pick(rng, (n, n, int(rng.integers(1, 20))))
    whole = random(rng, (rows, n), dtype)
    a = placed(ctx, rng, whole)
    found, pivots = pb.linalg.lu_factor(a, out=a if rng.integers(2) else None, **ALGO)
    factors, least = found.allgather(), min(rows, n)
    lower, upper = exact(np.tril(factors, -1))[:, :least], exact(np.triu(factors))[:least]
    np.fill_diagonal(lower, 1)
    rebuilt = lower @ upper
    for i, other in reversed(list(enumerate(pivots.tolist()))):
        rebuilt[[i, other]] = rebuilt[[other, i]]
    errors = {"lu": relative(rebuilt - whole, exact(whole), n, dtype)}
    errors["growth"] = 20 * np.abs(lower).max(initial=0)  # as with partial pivoting
    if rows == n:
        b = placed(ctx, rng, random(rng, (n, 3), dtype))
        right, a = exact(b.allgather()), placed(ctx, rng, whole)
        for name, x in (
            ("solve", pb.linalg.solve(a, b, **ALGO)),
            ("lu_solve", pb.linalg.lu_solve((found, pivots), b, out=b, **ALGO)),
        ):
            x = exact(x.allgather())
            errors[name] = relative(whole @ x - right, exact(whole) * max(1, norm(x)), n, dtype)
        sign, size = pb.linalg.slogdet(a, **ALGO)
        expected = np.linalg.slogdet(exact(whole))
        near = np.allclose([sign, size], expected, rtol=1e-3, atol=1e-3)
        errors["slogdet"] = 0 if near else np.inf
    return f"lu {dtype} {rows} x {n} {a.descriptor}", too_large(**errors)


def qr(ctx: pb.Context, rng: np.random.Generator, dtype: str, n: int = 0) -> Case:
    """R and reflectors, Q formed, and applied from both sides."""
    n = n or int(rng.integers(1, 15))
    rows = n + int(rng.integers(0, 10))
    whole = random(rng, (rows, n), dtype)
    a = placed(ctx, rng, whole)
    found = pb.linalg.qr(a, out=a if rng.integers(2) else None, **ALGO)
    q, r = exact(found.q(**ALGO).allgather()), exact(found.r().allgather())
    b = placed(ctx, rng, random(rng, (rows, 3), dtype))
    right = exact(b.allgather())
    there = found.apply(b, "C", **ALGO)
    projected = exact(there.allgather())
    back = exact(found.apply(there, out=there, **ALGO).allgather())
    side = placed(ctx, rng, right.T.astype(dtype))
    beside = exact(apply_q(found.factors, found.tau, side, "N", "R", **ALGO).allgather())
    conjugated = exact(found.apply(placed(ctx, rng, right.conj().astype(dtype)), "C", **ALGO).allgather())
    errors = too_large(
        qr=relative(q @ r - whole, exact(whole), rows, dtype),
        orthogonal=relative(q.conj().T @ q - np.eye(n), np.eye(n), rows, dtype),
        apply=relative(projected[:n] - q.conj().T @ right, right, rows, dtype),
        back=relative(back - right, right, rows, dtype),
        right=relative(beside - conjugated.conj().T, right, rows, dtype),
    )
    return f"qr {dtype} {rows} x {n} {a.descriptor} {b.descriptor}", errors


def lstsq(ctx: pb.Context, rng: np.random.Generator, dtype: str, n: int = 0) -> Case:
    """A least-squares solution of a tall A, or of the adjoint of a wide one."""
    n = n or int(rng.integers(1, 15))
    wide = bool(rng.integers(2))  # a square A has no adjoint here
    rows = n + int(rng.integers(wide, 10))
    whole = random(rng, (rows, n), dtype)
    op = ("C" if np.dtype(dtype).kind == "c" else pick(rng, "TC")) if wide else "N"
    a = placed(ctx, rng, whole.conj().T.copy() if wide else whole)
    b = placed(ctx, rng, random(rng, (rows, 3), dtype))
    x = exact(pb.linalg.lstsq(a, b, trans=op, **ALGO).allgather())
    left = exact(whole)
    rest = left.conj().T @ (left @ x - exact(b.allgather()))
    scale = norm(left) ** 2 * max(1, norm(x))
    errors = too_large(lstsq=relative(rest / scale, np.eye(1), rows, dtype))
    return f"lstsq {dtype} {rows} x {n} {op} {a.descriptor} {b.descriptor}", errors


def eigh(ctx: pb.Context, rng: np.random.Generator, dtype: str, n: int = 0) -> Case:
    """Eigenvalues, ascending and real, and eigenvectors; A is kept."""
    n, uplo = n or int(rng.integers(0, 20)), pick(rng, "LU")
    whole = random(rng, (n, n), dtype)
    whole = ((whole + whole.conj().T) / 2).astype(dtype)
    given = only(uplo, whole)
    a = placed(ctx, rng, given)
    w, found = pb.linalg.eigh(a, lower=uplo == "L", **ALGO)
    alone = pb.linalg.eigvalsh(a, lower=uplo == "L", **ALGO)
    v, left = exact(found.allgather()), exact(whole)
    kept = np.array_equal(a.allgather(), given, equal_nan=True)
    real = w.dtype == np.empty(0, dtype).real.dtype and (np.diff(w) >= 0).all()
    errors = too_large(
        vectors=relative(left @ v - v * w, left, n, dtype),
        orthogonal=relative(v.conj().T @ v - np.eye(n), np.eye(n), n, dtype),
        values=relative((w - np.linalg.eigvalsh(left))[:, None], left, n, dtype),
    )
    return f"eigh {dtype} {n} {uplo} {a.descriptor}", first(
        errors,
        None if kept else "A has changed",
        None if real else f"w: {w}",
        None if np.allclose(alone, w, atol=1e-4) else f"eigvalsh: {alone}",
    )


def ends(dtype: str) -> tuple[float, ...]:
    """Sizes of elements up to both ends of a type's range; what is denormal has lost digits."""
    return (
        (1e-40, 1e-36, 1e-22, 1e20, 1e36)
        if dtype in ("float32", "complex64")
        else (1e-310, 1e-160, 1e155, 1e306)
    )


def eigh_at_the_ends(
    ctx: pb.Context, rng: np.random.Generator, dtype: str, n: int = 12, keep: int = 1
) -> Iterator[Case]:
    """Eigenvalues of tiny and large matrices, equal ones, and of a diagonal that is not in order."""
    random_one = random(rng, (n, n), dtype)
    matrices = {
        "random": (random_one + random_one.conj().T) / 2,
        "ones": np.ones((n, n)),
        "diagonal": np.diag(np.r_[np.arange(n - 2.0), 7, -7]),
        "equal": 2 * np.eye(n) - 4 / n,  # a reflection's 2 and -2
        "zero": np.zeros((n, n)),
    }
    for scale, (name, whole) in in_turn((1.0, *ends(dtype)), matrices.items(), keep=keep):
        with np.errstate(under="ignore"):
            given = (whole * scale).astype(dtype)
        w, found = pb.linalg.eigh(placed(ctx, rng, given))
        left, v = unscaled(given, scale), exact(found.allgather())
        lost = n * float(np.finfo(dtype).smallest_subnormal) / scale / np.finfo(dtype).eps  # of eigenvalues
        bound = max(1.0, lost) * max(1.0, np.abs(left).sum(0).max()) * np.eye(1)
        values = w.astype(float) / scale
        errors = too_large(
            vectors=relative(left @ v - v * values, bound, n, dtype),
            orthogonal=relative(v.conj().T @ v - np.eye(n), np.eye(n), n, dtype),
            values=relative((values - np.linalg.eigvalsh(left))[:, None], bound, n, dtype),
        )
        yield f"eigh {dtype} {name} {scale}", first(errors, None if (np.diff(w) >= 0).all() else f"{w}")
    for bad in (np.nan, np.inf):
        whole = np.eye(n)
        whole[n // 2, 1] = whole[1, n // 2] = bad
        w, found = pb.linalg.eigh(placed(ctx, rng, whole.astype(dtype)))
        same = np.isnan(w).all() and np.isnan(found.allgather()).all()
        yield f"eigh {dtype} {bad}", None if same else f"{w}"


CASES = (cholesky, lu, qr, lstsq, eigh)
