# SPDX-License-Identifier: Apache-2.0
"""Steps on calls that are made again and again: plans and kept plans, graphs, streams, sleeping ranks."""

from __future__ import annotations

import contextlib
import gc
import random

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import consumes, precondition
from hypothesis.strategies import sampled_from

import pblasmp as pb
from pblasmp.layout.level3_problem import ROUTINES
from tests.helpers import epilogues, float8, inside
from tests.helpers.copy_products import PRODUCTS as OF_TENSORS
from tests.helpers.gpu.algorithms import PARALLEL, parallel_job, scheme_of
from tests.helpers.gpu.calls import algorithms, call_job
from tests.helpers.gpu.jobs import TURNS, copied
from tests.helpers.gpu.moves import move_job
from tests.helpers.gpu.products import failure, integers, place
from tests.helpers.schemes import SCHEMES

from .devices import STREAMS
from .state import Held, Planned, SkipStep, State, expect, plans, ranks, seeds, step

PRODUCTS = ("auto", "auto", "push", "gathered", "panels", "stationary", "shared", "default")
MOST_PENDING = 40
LONGEST = 2e-3  # seconds that a stream sleeps
KEPT = 20  # patterns, more than the plans for which there is room

schemes = sampled_from(["gemm", *SCHEMES])
streams = st.integers(0, STREAMS - 1)
turns = st.lists(st.integers(0, TURNS - 1), min_size=1, max_size=6)


def once(function):
    """Make a rule, which takes long, once in a sequence."""
    return precondition(lambda self: not self.counts[function.__name__])(function)


class Plans(State):
    """Calls that are made again and again; what belongs to no matrix."""

    @step(
        plans, kind=sampled_from(["product", "routine", "parallel", "move"]), seed=seeds, stream=streams,
        planned=st.booleans(), turns=turns,
    )  # fmt: skip
    def prepare(self, kind, seed, stream, planned, turns):
        """A random call with its own operands, which runs on one stream, at once and later."""
        rng = random.Random(seed)
        form, routine = rng.choice(list(PARALLEL)), rng.choice(list(ROUTINES))
        overlapped = list(OF_TENSORS[form]) if self.ctx.engine.name == "cublasmp" else []
        algo = rng.choice(
            {
                "product": PRODUCTS,
                "routine": ("auto", *algorithms(routine)),
                "parallel": ("auto", *PARALLEL[form], *overlapped),
                "move": ("auto",),
            }[kind]
        )
        job = self.job(rng, kind, algo, form, routine, planned)
        self.ctx.engine.synchronize()  # the stream does not wait for what made the operands
        self.made += 1
        self.plans[self.made] = Planned(job, stream, kind)
        self.queue(self.made, turns)
        return self.made

    def job(self, rng, kind, algo, form, routine, planned):
        """Return the call."""
        seed, most = rng.randrange(1 << 30), rng.choice([70, 70, 300, 800])
        if kind in ("product", "routine"):
            name = "matmul" if kind == "product" else routine
            return call_job(self.ctx, np.random.default_rng(seed), name, algo, planned=planned)
        if kind == "move":
            return move_job(self.ctx, rng)
        return parallel_job(
            self.ctx, np.random.default_rng(seed), form, algo, uneven=rng.random() < 0.3, planned=planned,
            most=most if self.device.flops > most**3 else 70,
        )  # fmt: skip

    @step(plan=plans, turns=turns, sleeper=st.none() | ranks, wait=st.booleans())
    def run(self, plan, turns, sleeper, wait):
        """Queue some runs; perhaps the stream of one rank sleeps first."""
        self.queue(plan, turns, sleeper)
        if wait:
            self.wait_for_plans()

    def queue(self, plan, turns, sleeper=None):
        """Queue runs with other operands in turn."""
        planned = self.plans[plan]
        if len(self.pending) >= MOST_PENDING:
            self.wait_for_plans()
        with self.device.stream(planned.stream):
            if sleeper is not None and sleeper % self.ctx.size == self.ctx.rank:
                self.device.sleep(LONGEST)
            for turn in turns:
                try:
                    result = planned.job.run(turn)
                except pb.ClosedError:
                    if not planned.graph:
                        raise
                    self.counts["(graphs made again)"] += 1  # another plan has replaced the workspace
                    assert planned.job.plan is not None
                    planned.job.queue = planned.job.plan.graph().replay
                    result = planned.job.run(turn)
                self.pending.append((planned, turn, copied(result)))

    run_2 = run_3 = run_4 = run  # drawn as often as four others

    @precondition(lambda self: self.device.graphs)
    @step(plan=plans)
    def record(self, plan):
        """Replay a CUDA graph from now on."""
        planned = self.plans[plan]
        if planned.graph or planned.job.plan is None:
            raise SkipStep
        with self.device.stream(planned.stream):
            self.pending.append((planned, 0, copied(planned.job.run(0))))
            planned.graph = planned.job.record()

    @step(plan=consumes(plans))
    def drop(self, plan):
        """Close a plan; what it has queued goes on."""
        planned = self.plans.pop(plan)
        planned.job.close()
        if planned.job.plan is not None:
            try:
                planned.job.plan()
            except pb.ClosedError:
                return
            expect("a closed plan runs")

    @step()
    def wait(self):
        """Wait for all that is queued, and look at it."""
        self.wait_for_plans()

    @step(stream=streams)
    def use_stream(self, stream):
        """Use another stream for the matrices, behind the one before."""
        self.device.follow(stream, self.stream)
        self.stream = stream

    @once
    @step(seed=seeds)
    def many(self, seed):
        """Repeat products of more patterns than plans are kept, so that plans are made, kept and closed."""
        d = pb.MatrixDescriptor((KEPT, KEPT), (7, 5), pb.Grid.squarest(self.ctx.size))
        whole = integers(d.shape, d.dtype, seed)
        a = place(self.ctx, whole, d)
        most = inside.keep_at_most(self.ctx, (KEPT // 2) << 17)
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
                    wrong = self.wrong(Held(found, alpha * (whole[:extent] @ whole.T)))
                    expect(wrong and f"{extent} rows, {alpha=}: {wrong}")
        finally:
            inside.keep_at_most(self.ctx, most)

    @step(
        kind=sampled_from([*epilogues.KINDS]), scheme=schemes, dtype=sampled_from(["float64", "float32"]),
        order=sampled_from("CF"), seed=seeds,
    )  # fmt: skip
    def followed(self, kind, scheme, dtype, order, seed):
        """A product with an epilogue."""
        rng = np.random.default_rng(seed)
        problem = scheme_of(self.ctx, rng, scheme, dtype, order)
        tolerance = max(epilogues.TOLERANCES[dtype], 2e-3 if "gelu" in kind and dtype != "float64" else 0)
        expect(failure(epilogues.check_epilogue, self.ctx, rng, problem, kind, tolerance=tolerance))

    @step(types=sampled_from(float8.TYPES), scheme=schemes, order=sampled_from("CF"), seed=seeds)
    def scaled(self, types, scheme, order, seed):
        """A product of 8-bit floats with scales."""
        problem = float8.problem(scheme, self.ctx.size, (types[0], types[1], types[2]), order)
        sums = scheme in ("matmul_reduce_scatter", "matmul_allreduce")  # of parts that may be sent in 16 bits
        rng, tolerance = np.random.default_rng(seed), 2.0 ** (-7 if sums else -8)
        expect(failure(float8.check_scaled, self.ctx, rng, problem, tolerance=tolerance))

    @once
    @step(seed=seeds)
    def context(self, seed):
        """A product in another context of the same ranks."""
        with pb.Context(self.comm, engine=self.device.engine) as ctx:
            job = call_job(ctx, np.random.default_rng(seed), "matmul")
            with contextlib.closing(job):
                expect(job.wrong(ctx.engine.to_host(job.run(1)), 1))

    @once
    @step(everywhere=st.booleans(), owner=ranks)
    def memory(self, everywhere, owner):
        """Ask for memory that no machine has, on all ranks or on one."""
        shape, size = (1 << 20, self.device.excess >> 23), self.ctx.size
        width = -(-shape[1] // size) if everywhere else shape[1]
        d = pb.MatrixDescriptor(shape, (shape[0], width), pb.Grid(1, size), (0, owner % size), "float64")
        try:
            self.ctx.empty(d)
        except MemoryError:
            return
        expect(f"no MemoryError for {d}")

    @once
    @step()
    def collect(self):
        """Collect garbage."""
        gc.collect()
