# SPDX-License-Identifier: Apache-2.0
"""Eigenvalues and singular values, one call at random each, beside NumPy's. Every rank draws the same ones."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import pblas
from reference.scalapack import locate
from tests.helpers.calls import LETTERS, Operand, all_placed
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


def _each_placed(
    ctx: pb.Context, rng: Any, values: dict[str, np.ndarray], grid: pb.Grid
) -> dict[str, Operand]:
    """Matrices by name on a grid, no two of which share memory."""
    return {name: all_placed(ctx, rng, {name: x}, grid)[name] for name, x in values.items()}


def _alike(ctx: pb.Context, values: np.ndarray) -> bool:
    """Whether every rank has the same bits. Collective."""
    return len(set(ctx.comm.allgather(values.tobytes()))) == 1


class Eigenproblem:
    """A Hermitian matrix of which one triangle is given, perhaps with a second one that is positive definite."""

    def __init__(self, rng: Any, dtype: str, n: int, uplo: str, *, pair: bool = False):
        x = random(rng, (n, n), dtype)
        whole = ((x + x.conj().T) / 2).astype(dtype)
        self.dtype, self.n, self.given, self.left = dtype, n, only(uplo, whole), exact(whole)
        self.second, self.weight, self.right = None, np.eye(n), self.left
        if pair:
            self.second = only(uplo, positive(rng, n, dtype))
            weight = exact(np.where(np.isnan(self.second), 0, self.second))
            self.weight = weight + weight.conj().T - np.diag(np.diag(weight))
            half = np.linalg.inv(np.linalg.cholesky(self.weight))
            self.right = half @ self.left @ half.conj().T
        self.values = np.linalg.eigvalsh(self.right)

    def check(self, case: str, w: np.ndarray, v: np.ndarray | None, expected: np.ndarray) -> None:
        """Fail unless these are the expected eigenvalues, in order, and their vectors, if there are any."""
        n, dtype = self.n, self.dtype
        errors = {"values": relative((w - expected)[:, None], self.right, n, dtype)}
        if v is not None:
            assert v.shape == (n, len(expected)), case
            v, unit = exact(v), np.eye(len(w))
            residual = (self.left @ v - self.weight @ v * w) / np.abs(v).max(initial=1)
            errors["vectors"] = relative(residual, np.abs(self.left) + np.abs(self.weight), n, dtype)
            errors["orthogonal"] = relative(v.conj().T @ self.weight @ v - unit, unit, 4 * n, dtype)
        all_small(case, **errors)
        assert w.dtype == np.empty(0, dtype).real.dtype, case
        assert (np.diff(w) >= 0).all(), f"{case}: {w}"


def eigh(
    ctx: pb.Context,
    rng: Any,
    dtype: str,
    n: int,
    algo: str,
    *,
    place: Any = placed,
    kind: str,
    uplo: str = "",
) -> None:
    """Eigenpairs: all, a "subset", "values" alone, or of a "pair" of matrices. A and B are kept."""
    uplo = uplo or pick(rng, "LU")
    p = Eigenproblem(rng, dtype, n, uplo, pair=kind == "pair")
    a = place(ctx, rng, p.given)
    b = place(ctx, rng, p.second) if p.second is not None else None
    how: dict[str, Any] = {"lower": uplo == "L", "algo": algo}
    expected = p.values
    if n and kind in ("subset", "pair") and rng.integers(4):
        how["subset_by_index"] = start, stop = tuple(sorted(int(i) for i in rng.integers(0, n, 2)))
        expected = expected[start : stop + 1]
    case = f"eigh {kind} {dtype} {n} {how} {a.descriptor}"
    if kind == "values":
        w, v = pb.linalg.eigvalsh(a, b, **how), None
    else:
        w, found = pb.linalg.eigh(a, b, check=n % 4 == 0, **how)
        v = found.allgather()
    p.check(case, w, v, expected)
    assert np.array_equal(a.allgather(), p.given, equal_nan=True), f"{case}: A has changed"
    assert b is None or np.array_equal(b.allgather(), p.second, equal_nan=True), f"{case}: B has changed"
    assert _alike(ctx, w), f"{case}: the values differ between ranks"


def eigh_by_name(ctx: pb.Context, rng: Any, dtype: str, grid: Any, *, kind: str, uplo: str) -> None:
    """The same under one of ScaLAPACK's names: W, M and NZ, and vectors in the first columns of Z."""
    n = int(rng.integers(1, 20))
    p = Eigenproblem(rng, dtype, n, uplo, pair=kind == "pair")
    name = (
        "gvx"
        if kind == "pair"
        else pick(rng, ("evr", "evx") if kind == "subset" else ("ev", "evd", "evr", "evx"))
    )
    jobz, ranges = ("N" if kind == "values" else "V"), pick(rng, "IV" if kind == "subset" else "A")
    second = {} if p.second is None else {"b": p.second}
    given = _each_placed(ctx, rng, {"a": p.given, **second, "z": np.full_like(p.given, np.nan)}, grid[0])
    a, z, b = (given[x].matrix.to_scalapack(context=grid[1]) if x in given else () for x in "azb")
    expected, (first, last) = p.values, sorted(int(i) for i in rng.integers(0, n, 2))
    vl, vu = expected[0] - 1, (expected[last] + np.r_[expected, expected[-1] + 2][last + 1]) / 2
    expected = {"A": expected, "I": expected[first : last + 1], "V": expected[: last + 1]}[ranges]
    w = np.full(n, np.nan, np.empty(0, dtype).real.dtype)
    m, nz, info = (np.full(1, -7, np.int32) for _ in range(3))
    arguments = [jobz, uplo, n, *a, w, *z]
    if name in ("evr", "evx", "gvx"):
        bounds = [float(vl), float(vu), first + 1, last + 1, *([] if name == "evr" else [0.0]), m, nz]
        orfac = [] if name == "evr" else [1e-3]
        arguments = [jobz, ranges, uplo, n, *a, *b, *bounds, w, *orfac, *z]
    full = f"p{LETTERS[dtype]}{'he' if dtype.startswith('c') else 'sy'}{name}"
    case = f"{full} {jobz} {ranges} {n} {uplo} {given['a'].matrix.descriptor}"
    returned = getattr(pblas, full)(*[1] * (name == "gvx"), *arguments, info=info)
    assert returned == info[0] == 0, case
    count, vectors = len(expected), given["z"].matrix.allgather()
    if name in ("evr", "evx", "gvx"):
        assert (m[0], nz[0]) == (count, count if jobz == "V" else 0), case
    if jobz == "V":
        around = given["z"].around()
        assert not around, f"{case}: around Z {around}"
    for x in ("a", "b", "z") if jobz == "N" else "a":
        if x in given:
            given[x].check(f"{case}: {x}")
    p.check(case, w[:count], vectors[:, :count] if jobz == "V" else None, expected)


def svd(
    ctx: pb.Context, rng: Any, dtype: str, shape: tuple[int, int], algo: str, *, place: Any = placed
) -> None:
    """Singular values and vectors, perhaps of full matrices. A is kept."""
    (m, n), least, full = shape, min(shape), bool(rng.integers(2))
    whole = random(rng, shape, dtype)
    a = place(ctx, rng, whole)
    u, s, vh = pb.linalg.svd(a, full, algo=algo)
    alone = pb.linalg.svdvals(a, algo=algo)
    case = f"svd {dtype} {shape} {full} {algo} {a.descriptor}"
    assert (u.shape, vh.shape) == (((m, m), (n, n)) if full else ((m, least), (least, n))), case
    check_svd(case, whole, s, u.allgather(), vh.allgather())
    check_svd(case, whole, alone)
    assert np.array_equal(a.allgather(), whole), f"{case}: A has changed"
    assert _alike(ctx, s), f"{case}: the values differ between ranks"
    assert _alike(ctx, alone), f"{case}: the values alone differ between ranks"


def check_svd(
    case: str, whole: np.ndarray, s: np.ndarray, u: np.ndarray | None = None, vh: np.ndarray | None = None
) -> None:
    """Fail unless these are the singular values of ``whole``, and its left and right vectors, if there are any."""
    of_a, dtype, longest, least = exact(whole), whole.dtype, max(whole.shape), min(whole.shape)
    errors = {"values": relative((s - np.linalg.svd(of_a, compute_uv=False))[:, None], of_a, longest, dtype)}
    if u is not None:
        u = exact(u)
        errors["u"] = relative(u.conj().T @ u - np.eye(u.shape[1]), np.eye(u.shape[1]), longest, dtype)
    if vh is not None:
        vh = exact(vh)
        errors["vh"] = relative(vh @ vh.conj().T - np.eye(len(vh)), np.eye(len(vh)), longest, dtype)
    if u is not None and vh is not None:
        errors["product"] = relative(u[:, :least] * s @ vh[:least] - of_a, of_a, longest, dtype)
    all_small(case, **errors)


def svd_by_name(ctx: pb.Context, rng: Any, dtype: str, grid: Any, *, jobu: str, jobvt: str) -> None:
    """The same under ScaLAPACK's name. A need not be kept."""
    m, n = (int(i) for i in rng.integers(1, 20, 2))
    least, whole = min(m, n), random(rng, (m, n), dtype)
    nothing = {"u": np.full((m, least), np.nan, dtype), "vt": np.full((least, n), np.nan, dtype)}
    given = _each_placed(ctx, rng, {"a": whole, **nothing}, grid[0])
    a, u, vt = (given[x].matrix.to_scalapack(context=grid[1]) for x in ("a", "u", "vt"))
    s = np.full(least, np.nan, np.empty(0, dtype).real.dtype)
    info = getattr(pblas, f"p{LETTERS[dtype]}gesvd")(jobu, jobvt, m, n, *a, s, *u, *vt)
    case = f"p{LETTERS[dtype]}gesvd {jobu}{jobvt} {m} {n} {given['a'].matrix.descriptor}"
    assert info == 0, case
    found = {x: given[x].matrix.allgather() for x in nothing}
    wanted = {x: job == "V" for x, job in (("u", jobu), ("vt", jobvt))}
    check_svd(case, whole, s, *(found[x] if wanted[x] else None for x in found))
    for x, each in given.items():
        around = each.around()
        assert not around, f"{case}: around {x} {around}"
        if x in found and not wanted[x]:
            each.check(f"{case}: {x}")


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
