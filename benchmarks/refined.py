# SPDX-License-Identifier: Apache-2.0
"""Compare ``pb.linalg.solve(a, b, refine="float32")`` and "tf32" with the solve in float64 and in float32, in turns.

``mpirun -n 2 python -m benchmarks.refined -n 16384 32768`` runs it on CPU ranks or GPUs. By order and kind of matrix:
the seconds of the solve in float64, of the refined ones and of one in float32; how many steps they were refined in; and
how many times as fast they are as float64, the median over rounds in which all take turns. The matrices are random with
a larger diagonal: their condition, which the steps depend on, is small.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import results
from benchmarks.ranks import interleaved, machine, paired, print_facts, versions

KINDS = ("gen", "pos")


REFINED = {"refined": "float32", "refined from TF32": "tf32"}


def time_order(ctx: Any, kind: str, n: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time one order. Collective."""
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
    size, steps = a.norm(), dict.fromkeys(REFINED, 0)

    def solve(*given: Any, **how: Any) -> Any:
        x = pb.linalg.solve(*given, kind, lower=True, **how)
        ctx.engine.synchronize()
        return x

    contenders: dict[str, Callable[[], Any]] = {
        "float64": lambda: solve(a, b),
        **{
            name: lambda of=of: solve(a, b, refine=of, return_info=True)
            for name, of in REFINED.items()
            if ctx.engine.device is not None or of != "tf32"
        },
        "float32": lambda: solve(low, right),
    }

    def check(name: str, found: Any) -> None:
        if name in REFINED:
            found, info = found
            if info.fallback:
                raise SystemExit(f"{kind} of order {n}, {name}: {info.fallback}")
            steps[name] = info.iterations
        if name == "float32":
            return
        error = (b - a @ found).norm() / (size * found.norm())
        if not error < np.finfo(np.float64).eps * n:
            raise SystemExit(f"{kind} of order {n}, {name}: the residual is {error:.1e}")

    seconds = interleaved(MPI.COMM_WORLD, contenders, options.pairs, settle=0, check=check)
    case = {
        "kind": kind,
        "n": n,
        "steps": ", ".join(str(steps[name]) for name in REFINED if name in contenders),
    }
    ratios = {name: paired(seconds, name, "float64") for name in REFINED if name in contenders}
    return {"case": case, "seconds": seconds, "ratios": ratios}


def shown(row: Any) -> str:
    """Return a row as a line."""
    times = "; ".join(f"{name} {median(each):.4f}" for name, each in row["seconds"].items())
    gains = ", ".join(f"{1 / ratio:.2f}" for ratio in row["ratios"].values())
    return f"{row['case']['kind']} {row['case']['n']}: {times}; steps {row['case']['steps']}; gains {gains}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, nargs="+", default=[1000, 2000])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--right", type=int, default=1, help="right-hand sides")
    parser.add_argument("--pairs", type=int, default=5, help="rounds")
    results.add_option(parser)
    options = parser.parse_args()
    from mpi4py import MPI

    import pblasmp as pb

    with pb.Context(MPI.COMM_WORLD) as ctx:
        about, rows, directory = results.facts(ctx), [], results.directory_of(options)
        if ctx.rank == 0:
            print_facts(machine(), versions(), {"engine": ctx.engine.name})
        for kind, n in itertools.product(options.only, options.n):
            rows.append(time_order(ctx, kind, n, options))
            if ctx.rank == 0:
                print(shown(rows[-1]), flush=True)
        if ctx.rank == 0 and directory is not None:
            run = results.Run(
                "refined", results.today(), results.this_commit(), ctx.size, ctx.size * (ctx.engine.device is not None),
                **about, options=results.options_of(options), reference="float64", sample="all", rows=rows,
            )  # fmt: skip
            results.save(run, directory)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
