# SPDX-License-Identifier: Apache-2.0
"""Time the Cholesky factorization of examples/: ``mpirun -n 4 python benchmarks/cholesky.py -n 65536 --block 512``.

The same program in one run with the routines that "auto" takes and, on GPUs, with cuBLASMp's; then
``pb.linalg.cholesky``, also by cuSOLVERMp's routine if that is installed. The factor is checked against the matrix each
time, in some blocks.
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
from benchmarks import results
from benchmarks.cusolvermp import open_solver
from examples.cholesky import factor


def fill(ctx: pb.Context, a: pb.DistributedMatrix) -> None:
    """Write a symmetric positive definite matrix, where it is. Local."""
    xp = ctx.engine.xp
    rows, cols = (xp.asarray(each) for each in a.descriptor.global_indices(ctx.rank))
    apart = abs(rows[:, None] - cols[None, :])
    a.local[...] = xp.exp(apart * (-1 / 50)) + (apart == 0)


def residual(lower: pb.DistributedMatrix, a: pb.DistributedMatrix) -> float:
    """Return the largest entry of A - L L^T, in some blocks, over A's largest. Collective.

    Few blocks, since all of A besides A and L needs not fit into memory; the last ones depend on all the others.
    """
    block = a.descriptor.block[0]
    count = -(-a.shape[0] // block)
    worst = 0.0
    half, last = count // 2, count - 1
    for i, j in sorted({(last, last - 1), (last, 0), (last, half), (half, half - 1)}):
        rows, columns = (slice(x * block, (x + 1) * block) for x in (i, j))
        before = slice(0, j * block)
        found = pb.blas.trmm(lower[columns, columns], lower[rows, columns], side="R", uplo="L", op_a="T")
        if j:
            found = pb.matmul(lower[rows, before], lower[columns, before], found, op_b="T", beta=1)
        worst = max(worst, float((a[rows, columns] - found).norm("max")))
    return worst / float(a[:block, :block].norm("max"))


def contenders(ctx: pb.Context) -> dict[str, Callable[[pb.DistributedMatrix], object]]:
    """Return functions that replace a lower triangle by its factor. Local."""
    found: dict[str, Callable[[pb.DistributedMatrix], object]] = {"pblasmp": lambda x: factor(ctx, x)}
    if ctx.engine.device is not None:
        found["cublasmp"] = lambda x: factor(ctx, x, "cublasmp")
    found["pb.linalg.cholesky"] = lambda x: pb.linalg.cholesky(x, out=x)
    if ctx.engine.device is not None:
        solver = open_solver(ctx)
        if not isinstance(solver, str):
            found["cusolvermp"] = solver.cholesky
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=2048, help="order of the matrix")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2, help="factorizations by each; the fastest counts")
    results.add_option(parser)
    options = parser.parse_args()
    if options.n <= options.block:
        parser.error(f"-n: {options.n}, expected more than a block of {options.block}")
    with pb.Context() as ctx:
        d = pb.MatrixDescriptor(
            (options.n, options.n), (options.block, options.block), pb.Grid.squarest(ctx.size), order="F"
        )
        a, lower = ctx.empty(d), ctx.empty(d)
        fill(ctx, a)
        times: dict[str, list[float]] = {}
        for name, run in contenders(ctx).items():
            seconds = []
            try:
                for _ in range(options.rounds):
                    lower.local[...] = a.local
                    ctx.engine.synchronize()
                    ctx.comm.barrier()
                    start = time.perf_counter()
                    run(lower)
                    ctx.engine.synchronize()
                    ctx.comm.barrier()
                    seconds.append(time.perf_counter() - start)
            except pb.UnsupportedError as error:  # on every rank
                if ctx.rank == 0:
                    print(f"{name}: {error}", flush=True)
                continue
            times[name] = seconds
            report(ctx, name, options, min(seconds), residual(lower, a))
        directory = results.directory_of(options)
        if ctx.rank == 0 and directory is not None:
            grid = f"{d.grid.nprow}x{d.grid.npcol}"
            case = {"n": options.n, "block": options.block, "grid": grid}
            run = results.Run(
                benchmark="cholesky", date=results.today(), commit=results.this_commit(), ranks=ctx.size,
                gpus=0 if ctx.engine.device is None else ctx.size, **results.facts(ctx),
                options=results.options_of(options), reference="", sample="all",
                rows=[{"case": case, "seconds": times}],
            )  # fmt: skip
            results.save(run, directory)


def report(ctx: Any, name: str, options: argparse.Namespace, seconds: float, error: float) -> None:
    """Print a line, on rank 0."""
    if ctx.rank == 0:
        speed = options.n**3 / 3 / seconds / 1e12
        print(
            f"n = {options.n}, blocks of {options.block}, {ctx.size} ranks, {name}: {seconds:.3f} s, "
            f"{speed:.3f} TFLOP/s, residual {error:.1e}", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
