# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 4 python examples/tensor_parallel_mlp.py
"""An MLP split over ranks with PyTorch: tokens are split between the layers, weights within them.

Runs on CPU ranks and on GPUs; under mpirun, or under torchrun: torchrun --nproc-per-node 4 tensor_parallel_mlp.py

Prints:
    a rank holds 16 of 64 tokens, 32x16 of 128x16 weights and 16x32 of 16x128
    the loss falls from 0.5 to 0.1
    the same as in one process: True
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import pblasmp as pb
import pblasmp.torch as pt
from pblasmp.tensor_parallel import shard

TOKENS, WIDTH, HIDDEN, STEPS = 64, 16, 128, 40


class Whole(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, HIDDEN, device=device)
        self.down = torch.nn.Linear(HIDDEN, WIDTH, device=device)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Split(Whole):
    """The same MLP; each rank has part of the tokens and of the weights."""

    def __init__(self, whole, ctx):
        torch.nn.Module.__init__(self)
        self.up = pt.ColumnParallelLinear.from_linear(whole.up, ctx=ctx, sequence_parallel=True)
        self.down = pt.RowParallelLinear.from_linear(whole.down, ctx=ctx, sequence_parallel=True)


def train(model, x, target):
    """Return the sum of squares in the first and in the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(x) - target).square().sum()
        (loss / (TOKENS * WIDTH)).backward()  # the mean over all ranks' tokens
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


if dist.is_torchelastic_launched():  # torchrun started this process
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()

with pb.Context() as ctx:
    device = f"cuda:{ctx.engine.device.index}" if ctx.engine.device is not None else "cpu"
    torch.manual_seed(0)
    whole = Whole(device)
    split = Split(whole, ctx)
    x = torch.randn(TOKENS, WIDTH).to(device)
    target = torch.sin(3 * x.roll(1, -1))
    mine = shard(TOKENS, ctx.size, ctx.rank)
    shapes = [tuple(layer.weight.to_local().shape) for layer in (split.up, split.down)]  # of DTensors
    losses = ctx.comm.allgather(train(split, x[mine], target[mine]))
    expected = train(whole, x, target)
    if ctx.rank == 0:
        before, after = (sum(each) / (TOKENS * WIDTH) for each in zip(*losses, strict=True))
        up, down = shapes
        print(
            f"a rank holds {mine.stop - mine.start} of {TOKENS} tokens, {up[0]}x{up[1]} of {HIDDEN}x{WIDTH} weights "
            f"and {down[0]}x{down[1]} of {WIDTH}x{HIDDEN}"
        )
        print(f"the loss falls from {before:.1f} to {after:.1f}")
        print(
            f"the same as in one process: {abs(sum(after for _, after in losses) - expected[1]) < 1e-3 * expected[1]}"
        )

if dist.is_initialized():
    dist.destroy_process_group()
