# SPDX-License-Identifier: Apache-2.0
"""Time ``pb.linalg.eigh`` on GPUs beside cuSOLVER and cuSOLVERMp: ``mpirun -n 2 python -m benchmarks.eigenvalues_gpu``.

``--routine svd`` times ``pb.linalg.svd`` beside cuSOLVER on one GPU.

One rank per GPU, all eigenvalues and eigenvectors. cuSOLVER has one GPU, by CuPy, while the others wait; cuSOLVERMp is
called on all with its arguments prepared and a copy of A, which it overwrites. By order: the seconds, and the bytes of
GPU memory that the rank with the most has at the peak, A and the results included, for each of its n²/P numbers. The
ways take turns, and their results are checked. ``--only`` leaves out ways: for large orders a GPU lacks memory.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import pblasmp as pb
from benchmarks import results
from benchmarks.cusolvermp import Solver, open_solver
from pblasmp.engines.gpu.cusolvermp import METHODS

OURS, ONE_GPU, RAW = "pblasmp", "cuSOLVER on one GPU", "cuSOLVERMp"
NAMES = {OURS: "pblasmp", ONE_GPU: "cusolver", RAW: "cusolvermp"}
LOOK_SECONDS = 1e-3  # between two looks at the GPU's memory


class Peak:
    """The most memory of this rank's GPU that is in use meanwhile."""

    def __init__(self) -> None:
        import cupy

        self._device, self._ended, self.bytes = cupy.cuda.Device(), threading.Event(), 0

    def _look(self) -> None:
        import cupy

        with self._device:
            while not self._ended.is_set():
                free, total = cupy.cuda.runtime.memGetInfo()
                self.bytes = max(self.bytes, total - free)
                self._ended.wait(LOOK_SECONDS)

    @contextmanager
    def watching(self) -> Iterator[None]:
        watcher = threading.Thread(target=self._look)
        watcher.start()
        try:
            yield
        finally:
            self._ended.set()
            watcher.join()


def used_bytes(ctx: pb.Context) -> int:
    """Return how much of this rank's GPU memory is in use, unused blocks of pools given back. Local."""
    import cupy

    ctx.engine.synchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    free, total = cupy.cuda.runtime.memGetInfo()
    return int(total - free)


def on_one_gpu(ctx: pb.Context, a: pb.DistributedMatrix, routine: str) -> Callable[[], Any]:
    """Return cuSOLVER's computation of a matrix that rank 0 has whole. Collective."""
    import cupy

    whole = a.redistribute(grid=pb.Grid(1, 1), block=len(a)).local

    def run() -> Any:
        values = None
        if not ctx.rank and routine == "eigh":
            values = cupy.linalg.eigh(whole)[0].get()
        elif not ctx.rank:
            values = cupy.linalg.svd(whole, full_matrices=False)[1].get()
        return ctx.comm.bcast(values)

    return run


def contenders(
    ctx: pb.Context, a: pb.DistributedMatrix, solver: Solver | str, only: list[str], routine: str
) -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    """Yield the ways by name: what returns the way ready to run. Collective."""
    ways: dict[str, Callable[[], Callable[[], Any]]] = {
        OURS: lambda: lambda: pb.linalg.eigh(a)[0],
        ONE_GPU: partial(on_one_gpu, ctx, a, routine),
    }
    if routine == "svd":
        ways[OURS] = lambda: lambda: pb.linalg.svd(a).s
    elif isinstance(solver, Solver):
        ways[RAW] = lambda: partial(solver.eigenvalues, a)
    yield from ((name, make) for name, make in ways.items() if NAMES[name] in only)


def symmetric(ctx: pb.Context, n: int, options: argparse.Namespace) -> pb.DistributedMatrix:
    """Return a random matrix. Collective."""
    layout = {"block": min(options.block, -(-n // (4 * ctx.size))), "grid": pb.Grid.squarest(ctx.size)}
    a = ctx.random((n, n), seed=n, order="F", dtype=options.dtype, **layout)
    a += a.T
    return a


def time_order(
    ctx: pb.Context, solver: Solver | str, n: int, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the row of an order, if there is one on this rank. Collective."""
    a = symmetric(ctx, n, options)
    trace, size, eps = a.trace(), a.norm(), float(np.finfo(options.dtype).eps)
    empty = used_bytes(ctx) - a.local.nbytes
    seconds: dict[str, list[float]] = {}
    most: dict[str, float] = {}
    expected = None
    for turn in range(options.rounds + 1):
        for name, make in contenders(ctx, a, solver, options.only, options.routine):
            run = make()
            ctx.engine.synchronize()
            ctx.comm.barrier()
            peak = Peak()
            with ExitStack() as watch:
                if not turn:  # which may cost time
                    watch.enter_context(peak.watching())
                start = time.perf_counter()
                values = run()
                ctx.engine.synchronize()
                took = time.perf_counter() - start
            if turn or n > options.once:
                seconds.setdefault(name, []).append(max(ctx.comm.allgather(took)))
                if n > options.once and ctx.rank == 0:
                    print(f"n = {n} by {name}: {took:.1f} s", flush=True)
            if not turn:
                alone = name == ONE_GPU  # which has A as a whole besides its part
                held, numbers = (empty + a.local.nbytes, n * n) if alone else (empty, n * n / ctx.size)
                most[name] = max(ctx.comm.allgather((peak.bytes - held) / numbers))
            expected = values if expected is None else expected
            near = 20 * eps * n**0.5 * float(abs(expected).max())
            off = (
                abs(values.sum() - trace) if options.routine == "eigh" else abs(np.linalg.norm(values) - size)
            )
            if not (abs(values - expected).max() < near and off < n**0.5 * near):
                raise SystemExit(f"order {n} by {name}: wrong values")
            del run, values
            used_bytes(ctx)
        if n > options.once:
            break
    if ctx.rank == 0:
        told = "; ".join(
            f"{name} {median(times):.3f} s, {most[name]:.1f} bytes" for name, times in seconds.items()
        )
        print(f"{ctx.size} GPUs, {options.dtype}, n = {n}: {told}", flush=True)
        case = {"n": n, "dtype": options.dtype} | ({"routine": "svd"} if options.routine == "svd" else {})
        yield {"case": case, "seconds": seconds, "bytes": most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--routine", choices=["eigh", "svd"], default="eigh")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--only", nargs="+", choices=list(NAMES.values()), default=list(NAMES.values()))
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    parser.add_argument("--once", type=int, default=20000, help="orders above it run once")
    results.add_option(parser)
    options = parser.parse_args()
    with pb.Context(engine="cublasmp") as ctx:
        solver = open_solver(ctx)
        pb.linalg.eigh(symmetric(ctx, 2048, options))  # loads libraries and kernels
        if options.routine == "svd":
            pb.linalg.svd(symmetric(ctx, 2304, options))
        if isinstance(solver, Solver):
            one_gpu = METHODS[1]
            most, one_gpu.most = one_gpu.most, 0
            pb.linalg.eigh(
                symmetric(ctx, 2304, options)
            )  # also those of the check: another order, whose plan is not kept
            one_gpu.most = most
            solver.eigenvalues(symmetric(ctx, 2048, options))
        directory = results.directory_of(options)
        kinds = [each for each in (options.routine, options.dtype) if each not in ("eigh", "float64")]
        about = results.facts(ctx)
        kept = {key: getattr(options, key) for key in ("block", "rounds", "once")}
        for row in (row for n in options.n for row in time_order(ctx, solver, n, options)):
            if directory is not None:
                n = row["case"]["n"]  # large orders have files of their own
                own = [str(n)] if n > options.once else []
                name = "-".join(["eigenvalues_gpu", *kinds, *own])
                run = results.Run(
                    benchmark=name, date=results.today(), commit=results.this_commit(), ranks=ctx.size,
                    gpus=ctx.size, **about, options=kept, reference="", sample="all", rows=[row],
                )  # fmt: skip
                results.save(results.with_earlier(run, directory), directory)


if __name__ == "__main__":
    main()
