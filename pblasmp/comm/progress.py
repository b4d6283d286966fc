# SPDX-License-Identifier: Apache-2.0
"""Flags in memory that the ranks of a node share: one rank says that something is ready, the others wait for it."""

from __future__ import annotations

import os
import time

import numpy as np
from numpy.typing import NDArray

from . import futex
from .communicator import Communicator

__all__ = ["Progress"]

_BUSY_SECONDS = 1e-3  # that a wait only yields the core
_NAP_SECONDS = 0.01  # longest sleep of a rank that nobody wakes: notes may have to be read


class Progress:
    """Numbered things, each of which one rank makes and all ranks may wait for. Making one is local.

    Args:
        comm: the ranks, which are on one node.
        flags: one int64 for each thing, in shared memory and 0 at first. A processor must show other processes what
            it wrote before a flag no later than the flag; where ``comm.board`` is not None it does.
    """

    def __init__(self, comm: Communicator, flags: NDArray[np.int64]) -> None:
        self._comm, self._flags = comm, flags
        self._address = flags.ctypes.data

    def done(self, i: int) -> None:
        """Say that thing ``i`` is ready. Local."""
        self._flags[i] = 1
        futex.wake(self._address + 8 * i)

    def wait(self, i: int) -> None:
        """Wait until thing ``i`` is ready. Local."""
        if not self._flags[i]:
            self._comm.wait(_Awaited(self._flags, i, self._address + 8 * i))


class _Awaited:
    """The wait for one thing, with the interface of the requests of mpi4py and of process groups."""

    def __init__(self, flags: NDArray[np.int64], i: int, address: int) -> None:
        self._flags, self._i, self._word = flags, i, address
        self._since = time.monotonic()

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        return bool(self._flags[self._i])

    def sleep(self) -> None:
        """Sleep until it is ready, but not for long."""
        futex.sleep_while(self._word, 0, _NAP_SECONDS)

    def pause(self) -> None:
        """Yield the core, and sleep if the wait is long."""
        if time.monotonic() - self._since < _BUSY_SECONDS:
            os.sched_yield()
        else:
            self.sleep()
