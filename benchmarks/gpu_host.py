# SPDX-License-Identifier: Apache-2.0
"""What a prepared product costs on the host's clock, next to the bare C call, a CUDA graph and nvmath."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from benchmarks.gpu_bench import WARM_UP, Bench, together
from benchmarks.gpu_devices import c_call
from benchmarks.gpu_report import C_CALL, CUBLASMP, summary
from reference.gpu import Contender

Maker = Callable[[], Contender]


def small_problem(scheme: str, n: int, ranks: int) -> Any:
    """Return an n × n × n product in bfloat16. Local."""
    import pblasmp as pb

    if scheme == "2d":
        grid = pb.Grid.squarest(ranks)
        return pb.MatmulProblem.gemm(n, n, n, grid, n // grid.npcol, dtype="bfloat16", order="C")
    make = {
        "allgather_matmul": pb.MatmulProblem.allgather_matmul,
        "matmul_reduce_scatter": pb.MatmulProblem.matmul_reduce_scatter,
        "matmul_allreduce": pb.MatmulProblem.matmul_allreduce,
    }[scheme]
    return make(n, n, n, ranks, "N", "T", dtype="bfloat16", order="C")


def nvmath_maker(bench: Bench, scheme: str, problem: Any, a: Any, b: Any) -> Maker:
    """Return what makes nvmath's Matmul of the same matrices. Local."""
    views = [bench.torch.view(x.local) for x in (a, b)]
    if scheme == "2d":
        return partial(bench.nvmath.block_cyclic, *views, problem.d.grid, problem.d.block[0])
    return partial(bench.nvmath.scheme, scheme, *views)


def time_calls(bench: Bench, scheme: str, n: int) -> None:
    """Time the calls themselves, of one small product. Collective."""
    problem = small_problem(scheme, n, bench.comm.size)
    a = bench.matrix(problem.a, 1, symmetric=scheme == "allgather_matmul")
    b, d = bench.matrix(problem.b, 2), bench.ctx.empty(problem.d)
    entries: dict[str, Any] = {}
    contenders: dict[str, Contender] = {}

    def add(name: str, make: Maker) -> None:
        def ready() -> Contender:
            contender = make()
            for _ in range(WARM_UP):
                contender.run()
            bench.device.wait()
            return contender

        bench.alive()
        contender, fault = together(bench.comm, ready)
        if fault:
            entries[name] = {"failed": fault}
        else:
            contenders[name], entries[name] = contender, {}

    add("plan()", partial(bench.planned, problem, a, b, d))
    if "plan()" in contenders:
        plan: Any = contenders["plan()"].run
        add("graph.replay()", lambda: Contender(plan.graph().replay))
    add(CUBLASMP, partial(bench.planned, problem, a, b, d, algo="default"))
    if CUBLASMP in contenders:
        add(C_CALL, lambda: Contender(c_call(contenders[CUBLASMP].run)))
    if bench.nvmath is not None:
        add("nvmath execute()", nvmath_maker(bench, scheme, problem, a, b))
    bench.alive()
    runs = {name: contender.run for name, contender in contenders.items()}
    times, fault = together(bench.comm, lambda: host_times(bench, runs))
    for name, run in runs.items():
        if fault:
            entries[name] = {"failed": fault}
            continue
        host = [t for each in bench.comm.allgather(times[name]) for t in each]
        entries[name] = {"us": median(host), "fastest_us": min(host), "calls": len(host)}
        device, broken = together(bench.comm, partial(bench.device.samples, bench.comm, run, bench.samples))
        if not broken:
            entries[name]["device_us"] = summary(bench.comm.allgather(device))["us"]
    for contender in reversed(contenders.values()):
        together(bench.comm, contender.close)
    bench.record("host", f"{scheme} {n}, bf16", entries)


def host_times(bench: Bench, runs: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return the times of many calls in microseconds, in turns of a few calls on an idle GPU. Collective."""
    rounds, calls = (10, 5) if bench.arguments.quick else (60, 10)
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(rounds):
        at = turn % max(1, len(names))
        for name in names[at:] + names[:at]:
            run, found = runs[name], times[name]
            bench.device.wait()
            bench.comm.Barrier()
            for _ in range(calls):
                start = time.perf_counter()
                run()
                found.append((time.perf_counter() - start) * 1e6)
    bench.device.wait()
    return times
