# SPDX-License-Identifier: Apache-2.0
"""Time the planning of the moves of a product in panels on many ranks: ``python -m benchmarks.exchange_plans``.

Planning is local: one process plans as if it were a rank of a large grid. It prints, for each layout, the seconds in
which a rank plans all panels of A and B, and how many messages and copies it found.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from pblasmp.comm import Exchange
from pblasmp.engines.host.host_transport import Buffers, HostTransport
from pblasmp.engines.local.panels import Operand, Staging, needs
from pblasmp.layout import Grid, MatrixDescriptor
from pblasmp.layout.intersection import common_counts, intersect


def planned(grid: Grid, block: int, start: int, panels: int, width: int, rank: int) -> tuple[float, int]:
    """Return the seconds that planning takes, and the number of parts, of D = A B on ``grid``.

    Args:
        grid: of A, B and D.
        block: rows and columns of A's and B's blocks; D's are 64.
        start: row and column at which A and B begin in larger matrices.
        panels: how many panels of k.
        width: of a panel.
        rank: the rank that plans.
    """
    k, n = panels * width, 64 * 40
    a = MatrixDescriptor((n + start, k + start), (block, block), grid)[start:, start:]
    b = MatrixDescriptor((k + start, n + start), (block, block), grid)[start:, start:]
    d = MatrixDescriptor((n, n), (64, 64), grid)
    domains = tuple((each,) for each in range(grid.size))
    comm: Any = SimpleNamespace(rank=rank, size=grid.size)
    transport = HostTransport(comm, domains, Buffers(comm), "")
    engine: Any = SimpleNamespace(transport=transport)
    found: list[Staging] = []
    intersect.cache_clear()
    common_counts.cache_clear()
    begin = time.process_time()
    for which, (matrix, flip, outer) in enumerate(((a, False, d.rows), (b, True, d.cols))):
        operand = Operand(
            matrix, flip, False, needs(d, grid.size, which), outer, np.dtype(np.float64), "ab"[which]
        )
        found.append(Staging(engine, operand, domains, [(i * width, (i + 1) * width) for i in range(panels)]))
    return time.process_time() - begin, sum(
        _parts(each) for staging in found for each in staging._moves if isinstance(each, Exchange)
    )


def _parts(exchange: Exchange) -> int:
    """Return how many messages and copies an exchange has for this rank."""
    return len(exchange.copies) + sum(map(len, [*exchange.sends.values(), *exchange.receives.values()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--grid", type=int, nargs=2, default=(16, 16), metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--panels", type=int, default=100)
    parser.add_argument("--width", type=int, default=256, help="columns of a panel")
    options = parser.parse_args()
    grid = Grid(*options.grid)
    for text, block, start in (
        ("blocks of 64", 64, 0),
        ("blocks of 48", 48, 0),
        ("blocks of 48 from (5, 5)", 48, 5),
        ("blocks of 50", 50, 0),  # the pattern repeats after 25 panels
    ):
        runs = [planned(grid, block, start, options.panels, options.width, grid.size // 3) for _ in range(5)]
        seconds, parts = min(each for each, _ in runs), runs[0][1]
        print(
            f"{grid}, {options.panels} panels of {options.width}, {text}: {seconds:.4f} s of processor time "
            f"for A and B, {parts} messages and copies"
        )


if __name__ == "__main__":
    main()
