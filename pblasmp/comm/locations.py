# SPDX-License-Identifier: Apache-2.0
"""Where ranks run: on which machines and cores, in which processes."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import ArgumentError

__all__ = [
    "Location",
    "began",
    "count_cores",
    "machine",
    "machines_of",
    "nodes_of",
    "ranks_per_node",
    "this_process",
]


class Location(NamedTuple):
    """Where a rank runs.

    Attributes:
        machine: see ``machine()``.
        architecture: the machine's.
        process: its number.
        began: when the process did: numbers are reused.
        cores: a bit for each core that it may run on.
    """

    machine: tuple[str, str]
    architecture: str
    process: int
    began: str
    cores: int

    @classmethod
    def here(cls) -> Location:
        """Return where this process runs. Local."""
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        process = os.getpid()
        return cls(machine(), platform.machine(), process, began(process), sum(1 << core for core in cores))


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
    """Return how many ranks PBLASMP_RANKS_PER_NODE puts on a node, None if it is not set. Local.

    Raises:
        ArgumentError: it is not a positive integer.
    """
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
