# SPDX-License-Identifier: Apache-2.0
"""Which engines have a LAPACK for the panels of factorisations, and whether their ranks share panels."""

from __future__ import annotations

from typing import cast

from ...errors import UnsupportedError
from ..protocol import Engine, FactorOperations, SharingTransport, Transport

__all__ = ["is_shared", "operations_of", "sharing", "why_no_lapack"]


def why_no_lapack(engine: Engine) -> str:
    """Return why an engine cannot compute on panels, or an empty string. Local."""
    if hasattr(engine.operations, "potrf"):
        return ""
    return f"the {engine.name} engine factors no panels"


def operations_of(engine: Engine) -> FactorOperations:
    """Return the engine's operations, if it has a LAPACK. Local.

    Raises:
        UnsupportedError: it has none.
    """
    if why := why_no_lapack(engine):
        raise UnsupportedError(why)
    return cast("FactorOperations", engine.operations)


def is_shared(engine: Engine) -> bool:
    """Return whether all ranks are on one node and share memory, in which writes are seen in their order. Local."""
    transport = engine.transport
    if operations_of(engine).own_panels is not None:
        return False
    return transport.size == 1 or (
        transport.comm.board is not None and len(transport.nodes) == 1 and not transport.why_not_shared
    )


def sharing(transport: Transport) -> SharingTransport:
    """Return the transport of ranks that share panels. Local."""
    return cast("SharingTransport", transport)
