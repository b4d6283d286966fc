# SPDX-License-Identifier: Apache-2.0
"""Which engine a context runs."""

from __future__ import annotations

from typing import Any

from ..bindings import Library, version_text
from ..comm import Agreement, Communicator
from ..errors import LayoutError, LibraryNotFoundError
from .base import Engine
from .host import HostEngine

__all__ = ["choose_engine"]

NAMES = ("auto", "host", "cublasmp")


def choose_engine(name: str, comm: Communicator, nccl: Any = None) -> Engine:
    """Return the engine called ``name``; "auto" is cublasmp where every rank can have it, else host.

    Collective over ``comm``.

    Args:
        name: "auto", "host" or "cublasmp".
        comm: the ranks of the context.
        nccl: an NCCL communicator to use, of the same ranks (cublasmp only); its address or nccl4py's object.

    Raises:
        LayoutError: the name is unknown.
        LibraryNotFoundError: "cublasmp" was asked for, and a library, driver or GPU is missing.
        UnsupportedError: "cublasmp" was asked for, and two ranks have one GPU, or the library is too old.
    """
    with Agreement(comm, "Context") as facts:
        facts["engine"] = name
        if name not in NAMES:
            raise LayoutError(f"engine: expected one of {', '.join(NAMES)}, got {name!r}")
    if name == "host":
        return HostEngine(comm, "asked for")
    from .cublasmp import CublasmpEngine, find_device, open_library

    device = find_device(comm)
    library: Library | Exception = LibraryNotFoundError("not tried")
    if not isinstance(device, Exception):
        library = open_library()
        faults = [
            fault for fault in comm.allgather(library if isinstance(library, Exception) else None) if fault
        ]
        if faults:
            library = faults[0]
    fault = device if isinstance(device, Exception) else library
    if isinstance(device, Exception) or isinstance(library, Exception):
        assert isinstance(fault, Exception)
        if name == "auto":
            return HostEngine(comm, f"no cublasmp: {fault}")
        with Agreement(comm, "Context"):
            raise fault
    why = f"cuBLASMp {version_text(library.version)} on GPU {device.bus} of every rank's own"
    return CublasmpEngine(comm, device, library, "asked for" if name == "cublasmp" else why, nccl)
