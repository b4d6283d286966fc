# SPDX-License-Identifier: Apache-2.0
"""Time the barrier behind cuBLASMp's overlapped products: ``mpirun -n 2 python3 benchmarks/cublasmp_barrier.py``.

Plans by "default" and "split_p2p" with the barrier that pblasmp queues behind each call and without it, and by "auto",
which takes neither. One rank per GPU, bfloat16. Calls are queued in a row, all plans in turns; the time of one is the
device's time between them, of the slowest rank. NVLink multicast is never used.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any
from unittest import mock

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pblasmp as pb
from benchmarks.one_kernel import run_on_gpus
from pblasmp.engines.gpu.cublasmp import faults

FORMS = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce")
SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 1792, 4096), (8192, 3584, 8192))
ALGORITHMS = ("default", "split_p2p")
CALLS, WARM_UP = 40, 8


def planned(ctx: pb.Context, form: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Return the plans of one product; why there is none, in its place. Collective."""
    import torch

    tokens, outputs, inputs = shape
    x = (tokens // ctx.size, inputs) if form == "allgather_matmul" else (tokens, inputs // ctx.size)
    w = (outputs, x[1])
    a, b = (torch.randn(of, device="cuda", dtype=torch.bfloat16) for of in (x, w))
    made: dict[str, Any] = {}
    for algo in ("auto", *ALGORITHMS):
        for barrier in (True, False)[: 1 if algo == "auto" else 2]:
            name = algo if barrier else f"{algo}, no barrier"
            needs = (lambda *_: False) if not barrier else faults.ends_before_peers_have_read
            with mock.patch.object(faults, "ends_before_peers_have_read", needs):
                try:
                    made[name] = pb.plan(getattr(pb, form), a, b, ctx, algo=algo)
                    made[name]()  # what is refused in the first run is refused by all ranks
                except pb.PblasmpError as refused:
                    ctx.check_open()
                    made[name] = str(refused).split(",")[0]
    return made


def seconds(ctx: pb.Context, plans: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Return the slowest rank's time of a call of each plan, for each round. Collective."""
    from torch import cuda

    found: dict[str, list[float]] = {name: [] for name in plans}
    for turn in range(rounds + 1):  # the first one warms up
        for name, plan in plans.items():
            for _ in range(WARM_UP):
                plan()
            cuda.synchronize()
            ctx.comm.barrier()
            start, stop = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            start.record()
            for _ in range(CALLS):
                plan()
            stop.record()
            cuda.synchronize()
            if turn:
                found[name].append(start.elapsed_time(stop) / 1e3 / CALLS)
    everyone = ctx.comm.allgather(found)
    return {name: [max(each) for each in zip(*(of[name] for of in everyone), strict=True)] for name in plans}


def row(ctx: pb.Context, form: str, shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Return a row of the results, and print it. Collective."""
    made = planned(ctx, form, shape)
    failed = {name: plan for name, plan in made.items() if isinstance(plan, str)}
    plans = {name: plan for name, plan in made.items() if name not in failed}
    times = seconds(ctx, plans, rounds)
    path = plans["auto"].report().path.split(":")[0]
    for plan in plans.values():
        plan.close()
    if ctx.rank == 0:
        told = [f"{name} {sorted(each)[len(each) // 2] * 1e6:.1f}" for name, each in times.items()]
        print(form, *shape, f"auto is {path}; us:", "; ".join(told), *failed.items(), flush=True)
    tokens, outputs, inputs = shape
    told = {"failed": failed} if failed else {}
    return {
        "case": {"form": form, "tokens": tokens, "outputs": outputs, "inputs": inputs, "algorithm": path},
        "seconds": times, "flops": 2 * tokens * outputs * inputs, **told,
    }  # fmt: skip


def main() -> None:
    def rows(ctx: pb.Context, options: argparse.Namespace) -> list[dict[str, Any]]:
        return [row(ctx, form, shape, options.rounds) for form in options.forms for shape in options.shapes]

    run_on_gpus("cublasmp_barrier", __doc__, FORMS, SHAPES, 15, rows)


if __name__ == "__main__":
    main()
