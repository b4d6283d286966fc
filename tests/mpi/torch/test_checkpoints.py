# SPDX-License-Identifier: Apache-2.0
"""Split layers are clipped, saved, loaded and resharded as whole ones, with mpirun and with torchrun."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import pblasmp as pb
import pblasmp.torch as pt
from tests.helpers.mpi import run_mpi, run_torch, starts_ranks
from tests.helpers.torch_ranks import compare, host

pytestmark = starts_ranks

SIZES = (
    (12, 16),
    (13, 10),
    (7, 5),
)  # inputs and hidden units: in the second shards differ, in the last one is empty


def whole_model(sizes: tuple[int, int], seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    width, hidden = sizes
    return nn.Sequential(
        nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width), nn.LayerNorm(width)
    ).double()


def split_model(whole: nn.Sequential, ctx: pb.Context) -> nn.Sequential:
    return nn.Sequential(
        pt.ColumnParallelLinear.from_linear(whole[0], ctx=ctx),
        nn.GELU(),
        pt.RowParallelLinear.from_linear(whole[2], ctx=ctx),
        nn.LayerNorm(whole[3].normalized_shape).double(),
    )


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train with clipping; return the norms that were clipped."""
    norms = []
    for step in steps:
        width = model[-1].normalized_shape[0]
        data = torch.Generator().manual_seed(step)
        x = torch.randn(6, width, dtype=torch.float64, generator=data)
        optimizer.zero_grad()
        (model(x) - x.roll(1)).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(split_only(model), 0.5)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
    return norms


def split_only(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if not name.startswith("3.")]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def compare_models(split: nn.Module, whole: nn.Module) -> None:
    for (name, got), expected in zip(split.named_parameters(), whole.parameters(), strict=True):
        full = got.full_tensor() if isinstance(got, DTensor) else got
        compare(name, full, expected, 1e-12)


def save(comm: Any, directory: str, sizes: tuple[int, int]) -> None:
    """Train two steps, clipped, and save; the same in one process for whoever loads it."""
    with host(comm) as ctx:
        whole = whole_model(sizes)
        split = split_model(whole, ctx)
        optimizers = [optimizer_of(each) for each in (whole, split)]
        expected, norms = (
            trained(model, opt, range(2)) for model, opt in zip((whole, split), optimizers, strict=True)
        )
        assert norms == pytest.approx(expected, rel=1e-12)
        assert len(set(ctx.comm.allgather(norms[0]))) == 1
        compare_models(split, whole)
        model_state, optimizer_state = get_state_dict(split, optimizers[1])
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
        if ctx.rank == 0:
            torch.save(whole.state_dict(), Path(directory) / "expected.pt")
            torch.save(optimizers[0].state_dict(), Path(directory) / "expected_optimizer.pt")
        ctx.comm.barrier()


def load(comm: Any, directory: str, sizes: tuple[int, int]) -> None:
    """Load into fresh layers on any number of ranks, and train on as one process does."""
    with host(comm) as ctx:
        whole = whole_model(sizes, seed=5)
        split = split_model(whole, ctx)
        optimizers = [optimizer_of(each) for each in (whole, split)]
        whole.load_state_dict(torch.load(Path(directory) / "expected.pt"))
        optimizers[0].load_state_dict(torch.load(Path(directory) / "expected_optimizer.pt"))
        model_state, optimizer_state = get_state_dict(split, optimizers[1])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as PyTorch warns on one rank
            dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
        set_state_dict(split, optimizers[1], model_state_dict=model_state, optim_state_dict=optimizer_state)
        compare_models(split, whole)
        expected, norms = (
            trained(model, opt, range(2, 5)) for model, opt in zip((whole, split), optimizers, strict=True)
        )
        assert norms == pytest.approx(expected, rel=1e-12)
        compare_models(split, whole)
        full = get_model_state_dict(split, options=StateDictOptions(full_state_dict=True))
        for name, values in whole.state_dict().items():
            assert not isinstance(full[name], DTensor)
            compare(name, full[name], values, 1e-12)


def clipped(comm: Any) -> None:
    """Norms of every order are those of the whole model; clip_grad_value_ clips alike."""
    with host(comm) as ctx:
        for sizes in SIZES:
            whole = whole_model(sizes)
            split = split_model(whole, ctx)
            x = torch.randn(6, sizes[0], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            for model in (whole, split):
                model(x).square().sum().backward()
            for order in (2.0, 1.0, float("inf")):
                expected, norm = (
                    nn.utils.get_total_norm([p.grad for p in split_only(model)], order)
                    for model in (whole, split)
                )
                norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
                assert norm.item() == pytest.approx(expected.item(), rel=1e-12)


# -- the tests


def starter(name):
    return {"mpirun": run_mpi, "torchrun": run_torch}[name]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as PyTorch warns one process
@pytest.mark.parametrize(
    ("launcher", "sizes"), [("torchrun", SIZES[0]), ("mpirun", SIZES[1]), ("mpirun", SIZES[2])]
)
def test_checkpoints_are_loaded_on_other_numbers_of_ranks(tmp_path, launcher, sizes):
    run = starter(launcher)
    run(save, 4, timeout=300, directory=str(tmp_path), sizes=sizes)
    run(load, 2, timeout=300, directory=str(tmp_path), sizes=sizes)
    run(load, 1, timeout=300, directory=str(tmp_path), sizes=sizes)
    plain = torch.nn.Linear(*sizes).double()
    state = {f"0.{name}": value for name, value in plain.state_dict().items()}
    dcp.load({"model": state}, checkpoint_id=str(tmp_path))
    expected = torch.load(tmp_path / "expected.pt")
    assert (plain.weight - expected["0.weight"]).abs().max() < 1e-12
    assert (plain.bias - expected["0.bias"]).abs().max() < 1e-12


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(launcher):
    starter(launcher)(clipped, 3, timeout=300)
