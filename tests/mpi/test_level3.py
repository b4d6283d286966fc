# SPDX-License-Identifier: Apache-2.0
"""Level-3 routines on ranks: every option, type and memory order, on every path, at any offset of any layout."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.host.operations import HostOperations
from pblasmp.layout.level3 import ROUTINES
from pblasmp.testing.level3 import legal_flags
from tests.helpers.cases import extents, pick, short_messages
from tests.helpers.level3_cases import DTYPES, called
from tests.helpers.mpi import run_mpi
from tests.helpers.slow import draws, in_turn, only_long

PATHS = ("auto", "shared", "gathered", "panels")


def paths_of(routine):
    traits = ROUTINES[routine]
    if traits.shape == "added":
        return ("auto",)
    if traits.shape == "updated":
        return (*PATHS, "summed", "full")
    return (*PATHS, "stationary") if traits.triangular else (*PATHS, "stationary", "full")


def everything(comm, routines, part, parts):
    HostOperations.panel = 4
    rng = np.random.default_rng(51)
    cases = [
        (routine, flags, dtype, algo)
        for routine in routines
        for dtype in DTYPES
        for flags in legal_flags(routine, dtype)
        for algo in paths_of(routine)
    ]
    chosen = rng.permutation(len(cases))[part % parts :: parts]
    with pb.Context(comm, engine="host") as ctx:
        for i in chosen.tolist():
            routine, flags, dtype, algo = cases[i]
            sizes = extents(rng, (1, 16))
            HostOperations.lead = pick(rng, (0, 2))  # of a first panel
            with short_messages(pick(rng, (64, 1000, 1 << 22))):
                yield (
                    f"{routine} {flags} {dtype} {algo}",
                    called(ctx, rng, routine, flags, dtype, algo, sizes),
                )


def zeros_and_others(comm):
    HostOperations.panel = 5
    rng = np.random.default_rng(52)
    with pb.Context(comm, engine="host") as ctx:
        for number, routine in enumerate(ROUTINES, comm.size):
            paths = paths_of(routine)
            keep = min(draws(5, long=1), len(paths))
            turns = itertools.cycle([paths[i::keep] for i in range(keep)])
            for sizes in in_turn(*[(0, 7)] * 3, keep=2, first=number):
                for algo in next(turns):
                    dtype = pick(rng, DTYPES)
                    flags = pick(rng, legal_flags(routine, dtype))
                    wrong = called(ctx, rng, routine, flags, dtype, algo, sizes)
                    yield f"{routine} {sizes} {flags} {dtype} {algo}", wrong


SIDED = [routine for routine, traits in ROUTINES.items() if traits.shape == "sided"]
OTHERS = [routine for routine in ROUTINES if routine not in SIDED]


@pytest.mark.parametrize("routines", [SIDED, OTHERS], ids=["sided", "others"])
@pytest.mark.parametrize(
    ("nranks", "part", "parts"), [(1, 0, 10), (2, 0, 30), (4, 1, 60), *only_long((6, 2, 70))]
)
def test_every_option_of_every_routine(nranks, part, parts, routines):
    """One in ten on one rank, fewer on more ranks."""
    run_mpi(everything, nranks, routines=routines, part=part, parts=draws(parts, long=1))


@pytest.mark.parametrize("nranks", [1, 4])
def test_extents(nranks):
    run_mpi(zeros_and_others, nranks)


@pytest.mark.parametrize(("nranks", "per_node"), [(4, 2), *only_long((6, 4)), (3, 1)])
def test_several_nodes(nranks, per_node, monkeypatch):
    monkeypatch.setenv("PBLASMP_RANKS_PER_NODE", str(per_node))
    run_mpi(everything, nranks, routines=list(ROUTINES), part=nranks, parts=draws(80, long=9))
