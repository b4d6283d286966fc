# SPDX-License-Identifier: Apache-2.0
"""``algo`` and ``backward_algo`` of PyTorch's functions, layers and styles on CPU ranks, under both launchers."""

from __future__ import annotations

import pytest

from tests.helpers.mpi import run_mpi, run_torch, starts_ranks

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'pblasmp[torch]'")

CASES = "tests.helpers.torch_algo_cases"


@pytest.mark.parametrize("nranks", [2, 4])
def test_with_mpirun(nranks):
    run_mpi(f"{CASES}:everything", nranks, timeout=300)


@starts_ranks
def test_with_torchrun():
    run_torch(f"{CASES}:everything", 2, timeout=300)


def test_algorithms_that_refuse():
    run_mpi(f"{CASES}:refuses", 2)


def test_measuring_in_the_first_pass(tmp_path):
    run_mpi(f"{CASES}:measures", 2, file=str(tmp_path / "tuning.json"))


@starts_ranks
def test_compiled():
    run_mpi(f"{CASES}:compiled", 2, timeout=500, launch=True, backend="aot_eager")
