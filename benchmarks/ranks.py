# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: starting ranks, timing between barriers, machine and versions."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from pblasmp import launch
from pblasmp.launch import Job

ROOT = Path(__file__).resolve().parents[1]

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def run_ranks(
    module: str, arguments: Sequence[str], nranks: int, environ: Mapping[str, str] | None = None
) -> None:
    """Run ``python -m module`` on nranks ranks of one BLAS thread each; what they print appears at once."""
    environment = {**os.environ, **dict.fromkeys(_THREADS, "1"), **(environ or {})}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    argv = [*launch.interpreter(), "-u", "-m", "mpi4py", "-m", module, *arguments]
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch, "output")
        with Job(argv, nranks, output, environ=environment) as job, output.open() as reader:
            while (status := job.wait(0.2)) is None:
                print(reader.read(), end="", flush=True)
            print(reader.read(), end="", flush=True)
        if status:
            raise SystemExit(f"{module} ended with status {status} on {nranks} ranks")


def as_nodes(nranks: int, nodes: int) -> dict[str, str]:
    """Return the variables with which ranks of MPICH are on simulated nodes, between which it takes UCX."""
    if nodes == 1:
        return {}
    return {
        "MPIR_CVAR_NUM_CLIQUES": str(nodes), "MPIR_CVAR_CLIQUES_BY_BLOCK": "1",
        "PBLASMP_RANKS_PER_NODE": str(nranks // nodes),
    }  # fmt: skip


# after the ranks have agreed on a time: with more ranks than cores some hear of it late
_AHEAD_SECONDS = 2e-3
SETTLE_SECONDS = 0.3  # the threads of a BLAS wait busily for some time after its last product


def on_ranks() -> bool:
    """Whether this process is a rank that a launcher started."""
    from pblasmp.launch import surroundings

    return surroundings() is not None


def sleeping_barrier(comm: Any) -> None:
    """Wait for all ranks without keeping a core busy, which MPI's own barrier does. Collective over comm."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


def latest(comm: Any, seconds: float) -> float:
    """Return the largest of the ranks' times. Collective over comm."""
    from mpi4py import MPI

    return float(comm.allreduce(seconds, MPI.MAX))


def agreed_start(comm: Any) -> float:
    """Wait until a time that all ranks know, and return it. Collective over comm, whose ranks are on one node.

    Meanwhile a rank leaves its core to the others.
    """
    start = latest(comm, time.perf_counter()) + _AHEAD_SECONDS
    while time.perf_counter() < start:
        os.sched_yield()
    return start


def interleaved(
    comm: Any,
    contenders: Mapping[str, Callable[[], Any]],
    pairs: int,
    *,
    alone: Sequence[str] = (),
    settle: float = SETTLE_SECONDS,
    check: Callable[[str, Any], None],
    first: int = 0,
    real_time: bool = False,
) -> dict[str, list[float]]:
    """Time every contender once per round, in rotating order, after round 0, which warms up.

    Collective over comm, whose ranks are on one node. Seconds from when all ranks may start, at an agreed time, to when
    the last one is done: no barrier is timed. With more ranks than cores MPI's takes longer than a small call. The
    contenders named in ``alone`` run on rank 0 while the other ranks sleep. Before each run the ranks sleep for
    ``settle`` seconds. ``check`` sees every result, outside the time. Rounds before ``first`` are left out: they were
    made before. With ``real_time`` nothing else runs on the ranks' cores meanwhile, as root may ask.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(first, pairs + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            sleeping_barrier(comm)
            time.sleep(settle)
            result = None
            if name in alone:
                start = time.perf_counter()
                if comm.rank == 0:
                    result = contenders[name]()
                elapsed = time.perf_counter() - start
                sleeping_barrier(comm)
            else:
                with _in_real_time() if real_time else nullcontext():
                    start = agreed_start(comm)
                    result = contenders[name]()
                    elapsed = latest(comm, time.perf_counter()) - start
            check(name, result)
            del result
            if turn:
                seconds[name].append(elapsed)
    return comm.bcast(seconds)


@contextmanager
def _in_real_time() -> Iterator[None]:
    """Run before all that the scheduler shares the cores among."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def paired(seconds: Mapping[str, Sequence[float]], name: str, reference: str) -> float:
    """Return the median over the rounds of a contender's time divided by the reference's."""
    return median(a / b for a, b in zip(seconds[name], seconds[reference], strict=True))


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def cores_of_machine() -> int:
    """How many cores all processes here may use: those of the first one, since launchers bind each rank to a few."""
    try:
        return len(os.sched_getaffinity(1))
    except OSError:
        return os.cpu_count() or 1


def share_cores(comm: Any) -> None:
    """Bind each rank to a core if ranks outnumber cores. Local.

    Otherwise Linux may leave three of four ranks on one of two cores for longer than a small call takes, whoever runs.
    """
    here = sorted(os.sched_getaffinity(0))
    if comm.size > len(here):
        os.sched_setaffinity(0, {here[comm.rank % len(here)]})


def machine() -> dict[str, Any]:
    """Return the processor, its cores and memory, and the system."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": cpu or platform.machine(),
        "cores": cores_of_machine(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """Return the versions that times on CPU ranks depend on."""
    from importlib.metadata import version

    import scipy.linalg  # noqa: F401 (loads SciPy's BLAS)
    from threadpoolctl import threadpool_info

    keys = ("internal_api", "version", "architecture")  # OPENBLAS_CORETYPE changes the architecture
    libraries = [library for library in threadpool_info() if library["user_api"] == "blas"]
    blas = [" ".join(library[key] for key in keys if library.get(key)) for library in libraries]
    packages = {name: version(name) for name in ("numpy", "scipy", "mpi4py")}
    return {"Python": platform.python_version(), **packages, "BLAS": ", ".join(blas)}


def print_facts(*facts: Mapping[str, Any]) -> None:
    """Print machine and versions, a line each."""
    print(*(f"{key}: {value}" for each in facts for key, value in each.items()), sep="\n")
