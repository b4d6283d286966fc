# SPDX-License-Identifier: Apache-2.0
"""A move between two layouts through MPI, from host memory to host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..comm import Communicator, Exchange, Side
from ..layout import MatrixDescriptor
from ..layout.trapezoid import Trapezoid, copy_part
from .base import Workspace

__all__ = ["ExchangeMove"]

Array = NDArray[Any]


class ExchangeMove:
    """A move of NumPy arrays, converting the element type on arrival. Making one is local.

    Args:
        comm: the ranks.
        source, target: how the matrix lies before and after.
        part: what is moved; None: everything.
    """

    workspace = Workspace(0, 0)
    path = "by MPI"

    def __init__(
        self,
        comm: Communicator,
        source: MatrixDescriptor,
        target: MatrixDescriptor,
        part: Trapezoid | None = None,
    ) -> None:
        self._rank, self._target, self._part = comm.rank, target, part
        self._cells = source.grid.size, target.grid.size
        self._exchange = Exchange(comm, Side.of(source), Side.of(target), source.dtype)
        self.sent_bytes, self.copied_bytes = self._exchange.sent_bytes, self._exchange.copied_bytes

    def run(self, source: Array, target: Array) -> None:
        """Move everything, or the part. Collective over the context."""
        arriving = target if self._part is None else np.empty_like(target)
        arrays = zip((source, arriving), self._cells, strict=True)
        self._exchange.run(
            *([array if rank == self._rank else None for rank in range(size)] for array, size in arrays)
        )
        if self._part is not None and self._rank < self._target.grid.size:
            copy_part(target, arriving, self._part, *self._target.global_indices(self._rank))

    def misfit(self, source: Array) -> str:  # noqa: ARG002
        """Any array of the planned layout will do."""
        return ""

    def close(self) -> None:
        """Nothing is held."""
