# SPDX-License-Identifier: Apache-2.0
"""The nearest legal product: which operands must move to another layout before they can be multiplied."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .descriptor import MatrixDescriptor

if TYPE_CHECKING:
    from .problem import MatmulProblem

__all__ = ["nearest_legal"]


def nearest_legal(p: MatmulProblem) -> MatmulProblem:
    """Return ``p`` with the operands that break a rule laid out afresh, on D's grid from process (0, 0). Local.

    D keeps its blocks, k those of A. What no move can mend (sizes, types) stays a fault.
    """
    d = _aligned(p.d)
    a, b = _aligned(p.a), _aligned(p.b)
    k_block = a.block[1 if p.op_a == "N" else 0]
    a = _fit(a, (d.block[0], k_block), p.op_a, d)
    b = _fit(b, (k_block, d.block[1]), p.op_b, d)
    c = p.c
    if c is not None and not c.same_places(d) and c.shape == d.shape:
        c = replace(d, dtype=c.dtype, order=c.order, ld=None)
    return replace(p, a=a, b=b, d=d, c=c)


def _aligned(x: MatrixDescriptor) -> MatrixDescriptor:
    return x if x.lead == (0, 0) else replace(x, lead=(0, 0), source=(0, 0), ld=None)


def _fit(x: MatrixDescriptor, block: tuple[int, int], op: str, d: MatrixDescriptor) -> MatrixDescriptor:
    if op != "N":
        block = block[::-1]
    if x.block == block and any(x.grid.same_ranks(grid) for grid in (d.grid, d.grid.T)):
        return x
    return replace(x, block=block, grid=d.grid, source=(0, 0), ld=None)
