# SPDX-License-Identifier: Apache-2.0
"""Levels 1 and 2 on GPUs against float64 NumPy: every routine and type, rows and columns, in layouts of any kind."""

from __future__ import annotations

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.layout.routines import VECTOR_ROUTINES
from tests.helpers.calls import DTYPES, WRITERS, drawn, legal_options, scalars, stored
from tests.helpers.cases import layout, numbers
from tests.helpers.gpu.products import everywhere


def one(ctx, rng, routine, options, dtype):
    """What is wrong with one call in place, or an empty string. Collective."""
    row = VECTOR_ROUTINES[routine]
    alpha, beta = scalars(rng, routine, dtype)
    values, _, wanted = drawn(rng, routine, options, dtype, (37, 29, 0), alpha, beta)
    target = row.written
    given = {}
    for name, x in values.items():
        x = x.T if name != "a" and rng.integers(2) else x
        given[name] = ctx.scatter(x, layout(rng, x.shape, ctx.size, dtype=dtype, pad=0))
    out = ctx.empty(given["x"].descriptor) if routine == "copy" else given[target]
    if target == "a" and "uplo" in options:
        wanted = np.where(stored(options["uplo"], len(wanted)), wanted, values["a"])
    how = dict(options)
    how |= {"alpha": alpha} if "alpha" in row.pblas else {}
    how |= {"beta": beta} if "beta" in row.pblas else {}
    getattr(pb.blas, routine)(*(given[name] for name in row.sizes if name in given), **how, out=out)
    found = out.allgather().reshape(wanted.shape)
    near = np.isclose(found, wanted, rtol=1e-4, atol=1e-4) | (np.isnan(found) & np.isnan(wanted))
    return "" if near.all() else f"{routine} {options} {dtype}: {(~near).sum()} of {near.size} are wrong"


@pytest.mark.parametrize("routine", WRITERS)
def test_every_option(ctx, routine):
    rng = np.random.default_rng(81)
    faults = [
        fault
        for options in legal_options(routine)
        for dtype in DTYPES
        if (fault := everywhere(ctx, one(ctx, rng, routine, options, dtype)))
    ]
    assert not faults, "\n".join(faults[:5])


def test_numbers(ctx):
    rng = np.random.default_rng(82)
    for dtype in DTYPES:
        x, y = (numbers(rng, (1000, 1), dtype) for _ in "xy")
        a, b = (ctx.scatter(v, layout(rng, v.shape, ctx.size, dtype=dtype, pad=0)) for v in (x, y))
        sizes = (abs(x.real) + abs(x.imag)).reshape(-1)
        value, index = pb.blas.amax(a)
        found = pb.blas.dot(a, b), pb.blas.dotc(a, b), pb.blas.nrm2(a), pb.blas.asum(a), value, index
        at = int(sizes.argmax())
        wanted = (x * y).sum(), (x.conj() * y).sum(), np.linalg.norm(x), sizes.sum(), x[at, 0], at
        assert np.allclose(found, wanted, rtol=1e-5), (dtype, found, wanted)


def test_a_gemv_sends_vectors_only(ctx):
    d = pb.MatrixDescriptor((4096, 4096), (256, 256), pb.Grid.squarest(ctx.size))
    a, x = ctx.zeros(d), ctx.zeros(pb.MatrixDescriptor((4096, 1), (256, 1), d.grid))
    with pb.plan(pb.matmul, a, x) as plan:
        report = plan.report()
    assert ctx.size == 1 or report.algorithm == "stationary"
    assert report.sent_bytes <= 4 * 8 * 4096
