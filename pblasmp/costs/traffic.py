# SPDX-License-Identifier: Apache-2.0
"""What every rank of a computation sends, receives, computes and needs, found without ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from ..comm import Side
from ..comm.exchange import SLOTS
from ..dtypes import scalar
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
from .counts import Counts, Move, classes, counts_of
from .dry_engine import DryEngine, Ghost, LogEntry, Ranks

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
    # The ranks agree: one choice is enough.
    task = task._replace(options=replace(task.options, algo=first.algorithm))
    counts = _exchanged(ranks, first.log)
    like = classes(asked, ranks, first.algorithm, {entry.kind for entry in first.log})
    if most is not None and isinstance(asked, FactorProblem) and len(np.unique(like)) > most:
        chosen = np.linspace(0, ranks.size - 1, most).astype(np.int64)
        like = chosen[np.searchsorted(chosen, np.arange(ranks.size), "right") - 1]
    runs = {0: first} | {rank: _run(ranks, rank, task, gpus=gpus) for rank in sorted({*like.tolist()} - {0})}
    numbers = np.searchsorted(sorted(runs), like)
    order = np.argsort(numbers, kind="stable")
    members = np.split(order, np.searchsorted(numbers[order], np.arange(1, len(runs))))
    for each, rank in zip(members, sorted(runs), strict=True):
        _add_others(counts, ranks, each, runs[rank], shares=not gpus)

    def every(of: Any) -> Numbers:
        return in_64_bits([of(runs[rank]) for rank in sorted(runs)], asked)[numbers]

    kinds = Counter(entry.kind for entry in first.log)
    return counted_traffic(
        ranks, counts, call=str(problem), algorithm=first.algorithm, path=first.path, flops=every(lambda x: x.flops),
        memory_bytes=every(lambda x: x.memory_bytes), like=numbers,
        shapes=[runs[rank].shapes for rank in sorted(runs)], touched_bytes=every(lambda x: x.touched_bytes),
        collective_copies=every(lambda x: min(x.copied_bytes, x.touched_bytes)), meetings=kinds["fence"],
        collectives=kinds["sum"], pieces=_pieces(asked, first.log),
    )  # fmt: skip


def in_64_bits(found: list[int], problem: object) -> Numbers:
    """Return counts as an array, or raise ArgumentError if one is too large for that. Local."""
    if max(found) > _LARGEST:
        raise ArgumentError(f"the counts of a rank must fit into 64 bits, got {max(found):.3g} for {problem}")
    return np.array(found, np.int64)


def counted_traffic(ranks: Ranks, counts: Counts, **rest: Any) -> Traffic:
    """Return what ranks move, and by which links, with the ``rest`` that is known of them. Local."""
    links = {
        "same_rank": int((counts.copied - counts.shared).sum()),
        "same_node": int((counts.sent_here + counts.shared).sum()),
        "other_node": int((counts.sent - counts.sent_here).sum()),
    }
    known: dict[str, Any] = {
        **dict.fromkeys(("touched_bytes", "collective_copies", "like"), np.zeros(ranks.size, np.int64)),
        **dict.fromkeys(("meetings", "collectives"), 0),
    }
    return Traffic(
        nranks=ranks.size, ranks_per_node=ranks.per_node, sent_bytes=counts.sent, received_bytes=counts.received,
        messages=counts.messages, copied_bytes=counts.copied, links=links, node_received=counts.received_here,
        node_bytes=counts.sent_here, shared_bytes=counts.shared, **{**known, **rest},
    )  # fmt: skip


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
    return counted_traffic(
        ranks, counts, call=f"move {source} to {target}", algorithm="exchange", path="by MPI",
        flops=np.zeros(size, np.int64), memory_bytes=memory, shapes=[Shapes()],
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
    if isinstance(problem, FactorProblem):
        least = min(problem.a.shape)
        return Operands(
            **{name: _part(engine, getattr(problem, name)) for name in "abcd"},
            pivots=np.zeros(least, np.int64), tau=np.zeros(least, problem.a.dtype),
        )  # fmt: skip
    if not isinstance(problem, ParallelProblem):
        return Operands(*(_part(engine, getattr(problem, name)) for name in "abcd"))
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


def _part(engine: HostEngine, x: MatrixDescriptor | None) -> Any:
    """Return a rank's part of a matrix, empty outside its grid; None if there is no matrix."""
    if x is None:
        return None
    rank = engine.transport.rank
    if rank >= x.grid.size:
        return engine.empty((0, 0), x.dtype, "C", 1)
    return engine.empty(x.local_shape(rank), x.dtype, x.order, x.lld(rank))


@dataclass(frozen=True)
class _Run:
    """What one rank does."""

    algorithm: str
    path: str
    log: list[LogEntry]
    flops: int
    shapes: Shapes
    touched_bytes: int
    sent_bytes: int
    copied_bytes: int
    memory_bytes: int


def _run(ranks: Ranks, rank: int, task: Task, *, gpus: bool) -> _Run:
    """Prepare and run a problem on one rank, dry."""
    engine, problem = _engine(ranks, rank, gpus=gpus), task.problem
    operands = operands_of(engine, problem)
    product, choice = prepare(engine, task, operands)
    before, copied = Ghost.written, Ghost.copied
    product.run(operands)
    arrays = (operands.a, operands.b, operands.c, operands.d, operands.gathered)
    if isinstance(problem, ParallelProblem):
        held = sum(x.nbytes for x in arrays if x is not None)
    else:
        held = sum(_held(x, rank) for x in _matrices(problem).values())
    kept = product.workspace.host_bytes + product.workspace.device_bytes
    sent, copied = product.sent_bytes, Ghost.copied - copied
    if isinstance(problem, FactorProblem):  # whose products do not say
        kept = engine.transport.kept.nbytes
        sent = sum(nbytes for entry in engine.transport.log for nbytes, _ in entry.sends)
    else:
        copied = product.copied_bytes
    return _Run(
        choice.name,
        product.path,
        engine.transport.log,
        engine.operations.flops,
        engine.operations.shapes,
        Ghost.written - before,
        sent,
        copied,
        held + kept,
    )


def _engine(ranks: Ranks, rank: int, *, gpus: bool) -> DryEngine:
    if not gpus:
        return DryEngine(ranks, rank)
    from .dry_gpus import DryGpuEngine  # which takes as long to import as the rest together

    return DryGpuEngine(ranks, rank)


def task_of(problem: AnyProblem, algorithm: str, alpha: complex, beta: complex | None) -> Task:
    """Return what is computed: a problem without a C that is not read, in the nearest layouts that can be. Local.

    Raises:
        ArgumentError: the problem is not legal, or has no C for ``beta``.
        UnsupportedError: it cannot be counted.
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


def _operands(log: list[LogEntry]) -> dict[tuple[int, int, str, int, int | None], list[Move]]:
    """Return the exchanges of each operand."""
    groups: dict[tuple[int, int, str, int, int | None], list[Move]] = {}
    for entry in log:
        x = entry.exchange
        if x is not None:
            key = id(x.src.cells), id(x.dst.cells), x.order, x.dtype.itemsize, entry.slots
            groups.setdefault(key, []).append((x.src, x.dst))
    return groups


def _pieces(problem: AnyProblem, log: list[LogEntry]) -> int:
    """Return the most exchanges of an operand, or messages from this rank to another one."""
    if isinstance(problem, ParallelProblem):
        return _PARTS
    to = Counter(rank for entry in log for _, rank in entry.sends)
    return max((1, *map(len, _operands(log).values()), *to.values()))


def _exchanged(ranks: Ranks, log: list[LogEntry]) -> Counts:
    """Return what all ranks move in the exchanges that one rank takes part in: every rank does in the same ones."""
    counts = Counts.none(ranks.size)
    for (_, _, _, itemsize, slots), moves in _operands(log).items():
        counts.add(counts_of(moves, itemsize, ranks.size, ranks.nodes, slots))
    return counts


def _add_others(counts: Counts, ranks: Ranks, members: Numbers, run: _Run, *, shares: bool) -> None:
    """Add what ranks that do alike send and copy outside exchanges; if ranks share memory, from or to that of a node.

    Sums move as much as their algorithm reports: parts and sums travel once. What one of the ranks sends to each
    other one, all of them do, and it sends as much to one that is alike as to any such.

    Args:
        counts: they are added to these.
        ranks: all of them.
        members: those that do alike.
        run: what the first one does.
        shares: whether ranks share memory.
    """
    counts.copied[members] += run.copied_bytes
    counts.shared[members] += run.copied_bytes if shares else 0
    counts.sent[members] += run.sent_bytes
    sums = run.sent_bytes  # of sums over all ranks
    messages = [entry for entry in run.log if entry.sends or entry.receives]
    if messages:
        sums -= _add_messages(counts, ranks, members, messages)
    counts.received[members] += sums
    if len(ranks.nodes) == 1:
        counts.sent_here[members] += sums
        counts.received_here[members] += sums


def _add_messages(counts: Counts, ranks: Ranks, members: Numbers, messages: list[LogEntry]) -> int:
    """Add what ranks that do alike send and receive in messages, but for the bytes sent, which it returns."""
    size, rank = ranks.size, int(members[0])
    to, of = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for entry in messages:
        for sizes, moved in ((to, entry.sends), (of, entry.receives)):
            for nbytes, other in moved:
                sizes[other] += nbytes
        counts.messages[members] += len(entry.sends)
        counts.received_messages[members] += len(entry.receives)
    sent, node = int(to.sum()), np.arange(size) // ranks.per_node
    for sizes, here in ((to, counts.sent_here), (of, counts.received_here)):
        sizes[rank] = sizes[members[1]] if len(members) > 1 else 0
        here[members] += np.bincount(node, sizes).astype(np.int64)[node[members]] - sizes[members]
    counts.received[members] += of.sum() - of[members]
    return sent
