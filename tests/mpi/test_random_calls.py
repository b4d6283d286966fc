# SPDX-License-Identifier: Apache-2.0
"""Calls at random: each operand has a grid, blocks, a source, an order, an offset, and is a transpose, independently.

Extents repeat. Calls are tiny, direct or planned: see the bands. Few are random in the suite, many in its long form.
"""

from __future__ import annotations

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.host.operations import HostOperations
from pblasmp.layout.level3 import ROUTINES
from pblasmp.testing.level3 import legal_flags
from tests.helpers import factor_cases, level3_cases, vector_cases
from tests.helpers.cases import extents, pick
from tests.helpers.level3_cases import DTYPES
from tests.helpers.mpi import run_mpi
from tests.helpers.slow import draws, only_long
from tests.helpers.vector_cases import WRITERS

BANDS = (1, 16), (33, 128), (33, 128)  # tiny and direct; larger calls in the long form


def level3(ctx, rng, routine, dtype, bands):
    if routine == "matmul":
        flags = {"op_a": pick(rng, "NTC"), "op_b": pick(rng, "NTC")}
        dtype = pick(rng, (dtype, dtype, "float16", "bfloat16"))
    else:
        flags = pick(rng, legal_flags(routine, dtype))
    sizes = extents(rng, *bands)
    wrong = level3_cases.called(ctx, rng, routine, flags, dtype, "auto", sizes)
    yield f"{routine} {flags} {dtype} {sizes}", wrong


def of_vectors(ctx, rng, routine, dtype, bands):
    options, sizes = pick(rng, vector_cases.legal_options(routine)), extents(rng, *bands)[:2]
    wrong = vector_cases.called(ctx, rng, routine, options, dtype, sizes=sizes)
    yield f"{routine} {options} {dtype} {sizes}", wrong


def of_level_1(ctx, rng, _, dtype, bands):
    yield from vector_cases.of_level_1(ctx, rng, dtype, extents(rng, *bands)[0])


def factorisation(ctx, rng, case, dtype, _):
    yield case(ctx, rng, dtype)


KINDS = {
    level3: ("matmul", *ROUTINES),
    of_vectors: WRITERS,
    of_level_1: ("",),
    factorisation: factor_cases.CASES,
}
CALLS = [(kind, name) for kind, names in KINDS.items() for name in names]
CALLS += 3 * [
    (level3, name) for name, traits in ROUTINES.items() if traits.shape == "sided"
]  # with most options


def calls(comm, rounds, seed=0, bands=BANDS, cut=False):
    """Every routine so many times or more, in one type after the other.

    With ``cut`` triangles are cut into small parts, as large ones are.
    """
    rng, before = np.random.default_rng([seed, comm.size]), (HostOperations.tile, HostOperations.band)
    if cut:
        HostOperations.tile, HostOperations.band = 16, 0 if comm.size == 1 else 40
    with pb.Context(comm, engine="host") as ctx:
        for count in range(rounds):
            for number in rng.permutation(len(CALLS)).tolist():
                kind, name = CALLS[number]
                yield from kind(ctx, rng, name, DTYPES[(number + count) % len(DTYPES)], bands)
    HostOperations.tile, HostOperations.band = before


@pytest.mark.parametrize(
    ("nranks", "rounds", "seed"), [(1, 1, 0), (2, 2, 126), (4, 1, 9), *only_long((3, 1, 0))]
)
def test_random_calls(nranks, rounds, seed):
    """With these seeds they find C that symm from the right adds transposed."""
    run_mpi(calls, nranks, rounds=draws(rounds, long=60), seed=seed)


@pytest.mark.parametrize("nranks", [1, 4])
def test_larger_random_calls(nranks):
    """Larger than the parts that triangles are cut into, and than direct calls; or nothing at all."""
    run_mpi(calls, nranks, rounds=draws(1, long=20), bands=[(65, 100), (129, 200), (0, 2)], cut=True)


@pytest.mark.parametrize(
    ("nranks", "form"),
    [(3, "interleaved:2"), *only_long((2, "blocks:2"), (4, "blocks:2"), (5, "interleaved:3"))],
)
def test_random_calls_between_nodes(nranks, form):
    run_mpi(calls, nranks, rounds=draws(1, long=30), on_nodes=form)
