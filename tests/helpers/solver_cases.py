# SPDX-License-Identifier: Apache-2.0
"""Eigenvalues by cuSOLVERMp, one case at random each, on simulated and on real GPUs.

Every rank draws the same cases from generators with the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import pblasmp as pb
from tests.helpers.cases import first, pick
from tests.helpers.factor_cases import (
    TYPES,
    exact,
    only,
    placed,
    random,
    relative,
    too_large,
    unscaled,
)
from tests.helpers.slow import in_turn

__all__ = ["TYPES", "eigh", "eigh_at_the_ends", "ends"]

Case = tuple[str, str | None]
ALGO: dict[str, Any] = {"algo": "cusolvermp"}


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
