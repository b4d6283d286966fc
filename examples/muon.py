# SPDX-License-Identifier: Apache-2.0
# Run: mpirun -n 2 python examples/muon.py
"""Muon's step on tensor-parallel weights: the momentum is orthogonalized in bfloat16 by Newton-Schulz iterations.

The ranks keep their shards of the weights, of the gradients and of the momentum, as PyTorch's DTensors; a product over
all ranks needs the whole of none. On two GPUs, with the sizes of a large MLP:

    mpirun -n 2 python examples/muon.py --width 8192 --hidden 28672 --tokens 2048 --steps 10

Prints:
    the update of the column-parallel weight has singular values from 0.6 to 1.3
    the update of the row-parallel weight has singular values from 0.6 to 1.3
    the loss has fallen
"""

from __future__ import annotations

import argparse
import time

import torch

import pblasmp as pb
import pblasmp.torch as pt

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=48)
parser.add_argument("--hidden", type=int, default=128)
parser.add_argument("--tokens", type=int, default=256)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

QUINTIC = 3.4445, -4.7750, 2.0315  # X <- a X + b X (X^T X) + c X (X^T X)^2


def orthogonalized(momentum: pb.DistributedMatrix, steps: int = 5) -> pb.DistributedMatrix:
    """Return U V^T for the singular value decomposition U S V^T of a matrix, nearly. Collective."""
    a, b, c = QUINTIC
    x = (momentum / (momentum.norm() + 1e-7)).astype("bfloat16")
    wide = x.shape[0] < x.shape[1]
    across = {"op_b": "T"} if wide else {"op_a": "T"}
    for _ in range(steps):
        gram = pb.matmul(x, x, **across)  # of the shorter side
        p = pb.matmul(gram, gram, gram, alpha=c, beta=b)
        x = pb.matmul(p, x, x, beta=a) if wide else pb.matmul(x, p, x, beta=a)
    return x


class Muon:
    """Keeps the momentum of weights that are DTensors, and updates them."""

    def __init__(self, ctx, weights, lr):
        self._ctx, self._weights, self._lr = ctx, weights, lr
        self._momenta = [torch.zeros_like(w) for w in weights]

    @torch.no_grad()
    def step(self):
        updates = []
        for weight, momentum in zip(self._weights, self._momenta, strict=True):
            momentum.mul_(0.95).add_(weight.grad)
            along = weight.grad.add(momentum, alpha=0.95)  # Nesterov's
            update = orthogonalized(self._ctx.from_dlpack_shards(along))  # over the shards, where they are
            axis = weight.placements[0].dim
            scale = max(1, weight.shape[0] / weight.shape[1]) ** 0.5
            weight.add_(pt.to_dtensor(update, axis).to(weight.dtype), alpha=-self._lr * scale)
            updates.append(update)
        return updates


def loss_of(up, down, x, y):
    return (down(torch.relu(up(x))) - y).square().mean()


with pb.Context() as ctx:
    device = "cpu" if ctx.engine.name == "host" else f"cuda:{ctx.engine.device.index}"
    torch.manual_seed(0)
    up = pt.ColumnParallelLinear(args.width, args.hidden, bias=False, ctx=ctx, device=device)
    down = pt.RowParallelLinear(args.hidden, args.width, bias=False, ctx=ctx, device=device)
    x = torch.randn(args.tokens, args.width, generator=torch.Generator().manual_seed(1)).to(device)
    y = torch.sin(x.cumsum(1))
    optimizer = Muon(ctx, [up.weight, down.weight], lr=0.02)

    losses, seconds = [], 0.0
    for _ in range(args.steps):
        loss = loss_of(up, down, x, y)
        up.weight.grad = down.weight.grad = None
        loss.backward()
        losses.append(loss.item())  # waits for a GPU
        start = time.perf_counter()
        updates = optimizer.step()
        ctx.engine.synchronize()
        seconds = time.perf_counter() - start

    for kind, update in zip(("column", "row"), updates, strict=True) if args.width <= 1000 else ():
        gram = pb.matmul(
            update, update, **({"op_b": "T"} if update.shape[0] < update.shape[1] else {"op_a": "T"})
        )
        values = pb.linalg.eigvalsh(gram.astype("float32")) ** 0.5
        if ctx.rank == 0:
            low, high = values.min(), values.max()
            near = low > 0.6 and high < 1.3
            words = "from 0.6 to 1.3" if near else f"from {low:.3f} to {high:.3f}"
            print(f"the update of the {kind}-parallel weight has singular values {words}")
    if ctx.rank == 0:
        print("the loss has fallen" if losses[-1] < 0.8 * losses[0] else f"losses: {losses}")
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}; the last step of Muon took {1e3 * seconds:.1f} ms")
