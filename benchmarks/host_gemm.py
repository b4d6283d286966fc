# SPDX-License-Identifier: Apache-2.0
"""Time the host engine next to ScaLAPACK and one NumPy GEMM: ``python benchmarks/host_gemm.py``.

It starts the ranks itself. Launch by launch: pblasmp with SciPy's OpenBLAS against Debian's pdgemm with
Debian's OpenBLAS (its logical block as shipped, and raised to 256) and one np.matmul on the same cores;
pblasmp with MKL as its local BLAS against MKL's pdgemm; pblasmp's peak memory.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.launches import Launches, NotFetchedError, add_options, is_rank
from benchmarks.ranks import (
    cores,
    interleaved,
    paired,
    sleeping_barrier,
)
from reference.scalapack import Flavor, ScaLAPACK

NRANKS = 4
LAUNCHES = ("debian", "mkl", "memory")


class Case(NamedTuple):
    """One product of float64 matrices: n × n times n × width."""

    n: int
    width: int
    ops: str
    grid: tuple[int, int]
    block: int

    def plain(self) -> dict[str, Any]:
        """Return the case as results have it; the width only if it is not n."""
        width = {} if self.width == self.n else {"width": self.width}
        grid = f"{self.grid[0]}x{self.grid[1]}"
        return {"n": self.n, **width, "ops": self.ops, "grid": grid, "block": self.block}

    def __str__(self) -> str:
        return f"{self.n:5d} {self.width:5d}  {self.ops}  {self.grid[0]}x{self.grid[1]}  {self.block:5d}"


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    grids = [tuple(map(int, grid.split("x"))) for grid in arguments.grid]
    for n in arguments.n:
        widths = arguments.width or [n]
        yield from itertools.starmap(
            Case, itertools.product([n], widths, arguments.ops, grids, arguments.block)
        )


def entries(i: Any, j: Any, seed: int) -> Any:
    """Small integers, so that every product is exact."""
    return ((i * (7 + seed) + j * 13 + i * j % 11) % 9 - 4).astype(float)


def stored(n: int, width: int, ops: str) -> tuple[int, int]:
    """Return the shape of B."""
    return (n, width) if ops[1] == "N" else (width, n)


class Work:
    """The matrices of one size and one pair of ops, and their product as NumPy makes it. Collective."""

    def __init__(self, comm: Any, n: int, width: int, ops: str) -> None:
        import numpy as np
        from threadpoolctl import ThreadpoolController

        self.ops, self.rank = ops, comm.rank
        i, (rows, cols) = np.arange(n), stored(n, width, ops)
        self.product = np.empty((n, width))
        if comm.rank == 0:
            self.a, self.b = entries(i[:, None], i, 0), entries(i[:rows, None], i[:cols], 1)
            self.op_a, self.op_b = (
                x.T if op == "T" else x for x, op in zip((self.a, self.b), ops, strict=True)
            )
            self.out = np.empty((n, width))
            self.threads = ThreadpoolController()
            self.numpy_gemm()
            self.product[:] = self.out
        comm.Bcast(self.product)

    def numpy_gemm(self) -> Any:
        """One GEMM on rank 0 with a thread for each core that the ranks have. Local."""
        import numpy as np

        with self.threads.limit(limits=min(cores(), NRANKS)):
            return np.matmul(self.op_a, self.op_b, out=self.out)


def time_case(
    comm: Any, ctx: Any, slk: ScaLAPACK, work: Work, case: Case, pairs: int, settle: float
) -> dict[str, Any]:
    """Time all contenders of this launch on one case. Collective over comm."""
    import numpy as np

    import pblasmp as pb

    n, width, block, (op_a, op_b) = case.n, case.width, (case.block, case.block), case.ops
    grid, context = pb.Grid(*case.grid), slk.grid(*case.grid)
    shapes = (n, n), stored(n, width, case.ops), (n, width)
    of_a, of_b, of_d = (pb.MatrixDescriptor(shape, block, grid) for shape in shapes)
    a, b = (
        ctx.from_function(lambda i, j, seed=seed: entries(i, j, seed), x)
        for seed, x in enumerate((of_a, of_b))
    )
    d = ctx.empty(of_d)
    index = np.ix_(*of_d.global_indices(comm.rank))
    desc_a, desc_b, desc_d = (
        slk.descriptor(context, x.shape, block, (0, 0), max(1, x.local_shape(comm.rank)[0]))
        for x in (of_a, of_b, of_d)
    )
    x, y = (np.asfortranarray(m.local) for m in (a, b))
    z = np.empty(d.local.shape, order="F")

    def pdgemm(logical_block: int | None = None) -> Any:
        if logical_block:
            slk.logical_block = logical_block
        slk.gemm(op_a, op_b, n, width, n, 1, x, desc_a, y, desc_b, 0, z, desc_d)
        return z

    contenders = {"pblasmp": lambda: pb.matmul(a, b, out=d, op_a=op_a, op_b=op_b).local}
    if slk.flavor == "mkl":
        contenders["pdgemm"] = pdgemm
    else:
        contenders["pdgemm"] = lambda: pdgemm(32)
        contenders["pdgemm-256"] = lambda: pdgemm(256)
        contenders["numpy"] = work.numpy_gemm

    def check(name: str, result: Any) -> None:
        if result is not None:
            if not np.array_equal(result, work.product if name == "numpy" else work.product[index]):
                raise SystemExit(f"{case}: {name} is wrong on rank {comm.rank}")
            result[...] = np.nan

    seconds = interleaved(comm, contenders, pairs, alone=["numpy"], settle=settle, check=check)
    slk.gridexit(context)
    ratios = {name: paired(seconds, name, "pblasmp") for name in contenders if name != "pblasmp"}
    return {"case": case.plain(), "seconds": seconds, "ratios": ratios}


def time_all(comm: Any, flavor: Flavor, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every case of one launch; rank 0 prints a row for each. Collective over comm."""
    import pblasmp as pb

    rows: list[dict[str, Any]] = []
    slk = ScaLAPACK(flavor, comm)
    blas = {"debian": "OpenBLAS", "mkl": "MKL"}[flavor]
    with pb.Context(comm, engine="host") as ctx:
        for (n, width, ops), group in itertools.groupby(
            cases(arguments), key=lambda case: (case.n, case.width, case.ops)
        ):
            work = Work(comm, n, width, ops)
            for case in group:
                settle = 0 if arguments.quick else arguments.settle
                result = time_case(comm, ctx, slk, work, case, arguments.pairs, settle)
                if comm.rank == 0:
                    if not rows:
                        names = "".join(f"{name:>12}" for name in result["ratios"])
                        print(f"\nlocal BLAS {blas}; time / pblasmp's, median of {arguments.pairs} pairs")
                        print(f"    n width  ops  grid block   pblasmp  GFLOP/s{names}")
                    taken = median(result["seconds"]["pblasmp"])
                    ratios = "".join(f"{ratio:12.2f}" for ratio in result["ratios"].values())
                    print(f"{case}  {taken * 1e3:6.1f}ms {2e-9 * n * n * width / taken:8.1f}{ratios}")
                rows.append(result)
    if comm.rank == 0:
        for name in rows[0]["ratios"]:
            ratios = [row["ratios"][name] for row in rows]
            ahead = sum(ratio > 1 for ratio in ratios)
            spread = f"{min(ratios):.2f} / {median(ratios):.2f} / {max(ratios):.2f}"
            print(f"{name}: min / median / max {spread}, pblasmp is faster in {ahead} of {len(ratios)}")
    return rows


class PeakMemory(threading.Thread):
    """Samples the proportional set size of some processes (shared pages count once); ``.bytes``: the peak."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(daemon=True)
        self.files = [Path(f"/proc/{pid}/smaps_rollup") for pid in pids]
        self.bytes = 0
        self.done = threading.Event()

    def now(self) -> int:
        lines = (line for file in self.files for line in file.read_text().splitlines())
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))

    def run(self) -> None:
        while not self.done.wait(0.005):
            self.bytes = max(self.bytes, self.now())


def measure_memory(comm: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare the peak of one product with its local parts plus one shared copy of A and B. Collective."""
    import pblasmp as pb

    pids = comm.allgather(os.getpid())
    rows: list[dict[str, Any]] = []
    if comm.rank == 0:
        print("\npeak memory of all ranks of the node, beyond that before the matrices were made (MB)")
        print("    n width  ops  grid block      peak    A, B, D + one copy of A and B    ratio")
    for case in (None, *cases(arguments)):  # the first one is a small product that loads the libraries
        n, width, ops, grid, block = case or (128, 128, "NN", (2, 2), 64)
        gc.collect()
        sleeping_barrier(comm)
        memory = PeakMemory(pids)
        if comm.rank == 0:
            before = memory.now()
            memory.start()
        sleeping_barrier(comm)
        with pb.Context(comm, engine="host") as ctx:
            shapes = (n, n), stored(n, width, ops)
            a, b = (ctx.empty(shape, block=block, grid=grid, dtype="float64") for shape in shapes)
            a.local[...], b.local[...] = 1, 2
            d = pb.matmul(a, b, op_a=ops[0], op_b=ops[1])
            sleeping_barrier(comm)  # the last sample is taken while everything is alive
            if comm.rank == 0:
                memory.bytes = max(memory.bytes, memory.now())
            sleeping_barrier(comm)
            if not (d.local == 2 * n).all():
                raise SystemExit(f"{case}: wrong on rank {comm.rank}")
            del a, b, d
        if comm.rank == 0:
            memory.done.set()
            memory.join()
            if case:
                peak, expected = memory.bytes - before, 8 * n * (2 * n + 3 * width)
                print(f"{case}  {peak / 1e6:8.1f}  {expected / 1e6:25.1f}  {peak / expected:16.2f}")
                rows.append({"case": case.plain(), "ratios": {"peak": peak / expected}})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, nargs="+", default=[2048, 4096], help="sizes of the matrices")
    parser.add_argument("--width", type=int, nargs="+", default=[], help="columns of B and D, by default n")
    parser.add_argument("--block", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--grid", nargs="+", default=["2x2", "4x1", "1x4"], help=f"grids of {NRANKS} ranks")
    parser.add_argument("--ops", nargs="+", default=["NN", "TN"])
    add_options(parser, pairs=9, settles=True)
    parser.add_argument("--only", choices=LAUNCHES, nargs="+", default=list(LAUNCHES), help="launches to do")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.n, arguments.block, arguments.grid, arguments.ops = [512], [64], ["2x2"], ["NN", "TN"]
    if is_rank(parser, arguments):
        rank_main(arguments)
        return
    launches, left_out = Launches("benchmarks.host_gemm", arguments), []
    for launch in arguments.only:
        how = {}
        if launch == "memory":
            how = {"reference": "A, B, D and one copy of A and B", "sample": "peak"}
        try:
            launches.run(launch, NRANKS, f"host_gemm-{launch}" + ("-thin" if arguments.width else ""), **how)
        except NotFetchedError as error:
            print(f"\nleft out: {error}")
            left_out.append(launch)
    if left_out:
        raise SystemExit(f"left out: {', '.join(left_out)}")


def rank_main(arguments: argparse.Namespace) -> None:
    """What a rank of one launch does. Collective over COMM_WORLD."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if arguments.rank_of == "memory":
        rows = measure_memory(comm, arguments)
    else:
        rows = time_all(comm, arguments.rank_of, arguments)
    if comm.rank == 0:
        arguments.rows.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
