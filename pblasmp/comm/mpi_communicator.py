# SPDX-License-Identifier: Apache-2.0
"""The ranks of an mpi4py communicator."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import ClosedError, LibraryNotFoundError, PblasmpError, UnsupportedError, install
from ..launchers import Surroundings, parent_rank, surroundings
from .board import Board
from .communicator import Array, Communicator, Request, chunks, chunks_of_elements, described
from .locations import Location
from .notes import Meeting
from .side_channel import SideChannel, broken_channels, number_open

if TYPE_CHECKING:
    from mpi4py import MPI

_DATA, _NOTE = (
    0,
    1,
)  # tags of messages, and of the side channel's, which another one must not take for its own
_LETTER = 256  # bytes that carry a value to other ranks, if it is small
_SIZE = 8  # of them say how many the value has; pickle stops at its end
FINALIZED = "MPI is finalized: the ranks can no longer communicate, so no collective call is possible"

_may_use_mpi: set[tuple[int, Surroundings | None]] = set()
"""This process once it is known to be no child of a rank, and what has started it; a fork has another number."""

_Counts = Counter[tuple[str, int]]
_CALLS, _TO, _FROM = ("calls", 0), "to", "from"
"""What a rank counts on a communicator: collective calls that it has begun, and messages to and from each rank."""


class MpiNotes:
    """Notes as messages of an MPI communicator."""

    def __init__(self, comm: MPI.Comm, counts: _Counts) -> None:
        from mpi4py import MPI

        self._comm, self._mpi, self._gone, self._counts = comm, MPI, MPI.Is_finalized, counts
        self.any_thread = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._sent: list[Request] = []

    def send(self, note: bytes, to: int | None = None) -> None:
        if self._gone():
            return
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank] if to is None else [to]
        self._sent = [each for each in self._sent if not each.Test()]
        self._sent += [self._comm.Isend(note, rank, _NOTE) for rank in others]
        self._counts.update((_TO, rank) for rank in others)

    def arrived(self) -> list[bytes]:
        mpi = self._mpi
        notes: list[bytes] = []
        while not self._gone() and self._comm.Iprobe(mpi.ANY_SOURCE, _NOTE):
            status = mpi.Status()
            self._comm.Probe(mpi.ANY_SOURCE, _NOTE, status)
            note = bytearray(status.Get_count(mpi.BYTE))
            self._comm.Recv(note, status.source, _NOTE)
            self._counts[_FROM, status.source] += 1
            notes.append(bytes(note))
        return notes


class MpiCommunicator:
    """A duplicate of an mpi4py communicator, so that our messages never meet the caller's. See ``Communicator``."""

    def __init__(self, comm: MPI.Comm, channel: SideChannel, *, patient: bool = True) -> None:
        from mpi4py import MPI

        self._mpi, self.gone = MPI, MPI.Is_finalized
        self._made = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.patient = patient
        self.board: Board | None = None
        self.node: Communicator | None = None
        self.channel = channel
        self._locations: list[Location] = []
        self._counts: _Counts = Counter()
        channel.communicators.append((comm, self._counts))
        self._carries_notes = not channel.connected
        if self._carries_notes:
            channel.connect(MpiNotes(comm, self._counts))

    __repr__ = described

    @property
    def _comm(self) -> MPI.Comm:
        """mpi4py's communicator, or a ClosedError: an MPI library that is used after MPI_Finalize ends the process."""
        if self.gone():
            raise ClosedError(FINALIZED)
        if not self._made:
            raise self.channel.error()
        return self._made

    @property
    def handle(self) -> int:
        """The communicator as C has it: MPICH's integer, or Open MPI's address."""
        self.channel.dirty = True  # what is done with it is not counted
        return int(self._mpi._handleof(self._comm))

    @property
    def fortran_handle(self) -> int:
        """The communicator as Fortran has it: an integer."""
        self.channel.dirty = True
        return int(self._comm.py2f())

    def _begun(self, request: Request) -> Request:
        """Count a collective call that has begun."""
        self._counts[_CALLS] += 1
        return self.channel.watch(request)

    def _done(self, request: Request) -> None:
        """Wait for a collective call that has begun."""
        self.wait(self._begun(request))

    def imax(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> Request:
        return self._begun(self._comm.Iallreduce(values, out, op=self._mpi.MAX))

    def allgather(self, value: Any) -> list[Any]:
        mine = pickle.dumps(value)
        letters = np.empty((self.size, _LETTER), np.uint8)
        self._done(self._comm.Iallgather(_letter(mine), letters))
        sizes = letters[:, :_SIZE].copy().view(np.int64).ravel()
        if sizes.max() <= _LETTER - _SIZE:
            return [pickle.loads(letter[_SIZE:].tobytes()) for letter in letters]
        ends = np.cumsum(sizes)
        everyones = np.empty(ends[-1], np.uint8)
        self._done(self._comm.Iallgatherv(mine, (everyones, sizes, ends - sizes, self._mpi.BYTE)))
        return [
            pickle.loads(everyones[end - size : end].tobytes())
            for size, end in zip(sizes.tolist(), ends.tolist(), strict=True)
        ]

    def bcast(self, value: Any, root: int = 0) -> Any:
        mine = pickle.dumps(value) if self.rank == root else b""
        letter = _letter(mine)
        self._done(self._comm.Ibcast(letter, root))
        size = int(letter[:_SIZE].view(np.int64)[0])
        data = letter[_SIZE:]
        if size > len(data):
            data = np.frombuffer(bytearray(mine), np.uint8) if self.rank == root else np.empty(size, np.uint8)
            self._done(self._comm.Ibcast(data, root))
        return value if self.rank == root else pickle.loads(data.tobytes())

    def barrier(self) -> None:
        self._done(self._comm.Ibarrier())

    def wait(self, request: Request, place: Meeting | None = None) -> None:
        sleep = getattr(request, "sleep", None)  # if it is a board's request
        self.channel.until(request.Test, patient=self.patient, sleep=sleep, place=place)

    def wait_some(self, requests: Sequence[Request]) -> list[int]:
        found: list[int] = []

        def done() -> bool:
            found.extend(self.test_some(requests))
            return bool(found)

        self.channel.until(done, patient=self.patient)
        return found

    def test_some(self, requests: Sequence[Request]) -> list[int]:
        return self._mpi.Request.Testsome(requests) or []

    def sum_into(self, array: Array) -> None:
        for chunk in chunks_of_elements(array):
            self._done(self._comm.Iallreduce(self._mpi.IN_PLACE, chunk, op=self._mpi.SUM))

    def bcast_into(self, array: Array, root: int) -> None:
        for chunk in chunks(array):
            self._done(self._comm.Ibcast(chunk, root))

    def isend(self, array: Array, dest: int) -> list[Request]:
        return [self.isend_whole(chunk, dest) for chunk in chunks(array)]

    def irecv(self, array: Array, source: int) -> list[Request]:
        return [self.irecv_at_most(chunk, source) for chunk in chunks(array)]

    def isend_whole(self, data: Array, dest: int) -> Request:
        """Start sending contiguous data in one message. Local."""
        sent = self.channel.watch(self._comm.Isend(data, dest, _DATA))
        self._counts[_TO, dest] += 1
        return sent

    def irecv_at_most(self, room: Array, source: int) -> Request:
        """Start receiving one message, which may be shorter than ``room``, which is contiguous. Local."""
        begun = self.channel.watch(self._comm.Irecv(room, source, _DATA), receives=True)
        self._counts[_FROM, source] += 1
        return begun

    # -- messages that the compiled core sends

    def for_core(self, ranks: Collection[int]) -> tuple[int | None, ...]:  # noqa: ARG002
        # it is empty where MPI's functions cannot be found: a library may hide them
        library = ctypes.CDLL(self._mpi.__file__)  # its names are those that mpi4py calls
        names = "MPI_Isend", "MPI_Irecv", "MPI_Test"
        if not all(hasattr(library, name) for name in names):
            return ()
        functions = (ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names)
        return *functions, *map(self._mpi._handleof, (self._mpi.BYTE, self._comm)), _DATA

    def request(self) -> tuple[Request, int]:
        made = self._mpi.Request()
        return made, self._mpi._addressof(made)

    def count_messages(self, rank: int, number: int, *, receives: bool) -> None:
        self._counts[_FROM if receives else _TO, rank] += number

    def failure(self, code: int) -> Exception:
        error: Exception = self._mpi.Exception(code)
        return error

    def locations(self) -> list[Location]:
        if not self._locations:
            mine = tuple(Location.here())  # without the name of its class it fits in a letter
            self._locations = [Location(*each) for each in self.allgather(mine)]
        return self._locations

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        color = next(i for i, group in enumerate(groups) if self.rank in group)
        self._counts[_CALLS] += 1
        with _enough_communicators():
            return MpiCommunicator(self._comm.Split(color, self.rank), self.channel, patient=self.patient)

    def duplicate(self) -> Communicator:
        mpi()
        self._counts[_CALLS] += 2
        return duplicate_of(self._comm)

    def abort(self, code: int) -> NoReturn:
        if not self.gone():
            self._comm.Abort(code)
        os._exit(code)  # MPICH's MPI_Abort may return before the launcher ends the job

    def free(self) -> None:
        self.board = None
        if not self.gone():
            if self._carries_notes:
                self.channel.close()
            self._comm.Free()


def _letter(data: bytes) -> NDArray[np.uint8]:
    """Return a fixed number of bytes: the size of some data, and the data themselves if they fit. Local."""
    head = len(data).to_bytes(_SIZE, sys.byteorder) + data[: _LETTER - _SIZE]
    return np.frombuffer(bytearray(head.ljust(_LETTER, b"\0")), np.uint8)


def check_world(nranks: int, launcher: str) -> None:
    """Raise LibraryNotFoundError unless the MPI library sees the ``nranks`` ranks that ``launcher`` started. Local.

    If mpirun belongs to a different MPI from mpi4py's library, each rank is alone in its COMM_WORLD.
    """
    MPI = mpi()
    if MPI.COMM_WORLD.size < nranks:
        library = " ".join(MPI.Get_library_version().strip("\0 ").split("\n")[0].split())
        raise LibraryNotFoundError(
            f"{launcher} started {nranks} ranks, but mpi4py's MPI library ({library}) sees {MPI.COMM_WORLD.size}: "
            "the launcher belongs to another MPI. Use the mpirun of that library; pblasmp info shows both, "
            "PBLASMP_MPIRUN names the one that pblasmp starts. For separate one-rank jobs, pass MPI.COMM_SELF"
        )


def mpi() -> Any:
    """Return mpi4py's MPI, ready for communication. Local.

    Raises:
        LibraryNotFoundError: no MPI library can be loaded.
        UnsupportedError: this process is a child of a rank, or MPI is not initialized.
        ClosedError: MPI is finalized.
    """
    around = surroundings()
    known = os.getpid(), around
    parent = None if around is None or known in _may_use_mpi else parent_rank(around)
    if around is not None and parent is not None:
        prefix = around.variable.partition("_")[0]
        raise UnsupportedError(
            f"this process is a child of rank {around.rank} (process {parent}), which uses MPI already, and "
            f"{around.title} lets each rank do so once. To run it on its own, start it without the launcher's "
            f"environment variables: {around.variable} and the others that begin with {prefix}_"
        )
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LibraryNotFoundError(
            f"an MPI launcher started this process, but no MPI library can be loaded ({error}): {install('mpi')}"
        ) from None
    if not MPI.Is_initialized():
        raise UnsupportedError(
            "MPI is not initialized, since mpi4py.rc.initialize was set to False: call MPI.Init() before"
        )
    if MPI.Is_finalized():
        raise ClosedError(FINALIZED)
    _may_use_mpi.add(known)
    return MPI


def duplicate_of(comm: MPI.Comm) -> MpiCommunicator:
    """Return a duplicate with a separate channel, once all ranks have arrived."""
    members = world_ranks(comm)
    channel = SideChannel(comm.rank, members)
    broken = np.array([len(broken_channels(members))])
    most = np.empty_like(broken)
    here = comm.Iallreduce(broken, most, op=mpi().MAX)  # a barrier, too
    channel.until(channel.watch(here).Test, patient=True, place=channel.making())
    if most[0]:
        _free_broken(comm, members)
    with _enough_communicators():
        return MpiCommunicator(comm.Dup(), channel)


_Tally = tuple[tuple[int, ...], int, _Counts]
"""Who has a communicator, a rank of these, and what it has counted."""


def _free_broken(comm: MPI.Comm, members: tuple[int, ...]) -> None:
    """Free communicators of broken contexts of these processes where nothing is under way. Collective over ``comm``.

    Of others messages may be left, which a later communicator that gets the same number would take for its own.
    """
    mine = {channel.index: channel for channel in broken_channels(members)}
    for channel in mine.values():
        channel.look()
    everyones = comm.allgather(
        {
            index: [(world_ranks(each), each.rank, counts) for each, counts in channel.communicators]
            for index, channel in mine.items()
            if channel.is_idle() and all(each != mpi().COMM_NULL for each, _ in channel.communicators)
        }
    )
    for index in sorted(set.intersection(*(set(each) for each in everyones))):
        of_ranks = [each[index] for each in everyones]
        alike = len(set(map(len, of_ranks))) == 1  # else a rank was left behind while they were made
        if alike and all(map(_is_over, zip(*of_ranks, strict=True))):
            channel = mine[index]
            channel.close()
            for each, _ in channel.communicators:
                each.Free()
            channel.forget_broken()


def _is_over(tallies: Sequence[_Tally]) -> bool:
    """Return whether all that ranks have begun on a communicator, or on one of each node, they have done together."""
    counts: dict[tuple[int, ...], list[tuple[int, _Counts]]] = {}
    for members, rank, each in tallies:
        counts.setdefault(members, []).append((rank, each))
    for members, of_ranks in counts.items():
        open_: Counter[tuple[int, int]] = Counter()
        for rank, each in of_ranks:
            for (kind, other), count in each.items():
                if kind == _TO:
                    open_[rank, other] += count
                elif kind == _FROM:
                    open_[other, rank] -= count
        calls = {each[_CALLS] for _, each in of_ranks}
        if any(open_.values()) or len(calls) > 1 or len(of_ranks) < len(members):
            return False
    return True


def world_ranks(comm: MPI.Comm) -> tuple[int, ...]:
    """Return the ranks in COMM_WORLD of a communicator's processes. Local."""
    from mpi4py import MPI

    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return tuple(group.Translate_ranks(None, world))
    finally:
        group.Free()
        world.Free()


@contextlib.contextmanager
def _enough_communicators() -> Iterator[None]:
    """Explain the error if MPI cannot make another communicator."""
    from mpi4py import MPI

    try:
        yield
    except MPI.Exception as error:
        reason = str(error).splitlines()[0]
        raise PblasmpError(
            f"MPI cannot make another communicator ({reason}); {number_open()} contexts of this process are open or "
            "were never closed, and each holds communicators: close those that are no longer used"
        ) from error
