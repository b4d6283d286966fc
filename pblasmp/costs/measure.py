# SPDX-License-Identifier: Apache-2.0
"""Measuring a machine: what its ranks compute, copy and send per second while all of them do the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np

from ..comm import Communicator
from ..dtypes import as_dtype
from ..engines.protocol import Engine
from ..engines.request import Operands
from ..layout import Grid, MatrixDescriptor
from ..timing import samples

__all__ = ["measure_ranks", "measure_speed"]

_SAMPLES = 5
_LONG = 1.5  # seconds: no product that would take longer
_COPIED = 64 << 20  # bytes
_TYPES = {
    "host": ("float32", "float64", "complex64", "complex128"),
    "gpu": ("bfloat16", "float32", "float64"),
}
_SIZES = {"host": (32, 64, 128, 256, 512, 1024, 2048), "gpu": (128, 256, 512, 1024, 2048, 4096, 8192)}


def measure_ranks(
    engine: Engine, comm: Communicator, call: Callable[[], Any], step: Callable[[str], None] = print
) -> dict[str, Any]:
    """Return a table ``[[ranks]]`` of a machine's file for the ranks of one node. Collective over the ranks.

    Args:
        engine: the engine of the ranks.
        comm: the ranks, all on one node.
        call: a public call that hardly computes.
        step: called with what is measured next.
    """
    kind = "gpu" if engine.traits.queues else "host"

    def seconds(run: Callable[[], Any], count: int = _SAMPLES) -> float:
        run()
        return median(samples(engine, comm, run, count))

    def repeated(run: Callable[[], Any], times: int) -> float:
        def several() -> None:
            for _ in range(times):
                run()

        return seconds(several) / times

    step("calls")
    table: dict[str, Any] = {"ranks": comm.size, "call_seconds": repeated(call, 20)}
    step("small products")
    small = _product(engine, 8, "float32")
    table["launch_seconds"] = repeated(small, 50)
    table["meeting_seconds"] = repeated(engine.transport.fence, 20) if comm.size > 1 else 0.0
    step("copies")
    table["copy"] = {"bytes_per_second": _COPIED / seconds(_copy(engine))}
    if comm.size > 1:
        step("messages")
        table["link"] = _measure_link(engine, comm, seconds)
    table["gemm"] = {}
    for dtype in _TYPES[kind]:
        step(f"products of {dtype}")
        table["gemm"][dtype] = list(_curve(engine, comm, dtype, _SIZES[kind], seconds))
    return table


def measure_speed(engine: Engine, comm: Communicator) -> tuple[int, dict[str, float]]:
    """Return n, and the bytes per second of copies and operations per second of n × n products. Collective."""
    n = 4096 if engine.traits.queues else 1024

    def rate(amount: float, run: Callable[[], Any]) -> float:
        run()
        return amount / min(samples(engine, comm, run, 3))

    speed = {"copy": rate(_COPIED, _copy(engine)), "gemm": rate(2.0 * n**3, _product(engine, n, "float32"))}
    return n, speed


def _curve(
    engine: Engine, comm: Communicator, dtype: str, sizes: tuple[int, ...], seconds: Callable[..., float]
) -> Iterator[list[Any]]:
    """Yield each n and the operations per second of products of n × n matrices. Collective over the ranks."""
    for n in sizes:
        run = _product(engine, n, dtype)
        times = 1 if n >= 512 else 8

        def several(run: Callable[[], Any] = run, times: int = times) -> None:
            for _ in range(times):
                run()

        took = max(comm.allgather(seconds(several) / times))
        yield [n, 2.0 * n**3 * (4 if dtype.startswith("complex") else 1) / took]
        if 8 * took > _LONG:  # of twice the order
            return


def _product(engine: Engine, n: int, dtype: str) -> Callable[[], None]:
    kind = as_dtype(dtype)
    a, b, d = (engine.empty((n, n), kind, "C", n) for _ in range(3))
    a[...], b[...] = 1, 1
    return lambda: engine.operations.gemm(1, a, b, 0, d)


def _copy(engine: Engine) -> Callable[[], None]:
    n = math.isqrt(_COPIED // 8)
    a, b = (engine.empty((n, n), np.dtype(np.float64), "C", n) for _ in range(2))
    a[...] = 0

    def run() -> None:
        b[...] = a

    return run


def _measure_link(engine: Engine, comm: Communicator, seconds: Callable[..., float]) -> dict[str, float]:
    """Return how fast messages are: from moves of a large and a small matrix from columns to rows of processes."""
    found = []
    for n in (8 * comm.size, math.isqrt((16 << 20) * comm.size // 8) // comm.size * comm.size):
        down, across = Grid(comm.size, 1), Grid(1, comm.size)
        source = MatrixDescriptor((n, n), (n, n // comm.size), across)
        target = MatrixDescriptor((n, n), (n // comm.size, n), down)
        a, d = (
            engine.empty(
                x.local_shape(comm.rank), x.dtype, x.order, x.lld(comm.rank), symmetric=engine.traits.queues
            )
            for x in (source, target)
        )
        move = engine.prepare_move(source, target, (a, d))
        operands = Operands(a, None, None, d)
        bound = move.bind(operands)
        found.append((max(1, move.sent_bytes), seconds(bound.run)))
        bound.release()
        move.close()
    (few, short), (many, long) = found
    rate = (many - few) / max(long - short, 1e-9)
    return {"bytes_per_second": rate, "seconds": max(0.0, short - few / rate) / (comm.size - 1)}
