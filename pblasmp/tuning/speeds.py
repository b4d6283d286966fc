# SPDX-License-Identifier: Apache-2.0
"""Measuring a machine: what its ranks compute, copy and send per second while all of them do the same.

Everything is timed as a run among many, as predictions mean it: threads and caches are warm, and a GPU's queue is full.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any

import numpy as np

from ..comm import Communicator
from ..costs.machines import machine_from
from ..costs.predict import FACTORED, kind_of, predict
from ..dtypes import as_dtype
from ..engines.arrays import empty_part, set_diagonal
from ..engines.composite import ExchangeMove
from ..engines.protocol import Engine
from ..engines.request import AnyProblem, Operands
from ..layout import Grid, MatrixDescriptor
from .timing import in_a_row, repeated, samples

ROUNDS = 5  # the speed of a machine changes within seconds: rounds lie apart
QUEUED = 8  # runs
_LONG = 1.0  # seconds: nothing that would take longer
COPIED = {"host": 64 << 20, "gpu": 512 << 20}  # bytes
SENT = {"host": 16 << 20, "gpu": 256 << 20}  # bytes of a rank
_TYPES = {
    "host": ("float32", "float64", "complex64", "complex128"),
    "gpu": ("bfloat16", "float32", "float64"),
}
SIZES = {"host": (32, 64, 128, 256, 512, 1024, 2048), "gpu": (256, 512, 1024, 2048, 4096, 8192, 16384)}
PANEL = {
    "host": (128, 64),
    "gpu": (512, 256),
}  # rows and columns: with more rows, operations take most of the time
# up to n so many in a CUDA graph: launching small ones one by one takes longer
_RECORDED = ((1024, 16), (2048, 4))


def measure_ranks(
    engine: Engine, comm: Communicator, call: Callable[[], Any], step: Callable[[str], None] = print
) -> dict[str, Any]:
    """Return a table ``[[ranks]]`` of a machine's file for the ranks of one node. Collective over the ranks.

    Everything is measured in rounds, and the median counts, as in the validation of predictions. ``call`` is a public
    call that hardly computes; ``step`` is told what is measured next.
    """
    rounds = [one_round(engine, comm, call, step) for _ in range(ROUNDS)]
    return {"ranks": comm.size, **{name: _usual([each[name] for each in rounds]) for name in rounds[0]}}


def _usual(found: list[Any]) -> Any:
    """Return the median of each number of several rounds. Local."""
    if isinstance(found[0], dict):
        return {key: _usual([each[key] for each in found]) for key in found[0]}
    if isinstance(found[0], list):  # a curve, which may end earlier in one round than in another
        curve: dict[tuple[int, ...], list[float]] = {}
        for *at, value in (point for each in found for point in each):
            curve.setdefault(tuple(at), []).append(value)
        return [[*at, median(values)] for at, values in sorted(curve.items())]
    return median(found)


def one_round(
    engine: Engine, comm: Communicator, call: Callable[[], Any], step: Callable[[str], None]
) -> dict[str, Any]:
    """Measure everything once. Collective over the ranks."""
    kind = _kind(engine)

    def seconds(run: Callable[[], Any]) -> float:
        return repeated(engine, comm, run, 1)[0]

    step("calls")
    table: dict[str, Any] = {"call_seconds": seconds(call)}
    step("small products")
    table["launch_seconds"] = seconds(_product(engine, 8, "float32"))
    step("copies")
    table["copy"] = {"bytes_per_second": COPIED[kind] / seconds(_copy(engine))}
    if comm.size > 1:
        step("messages")
        table["link"] = _measure_link(engine, comm, seconds, table["call_seconds"])
    table["gemm"] = {}
    for dtype in _TYPES[kind]:
        step(f"products of {dtype}")
        table["gemm"][dtype] = list(_curve(engine, comm, dtype, seconds))
    step("panels")
    rows, cols = PANEL[kind]
    table["columns"] = {
        name: max(comm.allgather(seconds(run))) / cols for name, run in _columns(engine, rows, cols).items()
    }
    return table


def measure_calls(
    engine: Engine,
    comm: Communicator,
    table: dict[str, Any],
    calls: Iterable[tuple[AnyProblem, Callable[[], Any]]],
) -> dict[str, float]:
    """Return by kind of problem what a call takes besides what is predicted for it. Collective over the ranks.

    Calls are a problem of each kind that takes a GPU less than its host, and what computes it. The host's time counts,
    but for factorizations.
    """
    about = {"title": "", "measured": True, "engine": _kind(engine), "ranks_per_node": comm.size}
    machine = machine_from({**about, "ranks": [{**table, "call_seconds": 0.0}]}, "here")
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for problem, run in calls:
            foreseen = predict(problem, machine, nranks=comm.size)
            if engine.traits.queues and kind_of(problem) not in FACTORED:
                launches = max(sum(shapes.values()) for shapes in foreseen.traffic.shapes)
                took = max(comm.allgather(_queueing(engine, run)))
                rest = took - launches * float(table["launch_seconds"])
            else:
                rest = comm.bcast(repeated(engine, comm, run, 1))[0] - foreseen.seconds
            found.setdefault(kind_of(problem), []).append(rest)
    return {kind: max(0.0, median(each)) for kind, each in found.items()}


def _queueing(engine: Engine, run: Callable[[], Any]) -> float:
    """Return how long the host takes to queue a run among many. Collective over the ranks."""
    for _ in range(QUEUED):
        run()
    engine.synchronize()
    start = time.perf_counter()
    for _ in range(QUEUED):
        run()
    took = time.perf_counter() - start
    engine.synchronize()
    return took / QUEUED


def measure_speed(engine: Engine, comm: Communicator) -> tuple[int, dict[str, float]]:
    """Return n, and the bytes per second of copies and operations per second of n × n products. Collective."""
    n = 4096 if engine.traits.queues else 1024

    def rate(amount: float, run: Callable[[], Any]) -> float:
        run()
        return amount / min(samples(engine, comm, run, 3))

    copied = COPIED[_kind(engine)]
    speed = {"copy": rate(copied, _copy(engine)), "gemm": rate(2.0 * n**3, _product(engine, n, "float32"))}
    return n, speed


def _kind(engine: Engine) -> str:
    return "gpu" if engine.traits.on_gpus else "host"


def _curve(
    engine: Engine, comm: Communicator, dtype: str, seconds: Callable[[Callable[[], Any]], float]
) -> Iterator[list[Any]]:
    """Yield each n and the operations per second of n × n products. Collective over the ranks."""
    for n in SIZES[_kind(engine)]:
        run, times = _recorded(engine, n, _product(engine, n, dtype))
        took = max(comm.allgather(seconds(run))) / times
        yield [n, 2 * n**3 * (4 if dtype.startswith("complex") else 1) / took]
        if 8 * took > _LONG:  # of twice the order
            return


def _columns(engine: Engine, m: int, n: int) -> dict[str, Callable[[], Any]]:
    """Return what factors m × n and n × n panels, and solves n equations for n right-hand sides. Local."""
    do, xp = engine.operations, engine.xp
    t, info, pivots = xp.zeros((n, n), np.float64, order="F"), xp.zeros(1, np.int32), xp.zeros(n, np.int32)
    a, x, spd, lu, qr = (_panel(engine, rows, n) for rows in (n, n, n, m, m))
    x[...] = 0
    return {
        "trsm": lambda: do.trsm(1, a, x, lower=True, unit=False),
        "potrf": lambda: do.potrf(spd, info, 0),
        "getrf": lambda: do.getrf(lu, pivots, info, 0),
        "geqrt": lambda: do.geqrt(qr, t),
    }


def _panel(engine: Engine, m: int, n: int) -> Any:
    """Return a matrix near the identity, so that it can be factored again and again. Local."""
    xp = engine.xp
    a = engine.empty((m, n), np.dtype(np.float64), "F", m)
    a[...] = ((31 * xp.arange(m)[:, None] + 17 * xp.arange(n)) % 101 - 50) / (5000.0 * m)
    set_diagonal(xp, a, 1)
    return a


def _recorded(engine: Engine, n: int, run: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
    """Return what repeats ``run`` without the host's time to launch it, and how often it does. Local."""
    graphs = engine.graphs()
    times = next((times for most, times in _RECORDED if n <= most), 1)
    if graphs is None or times == 1:
        return run, 1
    run()
    return graphs.record(in_a_row(run, times)).launch, times


def _product(engine: Engine, n: int, dtype: str) -> Callable[[], None]:
    kind = as_dtype(dtype)
    a, b, d = (engine.empty((n, n), kind, "C", n) for _ in range(3))
    a[...], b[...] = 1, 1
    return lambda: engine.operations.gemm(1, a, b, 0, d)


def _copy(engine: Engine) -> Callable[[], None]:
    n = math.isqrt(COPIED[_kind(engine)] // 8)
    a, b = (engine.empty((n, n), np.dtype(np.float64), "C", n) for _ in range(2))
    a[...] = 0

    def run() -> None:
        b[...] = a

    return run


def _measure_link(
    engine: Engine, comm: Communicator, seconds: Callable[[Callable[[], Any]], float], call_seconds: float
) -> dict[str, float]:
    """Return how fast messages are, from large and small ones. Collective.

    GPUs push what is contiguous, one to the next; a call that hardly computes takes them as long as its message.
    Between CPU ranks a matrix is moved from columns to rows of processes, so that messages are packed, as most are.
    """
    gpus, found = engine.traits.queues, []
    for nbytes in (64, SENT[_kind(engine)]):
        run, sent, messages = (_to_next if gpus else _moved)(engine, comm, nbytes)
        found.append((sent, seconds(run), messages))
    (few, short, messages), (many, long, _) = found
    rate = (many - few) / max(long - short, 1e-9)
    latency = call_seconds if gpus else max(0.0, short - few / rate) / messages
    return {"bytes_per_second": rate, "seconds": latency}


def _to_next(engine: Engine, comm: Communicator, nbytes: int) -> tuple[Callable[[], None], int, int]:
    """Return what sends ``nbytes`` to the next rank and receives as many, these bytes, and the messages of a rank."""
    kind = np.dtype(np.float64)
    there, here = (engine.empty((1, nbytes // 8), kind, "C", nbytes // 8) for _ in range(2))
    there[...] = 0
    to, of = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return lambda: engine.transport.start([(there, to)], [(here, of)]).finish(), nbytes, 1


def _moved(engine: Engine, comm: Communicator, nbytes: int) -> tuple[Callable[[], None], int, int]:
    """Return what moves ``nbytes`` of each rank from columns to rows, the bytes sent, and the messages of a rank."""
    size = comm.size
    n = math.isqrt(nbytes * size // 8) // size * size or size
    source = MatrixDescriptor((n, n), (n, n // size), Grid(1, size))
    target = MatrixDescriptor((n, n), (n // size, n), Grid(size, 1))
    a, d = (empty_part(engine, x) for x in (source, target))
    move = ExchangeMove(engine, source, target)
    return move.bind(Operands(a, None, None, d)).run, move.sent_bytes, size - 1
