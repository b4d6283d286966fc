# SPDX-License-Identifier: Apache-2.0
"""The GPU engine on paper: its planning code and its algorithms, on arrays without values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engines import dense
from ..engines.dense.factor_panels import FactorPanels, OwnPanels, Workbench
from ..engines.gpu.engine import GpuEngine
from ..engines.gpu.factor_operations import GpuFactorOperations
from ..engines.gpu.factor_panels import BUFFERS, TOGETHER, QueuedPanels
from ..engines.gpu.kernels.lt import Batch
from ..engines.gpu.kernels.views import View
from ..engines.gpu.push import product as push
from ..engines.protocol import FactorOperations, Transport
from ..engines.tensor import messages
from .ghosts import Ghost, ghost
from .paper import Event, Kept, LogEntry, PaperEngine, PaperOperations, PaperTransport, PlannedExchange, Ranks

__all__ = ["PaperGpuEngine"]

_WHOSE = 48  # bits of an address below those that tell whose it is


class _PaperGpuTransport(PaperTransport):
    """The transport of a GPU: no memory is shared, and no message is cut."""

    why_not_shared = "GPUs share no memory"

    def start_exchange(
        self, exchange: PlannedExchange, src: Any, dst: Any, *, conjugate: bool = False, slots: int | None = None
    ) -> Any:  # fmt: skip
        """Write an exchange down. Local."""
        del slots
        return super().start_exchange(exchange, src, dst, conjugate=conjugate)

    def carries(self, dtype: np.dtype, asked: np.dtype | None) -> np.dtype:  # noqa: ARG002
        """Return the type that partial sums travel in: that of the result. Local."""
        return dtype


class _PaperGpuOperations(PaperOperations):
    """The operations of a GPU, which count instead of computing."""

    grid_panels: Any = None  # the model moves matrices to panels
    shared_from, shared_width = GpuFactorOperations.shared_from, GpuFactorOperations.shared_width
    gemqrt: Any = None  # reflectors are applied by products
    tile, band = GpuFactorOperations.tile, GpuFactorOperations.band
    panel, lead = GpuFactorOperations.panel, GpuFactorOperations.lead
    stripes, update_order = GpuFactorOperations.stripes, GpuFactorOperations.update_order
    panel_flops, factor_alone = GpuFactorOperations.panel_flops, GpuFactorOperations.factor_alone
    factor_width = GpuFactorOperations.factor_width
    panel_width: Any = GpuFactorOperations.panel_width

    def multiply(
        self, x: View, w: View, d: View, c: View | None = None, *, op_x: str, batch: Batch | None = None, **_: Any
    ) -> None:  # fmt: skip
        """Count a product, or the products of a batch. Local."""
        del w, c
        k = x.cols if op_x == "N" else x.rows
        for _each in range(1 if batch is None else batch.size):
            self._count("gemm", d.rows, d.cols, k, 2 * d.rows * d.cols * k, x.dtype)

    def __init__(self, events: list[Event], cores: int, kept: Kept) -> None:
        super().__init__(events, cores, kept)
        self.own_panels = _PaperQueuedPanels
        self.spread = _PaperSpread  # blocks on the diagonal are counted as solved

    def slab_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the type in which operands are kept and multiplied: short types stay as they are. Local."""
        return dtype

    multiplies = slab_dtype

    def writes(self, dtype: np.dtype) -> bool:  # noqa: ARG002
        """Return True: products are written in every type. Local."""
        return True


class _PaperQueuedPanels(QueuedPanels):
    """A GPU's own panels: each rank passes a panel on to the next one."""

    def __init__(self, engine: PaperGpuEngine, array: Any, *about: Any, given: bool = False) -> None:
        OwnPanels.__init__(self, engine, array, *about, given=given)
        self._main = None
        self._paper, self._sweep, self._together = engine, 0, 1

    subtract: Any = OwnPanels.subtract

    def _event(self, stream: Any) -> None:
        """Do nothing: there are no streams."""

    def begin(self, *, delays: bool = False) -> None:
        """Panels that follow are others than those before. Local."""
        self._sweep += 1
        self._together = TOGETHER if delays else 1
        if self.shape.workers > 1:
            count = self.shape.rows * self.shape.width * self._together
            for i in range(BUFFERS):
                self._paper.operations.scratch(f"panel {i}", (1, count), self.dtype)

    def ahead(self) -> AbstractContextManager[None]:
        """Return a context for work that other ranks wait for. Local."""
        return self._paper.ahead()

    def later(self, k: int) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield the groups of panels, and write down when the one after the next has been updated. Local."""
        for first, group in super().later(k):
            yield first, group
            if group[0] <= k + 2:
                self._paper.events.append(Event("updated"))

    def publish(self, k: int) -> None:
        """Write down that a panel is sent. Local."""
        self._pass(k, self.own(k)[self._top(k) :])

    def fetch(self, k: int) -> Any:
        """Return a panel from its diagonal on. Local."""
        return self._fetched(k, self._top(k))[self.shape.bounds(k)[0] - self._top(k) :]

    def joined(self, first: int, k: int) -> Any:
        """Return panels side by side, from the first one's diagonal on. Local."""
        top = self.shape.bounds(first)[0]
        return ghost((self.shape.rows - top, self.shape.bounds(k)[1] - top), self.dtype, "F")

    def again(self, k: int, rows: slice) -> Any:
        """Return rows of a panel, which travels whole. Local."""
        if self.has(k):
            with self.ahead():
                self._pass(k, self.own(k))
        return self._fetched(k, 0)[rows]

    def settle(self) -> None:
        """Do nothing. Local."""

    def above_kept(self) -> AbstractContextManager[None]:
        """Keep nothing. Local."""
        return nullcontext()

    def _fetched(self, k: int, first: int) -> Any:
        start, stop = self.shape.bounds(k)
        panel = ghost((self.shape.rows - first, stop - start), self.dtype, "F")
        if not self.has(k):
            self._pass(k, panel)
        self._paper.events.append(Event("fetch", (self._sweep, k)))
        return panel

    def _pass(self, k: int, panel: Any) -> None:
        rank, workers, owner = self.rank, self.shape.workers, self.shape.owner(k)
        sent = sum(each.nbytes for each in (panel, *self.about(k)))
        to, of = (rank + 1) % workers, (rank - 1) % workers
        if workers > 1:
            sends = () if to == owner else ((sent, to),)
            receives = () if rank == owner else ((sent, of),)
            self._paper.transport.log.append(LogEntry("messages", sends=sends, receives=receives))
            if sends:
                self._paper.events.append(Event("passed", None, sent))
        if rank == owner:
            event = Event(
                "publish", (self._sweep, k), sent if workers > 1 else 0, self._paper.operations.ahead
            )
            self._paper.events.append(event)


class _PaperSpread:
    """Few right-hand sides: their sum over all ranks counts, and panels stay where they are. Making one is local."""

    def __init__(self, bench: Workbench, panels: FactorPanels, right: FactorPanels) -> None:
        self._operations, self._panels, self._transport = bench.operations, panels, bench.engine.transport
        self._right, self._placed = right, False
        shape = right.shape.rows, right.shape.cols
        self._whole = self._operations.scratch("spread", shape, right.dtype, "F")
        self._whole[...] = right.own(0) if right.mine else 0

    def swap(self, last: int, pivots: Any, *, back: bool = False) -> None:
        """Exchange rows of all ranks' terms. Local."""
        self._operations.swap_rows(self._whole, 0, last, pivots, back=back)

    def count_all(self) -> None:
        """Do nothing: all rows count. Local."""

    def sweep(self, *, lower: bool, unit: bool = False, op: str = "N") -> None:
        """Solve with a triangle of the matrix. Collective over the workers."""
        _sweep_spread(
            self._transport, self._operations, self._panels, self._whole,
            placed=self._placed, lower=lower, unit=unit, op=op,
        )  # fmt: skip
        self._placed = True

    def finish(self) -> None:
        """Give the first rank the sum. Collective over the workers."""
        self._transport.sum_ranks(self._whole.T)
        if self._right.mine:
            self._right.own(0)[...] = self._whole


def _sweep_spread(
    transport: Transport,
    operations: FactorOperations,
    panels: FactorPanels,
    x: Any,
    *,
    placed: bool,
    lower: bool,
    unit: bool,
    op: str,
) -> None:
    """Replace the sum of all ranks' ``x`` by the solution: afterwards a rank has the rows of its panels, and zeros.

    With ``placed`` that is so before, too.
    """
    n, plain = panels.shape.cols, op == "N"
    conjugate = op == "C" and panels.dtype.kind == "c"
    known = x if plain else operations.scratch("known", x.shape, x.dtype, "F")
    for k in range(panels.shape.panels) if lower == plain else reversed(range(panels.shape.panels)):
        first, stop = panels.shape.bounds(k)
        rest = slice(stop, n) if lower else slice(0, first)
        rows, mine = x[first:stop], panels.has(k)
        if plain or not placed:
            _add_up(transport, operations, rows)
            if not mine:
                rows[...] = 0
        if mine:
            panel = panels.own(k)
            square, beside = panel[first:stop], panel[rest]
            if conjugate:
                square, beside = square.conj(), beside.conj()
            if plain:
                operations.trsm(1, square, rows, lower=lower, unit=unit)
                operations.gemm(-1, beside, rows, 1, x[rest])
            else:
                operations.gemm(-1, beside.T, known[rest], 1, rows)
                operations.trsm(1, square.T, rows, lower=not lower, unit=unit)
        if not plain:
            known[first:stop] = rows
            _add_up(transport, operations, known[first:stop])


def _add_up(transport: Transport, operations: FactorOperations, rows: Any) -> None:
    """Replace rows of an array in F order by their sum over all ranks. Collective."""
    if rows.shape[1] == 1:
        transport.sum_ranks(rows.T)
        return
    together = operations.scratch("spread rows", rows.shape, rows.dtype, "F")
    together[...] = rows
    transport.sum_ranks(together.T)
    rows[...] = together


class _PaperGpu:
    """What products that push queue on a GPU: what goes to whom is written down. See ``engines.gpu.runtime.gpu.Gpu``.

    An address tells whose memory it is in.
    """

    windows = None

    def __init__(self, engine: PaperGpuEngine) -> None:
        transport = engine.transport
        self._log: list[LogEntry] = transport.log
        self.rank, self.size = int(transport.rank), int(transport.size)
        self.why_no_windows = "" if len(transport.nodes) == 1 else "GPUs of other nodes are out of reach"
        self._pushed = 0  # bytes since the last flag

    def symmetric(self, name: str, rank: int) -> int:  # noqa: ARG002
        """Return the address of a rank's buffer. Local."""
        return (rank + 1) << _WHOSE

    def scratch(self, name: str, nbytes: int) -> int:  # noqa: ARG002
        """Return the address of this GPU's own buffer. Local."""
        return (self.rank + 1) << _WHOSE

    def push(self, stream: str, to: View, of: View, count: int = 1, steps: tuple[int, int] = (0, 0)) -> None:
        """Count a copy to a peer. Local."""
        del stream, to, steps
        self._pushed += of.nbytes * count

    def raise_flag(self, stream: str, rank: int, number: int) -> None:
        """Write down what was pushed since the last flag. Local."""
        del stream, number
        self._log.append(LogEntry("pushes", sends=((self._pushed, rank),)))
        self._pushed = 0

    def copy(self, stream: str, to: View, of: View) -> None:
        """Count a copy by a kernel. Local."""
        del stream, of
        Ghost.written += to.nbytes

    def _nothing(self, *_: Any) -> None:
        """Do nothing: it moves nothing, or ``copied_bytes`` has it."""

    reserve = begin = end = follow = use_current_stream = await_flags = move = _nothing


@dataclass(frozen=True, slots=True)
class _PaperRuntime:
    """What products ask of a GPU's runtime."""

    size: int

    def queueing(self, what: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a ``with`` block in which nothing is agreed on. Local."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class _PaperSession:
    """What products ask of a GPU's session."""

    gpu: _PaperGpu
    runtime: _PaperRuntime

    def recordings(self) -> None:
        """Return None: there are no graphs. Local."""


class PaperGpuEngine(PaperEngine):
    """The engine of one of many GPU ranks that nobody has started. Making one is local.

    It has the GPU engine's traits and tiles, and of its algorithms "push" and those that every engine has. cuBLASMp's
    move what these do, and tensor-parallel products send as much by any algorithm.

    Args:
        ranks: all of them.
        rank: which one this is.
    """

    traits = GpuEngine.traits
    methods = (*push.METHODS, *dense.METHODS, *messages.METHODS)

    def _begin(self, ranks: Ranks, rank: int) -> None:
        self.transport: Any = _PaperGpuTransport(ranks, rank, self.events)
        self.operations: Any = _PaperGpuOperations(
            self.events, ranks.cores or ranks.per_node, self.transport.kept
        )
        self.session = _PaperSession(_PaperGpu(self), _PaperRuntime(ranks.size))

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """A context for work on the stream for what other ranks wait for. Local."""
        before, self.operations.ahead = self.operations.ahead, True
        try:
            yield
        finally:
            self.operations.ahead = before
