# SPDX-License-Identifier: Apache-2.0
"""The nearest problem that can be computed: which operands must move to another layout first.

Most algorithms take operands in any layout, except that C must have D's; cuBLASMp's products have more rules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from .descriptor import MatrixDescriptor

if TYPE_CHECKING:
    from .level3 import Level3Problem
    from .problem import MatmulProblem

    Routine = TypeVar("Routine", MatmulProblem, Level3Problem)

__all__ = ["nearest_legal", "with_c_like_d"]


def nearest_legal(p: MatmulProblem) -> MatmulProblem:
    """Return ``p`` with the operands that break one of cuBLASMp's rules in new layouts. Local.

    These begin on process (0, 0) of D's grid. D keeps its blocks, and k those of A. Faults that no move can remedy
    (sizes, types) remain.
    """
    d = _aligned(p.d)
    a, b = _aligned(p.a), _aligned(p.b)
    k_block = a.block[1 if p.op_a == "N" else 0]
    a = _fit(a, (d.block[0], k_block), p.op_a, d)
    b = _fit(b, (k_block, d.block[1]), p.op_b, d)
    c = p.c
    alike = c is not None and c.grid.same_ranks(d.grid) and c.rows == d.rows and c.cols == d.cols
    if c is not None and not alike and c.shape == d.shape:
        c = replace(d, dtype=c.dtype, order=c.order, ld=None)
    return replace(p, a=a, b=b, d=d, c=c)


def with_c_like_d(p: Routine) -> Routine:
    """Return ``p`` with C in the layout of D, as every algorithm needs it. Local."""
    if p.c is None or p.c.same_places(p.d):
        return p
    return replace(p, c=replace(p.d, dtype=p.c.dtype, ld=None))


def _aligned(x: MatrixDescriptor) -> MatrixDescriptor:
    return x if x.lead == (0, 0) else replace(x, lead=(0, 0), source=(0, 0), ld=None)


def _fit(x: MatrixDescriptor, block: tuple[int, int], op: str, d: MatrixDescriptor) -> MatrixDescriptor:
    if op != "N":
        block = block[::-1]
    if x.block == block and any(x.grid.same_ranks(grid) for grid in (d.grid, d.grid.T)):
        return x
    return replace(x, block=block, grid=d.grid, source=(0, 0), ld=None)
