# SPDX-License-Identifier: Apache-2.0
"""What this process holds of its machine."""

from __future__ import annotations

from pathlib import Path

__all__ = ["held", "resident_kib"]


def held() -> tuple[int, int]:
    """Return how many descriptors and threads this process has."""
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def resident_kib() -> int:
    """Return the memory that this process has, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
