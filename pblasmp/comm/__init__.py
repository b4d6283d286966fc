# SPDX-License-Identifier: Apache-2.0
"""Ranks: what pblasmp needs of a communicator, agreement, memory shared by a node, exchanges of blocks."""

from __future__ import annotations

from .agreement import (
    Agreement,
    Running,
    break_off,
    closing,
    compare_later,
    gather_on,
    is_agreed,
    leave,
    vote_on,
)
from .board import make_boards
from .cells import Cell, Cells
from .choice import wrap
from .communicator import Communicator, allgather_alike, gather_numbers
from .exchange import Exchange, Side
from .failures import watch
from .locations import count_cores, machine, machines_of, nodes_of, ranks_per_node, this_process
from .repeated_calls import RepeatedCalls, agree_after
from .shared_memory import SharedMemory
from .side_channel import SideChannel

__all__ = [
    "Agreement",
    "Cell",
    "Cells",
    "Communicator",
    "Exchange",
    "RepeatedCalls",
    "Running",
    "SharedMemory",
    "Side",
    "SideChannel",
    "agree_after",
    "allgather_alike",
    "break_off",
    "closing",
    "compare_later",
    "count_cores",
    "gather_numbers",
    "gather_on",
    "is_agreed",
    "leave",
    "machine",
    "machines_of",
    "make_boards",
    "nodes_of",
    "ranks_per_node",
    "this_process",
    "vote_on",
    "watch",
    "wrap",
]
