# SPDX-License-Identifier: Apache-2.0
"""Time two checkouts of pblasmp against each other: ``python benchmarks/revisions.py ../before .``

The ranks of one checkout and of the other are started in turn, so that a machine that grows slower slows both. Prints
the medians of all rounds, and the second checkout's time over the first one's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

WORK = """
import json, sys, time
from statistics import median
import numpy as np
import pblasmp as pb

n, nb, repeat = (int(each) for each in sys.argv[1:4])
found = {}
with pb.Context(engine=sys.argv[4]) as ctx:
    xp, synchronize = ctx.engine.xp, ctx.engine.synchronize
    grid = pb.Grid.squarest(ctx.size)
    d = pb.MatrixDescriptor((n, n), (nb, nb), grid, order="F")

    def entries(i, j):
        return ((i * 7 + j * 13 + i * j % 11) % 9 - 4).astype(float)

    def random(seed, *shape):
        return xp.asarray(np.random.default_rng(seed).random(shape, np.float32))

    a, b, c = ctx.from_function(entries, d), ctx.from_function(entries, d), ctx.zeros(d)
    triangle = ctx.from_function(lambda i, j: np.where(i == j, 4.0, 0.001) + 0.0 * (i + j), d)
    t, k = n // 4, n // 8
    tokens, weights = random(1, t, k), random(2, n // 2, k)
    shard = xp.ascontiguousarray(tokens[: t // ctx.size])
    blas = getattr(pb, "blas", pb)  # older revisions have them at the top
    cases = {
        "matmul NN": lambda: pb.matmul(a, b, out=c),
        "matmul TN": lambda: pb.matmul(a, b, op_a="T", out=c),
        "syrk": lambda: blas.syrk(a, out=c),
        "syr2k": lambda: blas.syr2k(a, b, out=c),
        "trsm": lambda: blas.trsm(triangle, b, out=c),
        "symm": lambda: blas.symm(a, b, out=c),
        "trmm": lambda: blas.trmm(a, b, out=c),
        "geadd T": lambda: blas.geadd(a, c, op_a="T", out=c),
        "tradd": lambda: blas.tradd(a, c, out=c),
        "allgather_matmul": lambda: pb.allgather_matmul(shard, weights, ctx),
        "matmul_reduce_scatter": lambda: pb.matmul_reduce_scatter(tokens, weights, ctx),
        "matmul_allreduce": lambda: pb.matmul_allreduce(tokens, weights, ctx),
    }
    for name, run in cases.items():
        for _ in range(2):  # the second run may record a graph
            run()
        samples = []
        for _ in range(repeat):
            synchronize()
            ctx.comm.barrier()
            start = time.perf_counter()
            run()
            synchronize()
            ctx.comm.barrier()
            samples.append(time.perf_counter() - start)
        found[name] = median(samples)
    if ctx.rank == 0:
        print(json.dumps(found))
"""


def measure(checkout: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Return by case the seconds that a run takes in ``checkout``."""
    paths = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [
        shutil.which("mpirun", path=places) or "mpirun",
        "-n",
        str(arguments.ranks),
        sys.executable,
        "-c",
        WORK,
    ]
    command += [str(arguments.n), str(arguments.block), str(arguments.repeat), arguments.engine]
    done = subprocess.run(
        command, check=False, env=environ, cwd=checkout, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        sys.exit(f"{checkout}: the ranks ended with status {done.returncode}\n{done.stderr}")
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path, help="a checkout of pblasmp")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is started")
    parser.add_argument("--repeat", type=int, default=7, help="runs of each case per start")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--engine", default="host", help="host or cublasmp")
    parser.add_argument("-n", type=int, default=2048, help="order of the matrices")
    parser.add_argument("--block", type=int, default=128)
    arguments = parser.parse_args()
    checkouts = [arguments.before.resolve(), arguments.after.resolve()]
    rounds = [[measure(checkout, arguments) for checkout in checkouts] for _ in range(arguments.rounds)]
    print(f"{'':24}{'before':>10}{'after':>10}  after / before")
    for case in rounds[0][0]:
        before, after = (median(each[i][case] for each in rounds) for i in (0, 1))
        print(f"{case:24}{before * 1e3:8.2f} ms{after * 1e3:8.2f} ms{after / before:10.3f}")


if __name__ == "__main__":
    main()
