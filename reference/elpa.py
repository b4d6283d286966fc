# SPDX-License-Identifier: Apache-2.0
"""Debian's ELPA, and the Open MPI that it is built for, unpacked but not installed: for tests and benchmarks.

``python -m benchmarks.fetch_scalapack --only elpa`` puts them into the cache.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from .scalapack import cache

__all__ = ["command", "environment", "locate_elpa"]

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
