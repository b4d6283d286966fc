# SPDX-License-Identifier: Apache-2.0
"""What everything prepared on the host has in common: the means it works with, and how it answers a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ...comm import Communicator
from ...epilogue import Epilogue
from ...errors import UnsupportedError
from ...scales import Scales
from ..after import After
from ..base import Workspace
from .blas import LocalBlas
from .memory import Buffers
from .operand import Staging

__all__ = ["HostProduct", "Means"]

Array = NDArray[Any]


@dataclass
class Means:
    """What an engine lends to what it prepares.

    Attributes:
        comm: all the ranks.
        nodes: the ranks of each node.
        buffers: memory that everything uses in turn.
        blas: the local BLAS.
        staging: makes the moves of an operand into slabs, or remembers them.
        fits: ``fits(nbytes)`` says whether every node has that much to give, and how much the tightest one has.
            Collective.
        why_not_shared: empty, or why ranks cannot share memory.
    """

    comm: Communicator
    nodes: tuple[tuple[int, ...], ...]
    buffers: Buffers
    blas: LocalBlas
    staging: Callable[..., Staging]
    fits: Callable[[int], tuple[bool, int]]
    why_not_shared: str

    def domains(self, path: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that share slabs on a path."""
        if path == "shared":
            return self.nodes
        return tuple((rank,) for rank in range(self.comm.size))


class HostProduct:
    """Holds nothing, takes any arrays of the planned layouts, and is no graph."""

    path: str
    notes: tuple[str, ...] = ()
    workspace = Workspace(0, 0)
    sent_bytes = copied_bytes = 0
    _after: After | None = None

    def follow(self, epilogue: Epilogue | None, scales: Scales | None) -> None:
        """Let these take the place of the planned ones."""
        assert self._after is not None
        self._after.follow(epilogue, scales)

    def release(self) -> None:
        """Forget the arrays of the last run."""
        if self._after is not None:
            self._after.release()

    def misfit(self, name: str, array: Array) -> str:  # noqa: ARG002
        """Any array of the planned layout will do."""
        return ""

    def capture(self, a: Array, b: Array, c: Array | None, d: Array) -> Callable[[], None]:  # noqa: ARG002
        """There are no graphs on the host."""
        raise UnsupportedError("a CUDA graph: the host engine has none")

    def close(self) -> None:
        """Nothing is held: buffers are the engine's."""
