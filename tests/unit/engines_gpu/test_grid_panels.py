# SPDX-License-Identifier: Apache-2.0
"""The buffers of a factorization's panels on GPUs: in which order they are written and read."""

from __future__ import annotations

from typing import Any

import pytest

import pblasmp as pb
from pblasmp.engines.dense import panel_shape
from pblasmp.engines.gpu import grid_panels as factor_panels_of_gpus
from pblasmp.engines.gpu.factor_operations import GpuFactorOperations
from pblasmp.engines.gpu.grid_panels import GridPanels, QueuedPanels
from tests.helpers.factor_cases import panels_of
from tests.helpers.fakelt import FakeLt
from tests.helpers.machine import Multiplying, machine
from tests.helpers.mpi import on_ranks
from tests.helpers.stream_order import StreamOrder


@on_ranks(4)
def test_buffers_of_panels_are_written_in_turn(comm: Any, path: str) -> None:
    """A panel is written to a buffer when the caller's stream has read what was in it, and read when it is there."""
    grids = {"columns": (QueuedPanels, pb.Grid(1, 4)), "rows": (GridPanels, pb.Grid(2, 2))}
    for name, (panels, grid) in grids.items():
        with (
            machine(path, Multiplying, comm=comm, lt=FakeLt()) as lib,
            pytest.MonkeyPatch.context() as patch,
            pb.Context(comm, engine="cublasmp") as ctx,
            panels_of(ctx, 2),
        ):
            order = StreamOrder(lib.gpu, ctx.engine.xp, patch)
            arrived, broadcast = panels._arrived, panels._broadcast

            def read(
                self: Any, k: int, buffer: Any = None, arrived: Any = arrived, use: Any = order.use
            ) -> None:
                if self._reads is not None:
                    use(f"buffer {self._reads}")  # up to now
                arrived(self, k, buffer)
                use(f"buffer {self._slot(k)}")

            def write(
                self: Any, k: int, panel: Any, broadcast: Any = broadcast, use: Any = order.use
            ) -> None:
                broadcast(self, k, panel)
                use(f"buffer {self._slot(k)}")

            patch.setattr(factor_panels_of_gpus, "TOGETHER", 1)  # panel per buffer
            patch.setattr(panels, "_arrived", read)
            patch.setattr(panels, "_broadcast", write)
            patch.setattr(GpuFactorOperations, "shared_from", 0)
            patch.setattr(GpuFactorOperations, "shared_width", 2)
            patch.setattr(panel_shape, "ROUNDS", 0)
            a = ctx.eye(pb.MatrixDescriptor((40, 40), (2, 2), grid, order="F"))
            order.uses = 0
            with ctx.engine.xp.cuda.Stream(non_blocking=True):
                pb.linalg.cholesky(a, out=a)
            assert not "; ".join(order.faults), name
            assert order.uses > 50, name
