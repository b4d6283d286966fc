# SPDX-License-Identifier: Apache-2.0
"""What pblasmp needs of a communicator, whether of MPI, of PyTorch or of a single process."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from .board import Board
from .locations import Location
from .notes import Meeting
from .side_channel import SideChannel

CHUNK_BYTES = 1 << 30  # MPI 3 counts in 32-bit ints

Array = NDArray[Any]
Request: TypeAlias = Any  # mpi4py's request, or another object with such a Test()


@runtime_checkable
class Communicator(Protocol):
    """What pblasmp needs of a group of ranks.

    Attributes:
        rank, size: this process's number, and how many there are.
        channel: the notes between the ranks; shared with the communicator that this one was split from.
        patient: waits yield the core to other processes, for nodes with fewer cores than ranks: there a busy wait
            takes time from the ranks that are waited for. True until an engine has counted the cores.
        board: where its ranks vote, if they share memory; None if votes are messages.
        node: the ranks of this node, if there are several nodes and an engine has found that out.
    """

    rank: int
    size: int
    channel: SideChannel
    patient: bool
    board: Board | None
    node: Communicator | None

    def imax(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> Request | None:
        """Start writing the element-wise maximum over the ranks to ``out``; None if it is done already. Collective."""

    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in rank order. Collective."""

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the root's ``value``. Collective."""

    def barrier(self) -> None:
        """Wait until every rank has arrived. Collective."""

    def sum_into(self, array: Array) -> None:
        """Replace ``array`` (contiguous, float or complex) by its sum over the ranks. Collective."""

    def bcast_into(self, array: Array, root: int) -> None:
        """Replace ``array`` (contiguous) by the root's array. Collective."""

    def wait(self, request: Request, place: Meeting | None = None) -> None:
        """Wait for a request, at a place where all ranks wait for each other if one is given. Local."""

    def wait_some(self, requests: Sequence[Request]) -> list[int]:
        """Wait for one of several requests, and return the indices of all that are done. Local."""

    def test_some(self, requests: Sequence[Request]) -> list[int]:
        """Return the indices of the requests that are done. Local."""

    def isend(self, array: Array, dest: int) -> list[Request]:
        """Start sending ``array`` (contiguous in either order), which stays as it is until they are done. Local."""

    def irecv(self, array: Array, source: int) -> list[Request]:
        """Start receiving into ``array`` (contiguous in either order). Local."""

    def locations(self) -> list[Location]:
        """Return where each rank runs, as it was when this was first asked for. Collective."""

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """Return a communicator of the group in ``groups`` that holds this rank. Collective."""

    def duplicate(self) -> Communicator:
        """Return a communicator of the same ranks with a separate channel. Collective."""

    def abort(self, code: int) -> NoReturn:
        """End every rank at once, this one too. Local."""

    def gone(self) -> bool:
        """Return whether the ranks can no longer communicate, because the user has finalized MPI. Local."""

    def free(self) -> None:
        """Free what wrap() or split() made. Collective."""


def described(comm: Communicator) -> str:
    """Return what ``repr`` shows of a communicator. Local."""
    return f"{type(comm).__name__}(rank {comm.rank} of {comm.size})"


def flat(array: Array) -> Array:
    """Return the elements of a contiguous array, in memory order. Local."""
    return array.reshape(-1) if array.flags.c_contiguous else array.T.reshape(-1)


def bytes_of(array: Array) -> Array:
    """Return the bytes of a contiguous array, in memory order. Local."""
    return flat(array).view(np.uint8)


def chunks(array: Array) -> list[Array]:
    """Return the bytes of a contiguous array, in memory order, in parts that fit into a message. Local."""
    data = bytes_of(array)
    return [data[at : at + CHUNK_BYTES] for at in range(0, data.size, CHUNK_BYTES)]


def chunks_of_elements(array: Array) -> list[Array]:
    """Return the elements of a contiguous array, in memory order, in parts that fit into a message. Local."""
    elements, step = flat(array), CHUNK_BYTES // array.itemsize
    return [elements[at : at + step] for at in range(0, elements.size, step)]


def allgather_alike(comm: Communicator, value: Any) -> list[Any]:
    """Return every rank's ``value`` as ``comm.allgather`` does, where all usually have the same. Collective.

    Then it takes one reduction, and no message grows with the number of ranks. It goes by messages, not by a board, to
    which some of the ranks may have come already.
    """
    if comm.size == 1:
        return [value]
    digest = hashlib.blake2b(pickle.dumps(value), digest_size=8).digest()
    mine = int.from_bytes(digest, "little", signed=True)
    low, high = greatest(comm, (~mine, mine))
    return [value] * comm.size if ~low == high else comm.allgather(value)


def greatest(comm: Communicator, numbers: Sequence[int]) -> list[int]:
    """Return of each number the largest that a rank gives, in one reduction. Collective."""
    found = np.empty(len(numbers), np.int64)
    request = comm.imax(np.array(numbers, np.int64), found)
    if request is not None:
        comm.wait(request)
    return [int(each) for each in found]


def largest_size(comm: Communicator, *sizes: float) -> list[float]:
    """Return of each number that is not negative the largest that a rank gives; NaN if a rank gives that. Collective.

    In one reduction: such numbers are ordered as the integers of their bits are, and NaN is behind infinity.
    """
    bits = np.abs(np.array(sizes, np.float64)).view(np.int64)
    return [float(each) for each in np.array(greatest(comm, bits.tolist()), np.int64).view(np.float64)]


def gather_numbers(comm: Communicator, values: Sequence[float]) -> NDArray[np.float64]:
    """Return every rank's numbers, at most 7 and as many on each, as one row for each rank. Collective."""
    mine = np.array(values, np.float64)
    board = comm.board
    if board is None:
        return np.array(comm.allgather(mine))
    out = np.empty((comm.size, mine.size), np.int64)
    comm.wait(board.gather(mine.view(np.int64), out))
    return out.view(np.float64)
