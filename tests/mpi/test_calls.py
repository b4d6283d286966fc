# SPDX-License-Identifier: Apache-2.0
"""Every routine × options × types × places of operands × ways to call it: see ``tests/helpers/calls.py``."""

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
from tests.helpers import factor_cases, inside
from tests.helpers.calls import (
    DTYPES,
    FUNCTIONS,
    check_call,
    check_level_1,
    combinations,
    draw_thresholds,
    legal_options,
    thresholds,
    ways_of,
)
from tests.helpers.cases import extents, pick, short_messages
from tests.helpers.mpi import on_ranks, run_mpi, run_on_one_node
from tests.helpers.slow import draws, is_long, only_long
from tests.helpers.spectral_cases import TABLE
from tests.helpers.tape import Tape, tapes

BANDS = (0, 2), (1, 16), (1, 16), (33, 100)


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


def one(ctx, rng, routine, options, dtype, way, grid, bands=BANDS, apart=None):
    """One call of the table, in small messages or large ones, on either side of the thresholds."""
    sizes = extents(rng, *bands)
    limits, how = draw_thresholds(rng)
    with thresholds(limits, how), short_messages(pick(rng, (64, 1000, 1 << 22))):
        check_call(ctx, rng, routine, options, dtype, way, sizes, *grid, apart=apart)


def shared_out(comm, cases):
    """All cases on one rank; in the short form half of them on two ranks, and the other half on more."""
    return itertools.islice(cases, int(comm.size > 2), None, 1 if comm.size == 1 or is_long() else 2)


def each_its_own(comm, routine, apart):
    """Fail unless in some call no two operands had a grid, blocks, a source, a start or an order in common.

    Few ranks have few grids, and few calls need not show it: half of them are drawn so.
    """
    features = {"grid", "block", "source", "start", "order"}
    assert comm.size < 4 or len(apart) < 8 or any(features <= each for each in apart), routine


def table(comm, routines, seed, bands=BANDS):
    """Every option in every type and way: all of them, or, in the short form, all pairs of those."""
    rng = np.random.default_rng([seed, comm.size])
    with pb.Context(comm, engine="host") as ctx, grids(ctx) as every:
        for routine in routines:
            apart = []
            for options, dtype, way in shared_out(comm, combinations(routine, ways_of(routine))):
                one(ctx, rng, routine, options, dtype, way, pick(rng, every)[:1], bands, apart)
            each_its_own(comm, routine, apart)


@pytest.mark.parametrize("routines", [FUNCTIONS[:7], FUNCTIONS[7:]], ids=["first", "second"])
@pytest.mark.parametrize("nranks", [1, 2, 4, *only_long(6)])
def test_every_call(nranks, routines):
    run_mpi(table, nranks, routines=routines, seed=51)


@pytest.mark.parametrize(("nranks", "per_node"), [(4, 2), *only_long((6, 4)), (3, 1)])
def test_every_call_on_several_nodes(nranks, per_node, monkeypatch):
    monkeypatch.setenv("PBLASMP_RANKS_PER_NODE", str(per_node))
    routines = FUNCTIONS if is_long() else FUNCTIONS[nranks % 3 :: 3]
    run_mpi(table, nranks, routines=routines, seed=52)


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


def a_call(ctx, rng, every):
    """Any call or reduction, or any factorization, solve, eigenvalues or singular values, drawn."""
    name = pick(rng, pick(rng, ((*FUNCTIONS, "reductions"), TABLE)))
    dtype = pick(rng, DTYPES)
    if name == "reductions":
        check_level_1(ctx, rng, dtype, extents(rng, *BANDS)[0])
    elif name in FUNCTIONS:
        options, way = pick(rng, legal_options(name, dtype)), pick(rng, ways_of(name))
        one(ctx, rng, name, options, dtype, way, pick(rng, every)[:1])
    else:
        how = pick(rng, (factor_cases.direct_blocks_of, factor_cases.panels_of))
        with how(ctx, int(rng.integers(1, 9))), short_messages(pick(rng, (64, 1000, 1 << 22))):
            name(ctx, rng, dtype)


def some_calls(comm, given):
    with pb.Context(comm, engine="host") as ctx, grids(ctx) as every:
        for tape in given:
            a_call(ctx, Tape(tape), every)


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
        for routine in FUNCTIONS:
            apart = []
            for options, dtype in shared_out(comm, combinations(routine)):
                if dtype in DTYPES:
                    (grid, theirs), sizes = pick(rng, every), extents(rng, (0, 15))
                    check_call(ctx, rng, routine, options, dtype, "pblas", sizes, grid, theirs, apart)
            each_its_own(comm, routine, apart)


@pytest.mark.parametrize("nranks", [1, 2, 4, *only_long(6)])
def test_beside_scalapack(nranks, scalapack):
    run_on_one_node(refereed, nranks, flavor=scalapack, seed=1, timeout=120, launch=True)
