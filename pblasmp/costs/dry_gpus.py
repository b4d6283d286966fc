# SPDX-License-Identifier: Apache-2.0
"""GPUs in a dry run: what their ranks move and compute by the algorithms of every engine, with the widths of a GPU's.

Operands that GPUs of a node push to each other are those that are gathered here, by messages.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..engines import dense
from ..engines.dense.factor_panels import FactorPanels, OwnPanels, Workbench
from ..engines.gpu.factor_operations import GpuFactorOperations
from ..engines.gpu.gpu_engine import GpuEngine
from ..engines.tensor.algorithms import MESSAGES
from .dry_engine import DryEngine, DryOperations, DryTransport


class _DryGpuTransport(DryTransport):
    """The transport of a GPU: no memory is shared, and no message is cut."""

    why_not_shared = "GPUs share no memory"

    def start_exchange(
        self, exchange: Any, src: Any, dst: Any, *, conjugate: bool = False, slots: int | None = None
    ) -> Any:  # fmt: skip
        """Write an exchange down. Local."""
        del slots
        return super().start_exchange(exchange, src, dst, conjugate=conjugate)

    def carries(self, dtype: np.dtype, asked: np.dtype | None) -> np.dtype:  # noqa: ARG002
        """Return the type that partial sums travel in: that of the result. Local."""
        return dtype


class _PassedPanels(OwnPanels):
    """A GPU's own panels: each rank passes one on to the next."""

    def publish(self, k: int) -> None:
        """Write down that a panel is sent. Local."""
        self._pass(k, self.own(k)[self.shape.bounds(k)[0] :])

    def fetch(self, k: int) -> Any:
        """Return a panel from its diagonal on. Local."""
        return self._fetched(k, slice(self.shape.bounds(k)[0], None))

    def again(self, k: int, rows: slice) -> Any:
        """Return rows of a panel. Local."""
        if self.has(k):
            self._pass(k, self.own(k)[rows])
        return self._fetched(k, rows)

    def _fetched(self, k: int, rows: slice) -> Any:
        if self.has(k):
            return self.own(k)[rows]
        first, stop = self.shape.bounds(k)
        shape = len(range(self.shape.rows)[rows]), stop - first
        panel = self.engine.operations.scratch(f"panel {k % 2}", shape, self.dtype, "F")
        self._pass(k, panel)
        return panel

    def _pass(self, k: int, panel: Any) -> None:
        workers, owner = self.shape.workers, self.shape.owner(k)
        if workers == 1:
            return
        to, of = (self.rank + 1) % workers, (self.rank - 1) % workers
        arrays = (panel, *self.about(k))
        sends = [] if to == owner else [(each, to) for each in arrays]
        receives = [] if self.rank == owner else [(each, of) for each in arrays]
        self.engine.transport.start(sends, receives)


class _DrySpread:
    """Few right-hand sides: panels stay where they are, and the ranks add up the rows of each."""

    def __init__(self, bench: Workbench, panels: FactorPanels, right: FactorPanels) -> None:
        self._operations: Any = bench.operations
        self._transport: Any = bench.engine.transport
        self._panels = panels
        self._whole = self._operations.scratch(
            "spread", (right.shape.rows, right.shape.cols), right.dtype, "F"
        )

    def swap(self, last: int, pivots: Any, *, back: bool = False) -> None:
        """Exchange rows of all ranks' terms. Local."""
        self._operations.swap_rows(self._whole, 0, last, pivots, back=back)

    def count_all(self) -> None:
        """Do nothing: all rows count. Local."""

    def sweep(self, *, lower: bool, unit: bool = False, op: str = "N") -> None:
        """Solve with a triangle of the matrix. Local."""
        del op
        for k in range(self._panels.shape.panels):
            first, stop = self._panels.shape.bounds(k)
            rows, rest = self._whole[first:stop], slice(stop, None) if lower else slice(0, first)
            self._transport.sum_ranks(rows)
            if self._panels.has(k):
                panel = self._panels.own(k)[: len(self._whole)]
                self._operations.trsm(1, panel[first:stop], rows, lower=lower, unit=unit)
                self._operations.gemm(-1, panel[rest], rows, 1, self._whole[rest])

    def finish(self) -> None:
        """Give the first rank the sum. Local."""
        self._transport.sum_ranks(self._whole)


class _DryGpuOperations(DryOperations):
    """The operations of a GPU, which count instead of computing."""

    own_panels: Any = _PassedPanels
    factor_wait = GpuFactorOperations.factor_wait
    spread: Any = _DrySpread
    gemqrt: Any = None  # reflectors are applied by products
    tile, band, coarser = GpuFactorOperations.tile, GpuFactorOperations.band, GpuFactorOperations.coarser
    panel, lead = GpuFactorOperations.panel, GpuFactorOperations.lead
    stripes, update_order = GpuFactorOperations.stripes, GpuFactorOperations.update_order
    panel_flops, factor_alone = GpuFactorOperations.panel_flops, GpuFactorOperations.factor_alone
    factor_width = GpuFactorOperations.factor_width
    panel_width: Any = GpuFactorOperations.panel_width

    def slab_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the type in which operands are kept and multiplied: short types stay as they are. Local."""
        return dtype

    multiplies = slab_dtype

    def writes(self, dtype: np.dtype) -> bool:  # noqa: ARG002
        """Return True: products are written in every type. Local."""
        return True


class DryGpuEngine(DryEngine):
    """The engine of one of many GPU ranks that nobody has started; see ``DryEngine``."""

    traits = GpuEngine.traits
    methods = (*dense.METHODS, MESSAGES)
    _transport, _operations = _DryGpuTransport, _DryGpuOperations
