# SPDX-License-Identifier: Apache-2.0
"""Ranks: the few things asked of a communicator, agreement, node-shared memory, exchanges of blocks."""

from __future__ import annotations

from .agreement import CLOSING, Agreement, is_agreed, leave
from .communicator import Communicator, wrap
from .exchange import Cell, Exchange, Side
from .failures import watch
from .shared import SharedMemory

__all__ = [
    "CLOSING",
    "Agreement",
    "Cell",
    "Communicator",
    "Exchange",
    "SharedMemory",
    "Side",
    "is_agreed",
    "leave",
    "watch",
    "wrap",
]
