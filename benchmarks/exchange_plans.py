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
from pblasmp.engines.moving.operand import Destination, Operand, Staging, needs
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
    parts = 0

    def exchange(src: object, dst: object, dtype: np.dtype) -> Exchange:
        nonlocal parts
        made = Exchange(SimpleNamespace(rank=rank), src, dst, dtype)  # type: ignore[arg-type]
        parts += len(made.copies) + sum(map(len, [*made.sends.values(), *made.receives.values()]))
        return made

    transport = SimpleNamespace(rank=rank, size=grid.size, exchange=exchange, message_bytes=lambda _: 0)
    engine: Any = SimpleNamespace(transport=transport)
    domains = [(each,) for each in range(grid.size)]
    intersect.cache_clear()
    common_counts.cache_clear()
    begin = time.process_time()
    for which, (matrix, flip, outer) in enumerate(((a, False, d.rows), (b, True, d.cols))):
        operand = Operand(
            matrix, flip, False, needs(d, grid.size, which), outer, np.dtype(np.float64), "ab"[which]
        )
        destination = Destination(engine, operand, domains)
        for i in range(panels):
            Staging(engine, operand, destination, i * width, (i + 1) * width)
    return time.process_time() - begin, parts


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
    ):
        runs = [planned(grid, block, start, options.panels, options.width, grid.size // 3) for _ in range(5)]
        seconds, parts = min(each for each, _ in runs), runs[0][1]
        print(
            f"{grid}, {options.panels} panels of {options.width}, {text}: {seconds:.4f} s of processor time "
            f"for A and B, {parts} messages and copies"
        )


if __name__ == "__main__":
    main()
