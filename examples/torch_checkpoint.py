# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/torch_checkpoint.py
"""Train an MLP on four ranks, save it, load it on two and continue, with the result of a single process.

Under mpirun, or under torchrun: torchrun --nproc-per-node 4 torch_checkpoint.py

Prints:
    4 ranks: trained 10 steps and saved
    2 ranks: loaded and trained 10 more steps
    one process: loaded the weights into torch.nn.Linear
    the same as in one process: True
"""

from __future__ import annotations

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import pblasmp as pb
import pblasmp.torch as pt

WIDTH, HIDDEN = 16, 42  # four ranks have 11, 11, 11 and 9 hidden units; two have 21 each


def mlp(ctx=None):
    """Return an MLP, whole or split over the ranks of a context."""
    torch.manual_seed(0)
    if ctx is None:
        return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
    up, down = pt.ColumnParallelLinear(WIDTH, HIDDEN, ctx=ctx), pt.RowParallelLinear(HIDDEN, WIDTH, ctx=ctx)
    return nn.Sequential(up, nn.GELU(), down)


def train(model, optimizer, steps):
    device = next(model.parameters()).device
    for step in steps:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        loss = (model(x) - torch.sin(3 * x)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


if dist.is_torchelastic_launched():  # torchrun started this process
    dist.init_process_group("gloo")
else:
    pt.init_process_group()
rank = dist.get_rank()
path = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(path)

with pb.Context(engine="host") as ctx:
    model = mlp(ctx)
    optimizer = adam(model)
    train(model, optimizer, range(10))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path[0])
    if rank == 0:
        print(f"{ctx.size} ranks: trained 10 steps and saved")

pair = dist.new_group([0, 1])
if rank < 2:
    with pb.Context(pair, engine="host") as ctx:
        model = mlp(ctx)
        optimizer = adam(model)
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path[0], process_group=pair)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        loss = train(model, optimizer, range(10, 20))
        if rank == 0:
            print(f"{ctx.size} ranks: loaded and trained 10 more steps")

if rank == 0:
    whole = mlp()
    optimizer = adam(whole)
    train(whole, optimizer, range(10))
    loaded = mlp().state_dict()
    dcp.load(
        {"model": loaded},
        checkpoint_id=path[0],
        process_group=dist.new_group([0], use_local_synchronization=True),
    )
    print("one process: loaded the weights into torch.nn.Linear")
    alike = all(torch.allclose(loaded[name], value, atol=1e-6) for name, value in whole.state_dict().items())
    expected = train(whole, optimizer, range(10, 20))
    print(f"the same as in one process: {alike and abs(loss - expected) < 1e-4 * expected}")
    shutil.rmtree(path[0])

dist.destroy_process_group()
