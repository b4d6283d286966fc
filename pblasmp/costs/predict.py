# SPDX-License-Identifier: Apache-2.0
"""How long a computation takes on a machine that nobody has to have: exact counts, times what a machine's file says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, get_args

import numpy as np

from ..dtypes import accumulation_dtype, as_dtype
from ..engines.request import AnyProblem
from ..errors import ArgumentError, ArgumentTypeError, counted, short_repr
from ..layout import Level3Problem, MatrixDescriptor, ParallelProblem
from ..layout.factor_problem import FactorProblem
from ..layout.traffic import Kernel, Traffic, bytes_text
from .machines import Machine, NodeOf, load_machine
from .replay import replay
from .streams import replay_streams
from .traffic import move_traffic, size_of, traffic

__all__ = ["FLOPS", "Prediction", "kernel_seconds", "kind_of", "predict", "time_of_move", "time_text"]

_BAND = (0.8, 1.25)  # of the prediction, for what was measured: see the validation
_WIDE = (0.5, 2.0)  # for what is extrapolated
FLOPS: dict[str, Callable[[int, int, int], float]] = {
    "gemm": lambda m, n, k: 2 * m * n * k,
    "trsm": lambda m, n, k: m * n * k,
    "potrf": lambda m, n, k: m * n * k / 3,
    "getrf": lambda m, n, k: 2 * m * n * k - (m + n) * k**2 + 2 * k**3 / 3,
    "geqrt": lambda m, n, k: 2 * k * n * (m - n / 3),
    "gemqrt": lambda m, n, k: (4 * m - k) * n * k,
}
"""Operations of a kernel. Source: LAPACK Working Note 41."""
_BEYOND = 2  # products of matrices so many times as large as measured ones are extrapolated


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a computation takes. Local.

    Attributes:
        machine: the machine.
        traffic: the counts.
        seconds: the time until all ranks are done; it should be from ``low`` to ``high``.
        compute_seconds: of the average rank.
        communication_seconds: messages, copies and waiting for each other, unless they overlap with products.
        imbalance_seconds: what the slowest rank computes longer than the average.
        call_seconds: the call itself; on GPUs only what the host takes longer than the GPU.
        memory_bytes: the most of any rank: operands, result and workspace.
        extrapolated: what is outside the measurements; empty if nothing is.
        fits: whether the memory of each rank is enough.
    """

    machine: Machine
    traffic: Traffic
    seconds: float
    low: float
    high: float
    compute_seconds: float
    communication_seconds: float
    imbalance_seconds: float
    call_seconds: float
    memory_bytes: int
    extrapolated: tuple[str, ...]
    fits: bool

    @property
    def algorithm(self) -> str:
        """The algorithm that was counted: what "auto" takes by rule, if that was asked for."""
        return self.traffic.algorithm

    @property
    def efficiency(self) -> float:
        """The part of the time that the average rank computes."""
        return self.compute_seconds / self.seconds if self.seconds else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values. Local."""
        names = (
            "seconds", "low", "high", "compute_seconds", "communication_seconds", "imbalance_seconds",
            "call_seconds", "memory_bytes", "efficiency", "fits",
        )  # fmt: skip
        return {
            "machine": str(self.machine), **{name: getattr(self, name) for name in names},
            "extrapolated": list(self.extrapolated), **self.traffic.to_dict(),
        }  # fmt: skip

    def __str__(self) -> str:
        t = self.traffic
        parts = ", ".join(
            f"{time_text(getattr(self, f'{name}_seconds'))} {text}"
            for name, text in (
                ("compute", "compute"), ("communication", "exposed communication"), ("imbalance", "imbalance"),
                ("call", "call"),
            )
        )  # fmt: skip
        lines = [
            f"{t.call}",
            f"  machine    {self.machine}, {counted(t.nranks, 'rank')}, {t.ranks_per_node} per node",
            f"  algorithm  {t.algorithm}",
            f"  time       {time_text(self.seconds)}, from {time_text(self.low)} to {time_text(self.high)}",
            f"  of that    {parts}",
            f"  memory     {bytes_text(self.memory_bytes)} per rank{'' if self.fits else ': does not fit'}",
            *(f"  extrapolated  {each}" for each in self.extrapolated),
        ]
        return "\n".join(lines)


def predict(
    problem: AnyProblem,
    machine: str | PathLike[str] | Machine,
    algorithm: str = "auto",
    *,
    alpha: complex = 1,
    beta: complex | None = None,
    nranks: int | None = None,
) -> Prediction:
    """Return how long a computation takes on a machine, and what it needs. Local: needs no ranks, MPI or GPU.

    It is the time of a call among many: threads and caches are warm, and the host queues the next call while a GPU
    computes. Products of the GPUs of a node are counted as they push operands; other counts of GPUs are those of slabs
    by messages, which their algorithms move, too.

    Args:
        problem: a MatmulProblem, Level3Problem, ParallelProblem or FactorProblem: ``MatmulProblem.gemm`` and
            ``FactorProblem.of`` make them of sizes.
        machine: a name in descriptors/machines, a file, or a ``Machine``.
        algorithm: a name for ``algo``; "auto" takes the one that is the fastest by rule.
        alpha, beta: scalars; beta is 1 by default if the problem has a C.
        nranks: number of ranks; by default as many as the layouts need.

    Returns:
        A ``Prediction``: times in seconds, memory and messages in bytes, and what of it is extrapolated.

    Raises:
        ArgumentError: there is no such machine, it has too few ranks, or the problem is not legal.
        UnsupportedError: there is no such algorithm, or it cannot compute the problem.
    """
    where = load_machine(machine)
    if not isinstance(problem, get_args(AnyProblem)):
        kinds = ", ".join(kind.__name__ for kind in get_args(AnyProblem))
        raise ArgumentTypeError(
            f"problem: expected one of {kinds}, got {short_repr(problem)}; advise takes names and sizes, and "
            "FactorProblem.of makes a factorisation by name"
        )
    size = nranks or size_of(problem)
    per_node = min(size, where.ranks_per_node)
    if size > per_node and where.network is None:
        raise ArgumentError(
            f"machine: {where.name} is one node of {counted(where.ranks_per_node, 'rank')}, the layouts need {size}"
        )
    counts = traffic(
        problem, algorithm, alpha=alpha, beta=beta, nranks=size, ranks_per_node=per_node,
        memory_bytes=per_node * where.memory_bytes, cores=where.cores or None, gpus=where.engine == "gpu",
    )  # fmt: skip
    return _timed(where, counts, kind_of(problem))


def kind_of(problem: AnyProblem) -> str:
    """Return which ``calls`` of a machine a problem is one of. Local."""
    if isinstance(problem, ParallelProblem):
        return problem.form
    if isinstance(problem, FactorProblem):
        return problem.routine
    return "routine" if isinstance(problem, Level3Problem) else "product"


def time_of_move(source: MatrixDescriptor, target: MatrixDescriptor, machine: Machine) -> Prediction:
    """Return how long it takes to move a matrix to another layout on a machine. Local."""
    counts = move_traffic(source, target, ranks_per_node=machine.ranks_per_node)
    return _timed(machine, counts, "move")


def _timed(machine: Machine, counts: Traffic, kind: str) -> Prediction:
    here, remark = machine.node_of(counts.ranks_per_node)
    remarks = [remark] if remark else []
    if not machine.measured:
        remarks.append(f"{machine.name} was not measured")
    several = counts.nranks > counts.ranks_per_node
    if several and machine.measured:
        remarks.append("the network was not measured")
    gpus = machine.engine == "gpu"
    working = here
    if counts.events and 0 < machine.cores < counts.ranks_per_node:  # the others leave the cores to them
        working, remark = machine.node_of(machine.cores)
        remarks += [remark] if remark else []
    # On CPU ranks each kernel's time has that to start it; a GPU's host starts them while it computes.
    least = 0.0 if gpus else working.launch_seconds

    def seconds_of(kernel: Kernel) -> float:
        return max(least, kernel_seconds(working, kernel, remarks))

    classes = [
        sum(count * seconds_of(kernel) for kernel, count in shapes.items()) for shapes in counts.shapes
    ]
    hosts = np.zeros(counts.nranks)
    if gpus and not counts.events:
        hosts += (
            here.launch_seconds * np.array([sum(shapes.values()) for shapes in counts.shapes])[counts.like]
        )
    compute = np.array(classes)[counts.like]
    link, network = here.link or here.copy, machine.network
    moved = np.maximum(counts.node_bytes, counts.node_received) / link.bytes_per_second
    latency = link.seconds
    if several and network is not None:
        out = counts.sent_bytes - counts.node_bytes
        arriving = counts.received_bytes - counts.node_received
        moved = moved + np.maximum(out, arriving) / network.bytes_per_second
        latency = network.seconds
    rounds = max(1, counts.nranks - 1).bit_length()
    moved = moved + counts.messages * latency + counts.collectives * rounds * latency
    copies = (
        counts.copied_bytes - counts.collective_copies + counts.touched_bytes
    ) / here.copy.bytes_per_second
    if here.turn is not None:
        copies = copies + counts.turned_bytes * (
            1 / here.turn.bytes_per_second - 1 / here.copy.bytes_per_second
        )
    waits = counts.meetings * here.meeting_seconds * (1 + (rounds if several else 0))
    if counts.events:
        way = network if several and network is not None else link
        if gpus:
            finished, passed = replay_streams(counts.events, seconds_of, partial(_in_streams, here), way)
        else:
            finished, passed = replay(counts.events, seconds_of, way)
        exposed = finished - compute + np.maximum(moved - passed, 0) + copies + waits
    elif machine.overlaps:  # pieces arrive while those before are multiplied; the first is waited for
        first = moved / counts.pieces
        exposed = first + (1 - 1 / counts.pieces) * np.maximum(moved - compute, 0) + copies + waits
    else:
        exposed = moved + copies + waits
    total = compute + exposed
    hosts += here.calls.get(kind, here.call_seconds)
    # A GPU's host queues the next call while this one runs, but for factorisations, which wait for what they find.
    call = np.maximum(hosts - total, 0) if gpus and not counts.events else hosts
    slowest = int((total + call).argmax())
    seconds = float((total + call)[slowest])
    band = _WIDE if remarks else _BAND
    memory = int(counts.memory_bytes.max())
    # Kernels in several streams of a GPU together take longer than the time in which they run.
    computing = np.minimum(compute, total)
    average = float(computing.mean())
    left = max(0.0, seconds - average)
    calling = min(float(call[slowest]), left)
    imbalance = min(max(0.0, float(computing[slowest]) - average), left - calling)
    return Prediction(
        machine, counts, seconds, seconds * band[0], seconds * band[1], average, left - calling - imbalance,
        imbalance, calling, memory, tuple(dict.fromkeys(remarks)), memory <= machine.memory_bytes,
    )  # fmt: skip


def _in_streams(here: NodeOf, kernel: Kernel) -> tuple[float, float, float]:
    """Return what a kernel takes longer beside products, how it slows these down, and how long it takes to queue it."""
    name, _, m, n, _ = kernel
    count = {"gemm": 1, "trsm": m}.get(name, n)
    if name == "swap":
        name, count = "gemm", 1  # a kernel or two
    return here.beside.get(name, 0.0) * count, here.slows.get(name, 1.0), here.queue.get(name, 0.0) * count


def kernel_seconds(here: NodeOf, kernel: Kernel, remarks: list[str]) -> float:
    """Return how long a kernel takes, and add a remark if that was not measured. Local."""
    name, dtype, m, n, k = kernel
    if name == "swap":
        return 2 * m * n * as_dtype(dtype).itemsize / (here.swap or here.copy).bytes_per_second
    if dtype not in here.gemm:
        dtype = accumulation_dtype(as_dtype(dtype)).name  # the host multiplies in that
    size = (m * n * k) ** (1 / 3)
    factor = 4 if dtype.startswith("complex") else 1
    flops = FLOPS[name](m, n, k) * factor
    rows, cols = (n, m) if name == "trsm" else (m, n)
    if rows >= cols and name in ("getrf", "geqrt", "trsm"):
        took = here.panel_seconds(name, dtype, rows, cols)
        if took is not None:
            return took * factor
    touched = (m * k + k * n + m * n) * as_dtype(dtype).itemsize
    if not here.largest(dtype):
        remarks.append(f"products of {dtype} were not measured")
    elif size > _BEYOND * here.largest(dtype):
        remarks.append(f"local products larger than n = {here.largest(dtype)}, the largest measured")
    rate: float | None = None
    if name == "gemm":
        rate = here.product_rate(dtype, m, n, k)
    elif name == "gemqrt":
        rate = here.reflection_rate(dtype, m, n)
    if rate is None:
        like = "gemm" if name in ("geqrt", "gemqrt") else name
        rate = here.rate(dtype, size, like)
        if like != name or not here.curve(name, dtype):
            remarks.append(f"{name} of {dtype} was not measured: taken to be as fast as products")
    # A copy reads and writes each byte.
    return max(flops / rate, touched / here.copy.bytes_per_second / 2)


def time_text(seconds: float) -> str:
    """Return a time for people. Local."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.2g} µs"
