# SPDX-License-Identifier: Apache-2.0
"""Level 1 on distributed vectors that makes a number. A second vector is moved to where the first one is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...comm import Side, gather_numbers
from ...layout import MatrixDescriptor
from ..local.reductions import REDUCTIONS
from ..protocol import Engine

__all__ = ["Vector", "reduced"]

Array = Any


class Vector(NamedTuple):
    """A matrix of one column.

    Attributes:
        descriptor: its layout.
        local: this rank's part, of one column or none.
    """

    descriptor: MatrixDescriptor
    local: Array


def reduced(engine: Engine, routine: str, vectors: Sequence[Vector]) -> Any:
    """Return what one of ``REDUCTIONS`` makes of its vectors, the same on every rank. Collective over the ranks."""
    x, *others = vectors
    rank, rows, grid = engine.transport.rank, x.descriptor.rows, x.descriptor.grid

    def index(at: int) -> int:
        return int(rows.to_global(grid.coords(rank)[0], at))

    part, total = REDUCTIONS[routine]
    arrays = [x.local, *(_aligned(engine, y, x) for y in others)]
    return total(gather_numbers(engine.transport.comm, part(engine.xp, arrays, index)).tolist())


def _aligned(engine: Engine, y: Vector, x: Vector) -> Array:
    """Return the elements of ``y`` that are where this rank's elements of ``x`` are. Collective over the ranks."""
    if y.descriptor.same_places(x.descriptor):
        return y.local
    transport = engine.transport
    there = engine.operations.scratch("aligned", x.local.shape, y.descriptor.dtype, x.descriptor.order)
    exchange = transport.exchange(Side.of(y.descriptor), Side.of(x.descriptor), y.descriptor.dtype)
    transport.start_exchange(exchange, {transport.rank: y.local}, {transport.rank: there}).finish()
    return there
