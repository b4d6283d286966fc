# SPDX-License-Identifier: Apache-2.0
"""Ranks that round differently, as unlike processors and libraries do: they meet all the same, or all raise."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from unittest import mock

import numpy as np

import pblasmp as pb
from pblasmp import verification
from pblasmp.engines.dense import condition
from pblasmp.engines.request import Options
from pblasmp.factorisations import general
from pblasmp.tuning import measurements
from tests.helpers.cases import agreed_error, first
from tests.helpers.mpi import run_mpi


class Nudged:
    """A module whose functions round otherwise: half of the numbers that they return are the next ones."""

    def __init__(self, module, *names):
        self._module, self._names, self._rng = module, names, np.random.default_rng(92)

    def __getattr__(self, name):
        found = getattr(self._module, name)
        if name not in self._names:
            return found

        def nudged(*args, **kwargs):
            value = found(*args, **kwargs)
            chosen = self._rng.integers(2, size=np.shape(value)) == 1
            if not isinstance(value, np.ndarray):
                return math.nextafter(value, math.inf) if chosen else value
            return np.where(chosen, np.nextafter(value, value.dtype.type(np.inf)), value)

        return nudged


@contextlib.contextmanager
def rounding_otherwise(here):
    """Within, NumPy and Python's library round otherwise ``here``."""
    with contextlib.ExitStack() as patched:
        if here:
            for module in (condition, general, verification):
                patched.enter_context(mock.patch.object(module, "np", Nudged(np, "abs", "log")))
            math_there = Nudged(math, "log", "exp", "hypot")
            patched.enter_context(mock.patch.object(measurements, "math", math_there))
        yield


def unlike(comm):
    """Numbers are the same on every rank, and how they are computed never depends on a rank's own rounding."""
    rng = np.random.default_rng(91)
    with pb.Context(comm, engine="host") as ctx, rounding_otherwise(comm.rank == comm.size - 1):
        for count in range(6):
            block = rng.standard_normal((6, 6)) + 1j * rng.standard_normal((6, 6))
            whole = np.kron(np.eye(2), block)  # columns of its inverse have the same norms
            a = ctx.scatter(whole, block=2, dtype="complex128")
            for name, call in (
                ("cond_estimate", lambda a: pb.cond_estimate(a)),
                ("slogdet", lambda a: pb.slogdet(a)),
                ("verify", lambda a: pb.verify(a, a, None, a @ a).error),
            ):
                values = comm.allgather(repr(call(a)))
                yield f"{name} {count}", None if len({*values}) == 1 else f"{values}"
            ratio = pb.cond_estimate(a) / np.linalg.cond(whole, 1)
            yield f"estimate {count}", None if 0.3 < ratio < 1.0001 else f"{ratio}"
        yield from equally_fast(ctx)


def equally_fast(ctx):
    """Two algorithms that take as long by what was measured: all ranks take the same one."""
    known, d = ctx.engine.measured, pb.MatrixDescriptor((32, 32), (4, 4), pb.Grid(1, ctx.size))
    a = ctx.eye(d)
    sizes = [pb.MatmulProblem(*[pb.MatrixDescriptor((n, n), (4, 4), d.grid)] * 3) for n in (24, 40, 48)]
    seconds = {"shared": 1e-3, "mpi": 1e-3, "gathered": 1e-3}
    for count, problem in enumerate(sizes):
        known.add(known.entry(problem, Options(), seconds, "2026-01-01"))
        with pb.plan(pb.matmul, a, a) as plan:
            taken = ctx.comm.allgather(plan.report().algorithm)
            same = first(
                None if len({*taken}) == 1 and taken[0] in seconds else f"{taken}",
                None if (plan().allgather() == np.eye(32)).all() else "another product",
            )
        yield f"equally fast by {count + 1} measurements", same
    known.entries.clear()


def test_ranks_that_round_differently():
    run_mpi(unlike, 2, timeout=30)
