# SPDX-License-Identifier: Apache-2.0
"""Timing what several ranks do together: by the device's clock where there is one, each run by its slowest rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..context import Context

__all__ = ["samples", "slowest"]


def samples(ctx: Context, run: Callable[[], Any], count: int) -> list[float]:
    """Return the seconds that ``count`` runs took on this rank, each begun by all together. Collective over ctx."""
    return [_once(ctx, run) for _ in range(count)]


def slowest(ctx: Context, mine: Sequence[float]) -> list[float]:
    """Return the longest time of any rank for each sample. Collective over the context."""
    return [max(each) for each in zip(*ctx.comm.allgather(list(mine)), strict=True)]


def _once(ctx: Context, run: Callable[[], Any]) -> float:
    ctx.engine.synchronize()
    ctx.comm.barrier()
    if ctx.engine.name == "host":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    import cupy

    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) * 1e-3
