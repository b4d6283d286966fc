# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/torch_transformer.py
"""A transformer block in training: heads and MLP split over the ranks, the tokens split between them.

The losses are those of one process. PyTorch's own tensor parallelism trains the same block, for its tokens per second.
Runs on CPU ranks and on GPUs; under mpirun, or under torchrun: torchrun --nproc-per-node 4 torch_transformer.py

Prints:
    a rank has 2 of 8 heads, 512 of 2048 hidden units and 32 of 128 tokens of each sequence
    the same losses as in one process: True
    tokens per second:
"""

from __future__ import annotations

import copy
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, parallel

import pblasmp as pb
import pblasmp.torch as pt
from pblasmp.tensor_parallel import shard

TOKENS, BATCH, WIDTH, HEADS, HIDDEN, STEPS = 128, 2, 512, 8, 2048, 5


class Block(nn.Module):
    """Attention and MLP, each after a norm; x is tokens × batch × width."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        # q, k and v of a head are neighbours among the outputs: a rank has whole heads
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, 3, WIDTH // HEADS))
        q, k, v = heads.permute(3, 1, 2, 0, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.permute(2, 0, 1, 3).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def split(whole, mesh, styles, sequence_parallel):
    """Return a copy of the block, split by ``styles``: PyTorch's module of them, or ours."""
    column = styles.ColwiseParallel(input_layouts=Shard(0))
    row = styles.RowwiseParallel(output_layouts=Shard(0))
    plan = {"norms.*": sequence_parallel, "qkv": column, "out": row, "up": column, "down": row}
    return parallel.parallelize_module(copy.deepcopy(whole), mesh, plan)


def train(block, x, target, elements):
    """Return this rank's part of the loss of each step, and the seconds of all but the first."""
    optimiser = torch.optim.AdamW(block.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        if step == 1:
            start = time.perf_counter()
        optimiser.zero_grad()
        loss = (block(x) - target).square().sum() / elements
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses, time.perf_counter() - start


if dist.is_torchelastic_launched():  # torchrun started this process
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
else:
    pt.init_process_group()

device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
with pb.Context(mesh) as ctx:
    torch.manual_seed(0)
    whole = Block().to(device)
    x = torch.randn(TOKENS, BATCH, WIDTH).to(device)
    target = x.roll(1, 0)
    mine = shard(TOKENS, ctx.size, ctx.rank)
    ours = split(whole, mesh, pt, pt.SequenceParallel())
    theirs = split(whole, mesh, parallel, parallel.SequenceParallel(sequence_dim=0, use_local_output=True))
    units = ours.up.shard.stop - ours.up.shard.start

    losses, seconds = zip(
        *(train(each, x[mine], target[mine], x.numel()) for each in (ours, theirs)), strict=True
    )
    losses = [sum(step) for step in zip(*ctx.comm.allgather(losses[0]), strict=True)]
    expected, _ = train(whole, x, target, x.numel())
    if ctx.rank == 0:
        print(
            f"a rank has {HEADS // ctx.size} of {HEADS} heads, {units} of {HIDDEN} hidden units and "
            f"{mine.stop - mine.start} of {TOKENS} tokens of each sequence"
        )
        alike = all(abs(a - b) < 1e-4 * b for a, b in zip(losses, expected, strict=True))
        print(f"the same losses as in one process: {alike}")
        rates = [(STEPS - 1) * TOKENS * BATCH / each for each in seconds]
        print(f"tokens per second: {rates[0]:.0f}, PyTorch's own tensor parallelism {rates[1]:.0f}")

dist.destroy_process_group()
