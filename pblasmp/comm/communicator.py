# SPDX-License-Identifier: Apache-2.0
"""The few things pblasmp asks of a communicator: of mpi4py's, of PyTorch's, or of a single process without either."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..errors import LayoutError, LibraryNotFoundError, UnsupportedError

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Communicator", "Request", "chunks", "wrap"]

_CHUNK_BYTES = 1 << 30  # MPI 3 counts in 32-bit ints
_YIELDS = 500  # polls that give the core to whoever else is ready, before a wait sleeps: a sleep takes longer
_PAUSE_SECONDS = 2e-5
_LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_STEP_NUM_TASKS")
_TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"

Array = NDArray[Any]
Request: TypeAlias = Any  # something under way, mpi4py's or what has a Test() like it


@runtime_checkable
class Communicator(Protocol):
    """What pblasmp asks of a group of ranks.

    Attributes:
        rank, size: this process's number, and how many there are.
        broken: a rank has left for good; nothing collective can follow.
        patient: waits leave the core to others: for nodes with fewer cores than ranks, where a rank that waits busily
            takes time from those it waits for.
    """

    rank: int
    size: int
    broken: bool
    patient: bool

    def imax(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> Request | None:
        """Start writing the element-wise maximum over the ranks into ``out``; None when it is there. Collective."""

    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in rank order. Collective."""

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the root's ``value``. Collective."""

    def barrier(self) -> None:
        """Wait until every rank is here. Collective."""

    def sum_into(self, array: Array) -> None:
        """Replace ``array`` (contiguous, float or complex) by its sum over the ranks. Collective."""

    def bcast_into(self, array: Array, root: int) -> None:
        """Replace ``array`` (contiguous) by the root's. Collective."""

    def wait(self, request: Request) -> None:
        """Wait for a request. Local."""

    def wait_any(self, requests: Sequence[Request]) -> int:
        """Wait for one of several requests, return which. Local."""

    def test_any(self, requests: Sequence[Request]) -> int | None:
        """Return which of several requests is done, None where none is. Local."""

    def isend(self, array: Array, dest: int) -> list[Request]:
        """Start sending ``array`` (contiguous in either order), which stays as it is until they are done. Local."""

    def irecv(self, array: Array, source: int) -> list[Request]:
        """Start receiving into ``array`` (contiguous in either order). Local."""

    def nodes(self) -> list[tuple[int, ...]]:
        """Return the ranks of each node, every node's ascending, nodes by their first rank. Collective."""

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """Return a communicator of the group in ``groups`` that holds this rank. Collective."""

    def abort(self, code: int) -> None:
        """End every rank at once. Local."""

    def free(self) -> None:
        """Give up what wrap() or split() made. Collective."""


class _Serial:  # its arguments matter only where there are several ranks
    """One process without MPI."""

    rank = 0
    size = 1
    broken = False
    patient = False

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

    def wait(self, request: Request) -> None:  # noqa: ARG002
        raise AssertionError("a single rank has nothing to wait for")

    def wait_any(self, requests: Sequence[Request]) -> int:  # noqa: ARG002
        raise AssertionError("a single rank has nothing to wait for")

    test_any = wait_any

    def isend(self, array: Array, dest: int) -> list[Request]:  # noqa: ARG002
        raise AssertionError("a single rank has nobody to send to")

    irecv = isend

    def nodes(self) -> list[tuple[int, ...]]:
        return [(0,)]

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:  # noqa: ARG002
        return self

    def abort(self, code: int) -> None:
        os._exit(code)

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


def _pause(polls: int) -> int:
    """Leave the core to others for a moment and return ``polls + 1``. Local."""
    if polls < _YIELDS and hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(_PAUSE_SECONDS)
    return polls + 1


class _Mpi:
    """A duplicate of an mpi4py communicator, so that our messages never meet the caller's."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.broken = False
        self.patient = False

    def imax(self, values: NDArray[np.int64], out: NDArray[np.int64]) -> Request:
        from mpi4py import MPI

        return self._comm.Iallreduce(values, out, op=MPI.MAX)

    def allgather(self, value: Any) -> list[Any]:
        return self._comm.allgather(value)

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self._comm.bcast(value, root)

    def barrier(self) -> None:
        self._comm.Barrier()

    def wait(self, request: Request) -> None:
        if not self.patient:
            request.Wait()
            return
        polls = 0
        while not request.Test():
            polls = _pause(polls)

    def wait_any(self, requests: Sequence[Request]) -> int:
        from mpi4py import MPI

        if not self.patient:
            return MPI.Request.Waitany(requests)
        polls = 0
        while (i := self.test_any(requests)) is None:
            polls = _pause(polls)
        return i

    def test_any(self, requests: Sequence[Request]) -> int | None:
        from mpi4py import MPI

        i, arrived = MPI.Request.Testany(requests)
        return i if arrived else None

    def sum_into(self, array: Array) -> None:
        from mpi4py import MPI

        flat = array.reshape(-1) if array.flags.c_contiguous else array.T.reshape(-1)
        step = _CHUNK_BYTES // array.itemsize
        for at in range(0, flat.size, step):
            self._comm.Allreduce(MPI.IN_PLACE, flat[at : at + step], op=MPI.SUM)

    def bcast_into(self, array: Array, root: int) -> None:
        for chunk in chunks(array):
            self._comm.Bcast(chunk, root)

    def isend(self, array: Array, dest: int) -> list[Request]:
        return [self._comm.Isend(chunk, dest) for chunk in chunks(array)]

    def irecv(self, array: Array, source: int) -> list[Request]:
        return [self._comm.Irecv(chunk, source) for chunk in chunks(array)]

    def nodes(self) -> list[tuple[int, ...]]:
        from mpi4py import MPI

        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank)
        first = node.bcast(self.rank)
        node.Free()
        by_first: dict[int, list[int]] = {}
        for rank, leader in enumerate(self._comm.allgather(first)):
            by_first.setdefault(leader, []).append(rank)
        return [tuple(ranks) for _, ranks in sorted(by_first.items())]

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        color = next(i for i, group in enumerate(groups) if self.rank in group)
        return _Mpi(self._comm.Split(color, self.rank))

    def abort(self, code: int) -> None:
        self._comm.Abort(code)

    def free(self) -> None:
        from mpi4py import MPI

        if not MPI.Is_finalized():
            self._comm.Free()


def wrap(comm: MPI.Comm | ProcessGroup | DeviceMesh | Communicator | None) -> Communicator:
    """Return a communicator of our own over the ranks of ``comm``, which may be one of ours already.

    None is COMM_WORLD; where no MPI launcher started this process, PyTorch's default process group if there is one;
    without either, one process alone.

    Collective over ``comm``.

    Raises:
        LibraryNotFoundError: started by an MPI launcher, but no MPI library can be loaded.
        UnsupportedError: started by torchrun, but there is no process group yet.
        LayoutError: ``comm`` is something else, a group that this rank is not in, or a mesh of several dimensions.
    """
    if not hasattr(comm, "Dup") and isinstance(comm, Communicator):  # that asks COMM_NULL for its size
        return comm.split([range(comm.size)])
    launched_by_mpi = any(name in os.environ for name in _LAUNCHER_VARIABLES)
    dist = sys.modules.get("torch.distributed")  # without it there is no process group either
    if dist is not None and dist.is_available():
        if comm is None and not launched_by_mpi and dist.is_initialized():
            comm = dist.group.WORLD
        meshes = sys.modules.get("torch.distributed.device_mesh")
        if isinstance(comm, dist.ProcessGroup) or (meshes and isinstance(comm, meshes.DeviceMesh)):
            from .process_group import beside

            return beside(comm)
    if comm is None and not launched_by_mpi and _TORCHRUN_VARIABLE in os.environ:
        raise UnsupportedError(
            "this process was started by torchrun, but PyTorch has no process group: "
            "call torch.distributed.init_process_group first"
        )
    if comm is None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            if launched_by_mpi:
                raise LibraryNotFoundError(
                    f"this process was started by an MPI launcher, but MPI cannot be loaded ({error}): "
                    "install one MPI, for example with pip install 'pblasmp[mpi]'"
                ) from None
            return _Serial()
        comm = MPI.COMM_WORLD
    if not hasattr(comm, "Dup"):
        raise LayoutError(
            f"comm: expected an mpi4py communicator or a process group of this rank's, or a device mesh, got {comm!r}"
        )
    mpi = cast("MPI.Comm", comm)
    if not mpi or mpi.Is_inter():  # COMM_NULL is false
        what = "an intercommunicator" if mpi else "COMM_NULL, as ranks outside a communicator have it"
        raise LayoutError(f"comm: expected a communicator that this rank is in, got {what}")
    return _Mpi(mpi.Dup())
