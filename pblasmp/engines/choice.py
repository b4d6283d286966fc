# SPDX-License-Identifier: Apache-2.0
"""Which engine a context runs."""

from __future__ import annotations

from ..comm import Agreement, Communicator
from ..errors import LayoutError, UnsupportedError
from .base import Engine
from .host import HostEngine

__all__ = ["choose_engine"]

NAMES = ("auto", "host", "cublasmp")


def choose_engine(name: str, comm: Communicator) -> Engine:
    """Return the engine called ``name``. Collective over ``comm``.

    Raises:
        LayoutError: the name is unknown.
        UnsupportedError: this version has no such engine.
    """
    with Agreement(comm, "Context") as facts:
        facts["engine"] = name
        if name not in NAMES:
            raise LayoutError(f"engine: expected one of {', '.join(NAMES)}, got {name!r}")
        if name == "cublasmp":
            raise UnsupportedError("engine 'cublasmp': this version of pblasmp has only the host engine")
    why = "asked for" if name == "host" else "the only engine of this version"
    return HostEngine(comm, why)
