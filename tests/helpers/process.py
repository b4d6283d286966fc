# SPDX-License-Identifier: Apache-2.0
"""What this process holds of its machine."""

from __future__ import annotations

import contextlib
from pathlib import Path


def held() -> tuple[int, int]:
    """Return how many descriptors and threads this process has."""
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def descriptors() -> dict[int, str]:
    """Return what each descriptor of this process is: the path of a file, or such as ``/memfd:name (deleted)``."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor with which this folder is read
            found[int(path.name)] = str(path.readlink())
    return found


def resident_kib() -> int:
    """Return the memory that this process has, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
