# SPDX-License-Identifier: Apache-2.0
"""Factorisations on simulated GPUs: every type, option and layout at random, what cannot be factored, and the order."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import pblasmp as pb
from tests.helpers.factor_cases import CASES, TYPES, failures, panels_of
from tests.helpers.machine import Multiplying, machine
from tests.helpers.mpi import run_mpi, starts_ranks


def everything(comm: Any, path: str) -> Any:
    rng = np.random.default_rng(91)
    with machine(path, Multiplying, comm=comm) as lib:
        with pb.Context(comm, engine="cublasmp") as ctx:
            for case in CASES:
                for dtype in TYPES:
                    with panels_of(ctx, int(rng.integers(1, 9))):
                        yield case(ctx, rng, dtype)
            with panels_of(ctx, 4):
                yield from failures(ctx, rng)
        lib.assert_clean()
        lib.gpu.assert_clean()


@starts_ranks
def test_every_layout(stand_in: Any) -> None:
    run_mpi(everything, 3, path=stand_in(1000))


def test_nothing_waits_for_a_panel(lib: Any, ctx: Any) -> None:
    """The host waits for the GPU as often for ten panels as for two."""
    waits = []
    for n in (8, 40):
        a = ctx.from_function(lambda i, j: 4.0 * (i == j), pb.MatrixDescriptor((n, n), (4, 4), pb.Grid(1, 1)))
        b = ctx.from_function(lambda i, j: 1.0 * i, pb.MatrixDescriptor((n, 1), (4, 4), pb.Grid(1, 1)))
        with panels_of(ctx, 4):
            for call in (pb.cholesky, pb.lu, pb.qr, partial(pb.solve, b=b)):
                call(a)
                lib.gpu.events.clear()
                lib.gpu.copies.clear()
                call(a)
                waits.append(len(lib.gpu.did("synchronize")) + lib.gpu.copies.count("asnumpy"))
    assert waits[:4] == waits[4:]
    assert all(waits)
