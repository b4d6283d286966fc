# SPDX-License-Identifier: Apache-2.0
"""Mixed calls for as long as you like: ``mpirun -n 4 python -m tests.chaos.soak --minutes 60``.

Memory, descriptors, threads and communicators must stay as they are after the first rounds, and all numbers right.
The status is 1 where they do not.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import pblasmp as pb
from tests.chaos.program import held, numbers, resident_kib

WARM_UP = 500  # rounds, until every buffer has its size and what is remembered of layouts is full
GROWTH_KIB = 8 << 10  # of memory that may be taken meanwhile: what the allocators keep


def round_of_calls(ctx: pb.Context, directory: Path, rng: np.random.Generator) -> None:
    """Make every kind of call once, on matrices in random layouts; raise where a number is wrong."""
    n = 200
    i = np.arange(n)
    whole = numbers(i[:, None], i[None, :]).astype(float)

    def layout() -> pb.MatrixDescriptor:
        grid = [pb.Grid.squarest(ctx.size), pb.Grid(1, ctx.size), pb.Grid(ctx.size, 1)][rng.integers(3)]
        block = tuple(int(b) for b in rng.integers(10, 90, 2))
        return pb.MatrixDescriptor((n, n), block, grid, order="CF"[rng.integers(2)])

    def check(found: pb.DistributedMatrix, expected: np.ndarray) -> None:
        rows, cols = found.descriptor.global_indices(ctx.rank)
        assert np.array_equal(found.local, expected[np.ix_(rows, cols)]), f"wrong on rank {ctx.rank}"

    a = ctx.from_function(numbers, layout())
    check(a.redistribute(layout()), whole)
    check(ctx.scatter(whole if ctx.rank == 0 else None, layout()), whole)
    assert np.array_equal(a.allgather(), whole)
    for algo in ("auto", "panels", "shared", "stationary"):
        check(pb.matmul(a, a, algo=algo, redistribute=True), whole @ whole)
    with pb.plan_matmul(a, a, redistribute=True) as plan:
        for _ in range(3):
            check(plan(), whole @ whole)
    check(pb.syrk(a, redistribute=True), np.tril(whole @ whole.T))
    part = np.asarray(whole[:, : 8 * ctx.size], np.float32)
    mine = part[:, 8 * ctx.rank : 8 * ctx.rank + 8]
    gathered = pb.matmul_allreduce(np.ascontiguousarray(mine), np.ascontiguousarray(mine), ctx)
    assert np.array_equal(gathered, part @ part.T)
    a.save(directory / "a.npy")
    check(ctx.load(directory / "a.npy", layout()), whole)
    try:
        ctx.zeros(None if ctx.rank == ctx.size - 1 else a.descriptor)  # type: ignore[arg-type]
    except pb.ArgumentError:
        pass
    else:
        raise AssertionError("a bad argument was taken")
    with pb.Context(ctx.comm, engine="host") as inner:
        check(inner.from_function(numbers, a.descriptor), whole)


def main() -> int:
    parser = argparse.ArgumentParser(description="Mixed calls for as long as you like.")
    parser.add_argument("--minutes", type=float, default=60.0)
    arguments = parser.parse_args()
    world = MPI.COMM_WORLD
    rng = np.random.default_rng(0)  # the same on all ranks
    end = time.monotonic() + 60 * arguments.minutes
    directory = Path(world.bcast(tempfile.mkdtemp(prefix="pblasmp-soak-") if world.rank == 0 else None))
    rounds, before = 0, (0, 0, 0)
    with pb.Context(engine="host") as ctx:
        while world.bcast(time.monotonic() < end) or rounds <= WARM_UP:
            round_of_calls(ctx, directory, rng)
            rounds += 1
            if rounds == WARM_UP:
                gc.collect()
                before = (*held(), resident_kib())
        gc.collect()
        after = (*held(), resident_kib())
    grown = after[:2] > before[:2] or after[2] > before[2] + GROWTH_KIB
    print(
        f"rank {world.rank}: {rounds} rounds; descriptors, threads, KiB: {before}, then {after}"
        + (": GROWN" if grown else ""),
        flush=True,
    )
    world.Barrier()
    if world.rank == 0:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
    return int(world.allreduce(grown, MPI.LOR))


if __name__ == "__main__":
    sys.exit(main())
