# SPDX-License-Identifier: Apache-2.0
"""What an engine prepares: a product, which runs as often as it is asked to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import UnsupportedError
from .protocol import Engine, Workspace
from .request import LocalArray, Operands

__all__ = ["Product", "QueuedProduct"]


class Product:
    """A prepared computation: all that can be decided before the values are known. Subclasses say how it runs.

    Attributes:
        path: how it computes, in a few words.
        notes: remarks for the plan's report.
        moved: the operands that are moved to other layouts first, each with its new layout.
        workspace: memory that it needs on this rank.
        sent_bytes: bytes that this rank sends to other ranks in one run.
        copied_bytes: bytes that this rank copies, in its own memory or the node's, in one run.
        queues: a run only queues work on a GPU, so the ranks need not agree before it.
        holds_memory: it keeps arrays as large as the operands until it is closed.
    """

    path: str = ""
    notes: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    workspace = Workspace(0, 0)
    sent_bytes: int = 0
    copied_bytes: int = 0
    holds_memory: bool = False

    @property
    def queues(self) -> bool:
        """Whether a run only queues work."""
        return False

    def run(self, operands: Operands) -> None:
        """Compute D from the local arrays. Collective over the context."""
        raise NotImplementedError

    def misfit(self, name: str, array: LocalArray) -> str:  # noqa: ARG002 - any array of the planned layout will do
        """Return why ``array`` cannot replace the planned operand ``name``, or an empty string. Local."""
        return ""

    def capture(self, operands: Operands) -> Callable[[], None]:  # noqa: ARG002
        """Record the product as a CUDA graph and return what replays it. Collective over the context.

        Raises:
            UnsupportedError: it cannot be recorded.
        """
        raise UnsupportedError(
            f"a CUDA graph: this plan cannot be recorded: {self.path or type(self).__name__}"
        )

    def close(self) -> None:
        """Free what only this product holds. Collective over the context."""


class QueuedProduct(Product):
    """A product in terms of an engine's operations and transport; recordable on GPUs, where these only queue work.

    From the second run on the same operands on it replays a recorded CUDA graph, if it ``_replays``: as do products
    that keep no large temporaries and read nothing on the host.
    """

    _engine: Engine
    _replays = True
    _graphs: Any = None

    @property
    def queues(self) -> bool:
        """Whether a run only queues work: on GPUs, if it reads nothing on the host."""
        return self._replays and not self._engine.agrees

    def run(self, operands: Operands) -> None:
        """Compute D from the local arrays. Collective over the ranks."""
        graphs = self._recordings() if self._replays else None
        if graphs is None:
            self._queue(operands)
        else:
            graphs.run(operands, lambda: self._queue(operands), allocates=True)

    def _queue(self, operands: Operands) -> None:
        """Queue the work. Collective over the ranks."""
        raise NotImplementedError

    def _recordings(self) -> Any:
        if self._graphs is None:
            self._graphs = self._engine.graphs()
        return self._graphs

    def capture(self, operands: Operands) -> Callable[[], None]:
        """Record the product as a CUDA graph and return what replays it. Collective over the context."""
        graphs = self._recordings()
        if graphs is None:
            return super().capture(operands)
        self._queue(operands)  # afterwards every buffer is large enough
        replay: Callable[[], None] = graphs.record(lambda: self._queue(operands), allocates=True)
        return replay

    def close(self) -> None:
        """Destroy the graphs. Local."""
        if self._graphs is not None:
            self._graphs.close()
