# SPDX-License-Identifier: Apache-2.0
"""Compare ``pb.linalg.eigh`` and ``svd`` on CPU ranks with direct calls of the same ScaLAPACK, or of the same ELPA.

``python -m benchmarks.eigenvalues`` starts its ranks itself. By order: the time of the library called through ctypes
with its arguments and workspaces prepared (p?syevd, p?gesvd or elpa_eigenvectors, and a copy of A, which they
overwrite), of pblasmp with the same library, of pblasmp with one rank's LAPACK, and of scalapack4py (``pip install
scalapack4py``) if it is installed and the library is Debian's ScaLAPACK. Ratios are to the library's time, the median
over rounds in which all take turns. The order from which LAPACK on one rank is slower is ``SMALL`` in
``pblasmp/engines/host/spectral_libraries.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import results
from benchmarks.ranks import (
    ROOT,
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
from reference import elpa
from reference.scalapack import PATIENT, ScaLAPACK, locate

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


def elpa_call(comm: Any, a: Any) -> Callable[[], Any]:
    """Return ELPA's call on a matrix. Collective."""
    import numpy as np

    values, z = np.zeros(a.shape[0]), np.zeros_like(a.local, order="F")
    call = elpa.eigenvectors(comm, a, values, z)

    def run() -> Any:
        call()
        return values

    return run


def scalapack4py_call(slk: ScaLAPACK, routine: str, a: Any, whole: Any) -> Callable[[], Any]:
    """Return scalapack4py's call of the same library, on its own matrix in the same layout. Collective."""
    import ctypes
    import warnings

    warnings.filterwarnings("ignore", module="scalapack4py")  # that it moves A
    from scalapack4py import ScaLAPACK4py
    from scalapack4py.npscal import BLACSGrid, NPScal
    from scalapack4py.npscal import linalg as nps

    grid = a.descriptor.grid
    library = ScaLAPACK4py(ctypes.CDLL(slk.path))  # of its own: it declares the types of arguments
    theirs = BLACSGrid(library, nprow=grid.nprow, npcol=grid.npcol)
    block = a.descriptor.block[0]
    x = NPScal(gl_array=whole, grid=theirs, lib=library, dmb=block, dnb=block)
    return lambda: nps.eigh(x) if routine == "eigh" else nps.svd(x, full_matrices=False)


def time_order(
    comm: Any, ctx: Any, slk: ScaLAPACK | None, routine: str, n: int, options: Any
) -> dict[str, Any]:
    """Time one order. Collective over comm."""
    import numpy as np

    import pblasmp as pb

    whole = np.random.default_rng(n).standard_normal((n, n))
    if routine == "eigh":
        whole = (whole + whole.T) / 2
    block, algo = min(options.block, -(-n // 2)), "elpa" if slk is None else "scalapack"
    a = ctx.scatter(whole, block=block, grid=pb.Grid.squarest(comm.size), order="F")
    function = getattr(pb.linalg, routine)
    contenders: dict[str, Callable[[], Any]] = {
        "library": elpa_call(comm, a) if slk is None else library_call(slk, routine, a, whole),
        algo: lambda: function(a, algo=algo),
        "lapack": lambda: function(a, algo="lapack"),
    }
    if options.library == "debian" and importlib.util.find_spec("scalapack4py"):
        contenders["scalapack4py"] = scalapack4py_call(slk, routine, a, whole)
    expected = np.linalg.eigvalsh(whole) if routine == "eigh" else np.linalg.svd(whole, compute_uv=False)

    def check(name: str, found: Any) -> None:
        values = found if name == "library" else found[0 if routine == "eigh" else 1]
        if not np.allclose(values, expected, atol=1e-10 * n):
            raise SystemExit(f"{routine} of order {n} by {name}: wrong values")

    how: dict[str, Any] = {"settle": 0, "check": check, "real_time": options.real_time}
    seconds = interleaved(comm, contenders, 1, **how)
    length = sum(each[0] for each in seconds.values())
    rounds = options.pairs if options.quick else max(options.pairs, min(30, int(options.seconds / length)))
    seconds = interleaved(comm, contenders, rounds, **how)
    case = {"routine": routine, "n": n, "block": block, "grid": str(a.descriptor.grid).split()[0]}
    ratios = {name: paired(seconds, name, "library") for name in contenders if name != "library"}
    return {"case": case, "seconds": seconds, "ratios": ratios}


def shown(row: dict[str, Any]) -> str:
    """Return a row as a line."""
    case, seconds = row["case"], row["seconds"]
    times = ", ".join(f"{name} {median(each) * 1e3:.2f}" for name, each in seconds.items())
    algo = list(seconds)[1]
    return f"{case['routine']:>5}{case['n']:7}  ms: {times}; overhead {100 * (row['ratios'][algo] - 1):.1f} %"


def start(options: argparse.Namespace) -> None:
    """Run this script once for each requested number of ranks."""
    folder = elpa.locate_elpa() if options.library == "elpa" else locate(options.library)
    if folder is None:
        raise SystemExit(
            f"no {options.library}: python -m benchmarks.fetch_scalapack --only {options.library}"
        )
    for nranks in options.ranks:
        if options.library != "elpa":
            environ = {"PBLASMP_SCALAPACK_LIBRARY": str(folder)} | (PATIENT if nranks > cores() else {})
            run_ranks("benchmarks.eigenvalues", sys.argv[1:], nranks, environ)
            continue
        argv = [
            *elpa.command(folder, nranks),
            sys.executable,
            "-u",
            "-m",
            "mpi4py",
            "-m",
            "benchmarks.eigenvalues",
        ]
        environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **elpa.environment(folder)}
        subprocess.run([*argv, *sys.argv[1:]], env=environ, cwd=ROOT, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, nargs="+", help="orders (default: 100 to 2000)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", nargs="+", choices=ROUTINES, default=list(ROUTINES))
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--library", choices=["debian", "mkl", "elpa"], default="debian")
    parser.add_argument("--seconds", type=float, default=10, help="of each order and routine, about")
    parser.add_argument("--pairs", type=int, default=3, help="rounds at least")
    parser.add_argument(
        "--real-time", action="store_true", help="so that other programs do not count; needs root"
    )
    parser.add_argument("--quick", action="store_true", help="only check that it runs")
    results.add_option(parser)
    options = parser.parse_args()
    options.n = options.n or ([30] if options.quick else [100, 200, 400, 1000, 2000])
    if not on_ranks():
        start(options)
        return
    from mpi4py import MPI

    import pblasmp as pb

    comm, directory = MPI.COMM_WORLD, results.directory_of(options)
    share_cores(comm)
    slk = None if options.library == "elpa" else ScaLAPACK(options.library, comm)
    about = machine(), versions()
    about[0]["load"] = os.getloadavg()[2]
    plain = {key: getattr(options, key) for key in ("block", "library", "seconds", "pairs", "real_time")}
    rows = []
    with pb.Context(comm, engine="host") as ctx:
        if comm.rank == 0:
            print_facts(*about)
            print(f"{options.library}, {comm.size} ranks", flush=True)
        for routine in options.only if slk else ["eigh"]:
            for n in options.n:
                rows.append(time_order(comm, ctx, slk, routine, n, options))
                if comm.rank:
                    continue
                print(shown(rows[-1]), flush=True)
                if directory is not None:
                    run = results.Run(
                        f"eigenvalues-{options.library}", results.today(), results.this_commit(), comm.size, 0,
                        *about, plain, "library", "all", rows,
                    )  # fmt: skip
                    results.save(results.with_earlier(run, directory), directory)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
