# SPDX-License-Identifier: Apache-2.0
"""Ranks: what pblasmp needs of a communicator, agreement, memory shared by a node, exchanges of blocks."""

from __future__ import annotations

from .agreement import CLOSING, Agreement, Running, break_off, closing, is_agreed, leave
from .board import YIELDS
from .choice import wrap
from .communicator import Communicator, allgather_alike, gather_numbers, greatest, largest_size
from .exchange import Cell, CellArrays, Cells, Exchange, Side
from .failures import watch
from .locations import (
    interfaces,
    machine,
    machines_of,
    most_ranks,
    nodes_of,
    ranks_per_node,
    share_of_cores,
    this_process,
    unlike_interfaces,
)
from .mpi_communicator import world_ranks
from .post import LARGEST, Partners
from .shared_memory import SharedMemory, open_boards
from .side_channel import SideChannel, where_others_wait
from .votes import (
    Launched,
    Ready,
    RepeatedCalls,
    agree_after,
    compare_later,
    gather_on,
    late_vote,
    launch_on,
    vote_on,
)
