# SPDX-License-Identifier: Apache-2.0
"""Level 1 on distributed vectors: what each rank sums up of its part, put together in the order of the ranks.

Every rank gets the same bits. Sums are made in double precision. A second vector is moved to where the first one is.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ...comm import Side, gather_numbers
from ...layout import MatrixDescriptor
from ..local.sums import joined, root, squares
from ..protocol import Engine

__all__ = ["Vector", "amax", "asum", "dot", "nrm2"]

Array = Any
_FIRST = 2.0**53  # larger than any index: NaN comes before infinity


class Vector(NamedTuple):
    """A matrix of one column.

    Attributes:
        descriptor: its layout.
        local: this rank's part, of one column or none.
    """

    descriptor: MatrixDescriptor
    local: Array


def _wide(values: Array) -> Array:
    """Return the elements in double precision, in one dimension."""
    return values.reshape(-1).astype(np.complex128 if values.dtype.kind == "c" else np.float64, copy=False)


def _aligned(engine: Engine, y: Vector, x: Vector) -> Array:
    """Return the elements of ``y`` that are where this rank's elements of ``x`` are. Collective over the ranks."""
    if y.descriptor.same_places(x.descriptor):
        return y.local
    transport = engine.transport
    there = engine.operations.scratch("aligned", x.local.shape, y.descriptor.dtype, x.descriptor.order)
    exchange = transport.exchange(Side.of(y.descriptor), Side.of(x.descriptor), y.descriptor.dtype)
    source, target = (
        [array if rank == transport.rank else None for rank in range(d.grid.size)]
        for d, array in ((y.descriptor, y.local), (x.descriptor, there))
    )
    transport.start_exchange(exchange, source, target).finish()
    return there


def dot(engine: Engine, x: Vector, y: Vector, *, conjugate: bool) -> complex:
    """Return the sum of x_i y_i, or of conj(x_i) y_i. Collective over the ranks."""
    left, right = _wide(x.local), _wide(_aligned(engine, y, x))
    xp = engine.xp
    found = complex((xp.vdot if conjugate else xp.dot)(left, right)) if left.size else 0j
    parts = gather_numbers(engine.transport.comm, (found.real, found.imag))
    real, imaginary = (_sum(column) for column in parts.T.tolist())
    return complex(real, imaginary)


def _sum(values: list[float]) -> float:
    """Return a sum in this order; infinities and NaN as in IEEE arithmetic."""
    total = 0.0
    for value in values:
        total += value
    return total


def nrm2(engine: Engine, x: Vector) -> float:
    """Return the Euclidean norm, scaled like LAPACK's. Collective over the ranks."""
    mine = squares(engine.xp, _wide(x.local)) if x.local.size else (0, 0.0)
    parts = gather_numbers(engine.transport.comm, mine)
    return root(joined([(int(exponent), total) for exponent, total in parts.tolist()]))


def asum(engine: Engine, x: Vector) -> float:
    """Return the sum of the absolute values, of both parts of complex numbers. Collective over the ranks."""
    mine = float(_size(engine.xp, _wide(x.local)).sum()) if x.local.size else 0.0
    return _sum(gather_numbers(engine.transport.comm, [mine])[:, 0].tolist())


def _size(xp: Any, values: Array) -> Array:
    """Return |Re| + |Im| of each element."""
    return xp.abs(values.real) + xp.abs(values.imag) if values.dtype.kind == "c" else xp.abs(values)


def amax(engine: Engine, x: Vector) -> tuple[complex, int]:
    """Return the element with the largest |Re| + |Im|, the first of equals, and its index. Collective over the ranks.

    NaN counts as the largest. The index is -1 if there are no elements.
    """
    d, rank = x.descriptor, engine.transport.rank
    mine = (-1.0, -1.0, 0.0, 0.0)
    if x.local.size:
        values = _wide(x.local)
        sizes = _size(engine.xp, values)
        at = int(sizes.argmax())
        value = complex(values[at])
        mine = (float(sizes[at]), float(d.rows.to_global(d.grid.coords(rank)[0], at)), value.real, value.imag)
    found = [row for row in gather_numbers(engine.transport.comm, mine).tolist() if row[1] >= 0]
    if not found:
        return 0j, -1
    _, index, real, imaginary = max(found, key=_order)
    return complex(real, imaginary), int(index)


def _order(found: list[float]) -> tuple[float, float]:
    """Return a key that is larger for the element to choose: NaN, then large ones, then the first of equals."""
    size, index = found[:2]
    return (math.inf, _FIRST - index) if math.isnan(size) else (size, -index)
