# SPDX-License-Identifier: Apache-2.0
"""Ranks that round differently, as unlike processors and libraries do: they meet all the same, or all raise."""

import contextlib
import ctypes
import math
import os
from functools import partial
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp import _core
from pblasmp.engines.request import Options
from pblasmp.linalg import general
from pblasmp.matrix import verification
from pblasmp.tuning import measurements
from tests.helpers import inside
from tests.helpers.cases import check_array
from tests.helpers.mpi import on_ranks, run_on_one_node


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
            for module in (general, verification):
                patched.enter_context(mock.patch.object(module, "np", Nudged(np, "abs", "log")))
            math_there = Nudged(math, "log", "exp", "hypot")
            patched.enter_context(mock.patch.object(measurements, "math", math_there))
        yield


@on_ranks(2, timeout=30)
def test_ranks_that_round_differently(comm):
    """Numbers are the same on every rank, and how they are computed never depends on a rank's own rounding."""
    rng = np.random.default_rng(91)
    with pb.Context(comm, engine="host") as ctx, rounding_otherwise(comm.rank == comm.size - 1):
        for count in range(6):
            block = rng.standard_normal((6, 6)) + 1j * rng.standard_normal((6, 6))
            whole = np.kron(np.eye(2), block)  # columns of its inverse have the same norms
            a = ctx.scatter(whole, block=2, dtype="complex128")
            for name, call in (
                ("cond_estimate", pb.linalg.cond_estimate),
                ("slogdet", pb.linalg.slogdet),
                ("verify", lambda a: pb.verify(a, a, None, a @ a).error),
            ):
                values = comm.allgather(repr(call(a)))
                assert len({*values}) == 1, f"{name} {count}"
            ratio = pb.linalg.cond_estimate(a) / np.linalg.cond(whole, 1)
            assert 0.3 < ratio < 1.0001, f"estimate {count}"
        equally_fast(ctx)


def equally_fast(ctx):
    """Two algorithms that take as long by what was measured: all ranks take the same one."""
    known, d = ctx.engine.measured, pb.MatrixDescriptor((32, 32), (4, 4), pb.Grid(1, ctx.size))
    a = ctx.eye(d)
    sizes = [pb.MatmulProblem(*[pb.MatrixDescriptor((n, n), (4, 4), d.grid)] * 3) for n in (24, 40, 48)]
    seconds = {"shared": 1e-3, "panels": 1e-3, "gathered": 1e-3}
    for count, problem in enumerate(sizes):
        known.add(known.entry(problem, Options(), seconds, "2026-01-01"))
        with pb.plan(pb.matmul, a, a) as plan:
            taken = ctx.comm.allgather(plan.report().algorithm)
            check_array(plan().allgather(), np.eye(32))
        assert taken[0] in seconds, f"equally fast by {count + 1} measurements"
        assert len({*taken}) == 1, f"equally fast by {count + 1} measurements: {taken}"
    known.entries.clear()


POINTERS = {
    "trsm": 11, "getrf": 6, "getrs": 9, "getri": 7, "potrs": 8, "potri": 5, "trtrs": 10, "trtri": 6,
}  # fmt: skip


def followed(ctx, routine, function):
    """Have this rank's BLAS or LAPACK routine for float64 followed by a function of its arguments' addresses."""
    direct, prototype = ctx.engine.direct, ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * POINTERS[routine])
    functions, place = inside.addresses_of_blas(direct, "d"), _core.BLAS.index(routine)
    plain = prototype(functions[place])
    both = prototype(lambda *args: (plain(*args), function(*args))[0])
    vars(direct).setdefault("kept", []).append(both)  # it stays as long as there is an address of it
    functions[place] = ctypes.cast(both, ctypes.c_void_p).value


def nudging(ctx, routine, result):
    """Have a LAPACK routine of this rank find another last bit of one element of its argument of this number."""

    def nudge(*args):
        first = np.ctypeslib.as_array(ctypes.c_double.from_address(args[result]))
        first[...] = np.nextafter(first, 99)

    followed(ctx, routine, nudge)


def finding(ctx, info, pivots):
    """Have LAPACK's getrf say something else on this rank: INFO, and pivots by a function of these."""

    def say(m, n, _a, _ld, of_pivots, of_info):
        least = min(ctypes.c_int32.from_address(each).value for each in (m, n))
        there = np.ctypeslib.as_array((ctypes.c_int32 * least).from_address(of_pivots))
        there[:] = pivots(there)
        if info:
            ctypes.c_int32.from_address(of_info).value = info

    followed(ctx, "getrf", say)


@on_ranks(2, runner=run_on_one_node)
def test_ranks_that_find_other_pivots(comm):
    """Every rank factors all of a small matrix, one finds something else: the next call of any kind says so."""
    whole, last = np.eye(8) * 40 + np.arange(64).reshape(8, 8) % 5, comm.rank == comm.size - 1
    singular = "exactly singular"
    upper = partial(pb.linalg.solve, assume_a="upper triangular")
    for name, call, other, then in (
        ("pivots", pb.linalg.lu_factor, 0, lambda ctx, a: pb.matmul(a, a)),
        ("pivots, reduction", pb.linalg.lu_factor, 0, lambda ctx, a: pb.blas.dot(a[:, :1], a[:, 1:2])),
        ("pivots, agreement", pb.linalg.lu_factor, 0, lambda ctx, a: ctx.eye(8)),
        ("pivots, again", pb.linalg.lu_factor, 0, lambda ctx, a: pb.linalg.lu_factor(a)),
        ("pivots, solved", lambda a: pb.linalg.solve(a, a), 0, lambda ctx, a: a.norm()),
        ("pivots, inverse", pb.linalg.inv, 0, lambda ctx, a: a @ a),
        ("pivots, end", pb.linalg.lu_factor, 0, lambda ctx, a: ctx.close()),
        ("INFO", pb.linalg.lu_factor, 3, lambda ctx, a: a @ a),
        ("a bit of solve", lambda a: pb.linalg.solve(a, a), ("getrs", 6), lambda ctx, a: a.norm()),
        ("a bit of a triangular solve", lambda a: upper(a, a), ("trtrs", 7), lambda ctx, a: a @ a),
        (
            "a bit of cho_solve",
            lambda a: pb.linalg.cho_solve((a, True), a),
            ("potrs", 5),
            lambda ctx, a: ctx.eye(8),
        ),
        ("a bit of inv", pb.linalg.inv, ("getri", 1), lambda ctx, a: a @ a),
        ("a bit of inv, pos", partial(pb.linalg.inv, assume_a="pos"), ("potri", 2), lambda ctx, a: a @ a),
        (
            "a bit of inv, tri",
            partial(pb.linalg.inv, assume_a="lower triangular"),
            ("trtri", 3),
            lambda ctx, a: a @ a,
        ),
        ("a bit of LU", pb.linalg.lu_factor, ("getrf", 2), lambda ctx, a: a @ a),
    ):
        ctx = pb.Context(comm, engine="host")
        a = ctx.scatter(whole, block=3)
        for count in range(2):
            call(a)
            assert (a @ a).shape == (8, 8), f"{name}: alike {count}: shape"
        if last:
            if isinstance(other, tuple):
                nudging(ctx, *other)
            else:
                finding(ctx, other, lambda pivots: np.minimum(pivots[::-1] + 1, 8))
        message = None
        try:
            call(a)
        except pb.FactorizationError:  # this rank is the only one that found it singular, and tells
            message = singular
        except pb.RankMismatchError as error:
            message = str(error)
        if message is None:
            try:
                then(ctx, a)
                message = "no error"
            except Exception as error:  # noqa: BLE001 - compared below
                message = f"{type(error).__name__}: {error}"
        texts = comm.allgather(message)
        assert len({text.rpartition("Error: ")[2] for text in texts}) == 1, (name, texts)
        for word in (
            "found different things",
            "INFO 0",
            f"on rank {comm.size - 1}",
            *["INFO 3"] * (other == 3),
        ):
            assert word in texts[0], name
        with pytest.raises(pb.ClosedError):
            a @ a
        with contextlib.suppress(pb.ClosedError):
            ctx.close()


@on_ranks(2, runner=run_on_one_node)
def test_ranks_with_other_numbers_of_threads(comm):
    """Ranks whose BLAS have other numbers of threads do not each compute the same."""
    last = comm.rank == comm.size - 1
    whole = np.eye(8) * 40 + np.arange(64).reshape(8, 8) % 5
    with (
        mock.patch.dict(os.environ, {"OMP_NUM_THREADS": f"{1 + last}"}),
        pb.Context(comm, engine="host") as ctx,
    ):
        a = ctx.scatter(whole, grid="2x1", block=3)
        if last:
            for routine, result in (("getrs", 6), ("potri", 2), ("getrf", 2)):
                nudging(ctx, routine, result)
        solved = []

        def note(*args):
            solved.append(math.prod(ctypes.c_int32.from_address(each).value for each in args[4:6]))

        followed(ctx, "trsm", note)
        for name, call, expected in (
            ("solve", lambda a: pb.linalg.solve(a, a), np.eye(8)),
            (
                "inv",
                partial(pb.linalg.inv, assume_a="pos"),
                np.linalg.inv(np.triu(whole) + np.triu(whole, 1).T),
            ),
            ("trsm", lambda a: pb.blas.trsm(a, a), np.linalg.solve(np.tril(whole), whole)),  # the last one
        ):
            for count in range(2):
                near = np.allclose(call(a).allgather(), expected, rtol=0, atol=1e-13)
                assert near, f"{name} {count}: another result"
        elements = sum(ctx.comm.allgather(sum(solved)))
        assert elements == 2 * whole.size, "elements solved for"


@on_ranks(1, 2, runner=run_on_one_node)
def test_pivots_among_nan(comm):
    """A BLAS may find no largest element among NaN: pivots are rows of the matrix nevertheless, also there."""
    whole = np.full((6, 6), np.nan)
    for wrong in (0, -3, 99):
        with pb.Context(comm, engine="host") as ctx:
            a = ctx.scatter(whole, block=2)
            finding(ctx, 0, partial(np.full_like, fill_value=wrong))
            pivots = pb.linalg.lu_factor(a)[1]
            assert ((pivots >= 0) & (pivots < 6)).all(), f"pivots {wrong}"
            for name, found in (("solve", pb.linalg.solve(a, a)), ("inv", pb.linalg.inv(a))):
                assert np.isnan(found.allgather()).all(), f"{name} {wrong}: numbers"
