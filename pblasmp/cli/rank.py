# SPDX-License-Identifier: Apache-2.0
"""One rank that the command line has started: ``python -m pblasmp.cli.rank DIRECTORY``."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from ..errors import LibraryNotFoundError
from ..launch import surroundings
from .progress import Channel

__all__: list[str] = []


def main(directory: Path) -> int:
    """Do the work ordered in ``directory`` and tell its outcome there. Collective over the job's ranks."""
    work, options, nranks = pickle.loads((directory / "orders").read_bytes())
    around = surroundings()
    channel = Channel(directory, around.rank if around else 0)
    try:
        _check_world(nranks)
        channel.result(work(options, channel))
    except Exception as error:  # noqa: BLE001 (whatever it is, the parent tells it)
        channel.error(error)
        return 1
    return 0


def _check_world(nranks: int) -> None:
    """Raise unless the MPI library sees the ranks that the launcher has started."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LibraryNotFoundError(
            f"no MPI library can be loaded ({error}): pip install 'pblasmp[mpi]' brings one"
        ) from error
    if MPI.COMM_WORLD.size != nranks:
        library = MPI.Get_library_version().split("\n")[0].strip("\0 ")
        raise LibraryNotFoundError(
            f"{nranks} ranks were started, but {library} sees {MPI.COMM_WORLD.size}: mpirun belongs to "
            "another MPI; pblasmp info shows both, and PBLASMP_MPIRUN can name the right mpirun"
        )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
