# SPDX-License-Identifier: Apache-2.0
"""What tests on ranks import: the runner of ranks, and a mark for tests that start ranks whatever this process is."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from pblasmp import testing
from pblasmp.launch import surroundings
from pblasmp.testing import RanksFailedError, run_torch

__all__ = ["ROOT", "RanksFailedError", "run_mpi", "run_torch", "starts_ranks"]

ROOT = Path(__file__).parents[2]

# Long forms take longer.
run_mpi = partial(testing.run_mpi, timeout=300.0) if os.environ.get("PBLASMP_TESTS") else testing.run_mpi

starts_ranks = pytest.mark.skipif(surroundings() is not None, reason="starts its own ranks: not under mpirun")
