# SPDX-License-Identifier: Apache-2.0
"""Factorizations on ranks: every type, option and layout at random, on one node and between nodes; errors."""

import contextlib
import itertools
import os
import tempfile
from functools import partial
from unittest import mock

import numpy as np
import pytest
import scipy.linalg

import pblasmp as pb
from pblasmp import pblas
from pblasmp.engines.host.host_transport import HostTransport
from pblasmp.layout import Axis
from pblasmp.pblas import factorizations as pblas_factorizations
from tests.helpers import factor_cases, inside
from tests.helpers.cases import check_array, layout, pick, refuses, scattered
from tests.helpers.factor_cases import (
    CASES,
    TYPES,
    all_small,
    direct_blocks_of,
    empty,
    failures,
    least_squares_at_the_ends,
    only,
    panels_of,
    placed,
    planned,
    positive,
    random,
    relative,
    without_full_rank,
)
from tests.helpers.mpi import on_ranks, run_on_one_node
from tests.helpers.slow import in_turn, only_long


@on_ranks((1, 1), (4, 4), *only_long((2, 2), (3, 3), (5, 5), (6, 6), *((size, 1) for size in range(2, 7))))
def test_least_squares_at_the_ends(ctx):
    """Tiny and large numbers, and what has no full rank; ``test_calls.py`` has all that is ordinary."""
    rng = np.random.default_rng(61)
    for dtype in in_turn(TYPES, keep=4, first=ctx.size // 2):
        with panels_of(ctx, int(rng.integers(1, 9))):
            least_squares_at_the_ends(ctx, rng, dtype)
            without_full_rank(ctx, rng, dtype)


@on_ranks(1, 4)
def test_large(comm, ctx):
    """As users have it: panels, workers and strips of triangles of the engine's own choice."""
    rng = np.random.default_rng(62)
    whole = positive(rng, 700, "float64")
    for uplo in "LU":
        d = pb.MatrixDescriptor((700, 700), (48, 40), pb.Grid.squarest(comm.size), order=pick(rng, "CF"))
        a = scattered(ctx, d, only(uplo, whole))
        factor = pb.linalg.cholesky(a, lower=uplo == "L", out=a).allgather()
        lower = np.tril(factor) if uplo == "L" else np.triu(factor).T
        all_small(f"cholesky {uplo}", factor=relative(lower @ lower.T - whole, whole, 700, "float64"))


@pytest.mark.parametrize("direct", [False, True])
@on_ranks(1, 4)
def test_faults(comm, *, direct):
    """What is not positive definite, singular or no number; in panels, or as small direct calls."""
    rng = np.random.default_rng(63)
    with pb.Context(comm, engine="host") as ctx, (direct_blocks_of if direct else panels_of)(ctx, 4):
        empty(ctx, rng)
        failures(ctx, rng)
        found = pb.linalg.slogdet(placed(ctx, rng, np.diag([-np.inf, 2])))
        assert found == (-1, np.inf), "infinity in slogdet"
        for dtype, sizes in (("float64", (1, 2.0**-1074, 1e308)), ("complex64", (1, 2.0**-149, 3e38))):
            wholes = [(size * np.array([[1, -1], [0, 1]])).astype(dtype) for size in sizes]
            conditions = [pb.linalg.cond_estimate(placed(ctx, rng, whole)) for whole in wholes]
            same = np.allclose(conditions, conditions[0])  # although inverses, or sums, are no numbers
            assert same, f"conditions of {sizes}: {conditions}"
        for assume in ("gen", "pos", "lower triangular"):
            right = random(rng, (17, 3), "float64")
            a, b = placed(ctx, rng, np.diag(4.0 - np.arange(17))), placed(ctx, rng, right)
            refuses(ctx, pb.FactorizationError, ["index 4"], pb.linalg.solve, a, b, assume, out=b)
            check_array(b.allgather(), right, f"B after a failed {assume}")


@on_ranks(1, 4)
def test_names(comm, ctx):
    """Illegal arguments under ScaLAPACK's names, each with its number; sizes of workspaces; nothing to do."""
    ictxt = pblas.gridinit(ctx, "Row", 1, comm.size)
    columns = pblas.numroc(8, 2, comm.rank, 0, comm.size)
    desc = pblas.descinit(8, 8, 2, 2, 0, 0, ictxt, 8)
    a, b = (np.asfortranarray(np.eye(8)[:, :columns]) for _ in "ab")
    ipiv, tau = np.zeros(10, np.int32), np.zeros(10)
    at, rhs = (a, 1, 1, desc), (b, 1, 1, desc)
    for info, name, given in (
        (-1, "pdpotrf", ("X", 8, *at)),
        (-2, "pdpotrf", ("L", -1, *at)),
        (-2, "pdpotrf", ("L", 2.5, *at)),
        (-2, "pdpotrf", ("L", 8, a, 2, 1, desc)),  # as in ScaLAPACK; PBLAS would report IA
        (-3, "pdpotrs", ("L", 8, 8, *at, b, 1, 2, desc)),
        (-3, "pdgels", ("N", 7, 8, 8, *at, b, 2, 1, desc)),
        (-607, "pdpotrf", ("L", 8, a, 1, 1, [*desc[:6], 1, *desc[7:]])),
        (-1209, "pdgels", ("N", 8, 8, 8, *at, b, 1, 1, [*desc[:8], 7])),
        (-3, "pspotrf", ("L", 8, *at)),
        (-7, "pdgetrf", (8, 8, *at, np.zeros(7, np.int32))),
        (-7, "pdgetrf", (8, 8, *at, np.zeros(10))),
        (-7, "pdgetrf", (8, 8, *at, None)),
        (-7, "pdgeqrf", (8, 8, *at, np.zeros(10, np.float32))),
        (-3, "pdorgqr", (8, 8, 9, *at, tau)),
        (-5, "pdormqr", ("L", "N", 8, 8, 9, *at, tau, *rhs)),
        (-2, "pdormqr", ("L", "C", 8, 8, 8, *at, tau, *rhs)),
        (-1, "pdgels", ("Q", 8, 8, 8, *at, *rhs)),
        (-1, "pdgels", ("C", 8, 8, 8, *at, *rhs)),
        (-4, "pdposv", ("L", 8, 8, *at, *at)),
        (-8, "pdpotrs", ("L", 4, 4, *at, *at)),
        (-10, "pdtrtrs", ("L", "N", "N", 4, 4, *at, *at)),
        (-9, "pdgetrs", ("N", 4, 4, *at, ipiv, *at)),
        (-2, "pdtrtri", ("L", "X", 8, *at)),
        (-7, "pdpotrf", ("L", 8, *at, 0)),
        (-7, "pdpotri", ("L", 8, *at, np.zeros(2, np.int32))),
        (-8, "pdgeqrf", (8, 8, *at, tau, "no", -1)),
        (-9, "pdgetri", (8, *at, ipiv, None, -1, np.zeros(1), -1)),
    ):
        refuses(ctx, pblas.ParameterError, [f"INFO = {info}"], getattr(pblas, name), *given)
    work, iwork = np.zeros(1), np.zeros(1, np.int32)
    asked = pblas.pdgetri(8, *at, ipiv, work, -1, iwork, -1)
    assert (asked, work[0], iwork[0]) == (0, 1, 1), f"sizes: {asked} {work} {iwork}"
    if comm.size > 1:
        size, words = -1 if comm.rank else 10, ["sizes of workspaces", "not requested on rank 0"]
        refuses(ctx, pb.RankMismatchError, words, pblas.pdgeqrf, 8, 8, *at, tau, work, size)
    assert pblas.pdgetrf(0, 8, *at, ipiv) == pblas.pdpotrf("L", 0, *at) == 0, "nothing: INFO"
    zeros = ("N", 0, 8), ("T", 0, 8), ("N", 8, 0), ("N", 8, 8)
    for (trans, m, n), in_panels in itertools.product(zeros, (False, True)):
        b[:, :], given = 7, np.zeros_like(a)
        with panels_of(ctx, 3) if in_panels else contextlib.nullcontext():
            info = pblas.pdgels(trans, m, n, 8, given, 1, 1, desc, *rhs)
        assert info == 0, f"least squares with {m} x {n} zeros, in panels: {in_panels}"
        assert not b.any(), f"least squares with {m} x {n} zeros, in panels: {in_panels}"
    twice = np.asfortranarray(2 * np.eye(8)[:, Axis(8, 2, 0, comm.size).globals(comm.rank)])
    assert pblas.pdpotrf("U", 8, twice, 1, 1, desc) == 0, "returned: INFO"
    check_array(np.unique(twice), np.sqrt([0.0, 2.0]), "in place")
    last = comm.rank == comm.size - 1
    short, words = (np.zeros(0) if last else tau), ["INFO = -7", "tau", f"rank {comm.size - 1}"]
    words = words[: 3 if comm.size > 1 else 2]
    for name, given in (("pdgeqrf", (8, 8, *at, short)), ("pdorgqr", (8, 8, 8, *at, short))):
        places = [words[0] if name == "pdgeqrf" else "INFO = -8", *words[1:]]
        refuses(ctx, pblas.ParameterError, places, getattr(pblas, name), *given)
    pblas.gridexit(ictxt)


@on_ranks(1, 4)
def test_gathered(comm):
    """A rank that fails before it tells its part of IPIV breaks the context: nobody waits for ever."""
    for name, tail in (("pdgetrs", "ipiv"), ("pdgetri", "ipiv"), ("pdormqr", "tau")):
        with contextlib.suppress(pb.ClosedError), planned(), pb.Context(comm, engine="host") as ctx:
            ictxt = pblas.gridinit(ctx, "Row", 1, comm.size)
            columns = pblas.numroc(8, 2, comm.rank, 0, comm.size)
            desc = pblas.descinit(8, 8, 2, 2, 0, 0, ictxt, 8)
            a, b = (np.asfortranarray(np.eye(8)[:, :columns]) for _ in "ab")
            beside = np.ones(10, np.int32) if tail == "ipiv" else np.zeros(10)
            given = {
                "pdgetrs": ("N", 8, 8, a, 1, 1, desc, beside, b, 1, 1, desc),
                "pdgetri": (8, a, 1, 1, desc, beside),
                "pdormqr": ("L", "N", 8, 8, 8, a, 1, 1, desc, beside, b, 1, 1, desc),
            }[name]
            here, message = pblas_factorizations.done_here, "no answer"
            if comm.rank == comm.size - 1:
                pblas_factorizations.done_here = _out_of_memory
            try:
                getattr(pblas, name)(*given)
            except (MemoryError, pb.ClosedError) as error:
                message = str(error)
            finally:
                pblas_factorizations.done_here = here
            good = "injected" in message if comm.rank == comm.size - 1 else f"left {name}" in message
            assert good, f"{name}: {message}"


def _out_of_memory(*_):
    raise MemoryError("injected")


def local(found):
    """What a function returned, as arrays."""
    if isinstance(found, pb.linalg.QrFactors):
        return [found.factors.allgather(), found.tau]
    found = found if isinstance(found, tuple) else (found,)
    return [x.allgather() if isinstance(x, pb.DistributedMatrix) else np.asarray(x) for x in found]


def check_arrays(found, expected, case):
    """Fail unless what a function returned are these arrays."""
    for x, y in zip(local(found), expected, strict=True):
        check_array(x, y, case)


def tuned(ctx, a, b):
    """``pb.tune`` times factorizations and writes to no matrix; "auto" goes by the times, until the context closes."""
    before = local((a, b))
    singular = ctx.zeros(a.descriptor)
    with mock.patch.dict(os.environ, PBLASMP_TUNING=tempfile.mkdtemp() + "/tuning.json"):
        for name, function, args, how in (
            ("cholesky", pb.linalg.cholesky, (a,), {}),
            ("cholesky in place", pb.linalg.cholesky, (a,), {"out": a}),
            ("solve in place", pb.linalg.solve, (a, b), {"out": b}),
            ("lu_solve", pb.linalg.lu_solve, (pb.linalg.lu_factor(a), b), {"trans": "T"}),
            ("least squares", pb.linalg.lstsq, (a, b), {}),
            ("eigh", pb.linalg.eigh, (a,), {}),
            ("a singular matrix", pb.linalg.inv, (singular,), {}),
        ):
            found = pb.tune(function, *args, **how)
            check_arrays((a, b), before, f"tune {name}")
            assert found.best in found.seconds, f"tune {name}"
            with pb.plan(function, *args, **how) as plan:
                why = str(plan.report().algorithms[found.best])
            assert why.startswith("taken: measured on this machine"), f"tuned {name}"


@on_ranks(1, 4)
def test_algorithms(comm, ctx):
    """``algo=`` of every factorization, its plan, the plan's report, and what they refuse."""
    rng = np.random.default_rng(77)
    a, b = (placed(ctx, rng, positive(rng, 9, "float64")) for _ in "ab")
    lower, (factors, pivots) = pb.linalg.cholesky(a), pb.linalg.lu_factor(a)
    for function, args in (
        (pb.linalg.cholesky, (a, False)),
        (pb.linalg.cho_factor, (a,)),
        (pb.linalg.cho_solve, ((lower, True), b)),
        (pb.linalg.lu_factor, (a,)),
        (pb.linalg.lu_solve, ((factors, pivots), b, "T")),
        (pb.linalg.qr, (a,)),
        (pb.linalg.solve, (a, b, "pos")),
        (pb.linalg.lstsq, (a, b)),
        (pb.linalg.inv, (a,)),
        (pb.linalg.slogdet, (a,)),
        (pb.linalg.det, (a,)),
        (pb.linalg.solve_triangular, (a, b)),
        (pb.linalg.cond_estimate, (a,)),
    ):
        name, expected = function.__name__, local(function(*args, algo="panels"))
        near = (
            np.allclose(x, y, rtol=0, atol=1e-13)
            for x, y in zip(local(function(*args)), expected, strict=True)
        )
        assert all(near), f"{name} by rule: far from what panels give"
        with pb.plan(function, *args, algo="panels") as plan:
            for _ in range(2):
                check_arrays(plan(), expected, f"{name} plan")
            report, problem = plan.report(), plan.problem
        said = (report.algorithm, report.asked, str(report.algorithms["panels"])) == (
            "panels", "panels", "taken: requested",
        )  # fmt: skip
        assert said, f"{name} report"
        assert "panels" in str(report), f"{name} report"
        verdicts = pb.algorithms(problem, ctx)
        assert verdicts["panels"].taken, f"{name} verdicts"
        for asked in ("cusolvermp", "measure"):
            words = [f"algo: the host engine has 'auto', 'panels' here, got {asked!r}"]
            refuses(ctx, pb.UnsupportedError, words, function, *args, algo=asked)
        words = ["algo: expected a string, got 3"]
        refuses(ctx, pb.ArgumentError, words, function, *args, algo=3)
        if ctx.size > 1:
            by_rank = "panels" if ctx.rank else "auto"
            refuses(ctx, pb.RankMismatchError, ["algo"], function, *args, algo=by_rank)
    reflectors = pb.linalg.qr(a)
    for case, form in (("q", reflectors.q), ("apply", partial(reflectors.apply, b, "C"))):
        found, expected = (form(algo=algo).local for algo in ("panels", "auto"))
        assert np.allclose(found, expected, rtol=0, atol=1e-13), case
    tuned(ctx, a, b)
    whole, second = (scattered(ctx, layout(rng, (9, 9), comm.size), np.eye(9)) for _ in "ab")
    second.local[...] *= 4
    with pb.plan("cholesky", whole) as plan:
        like = scattered(ctx, whole.descriptor, 4 * np.eye(9))
        check_array(plan(a=like).allgather(), 2 * np.eye(9), "other matrix")
        check_array(plan().allgather(), np.eye(9), "planned matrix")
        out = ctx.zeros(whole.descriptor)
        for words, given in (
            (["b: expected one of the planned operands a"], {"b": like}),
            (["out: expected one of the planned operands a"], {"out": out}),
            (["a: its layout is", "the plan is for"], {"a": like[:4, :4]}),
            (["a: expected a DistributedMatrix, got int"], {"a": 3}),
        ):
            refuses(ctx, pb.ArgumentError, words, plan, **given)
        singular = scattered(ctx, whole.descriptor, np.diag([1.0] * 8 + [-1.0]))
        words = ["not positive definite", "up to index 8"]
        refuses(ctx, pb.FactorizationError, words, plan, a=singular)
        words = ["a CUDA graph: the host engine has none"]
        refuses(ctx, pb.UnsupportedError, words, plan.graph)
    refuses(ctx, pb.ClosedError, ["closed"], plan)


@on_ranks(1, 4, runner=run_on_one_node)
def test_repeated(comm):
    """One vote, and what one rank computes alone the others wait for once; results are those of the new values.

    Without the compiled core the ranks send each other what the panels need: they still vote once.
    """
    rng = np.random.default_rng(78)
    with pb.Context(comm, engine="host") as ctx, planned():
        a = ctx.empty((40, 40), block=8, order="F")
        kind, waits = type(ctx.comm), []
        wait = kind.wait
        kind.wait = lambda self, *args: (waits.append(args), wait(self, *args))
        for function, part, expected in (
            (pb.linalg.cholesky, np.tril, np.linalg.cholesky),
            (pb.linalg.lu_factor, np.asarray, lambda x: scipy.linalg.lu_factor(x)[0]),
            (pb.linalg.qr, lambda x: abs(np.triu(x)), lambda x: abs(np.linalg.qr(x)[1])),
        ):
            for turn in range(3):
                whole = positive(rng, 40, "float64")
                a[:, :] = whole
                waits.clear()
                voted = inside.votes(ctx)
                function(a, out=a)
                voted, waited = inside.votes(ctx) - voted, len(waits)
                most = (3 if ctx.rank == 0 else 2) if inside.has_boards(ctx) else waited
                if turn and comm.size > 1:
                    assert voted == 1, f"{function.__name__} {turn}"
                    assert waited <= most, f"{function.__name__} {turn}"
                assert np.allclose(part(a.allgather()), expected(whole)), f"{function.__name__} {turn}"


@on_ranks(1, 4)
def test_one_dimension_is_none_of_a_matrix(comm):
    """What makes a matrix refuses one dimension, with the words for a column; ``test_linalg.py`` solves for vectors."""
    with pb.Context(comm) as ctx:
        one = np.arange(12.0) if ctx.rank == 0 else None
        refuses(ctx, pb.ArgumentError, ["array[:, None]"], ctx.scatter, one, block=2)
        refuses(ctx, TypeError, ["(n, 1) for a vector"], ctx.zeros, (12,))


class Slow:
    """A transfer that ends when it must, not before. What is on its way must not be written meanwhile."""

    def __init__(self, transfer, sends):
        self.transfer, self.sent = transfer, [(array, array.copy()) for array, _ in sends]

    def done(self):
        return False

    def finish(self):
        self.transfer.finish()
        assert all(np.array_equal(array, copy, equal_nan=True) for array, copy in self.sent), (
            "written too early"
        )


@on_ranks((6, 1))
def test_grids_between_nodes(comm, ctx):
    """Factorizations and solves where the matrices are, on a grid of several process rows and columns."""
    rng, start = np.random.default_rng(66), HostTransport.start
    grids = pb.Grid(2, comm.size // 2), pb.Grid(comm.size // 2, 2, "col")
    with (
        mock.patch.object(
            HostTransport, "start", lambda self, sends, receives: Slow(start(self, sends, receives), sends)
        ),
        panels_of(ctx, 4),
    ):
        for case, (dtype, grid) in itertools.product(
            CASES, zip(("float64", "complex128"), grids, strict=True)
        ):

            def layout(_, shape, size, grid=grid, **how):
                return pb.MatrixDescriptor(shape, (4, 4), grid, dtype=how.get("dtype", "float64"), order="F")

            with mock.patch.object(factor_cases, "layout", layout):
                for _ in range(3):
                    case(ctx, rng, dtype)
