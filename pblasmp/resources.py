# SPDX-License-Identifier: Apache-2.0
"""Memory and cores that this process may use: the machine's, or less in a container or in the job of a scheduler.

Linux keeps these limits in control groups: cgroups(7). Each process is in one group, for version 1 in one for each
controller; its limits and those of all groups above it apply.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from .launchers import ranks_here

_ROOT = Path("/")
_MEMORY = (  # of each version: the limit, what is used, and which part of that gives way
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_CORES = "cpuset.cpus.effective", "cpuset.effective_cpus"


def available_bytes() -> int:
    """Return how many bytes of memory are available to this process. Local."""
    known = [1 << 62]
    known += [
        int(each.split()[1]) * 1024 for each in _lines("proc/meminfo") if each.startswith("MemAvailable:")
    ]
    for group in _groups("memory"):
        for limit, used, gives_way in _MEMORY:
            most, now = _number(group / limit), _number(group / used)
            if most is not None and now is not None:
                stat = (line.split() for line in _lines(group / "memory.stat"))
                known.append(most - now + sum(int(each[1]) for each in stat if each[:-1] == [gives_way]))
    return max(0, min(known))


def memory_bytes() -> int:
    """Return how many bytes of memory there are for this process and for others of its container or job. Local."""
    known = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _groups("memory"):
        known += [most for limit, *_ in _MEMORY if (most := _number(group / limit)) is not None]
    return min(known)


def own_cores() -> set[int]:
    """Return the cores on which this process may run. Local."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def core_quota() -> float | None:
    """Return how many cores' time this process and others of its container or job may take together. Local."""
    found = []
    for group in _groups("cpu"):
        given = "".join(_lines(group / "cpu.max")).split()
        if not given:
            given = [
                "".join(_lines(group / name)).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            ]
        if len(given) == 2 and all(each.isdecimal() and int(each) for each in given):  # else "max", or -1
            found.append(int(given[0]) / int(given[1]))
    return min(found, default=None)


def usable_cores() -> int:
    """Return on how many cores this process can run at once. Local."""
    return _within_quota(len(own_cores()))


def machine_cores() -> int:
    """Return how many cores this process and others of its container or job can use, wherever they may run. Local."""
    cores = os.cpu_count() or 1
    for group in _groups("cpuset"):
        for name in _CORES:
            ranges = re.findall(r"(\d+)(?:-(\d+))?", "".join(_lines(group / name)))
            if ranges:
                cores = min(cores, sum(int(last or first) - int(first) + 1 for first, last in ranges))
    return max(_within_quota(cores), 1)


def rank_share(most: int, of_machine: int, ranks: int | None = None) -> int:
    """Return how many entries, or bytes, a rank's cache may have. Local.

    They are ``most`` if the machine has few ranks, a part of ``of_machine`` if it has many: by default those that the
    launcher has started.
    """
    return max(1, min(most, of_machine // (ranks or ranks_here() or 1)))


def _within_quota(cores: int) -> int:
    quota = core_quota()
    return cores if quota is None else min(cores, max(1, int(quota)))


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the groups that limit this process, from its own one upwards, as far as they are visible."""
    own: dict[str, str] = {}
    for line in _lines("proc/self/cgroup"):
        found = re.fullmatch("[0-9]+:([^:]*):(.*)", line)
        if found:  # of version 2 there is one group, named ""
            own.update(dict.fromkeys(found[1].split(","), found[2]))
    for line in _lines("proc/self/mountinfo") or ["0 0 0:0 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"]:
        mount, _, file_system = line.partition(" - ")
        kind, _, options = file_system.partition(" ")
        places = [re.sub(r"\\([0-7]{3})", lambda each: chr(int(each[1], 8)), x) for x in mount.split()[3:5]]
        of_version_1 = kind == "cgroup" and controller in re.split("[ ,]", options)
        if len(places) < 2 or not (kind == "cgroup2" or of_version_1):
            continue
        path, root, top = own.get(controller if of_version_1 else "", "/"), places[0].rstrip("/"), places[1]
        # From within a container the group may have the host's path, and its folder is where the mount begins.
        inside = path[len(root) :].strip("/") if f"{path}/".startswith(f"{root}/") else ""
        first = _ROOT / top.lstrip("/")
        group = first / inside
        if ".." in group.parts or not group.is_dir():
            group = first
        while True:
            yield group
            if group == first:
                break
            group = group.parent


def _number(path: Path) -> int | None:
    """Return the number in a file, None if there is none: "max" is none."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: str | Path) -> list[str]:
    """Return the lines of a file, given by its path below the root; none if it cannot be read."""
    try:
        return (_ROOT / path).read_text().splitlines()
    except (OSError, ValueError):
        return []
