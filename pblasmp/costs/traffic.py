# SPDX-License-Identifier: Apache-2.0
"""What every rank of a computation sends, receives, computes and needs, found without ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import cast

import numpy as np

from ..comm import Side
from ..comm.exchange import SLOTS
from ..dtypes import scalar
from ..engines.arrays import empty_part
from ..engines.host.host_engine import HostEngine
from ..engines.method import prepare
from ..engines.request import AnyProblem, Operands, Options, Task
from ..errors import ArgumentError, LayoutError, UnsupportedError, counted, short_repr
from ..layout import Level3Problem, MatmulProblem, MatrixDescriptor, ParallelProblem
from ..layout.factor_problem import FactorProblem
from ..layout.grid import integer
from ..layout.level3_problem import with_c_like_d
from ..layout.problem import nearest_legal
from ..layout.value import Numbers, Shapes, Traffic
from .counts import Counts, classes, counts_of
from .dry_engine import DryEngine, Ghost, Ranks

_LARGEST = 2**63 - 1
_PARTS = 8  # in which GPUs take the tokens of tensor-parallel products


def traffic(
    problem: AnyProblem,
    algorithm: str = "auto",
    *,
    alpha: complex = 1,
    beta: complex | None = None,
    nranks: int | None = None,
    ranks_per_node: int | None = None,
    memory_bytes: int | None = None,
    cores: int | None = None,
    gpus: bool = False,
    most: int | None = None,
) -> Traffic:
    """Return what each CPU rank of a computation does, which ``problem.traffic`` documents. Local.

    ``cores`` is how many a node has, which is how many of its ranks work on a factorization; by default all.

    ``most`` ranks of a factorization are counted, evenly chosen, and the others are taken to do as the one before: by
    default all, so that the counts are exact.

    ``gpus`` counts algorithms by messages as they run on GPUs, where operands of short types stay as they are.

    Raises:
        ArgumentError: the problem is not legal, or an argument makes no sense.
        UnsupportedError: there is no such algorithm, or it cannot compute the problem.
    """
    task = task_of(problem, algorithm, alpha, beta)
    asked = task.problem
    if isinstance(asked, FactorProblem):
        memory_bytes = (
            None  # nothing is chosen by it: what a factorization needs is counted even if it is not there
        )
    if memory_bytes is not None:
        memory_bytes = integer(memory_bytes, "memory_bytes", 0, ArgumentError)
    if cores is not None:
        cores = integer(cores, "cores", 1, ArgumentError)
    ranks = replace(_ranks(asked, nranks, ranks_per_node, memory_bytes), cores=cores)
    first = _run(ranks, 0, task, gpus=gpus)
    # The ranks agree: one choice is enough. Every rank takes part in the same exchanges.
    task = task._replace(options=replace(task.options, algo=first.algorithm))
    asks = first.engine.transport
    like = classes(asked, ranks, first.algorithm, asks.calls)
    if most is not None and isinstance(asked, FactorProblem) and len(np.unique(like)) > most:
        chosen = np.linspace(0, ranks.size - 1, most).astype(np.int64)
        like = chosen[np.searchsorted(chosen, np.arange(ranks.size), "right") - 1]
    runs = [
        first,
        *(_run(ranks, rank, task, gpus=gpus) for rank in np.unique(like).tolist() if rank),
    ]
    numbers = np.searchsorted([run.engine.transport.rank for run in runs], like)
    every = {name: in_64_bits([run.numbers[name] for run in runs], asked)[numbers] for name in first.numbers}
    counts = Counts(*(every.pop(each.name) for each in fields(Counts)))
    for (_, _, _, itemsize, slots, copies), moves in asks.moves.items():
        moved = counts_of(moves, itemsize, ranks.size, ranks.nodes, slots)
        moved.copied_bytes *= copies
        counts.add(moved)
        del moved  # before the next ones are made
    pieces = max((1, *map(len, asks.moves.values()), *asks.messages.values()))  # of an operand, or to a rank
    return Traffic(
        str(problem), first.algorithm, first.path, ranks.size, ranks.per_node, like=numbers,
        shapes=[run.engine.operations.shapes for run in runs], **vars(counts), **every,
        meetings=asks.calls["fence"], collectives=asks.calls["sum"],
        pieces=_PARTS if isinstance(asked, ParallelProblem) else pieces,
    )  # fmt: skip


def in_64_bits(found: list[int], problem: object) -> Numbers:
    """Return counts as an array, or raise ArgumentError if one is too large for that. Local."""
    if max(found) > _LARGEST:
        raise ArgumentError(f"the counts of a rank must fit into 64 bits, got {max(found):.3g} for {problem}")
    return np.array(found, np.int64)


def _dtype_of(problem: AnyProblem) -> np.dtype:
    """Return the type of the result. Local."""
    if isinstance(problem, ParallelProblem):
        return problem.out_dtype
    return problem.a.dtype if isinstance(problem, FactorProblem) else problem.d.dtype


def move_traffic(
    source: MatrixDescriptor, target: MatrixDescriptor, *, ranks_per_node: int | None = None
) -> Traffic:
    """Return what each CPU rank does to move a matrix to another layout: ``A.redistribute``. Local.

    Raises:
        LayoutError: the matrices differ in shape.
    """
    if source.shape != target.shape:
        raise LayoutError(f"redistribute: expected one shape, got {source.shape} and {target.shape}")
    size = max(source.grid.size, target.grid.size)
    ranks = Ranks(size, _per_node(size, ranks_per_node))
    counts = counts_of(
        [(Side.of(source), Side.of(target))], source.dtype.itemsize, size, ranks.nodes, SLOTS
    )  # fmt: skip
    memory = np.array([_held(source, r) + _held(target, r) for r in range(size)], np.int64)
    none = np.zeros_like(memory)
    return Traffic(
        f"move {source} to {target}", "exchange", "by MPI", size, ranks.per_node, **vars(counts),
        memory_bytes=memory, flops=none, touched_bytes=none, like=none, shapes=[Shapes()],
    )  # fmt: skip


def size_of(problem: AnyProblem) -> int:
    """Return how many ranks the layouts of a problem need. Local."""
    if isinstance(problem, ParallelProblem):
        return problem.size
    return max(x.grid.size for x in _matrices(problem).values())


def operands_bytes(problem: MatmulProblem | Level3Problem | FactorProblem) -> int:
    """Return the bytes of the first rank's parts of all matrices. Local."""
    return sum(_held(x, 0) for x in _matrices(problem).values())


def operands_of(engine: HostEngine, problem: AnyProblem) -> Operands:
    """Return a rank's arrays of a problem. Local."""
    if not isinstance(problem, ParallelProblem):
        found = Operands(*(x and empty_part(engine, x) for x in (getattr(problem, name) for name in "abcd")))
        if isinstance(problem, FactorProblem):
            least = min(problem.a.shape)
            found.pivots, found.tau = np.zeros(least, np.int64), np.zeros(least, problem.a.dtype)
        return found
    p, rank = problem, engine.transport.rank
    tokens, inputs, outputs = p.tokens[rank], p.inputs[rank], p.outputs[rank]
    shape = (p.rows[rank], sum(p.outputs) if p.form == "matmul_allgather" else outputs)
    weights = (outputs, inputs) if p.outputs_first else (inputs, outputs)
    arrays = ((tokens, inputs), p.dtype), (weights, p.w_dtype), (shape, p.c_dtype), (shape, p.out_dtype)
    x, w, c, d = (
        None if dtype is None else engine.empty(each, dtype, "C", each[1]) for each, dtype in arrays
    )
    assert x is not None
    assert w is not None
    assert d is not None
    x, w = (each.T if name in p.transposed else each for name, each in (("x", x), ("w", w)))
    if p.turned:
        x, w, c, d = w.T, x.T, None if c is None else c.T, d.T
    gathered = None
    if p.return_gathered:
        gathered = engine.empty((sum(p.tokens), inputs), p.dtype, "C", inputs)
    return Operands(x, w, c, d, gathered=gathered)


@dataclass(frozen=True)
class _Run:
    """What one rank does: what its engine has counted, and what it does outside of exchanges, as in ``Traffic``."""

    algorithm: str
    path: str
    engine: DryEngine
    numbers: dict[str, int]


def _run(ranks: Ranks, rank: int, task: Task, *, gpus: bool) -> _Run:
    """Prepare and run a problem on one rank, dry.

    Sums move as much as their algorithm reports: parts and sums travel once.
    """
    engine, problem = _engine(ranks, rank, gpus=gpus), task.problem
    operands = operands_of(engine, problem)
    product, choice = prepare(engine, task, operands)
    written, copied = Ghost.written, Ghost.copied
    product.run(operands)
    written, copied = Ghost.written - written, Ghost.copied - copied
    arrays = (operands.a, operands.b, operands.c, operands.d, operands.gathered)
    if isinstance(problem, ParallelProblem):
        held = sum(x.nbytes for x in arrays if x is not None)
    else:
        held = sum(_held(x, rank) for x in _matrices(problem).values())
    asks = engine.transport
    if isinstance(problem, FactorProblem):  # whose products do not count, or only at most
        sent, kept = asks.sent.total(), asks.kept.nbytes
    else:
        sent, copied = product.sent_bytes, product.copied_bytes
        kept = product.workspace.host_bytes + product.workspace.device_bytes
    sums = sent - asks.sent.total()

    def near(moved: Mapping[int, int]) -> int:
        node = rank // ranks.per_node
        here = sum(nbytes for other, nbytes in moved.items() if other // ranks.per_node == node)
        return here + (sums if len(ranks.nodes) == 1 else 0)

    numbers = {
        "sent_bytes": sent, "received_bytes": sums + asks.received.total(), "messages": asks.messages.total(),
        "node_bytes": near(asks.sent), "node_received": near(asks.received), "copied_bytes": copied,
        "shared_bytes": 0 if gpus else copied, "touched_bytes": max(0, written - copied),
        "flops": engine.operations.flops, "memory_bytes": held + kept,
    }  # fmt: skip
    return _Run(choice.name, product.path, engine, numbers)


def _engine(ranks: Ranks, rank: int, *, gpus: bool) -> DryEngine:
    if not gpus:
        return DryEngine(ranks, rank)
    from .dry_gpus import DryGpuEngine  # which takes as long to import as the rest together

    return DryGpuEngine(ranks, rank)


def task_of(problem: AnyProblem, algorithm: str, alpha: complex, beta: complex | None) -> Task:
    """Return what is computed: a problem without a C that is not read, in the nearest layouts that can be. Local.

    ArgumentError if the problem is not legal, or has no C for ``beta``; UnsupportedError if it cannot be counted.
    """
    asked, nearest = problem, None
    if isinstance(problem, ParallelProblem):
        if faults := problem.faults():
            raise LayoutError("; ".join(faults))
        beta = (0 if problem.c_dtype is None else 1) if beta is None else beta
    elif isinstance(problem, FactorProblem):
        if faults := problem.faults():
            raise ArgumentError("; ".join(faults))
        if problem.routine in ("condition", "eigh", "svd"):
            raise UnsupportedError(f"{problem.routine}: what it does depends on the values of the matrix")
        beta = 0
    else:
        if isinstance(problem, MatmulProblem) and problem.scheme == "gemm":
            nearest_legal(problem).validate()
        else:
            problem.validate()
        beta = None if beta is None else scalar(beta, problem.d.dtype, "beta")
        if problem.c is None and beta:
            raise ArgumentError(f"beta: the problem has no C, expected 0, got {short_repr(beta)}")
        beta = (0 if problem.c is None else 1) if beta is None else beta
        asked = replace(problem, c=None) if beta == 0 and problem.c is not None else problem
        nearest = with_c_like_d(cast("MatmulProblem", asked))
    return Task(asked, Options.of(_dtype_of(asked), alpha=alpha, beta=beta, algo=algorithm), nearest)


def _ranks(
    problem: AnyProblem, nranks: int | None, ranks_per_node: int | None, memory_bytes: int | None
) -> Ranks:
    needed = size_of(problem)
    size = needed if nranks is None else integer(nranks, "nranks", 1, ArgumentError)
    if size < needed or (isinstance(problem, ParallelProblem) and size != needed):
        raise ArgumentError(f"nranks: the layouts need {counted(needed, 'rank')}, got {size}")
    return Ranks(size, _per_node(size, ranks_per_node), memory_bytes)


def _per_node(size: int, ranks_per_node: int | None) -> int:
    given = size if ranks_per_node is None else integer(ranks_per_node, "ranks_per_node", 1, ArgumentError)
    return min(size, given)


def _matrices(problem: MatmulProblem | Level3Problem | FactorProblem) -> dict[str, MatrixDescriptor]:
    return {name: x for name in "abcd" if (x := getattr(problem, name)) is not None}


def _held(x: MatrixDescriptor, rank: int) -> int:
    """Return the bytes of a rank's part of a matrix."""
    if rank >= x.grid.size:
        return 0
    rows, cols = x.local_shape(rank)
    return x.lld(rank) * (rows if x.order == "C" else cols) * x.dtype.itemsize
