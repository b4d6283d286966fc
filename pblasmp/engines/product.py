# SPDX-License-Identifier: Apache-2.0
"""What an engine prepares: a product, which is bound to arrays, to be run on them as often as is asked.

How products run, first and later, and how they become CUDA graphs, is written down here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..comm import Ready
from ..errors import UnsupportedError
from .request import LocalArray, Operands


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory that a plan needs on this rank besides its operands, in bytes; plans of one context share it."""

    device_bytes: int
    host_bytes: int


class RecordedGraph(Protocol):
    """A CUDA graph of a product, until the product is closed."""

    @property
    def current(self) -> bool:
        """Whether the memory whose addresses it holds has not been replaced."""

    def at_once(self, stream: int | None) -> Ready | None:
        """Return what queues it on a stream with one call; None if more is to be done. Local.

        Args:
            stream: its address; None: the array library's current one.
        """

    def launch(self) -> None:
        """Queue it on the current stream. Local."""

    def replay(self) -> None:
        """Queue it for a user. Local.

        Raises:
            ClosedError: the product is closed, or memory whose addresses it holds has been replaced.
        """


class Graphs(Protocol):
    """The CUDA graphs of one product."""

    @property
    def capturing(self) -> bool:
        """Whether work that is queued now becomes part of a graph."""

    @property
    def pay(self) -> bool:
        """Whether replaying one takes less time than queueing the same work again, also with messages in it."""

    def follow_stream(self) -> None:
        """Queue from now on on the array library's current stream. Local."""

    def record(
        self, queue: Callable[[], None], *, allocates: bool = False, apart: bool = False
    ) -> RecordedGraph:
        """Record what ``queue`` queues. Local.

        Args:
            allocates: the graph keeps the arrays that it makes.
            apart: messages, on the stream of the rest, are no part of it: they are queued each time. All that is before
                the last of them is queued at once, too, and the next launch queues the rest.
        """

    def close(self) -> None:
        """Destroy the graphs. Local."""


class Product:
    """A prepared computation: all that can be decided before the values are known. Subclasses say how it runs.

    Attributes:
        path: how it computes, in a few words.
        notes: remarks for the plan's report.
        moved: the operands that are moved to other layouts first, each with its new layout.
        workspace: memory that it needs on this rank.
        sent_bytes: bytes that this rank sends to other ranks in one run.
        copied_bytes: bytes that this rank copies, in its own memory or the node's, in one run.
        has_tables: what it keeps on the host may grow with the problem.
        holds_memory: it keeps arrays as large as the operands until it is closed.
        replays: from the second run on the same arrays on, a recorded CUDA graph is replayed, where graphs pay.
        registers: a library may register the memory of arrays with a graph, which must not outlive them then.
        one_stream: messages are queued on the stream of the rest, so that a graph may have pieces between them.
        allocates: ``_queue`` makes arrays, whose memory must last as long as a graph of it.
        first: returns the ``with`` block of the first run, if the ranks agree on that; None after it.
        once: no other run is expected.
        operand_at: makes operands by their addresses, as ``Engine.at`` does, but sooner; None if it needs arrays.
    """

    path: str = ""
    notes: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    workspace = Workspace(0, 0)
    sent_bytes: int = 0
    copied_bytes: int = 0
    has_tables: bool = True
    holds_memory: bool = False
    replays: bool = False
    registers: bool = False
    one_stream: bool = False
    allocates: bool = False
    first: Callable[[], AbstractContextManager[object]] | None = None
    once: bool = False
    operand_at: Callable[..., Any] | None = None

    @property
    def queues(self) -> bool:
        """Whether a run only queues work on a GPU, so that the ranks need not agree before it."""
        return False

    @cached_property
    def graphs(self) -> Graphs | None:
        """The store of its CUDA graphs; None if it cannot be recorded."""
        return None

    def why_no_graph(self) -> str:
        """Return why it cannot be recorded as a CUDA graph, or an empty string. Local."""
        if self.graphs is not None:
            return ""
        return f"this plan cannot be recorded: {self.path or type(self).__name__}"

    def bind(self, operands: Operands) -> Bound:
        """Return what runs it on these arrays. Local."""
        return Bound(self, operands)

    def run(self, operands: Operands) -> Any:
        """Compute D from the local arrays, once; return what was found besides. Collective over the context."""
        bound = self.bind(operands)
        try:
            return bound.run()
        finally:
            bound.release()

    def _queue(self, operands: Operands) -> Any:
        """Compute D from the local arrays, or queue that; return what was found besides. Collective."""
        raise NotImplementedError

    def resized(self, problem: Any, *, once: bool) -> Product | None:
        """Return a product of the same kind for a problem that differs in sizes only, without the other ranks. Local.

        None if there is none, or if the other ranks must be asked.

        Args:
            once: as the attribute; the same on every rank.
        """
        return None

    def misfit(self, name: str, array: LocalArray) -> str:
        """Return why ``array`` cannot replace the planned operand ``name``, or an empty string. Local."""
        return ""

    def close(self) -> None:
        """Free what only this product holds, its graphs first. Collective over the context."""
        graphs = self.__dict__.get("graphs")
        if graphs is not None:
            graphs.close()


class Bound:
    """A product and the arrays that it runs on, which are in use until it is released. Making one is local.

    Attributes:
        runs: how often it has run.
    """

    def __init__(self, product: Product, operands: Operands) -> None:
        self._product, self.operands = product, operands
        self.runs = 0
        self._graph: RecordedGraph | None = None

    def run(self, *, replay: bool = True) -> Any:
        """Compute D; from the second run on by replaying a graph, if the product can. Collective over the context.

        Args:
            replay: the same on every rank; False: this run does not.

        Returns:
            What was found besides: of a factorization ``Found``, else None.
        """
        first = self._product.first
        if first is None:
            return self._run(replay)
        with first():
            found = self._run(replay)
        self._product.first = None
        return found

    def _run(self, replay: bool) -> Any:
        product = self._product
        graphs = product.graphs
        if graphs is None:
            return self._queue()
        graphs.follow_stream()
        if graphs.capturing:
            return self._queue()
        self.runs += 1
        pays = graphs.pay or product.one_stream
        if not (replay and product.replays and pays and self.runs > 1):
            return self._queue()
        if self._graph is None or not self._graph.current:
            self._graph = graphs.record(self._queue, allocates=product.allocates, apart=not graphs.pay)
        self._graph.launch()
        return None

    def _queue(self) -> Any:
        """Compute or queue it without a graph. Collective over the context."""
        return self._product._queue(self.operands)

    def at_once(self, stream: int | None) -> Ready | None:
        """Return what runs it on a stream with one call; None if more is to be done. Local.

        Args:
            stream: its address; None: the array library's current one.
        """
        return None if self._graph is None else self._graph.at_once(stream)

    def capture(self) -> Callable[[], None]:
        """Record it as a CUDA graph, and return what replays that on CuPy's current stream. Collective.

        Collective over the context. It runs first: what only the first run does comes before the recording.

        Raises:
            UnsupportedError: it cannot be recorded.
        """
        product = self._product
        if why := product.why_no_graph():
            raise UnsupportedError(f"a CUDA graph: {why}")
        graphs = product.graphs
        assert graphs is not None
        self.run()
        return graphs.record(self._queue, allocates=product.allocates).replay

    def release(self) -> None:
        """Drop the arrays; it cannot be run any more. Local."""
        self._graph = None
        del self.operands


@dataclass(frozen=True, slots=True)
class Found:
    """What a run found besides the matrices it wrote, the same on every rank.

    Attributes:
        info: 0, or as LAPACK counts it the order of the first leading minor that is not positive definite, or the index
            from 1 of the first diagonal element that is exactly zero. Of "lstsq" without factors: zero up to rounding.
        pivots: of "lu": row i was exchanged with ``pivots[i]``, from 0.
        diagonal: of "lu" that of U, of "cholesky" with right-hand sides that of L; None if the library keeps it.
        tau: of "qr": the factors of the reflectors.
        values: of "eigh": the eigenvalues, ascending; of "svd": the singular values, descending.
        condition: of "condition": the estimate.
        doubtful: whether the vectors are to be checked: the library has returned wrong ones.
    """

    info: int = 0
    pivots: NDArray[np.int64] | None = None
    diagonal: NDArray[Any] | None = None
    tau: NDArray[Any] | None = None
    values: NDArray[Any] | None = None
    condition: float = 0.0
    doubtful: bool = False
