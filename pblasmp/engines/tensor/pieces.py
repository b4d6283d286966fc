# SPDX-License-Identifier: Apache-2.0
"""How a product is cut into pieces, of which one travels while another is computed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

__all__ = ["EVEN", "HALVES", "SMALL_LAST", "offsets", "pieces", "shares", "waves"]


Weights = tuple[tuple[float, tuple[int, ...]], ...]

SMALL_LAST: Weights = (12, (2, 2, 2, 2, 1, 1)), (3, (6, 6, 5, 3)), (0, (1,))
"""Relative sizes of the pieces of a product, each from so many waves on. Measured on two H200 in bfloat16."""
EVEN: Weights = (3, (1, 1, 1, 1)), (0, (1,))
"""The same on four H200, where the sums of GEMM + AllReduce are pushed."""
HALVES: Weights = (12, (4, 3, 2, 1)), (1.5, (3, 3, 2)), (0, (1, 1))
"""The same for each half of a product that two ranks share, with sums in the GEMM's epilogue; on two H100."""
_TILE = 128, 256  # rows and columns of D that a multiprocessor computes at once, on Hopper


def offsets(parts: Sequence[int]) -> list[int]:
    """Return where each part begins, followed by where the last one ends. Local."""
    return [0, *accumulate(parts)]


@lru_cache(64)  # on paper each rank asks for those of all ranks
def shares(total: int, size: int) -> tuple[int, ...]:
    """Return ``total`` divided into ``size`` parts that differ by at most one, the larger ones first. Local."""
    least, more = divmod(total, size)
    return tuple(least + (rank < more) for rank in range(size))


def waves(rows: int, cols: int, multiprocessors: int) -> float:
    """Return how many tiles each multiprocessor computes until D is done. Local."""
    tile_rows, tile_cols = _TILE
    return -(-rows // tile_rows) * -(-cols // tile_cols) / multiprocessors


def pieces(rows: int, cols: int, multiprocessors: int, weights: Weights = SMALL_LAST) -> tuple[int, ...]:
    """Return the rows of the pieces of a product: one is computed while earlier ones travel. Local.

    Their number depends on how many waves of tiles the product has: a piece costs a launch, and part of a wave. The
    last ones may be smaller, since nothing hides their transfer. All but the last are multiples of a tile's rows.
    """
    tile_rows, _ = _TILE
    high = -(-rows // tile_rows)
    split = next(split for least, split in weights if waves(rows, cols, multiprocessors) >= least)
    ends = [min(rows, round(high * end / sum(split)) * tile_rows) for end in accumulate(split)]
    ends[-1] = rows
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return tuple(size for size in sizes if size > 0)
