# SPDX-License-Identifier: Apache-2.0
"""Time what moves a matrix next to copying it once: ``python benchmarks/redistribution.py``.

It starts the ranks itself. Every round times each operation, ``np.copyto`` into a warm buffer, which is as
fast as memory allows, and ``np.copy``, which like most operations here also makes the memory that it writes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import results
from benchmarks.ranks import (
    SETTLE_SECONDS,
    interleaved,
    machine,
    on_ranks,
    paired,
    print_facts,
    run_ranks,
    versions,
)

NRANKS = 4


def measure(
    comm: Any, n: int, pairs: int, directory: Path, engine: Any = "host", settle: float = SETTLE_SECONDS
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Time every operation on an n × n float64 matrix, and check its result. Collective over comm.

    Returns the times, and machine and versions.
    """
    import numpy as np

    import pblasmp as pb

    grid, column = pb.Grid.squarest(comm.size), pb.Grid(comm.size, 1)
    here = pb.MatrixDescriptor((n, n), (64, 64), grid)
    file, plain = directory / "matrix.npy", directory / "plain.npy"
    root = comm.rank == 0
    whole = np.arange(n * n, dtype=float).reshape(n, n) if root else None
    warm = np.zeros((n, n)) if root else None
    with pb.Context(comm, engine=engine) as ctx:
        a = ctx.scatter(whole, here)
        a.save(file)
        contenders = {
            "np.copyto": lambda: np.copyto(warm, whole) or warm,
            "np.copy": lambda: np.copy(whole),
            "scatter": lambda: ctx.scatter(whole, here),
            "gather": a.gather,
            "64 to 128 blocks": lambda: a.redistribute(replace(here, block=(128, 128))),
            f"{grid.nprow}x{grid.npcol} to {column.nprow}x1": lambda: a.redistribute(
                replace(here, grid=column)
            ),
            "np.save, fsync": lambda: _written(plain, whole),
            "save": lambda: a.save(file),
            "np.load": lambda: np.load(plain),
            "load": lambda: ctx.load(file, here),
        }
        if ctx.engine.device is not None:
            contenders = {
                name: partial(_finished, ctx, run)
                for name, run in (contenders | {"pinned, to GPUs": _from_pinned(a)}).items()
            }

        def check(name: str, result: Any) -> None:
            if isinstance(result, np.ndarray):
                right = np.array_equal(result, whole)
            elif result is None:
                right = name != "save" or not root or np.array_equal(np.load(file, mmap_mode="r"), whole)
            else:
                rows, cols = result.descriptor.global_indices(comm.rank)
                right = np.array_equal(result.on_host(), rows[:, None] * float(n) + cols)
            if not right:
                raise SystemExit(f"{name}: wrong on rank {comm.rank}")

        alone = ["np.copyto", "np.copy", "np.save, fsync", "np.load"]
        seconds = interleaved(comm, contenders, pairs, alone=alone, settle=settle, check=check)
        return seconds, results.facts(ctx)


def _written(path: Path, array: Any) -> None:
    """Write a file as ``save`` does: it is on disk when this returns."""
    import numpy as np

    with path.open("wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())


def _from_pinned(matrix: Any) -> Callable[[], Any]:
    """Return a copy of every rank's part from pinned memory: what the links to the GPUs carry."""
    import cupyx

    pinned = cupyx.empty_like_pinned(matrix.on_host())
    pinned[...] = matrix.on_host()

    def run() -> Any:
        matrix.local.set(pinned)
        return matrix

    return run


def _finished(ctx: Any, run: Callable[[], Any]) -> Any:
    found = run()
    ctx.engine.synchronize()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=8192, help="rows and columns of the matrix")
    parser.add_argument("--pairs", type=int, default=9, help="measured rounds")
    parser.add_argument("--directory", type=Path, help="where to save and load; default: a temporary one")
    parser.add_argument("--gpu", action="store_true", help="on GPUs, on ranks already running")
    parser.add_argument("--quick", action="store_true", help="a small matrix: does it run?")
    results.add_option(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.n = 512
    if not on_ranks():
        print_facts(machine(), versions())
        with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
            run_ranks("benchmarks.redistribution", [*sys.argv[1:], "--directory", scratch], NRANKS)
        return

    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    engine = "cublasmp" if arguments.gpu else "host"
    with ExitStack() as stack:
        directory = arguments.directory
        if directory is None:
            made = stack.enter_context(tempfile.TemporaryDirectory()) if comm.rank == 0 else None
            directory = Path(comm.bcast(made))
        settle = 0 if arguments.quick else SETTLE_SECONDS
        seconds, about = measure(comm, arguments.n, arguments.pairs, directory, engine, settle)
    if comm.rank == 0:
        report(arguments, comm.size, seconds, about)


def report(
    arguments: argparse.Namespace, size: int, seconds: dict[str, list[float]], about: dict[str, Any]
) -> None:
    """Print the results and write them."""
    n, copies = arguments.n, ("np.copyto", "np.copy")
    print(
        f"\n{n} x {n} float64, 64 x 64 blocks, {size} ranks; speed relative to copies made in the same round"
    )
    print(f"{'':18}      ms     GB/s    of np.copyto    of np.copy")
    rows = []
    for name, times in seconds.items():
        ratios = {copy: paired(seconds, copy, name) for copy in copies}
        rows.append({"case": {"operation": name, "n": n}, "seconds": {"time": times}, "ratios": ratios})
        shown = f"{ratios['np.copyto']:11.2f} {ratios['np.copy']:13.2f}"
        print(f"{name:18}{median(times) * 1e3:8.1f} {8e-9 * n * n / median(times):8.2f}    {shown}")
    directory = results.directory_of(arguments)
    if directory is not None:
        run = results.Run(
            benchmark="redistribution", date=results.today(), commit=results.this_commit(), ranks=size,
            gpus=size if arguments.gpu else 0, **about, options=results.options_of(arguments), reference="time",
            sample="all", rows=rows,
        )  # fmt: skip
        print(f"\nall times: {results.save(run, directory)}")


if __name__ == "__main__":
    main()
