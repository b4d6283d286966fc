# SPDX-License-Identifier: Apache-2.0
"""Split layers are clipped, saved, loaded and resharded as whole ones, with mpirun and with torchrun."""

from __future__ import annotations

import pytest

from tests.helpers.mpi import run_mpi, run_torch, starts_ranks

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'pblasmp[torch]'")

dcp = pytest.importorskip("torch.distributed.checkpoint")

CASES = "tests.helpers.torch_state_cases"
SIZES = ([12, 16], [13, 10], [7, 5])


def starter(name):
    return {"mpirun": run_mpi, "torchrun": run_torch}[name]


@starts_ranks
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as PyTorch warns one process
@pytest.mark.parametrize(
    ("launcher", "sizes"), [("torchrun", SIZES[0]), ("mpirun", SIZES[1]), ("mpirun", SIZES[2])]
)
def test_checkpoints_are_loaded_on_other_numbers_of_ranks(tmp_path, launcher, sizes):
    run = starter(launcher)
    run(f"{CASES}:save", 4, timeout=300, directory=str(tmp_path), sizes=sizes)
    run(f"{CASES}:load", 2, timeout=300, directory=str(tmp_path), sizes=sizes)
    run(f"{CASES}:load", 1, timeout=300, directory=str(tmp_path), sizes=sizes)
    plain = torch.nn.Linear(*sizes).double()
    state = {f"0.{name}": value for name, value in plain.state_dict().items()}
    dcp.load({"model": state}, checkpoint_id=str(tmp_path))
    expected = torch.load(tmp_path / "expected.pt")
    assert (plain.weight - expected["0.weight"]).abs().max() < 1e-12
    assert (plain.bias - expected["0.bias"]).abs().max() < 1e-12


@starts_ranks
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(launcher):
    starter(launcher)(f"{CASES}:clipped", 3, timeout=300)
