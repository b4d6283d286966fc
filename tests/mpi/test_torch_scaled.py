# SPDX-License-Identifier: Apache-2.0
"""8-bit products of PyTorch with delayed scaling: CPU ranks give what one process gives, under both launchers."""

from __future__ import annotations

import shutil

import pytest

from tests.helpers.mpi import run_mpi, run_torch, starts_ranks

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'pblasmp[torch]'")

CASES = "tests.helpers.torch_scaled_cases"


@pytest.mark.parametrize("nranks", [1, 2, 4])
def test_with_mpirun(nranks):
    run_mpi(f"{CASES}:everything", nranks, timeout=300)


def test_the_script_of_the_page():
    run_mpi(f"{CASES}:page", 4, timeout=300)


@starts_ranks
def test_with_torchrun():
    run_torch(f"{CASES}:everything", 2, timeout=300)


@starts_ranks
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("run", [run_mpi, run_torch])
def test_histories_are_loaded_on_other_numbers_of_ranks(tmp_path, run):
    run(f"{CASES}:save", 4, timeout=300, directory=str(tmp_path))
    for nranks in (2, 1):
        run(f"{CASES}:load", nranks, timeout=300, directory=str(tmp_path))


@starts_ranks
def test_with_fsdp():
    run_torch(f"{CASES}:fsdp", 4, timeout=300)


@starts_ranks
@pytest.mark.parametrize(("run", "backend"), [(run_mpi, "aot_eager"), (run_torch, "inductor")])
def test_compiled(run, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    run(f"{CASES}:compiled", 2, timeout=500, launch=True, backend=backend)  # PyTorch keeps meshes of before
