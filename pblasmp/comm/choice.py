# SPDX-License-Identifier: Apache-2.0
"""Which communicator a context gets: MPI's, PyTorch's, or that of a process by itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, ArgumentTypeError, LibraryNotFoundError, UnsupportedError, short_repr
from ..launchers import surroundings
from .board import Board
from .communicator import Array, Communicator, Request, described
from .locations import Location
from .mpi_communicator import check_world, duplicate_of, mpi
from .notes import Meeting
from .side_channel import SideChannel

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"


class Serial:  # its arguments matter only if there are several ranks
    """One process without MPI."""

    rank = 0
    size = 1
    patient = False
    board: Board | None = None
    node: Communicator | None = None

    def __init__(self) -> None:
        self.channel = SideChannel(0, (0,))

    __repr__ = described

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

    def wait_some(self, requests: Sequence[Request]) -> list[int]:  # noqa: ARG002
        raise AssertionError("a single rank has nothing to wait for")

    test_some = wait_some

    def isend(self, array: Array, dest: int) -> list[Request]:  # noqa: ARG002
        raise AssertionError("a single rank has no other rank to send to")

    irecv = isend

    def locations(self) -> list[Location]:
        return [Location.here()]

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


def wrap(comm: MPI.Comm | ProcessGroup | DeviceMesh | Communicator | None) -> Communicator:
    """Return a communicator of pblasmp's own over the ranks of ``comm``, which may be one already.

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
    if not hasattr(comm, "Is_inter"):
        raise ArgumentTypeError(
            "comm: expected an mpi4py communicator, a process group that this rank is in, or a device mesh, "
            f"got {short_repr(comm)}"
        )
    given = cast("MPI.Comm", comm)
    if given == mpi().COMM_WORLD and launcher is not None and launcher.size is not None:
        check_world(launcher.size, launcher.title)
    if not given or given.Is_inter():  # COMM_NULL is false
        what = "an intercommunicator" if given else "COMM_NULL, as ranks outside a communicator have it"
        raise ArgumentError(f"comm: expected a communicator that this rank is in, got {what}")
    return duplicate_of(given)
