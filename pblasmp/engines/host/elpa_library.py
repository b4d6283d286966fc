# SPDX-License-Identifier: Apache-2.0
"""ELPA on the ranks of a context."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...comm import Agreement, Communicator
from ...errors import LibraryNotFoundError, StatusError, UnsupportedError
from ...layout import Grid, MatrixDescriptor
from .mpi_libraries import OPEN_MPI, MpiLibrary, library_of

Array = NDArray[Any]

_API = 20170403  # the oldest that all releases since have
_FAILED = -13  # ELPA_ERROR_DURING_COMPUTATION
# As the names of functions end: since 2021, and before.
_ENDINGS = {
    "f": ("float", "f"),
    "d": ("double", "d"),
    "F": ("float_complex", "fc"),
    "D": ("double_complex", "dc"),
}


def _install(mpi: str) -> str:
    package = "the package libelpa19 of Debian and Ubuntu, or another of their libelpa"
    return (
        package
        if mpi == OPEN_MPI
        else f"one that is built for {mpi}: ELPA's own sources, or Fedora's package"
    )


ELPA = MpiLibrary("ELPA", "PBLASMP_ELPA_LIBRARY", ("libelpa.so*", "libelpa_openmp.so*"), _install)
"""ELPA with MPI."""


def elpa_of(engine: Any) -> Elpa | str:
    """Return ELPA, or why a rank has none. Collective over the context."""
    found: Elpa | str = library_of(engine, ELPA, Elpa)
    return found


class Elpa:
    """ELPA on the ranks of a context. Making one is collective over them.

    Args:
        comm: the ranks.
        libraries: as ``ELPA.opened`` returns them.

    Attributes:
        single: whether it was built with single precision.
    """

    def __init__(self, comm: Communicator, libraries: Sequence[ctypes.CDLL]) -> None:
        self._comm, self._library = comm, libraries[0]
        with Agreement(comm, "ELPA"):
            if self._find("elpa_init")(_API):
                raise UnsupportedError(f"{self._library._name} lacks the interface of {_API}")
            self._find("elpa_allocate").restype = ctypes.c_void_p
        one = MatrixDescriptor((1, 1), (1, 1), Grid(1, comm.size), dtype="float32", order="F")
        self.single = not self.solve(one, np.ones((1, 1), np.float32, "F"), None, 1)[0]

    def _find(self, *names: str) -> Any:
        for name in names:
            if hasattr(self._library, name):
                return getattr(self._library, name)
        raise LibraryNotFoundError(f"{self._library._name} has no {names[0]}")

    def solve(self, x: MatrixDescriptor, a: Array, z: Array | None, count: int) -> tuple[int, Array]:
        """Compute eigenvalues, and eigenvectors if there is an array for them. Collective over the context.

        Args:
            x: the layout of A: square blocks, from the first process on.
            a: A's local array, both triangles, in F order without gaps; it is overwritten.
            z: an array like ``a`` for the vectors, or None.
            count: how many are wanted, from the least on.

        Returns:
            0, or an INFO, and the eigenvalues.
        """
        comm, values = self._comm, np.zeros(x.shape[0], a.real.dtype)
        job = "elpa_eigenvalues" if z is None else "elpa_eigenvectors"
        arrays = [each.ctypes.data_as(ctypes.c_void_p) for each in (a, values, z) if each is not None]
        row, col = x.grid.coords(comm.rank)
        rows, cols = x.local_shape(comm.rank)
        numbers = {
            "na": x.shape[0],
            "nev": count,
            "local_nrows": max(1, rows),
            "local_ncols": cols,
            "nblk": x.block[0],
            "mpi_comm_parent": comm.fortran_handle,  # type: ignore[attr-defined]
            "process_row": row,
            "process_col": col,
        }
        error = ctypes.c_int()
        with Agreement(comm, "ELPA"):
            compute = self._find(*(f"{job}_{ending}" for ending in _ENDINGS[x.dtype.char]))
            handle = ctypes.c_void_p(self._find("elpa_allocate")(ctypes.byref(error)))
            for name, number in numbers.items():
                if not error.value:
                    self._find("elpa_set_integer")(handle, name.encode(), number, ctypes.byref(error))
            _checked("elpa_set_integer", error.value)
        with Agreement(comm, "ELPA", blocks=True):
            _checked("elpa_setup", self._find("elpa_setup")(handle))
        with Agreement(comm, "ELPA", blocks=True):
            compute(handle, *arrays, ctypes.byref(error))
            found = error.value
            self._find("elpa_deallocate")(handle, ctypes.byref(error))
            _checked(job, found if found != _FAILED else 0)
        return -min(comm.allgather(found)), values

    def close(self) -> None:
        """Keep the library: other contexts may use it. Local."""


def _checked(what: str, error: int) -> None:
    if error:
        raise StatusError(f"{what}: ELPA's error {error}")
