# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/torch_transformer.py
"""Train a transformer block: heads and MLP are split over the ranks, tokens are split between the layers.

The losses equal those of one process. Runs on CPU ranks and on GPUs; under mpirun, or under torchrun:
torchrun --nproc-per-node 4 torch_transformer.py. benchmarks/transformer.py compares it with PyTorch's own styles.

Prints:
    a rank has 2 of 8 heads, 512 of 2048 hidden units and 32 of 128 tokens of each sequence
    the same losses as in one process: True
"""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import pblasmp as pb
import pblasmp.torch as pt
from pblasmp.tensor_parallel import shard

TOKENS, BATCH, WIDTH, HEADS, STEPS = 128, 2, 512, 8, 5


class Block(nn.Module):
    """Attention and MLP, each after a norm; x is tokens × batch × width."""

    def __init__(self, width, heads, bias=True):
        super().__init__()
        self.head_width = width // heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)
        self.up, self.down = nn.Linear(width, 4 * width, bias), nn.Linear(4 * width, width, bias)

    def forward(self, x):
        # q, k and v of a head are adjacent outputs, so each rank has whole heads
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, 3, self.head_width))
        q, k, v = heads.permute(3, 1, 2, 0, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.permute(2, 0, 1, 3).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def split(whole, mesh):
    """Return a copy of the block, split over the ranks."""
    column = pt.ColwiseParallel(input_layouts=Shard(0))
    row = pt.RowwiseParallel(output_layouts=Shard(0))
    plan = {"norms.*": pt.SequenceParallel(), "qkv": column, "out": row, "up": column, "down": row}
    return parallelize_module(copy.deepcopy(whole), mesh, plan)


def train(block, x, target, elements):
    """Return this rank's part of the loss of each step."""
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (block(x) - target).square().sum() / elements
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    if dist.is_torchelastic_launched():  # torchrun started this process
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    else:
        pt.init_process_group()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    with pb.Context() as ctx:
        torch.manual_seed(0)
        whole = Block(WIDTH, HEADS).to(device)
        x = torch.randn(TOKENS, BATCH, WIDTH).to(device)
        target = x.roll(1, 0)
        mine = shard(TOKENS, ctx.size, ctx.rank)
        block = split(whole, mesh)

        parts = train(block, x[mine], target[mine], x.numel())
        losses = [sum(step) for step in zip(*ctx.comm.allgather(parts), strict=True)]
        expected = train(whole, x, target, x.numel())
        if ctx.rank == 0:
            units = block.up.shard.stop - block.up.shard.start
            print(
                f"a rank has {HEADS // ctx.size} of {HEADS} heads, {units} of {4 * WIDTH} hidden units and "
                f"{mine.stop - mine.start} of {TOKENS} tokens of each sequence"
            )
            alike = all(abs(a - b) < 1e-4 * b for a, b in zip(losses, expected, strict=True))
            print(f"the same losses as in one process: {alike}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
