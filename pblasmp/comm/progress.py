# SPDX-License-Identifier: Apache-2.0
"""Flags in memory that the ranks of a node share: one rank says that something is ready, the others wait for it."""

from __future__ import annotations

import ctypes
import os
import time

import numpy as np
from numpy.typing import NDArray

from .. import _core
from .board import BUSY_SECONDS, NAP_SECONDS, YIELDS
from .communicator import Communicator


class Progress:
    """Numbered things, each of which one rank makes and all ranks may wait for. Making one is local.

    Args:
        comm: the ranks, which have a board.
        flags: one int64 for each thing, in shared memory and 0 at first.
    """

    def __init__(self, comm: Communicator, flags: NDArray[np.int64]) -> None:
        core = _core.load()
        assert core is not None
        self._comm, self._core = comm, core
        self._flags = flags  # they stay as long as there is an address of theirs
        self._at = ctypes.c_void_p(flags.ctypes.data)

    def done(self, i: int) -> None:
        """Say that thing ``i`` is ready. Local."""
        self._core.flag_raise(self._at, i)

    def wait(self, i: int) -> None:
        """Wait until thing ``i`` is ready. Local."""
        if not self._core.flag_await(self._at, i, YIELDS if self._comm.patient else 0):
            self._comm.wait(_Awaited(self._core, self._at, i))


def await_flag(comm: Communicator, address: int) -> None:
    """Wait until the flag at an address is up. Local."""
    core = _core.load()
    assert core is not None
    comm.wait(_Awaited(core, ctypes.c_void_p(address), 0))


class _Awaited:
    """The wait for one thing, with the interface of the requests of mpi4py and of process groups."""

    def __init__(self, core: _core.Core, at: ctypes.c_void_p, i: int) -> None:
        self._core, self._at, self._i = core, at, i
        self._since = time.monotonic()

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        return bool(self._core.flag_is_up(self._at, self._i))

    def sleep(self) -> None:
        """Sleep until it is ready, but not for long."""
        self._core.flag_sleep(self._at, self._i, int(1e6 * NAP_SECONDS))

    def pause(self) -> None:
        """Yield the core, and sleep if the wait is long."""
        if time.monotonic() - self._since < BUSY_SECONDS:
            os.sched_yield()
        else:
            self.sleep()
