# SPDX-License-Identifier: Apache-2.0
"""GPUs on paper: what their ranks move and compute by the algorithms of every engine, with the widths of a GPU's.

Operands that GPUs of a node push to each other are those that are gathered here, by messages.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..engines import dense
from ..engines.dense.factor_panels import SentPanels
from ..engines.gpu.engine import GpuEngine
from ..engines.gpu.factor_operations import GpuFactorOperations
from ..engines.tensor import messages
from .paper import PaperEngine, PaperOperations, PaperTransport, PlannedExchange

__all__ = ["PaperGpuEngine"]


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

    own_panels: Any = SentPanels  # in a tree, as those of CPU ranks
    grid_panels: Any = None
    spread: Any = None
    gemqrt: Any = None  # reflectors are applied by products
    tile, band = GpuFactorOperations.tile, GpuFactorOperations.band
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


class PaperGpuEngine(PaperEngine):
    """The engine of one of many GPU ranks that nobody has started; see ``PaperEngine``."""

    traits = GpuEngine.traits
    methods = (*dense.METHODS, *messages.METHODS)
    _transport, _operations = _PaperGpuTransport, _PaperGpuOperations
