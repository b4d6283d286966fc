# SPDX-License-Identifier: Apache-2.0
"""GPUs in a dry run: what their ranks move and compute by the algorithms of every engine, with the widths of a GPU's.

Operands that GPUs of a node push to each other are those that are gathered here, by messages.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..engines import dense
from ..engines.dense.factor_panels import OwnPanels
from ..engines.dense.sweeps import Sides
from ..engines.gpu.factor_operations import GpuFactorOperations
from ..engines.gpu.gpu_engine import GpuEngine
from ..engines.tensor.algorithms import MESSAGES
from .dry_engine import DryEngine, DryOperations, DryTransport, Repeats


class _DryGpuTransport(DryTransport):
    """The transport of a GPU: no memory is shared, and no message is cut."""

    why_not_shared = "GPUs share no memory"
    cuts = False

    def carries(self, dtype: np.dtype, asked: np.dtype | None) -> np.dtype:  # noqa: ARG002
        """Return the type that partial sums travel in: that of the result. Local."""
        return dtype


class _PassedPanels(Repeats, OwnPanels):
    """A GPU's own panels: each rank passes one on to the next."""

    def publish(self, k: int) -> None:
        """Do nothing: a panel is sent when its rank fetches it, too. Local."""

    def fetch(self, k: int) -> Any:
        """Return a panel from its diagonal on. Local."""
        return self.again(k, slice(self.shape.bounds(k)[0], None))

    def again(self, k: int, rows: slice) -> Any:
        """Return rows of a panel. Local."""
        if self.has(k):
            panel = self.own(k)[rows]
        else:
            first, stop = self.shape.bounds(k)
            shape = len(range(self.shape.rows)[rows]), stop - first
            panel = self.engine.operations.scratch(f"panel {k % 2}", shape, self.dtype, "F")
        workers, owner = self.shape.workers, self.shape.owner(k)
        to, of = (self.rank + 1) % workers, (self.rank - 1) % workers
        arrays = (panel, *self.about(k)) if workers > 1 else ()
        sends = [] if to == owner else [(each, to) for each in arrays]
        receives = [] if self.rank == owner else [(each, of) for each in arrays]
        self.engine.transport.start(sends, receives)
        return panel


_WIDTHS = (
    "tile", "band", "coarser", "panel", "lead", "solved", "stripes", "update_order", "panel_flops", "factor_alone",
    "factor_width", "factor_wait", "panel_width",
)  # fmt: skip
"""What algorithms ask of a GPU's operations before they compute."""


class _DryGpuOperations(DryOperations):
    """The operations of a GPU, which count instead of computing."""

    vars().update({name: getattr(GpuFactorOperations, name) for name in _WIDTHS})
    own_panels: Any = _PassedPanels
    spread: Any = Sides
    gemqrt: Any = None  # reflectors are applied by products

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
