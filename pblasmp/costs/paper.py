# SPDX-License-Identifier: Apache-2.0
"""The host engine on paper: the planning code and the algorithms of CPU ranks, on arrays without values.

Everything that decides who sends what is the code that runs. Only what moves or multiplies values is replaced, by an
entry in a log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..comm import Exchange, Side
from ..comm.communicator import Serial
from ..dtypes import accumulation_dtype
from ..engines import dense
from ..engines.gpu.engine import CublasmpEngine
from ..engines.gpu.operations import CublasmpOperations
from ..engines.host.engine import HostEngine
from ..engines.host.operations import HostOperations
from ..engines.local_part import LocalPart
from ..engines.moving.exchange_move import ExchangeMove
from ..engines.moving.room import Room
from ..engines.tensor import messages
from ..layout import MatrixDescriptor
from ..layout.traffic import Shapes
from ..layout.trapezoid import Trapezoid
from .ghosts import Ghost, ghost

__all__ = ["LogEntry", "PaperEngine", "Ranks"]

_PLENTY = 1 << 62
_OF_GPUS = (
    "tile",
    "panel",
    "lead",
    "stripes",
    "update_order",
    "panel_flops",
)  # what their operations differ in


@dataclass(frozen=True)
class Ranks:
    """Ranks that nobody has started. Local.

    Attributes:
        size: how many.
        per_node: how many of them a node has; the last node may have fewer.
        memory_bytes: memory of a node that buffers may take; None: enough.
    """

    size: int
    per_node: int
    memory_bytes: int | None = None

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        firsts = range(0, self.size, self.per_node)
        return tuple(tuple(range(first, min(first + self.per_node, self.size))) for first in firsts)


@dataclass(frozen=True)
class LogEntry:
    """What a rank does with others, as its transport is asked to.

    Attributes:
        kind: "exchange", "messages", "gather", "sum", "scatter" or "fence".
        exchange, slots: of an exchange.
        sends, receives: of messages, (bytes, other rank) of each.
        nbytes: of a collective, what this rank puts in.
        counts: of collectives over parts, the bytes of each rank's part.
    """

    kind: str
    exchange: PlannedExchange | None = None
    slots: int | None = None
    sends: tuple[tuple[int, int], ...] = ()
    receives: tuple[tuple[int, int], ...] = ()
    nbytes: int = 0
    counts: tuple[int, ...] = ()


class PlannedExchange:
    """An exchange of which only the two sides are known: what every rank moves is counted when it is asked for."""

    def __init__(self, src: Side, dst: Side, dtype: np.dtype) -> None:
        self.src, self.dst, self.dtype, self.order = src, dst, dtype, dst.order

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in one run."""
        return 0

    copied_bytes = sent_bytes


class _Done:
    """A transfer without data."""

    def finish(self) -> None:
        """Do nothing. Local."""


class _PaperTransport(Room):
    """See ``engines.protocol.Transport``; every request is written into ``log``."""

    def __init__(self, ranks: Ranks, rank: int, *, gpus: bool) -> None:
        super().__init__(Serial())
        self._ranks, self._gpus = ranks, gpus
        self.why_not_shared = "GPUs share no memory" if gpus else ""
        self.rank, self.size, self.nodes = rank, ranks.size, ranks.nodes
        self.log: list[LogEntry] = []
        self.collectives = self

    def exchange(self, src: Side, dst: Side, dtype: np.dtype) -> PlannedExchange:
        """Return an exchange between two layouts. Local."""
        return PlannedExchange(src, dst, dtype)

    def message_bytes(self, exchange: Exchange) -> int:  # noqa: ARG002
        """Return 0, as the host's transport. Local."""
        return 0

    def start(self, sends: Sequence[tuple[Ghost, int]], receives: Sequence[tuple[Ghost, int]]) -> _Done:
        """Write messages down. Local."""
        made = (tuple((array.nbytes, rank) for array, rank in each) for each in (sends, receives))
        self.log.append(LogEntry("messages", sends=next(made), receives=next(made)))
        return _Done()

    def start_exchange(
        self, exchange: PlannedExchange, src: Any, dst: Any, *, conjugate: bool = False, slots: int | None = None
    ) -> _Done:  # fmt: skip
        """Write an exchange down. Local."""
        del src, dst, conjugate
        self.log.append(LogEntry("exchange", exchange, None if self._gpus else slots))  # GPUs cut no messages
        return _Done()

    def sum_ranks(self, array: Ghost) -> None:
        """Write a sum over the ranks down. Local."""
        self.log.append(LogEntry("sum", nbytes=array.nbytes))

    sum_into = sum_ranks

    def gather_into(self, part: Ghost, whole: Ghost, counts: Sequence[int]) -> None:
        """Write MPI_Allgatherv down. Local."""
        item = whole.itemsize
        self.log.append(LogEntry("gather", nbytes=part.nbytes, counts=tuple(each * item for each in counts)))

    def sum_scatter_into(self, whole: Ghost, part: Ghost, counts: Sequence[int]) -> None:
        """Write MPI_Reduce_scatter down. Local."""
        item = part.itemsize
        self.log.append(
            LogEntry("scatter", nbytes=whole.nbytes, counts=tuple(each * item for each in counts))
        )

    def fence(self) -> None:
        """Write a meeting of all ranks down. Local."""
        self.log.append(LogEntry("fence"))

    def buffer(self, name: str, nbytes: int, *, shared: bool) -> Ghost:  # noqa: ARG002
        """Return bytes without memory. Local."""
        return ghost((max(1, nbytes),), np.uint8)

    def _memory(self) -> tuple[int, int, int]:
        return self._ranks.memory_bytes or _PLENTY, 0, 0

    def fits(self, nbytes: int) -> tuple[bool, int]:
        """Return whether a node has room for ``nbytes``, and how many it has. Local."""
        limit = self._memory()[0]
        return nbytes <= limit, limit

    def carries(self, dtype: np.dtype, asked: np.dtype | None) -> np.dtype:  # noqa: ARG002
        """Return the type that partial sums travel in: on GPUs that of the result. Local."""
        return dtype if self._gpus else accumulation_dtype(dtype)


class _Buffers:
    """Buffers without memory."""

    def get(self, name: str, nbytes: int, *, shared: bool) -> Ghost:  # noqa: ARG002
        """Return bytes without memory. Local."""
        return ghost((max(1, nbytes),), np.uint8)


class _PaperOperations(HostOperations):
    """The host's operations, which count instead of computing.

    Attributes:
        shapes: how often a kernel was run, by name, type, m, n and k: "gemm", or "trsm" with k = m equations.
        flops: floating-point operations of products and solves so far, four times as many of complex types.
    """

    xp: Any = SimpleNamespace(
        **{name: getattr(np, name) for name in ("asarray", "where", "multiply", "add", "abs", "maximum")},
        empty=lambda shape, dtype, order="C": ghost(shape, dtype, order),
        zeros=lambda shape, dtype, order="C": ghost(shape, dtype, order),
        empty_like=np.empty_like,
    )

    def __init__(self, *, converts: bool) -> None:
        super().__init__("scipy", _Buffers())  # type: ignore[arg-type]
        self._converts = converts
        if not converts:
            for name in _OF_GPUS:
                setattr(self, name, getattr(CublasmpOperations, name))
        self.flops = 0
        self.shapes: Shapes = Counter()

    def slab_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the type in which operands are kept and multiplied: GPUs multiply short types as they are. Local."""
        return super().slab_dtype(dtype) if self._converts else dtype

    multiplies = slab_dtype

    def writes(self, dtype: np.dtype) -> bool:
        """Return whether products are written in the type. Local."""
        return super().writes(dtype) or not self._converts

    def _count(self, kernel: str, m: int, n: int, k: int, flops: int, like: Ghost) -> None:
        self.flops += flops * (4 if like.dtype.kind == "c" else 1)
        if flops:
            self.shapes[kernel, like.dtype.name, m, n, k] += 1

    def gemm(
        self, alpha: complex, a: Any, b: Any, beta: complex, d: Any, compute: Any = None, c: Any = None
    ) -> None:  # fmt: skip
        """Count a product. Local."""
        del alpha, beta, compute, c
        if (a.shape[0], b.shape[1]) != d.shape or a.shape[1] != b.shape[0]:
            raise ValueError(f"cannot multiply {a.shape} by {b.shape} to {d.shape}")
        (m, k), n = a.shape, b.shape[1]
        self._count("gemm", m, n, k, 2 * m * n * k, a)

    def trsm(self, alpha: complex, a: Any, x: Any, *, lower: bool, unit: bool) -> None:
        """Count a solve. Local."""
        del alpha, a, lower, unit
        m, n = x.shape
        self._count("trsm", m, n, m, m * m * n, x)

    def add(
        self, d: Any, alpha: complex, x: Any, beta: complex, c: Any, part: LocalPart | None, *, conjugate: bool
    ) -> None:  # fmt: skip
        """Count the bytes that are written. Local."""
        del alpha, x, beta, c, conjugate
        if part is None:
            d[...] = d
            return
        for down, across, _ in part.tiles(self.tile):
            d[down, across] = d[down, across]


class PaperEngine(HostEngine):
    """The engine of one of many ranks that nobody has started. Making one is local.

    Args:
        ranks: all of them.
        rank: which one this is.
        gpus: it has the GPU engine's traits and tiles, and of its algorithms those that every engine has; they move
            what the others push or let cuBLASMp send.
    """

    def __init__(self, ranks: Ranks, rank: int, *, gpus: bool = False) -> None:
        self.why = "on paper"
        if gpus:
            self.traits, self.methods = CublasmpEngine.traits, (*dense.METHODS, *messages.METHODS)
        self.operations: Any = _PaperOperations(converts=not gpus)
        self.transport: Any = _PaperTransport(ranks, rank, gpus=gpus)
        self.xp: Any = self.operations.xp

    def empty(
        self, shape: tuple[int, int], dtype: np.dtype, order: str, ld: int, *, symmetric: bool = False
    ) -> Any:
        """Return a local array without memory. Local."""
        del symmetric
        return ghost(shape, dtype, order, ld)

    def prepare_move(
        self,
        source: MatrixDescriptor,
        target: MatrixDescriptor,
        arrays: tuple[Any, Any],  # noqa: ARG002
        part: Trapezoid | None = None,
    ) -> ExchangeMove:
        """Prepare a move by messages. Local."""
        return ExchangeMove(self, source, target, part)

    def close(self) -> None:
        """Do nothing. Local."""
