# SPDX-License-Identifier: Apache-2.0
"""Flags in memory that the ranks of a node share: one rank says that something is ready, the others wait for it."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import futex
from .communicator import Communicator
from .futex import BUSY_SECONDS, NAP_SECONDS, POLLS

__all__ = ["Progress"]


class Progress:
    """Numbered things, each of which one rank makes and all ranks may wait for. Making one is local.

    Args:
        comm: the ranks, which are on one node.
        flags: one int64 for each thing, in shared memory and 0 at first; its lower half becomes 1. A processor must
            show other processes what it wrote before a flag no later than the flag; if ``comm.board`` is not None it
            does.
    """

    def __init__(self, comm: Communicator, flags: NDArray[np.int64]) -> None:
        self._comm = comm
        self._words: Any = flags.view(np.int32).data  # of each thing: it is ready, a rank sleeps
        self._address = flags.ctypes.data

    def done(self, i: int) -> None:
        """Say that thing ``i`` is ready. Local."""
        words, at = self._words, 2 * i
        words[at] = 1
        if words[at + 1]:  # a rank that falls asleep at this moment may be missed: it wakes up after a nap
            futex.wake(self._address + 8 * i)

    def wait(self, i: int) -> None:
        """Wait until thing ``i`` is ready. Local."""
        words, at = self._words, 2 * i
        if words[at]:
            return
        patient = self._comm.patient
        for _ in range(POLLS):
            if patient:
                os.sched_yield()
            if words[at]:
                return
        self._comm.wait(_Awaited(words, at, self._address + 8 * i))


class _Awaited:
    """The wait for one thing, with the interface of the requests of mpi4py and of process groups."""

    def __init__(self, words: Any, at: int, address: int) -> None:
        self._words, self._at, self._word = words, at, address
        self._since = time.monotonic()

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        return bool(self._words[self._at])

    def sleep(self) -> None:
        """Sleep until it is ready, but not for long."""
        self._words[self._at + 1] = 1
        futex.sleep_while(self._word, 0, NAP_SECONDS)

    def pause(self) -> None:
        """Yield the core, and sleep if the wait is long."""
        if time.monotonic() - self._since < BUSY_SECONDS:
            os.sched_yield()
        else:
            self.sleep()
