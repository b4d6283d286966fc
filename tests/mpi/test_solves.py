# SPDX-License-Identifier: Apache-2.0
"""Refined solves, least squares of any rank, and warnings of ill-conditioned matrices, at their ends.

``test_factorizations.py`` has their cases at random.
"""

from unittest import mock

import numpy as np

import pblasmp as pb
from pblasmp.engines.host import spectral_libraries
from pblasmp.engines.host.mpi_libraries import SCALAPACK
from tests.helpers import solve_cases as cases
from tests.helpers.factor_cases import TYPES
from tests.helpers.mpi import run_mpi, run_on_one_node
from tests.helpers.slow import draws
from tests.helpers.spectral_cases import library


def ends(comm):
    with pb.Context(comm, engine="host") as ctx:
        for each in (cases.refinement_ends, cases.ranks_at_the_ends, cases.conditions_elsewhere):
            each(ctx, np.random.default_rng(7))


def test_ends(monkeypatch, tmp_path):
    monkeypatch.setenv(SCALAPACK.environment, str(tmp_path))  # where no library is
    run_mpi(ends, 2)


def ranked(comm, count):
    rng = np.random.default_rng(17)
    patched = mock.patch.multiple(spectral_libraries.METHODS[0], most=0, singular=(0, 0))
    with pb.Context(comm, engine="host") as ctx, patched:
        for i in range(count):
            cases.ranked_case(ctx, rng, TYPES[i % 4])
        assert ctx.engine.mpi_libraries.get("ScaLAPACK"), "library: not called"


def test_least_squares_by_scalapack(monkeypatch):
    monkeypatch.setenv(SCALAPACK.environment, str(library()))
    run_on_one_node(ranked, 2, count=draws(3, long=60))
