# SPDX-License-Identifier: Apache-2.0
"""Time the ways in which CPU ranks factor a matrix, side by side: ``python -m benchmarks.factorization_ways``.

By order: on one rank alone, on several ranks together, and in panels; then what pblasmp takes, and how much longer that
is than the fastest. So one sees the orders from which each is faster, on which the limits in
``pblasmp/engines/host/direct/calls.py`` and ``host/host_operations.py`` rest. It starts its ranks itself, prints, and
writes nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.factorizations import Case, Matrices
from benchmarks.ranks import (
    cores,
    interleaved,
    machine,
    on_ranks,
    print_facts,
    run_ranks,
    share_cores,
    versions,
)
from reference.scalapack import PATIENT

ROUTINES = ("potrf", "getrf", "geqrf")
WAYS = ("alone", "together", "panels", "taken")
_ENDLESS = 1 << 60
_GRIDS = {1: (1, 1), 2: (1, 2), 4: (2, 2)}


@contextmanager
def limits(ctx: Any, way: str) -> Iterator[None]:
    """Within, a context's factorizations go one way."""
    from pblasmp.engines.host.direct.calls import LIMITS

    alone = {"alone": _ENDLESS, "together": 0}.get(way)
    if alone is None:
        yield
        return
    ctx.engine.operations.factor_alone = alone
    saved = LIMITS.cholesky, LIMITS.meeting
    LIMITS.cholesky, LIMITS.meeting = _ENDLESS, alone
    try:
        yield
    finally:
        LIMITS.cholesky, LIMITS.meeting = saved


def contenders(case: Case, comm: Any, opened: ExitStack) -> dict[str, Matrices]:
    """Return the matrices of each way by its name; each way has its own context. Collective over ``comm``."""
    import pblasmp as pb

    found = {}
    for way in WAYS:
        if (way == "panels" and case.routine != "potrf") or (way == "together" and comm.size == 1):
            continue  # the others are computed in panels, anyway; one rank is alone
        ctx = opened.enter_context(pb.Context(comm, engine="host"))
        found[way] = m = Matrices(ctx, case)
        run(way, m)()
    return found


def run(way: str, m: Matrices) -> Callable[[], Any]:
    """Return what computes one way."""
    import pblasmp as pb

    if way == "panels":
        return lambda: pb.linalg.cholesky(m.a, out=m.a, algo="panels")

    def compute() -> None:
        with limits(m.a.context, way):
            m.run_pblasmp()

    return compute


def time_all(comm: Any, options: argparse.Namespace) -> None:
    """Time every case on these ranks; rank 0 prints a row for each. Collective over comm."""
    share_cores(comm)
    for routine in options.only:
        if comm.rank == 0:
            print(f"\n{routine}, {comm.size} ranks, blocks of {options.block}; milliseconds")
            print("    n" + "".join(f"{way:>10}" for way in WAYS) + "  taken / fastest", flush=True)
        for n in options.n:
            case = Case(routine, n, options.block, _GRIDS[comm.size], 1)
            with ExitStack() as opened:
                ways = contenders(case, comm, opened)

                def restored(*_: Any, ways: dict[str, Matrices] = ways) -> None:
                    for m in ways.values():
                        m.restore()

                restored()
                calls = {way: run(way, m) for way, m in ways.items()}
                first = interleaved(comm, calls, 1, settle=0, check=restored)
                rounds = int(options.seconds / sum(each[0] for each in first.values()))
                seconds = interleaved(comm, calls, min(max(rounds, 3), 50), settle=0, check=restored, first=1)
            found = {way: median(times) * 1e3 for way, times in seconds.items()}
            if comm.rank == 0:
                row = "".join(f"{found[way]:10.2f}" if way in found else f"{'':10}" for way in WAYS)
                print(f"{n:5d}{row}{found['taken'] / min(found.values()):10.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    orders = [128, 192, 256, 320, 384, 512, 768, 1024, 1536, 1920]
    parser.add_argument("-n", type=int, nargs="+", default=orders, help="orders")
    parser.add_argument("--ranks", type=int, nargs="+", choices=tuple(_GRIDS), default=list(_GRIDS))
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--only", nargs="+", choices=ROUTINES, default=list(ROUTINES))
    parser.add_argument("--seconds", type=float, default=0.4, help="of all ways together, for a case")
    options = parser.parse_args()
    if on_ranks():
        from mpi4py import MPI

        time_all(MPI.COMM_WORLD, options)
        return
    print_facts(machine(), versions())
    for ranks in options.ranks:
        run_ranks("benchmarks.factorization_ways", sys.argv[1:], ranks, PATIENT if ranks > cores() else {})


if __name__ == "__main__":
    main()
