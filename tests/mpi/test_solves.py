# SPDX-License-Identifier: Apache-2.0
"""Refined solves, least squares of any rank, and warnings of ill-conditioned matrices, on CPU ranks."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.host import spectral_libraries
from pblasmp.engines.host.mpi_libraries import SCALAPACK
from tests.helpers import solve_cases as cases
from tests.helpers.factor_cases import TYPES, panels_of
from tests.helpers.mpi import run_mpi, run_on_one_node
from tests.helpers.slow import draws, only_long
from tests.helpers.spectral_cases import library

RANKS = (1, 2, *only_long(3, 4, 5, 6))


def refined(comm, count):
    rng = np.random.default_rng(7 + comm.size)
    with pb.Context(comm, engine="host") as ctx:
        for i in range(count):
            yield cases.refined_case(ctx, rng, ("float64", "complex128")[i % 2])
        if ctx.size == 2:
            yield from cases.refinement_ends(ctx, rng)


@pytest.mark.parametrize("nranks", RANKS)
def test_refined(nranks):
    run_mpi(refined, nranks, count=draws(6, long=100))


def ranked(comm, count, libraries=False):
    rng, method = np.random.default_rng(17 + comm.size), spectral_libraries.METHODS[0]
    most, singular = (0, (0, 0)) if libraries else (method.most, method.singular)
    patched = mock.patch.multiple(method, most=most, singular=singular)
    with pb.Context(comm, engine="host") as ctx, patched:
        for i in range(count):
            yield cases.ranked_case(ctx, rng, TYPES[i % 4])
        if ctx.size == 2 and not libraries:
            yield from cases.ranks_at_the_ends(ctx, rng)
        if libraries:
            yield "library", None if ctx.engine.mpi_libraries.get("ScaLAPACK") else "not called"


@pytest.mark.parametrize("nranks", RANKS)
def test_least_squares_of_any_rank(nranks, monkeypatch, tmp_path):
    monkeypatch.setenv(SCALAPACK.environment, str(tmp_path))  # where no library is
    run_mpi(ranked, nranks, count=draws(5, long=100))


def test_least_squares_by_scalapack(monkeypatch):
    monkeypatch.setenv(SCALAPACK.environment, str(library()))
    run_on_one_node(ranked, 2, count=draws(3, long=60), libraries=True)


def conditions(comm, count):
    rng = np.random.default_rng(27 + comm.size)
    with pb.Context(comm, engine="host") as ctx:
        for i in range(count):
            with panels_of(ctx, 4) if rng.integers(2) else nullcontext():
                yield cases.conditions_case(ctx, rng, TYPES[i % 4])
        if ctx.size == 2:
            yield from cases.conditions_elsewhere(ctx, rng)


@pytest.mark.parametrize("nranks", RANKS)
def test_ill_conditioned(nranks):
    run_mpi(conditions, nranks, count=draws(8, long=150))
