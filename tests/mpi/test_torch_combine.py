# SPDX-License-Identifier: Apache-2.0
"""Split layers with FSDP2, device meshes, styles, DTensors, torch.compile and torch.func, under both launchers."""

from __future__ import annotations

import shutil

import pytest

from tests.helpers.mpi import run_mpi, run_torch, starts_ranks

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'pblasmp[torch]'")

CASES = "tests.helpers.torch_combine_cases"
RUN = {"mpirun": run_mpi, "torchrun": run_torch}
pytestmark = starts_ranks


@pytest.mark.parametrize(("launcher", "nranks"), [("mpirun", 2), ("mpirun", 4), ("torchrun", 4)])
def test_together_with_what_pytorch_has(launcher, nranks):
    RUN[launcher](f"{CASES}:everything", nranks, timeout=300)


@pytest.mark.parametrize(
    ("launcher", "backend", "tokens"), [("mpirun", "aot_eager", [8, 4]), ("torchrun", "inductor", [8])]
)
def test_compiled(launcher, backend, tokens):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    RUN[launcher](f"{CASES}:compiled", 2, timeout=500, backend=backend, tokens=tokens)


def test_groups_of_mpi_without_a_process_group():
    run_mpi(f"{CASES}:halves", 4, timeout=300)
