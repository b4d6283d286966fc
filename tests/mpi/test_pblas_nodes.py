# SPDX-License-Identifier: Apache-2.0
"""PBLAS's names where no call is direct: between nodes, compared with the same call on one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from mpi4py import MPI

import pblasmp as pb
from pblasmp import pblas
from pblasmp.pblas.routine_functions import DTYPE
from pblasmp.pblas.vector_functions import ROUTINES as VECTORS
from tests.helpers.cases import first, numbers
from tests.helpers.mpi import run_mpi
from tests.helpers.pblas_cases import arguments, differing, held, options, vectors

SINGLE_PLACE = (0, 0)


def names():
    """The routines of level 1 that make numbers, and swap, by their full names, in double precision."""
    for full, routine in VECTORS.items():
        letter = "z" if "z" in full[1:3] else full[1]
        if letter in "dz" and (routine.numbers or routine.name == "swap"):
            yield full, routine, DTYPE[letter]


def alike(comm, shape):
    """What the table of calls has not: numbers, and swap, on the grid and on one process; and least squares."""
    rng = np.random.default_rng(5)
    with pb.Context(comm, engine="host") as ctx, pb.Context(MPI.COMM_SELF, engine="host") as alone:
        ictxt, single = pblas.gridinit(ctx, "Row", *shape), pblas.gridinit(alone, "Row", 1, 1)
        place = pblas.gridinfo(ictxt)[2:]
        for full, routine, dtype in sorted(names(), key=lambda each: each[0]):
            values = options(routine, rng, dtype)
            values |= {"n": max(1, values["n"]), **dict.fromkeys(routine.numbers)}
            xs = vectors(routine, rng, shape, values, dtype)
            ones = {name: replace(x, grid=(1, 1), source=(0, 0)) for name, x in xs.items()}
            expected = {name: x.local(SINGLE_PLACE) for name, x in ones.items()}
            found = {name: x.local(place) for name, x in xs.items()}
            call = getattr(pblas, full)
            told = call(*arguments(routine, values, single, ones, expected, SINGLE_PLACE))
            every = comm.allgather(call(*arguments(routine, values, ictxt, xs, found, place)))
            near = told is None or any(np.allclose(each, told, rtol=1e-14) for each in every)
            wrong = [None if near else f"{every}, expected {told} where the vector is"]
            for name, x in xs.items():
                rows, _ = ones[name].indices(SINGLE_PLACE)
                wanted = x.local(place, expected[name][: len(rows)])
                wrong.append(differing(found[name], wanted, 1e-12 * np.abs(wanted).max(initial=1)))
            yield f"{full} {values} {xs}", first(*wrong)
        for letter, trans in (("d", "N"), ("d", "T"), ("z", "N"), ("z", "C")):
            for m, n in ((3, 9), (9, 3)):
                yield least_squares(rng, ictxt, shape, place, letter, trans, m, n)
        pblas.gridexit(single)
        pblas.gridexit(ictxt)


def least_squares(rng, ictxt, shape, place, letter, trans, m, n):
    a = replace(held(rng, shape, (m, n), DTYPE[letter]), whole=numbers(rng, (m, n), DTYPE[letter]), at=(1, 1))
    b = replace(a, whole=numbers(rng, (max(m, n), 4), DTYPE[letter]), shape=(max(m, n), 4))
    a, b = (replace(x, block=(2, 2), source=(0, 0)) for x in (a, b))
    op = a.whole if trans == "N" else a.whole.conj().T
    right = b.whole[: len(op)]
    whole = b.whole.copy()
    whole[: op.shape[1]] = np.linalg.lstsq(op, right, None)[0]
    x, y = a.local(place), b.local(place)
    at = [each for held, array in ((a, x), (b, y)) for each in (array, 1, 1, held.desc(ictxt, place))]
    getattr(pblas, f"p{letter}gels")(trans, m, n, 4, *at, np.zeros(1000, DTYPE[letter]), 1000, None)
    rows = b.indices(place)[0] < op.shape[1]
    mine = np.flatnonzero(rows)
    return f"p{letter}gels {trans} {m} {n}", differing(y[mine], b.local(place, whole)[mine], 1e-12)


def test_names_between_nodes():
    """They find p?ger, and the least solution for complex matrices, which factors out of place had conjugated."""
    run_mpi(alike, 2, on_nodes="blocks:2", shape=(2, 1))
