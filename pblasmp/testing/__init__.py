# SPDX-License-Identifier: Apache-2.0
"""Tests on MPI ranks from a plain pytest.

    from pblasmp.testing import run_mpi

    def sums(comm, offset):
        return comm.allreduce(comm.rank + offset)

    def test_sums():
        assert run_mpi(sums, 4, offset=1) == [10, 10, 10, 10]

``run_mpi`` is also a fixture of projects that ask for the plugin: ``pytest_plugins = ["pblasmp.pytest_plugin"]`` in
conftest.py.
"""

from __future__ import annotations

from .runner import RanksFailedError, run_mpi, run_torch

__all__ = ["RanksFailedError", "run_mpi", "run_torch"]
