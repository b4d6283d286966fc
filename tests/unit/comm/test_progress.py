# SPDX-License-Identifier: Apache-2.0
"""Flags in shared memory: a wait ends when the flag is raised, or when the communicator says that it cannot."""

import threading
import time

import numpy as np
import pytest

from pblasmp import ClosedError
from pblasmp.comm.shared_memory import Progress


class Waits:
    """A communicator that sleeps until a request is done, at most ``most`` times: as MPI does, or a process group."""

    def __init__(self, most, how="sleep"):
        self.most, self.how, self.slept, self.patient = most, how, 0, True

    def wait(self, request, place=None):
        while not request.Test():
            if self.slept == self.most:
                raise ClosedError("the context is broken")
            self.slept += 1
            getattr(request, self.how)()


@pytest.mark.parametrize("how", ["sleep", "pause"])
def test_a_wait_ends_when_another_thread_raises_the_flag(how):
    comm, flags = Waits(10_000_000, how), np.zeros(3, np.int64)
    progress = Progress(comm, flags)

    def finish():
        while not comm.slept:
            time.sleep(0.001)
        progress.done(1)

    other = threading.Thread(target=finish)
    other.start()
    progress.wait(1)
    other.join()
    assert flags.view(np.int32)[::2].tolist() == [0, 1, 0]


def test_what_is_ready_is_not_waited_for():
    comm = Waits(0)
    progress = Progress(comm, np.array([0, 1], np.int64))
    progress.wait(1)
    with pytest.raises(ClosedError):
        progress.wait(0)
