# SPDX-License-Identifier: Apache-2.0
"""Moves between two layouts over an engine's transport."""

from __future__ import annotations

from ...comm import Side
from ...comm.exchange import SLOTS
from ...layout import MatrixDescriptor
from ...layout.pieces import LocalPart, Trapezoid
from ..composite import QueuedProduct
from ..protocol import Engine
from ..request import Operands

__all__ = ["ExchangeMove"]


class ExchangeMove(QueuedProduct):
    """A move of ``a`` to ``d``, converting the element type on arrival. Making one is local.

    Args:
        engine: whose arrays and transport.
        source, target: the layouts before and after.
        part: what is moved; None: everything.
        path: its name in reports.
    """

    def __init__(
        self,
        engine: Engine,
        source: MatrixDescriptor,
        target: MatrixDescriptor,
        part: Trapezoid | None = None,
        path: str = "by MPI",
    ) -> None:
        self.path = path
        self._engine, rank = engine, engine.transport.rank
        self._whole = self.replays = part is None  # what arrives of a part is in a temporary
        self._part: LocalPart | None = None  # this rank's elements of it
        if part is not None and rank < target.grid.size:
            self._part = LocalPart(part, *target.global_indices(rank))
        self._exchange = engine.transport.exchange(Side.of(source), Side.of(target), source.dtype)
        self.sent_bytes, self.copied_bytes = self._exchange.sent_bytes, self._exchange.copied_bytes

    def _queue(self, operands: Operands) -> None:
        engine, rank, source, target = self._engine, self._engine.transport.rank, operands.a, operands.d
        arriving = target if self._whole else engine.xp.empty_like(target)
        moved = {rank: source}, {rank: arriving}
        engine.transport.start_exchange(self._exchange, *moved, slots=SLOTS).finish()
        if self._part is not None:
            engine.operations.add(target, 1, arriving, 0, target, self._part, conjugate=False)
