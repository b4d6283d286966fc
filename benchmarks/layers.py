# SPDX-License-Identifier: Apache-2.0
"""Time tensor-parallel products as users call them: ``mpirun -n 2 python3 benchmarks/layers.py``.

A layer without and with gradients, the function of pblasmp.torch, the plain call, and a plan of the same product;
compared with PyTorch's GEMM and NCCL's collective in eager mode, with gradients as a torch.autograd.Function. One rank
per GPU, bfloat16. Calls are queued in a row: the time of one is the device's time between them, so the host's time
counts where it is the longer one; "host" is that alone, of a small product. All ways take turns, round by round. NVLink
multicast is never used.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pblasmp as pb
from benchmarks.one_kernel import run_on_gpus

FORMS = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce", "matmul_allgather")
SHAPES = ((2048, 2048, 2048), (4096, 1792, 4096), (8192, 3584, 8192))
SMALL = (256, 256, 256)  # whose GPU time hides behind the host's
NCCL = "NCCL + cuBLAS"
CALLS, WARM_UP = 60, 12
TOKENS = 4  # numbers of tokens that take turns
MORE = 512  # calls with ever new numbers of tokens, fewer from one to the next by as many as there are ranks
TILE = 128  # rows of a tile of one kernel


class Case:
    """One product: this rank's tensors, and each way of computing it."""

    def __init__(self, ctx: pb.Context, form: str, tokens: int, outputs: int, inputs: int) -> None:
        import torch
        import torch.distributed as dist

        import pblasmp.torch as pt

        self.torch, self.dist, self.ctx, self.form = torch, dist, ctx, form
        size = ctx.size
        sums = form in ("matmul_reduce_scatter", "matmul_allreduce")
        how: dict[str, Any] = {
            "allgather_matmul": {"sequence_parallel": True},
            "matmul_reduce_scatter": {"sequence_parallel": True},
            "matmul_allreduce": {},
            "matmul_allgather": {"gather_output": True},
        }[form]
        kind = pt.RowParallelLinear if sums else pt.ColumnParallelLinear
        layer = kind(inputs, outputs, bias=False, ctx=ctx, **how).to("cuda", torch.bfloat16)
        weight = layer.weight
        w = (weight.to_local() if hasattr(weight, "to_local") else weight).detach()
        rows = tokens // size if form == "allgather_matmul" else tokens
        x = torch.randn(rows, inputs // size if sums else inputs, device="cuda", dtype=torch.bfloat16)
        needs = x.clone().requires_grad_()
        function, plain = getattr(pt, form), getattr(pb, form)
        y = layer(x)
        gradient = torch.ones_like(y)
        some = [x[: rows - 8 * turn] for turn in range(TOKENS)]
        turn = [0]

        def back() -> None:
            layer(needs).backward(gradient)
            weight.grad = needs.grad = None

        def changing() -> None:
            turn[0] += 1
            function(some[turn[0] % TOKENS], w, ctx)

        more = torch.randn(rows + MORE * size, x.shape[1], device="cuda", dtype=torch.bfloat16)
        left = [len(more)]
        for count in range(
            rows + TILE, len(more), TILE
        ):  # kernels for so many tiles are compiled once on a machine
            function(more[:count], w, ctx)

        def new() -> None:
            left[0] -= size
            function(more[: left[0]], w, ctx)

        self.runs: dict[str, Callable[[], Any]] = {
            "layer": self._without_gradients(lambda: layer(x)),
            "layer with gradients": lambda: layer(needs),
            "forward and backward": back,
            "pblasmp.torch": lambda: function(x, w, ctx),
            f"{TOKENS} token counts in turn": changing,
            "ever new token counts": new,
            "pblasmp": lambda: plain(x, w, ctx),
        }
        self.plan = pb.plan(plain, x, w, ctx)
        self.runs["plan"] = self.plan
        self.runs[NCCL] = self._nccl(x, w, tokens, outputs)
        self.runs[f"{NCCL}, forward and backward"] = self._nccl_back(needs, w, gradient)

    def _without_gradients(self, run: Callable[[], Any]) -> Callable[[], Any]:
        def quiet() -> None:
            with self.torch.no_grad():
                run()

        return quiet

    def _nccl(self, x: Any, w: Any, tokens: int, outputs: int) -> Callable[[], Any]:
        """Return the product by PyTorch's GEMM and NCCL's collective, in eager mode, into memory made before."""
        torch, dist, size = self.torch, self.dist, self.ctx.size
        empty = lambda *shape: torch.empty(shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        product = empty(tokens, w.shape[0])
        part, whole = empty(tokens // size, outputs), empty(size * x.shape[0], x.shape[1])
        gathered = empty(size * tokens, w.shape[0])
        return {
            "allgather_matmul": lambda: (
                dist.all_gather_into_tensor(whole, x),
                torch.mm(whole, w.t(), out=product),
            ),
            "matmul_reduce_scatter": lambda: (
                torch.mm(x, w.t(), out=product),
                dist.reduce_scatter_tensor(part, product),
            ),
            "matmul_allreduce": lambda: (torch.mm(x, w.t(), out=product), dist.all_reduce(product)),
            "matmul_allgather": lambda: (
                torch.mm(x, w.t(), out=product),
                dist.all_gather_into_tensor(gathered, product),
            ),
        }[self.form]

    def _nccl_back(self, x: Any, w: Any, gradient: Any) -> Callable[[], Any]:
        """Return the product and its gradients in the same way, as a function with gradients that a user writes."""
        torch, dist, size, rank, form = self.torch, self.dist, self.ctx.size, self.ctx.rank, self.form

        def gathered(part: Any) -> Any:
            whole = part.new_empty(size * part.shape[0], part.shape[1])
            dist.all_gather_into_tensor(whole, part)
            return whole

        def scattered(whole: Any) -> Any:
            part = whole.new_empty(whole.shape[0] // size, whole.shape[1])
            dist.reduce_scatter_tensor(part, whole)
            return part

        def summed(y: Any) -> Any:
            dist.all_reduce(y)
            return y

        plain: Callable[[Any], Any] = lambda y: y  # noqa: E731
        before, after, back, behind = {
            "allgather_matmul": (gathered, plain, plain, scattered),
            "matmul_reduce_scatter": (plain, scattered, gathered, plain),
            "matmul_allreduce": (plain, summed, plain, plain),
            "matmul_allgather": (plain, gathered, lambda g: g.chunk(size)[rank], summed),
        }[form]

        class Product(torch.autograd.Function):  # type: ignore[misc, name-defined]
            @staticmethod
            def forward(node: Any, x: Any, w: Any) -> Any:
                x = before(x)
                node.save_for_backward(x, w)
                return after(x @ w.t())

            @staticmethod
            def backward(node: Any, *gradients: Any) -> Any:
                x, w = node.saved_tensors
                g = back(gradients[0])
                return behind(g @ w), g.t() @ x

        w = w.clone().requires_grad_()
        gradient = gradient if form != "matmul_allgather" else torch.cat(gradient.chunk(size, 1))

        def run() -> None:
            Product.apply(x, w).backward(gradient)
            x.grad = w.grad = None

        return run

    def seconds(self, rounds: int, *, host: bool) -> dict[str, list[float]]:
        """Return the slowest rank's time of a call by each way, for each round, in which they take turns. Collective.

        Args:
            rounds: how many.
            host: it is the time of queueing a call on the host's clock, otherwise that of the device's clock.
        """
        once, found = self._on_host if host else self._on_device, dict[str, list[float]]()
        for _ in range(rounds):
            for name, run in self.runs.items():
                for _ in range(WARM_UP):
                    run()
                self.torch.cuda.synchronize()
                self.ctx.comm.barrier()
                found.setdefault(name, []).append(max(self.ctx.comm.allgather(once(run) / CALLS)))
        return found

    def _on_device(self, run: Callable[[], Any]) -> float:
        start, stop = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            run()
        stop.record()
        self.torch.cuda.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    def _on_host(self, run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        seconds = time.perf_counter() - start
        self.torch.cuda.synchronize()
        return seconds


def row(ctx: pb.Context, form: str, shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Return a row of the results, and print it. Collective."""
    case = Case(ctx, form, *shape)
    seconds = case.seconds(rounds, host=shape == SMALL)
    path = case.plan.report().path.split(":")[0]
    case.plan.close()
    tokens, outputs, inputs = shape
    if ctx.rank == 0:
        told = "; ".join(
            f"{name} {sorted(times)[len(times) // 2] * 1e6:.0f}" for name, times in seconds.items()
        )
        print(form, *shape, "host, us:" if shape == SMALL else "us:", told, f"({path})", flush=True)
    where = {"clock": "host" if shape == SMALL else "device", "algorithm": path}
    return {
        "case": {"form": form, "tokens": tokens, "outputs": outputs, "inputs": inputs, **where},
        "seconds": seconds, "flops": 2 * tokens * outputs * inputs,
    }  # fmt: skip


def main() -> None:
    def rows(ctx: pb.Context, options: argparse.Namespace) -> list[dict[str, Any]]:
        shapes = (SMALL, *options.shapes)
        return [row(ctx, form, shape, options.rounds) for form in options.forms for shape in shapes]

    run_on_gpus("layers", __doc__, FORMS, SHAPES, 7, rows)


if __name__ == "__main__":
    main()
