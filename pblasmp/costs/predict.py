# SPDX-License-Identifier: Apache-2.0
"""How long a computation takes on a machine that nobody has to have: exact counts, times what a machine's file says."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from ..dtypes import accumulation_dtype, as_dtype
from ..engines.request import AnyProblem
from ..errors import ArgumentError, ArgumentTypeError, counted, short_repr
from ..layout import Level3Problem, MatmulProblem, MatrixDescriptor, ParallelProblem
from ..layout.factor_problem import FactorProblem
from ..layout.grid import integer
from ..layout.value import Kernel, Traffic, bytes_text, time_text
from .counts import Counts
from .dry_engine import FLOPS, MOST_BYTES
from .machines import Machine, NodeOf, load_machine
from .traffic import in_64_bits, move_traffic, operands_bytes, size_of, traffic

_PRODUCT_BAND = (0.8, 1.25)  # of the prediction, for products that were measured: see the validation
_WIDE = (0.5, 2.0)  # for all else
FACTORED = ("cholesky", "lu", "qr", "lstsq", "triangular")
PANELS = ("potrf", "getrf", "geqrt")
COLUMNS = ("trsm", *PANELS)
"""Kernels that take one column, or one equation, after the other."""
_BESIDE = 1.6  # times as long a panel takes a GPU beside products, which leave it few multiprocessors
_TRIANGLES = (
    1.6  # times as long as products solves and panels take for their operations, besides their columns
)
MOST_RANKS = 2**20
_RUN = 4  # ranks of a factorization are counted, at most; the others are taken to do as these
_PARTS = 4  # in which GPUs of a node push operands
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
    computes. Counts of GPUs are those of operands that are gathered by messages. Of a factorization on many ranks, some
    are counted; if its matrices alone do not fit into the memory, none.

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

    Example:
        >>> problem = pb.MatmulProblem.gemm(10_000, 10_000, 10_000, "2x4", 512)
        >>> found = pb.predict(problem, "dgx-h100")
        >>> found.fits, found.low < found.seconds < found.high
        (True, True)

    See Also:
        advise; ``problem.traffic()``.
    """
    where = load_machine(machine)
    if not isinstance(problem, get_args(AnyProblem)):
        kinds = ", ".join(kind.__name__ for kind in get_args(AnyProblem))
        raise ArgumentTypeError(
            f"problem: expected one of {kinds}, got {short_repr(problem)}; advise takes names and sizes, and "
            "FactorProblem.of makes a factorization by name"
        )
    size = planned_ranks(size_of(problem) if nranks is None else nranks, "nranks")
    per_node = min(size, where.ranks_per_node)
    if size > per_node and where.network is None:
        raise ArgumentError(
            f"machine: {where.name} is one node of {counted(where.ranks_per_node, 'rank')}, the layouts need {size}"
        )
    if isinstance(problem, FactorProblem) and not problem.faults():
        held = operands_bytes(problem)
        if held > MOST_BYTES:
            raise ArgumentError(f"a {problem} is too large: expected at most 2^60 bytes on a rank")
        if held > where.memory_bytes:
            return _too_large(where, problem, size, per_node, held)
    pushed = where.engine == "gpu" and isinstance(problem, MatmulProblem) and size == per_node
    counts = traffic(
        problem, "gathered" if pushed and algorithm == "push" else algorithm,
        alpha=alpha, beta=beta, nranks=size, ranks_per_node=per_node, memory_bytes=per_node * where.memory_bytes,
        cores=where.cores or None, gpus=where.engine == "gpu", most=_RUN,
    )  # fmt: skip
    if pushed and counts.algorithm == "gathered":  # GPUs of a node push what is gathered here
        counts = replace(counts, algorithm="push", path="push")
    return _timed(where, counts, kind_of(problem))


def planned_ranks(value: object, name: str) -> int:
    """Return a number of ranks, each of which is looked at, or raise ArgumentError. Local."""
    ranks = integer(value, name, 1, ArgumentError)
    if ranks > MOST_RANKS:
        raise ArgumentError(f"{name}: planning is for up to {MOST_RANKS} ranks, got {short_repr(ranks)}")
    return ranks


def _too_large(machine: Machine, problem: FactorProblem, size: int, per_node: int, held: int) -> Prediction:
    """Return the prediction for a factorization whose matrices are larger than the memory, counting nothing."""
    nothing = np.zeros(size, np.int64)
    (m, n), dtype = problem.a.shape, problem.a.dtype.name
    kernel = {"cholesky": "potrf", "lu": "getrf"}.get(problem.routine, "geqrt")
    flops = int(FLOPS[kernel](m, n, min(m, n))) * (4 if dtype.startswith("complex") else 1)
    side = max(1, int((flops / 2 / size) ** (1 / 3)))
    counts = Traffic(
        str(problem), "panels", "panels", size, per_node, **vars(Counts.none(size)), touched_bytes=nothing,
        flops=nothing + in_64_bits([flops // size], problem), memory_bytes=nothing + held, like=nothing,
        shapes=[Counter({("gemm", dtype, side, side, side): 1})],
    )  # fmt: skip
    remark = "its matrices alone do not fit: only its operations are counted, at the speed of products"
    return _timed(machine, counts, kind_of(problem), remark)


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


def _timed(machine: Machine, counts: Traffic, kind: str, *known: str) -> Prediction:
    """Return how long counts take: kernels by their rates, messages and copies by theirs, and latencies of all."""
    here, remark = machine.node_of(counts.ranks_per_node)
    remarks = [each for each in (remark, *known) if each]
    if not machine.measured:
        remarks.append(f"{machine.name} was not measured")
    size, several = counts.nranks, counts.nranks > counts.ranks_per_node
    if several and machine.measured:
        remarks.append("the network was not measured")
    gpus, factors = machine.engine == "gpu", kind in FACTORED

    def seconds_of(*kernels: str) -> NDArray[np.float64]:
        """Return how long each rank's kernels of these names take; without names all."""
        sums = [
            sum(
                count * kernel_seconds(here, kernel, remarks)
                for kernel, count in shapes.items()
                if not kernels or kernel[0] in kernels
            )
            for shapes in counts.shapes
        ]
        return np.array(sums, np.float64)[counts.like]

    compute = seconds_of()
    link, network = here.link or here.copy, machine.network
    moved = np.maximum(counts.node_bytes, counts.node_received) / link.bytes_per_second
    latency = link.seconds
    if several and network is not None:
        out = counts.sent_bytes - counts.node_bytes
        arriving = counts.received_bytes - counts.node_received
        moved = moved + np.maximum(out, arriving) / network.bytes_per_second
        latency = network.seconds
    rounds = max(1, size - 1).bit_length()
    moved = moved + (counts.messages + counts.collectives * rounds) * latency
    copies = (counts.copied_bytes + counts.touched_bytes) / here.copy.bytes_per_second
    if factors:  # panels are finished one after the other, while the ranks update with those before
        chain = seconds_of(*PANELS).sum() * (_BESIDE if gpus else 1)
        if kind == "cholesky":
            chain += seconds_of("trsm").sum()
        exposed = np.maximum(chain - compute, 0) + moved + copies
    elif machine.overlaps:  # pieces arrive while those before are multiplied; the first is waited for
        pieces = max(counts.pieces, _PARTS if gpus and not several else 1)
        first = moved / pieces
        exposed = first + (1 - 1 / pieces) * np.maximum(moved - compute, 0) + copies
    else:
        exposed = moved + copies
    total = compute + exposed
    kernels = np.array([sum(shapes.values()) for shapes in counts.shapes])[counts.like]
    hosts = here.calls.get(kind, here.call_seconds) + (here.launch_seconds * kernels if gpus else 0)
    # A GPU's host queues the next call while this one runs.
    call = np.maximum(hosts - total, 0) if gpus else np.full(size, hosts)
    slowest = int((total + call).argmax())
    seconds = float((total + call)[slowest])
    products = all(kernel[0] == "gemm" for shapes in counts.shapes for kernel in shapes)
    band = _PRODUCT_BAND if products and not remarks else _WIDE
    memory = int(counts.memory_bytes.max())
    average = float(compute.mean())
    left = max(0.0, seconds - average)
    calling = min(float(call[slowest]), left)
    imbalance = min(max(0.0, float(compute[slowest]) - average), left - calling)
    return Prediction(
        machine, counts, seconds, seconds * band[0], seconds * band[1], average, left - calling - imbalance,
        imbalance, calling, memory, tuple(dict.fromkeys(remarks)), memory <= machine.memory_bytes,
    )  # fmt: skip


def kernel_seconds(here: NodeOf, kernel: Kernel, remarks: list[str]) -> float:
    """Return how long a kernel takes, and add a remark if that was not measured. Local.

    That is the longer one of its operations at the rate of products and the bytes that it touches, and its columns.
    """
    name, dtype, m, n, k = kernel
    if dtype not in here.gemm:
        dtype = accumulation_dtype(as_dtype(dtype)).name  # the host multiplies in that
    size = (m * n * k) ** (1 / 3)
    if not here.largest(dtype):
        remarks.append(f"products of {dtype} were not measured")
    elif size > _BEYOND * here.largest(dtype):
        remarks.append(f"local products larger than n = {here.largest(dtype)}, the largest measured")
    if name in COLUMNS and name not in here.columns:
        remarks.append(f"{name} was not measured: taken to be as fast as products")
    flops = FLOPS[name](m, n, k) * (4 if dtype.startswith("complex") else 1)
    touched = (m * k + k * n + m * n) * as_dtype(dtype).itemsize
    # A copy reads and writes each byte.
    slower = _TRIANGLES if name in COLUMNS else 1
    took = max(slower * flops / here.rate(dtype, size), touched / here.copy.bytes_per_second / 2)
    return took + k * here.columns.get(name, 0.0)
