# SPDX-License-Identifier: Apache-2.0
"""The choice of a context's engine."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..comm import Agreement, Communicator, allgather_alike, ranks_per_node
from ..errors import ArgumentError, short_repr
from ..layout.grid import one_of
from .host import HostEngine
from .protocol import Engine

if TYPE_CHECKING:
    from ..bindings import Library

EngineName = Literal["auto", "host", "cublasmp"]
NAMES: tuple[str, ...] = get_args(EngineName)
"""What users and the command line may ask for."""


def choose_engine(name: str, comm: Communicator, nccl: Any = None) -> Engine:
    """Return the engine called ``name``; "auto" is cublasmp if every rank can use it, else host.

    Collective over ``comm``.

    Args:
        name: "auto", "host" or "cublasmp".
        nccl: an NCCL communicator of the same ranks to use (cublasmp only): its address or nccl4py's object.

    Raises:
        ArgumentError: the name is unknown, or PBLASMP_RANKS_PER_NODE is not a positive integer.
        LibraryNotFoundError: "cublasmp" was requested, and a library, driver or GPU is missing.
        UnsupportedError: "cublasmp" was requested, and two ranks have the same GPU, or the library is too old.
        StatusError: a context of this process has broken, and its GPU is lost or waits for ever.
    """
    with Agreement(comm, "Context") as facts:
        facts["engine"] = name
        if not one_of(name, NAMES):
            raise ArgumentError(f"engine: expected one of {', '.join(NAMES)}, got {short_repr(name)}")
        facts["PBLASMP_RANKS_PER_NODE"] = ranks_per_node()
    if name == "host":
        return HostEngine(comm, "requested")
    why = _without_cupy(comm)
    if why and name == "auto":
        return HostEngine(comm, why)  # without loading any module for GPUs
    from ..bindings import version_text
    from .gpu import GpuEngine, await_broken, find_device, open_library

    with Agreement(comm, "Context"):
        await_broken(comm.rank)
    device = find_device(comm)
    library = device if isinstance(device, Exception) else _everywhere(comm, open_library())
    if isinstance(device, Exception) or isinstance(library, Exception):
        if name == "auto":
            return HostEngine(comm, f"no cublasmp: {library}")
        assert isinstance(library, Exception)
        with Agreement(comm, "Context"):
            raise library
    place = "each rank's own GPU" if device.ranks == 1 else f"GPUs that {device.ranks} ranks share"
    why = f"cuBLASMp {version_text(library.version)} on {place}, here {device.bus}"
    engine = None
    try:
        with Agreement(comm, "Context") as facts:
            facts["cuBLASMp"] = version_text(library.version)
            engine = GpuEngine(comm, device, library, "requested" if name == "cublasmp" else why, nccl)
    except Exception:
        if engine is not None:  # another rank has failed to make one
            engine.close()
        raise
    assert engine is not None
    return engine


def _everywhere(comm: Communicator, library: Library | Exception) -> Library | Exception:
    """Return this rank's library, or why a rank has none. Collective."""
    faults = allgather_alike(comm, library if isinstance(library, Exception) else None)
    return next((fault for fault in faults if fault is not None), library)


def _without_cupy(comm: Communicator) -> str:
    """Return why no GPU can be used if CuPy is not installed on every rank, or an empty string. Collective."""
    missing = [rank for rank, found in enumerate(allgather_alike(comm, _has_cupy())) if not found]
    return f"no cublasmp: CuPy is not installed (on rank {missing[0]})" if missing else ""


def _has_cupy() -> bool:
    if "cupy" in sys.modules:
        return sys.modules["cupy"] is not None
    return find_spec("cupy") is not None
