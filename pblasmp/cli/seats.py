# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a job sit, and whether what the scheduler gave them fits: before anything is computed."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import combinations, groupby
from pathlib import Path
from typing import Any, TypeAlias

import click
import numpy as np

from .. import __version__
from ..comm import Communicator, interfaces, machines_of, unlike_interfaces, wrap
from ..comm.locations import Location
from ..engines.gpu.runtime.device import VISIBLE, gpus_of_machine, visible_gpus
from ..errors import counted, ranks_text
from ..resources import available_bytes, memory_bytes
from .reports import Reporter

_LEAST_BYTES = 1 << 30  # of memory for a rank
_SHARED_BYTES = 16 << 20  # of /dev/shm for a rank: connections of NCCL and MPI take about 10 MiB each
_INFINIBAND = Path("/sys/class/infiniband")
_SHARED_MEMORY = Path("/dev/shm")
_MOST_LINES = 16
_THREADS = "OMP_NUM_THREADS"
_LOCAL_RANKS = "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"
_ALIKE = (
    "PBLASMP_",
    "NCCL_",
    _THREADS,
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
)  # variables that ranks have alike
_APART = ("NCCL_HOSTID", "NCCL_DEBUG")  # but for these


@dataclass(frozen=True, slots=True)
class Seat:
    """What a rank finds where it runs.

    Attributes:
        rank: its number.
        host: the machine's name.
        boot: what tells it from others of that name: Linux's boot id.
        cores: those that the rank may run on.
        threads: what OMP_NUM_THREADS says, 0 if nothing.
        together: the ranks to which MPI sends through shared memory; none where MPI does not carry the ranks.
        memory_bytes, free_bytes: what the scheduler lets the ranks of the machine have, and what is free.
        shared_bytes: what is free in /dev/shm; -1 if there is none.
        locked_bytes: what the rank may pin for a network; -1 without a limit.
        networks: interfaces with addresses, without the loopback.
        adapters: active ports of InfiniBand, RoCE or EFA.
        no_interface: why NCCL has no interface.
        gpus: PCI addresses of the GPUs that it sees.
        deaf: pairs of these of which the first cannot reach the second.
        gpus_there: how many GPUs the machine has.
        shown: what CUDA_VISIBLE_DEVICES says; None if it is not set.
        versions: of Python, pblasmp and NumPy.
        variables: those of the environment that all ranks should have alike.
    """

    rank: int
    host: str
    boot: str
    cores: tuple[int, ...]
    threads: int
    together: tuple[int, ...]
    memory_bytes: int
    free_bytes: int
    shared_bytes: int
    locked_bytes: int
    networks: dict[str, str]
    adapters: tuple[str, ...]
    no_interface: str
    gpus: tuple[str, ...]
    deaf: tuple[tuple[int, int], ...]
    gpus_there: int
    shown: str | None
    versions: str
    variables: dict[str, str]

    @classmethod
    def here(cls, comm: Communicator, *, gpus: bool) -> Seat:
        """Return this rank's, with its GPUs if CUDA is to be asked. Collective over ``comm``."""
        location = comm.locations()[comm.rank]
        cores = tuple(i for i in range(location.cores.bit_length()) if location.cores >> i & 1)
        threads = os.environ.get(_THREADS, "").partition(",")[0]
        visible, deaf = visible_gpus() if gpus else ([], [])
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return cls(
            comm.rank, *location.machine, cores, int(threads) if threads.isdecimal() else 0,
            _together(comm), memory_bytes(), available_bytes(), _free_shared_bytes(),
            -1 if locked == resource.RLIM_INFINITY else locked,
            {name: address for address, name in interfaces().items() if not address.startswith("127.")},
            _adapters(), unlike_interfaces() if visible else "", tuple(visible), tuple(deaf),
            len(gpus_of_machine()) if gpus else 0, os.environ.get(VISIBLE),
            f"Python {platform.python_version()}, pblasmp {__version__}, NumPy {np.__version__}",
            {name: value for name, value in sorted(os.environ.items())
             if name.startswith(_ALIKE) and not name.startswith(_APART)},
        )  # fmt: skip


Node: TypeAlias = Sequence[Seat]
"""The seats of the ranks of a machine."""


def _free_shared_bytes() -> int:
    """Return what is free in /dev/shm, -1 if there is none. Local."""
    try:
        shared = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return -1
    return shared.f_bavail * shared.f_frsize


def warn_before_mpi(ranks: int) -> None:
    """Say what MPI may wait for without end when it starts, once on each machine: then nobody says it later. Local.

    This machine has so many ``ranks``.
    """
    first = all(os.environ.get(name, "0") == "0" for name in _LOCAL_RANKS)
    if first and (fault := _shared_memory_fits(ranks, _free_shared_bytes())):
        where = f"pblasmp: warning: {platform.node()}"
        click.echo(f"{where}: {fault[0]}, and MPI may wait for ever when it starts: {fault[1]}", err=True)


def _together(comm: Communicator) -> tuple[int, ...]:
    """Return the ranks to which MPI sends through shared memory, if MPI carries the ranks. Collective."""
    if "mpi4py.MPI" not in sys.modules or comm.size == 1:
        return ()
    from mpi4py import MPI

    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        return tuple(node.allgather(comm.rank))
    finally:
        node.Free()


def _adapters() -> tuple[str, ...]:
    """Return the active ports of the machine's network adapters. Local."""
    ports = sorted(_INFINIBAND.glob("*/ports/*"))
    return tuple(f"{each.parts[-3]}:{each.name}" for each in ports if "ACTIVE" in _text(each / "state"))


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""


def seats_of_ranks(gpus: bool, reporter: Reporter) -> dict[str, Any]:
    """Return where every rank sits. Collective over all ranks; no GPU, no NCCL and no engine is set up."""
    with reporter.errors():
        reporter.step("where the ranks are")
        comm = wrap(None)
        try:
            seats = comm.allgather(asdict(Seat.here(comm, gpus=gpus)))
        finally:
            comm.free()
    return {"seats": seats}


def _nodes(seats: Sequence[Seat]) -> list[Node]:
    """Return the seats of each machine; machines are ordered by their first rank. Local."""
    places = [Location((seat.host, seat.boot), "", 0, "", 0, 0, 0, 0) for seat in seats]
    return [[seats[rank] for rank in ranks] for ranks in machines_of(places)]


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _gpus_seen(node: Node) -> set[str]:
    return {gpu for seat in node for gpu in seat.gpus}


def lines_of_seats(seats: Sequence[Seat]) -> Iterator[str]:
    """Yield a line for each node: who is there, and what they have. Local."""
    nodes = _nodes(seats)
    for node in nodes[:_MOST_LINES]:
        first, cores = node[0], {core for seat in node for core in seat.cores}
        parts = [ranks_text([seat.rank for seat in node]), counted(len(cores), "core")]
        each = {len(seat.cores) for seat in node}
        if len(node) > 1 and max(each) < len(cores):
            parts[-1] += f", {min(each)} each"
        if first.gpus_there or _gpus_seen(node):
            parts.append(f"{len(_gpus_seen(node))} of {max(first.gpus_there, len(_gpus_seen(node)))} GPUs")
        parts.append(f"{_gib(first.free_bytes)} of {_gib(first.memory_bytes)} free")
        parts += [f"/dev/shm {_gib(first.shared_bytes)}"] * (first.shared_bytes >= 0)
        parts += [f"{name} {address}" for name, address in first.networks.items()]
        parts += first.adapters
        yield f"{first.host}: {', '.join(parts)}"
    if len(nodes) > _MOST_LINES:
        more = sorted(seat.rank for node in nodes[_MOST_LINES:] for seat in node)
        yield f"and {len(nodes) - _MOST_LINES} nodes more, with {ranks_text(more)}"


def faults_of_seats(seats: Sequence[Seat]) -> Iterator[tuple[str, str]]:
    """Yield what does not fit, each with what to change; what several nodes share only once. Local."""
    nodes = _nodes(seats)
    for check in _OF_A_NODE:
        found = [(node[0].host, *fault) for node in nodes if (fault := check(node))]
        for fault, same in groupby(sorted(found, key=lambda each: each[1:]), key=lambda each: each[1:]):
            hosts = [host for host, *_ in same]
            where = hosts[0] if len(hosts) == 1 else f"{hosts[0]} and {len(hosts) - 1} more"
            yield f"{where}: {fault[0]}", fault[1]
    yield from _of_all(nodes)


_Fault: TypeAlias = tuple[str, str] | None


def _threads_fit(node: Node) -> _Fault:
    cores = len({core for seat in node for core in seat.cores})
    threads = sum(seat.threads for seat in node)
    if threads <= max(cores, len(node)):
        return None
    fits = max(1, cores // len(node))
    what = f"{_THREADS} gives {len(node)} ranks {threads} threads on {counted(cores, 'core')}"
    return what, f"unset {_THREADS}, or set it to {fits}; with Slurm, to --cpus-per-task"


def _bound_apart(node: Node) -> _Fault:
    alike = [pair for pair in combinations(node, 2) if {*pair[0].cores} & {*pair[1].cores}]
    if not alike or all(len(seat.cores) >= len(node) for seat in node):
        return None
    ranks = ranks_text(sorted({seat.rank for pair in alike for seat in pair}))
    what = f"{ranks} are bound to few cores, which they share"
    return what, "srun --cpu-bind=cores with --cpus-per-task, or mpirun --bind-to none"


def _memory_is_shared(node: Node) -> _Fault:
    here = {seat.rank for seat in node}
    apart = next((seat for seat in node if seat.together and not here <= {*seat.together}), None)
    if apart is None:
        return None
    what = f"MPI sends from rank {apart.rank} to others of its machine over the network"
    return what, "one container for all ranks of a node; unset MPIR_CVAR_NOLOCAL and MPIR_CVAR_NUM_CLIQUES"


def _memory_is_enough(node: Node) -> _Fault:
    least = min(seat.memory_bytes for seat in node) // len(node)
    if least >= _LEAST_BYTES:
        return None
    return f"each rank has {_gib(least)} of memory", "srun --mem=0 gives a job the memory of its nodes"


def _shared_memory_is_enough(node: Node) -> _Fault:
    return _shared_memory_fits(len(node), min(seat.shared_bytes for seat in node))


def _shared_memory_fits(ranks: int, free_bytes: int) -> _Fault:
    needed = _SHARED_BYTES * ranks
    if not (ranks > 1 and 0 <= free_bytes < needed):
        return None
    what = f"/dev/shm has {free_bytes >> 20} MiB free for {ranks} ranks, which need {needed >> 20}"
    return what, "docker run --shm-size=1g, or remove what earlier jobs have left there"


def _pinned_is_enough(node: Node) -> _Fault:
    limits = [seat.locked_bytes for seat in node if seat.locked_bytes >= 0]
    if not (limits and node[0].adapters):
        return None
    what = f"ranks may pin {min(limits) >> 10} KiB for {node[0].adapters[0]}"
    return what, "ulimit -l unlimited in the job; in slurm.conf PropagateResourceLimitsExcept=MEMLOCK"


def _gpus_are_visible(node: Node) -> _Fault:
    seen, there = _gpus_seen(node), node[0].gpus_there
    blind = [seat for seat in node if not seat.gpus]
    if there and blind:
        shown = "" if blind[0].shown is None else f" ({VISIBLE}={blind[0].shown})"
        what = f"rank {blind[0].rank} sees none of {there} GPUs{shown}"
        return what, f"ask for GPUs (--gpus-per-node), and unset {VISIBLE}"
    if seen and len(node) > len(seen):
        what = f"{len(node)} ranks see {len(seen)} of {max(there, len(seen))} GPUs"
        shown = next((seat.shown for seat in node if seat.shown is not None), "")
        cure = "start one rank per GPU (--ntasks-per-node), or let them share: NCCL_MULTI_RANK_GPU_ENABLE=1"
        return what, cure + (f"; {VISIBLE}={shown} hides GPUs" if shown and there > len(seen) else "")
    return None


def _gpus_are_peers(node: Node) -> _Fault:
    pair = next((pair for seat in node for pair in seat.deaf), None)
    if pair is None:
        return None
    what = f"GPU {pair[0]} cannot reach GPU {pair[1]}: NCCL carries everything"
    return what, "nvidia-smi topo -p2p r shows which can; in virtual machines and behind switches, ACS off"


def _has_interface(node: Node) -> _Fault:
    fault = next((seat.no_interface for seat in node if seat.no_interface), "")
    return (fault, "unset NCCL_SOCKET_IFNAME, or name an interface that every node has") if fault else None


_OF_A_NODE: tuple[Callable[[Node], _Fault], ...] = (
    _threads_fit, _bound_apart, _memory_is_shared, _memory_is_enough, _shared_memory_is_enough,
    _pinned_is_enough, _gpus_are_visible, _gpus_are_peers, _has_interface,
)  # fmt: skip


def _of_all(nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    """Yield what does not fit between nodes, each with what to change. Local."""
    by_boot: dict[str, str] = {}
    for seat in (node[0] for node in nodes):
        if seat.boot and by_boot.setdefault(seat.boot, seat.host) != seat.host:
            what = f"{by_boot[seat.boot]} and {seat.host} are one machine: their ranks share no memory"
            yield what, "start all ranks of a machine in one container, with one host name"
            break
    versions = {seat.versions: seat for node in nodes for seat in node}
    if len(versions) > 1:
        what = "; ".join(f"rank {seat.rank} has {each}" for each, seat in versions.items())
        yield what, "use one environment on all nodes: a shared file system, or the same container"
    yield from _unlike_variables([seat for node in nodes for seat in node])
    for what, needed, there in (
        ("GPUs", False, [_gpus_seen(node) for node in nodes]),
        ("active InfiniBand", False, [node[0].adapters for node in nodes]),
        ("network interface but the loopback", True, [node[0].networks for node in nodes]),
    ):
        without = [node[0].host for node, found in zip(nodes, there, strict=True) if not found]
        if len(nodes) > 1 and without and (len(without) < len(nodes) or needed):
            more = f" and {len(without) - 1} more" if len(without) > 1 else ""
            yield f"{without[0]}{more}: no {what}", "leave such nodes out: srun --exclude, or --constraint"


def _unlike_variables(seats: Sequence[Seat]) -> Iterator[tuple[str, str]]:
    """Yield the variables of the environment that ranks do not have alike. Local."""
    for name in sorted({name for seat in seats for name in seat.variables}):
        ranks: dict[str | None, list[int]] = {}
        for seat in sorted(seats, key=lambda each: each.rank):
            ranks.setdefault(seat.variables.get(name), []).append(seat.rank)
        if len(ranks) > 1:
            values = (
                f"{'not set' if value is None else value} on {ranks_text(those)}"
                for value, those in ranks.items()
            )
            yield (
                f"{name} is {', '.join(values)}",
                "set it alike on all: srun --export=ALL, mpirun -genvall or -x",
            )
