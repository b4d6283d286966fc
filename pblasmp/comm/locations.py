# SPDX-License-Identifier: Apache-2.0
"""Where ranks run: on which machines and cores, in which processes."""

from __future__ import annotations

import math
import os
import platform
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from .._core import load
from ..errors import ArgumentError
from ..launchers import ranks_here
from ..resources import core_quota, machine_cores, own_cores


class Location(NamedTuple):
    """Where a rank runs.

    Attributes:
        machine: see ``machine()``.
        core: for which processor its compiled core is; empty without one.
        process: its number.
        began: when the process did: numbers are reused.
        cores: a bit for each core that it may run on.
        job_cores: how many cores the ranks of its job may run on, on this machine.
        quota: how many cores' time these ranks may take, 0 if there is no limit.
        job_ranks: how many ranks these are, 0 if the launcher does not say.
    """

    machine: tuple[str, str]
    core: str
    process: int
    began: str
    cores: int
    job_cores: int
    quota: float
    job_ranks: int

    @classmethod
    def here(cls) -> Location:
        """Return where this process runs. Local."""
        process, cores = os.getpid(), sum(1 << core for core in own_cores())
        job = machine_cores(), core_quota() or 0, ranks_here() or 0
        core = platform.machine() if load() else ""
        return cls(machine(), core, process, began(process), cores, *job)


def machine() -> tuple[str, str]:
    """Return this machine's name and what tells it from others of the same name: Linux's boot id, or "". Local."""
    try:
        return socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname(), ""


def this_process() -> tuple[str, int]:
    """Return this process's host and number. Local."""
    return socket.gethostname(), os.getpid()


def began(process: int) -> str:
    """Return when a process of this machine began, in ticks of its clock; empty if it has ended. Local."""
    try:
        state, *rest = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else rest[18]


def machines_of(locations: Sequence[Location]) -> list[tuple[int, ...]]:
    """Return the ranks of each machine, ascending; machines are ordered by their first rank. Local."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, location in enumerate(locations):
        ranks.setdefault(location.machine, []).append(rank)
    return [tuple(each) for each in ranks.values()]


def nodes_of(locations: Sequence[Location]) -> list[tuple[int, ...]]:
    """Return the ranks of each node: a machine, unless PBLASMP_RANKS_PER_NODE splits it into several. Local."""
    nodes, step = machines_of(locations), ranks_per_node()
    if step is not None:
        nodes = [node[i : i + step] for node in nodes for i in range(0, len(node), step)]
    return nodes


def ranks_per_node() -> int | None:
    """Return how many ranks PBLASMP_RANKS_PER_NODE puts on a node, None if it is not set. Local."""
    given = os.environ.get("PBLASMP_RANKS_PER_NODE", "")
    if not given:
        return None
    if not (given.isdecimal() and int(given) > 0):
        raise ArgumentError(f"PBLASMP_RANKS_PER_NODE: expected a positive integer, got {given!r}")
    return int(given)


def count_cores(locations: Sequence[Location]) -> int:
    """Return how many cores ranks at these locations, which are on one machine, may run on. Local."""
    cores = 0
    for location in locations:
        cores |= location.cores
    return cores.bit_count()


def most_ranks(locations: Sequence[Location]) -> int:
    """Return how many ranks of their jobs the machine has that has the most. Local."""
    ranks = (len(each) for each in machines_of(locations))
    return max(*ranks, *(each.job_ranks for each in locations))


def share_of_cores(locations: Sequence[Location]) -> Fraction:
    """Return how many cores each of the ranks at these locations, which are on one machine, has to itself. Local.

    They share them with ranks of their job that are not among them. Where these may run is not known: it is taken that
    the launcher has dealt out the cores evenly.
    """
    cores, ranks = count_cores(locations), len(locations)
    of_job = max(ranks, *(each.job_ranks for each in locations))
    all_cores = max(cores, *(each.job_cores for each in locations))
    shares = [Fraction(cores, max(ranks, math.ceil(Fraction(of_job * cores, all_cores))))]
    shares += [Fraction(each.quota) / of_job for each in locations if each.quota]
    return min(shares)


_NCCL_INTERFACES = "NCCL_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def interfaces() -> dict[str, str]:
    """Return the names of this host's network interfaces by their IPv4 addresses. Local."""
    try:
        from fcntl import ioctl
    except ImportError:
        return {}
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = ioctl(link, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                found[socket.inet_ntoa(answer[20:24])] = name
    return found


def unlike_interfaces() -> str:
    """Return why NCCL finds no interface by NCCL_SOCKET_IFNAME on this host, "" if it does or may choose. Local.

    The variable has beginnings of names, after "=" whole names, after "^" what NCCL leaves out.
    Source: NCCL's user guide, environment variables.
    """
    given = os.environ.get(_NCCL_INTERFACES, "")
    wanted = [each for each in given.lstrip("^=").split(",") if each]
    with suppress(OSError):
        there = [name for _, name in socket.if_nameindex()]
        named = {
            name
            for name in there
            for each in wanted
            if (name == each if given.lstrip("^").startswith("=") else name.startswith(each))
        }
        left = [name for name in there if (name in named) is not given.startswith("^")]
        if wanted and not left:
            return (
                f"{_NCCL_INTERFACES}={given} leaves NCCL no network interface of {socket.gethostname()}, "
                f"which has {', '.join(there)}"
            )
    return ""
