# SPDX-License-Identifier: Apache-2.0
"""What tests on ranks import: the runner of ranks, and a mark for tests that start ranks whatever this process is."""

from __future__ import annotations

from pathlib import Path

import pytest

from pblasmp.launch import surroundings
from pblasmp.testing import RanksFailedError, run_mpi, run_torch

__all__ = ["ROOT", "RanksFailedError", "run_mpi", "run_torch", "starts_ranks"]

ROOT = Path(__file__).parents[2]

starts_ranks = pytest.mark.skipif(surroundings() is not None, reason="starts its own ranks: not under mpirun")
