# SPDX-License-Identifier: Apache-2.0
"""Every routine × options × types × places of operands × ways to call it: see ``tests/helpers/table.py``."""

import itertools
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pblasmp as pb
from pblasmp import _core, pblas
from pblasmp.pblas.routine_functions import PblasRoutine
from pblasmp.runtime import matrix_calls
from reference.scalapack import ScaLAPACK
from tests.helpers import inside, table
from tests.helpers.calls import DTYPES, FUNCTIONS, check_call, legal_options
from tests.helpers.cases import pick
from tests.helpers.mpi import on_ranks, run_mpi, run_on_one_node
from tests.helpers.slow import draws, is_long, only_long
from tests.helpers.table import LINALG, NAMED, TABLE, Asked
from tests.helpers.tape import Tape, tapes

HALVES = {"first": FUNCTIONS[:7], "second": (*FUNCTIONS[7:], "reductions")}


@contextmanager
def grids(ctx, slk=None):
    """Grids of all ranks, each with its context, for PBLAS's names; with ScaLAPACK's beside."""
    shapes = [(p, ctx.size // p) for p in range(1, ctx.size + 1) if ctx.size % p == 0]
    found = [
        (
            (pb.Grid(*shape, order), pblas.gridinit(ctx, order, *shape)),
            slk and (slk.call, slk.grid(*shape, order)),
        )
        for shape in shapes
        for order in ("row", "col")
    ]
    yield found
    for (_, ours), theirs in found:
        pblas.gridexit(ours)
        if theirs:
            slk.gridexit(theirs[1])


def shared_out(comm, cases):
    """The cases of this number of ranks: all on one, the first half on two, the second on more.

    In the long form, all are on four ranks, the first half on one, five and six, the second on two and three.
    """
    if comm.size == (4 if is_long() else 1):
        return cases
    second = comm.size in (2, 3) if is_long() else comm.size > 2
    return itertools.islice(cases, int(second), None, 2)


def each_its_own(comm, routine, apart):
    """Fail unless in some call no two operands had a grid, blocks, a source, a start or an order in common.

    Few ranks have few grids, and few calls need not show it: half of them are drawn so.
    """
    least = 8 if routine in FUNCTIONS else 2
    features = {"grid", "block", "source", "start", "order"}
    assert comm.size < 4 or len(apart) < least or any(features <= each for each in apart), routine


def every_call(comm, routines, seed):
    """Every option in every type and way: all of them, or, in the short form, all pairs of those."""
    rng = np.random.default_rng([seed, comm.size])
    with pb.Context(comm, engine="host") as ctx, grids(ctx) as every:
        for routine in routines:
            apart = []
            drawn = TABLE[routine].options("float64") == [{}]
            turns = range(draws(1, long=4) if drawn else 1)  # of calls whose options are drawn
            calls = table.combinations(routine, TABLE[routine].ways, turns)
            for options, dtype, way, _ in shared_out(comm, calls) if routine in FUNCTIONS else calls:
                call = Asked(options, dtype, way, pick(rng, every)[0], apart=apart)
                table.check(ctx, rng, routine, call)
            each_its_own(comm, routine, apart)


@pytest.mark.parametrize("routines", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("nranks", [1, 2, 4, *only_long(6)])
def test_every_call(nranks, routines):
    run_mpi(every_call, nranks, routines=routines, seed=51)


@pytest.mark.parametrize("nranks", [1, 4, *only_long(2, 3, 5, 6)])
@pytest.mark.usefixtures("no_library")
def test_every_factorization(nranks):
    run_mpi(every_call, nranks, routines=tuple(LINALG), seed=51, timeout=240)


@pytest.mark.parametrize("nranks", [4, *only_long(1, 2, 6)])
def test_every_factorization_under_scalapacks_name(nranks):
    run_mpi(every_call, nranks, routines=tuple(NAMED), seed=53, timeout=240)


@pytest.mark.parametrize("third", [0, *only_long(1, 2)])
@pytest.mark.parametrize(("nranks", "per_node"), [(4, 2), *only_long((6, 4)), (3, 1)])
def test_every_call_on_several_nodes(nranks, per_node, third, monkeypatch):
    monkeypatch.setenv("PBLASMP_RANKS_PER_NODE", str(per_node))
    run_mpi(every_call, nranks, routines=tuple(TABLE)[(nranks + third) % 3 :: 3], seed=52, timeout=500)


@pytest.mark.skipif(_core.load() is None, reason="there is no core")
@on_ranks(2, runner=run_on_one_node)
def test_small_calls_need_no_plan(comm):
    """Small calls in any layout take one vote, no plan and no closer look, but where matrices overlap and the like."""
    rng, looked, run, closer = np.random.default_rng(53), [], matrix_calls.run, PblasRoutine.run
    planned = "herkx", "syrkx", "tradd"  # always
    with (
        pb.Context(comm, engine="host") as ctx,
        grids(ctx) as every,
        mock.patch.object(matrix_calls, "run", lambda *given, **how: looked.append(1) or run(*given, **how)),
        mock.patch.object(
            PblasRoutine, "run", lambda *given, **how: looked.append(1) or closer(*given, **how)
        ),
    ):
        for routine, way in itertools.product(FUNCTIONS, ("auto", "pblas")):
            direct = 0
            for dtype in DTYPES * 2:
                options, grid = pick(rng, legal_options(routine, dtype)), pick(rng, every)[:1]
                before = inside.votes(ctx)
                looked.clear()
                check_call(ctx, rng, routine, options, dtype, way, (9, 7, 11), *grid)
                direct += not looked and inside.votes(ctx) == before + 1
            assert direct >= 3 or routine in planned, f"{routine} {way}: {direct} of 8 are direct"


# -- at random


def some_calls(comm, given):
    """Calls of the table that tapes have drawn."""
    with pb.Context(comm, engine="host") as ctx, grids(ctx) as every:
        for tape in given:
            table.check_any(ctx, Tape(tape), [grid for grid, _ in every])


@pytest.mark.parametrize("nranks", [1, 2, 4, *only_long(3, 6)])
@given(drawn=st.lists(tapes(30), min_size=1, max_size=6))
@settings(max_examples=draws(20, long=400))
def test_random_calls(nranks, drawn):
    """Hypothesis draws what the ranks are to do, and shrinks it: to one call, without all that need not be."""
    run_mpi(some_calls, nranks, given=drawn)


@pytest.mark.parametrize(
    ("nranks", "form"),
    [(3, "interleaved:2"), *only_long((2, "blocks:2"), (4, "blocks:2"), (5, "interleaved:3"))],
)
def test_random_calls_between_nodes(nranks, form):
    rng = np.random.default_rng(nranks)
    drawn = rng.integers(0, 2**20, (draws(60, long=1500), 60)).tolist()
    run_mpi(some_calls, nranks, on_nodes=form, given=drawn)


# -- beside ScaLAPACK


def refereed(comm, flavor, seed):
    """Every routine of PBLAS in every type: ScaLAPACK leaves what we leave, and what NumPy computes."""
    slk, rng = ScaLAPACK(flavor, comm), np.random.default_rng([seed, comm.size])
    with pb.Context(comm, engine="host") as ctx, grids(ctx, slk) as every:
        for routine in (*FUNCTIONS, "reductions", *NAMED):
            apart = []
            ways = TABLE[routine].ways if routine in NAMED else ("pblas",)
            turns = range(1 if routine in FUNCTIONS else draws(1, long=4))
            for options, dtype, way, _ in shared_out(comm, table.combinations(routine, ways, turns)):
                if dtype in DTYPES:
                    table.check(ctx, rng, routine, Asked(options, dtype, way, *pick(rng, every), apart))
            each_its_own(comm, routine, apart)


@pytest.mark.parametrize("nranks", [1, 2, 4, *only_long(6)])
def test_beside_scalapack(nranks, scalapack):
    run_on_one_node(refereed, nranks, flavor=scalapack, seed=1, timeout=240, launch=True)
