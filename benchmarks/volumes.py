# SPDX-License-Identifier: Apache-2.0
"""Count what ranks receive in factorizations between nodes: ``python -m benchmarks.volumes``.

``traffic()`` runs the algorithm of every rank on arrays without values. The script prints a table in Markdown: bytes
received by the rank that receives most, beside the volume of an algorithm in two dimensions that sends each rank only
what it multiplies, once; and the memory of the rank that needs most, beside its part of the two matrices.
"""

from __future__ import annotations

import argparse
import math

import pblasmp as pb
from pblasmp.layout.factor_problem import FactorProblem, FactorRoutine

ROUTINES: tuple[FactorRoutine, ...] = ("cholesky", "lu", "qr")


def volume(routine: str, n: int, ranks: int) -> float:
    """Return the bytes that a rank of a square grid gets of float64: L along rows, U down columns, and what else.

    LU also exchanges all rows once each way; QR adds up its products with the reflectors before it multiplies them.
    """
    whole = 8 * n * n
    beside = {"cholesky": 0, "lu": 2 * whole / ranks, "qr": whole / 2 / math.sqrt(ranks)}[routine]
    return whole / math.sqrt(ranks) + beside


def row(routine: FactorRoutine, n: int, block: int, ranks: int) -> tuple[str, ...]:
    """Return the cells of one factorization, on one-rank nodes in a square grid."""
    side = math.isqrt(ranks)
    d = pb.MatrixDescriptor((n, n), (block, block), pb.Grid(side, side), order="F")
    found = FactorProblem(routine, a=d, c=d).traffic(ranks_per_node=1)
    most, parts = int(found.received_bytes.max()), 2 * 8 * n * n / ranks
    return (
        routine, str(ranks), f"{most / 2**30:.2f} GiB", f"{most / volume(routine, n, ranks):.2f}",
        f"{(int(found.memory_bytes.max()) - parts) / 2**20:.0f} MiB",
    )  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=50_000)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256, 1024])
    given = parser.parse_args()
    print(
        "| | ranks | received at most | ÷ volume in 2D | memory beyond both matrices |\n| --- |"
        + " ---: |" * 4
    )
    for routine in ROUTINES:
        for ranks in given.ranks:
            print("| " + " | ".join(row(routine, given.n, given.block, ranks)) + " |", flush=True)


if __name__ == "__main__":
    main()
