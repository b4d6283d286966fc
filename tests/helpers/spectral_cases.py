# SPDX-License-Identifier: Apache-2.0
"""Eigenvalues and singular values, one case at random each, beside NumPy's. Every rank draws the same cases."""

from __future__ import annotations

import itertools
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from reference.scalapack import locate
from tests.helpers import factor_cases, solve_cases
from tests.helpers.cases import pick, scattered
from tests.helpers.factor_cases import all_small, exact, only, placed, positive, random, relative, unscaled

KINDS = ("all", "subset", "values", "pair")


def library() -> Path:
    """The folder of the ScaLAPACK that is here; without one skip, or fail where PBLASMP_SCALAPACK requires one."""
    found = next((path for flavor in ("debian", "mkl") if (path := locate(flavor))), None)
    if found is None:
        missing = "no ScaLAPACK: python -m benchmarks.fetch_scalapack --only debian fetches one"
        assert os.environ.get("PBLASMP_SCALAPACK") != "required", missing
        pytest.skip(missing)
    return found


def good(ctx: pb.Context, rng: np.random.Generator, whole: np.ndarray) -> pb.DistributedMatrix:
    """``whole`` in a layout in which ScaLAPACK computes without a move, in C or F order."""
    grid = pick(rng, [pb.Grid(1, ctx.size), pb.Grid(ctx.size, 1), pb.Grid.squarest(ctx.size)])
    d = pb.MatrixDescriptor(whole.shape, (16, 16), grid, dtype=whole.dtype, order=pick(rng, "CFF"))
    return scattered(ctx, d, whole)


def _alike(ctx: pb.Context, values: np.ndarray) -> bool:
    """Whether every rank has the same bits. Collective."""
    return len(set(ctx.comm.allgather(values.tobytes()))) == 1


def eigh(
    ctx: pb.Context,
    rng: np.random.Generator,
    dtype: str,
    n: int,
    algo: str,
    *,
    place: Any = placed,
    kind: str,
) -> None:
    """Eigenpairs: all, a "subset", "values" alone, or of a "pair" of matrices. A and B are kept."""
    uplo = pick(rng, "LU")
    x = random(rng, (n, n), dtype)
    whole = ((x + x.conj().T) / 2).astype(dtype)
    given = only(uplo, whole)
    a, left = place(ctx, rng, given), exact(whole)
    how: dict[str, Any] = {"lower": uplo == "L", "algo": algo}
    b = second = None
    right, weight = left, np.eye(n)
    if kind == "pair":
        second = only(uplo, positive(rng, n, dtype))
        b, weight = place(ctx, rng, second), exact(np.where(np.isnan(second), 0, second))
        weight = weight + weight.conj().T - np.diag(np.diag(weight))
        half = np.linalg.inv(np.linalg.cholesky(weight))
        right = half @ left @ half.conj().T
    expected = np.linalg.eigvalsh(right)
    if n and kind in ("subset", "pair") and rng.integers(4):
        how["subset_by_index"] = start, stop = tuple(sorted(int(i) for i in rng.integers(0, n, 2)))
        expected = expected[start : stop + 1]
    if kind == "values":
        w, v = pb.linalg.eigvalsh(a, b, **how), None
    else:
        w, found = pb.linalg.eigh(a, b, check=n % 4 == 0, **how)
        v = exact(found.allgather())
    case = f"eigh {kind} {dtype} {n} {how} {a.descriptor}"
    errors = {"values": relative((w - expected)[:, None], right, n, dtype)}
    if v is not None:
        residual = left @ v - weight @ v * w
        errors["vectors"] = relative(
            residual / np.abs(v).max(initial=1), np.abs(left) + np.abs(weight), n, dtype
        )
        unit = np.eye(len(w))
        errors["orthogonal"] = relative(v.conj().T @ weight @ v - unit, unit, 4 * n, dtype)
        assert v.shape == (n, len(expected)), case
    all_small(case, **errors)
    assert np.array_equal(a.allgather(), given, equal_nan=True), f"{case}: A has changed"
    assert b is None or np.array_equal(b.allgather(), second, equal_nan=True), f"{case}: B has changed"
    assert w.dtype == np.empty(0, dtype).real.dtype, case
    assert (np.diff(w) >= 0).all(), f"{case}: {w}"
    assert _alike(ctx, w), f"{case}: the values differ between ranks"


def svd(
    ctx: pb.Context,
    rng: np.random.Generator,
    dtype: str,
    shape: tuple[int, int],
    algo: str,
    *,
    place: Any = placed,
) -> None:
    """Singular values and vectors, perhaps of full matrices. A is kept."""
    (m, n), least, full = shape, min(shape), bool(rng.integers(2))
    whole = random(rng, shape, dtype)
    a = place(ctx, rng, whole)
    u, s, vh = pb.linalg.svd(a, full, algo=algo)
    left, right, of_a = exact(u.allgather()), exact(vh.allgather()), exact(whole)
    expected = np.linalg.svd(of_a, compute_uv=False)
    alone = pb.linalg.svdvals(a, algo=algo)
    longest = max(shape)
    case = f"svd {dtype} {shape} {full} {algo} {a.descriptor}"
    assert (left.shape, right.shape) == (((m, m), (n, n)) if full else ((m, least), (least, n))), case
    all_small(
        case,
        product=relative(left[:, :least] * s @ right[:least] - of_a, of_a, longest, dtype),
        values=relative((s - expected)[:, None], of_a, longest, dtype),
        alone=relative((alone - expected)[:, None], of_a, longest, dtype),
        u=relative(left.conj().T @ left - np.eye(left.shape[1]), np.eye(left.shape[1]), longest, dtype),
        vh=relative(right @ right.conj().T - np.eye(len(right)), np.eye(len(right)), longest, dtype),
    )
    assert np.array_equal(a.allgather(), whole), f"{case}: A has changed"
    assert _alike(ctx, s), f"{case}: the values differ between ranks"
    assert _alike(ctx, alone), f"{case}: the values alone differ between ranks"


def small_eigh(ctx: pb.Context, rng: np.random.Generator, dtype: str, kind: str) -> None:
    eigh(ctx, rng, dtype, int(rng.integers(0, 30)), pick(rng, ("auto", "lapack")), kind=kind)


def small_svd(ctx: pb.Context, rng: np.random.Generator, dtype: str) -> None:
    m, n = rng.integers(1, 25, 2).tolist()
    svd(ctx, rng, dtype, (m, n), "auto")


CASES = (*(partial(small_eigh, kind=kind) for kind in KINDS), small_svd)
"""For CPU ranks."""

TABLE = (*factor_cases.CASES, *solve_cases.CASES, *CASES)
"""Factorizations, solves, eigenvalues, singular values: each draws options, sizes, and a layout for each operand."""


def ends(dtype: str) -> tuple[float, ...]:
    """Sizes of elements up to both ends of a type's range; what is denormal has lost digits."""
    return (
        (1e-40, 1e-36, 1e-22, 1e20, 1e36)
        if dtype in ("float32", "complex64")
        else (1e-310, 1e-160, 1e155, 1e306)
    )


def eigh_at_the_ends(ctx: pb.Context, rng: np.random.Generator, dtype: str, n: int = 12) -> None:
    """Eigenvalues of tiny and large matrices, equal ones, and of a diagonal that is not in order."""
    random_one = random(rng, (n, n), dtype)
    matrices = {
        "random": (random_one + random_one.conj().T) / 2,
        "ones": np.ones((n, n)),
        "diagonal": np.diag(np.r_[np.arange(n - 2.0), 7, -7]),
        "equal": 2 * np.eye(n) - 4 / n,  # a reflection's 2 and -2
        "zero": np.zeros((n, n)),
    }
    for scale, (name, whole) in itertools.product((1.0, *ends(dtype)), matrices.items()):
        with np.errstate(under="ignore"):
            given = (whole * scale).astype(dtype)
        w, found = pb.linalg.eigh(placed(ctx, rng, given))
        left, v = unscaled(given, scale), exact(found.allgather())
        lost = n * float(np.finfo(dtype).smallest_subnormal) / scale / np.finfo(dtype).eps  # of eigenvalues
        bound = max(1.0, lost) * max(1.0, np.abs(left).sum(0).max()) * np.eye(1)
        values = w.astype(float) / scale
        case = f"eigh {dtype} {name} {scale}"
        all_small(
            case,
            vectors=relative(left @ v - v * values, bound, n, dtype),
            orthogonal=relative(v.conj().T @ v - np.eye(n), np.eye(n), n, dtype),
            values=relative((values - np.linalg.eigvalsh(left))[:, None], bound, n, dtype),
        )
        assert (np.diff(w) >= 0).all(), f"{case}: {w}"
    for bad in (np.nan, np.inf):
        whole = np.eye(n)
        whole[n // 2, 1] = whole[1, n // 2] = bad
        w, found = pb.linalg.eigh(placed(ctx, rng, whole.astype(dtype)))
        assert np.isnan(w).all(), f"eigh {dtype} {bad}: {w}"
        assert np.isnan(found.allgather()).all(), f"eigh {dtype} {bad}"


def svd_at_the_ends(ctx: pb.Context, rng: np.random.Generator, dtype: str) -> None:
    """Singular values of tiny and large matrices, of zeros, and of NaN."""
    for scale in (*ends(dtype), 0.0):
        with np.errstate(under="ignore"):
            whole = (random(rng, (9, 7), dtype) * scale).astype(dtype)
        u, s, vh = pb.linalg.svd(placed(ctx, rng, whole))
        size = scale or 1.0
        of_a = exact(whole) / size if dtype[0] == "f" else whole.real / size + 1j * (whole.imag / size)
        left, right = exact(u.allgather()), exact(vh.allgather())
        lost = 9 * float(np.finfo(dtype).smallest_subnormal) / size / np.finfo(dtype).eps
        bound = max(1.0, lost) * max(1.0, np.abs(of_a).sum(0).max()) * np.eye(1)
        all_small(
            f"svd {dtype} {scale}",
            product=relative(left * (s.astype(float) / size) @ right - of_a, bound, 9, dtype),
            u=relative(left.conj().T @ left - np.eye(7), np.eye(7), 9, dtype),
        )
    for bad in (np.nan, np.inf):
        whole = np.ones((6, 8), dtype)
        whole[3, 2] = bad
        found = pb.linalg.svd(placed(ctx, rng, whole))
        for each in (found.u.allgather(), found.s, found.vh.allgather()):
            assert np.isnan(each).all(), f"svd {dtype} {bad}"
