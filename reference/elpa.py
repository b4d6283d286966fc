# SPDX-License-Identifier: Apache-2.0
"""Debian's ELPA, and the Open MPI that it is built for, unpacked but not installed: for tests and benchmarks.

``python -m benchmarks.fetch_scalapack --only elpa`` puts them into the cache.
"""

from __future__ import annotations

import ctypes
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .scalapack import cache

__all__ = ["command", "eigenvectors", "environment", "locate_elpa"]

_ARCHITECTURE = sysconfig.get_config_var("MULTIARCH") or f"{os.uname().machine}-linux-gnu"


def locate_elpa() -> Path | None:
    """Return the folder into which it is unpacked; None without it."""
    folder = cache() / "elpa"
    return folder if list(folder.glob("usr/lib/*/libelpa.so*")) else None


def command(folder: Path, nranks: int) -> list[str]:
    """Return the command that starts ranks with this Open MPI, to which a program is added."""
    return [str(folder / "usr/bin/orterun"), "--oversubscribe", "-n", str(nranks)]


def environment(folder: Path) -> dict[str, str]:
    """Return the variables with which mpi4py and pblasmp find Open MPI and ELPA there."""
    libraries = folder / "usr/lib" / _ARCHITECTURE
    places = [libraries, libraries / "openmpi/lib", folder / "lib" / _ARCHITECTURE]
    # OpenBLAS as libblas.so.3 and liblapack.so.3, as Debian's alternatives have it.
    places.append(libraries / "openblas-pthread")
    return {
        "PBLASMP_ELPA_LIBRARY": str(libraries),
        "MPI4PY_MPIABI": "openmpi",
        "MPI4PY_LIBMPI": str(libraries / "libmpi.so.40"),
        "OPAL_PREFIX": str(folder / "usr"),
        "OPAL_LIBDIR": str(libraries),
        "OPAL_DATADIR": str(folder / "usr/share"),
        "OMPI_MCA_mca_base_component_path": str(libraries / "openmpi/lib/openmpi3"),
        "PMIX_MCA_pcompress_base_silence_warning": "1",
        # One machine is enough: without these, networks are looked for.
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,vader",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "LD_LIBRARY_PATH": ":".join(map(str, places)),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), *sys.path])),
    }


def eigenvectors(comm: Any, a: Any, w: Any, z: Any) -> Callable[[], None]:
    """Return what calls ELPA on this rank's float64 arrays, all but the call prepared. Collective over the ranks.

    Args:
        comm: mpi4py's communicator of all ranks.
        a: a matrix of pblasmp in F order; its local array is read anew by each call, both triangles.
        w: where the eigenvalues go.
        z: where the eigenvectors go, an array like the local one.
    """
    from mpi4py import MPI

    ctypes.CDLL(os.environ["MPI4PY_LIBMPI"], mode=ctypes.RTLD_GLOBAL)  # mpi4py keeps MPI's names to itself
    library = ctypes.CDLL(str(min(Path(os.environ["PBLASMP_ELPA_LIBRARY"]).glob("libelpa.so*"))))
    assert MPI.Comm.Compare(comm, MPI.COMM_WORLD) == MPI.IDENT
    error = ctypes.c_int()
    assert library.elpa_init(20170403) == 0
    library.elpa_allocate.restype = ctypes.c_void_p
    handle = ctypes.c_void_p(library.elpa_allocate(ctypes.byref(error)))
    d, copy = a.descriptor, a.local.copy(order="F")
    row, col = d.grid.coords(comm.rank)
    for name, value in (
        ("na", d.shape[0]), ("nev", d.shape[0]), ("nblk", d.block[0]),
        ("local_nrows", copy.shape[0]), ("local_ncols", copy.shape[1]),
        ("mpi_comm_parent", comm.py2f()), ("process_row", row), ("process_col", col),
    ):  # fmt: skip
        library.elpa_set_integer(handle, name.encode(), value, ctypes.byref(error))
        assert error.value == 0, name
    assert library.elpa_setup(handle) == 0
    arrays = [each.ctypes.data_as(ctypes.c_void_p) for each in (copy, w, z)]

    def call() -> None:
        copy[...] = a.local
        library.elpa_eigenvectors_double(handle, *arrays, ctypes.byref(error))
        assert error.value == 0

    return call
