# SPDX-License-Identifier: Apache-2.0
"""Timing what several ranks do together, for the command line and for benchmarks/: one run, and all ranks' runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..comm import Communicator
from ..engines.protocol import Engine

_MOST = 200  # runs in a sample
_FIRST = 2  # runs of a plan before those that only repeat


def host_seconds(run: Callable[[], Any]) -> float:
    """Return how long one run took, by the host's clock. Local."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def device_seconds(run: Callable[[], Any], stream: Any = None) -> float:
    """Return how long the GPU took for one run on a CuPy stream, by default the current one. Local."""
    import cupy

    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) * 1e-3


def in_a_row(run: Callable[[], Any], times: int) -> Callable[[], None]:
    """Return what calls ``run`` so many times. Local."""

    def runs() -> None:
        for _ in range(times):
            run()

    return runs


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return the longest time of any rank for each sample, given each rank's samples. Local."""
    return [max(each) for each in zip(*ranks, strict=True)]


def samples(
    engine: Engine,
    comm: Communicator,
    run: Callable[[], Any],
    count: int,
    before: Callable[[], None] | None = None,
) -> list[float]:
    """Return the seconds that each of ``count`` runs took until all ranks were done. Collective over the ranks.

    On CPU ranks the time starts when the first rank of a node begins: if ranks outnumber cores, they cannot all begin
    together. On GPUs it is the slowest rank's, by the device's clock. ``before`` is called, untimed, before each.
    """
    mine = []
    for _ in range(count):
        if before is not None:
            before()
        engine.synchronize()
        comm.barrier()
        if not engine.traits.queues:
            start = time.perf_counter()  # of the machine: all processes of a node have this clock
            run()
            mine.append((start, time.perf_counter()))
        else:
            mine.append((0.0, device_seconds(run)))
    everyone = comm.allgather(mine)
    return [max(_span(everyone, node, i) for node in engine.transport.nodes) for i in range(count)]


def repeated(
    engine: Engine, comm: Communicator, run: Callable[[], Any], count: int, least: float = 0.02
) -> list[float]:
    """Return the seconds of a run among many, from ``count`` samples. Collective over the ranks.

    Each sample has as many runs, one after the other, as take about ``least`` seconds, and at least one. So threads and
    caches are warm, and a GPU's queue is never empty: a run takes the longer of what it takes the host and the GPU.
    What only the first two runs do is not timed: on GPUs the second one may record a graph, which takes the host some
    20 ms if it has hundreds of launches.
    """
    for _ in range(_FIRST):
        run()
    first = samples(engine, comm, run, min(count, 2))
    times = max(1, min(_MOST, math.ceil(least / max(min(first), 1e-9))))
    if times == 1:
        return first + samples(engine, comm, run, count - len(first))
    return [seconds / times for seconds in samples(engine, comm, in_a_row(run, times), count)]


def _span(ranks: Sequence[Sequence[tuple[float, float]]], node: Sequence[int], i: int) -> float:
    """Return how long the ranks of a node took, given when each began and ended each sample."""
    starts, ends = zip(*(ranks[rank][i] for rank in node), strict=True)
    return float(max(ends) - min(starts))
