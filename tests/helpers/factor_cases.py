# SPDX-License-Identifier: Apache-2.0
"""What the tests of factorisations share: matrices to factor, in layouts at random, and errors in units of rounding.

Every rank draws the same cases from generators with the same seed.
"""

from __future__ import annotations

import contextlib

import numpy as np

from pblasmp.engines.host.operations import HostOperations
from tests.helpers.cases import layout, scattered

TYPES = ("float32", "float64", "complex64", "complex128")
MOST = 30  # how large an error may be, in the units of ``relative``


@contextlib.contextmanager
def panels_of(ctx, width):
    """Within, factorisations have panels of ``width`` columns, and every rank works on them."""
    saved = HostOperations.factor_width, HostOperations.factor_alone, ctx.engine.operations.workers
    HostOperations.factor_width, HostOperations.factor_alone = width, 3
    ctx.engine.operations.workers = ctx.size
    try:
        yield
    finally:
        HostOperations.factor_width, HostOperations.factor_alone, ctx.engine.operations.workers = saved


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
    """``whole`` as a matrix in a layout at random, or a part of a larger matrix of NaN."""
    shape, before, after = whole.shape, rng.integers(0, 5, 2), rng.integers(0, 4, 2)
    if rng.integers(3):
        before[:] = after[:] = 0
    larger = np.full(tuple(before + shape + after), np.nan, whole.dtype)
    window = tuple(slice(int(i), int(i) + n) for i, n in zip(before, shape, strict=True))
    larger[window] = whole
    d = layout(rng, larger.shape, ctx.size, dtype=whole.dtype.name, **how)
    return scattered(ctx, d, larger)[window]


def exact(a):
    """``a`` in double precision."""
    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def norm(a):
    """The 1-norm of a matrix, 0 without elements."""
    return float(np.abs(a).sum(0).max(initial=0))


def relative(error, scale, n, dtype):
    """An error divided by ``scale``, n and the unit of rounding; infinite for NaN."""
    if not np.isfinite(error).all():
        return np.inf
    bound = norm(scale) * max(1, n) * np.finfo(dtype).eps
    return norm(error) / bound if bound else norm(error)


def too_large(**errors):
    """What is wrong with errors by name, or None."""
    wrong = {name: error for name, error in errors.items() if not error < MOST}
    return f"errors {wrong}" if wrong else None
