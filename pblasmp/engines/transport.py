# SPDX-License-Identifier: Apache-2.0
"""How ranks exchange data, which an engine supplies: by messages of their communicator, unless it does otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache, partial
from typing import Protocol

import numpy as np

from ..comm import CellArrays, Communicator, Exchange, Side, greatest
from ..dtypes import accumulation_dtype
from .request import LocalArray

SHARE = 0.8
"""Of the free memory: what products take at most."""

_REMEMBERED = 64  # exchange plans: repeated products are not planned anew

Message = tuple[LocalArray, int]  # a contiguous array and the other rank


class Transfer(Protocol):
    """Data in flight."""

    def finish(self) -> None:
        """Make everything available in its place to later computations. Collective over the ranks involved."""


class Transport(Protocol):
    """How ranks exchange data.

    Attributes:
        comm: the ranks.
        rank, size: this rank's number, and how many there are.
        nodes: the ranks of each node, in the order of their first ranks.
        why_not_shared: empty, or why the ranks of a node cannot share memory.
    """

    comm: Communicator
    rank: int
    size: int
    nodes: tuple[tuple[int, ...], ...]
    why_not_shared: str

    @property
    def domains(self) -> Sequence[tuple[int, ...]]:
        """The ranks between which messages are fast: of a node, or GPUs that reach each other's memory."""
        return self.nodes

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Transfer:
        """Start messages, which wait for what was computed so far. Ranks match messages in order. Local.

        The arrays are in use until the transfer is finished.
        """

    @cached_property
    def _plans(self) -> Callable[..., Exchange]:
        return lru_cache(_REMEMBERED)(partial(Exchange, self.comm))

    def exchange(self, src: Side, dst: Side, dtype: np.dtype) -> Exchange:
        """Return the exchange plan between two layouts; the last few are cached. Local."""
        return self._plans(src, dst, dtype)

    def message_bytes(self, exchange: Exchange) -> int:
        """Return how many bytes the messages of an exchange take on every rank until it ends. Local."""
        return 0  # they are cut into small ones

    def start_exchange(
        self,
        exchange: Exchange,
        src: CellArrays,
        dst: CellArrays,
        *,
        conjugate: bool = False,
        slots: int | None = None,
    ) -> Transfer:
        """Start the moves of an exchange plan between this rank's arrays, by the indices of their cells.

        Without ``slots`` all messages are in flight when this returns; otherwise at most that many at a time, and
        the rest follow in ``finish``, before which nothing else is computed.
        """
        return exchange.start(src, dst, conjugate=conjugate, slots=slots)

    def ahead(self, *, follows: bool = False) -> AbstractContextManager[Callable[[], None]]:
        """Return a context whose moves, if they are queued, run beside what the caller's stream has meanwhile.

        It yields a function, "join", from which on what the caller queues waits for the moves so far. The last such
        context of a call must call it.

        Args:
            follows: they wait for all that was queued before, not only for what was before the last "join" or context
                that ``follows``. The first one of a call must.
        """
        return nullcontext(lambda: None)

    def sum_ranks(self, array: LocalArray) -> None:
        """Replace a contiguous array by its sum over all ranks, in the order of the ranks. Collective."""
        self.comm.sum_into(array)

    def fence(self) -> None:
        """Wait until every rank's writes to shared buffers are visible to its node. Collective."""

    def buffer(self, name: str, nbytes: int, *, shared: bool) -> LocalArray:
        """Return at least ``nbytes`` of the buffer ``name`` as bytes. Collective over the node if ``shared``."""

    def holds(self, name: str, nbytes: int) -> bool:
        """Return whether the shared buffer ``name`` is that large, on all ranks of the node then. Local."""
        return False

    def _available(self) -> int:
        """Return the bytes that this node has available. Collective over the node.

        Memory that buffers already have is used again, and so is available.
        """

    def fits(self, nbytes: int) -> tuple[bool, int]:
        """Return whether every node has ``nbytes`` of memory available, and the least that any node has. Collective."""
        least = -greatest(self.comm, [-self._available()])[0]
        return nbytes <= least, least

    def carries(self, dtype: np.dtype, asked: np.dtype | None) -> np.dtype:
        """Return the type in which partial sums of a result of ``dtype`` travel. Local."""
        return accumulation_dtype(dtype)  # never in less precision
