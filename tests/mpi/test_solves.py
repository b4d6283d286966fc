# SPDX-License-Identifier: Apache-2.0
"""Refined solves, least squares of any rank, and warnings of ill-conditioned matrices, at their ends.

``test_factorizations.py`` has their cases at random.
"""

from unittest import mock

import numpy as np
import pytest

from pblasmp.engines.host import spectral_libraries
from tests.helpers import solve_cases as cases
from tests.helpers.factor_cases import TYPES
from tests.helpers.mpi import on_ranks, run_on_one_node
from tests.helpers.slow import draws


@pytest.mark.usefixtures("no_library")
@on_ranks(2)
def test_ends(ctx):
    for each in (cases.refinement_ends, cases.ranks_at_the_ends, cases.conditions_elsewhere):
        each(ctx, np.random.default_rng(7))


@pytest.mark.usefixtures("library")
@on_ranks(2, runner=run_on_one_node)
def test_least_squares_by_scalapack(ctx):
    rng = np.random.default_rng(17)
    with mock.patch.multiple(spectral_libraries.METHODS[0], most=0, singular=(0, 0)):
        for i in range(draws(3, long=60)):
            cases.ranked_case(ctx, rng, TYPES[i % 4])
        assert ctx.engine.mpi_libraries.get("ScaLAPACK"), "library: not called"
