# SPDX-License-Identifier: Apache-2.0
"""Writing a part of a local array on the GPU: all of it, or its elements on one side of a diagonal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....layout import MatrixDescriptor
from ....layout.trapezoid import Trapezoid

__all__ = ["part_writer", "write_all"]

Array = Any


def part_writer(part: Trapezoid | None, x: MatrixDescriptor, rank: int) -> Callable[[Array, Array], None]:
    """Return ``write(to, of)``, which queues the copy of this rank's elements of ``part`` of a matrix. Local.

    Args:
        part: what is copied; None: everything.
        x: the layout of both matrices; their arrays may have any memory order.
        rank: this rank.
    """
    if part is None or rank >= x.grid.size:
        return write_all
    import cupy

    rows, cols = x.global_indices(rank)
    last, here = cupy.asarray(rows + part.diagonal)[:, None], cupy.asarray(cols)[None, :]
    mask = here <= last if part.uplo == "L" else here >= last

    def write(to: Array, of: Array) -> None:
        if to.size:
            cupy.copyto(to, of, casting="unsafe", where=mask)

    return write


def write_all(to: Array, of: Array) -> None:
    """Queue the copy of a whole local array, converting its type."""
    if to.size:
        to[...] = of
