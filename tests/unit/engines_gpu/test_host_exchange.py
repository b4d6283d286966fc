# SPDX-License-Identifier: Apache-2.0
"""Arrays on the host to GPUs and back, panel by panel, on GPUs that are played."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pblasmp as pb
from pblasmp.engines.gpu import gpu_transport
from tests.helpers.gpu.host_arrays import check_trip
from tests.helpers.machine import Multiplying, context, machine
from tests.helpers.mpi import on_ranks
from tests.helpers.slow import draws, only_long


@pytest.mark.parametrize("panel", [200, 1 << 20])
@on_ranks(1, 2, *only_long(4))
def test_trips(comm: Any, path: str, directory: str, panel: int) -> None:
    with machine(path, Multiplying, comm=comm) as lib, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_transport, "PANEL_BYTES", panel)
        with pb.Context(comm, engine="cublasmp") as ctx:
            for seed in range(draws(10, long=60)):
                check_trip(ctx, seed, directory)
        lib.assert_clean()
        lib.gpu.assert_clean()


@on_ranks(2)
def test_a_gpu_without_room_is_an_error_on_all_ranks(comm: Any, path: str) -> None:
    with context(path, Multiplying, comm=comm) as (ctx, lib):
        d = pb.MatrixDescriptor((8, 8), (2, 2), pb.Grid(1, ctx.size))
        values = np.arange(64.0).reshape(8, 8)
        a = ctx.scatter(values, d)
        lib.gpu.refuses = (lambda nbytes: nbytes >= 512) if ctx.rank == 1 else None
        for name, call in (
            ("scatter", lambda: ctx.scatter(values, d, root=1)),
            ("gather", lambda: a.gather(1)),
        ):
            text = ""
            try:
                call()
            except MemoryError as error:
                text = str(error)
            assert "on rank 1" in text, f"{name}: no room"
        lib.gpu.refuses = None
        back = a.gather(1)
        assert back is None or np.array_equal(back, values), "afterwards"
