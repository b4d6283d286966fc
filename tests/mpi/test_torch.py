# SPDX-License-Identifier: Apache-2.0
"""Layers of PyTorch split over CPU ranks give what one process gives, with mpirun and with torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.mpi import run_mpi, run_torch, starts_ranks

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'pblasmp[torch]'")

CASES = "tests.helpers.torch_cases"
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("nranks", [1, 2, 4])
def test_with_mpirun(nranks):
    run_mpi(f"{CASES}:everything", nranks, timeout=300)


@starts_ranks
@pytest.mark.parametrize("nranks", [2, 4])
def test_with_torchrun(nranks):
    run_torch(f"{CASES}:everything", nranks, timeout=300)


def test_what_users_call_is_documented():
    import pblasmp.torch

    page = (ROOT / "docs" / "torch.md").read_text()
    assert all(f":: pblasmp.torch.{name}" in page for name in pblasmp.torch.__all__)
    docs = {name: getattr(pblasmp.torch, name).__doc__ for name in pblasmp.torch.__all__}
    assert not [name for name, doc in docs.items() if "ollective over" not in doc and "Local" not in doc]


def test_a_temporary_tensor_lasts_as_long_as_what_is_over_its_memory():
    import torch

    from pblasmp.torch.operators import borrowed

    over = borrowed(torch.full((300, 300), 7.0))
    others = [torch.full((300, 300), 3.0) for _ in range(20)]
    assert (over == 7).all(), others


def test_what_is_missing_is_said():
    script = """
import sys
sys.modules["torch"] = None
try:
    import pblasmp.torch
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "pblasmp[torch]" in done.stdout
