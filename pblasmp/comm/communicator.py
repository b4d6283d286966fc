# SPDX-License-Identifier: Apache-2.0
"""Communicators: mpi4py's, PyTorch's, or a single process without either, with the few methods that pblasmp needs."""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    LibraryNotFoundError,
    PblasmpError,
    UnsupportedError,
)
from ..extras import install
from ..launchers import parent_rank, surroundings
from .side_channel import Meeting, SideChannel, number_open

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "FINALIZED",
    "Communicator",
    "MpiCollectives",
    "Request",
    "Votes",
    "check_world",
    "chunks",
    "count_cores",
    "gather_numbers",
    "machine",
    "mpi",
    "nodes_of",
    "ranks_per_node",
    "wrap",
]

_CHUNK_BYTES = 1 << 30  # MPI 3 counts in 32-bit ints
_NOTE = 1  # tag of the side channel's messages
FINALIZED = "MPI is finalized: the ranks can no longer communicate, so no collective call is possible"
_TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"

Array = NDArray[Any]
Request: TypeAlias = Any  # mpi4py's request, or another object with such a Test()


class Votes(Protocol):
    """An object through which ranks reduce a few integers."""

    def imax(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> Request | None:
        """Start writing the element-wise maximum over the ranks to ``out``; None if it is done already. Collective."""

    def vote(
        self, number: int, values: Sequence[float] = (), *, patient: bool = False
    ) -> list[tuple[float, ...]] | None:
        """Find out whether all ranks have this number; at most 4 values are told with it: see ``Board``. Collective."""

    def gather(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> Request:
        """Start writing at most 7 integers of each rank into the rows of ``out``. Collective."""

    def arrive(self) -> None:
        """Come to a meeting of all ranks without waiting for the others. Local."""

    def meet(self, *, patient: bool) -> bool:
        """Come to a meeting of all ranks; return whether all come within a moment. Collective."""

    def latest(self) -> Request:
        """Return the reduction, vote or meeting that this rank has begun last, to wait for it. Local."""


@runtime_checkable
class Communicator(Protocol):
    """What pblasmp needs of a group of ranks.

    Attributes:
        rank, size: this process's number, and how many there are.
        channel: the notes between the ranks; shared with the communicator that this one was split from.
        patient: waits yield the core to other processes, for nodes with fewer cores than ranks: there a busy wait
            takes time from the ranks that are waited for. True until an engine has counted the cores.
        board: where its ranks vote, if they share memory; None if votes are messages.
    """

    rank: int
    size: int
    channel: SideChannel
    patient: bool
    board: Votes | None

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

    def wait_any(self, requests: Sequence[Request]) -> int:
        """Wait for one of several requests, and return its index. Local."""

    def test_any(self, requests: Sequence[Request]) -> int | None:
        """Return the index of a request that is done, None if there is none. Local."""

    def isend(self, array: Array, dest: int) -> list[Request]:
        """Start sending ``array`` (contiguous in either order), which stays as it is until they are done. Local."""

    def irecv(self, array: Array, source: int) -> list[Request]:
        """Start receiving into ``array`` (contiguous in either order). Local."""

    def nodes(self) -> list[tuple[int, ...]]:
        """Return the ranks of each node, ascending; nodes are ordered by their first rank. Collective."""

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """Return a communicator of the group in ``groups`` that holds this rank. Collective."""

    def duplicate(self) -> Communicator:
        """Return a communicator of the same ranks with a separate channel. Collective."""

    def abort(self, code: int) -> NoReturn:
        """End every rank at once, this one too. Local."""

    def gone(self) -> bool:
        """Return whether the ranks can no longer communicate, because the user has finalised MPI. Local."""

    def free(self) -> None:
        """Free what wrap() or split() made. Collective."""


@runtime_checkable
class MpiCollectives(Protocol):
    """What only MPI communicators have: collectives over parts of different sizes, in counts of elements."""

    def gather_into(self, part: Array, whole: Array, counts: Sequence[int]) -> None:
        """Write every rank's ``part`` into ``whole``, in rank order (all contiguous in C order). Collective."""

    def sum_scatter_into(self, whole: Array, part: Array, counts: Sequence[int]) -> None:
        """Write the sum over the ranks of this rank's part of ``whole`` into ``part``. Collective."""

    def sum_into(self, array: Array) -> None:
        """As in ``Communicator``. Collective."""


class Serial:  # its arguments matter only if there are several ranks
    """One process without MPI."""

    rank = 0
    size = 1
    patient = False
    board: Votes | None = None

    def __init__(self) -> None:
        self.channel = SideChannel(0, (0,))

    def imax(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> None:
        out[...] = values

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def bcast(self, value: Any, root: int = 0) -> Any:  # noqa: ARG002
        return value

    def barrier(self) -> None:
        pass

    def sum_into(self, array: Array) -> None:
        pass

    def bcast_into(self, array: Array, root: int) -> None:
        pass

    def wait(self, request: Request, place: Meeting | None = None) -> None:  # noqa: ARG002
        raise AssertionError("a single rank has nothing to wait for")

    def wait_any(self, requests: Sequence[Request]) -> int:  # noqa: ARG002
        raise AssertionError("a single rank has nothing to wait for")

    test_any = wait_any

    def isend(self, array: Array, dest: int) -> list[Request]:  # noqa: ARG002
        raise AssertionError("a single rank has no other rank to send to")

    irecv = isend

    def nodes(self) -> list[tuple[int, ...]]:
        return [(0,)]

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:  # noqa: ARG002
        return self

    def duplicate(self) -> Communicator:
        return Serial()

    def abort(self, code: int) -> NoReturn:
        os._exit(code)

    def gone(self) -> bool:
        return False

    def free(self) -> None:
        pass


def _bytes(array: Array) -> Array:
    """Return the bytes of a contiguous array, in memory order."""
    flat = array.reshape(-1) if array.flags.c_contiguous else array.T.reshape(-1)
    return flat.view(np.uint8)


def chunks(array: Array) -> list[Array]:
    """Return the bytes of a contiguous array, in memory order, in parts that fit into a message."""
    data = _bytes(array)
    return [data[at : at + _CHUNK_BYTES] for at in range(0, data.size, _CHUNK_BYTES)]


class _Notes:
    """Notes as messages of an MPI communicator."""

    def __init__(self, comm: MPI.Comm) -> None:
        from mpi4py import MPI

        self._comm, self._mpi, self._gone = comm, MPI, MPI.Is_finalized
        self.any_thread = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._sent: list[Request] = []

    def send(self, note: bytes) -> None:
        if self._gone():
            return
        others = (rank for rank in range(self._comm.size) if rank != self._comm.rank)
        self._sent = [each for each in self._sent if not each.Test()]
        self._sent += [self._comm.Isend(note, rank, _NOTE) for rank in others]

    def arrived(self) -> list[bytes]:
        mpi = self._mpi
        notes: list[bytes] = []
        while not self._gone() and self._comm.Iprobe(mpi.ANY_SOURCE, _NOTE):
            status = mpi.Status()
            self._comm.Probe(mpi.ANY_SOURCE, _NOTE, status)
            note = bytearray(status.Get_count(mpi.BYTE))
            self._comm.Recv(note, status.source, _NOTE)
            notes.append(bytes(note))
        return notes


class _Mpi:
    """A duplicate of an mpi4py communicator, so that our messages never meet the caller's."""

    def __init__(self, comm: MPI.Comm, channel: SideChannel, *, patient: bool = True) -> None:
        from mpi4py import MPI

        self.gone = MPI.Is_finalized
        self._made = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.patient = patient
        self.board: Votes | None = None
        self.channel = channel
        self._nodes: list[tuple[int, ...]] = []
        self._carries_notes = not channel.connected
        if self._carries_notes:
            channel.connect(_Notes(comm))

    @property
    def _comm(self) -> MPI.Comm:
        """The communicator of mpi4py. An MPI library ends the process if it is used after MPI_Finalize.

        Raises:
            ClosedError: MPI is finalized.
        """
        if self.gone():
            raise ClosedError(FINALIZED)
        return self._made

    def _done(self, request: Request) -> None:
        """Wait for a collective call that has begun."""
        self.wait(self.channel.watch(request))

    def imax(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> Request:
        from mpi4py import MPI

        return self.channel.watch(self._comm.Iallreduce(values, out, op=MPI.MAX))

    def allgather(self, value: Any) -> list[Any]:
        from mpi4py import MPI

        mine = pickle.dumps(value)
        sizes = np.empty(self.size, np.intc)
        self._done(self._comm.Iallgather(np.array([len(mine)], np.intc), sizes))
        ends = np.cumsum(sizes, dtype=np.int64)
        everyones = np.empty(ends[-1], np.uint8)
        self._done(self._comm.Iallgatherv(mine, (everyones, sizes, ends - sizes, MPI.BYTE)))
        return [
            pickle.loads(everyones[end - size : end].tobytes())
            for size, end in zip(sizes, ends.tolist(), strict=True)
        ]

    def bcast(self, value: Any, root: int = 0) -> Any:
        mine = np.frombuffer(pickle.dumps(value) if self.rank == root else b"", np.uint8)
        size = np.array([mine.size])
        self._done(self._comm.Ibcast(size, root))
        data = mine.copy() if self.rank == root else np.empty(size[0], np.uint8)
        self._done(self._comm.Ibcast(data, root))
        return value if self.rank == root else pickle.loads(data.tobytes())

    def barrier(self) -> None:
        self._done(self._comm.Ibarrier())

    def wait(self, request: Request, place: Meeting | None = None) -> None:
        sleep = getattr(request, "sleep", None)  # if it is a board's request
        self.channel.until(request.Test, patient=self.patient, sleep=sleep, place=place)

    def wait_any(self, requests: Sequence[Request]) -> int:
        found: list[int] = []

        def done() -> bool:
            i = self.test_any(requests)
            found.extend([] if i is None else [i])
            return i is not None

        self.channel.until(done, patient=self.patient)
        return found[0]

    def test_any(self, requests: Sequence[Request]) -> int | None:
        from mpi4py import MPI

        i, arrived = MPI.Request.Testany(requests)
        return i if arrived else None

    def sum_into(self, array: Array) -> None:
        from mpi4py import MPI

        flat = array.reshape(-1) if array.flags.c_contiguous else array.T.reshape(-1)
        step = _CHUNK_BYTES // array.itemsize
        for at in range(0, flat.size, step):
            self._done(self._comm.Iallreduce(MPI.IN_PLACE, flat[at : at + step], op=MPI.SUM))

    def gather_into(self, part: Array, whole: Array, counts: Sequence[int]) -> None:
        from mpi4py import MPI

        sizes = [count * part.itemsize for count in counts]
        data = whole.reshape(-1).view(np.uint8)
        self._done(self._comm.Iallgatherv([_bytes(part), MPI.BYTE], [data, sizes, MPI.BYTE]))

    def sum_scatter_into(self, whole: Array, part: Array, counts: Sequence[int]) -> None:
        self._done(self._comm.Ireduce_scatter(whole.reshape(-1), part.reshape(-1), counts))

    def bcast_into(self, array: Array, root: int) -> None:
        for chunk in chunks(array):
            self._done(self._comm.Ibcast(chunk, root))

    def isend(self, array: Array, dest: int) -> list[Request]:
        return [self.channel.watch(self._comm.Isend(chunk, dest)) for chunk in chunks(array)]

    def irecv(self, array: Array, source: int) -> list[Request]:
        return [self.channel.watch(self._comm.Irecv(chunk, source), receives=True) for chunk in chunks(array)]

    def nodes(self) -> list[tuple[int, ...]]:
        self._nodes = self._nodes or self._find_nodes()
        return self._nodes

    def _find_nodes(self) -> list[tuple[int, ...]]:
        from mpi4py import MPI

        with _enough_communicators():
            node = self._comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        first = node.bcast(self.rank)
        node.Free()
        by_first: dict[int, list[int]] = {}
        for rank, leader in enumerate(self.allgather(first)):
            by_first.setdefault(leader, []).append(rank)
        return [tuple(ranks) for _, ranks in sorted(by_first.items())]

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        color = next(i for i, group in enumerate(groups) if self.rank in group)
        with _enough_communicators():
            return _Mpi(self._comm.Split(color, self.rank), self.channel, patient=self.patient)

    def duplicate(self) -> Communicator:
        mpi()
        return _duplicate(self._comm)

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


def check_world(nranks: int, launcher: str) -> None:
    """Raise an error unless the MPI library sees the ``nranks`` ranks that ``launcher`` started. Local.

    If mpirun belongs to a different MPI from mpi4py's library, each rank is alone in its COMM_WORLD.

    Raises:
        LibraryNotFoundError: the library sees fewer ranks, or cannot be loaded.
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
    parent = None if around is None else parent_rank(around)
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
    return MPI


def _duplicate(comm: MPI.Comm) -> _Mpi:
    """Return a duplicate with a separate channel, once all ranks have arrived."""
    channel = SideChannel(comm.rank, _processes(comm))
    here = comm.Ibarrier()
    channel.until(channel.watch(here).Test, patient=True, place=channel.making())
    with _enough_communicators():
        return _Mpi(comm.Dup(), channel)


def _processes(comm: MPI.Comm) -> tuple[int, ...]:
    """Return the ranks in COMM_WORLD of a communicator's processes."""
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


def gather_numbers(comm: Communicator, values: Sequence[float]) -> NDArray[np.float64]:
    """Return every rank's numbers, at most 7 and as many on each, as one row for each rank. Collective."""
    mine = np.array(values, np.float64)
    board = comm.board
    if board is None:
        return np.array(comm.allgather(mine))
    out = np.empty((comm.size, mine.size), np.int64)
    comm.wait(board.gather(mine.view(np.int64), out))
    return out.view(np.float64)


def nodes_of(comm: Communicator) -> list[tuple[int, ...]]:
    """Return the ranks of each node; PBLASMP_RANKS_PER_NODE splits a machine into several. Collective."""
    nodes, step = comm.nodes(), ranks_per_node()
    if step is not None:
        nodes = [node[i : i + step] for node in nodes for i in range(0, len(node), step)]
    return nodes


def machine() -> tuple[str, str]:
    """Return this machine's name and what tells it from others of the same name: Linux's boot id, or "". Local."""
    try:
        return platform.node(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node(), ""


def ranks_per_node() -> int | None:
    """Return how many ranks PBLASMP_RANKS_PER_NODE puts on a node, None if it is not set. Local.

    Raises:
        ArgumentError: it is not a positive integer.
    """
    given = os.environ.get("PBLASMP_RANKS_PER_NODE", "")
    if not given:
        return None
    if not (given.isdecimal() and int(given) > 0):
        raise ArgumentError(f"PBLASMP_RANKS_PER_NODE: expected a positive integer, got {given!r}")
    return int(given)


def count_cores(comm: Communicator, ranks: Sequence[int]) -> int:
    """Return how many cores ``ranks``, which are on one node, may run on. Collective over ``comm``."""
    has_affinity = hasattr(os, "sched_getaffinity")
    everyones = comm.allgather(os.sched_getaffinity(0) if has_affinity else set(range(os.cpu_count() or 1)))
    return len(set().union(*(everyones[rank] for rank in ranks)))


def wrap(comm: MPI.Comm | ProcessGroup | DeviceMesh | Communicator | None) -> Communicator:
    """Return a communicator of our own over the ranks of ``comm``, which may be one of ours already.

    None means COMM_WORLD or, if no MPI launcher started this process, PyTorch's default process group if there is one,
    else this process alone.

    Collective over ``comm``.

    Raises:
        LibraryNotFoundError: an MPI launcher started this process, but its MPI library cannot be loaded.
        UnsupportedError: torchrun started this process, but there is no process group yet; MPI is not initialized; or
            this process is a child of a rank.
        ClosedError: MPI is finalized.
        ArgumentError: ``comm`` is something else, a group that this rank is not in, or a mesh of several dimensions.
    """
    # isinstance reads every attribute, and reading the size of COMM_NULL is an error.
    if not hasattr(comm, "Dup") and isinstance(comm, Communicator):
        return comm.duplicate()
    launcher = surroundings()
    dist = sys.modules.get("torch.distributed")  # if it is not imported, there is no process group either
    if dist is not None and dist.is_available():
        if comm is None and launcher is None and dist.is_initialized():
            comm = dist.group.WORLD
        meshes = sys.modules.get("torch.distributed.device_mesh")
        if isinstance(comm, dist.ProcessGroup) or (meshes and isinstance(comm, meshes.DeviceMesh)):
            from .process_group import from_group

            return from_group(comm)
    if comm is None and launcher is None and _TORCHRUN_VARIABLE in os.environ:
        raise UnsupportedError(
            "this process was started by torchrun, but PyTorch has no process group: "
            "call torch.distributed.init_process_group first"
        )
    if comm is None:
        try:
            comm = mpi().COMM_WORLD
        except LibraryNotFoundError:
            if launcher is not None:
                raise
            return Serial()
    if not hasattr(comm, "Dup"):
        raise ArgumentTypeError(
            "comm: expected an mpi4py communicator, a process group that this rank is in, or a device mesh, "
            f"got {comm!r}"
        )
    given = cast("MPI.Comm", comm)
    if given == mpi().COMM_WORLD and launcher is not None and launcher.size is not None:
        check_world(launcher.size, launcher.title)
    if not given or given.Is_inter():  # COMM_NULL is false
        what = "an intercommunicator" if given else "COMM_NULL, as ranks outside a communicator have it"
        raise ArgumentError(f"comm: expected a communicator that this rank is in, got {what}")
    return _duplicate(given)
