# SPDX-License-Identifier: Apache-2.0
"""Levels 1 and 2 on simulated GPUs: every option, numbers on the host, and a gemv that leaves A where it is."""

from __future__ import annotations

from typing import Any

import numpy as np

import pblasmp as pb
from tests.helpers.calls import DTYPES, WRITERS, called, legal_options, vector
from tests.helpers.cases import first
from tests.helpers.machine import Multiplying, machine
from tests.helpers.mpi import run_mpi, starts_ranks


def everything(comm: Any, path: str) -> Any:
    rng = np.random.default_rng(71)
    with machine(path, Multiplying, comm=comm) as lib:
        with pb.Context(comm, engine="cublasmp") as ctx:
            for routine in WRITERS:
                if routine == "trsv":  # the stand-in for cuBLAS rounds
                    continue
                for options in legal_options(routine):
                    dtype = DTYPES[int(rng.integers(4))]
                    yield f"{routine} {options} {dtype}", called(ctx, rng, routine, options, dtype)
            for dtype in DTYPES:
                (a, x), (b, y) = (vector(ctx, rng, dtype, 9) for _ in "xy")
                value, index = pb.blas.amax(a.matrix)
                sizes = abs(x.real) + abs(x.imag)
                at = int(sizes.argmax())
                found = (
                    pb.blas.dot(a.matrix, b.matrix),
                    pb.blas.asum(b.matrix),
                    value,
                    index,
                    pb.blas.nrm2(a.matrix) ** 2,
                )
                wanted = (
                    (x * y).sum(),
                    (abs(y.real) + abs(y.imag)).sum(),
                    x[at],
                    at,
                    (x * x.conj()).sum().real,
                )
                yield (
                    f"numbers {dtype}",
                    None if np.allclose(found, wanted, rtol=1e-5) else f"{found}, {wanted}",
                )
                pb.blas.swap(a.matrix, b.matrix)
                a.expect(y.reshape(a.matrix.shape))
                b.expect(x.reshape(b.matrix.shape))
                yield f"swap {dtype}", first(a.changed(), b.changed())
            yield "algorithm", taken(ctx)
        lib.assert_clean()
        lib.gpu.assert_clean()


def taken(ctx: Any) -> str | None:
    """Say what is wrong unless a product with one vector, and with no more, leaves A in place."""
    d = pb.MatrixDescriptor((64, 64), (8, 8), pb.Grid.squarest(ctx.size))
    a = ctx.zeros(d)
    seen = []
    for columns in (1, 2):
        b = ctx.zeros(pb.MatrixDescriptor((64, columns), (8, 1), d.grid))
        with pb.plan(pb.matmul, a, b) as plan:
            seen.append(plan.report().algorithm == "stationary")
    return None if seen == [True, False] else f"{seen}"


@starts_ranks
def test_every_option(stand_in):
    run_mpi(everything, 4, path=stand_in(1000))
