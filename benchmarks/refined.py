# SPDX-License-Identifier: Apache-2.0
"""Compare ``pb.linalg.solve(a, b, refine="float32")`` with the same solve in float64 and in float32, in turns.

``mpirun -n 2 python -m benchmarks.refined -n 16384 32768`` runs it on CPU ranks or GPUs. It prints, and writes nothing.
By order and kind of matrix: the seconds of the solve in float64, of the refined one and of one in float32; how many
steps it was refined in; and how many times as fast it is as float64, the median over rounds in which all take turns.
The matrices are random with a larger diagonal: their condition, which the steps depend on, is small.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ranks import interleaved, machine, paired, print_facts, versions

KINDS = ("gen", "pos")


def time_order(ctx: Any, kind: str, n: int, options: argparse.Namespace) -> str:
    """Time one order, and return the line that says so. Collective."""
    import numpy as np
    from mpi4py import MPI

    import pblasmp as pb

    layout = {"block": min(options.block, n), "grid": pb.Grid(1, ctx.size), "order": "F"}
    a = ctx.random((n, n), seed=1, **layout)
    if kind == "pos":
        a += a.T
    a += n * ctx.eye(a.descriptor)
    b = ctx.random((n, options.right), seed=2, **layout)
    low, right = a.astype("float32"), b.astype("float32")
    size, steps = a.norm(), set()

    def solve(*given: Any, **how: Any) -> Any:
        x = pb.linalg.solve(*given, kind, lower=True, **how)
        ctx.engine.synchronize()
        return x

    contenders: dict[str, Callable[[], Any]] = {
        "float64": lambda: solve(a, b),
        "refined": lambda: solve(a, b, refine="float32", return_info=True),
        "float32": lambda: solve(low, right),
    }

    def check(name: str, found: Any) -> None:
        if name == "refined":
            found, info = found
            steps.add(info.iterations)
        if name == "float32":
            return
        error = (b - a @ found).norm() / (size * found.norm())
        if not error < np.finfo(np.float64).eps * n:
            raise SystemExit(f"{kind} of order {n}, {name}: the residual is {error:.1e}")

    seconds = interleaved(MPI.COMM_WORLD, contenders, options.pairs, settle=0, check=check)
    times = "".join(f"{median(seconds[name]):12.4f}" for name in contenders)
    return f"{kind:>5}{n:8}{times}{max(steps):7}{1 / paired(seconds, 'refined', 'float64'):9.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, nargs="+", default=[1000, 2000])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--right", type=int, default=1, help="right-hand sides")
    parser.add_argument("--pairs", type=int, default=5, help="rounds")
    options = parser.parse_args()
    from mpi4py import MPI

    import pblasmp as pb

    with pb.Context(MPI.COMM_WORLD) as ctx:
        if ctx.rank == 0:
            print_facts(machine(), versions(), {"engine": ctx.engine.name})
            names = "".join(f"{name:>12}" for name in ("float64", "refined", "float32"))
            print(f"{ctx.size} ranks, seconds\n{'':5}{'n':>8}{names}{'steps':>7}{'gain':>9}", flush=True)
        for kind in options.only:
            for n in options.n:
                line = time_order(ctx, kind, n, options)
                if ctx.rank == 0:
                    print(line, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
