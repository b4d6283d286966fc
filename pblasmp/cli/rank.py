# SPDX-License-Identifier: Apache-2.0
"""One rank that the command line has started: it reads its work from a directory and answers through it."""

from __future__ import annotations

import gc
import pickle
import sys
from pathlib import Path

from ..comm.mpi_communicator import check_world
from ..launchers import surroundings
from ..logs import show_logs
from .reports import Channel, LogHandler, warnings_to


def main(directory: Path) -> int:
    """Do the work ordered in ``directory`` and report its outcome there. Collective over the job's ranks."""
    work, options, nranks = pickle.loads((directory / "orders").read_bytes())
    gc.freeze()
    gc.enable()
    around = surroundings()
    channel = Channel(directory, around.rank if around else 0)
    try:
        show_logs(LogHandler(channel))
        if nranks == 1:
            sys.modules["mpi4py"] = None  # type: ignore[assignment]  # one rank needs no MPI: none is tried
        else:
            check_world(nranks, around.title if around else "mpirun")
        with warnings_to(channel.warning):
            channel.result(work(options, channel))
    except Exception as error:  # noqa: BLE001 (whatever it is, the parent tells it)
        channel.error(error)
        return 1
    return 0
