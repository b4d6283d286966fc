# SPDX-License-Identifier: Apache-2.0
"""Count what ranks receive between nodes: ``python -m benchmarks.volumes``, with ``--products`` in products.

``traffic()`` runs the algorithm of every rank on arrays without values. The script prints a table in Markdown.

Of factorizations: bytes received by the rank that receives most, compared with the volume of an algorithm in two
dimensions that sends each rank only what it multiplies, once; and the memory of the rank that needs most, compared with
its part of the two matrices.

Of products on nodes of 8 ranks: bytes received by the rank that receives most, compared with SUMMA's, which sends each
rank its rows of A and columns of B, on the squarest grid and on every other one, and with the bound of COSMA's authors,
2 m n k / (P sqrt(S)) elements for P ranks that each keep S, here a rank's part of the three matrices. Ranks of a node
share what it receives, so the bound is not one for them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable

import pblasmp as pb
from pblasmp.costs.traffic import traffic
from pblasmp.layout.factor_problem import FactorProblem, FactorRoutine

ROUTINES: tuple[FactorRoutine, ...] = ("cholesky", "lu", "qr")


def volume(routine: str, n: int, ranks: int, block: int) -> float:
    """Return the bytes that a rank of a square grid gets of float64: L along rows, U down columns, and what else.

    LU also exchanges all rows once each way; QR adds up its products with the reflectors before it multiplies them.
    The rank is the one that has most blocks.
    """
    side = math.isqrt(ranks)
    whole, share = 8 * n * n, min(n, -(-n // (block * side)) * block) / n
    beside = {"cholesky": 0, "lu": 2 * whole * share**2, "qr": whole / 2 * share}[routine]
    return whole * share + beside


def row(
    routine: FactorRoutine, n: int, block: int, ranks: int, *, gpus: bool, most: int | None
) -> tuple[str, ...]:
    """Return the cells of one factorization, on one-rank nodes in a square grid."""
    side = math.isqrt(ranks)
    d = pb.MatrixDescriptor((n, n), (block, block), pb.Grid(side, side), order="F")
    found = traffic(FactorProblem(routine, a=d, c=d), ranks_per_node=1, gpus=gpus, most=most)
    received, parts = int(found.received_bytes.max()), 2 * 8 * n * n / ranks
    return (
        routine, str(ranks), f"{received / 2**30:.2f} GiB", f"{received / volume(routine, n, ranks, block):.2f}",
        f"{(int(found.memory_bytes.max()) - parts) / 2**20:.0f} MiB",
    )  # fmt: skip


def grids(ranks: int) -> list[pb.Grid]:
    """Return all grids of a number of ranks, which may be numbered along rows or columns."""
    sides = [side for side in range(1, ranks + 1) if ranks % side == 0]
    return [pb.Grid(side, ranks // side, order) for side in sides for order in ("row", "col")]


def received(n: int, block: int, grid: pb.Grid) -> tuple[int, float, str]:
    """Return what the rank that receives most gets in a product, that over SUMMA's volume, and the algorithm."""
    found = pb.MatmulProblem.gemm(n, n, n, grid, block).traffic(ranks_per_node=8)
    down, across = 1 / grid.nprow, 1 / grid.npcol
    most = int(found.received_bytes.max())
    return most, most / (8 * n * n * (down * (1 - across) + across * (1 - down))), found.algorithm


def product(n: int, block: int, nodes: int) -> tuple[str, ...]:
    """Return the cells of a product of square matrices, on 8 ranks a node in the squarest grid and in all others."""
    ranks, grid = 8 * nodes, pb.Grid.squarest(8 * nodes)
    most, over, algorithm = received(n, block, grid)
    bound = 8 * 2 * n**3 / (ranks * math.sqrt(3 * n * n / ranks))
    worst, at = max(
        (received(n, block, each)[1], f"{each.nprow} × {each.npcol} by {each.order}") for each in grids(ranks)
    )
    return (
        str(nodes), f"{grid.nprow} × {grid.npcol}", f'`"{algorithm}"`', f"{most / 2**30:.2f} GiB", f"{over:.2f}",
        f"{most / bound:.2f}", f"{worst:.2f}, {at}",
    )  # fmt: skip


def show(head: str, numbers: int, rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table as it is counted, whose last columns are numbers."""
    words = head.count("|") - 1 - numbers
    print(head + "\n|" + " --- |" * words + " ---: |" * numbers)
    for cells in rows:
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=50_000)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--gpus", action="store_true", help="of factorizations, on GPUs")
    parser.add_argument("--most", type=int, help="count the algorithms of so many ranks only, evenly chosen")
    parser.add_argument("--products", action="store_true", help="of products, on 4 to 1,024 nodes of 8 ranks")
    given = parser.parse_args()
    n, block = given.n, given.block
    if given.products:
        head = "| nodes | grid | algorithm | received at most | ÷ SUMMA | ÷ 2mnk/(P√S) | on the worst grid ÷ SUMMA |"
        show(head, 4, (product(n, block, 4**i) for i in range(1, 6)))
    else:
        head = "| | ranks | received at most | ÷ volume in 2D | memory beyond both matrices |"
        how = {"gpus": given.gpus, "most": given.most}
        show(head, 4, (row(each, n, block, ranks, **how) for each in ROUTINES for ranks in given.ranks))


if __name__ == "__main__":
    main()
