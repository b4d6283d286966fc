# SPDX-License-Identifier: Apache-2.0
"""Compare ``pb.linalg.eigh`` and ``svd`` on CPU ranks with direct calls of the same ScaLAPACK.

``python -m benchmarks.eigenvalues`` starts its ranks itself, prints, and writes nothing. By order: the time of the
library called with its arguments and workspaces prepared (p?syevd, p?gesvd, and a copy of A, which they overwrite), of
pblasmp with the same library, of pblasmp with one rank's LAPACK, and the overhead: how much longer pblasmp takes than
the library, in percent, the median over rounds in which all take turns. The order from which LAPACK on one rank is
slower is ``SMALL`` in ``pblasmp/engines/host/spectral_libraries.py``.
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

from benchmarks.ranks import (
    cores,
    interleaved,
    machine,
    on_ranks,
    paired,
    print_facts,
    run_ranks,
    share_cores,
    versions,
)
from reference.scalapack import PATIENT, Flavor, ScaLAPACK, locate

ROUTINES = ("eigh", "svd")


def library_call(slk: ScaLAPACK, routine: str, a: Any, whole: Any) -> Callable[[], None]:
    """Return the library's call on a copy of a matrix in the same layout, with its workspaces. Collective."""
    import numpy as np

    d, n = a.descriptor, a.shape[0]
    context = slk.grid(d.grid.nprow, d.grid.npcol)
    local = np.array(a.local, order="F")
    desc = slk.descriptor(context, d.shape, d.block, (0, 0), max(1, len(local)))
    values, z, vt = np.zeros(n), np.zeros_like(local), np.zeros_like(local)
    info, of_a = np.zeros(1, np.int32), (local, 1, 1, desc)
    if routine == "eigh":
        name, arguments = "pdsyevd_", ("V", "L", n, *of_a, values, z, 1, 1, desc)
        spaces = [np.zeros(1), np.zeros(1, np.int32)]
    else:
        name, arguments = "pdgesvd_", ("V", "V", n, n, *of_a, values, z, 1, 1, desc, vt, 1, 1, desc)
        spaces = [np.zeros(1)]
    slk.call(name, *arguments, *(x for each in spaces for x in (each, -1)), info)
    more = d.block[0] * (sum(local.shape) + 2 * d.block[0])  # p?ormtr's, which p?syevd does not ask for
    sizes = [int(each[0]) + more for each in spaces]
    spaces = [np.zeros(size, each.dtype) for size, each in zip(sizes, spaces, strict=True)]
    call = slk.prepare(name, *arguments, *(x for each in spaces for x in (each, each.size)), info)

    def run() -> Any:
        local[...] = a.local
        call()
        if info[0]:
            raise SystemExit(f"{name}: INFO {info[0]}")
        return values

    expected = np.linalg.eigvalsh(whole) if routine == "eigh" else np.linalg.svd(whole, compute_uv=False)
    found = run()
    if not np.allclose(found, expected, atol=1e-10 * n):
        raise SystemExit(f"{name}: wrong values")
    return run


def time_order(comm: Any, ctx: Any, slk: ScaLAPACK, routine: str, n: int, options: argparse.Namespace) -> str:
    """Time one order, and return the line that says so. Collective over comm."""
    import numpy as np

    import pblasmp as pb

    whole = np.random.default_rng(n).standard_normal((n, n))
    if routine == "eigh":
        whole = (whole + whole.T) / 2
    a = ctx.scatter(whole, block=min(options.block, -(-n // 2)), grid=pb.Grid.squarest(comm.size), order="F")
    function = getattr(pb.linalg, routine)
    contenders: dict[str, Callable[[], Any]] = {
        "library": library_call(slk, routine, a, whole),
        "scalapack": lambda: function(a, algo="scalapack"),
        "lapack": lambda: function(a, algo="lapack"),
    }
    expected = np.linalg.eigvalsh(whole) if routine == "eigh" else np.linalg.svd(whole, compute_uv=False)

    def check(name: str, found: Any) -> None:
        values = found if name == "library" else found[0 if routine == "eigh" else 1]
        if not np.allclose(values, expected, atol=1e-10 * n):
            raise SystemExit(f"{routine} of order {n} by {name}: wrong values")

    seconds = interleaved(comm, contenders, 1, settle=0, check=check)
    length = sum(each[0] for each in seconds.values())
    rounds = max(options.pairs, min(30, int(options.seconds / length)))
    seconds = interleaved(comm, contenders, rounds, settle=0, check=check)
    times = "".join(f"{median(seconds[name]) * 1e3:12.2f}" for name in contenders)
    return f"{routine:>5}{n:7}{times}{100 * (paired(seconds, 'scalapack', 'library') - 1):10.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, nargs="+", default=[100, 200, 400, 1000, 2000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", nargs="+", choices=ROUTINES, default=list(ROUTINES))
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--scalapack", choices=["debian", "mkl"], default="debian")
    parser.add_argument("--seconds", type=float, default=10, help="of each order and routine, about")
    parser.add_argument("--pairs", type=int, default=3, help="rounds at least")
    options = parser.parse_args()
    flavor: Flavor = options.scalapack
    if not on_ranks():
        folder = locate(flavor)
        if folder is None:
            raise SystemExit(f"no ScaLAPACK: python -m benchmarks.fetch_scalapack --only {flavor}")
        for nranks in options.ranks:
            environ = {"PBLASMP_SCALAPACK_LIBRARY": str(folder)} | (PATIENT if nranks > cores() else {})
            run_ranks("benchmarks.eigenvalues", sys.argv[1:], nranks, environ)
        return
    from mpi4py import MPI

    import pblasmp as pb

    comm = MPI.COMM_WORLD
    share_cores(comm)
    slk = ScaLAPACK(flavor, comm)
    with pb.Context(comm, engine="host") as ctx:
        if comm.rank == 0:
            print_facts(machine(), versions())
            head = "".join(f"{name:>12}" for name in (flavor, "scalapack", "lapack"))
            print(f"{comm.size} ranks, milliseconds\n{'':5}{'n':>7}{head}{'overhead %':>12}", flush=True)
        for routine in options.only:
            for n in options.n:
                line = time_order(comm, ctx, slk, routine, n, options)
                if comm.rank == 0:
                    print(line, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
