# SPDX-License-Identifier: Apache-2.0
# Run: python -m pytest examples/test_on_ranks.py
"""Test code that runs on MPI ranks with plain pytest, without mpirun. Copy this file and call your own functions.

Prints:
    4 passed
"""

from __future__ import annotations

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.testing import run_mpi


def product(comm, m, n, k):
    """Run on every rank: compute D = A B; return the shape of this rank's part, and all of D."""
    grid = pb.Grid.squarest(comm.size)
    with pb.Context(comm) as ctx:
        a = ctx.from_function(lambda i, j: i - j, pb.MatrixDescriptor((m, k), (2, 3), grid))
        b = ctx.from_function(lambda i, j: i + j, pb.MatrixDescriptor((k, n), (3, 2), grid))
        d = pb.matmul(a, b)
        return {"shape": d.local.shape, "whole": d.allgather()}


@pytest.mark.parametrize("nranks", [1, 2, 4])
def test_a_product(nranks):
    results = run_mpi(product, nranks, m=7, n=5, k=6)
    i, j, k = np.arange(7)[:, None], np.arange(5), np.arange(6)
    for result in results:
        np.testing.assert_array_equal(result["whole"], (i - k) @ (k[:, None] + j))
    assert sum(rows * cols for rows, cols in (result["shape"] for result in results)) == 7 * 5


def sums(comm, sizes):
    """Run on every rank: many cases in one call, each with its error or None."""
    for n in sizes:
        total = comm.allreduce(np.full(n, comm.rank + 1.0))
        expected = comm.size * (comm.size + 1) / 2
        yield f"n={n}", None if (total == expected).all() else f"{total}, expected {expected}"


def test_sums():
    run_mpi(sums, 4, sizes=[1, 10, 1000])
