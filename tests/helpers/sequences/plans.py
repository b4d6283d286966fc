# SPDX-License-Identifier: Apache-2.0
"""Steps on calls that are made again and again: plans and kept plans, graphs, streams, sleeping ranks."""

from __future__ import annotations

import contextlib
import gc
import random

import numpy as np

import pblasmp as pb
from pblasmp.layout.level3_problem import ROUTINES
from tests.helpers import epilogues, float8
from tests.helpers.copy_products import PRODUCTS as OF_TENSORS
from tests.helpers.gpu.algorithms import PARALLEL, parallel_job, scheme_of, small_panels
from tests.helpers.gpu.calls import algorithms, call_job
from tests.helpers.gpu.jobs import TURNS, Job, copied
from tests.helpers.gpu.moves import move_job
from tests.helpers.gpu.products import integers, place
from tests.helpers.schemes import SCHEMES

from .devices import STREAMS
from .session import Held, Planned, Session, SkipStep, expect
from .steps import Draw, call

PRODUCTS = ("auto", "auto", "push", "gathered", "panels", "stationary", "shared", "default")
KINDS = ("product", "routine", "parallel", "move")
MOST_PENDING = 40
LONGEST = 2e-3  # seconds that a stream sleeps
KEPT = 20  # patterns, more than the plans for which there is room


def refused(error: BaseException) -> bool:
    """Return whether an error, which every rank raises, says that there is no such algorithm for a call. Local."""
    return isinstance(error, pb.UnsupportedError) or "NOT_SUPPORTED" in str(error)


@call(
    6, slot=Draw.slot, kind=Draw.of("product", "product", *KINDS[1:], "parallel"), seed=Draw.seed,
    stream=Draw.upto(STREAMS), planned=Draw.of(True, True, False),
)  # fmt: skip
def prepare(s: Session, slot: int, kind: str, seed: int, stream: int, planned: bool) -> None:
    """A random call with its own operands, which runs on one stream; it takes the place of another one."""
    s.drop(slot)
    rng = random.Random(seed)
    form, routine = rng.choice(list(PARALLEL)), rng.choice(list(ROUTINES))
    overlapped = list(OF_TENSORS[form]) if s.ctx.engine.name == "cublasmp" else []
    algo = rng.choice(
        {
            "product": PRODUCTS,
            "routine": ("auto", *algorithms(routine)),
            "parallel": ("auto", *PARALLEL[form], *overlapped),
            "move": ("auto",),
        }[kind]
    )
    job = _job(s, rng, kind, algo, form, routine, planned)
    s.ctx.engine.synchronize()  # the stream does not wait for what made the operands
    s.plans[slot] = Planned(job, stream, kind)


def _job(s: Session, rng: random.Random, kind: str, algo: str, form: str, routine: str, planned: bool) -> Job:
    seed, most = rng.randrange(1 << 30), rng.choice([70, 70, 300, 800])
    if kind in ("product", "routine"):
        name = "matmul" if kind == "product" else routine
        return call_job(s.ctx, np.random.default_rng(seed), name, algo, planned=planned)
    if kind == "move":
        return move_job(s.ctx, rng)
    return parallel_job(
        s.ctx, np.random.default_rng(seed), form, algo, uneven=rng.random() < 0.3, planned=planned,
        most=most if s.device.flops > most**3 else 70,
    )  # fmt: skip


def _planned(s: Session, slot: int) -> Planned:
    places = sorted(s.plans)
    if not places:
        raise SkipStep
    return s.plans[places[slot % len(places)]]


@call(
    16, slot=Draw.slot, times=Draw.of(1, 1, 2, 4), turn=Draw.upto(TURNS), sleeper=Draw.of(None, None, None, 0, 1, 2, 3),
    wait=Draw.of(False, False, True),
)  # fmt: skip
def run(s: Session, slot: int, times: int, turn: int, sleeper: int | None, wait: bool) -> None:
    """Queue some runs with other operands in turn; perhaps the stream of one rank sleeps first."""
    planned = _planned(s, slot)
    if len(s.pending) >= MOST_PENDING:
        s.wait()
    with s.device.stream(planned.stream):
        if sleeper is not None and sleeper % s.ctx.size == s.ctx.rank:
            s.device.sleep(LONGEST)
        for number in range(turn, turn + times):
            try:
                result = planned.job.run(number % TURNS)
            except pb.ClosedError:
                if not planned.graph:
                    raise
                s.counts["(graphs made again)"] += 1  # another plan has replaced the workspace
                assert planned.job.plan is not None
                planned.job.queue = planned.job.plan.graph().replay
                result = planned.job.run(number % TURNS)
            s.pending.append((planned, number % TURNS, copied(result)))
    if wait:
        s.wait()


@call(3, slot=Draw.slot)
def record(s: Session, slot: int) -> None:
    """Replay a CUDA graph from now on."""
    planned = _planned(s, slot)
    if planned.graph or planned.job.plan is None or not s.device.graphs:
        raise SkipStep
    with s.device.stream(planned.stream):
        s.pending.append((planned, 0, copied(planned.job.run(0))))
        planned.graph = planned.job.record()


@call(2, slot=Draw.slot)
def drop(s: Session, slot: int) -> None:
    """Close a plan; what it has queued goes on."""
    planned = _planned(s, slot)
    s.drop(next(number for number, each in s.plans.items() if each is planned))
    if planned.job.plan is not None:
        try:
            planned.job.plan()
        except pb.ClosedError:
            return
        expect("a closed plan runs")


@call(2)
def wait(s: Session) -> None:
    """Wait for all that is queued, and look at it."""
    s.wait()


@call(1.5, stream=Draw.upto(STREAMS))
def stream(s: Session, stream: int) -> None:
    """Use another stream for the matrices, behind the one before."""
    s.device.follow(stream, s.stream)
    s.stream = stream


@call(0.5, seed=Draw.seed)
def many(s: Session, seed: int) -> None:
    """Repeat products of more patterns than plans are kept, so that plans are made, kept and closed."""
    d = pb.MatrixDescriptor((KEPT, KEPT), (7, 5), pb.Grid.squarest(s.ctx.size))
    whole = integers(d.shape, d.dtype, seed)
    a = place(s.ctx, whole, d)
    kept = s.ctx.kept
    most, kept._most = kept._most, (KEPT // 2) << 17  # bytes
    try:
        for extent in range(1, KEPT + 1):
            part = a[:extent, :]
            for alpha, algo in (
                (1, "gathered"),
                (1, "gathered"),
                (1, "gathered"),
                (2, "gathered"),
                (3, "auto"),
            ):
                found = pb.matmul(part, a, op_b="T", alpha=alpha, algo=algo)
                wrong = s.wrong(Held(found, alpha * (whole[:extent] @ whole.T)))
                expect(wrong and f"{extent} rows, {alpha=}: {wrong}")
    finally:
        kept._most = most


@call(
    1.5, kind=Draw.of(*epilogues.KINDS), scheme=Draw.of("gemm", *SCHEMES), dtype=Draw.of("float64", "float32"),
    order=Draw.of("C", "F"), seed=Draw.seed,
)  # fmt: skip
def followed(s: Session, kind: str, scheme: str, dtype: str, order: str, seed: int) -> None:
    """A product with an epilogue."""
    rng = np.random.default_rng(seed)
    problem = scheme_of(s.ctx, rng, scheme, dtype, order)
    tolerance = max(epilogues.TOLERANCES[dtype], 2e-3 if "gelu" in kind and dtype != "float64" else 0)
    expect(epilogues.followed(s.ctx, rng, problem, kind, tolerance=tolerance))


@call(
    1.5, types=Draw.of(*map(list, float8.TYPES)), scheme=Draw.of("gemm", *SCHEMES), order=Draw.of("C", "F"),
    seed=Draw.seed,
)  # fmt: skip
def scaled(s: Session, types: list[str], scheme: str, order: str, seed: int) -> None:
    """A product of 8-bit floats with scales."""
    problem = float8.problem(scheme, s.ctx.size, (types[0], types[1], types[2]), order)
    sums = scheme in ("matmul_reduce_scatter", "matmul_allreduce")  # of parts that may be sent in 16 bits
    expect(float8.scaled(s.ctx, np.random.default_rng(seed), problem, tolerance=2.0 ** (-7 if sums else -8)))


@call(0, width=Draw.of(7))
def panels(s: Session, width: int) -> None:
    """Have several panels also where matrices are small. It begins a sequence."""
    s.undo.enter_context(small_panels(s.ctx, width))


@call(0.5, seed=Draw.seed)
def context(s: Session, seed: int) -> None:
    """A product in another context of the same ranks."""
    with pb.Context(s.comm, engine=s.device.engine) as ctx:
        job = call_job(ctx, np.random.default_rng(seed), "matmul")
        with contextlib.closing(job):
            expect(job.wrong(ctx.engine.to_host(job.run(1)), 1))


@call(0.5, everywhere=Draw.of(True, False), owner=Draw.rank)
def memory(s: Session, everywhere: bool, owner: int) -> None:
    """Ask for memory that no machine has, on all ranks or on one."""
    shape, size = (1 << 20, s.device.excess >> 23), s.ctx.size
    width = -(-shape[1] // size) if everywhere else shape[1]
    d = pb.MatrixDescriptor(shape, (shape[0], width), pb.Grid(1, size), (0, owner % size), "float64")
    try:
        s.ctx.empty(d)
    except MemoryError:
        return
    expect(f"no MemoryError for {d}")


@call(1)
def collect(s: Session) -> None:
    """Collect garbage, and look at all matrices."""
    gc.collect()
    s.check_all()
