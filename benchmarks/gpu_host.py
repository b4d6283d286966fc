# SPDX-License-Identifier: Apache-2.0
"""What calls cost on the host's clock: ``mpirun -n 2 python benchmarks/gpu_host.py``.

Many small calls of the level-3 routines, queued in a row on GPUs: on ever new sub-matrices, and repeated. For
``gpu_matmul.py`` also a prepared product, next to the bare C call, a CUDA graph and nvmath.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import results
from benchmarks.gpu_bench import WARM_UP, Bench, together
from benchmarks.gpu_devices import c_call
from benchmarks.gpu_report import C_CALL, CUBLASMP, summary
from pblasmp.layout.axis import Axis
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


# -- many small calls


N, BLOCK = 8192, 64
CALLS = {
    "matmul": "256 x 256 x 64", "trsm": "64 x 256", "syrk": "256 x 64", "geadd": "256 x 64",
}  # fmt: skip
"""The calls, and their sizes."""
KINDS = ("new", "repeated")
TURNS = 5  # of a routine: what is called first in a process takes longer


def small_calls(ctx: Any, n: int = N) -> dict[str, Callable[[int], Any]]:
    """Return functions that make a call on the i-th of many sub-matrices. Collective."""
    import pblasmp as pb

    nb = BLOCK
    a, b, c, t = (ctx.zeros((n, n), block=nb, order="F") for _ in range(4))
    t.local[...] = 1  # triangles of ones
    count = n // nb - 4
    at = [
        (nb * (i % count), nb * ((i * 7 + i // count) % count)) for i in range(4 * count)
    ]  # none comes twice
    tall = [slice(i, i + 4 * nb) for i, _ in at]
    thin = [slice(j, j + nb) for _, j in at]
    wide = [slice(j, j + 4 * nb) for _, j in at]
    x = [a[rows, cols] for rows, cols in zip(tall, thin, strict=True)]
    y = [b[rows, cols] for rows, cols in zip(thin, wide, strict=True)]
    z = [c[rows, cols] for rows, cols in zip(tall, wide, strict=True)]
    corners = [t[cols, cols] for cols in thin]
    squares = [c[rows, rows] for rows in tall]
    panels = [c[rows, cols] for rows, cols in zip(tall, thin, strict=True)]
    return {
        "matmul": lambda i: pb.matmul(x[i], y[i], z[i], alpha=-1, beta=1, out=z[i]),
        "trsm": lambda i: pb.blas.trsm(corners[i], y[i], uplo="L", out=y[i]),
        "syrk": lambda i: pb.blas.syrk(x[i], squares[i], uplo="L", alpha=-1, beta=1, out=squares[i]),
        "geadd": lambda i: pb.blas.geadd(x[i], panels[i], alpha=2, beta=1, out=panels[i]),
    }


def time_small_calls(ctx: Any, calls: int, n: int = N) -> list[dict[str, Any]]:
    """Return rows of host times, in seconds, of calls queued in a row on an idle GPU, routines in turns. Collective."""
    made, at = small_calls(ctx, n), 9
    times: dict[tuple[str, str], list[float]] = {(name, kind): [] for name in made for kind in KINDS}
    for call in made.values():
        for i in range(at):  # warm up
            call(i)
    for part in Axis.even(calls, min(calls, TURNS)).counts():
        for (name, kind), found in times.items():
            call = made[name]
            for _ in range(4):
                call(8)
            ctx.engine.synchronize()
            ctx.comm.barrier()
            for i in range(at, at + int(part)):
                start = time.perf_counter()
                call(i if kind == "new" else 8)
                found.append(time.perf_counter() - start)
            ctx.engine.synchronize()
        at += int(part)
    rows: list[dict[str, Any]] = [
        {
            "case": {"call": name, "size": CALLS[name], "ranks": ctx.size},
            "seconds": {kind: [max(ctx.comm.allgather(median(times[name, kind])))] for kind in KINDS},
        }
        for name in made
    ]
    whole = ctx.zeros((n, n), block=BLOCK, order="F")
    start = time.perf_counter()
    for i in range(calls):
        whole[i : i + 64, 64:128]
    view = (time.perf_counter() - start) / calls
    rows.append(
        {
            "case": {"call": "view", "size": "64 x 64", "ranks": ctx.size},
            "seconds": {"new": [max(ctx.comm.allgather(view))]},
        }
    )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table in Markdown. Local."""
    lines = [
        "| call, blocks of 64 | new sub-matrix, µs | repeated, µs |",
        "| --- | ---: | ---: |",
    ]
    for row in rows:
        new, repeated = (row["seconds"].get(kind) for kind in ("new", "repeated"))
        again = f"{repeated[0] * 1e6:.0f}" if repeated else ""
        lines.append(f"| {row['case']['call']} {row['case']['size']} | {new[0] * 1e6:.1f} | {again} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=N, help="order of the matrices")
    parser.add_argument("--calls", type=int, default=200, help="measured calls of each kind")
    results.add_option(parser)
    options = parser.parse_args()

    import pblasmp as pb

    with pb.Context() as ctx:
        rows = time_small_calls(ctx, options.calls, options.n)
        if ctx.rank == 0:
            print(f"host time of calls queued in a row, {ctx.size} ranks, {ctx.engine.machine}\n")
            print(table(rows), flush=True)
        directory = results.directory_of(options)
        if ctx.rank == 0 and directory is not None:
            gpus = 0 if ctx.engine.device is None else ctx.size
            run = results.Run(
                benchmark="gpu_host", date=results.today(), commit=results.this_commit(), ranks=ctx.size,
                gpus=gpus, **results.facts(ctx), options=results.options_of(options), reference="",
                sample=f"median of {options.calls} calls, of the slowest rank", rows=rows,
            )  # fmt: skip
            results.save(run, directory)


if __name__ == "__main__":
    main()
