# SPDX-License-Identifier: Apache-2.0
"""Random calls on two streams, with graphs, sleeping ranks and memory errors, for as long as you like, on real GPUs.

``mpirun -n 2 python -m tests.chaos.stress --minutes 10``. A round draws six calls: general products, level-3 routines,
tensor-parallel products and moves, in random layouts and types, by random algorithms. Then it queues tens of runs of
them in random order on two streams without waiting for any; now and then one rank's stream sleeps first. Operands
change from run to run and results are NaN before, so that what a run reads too early or leaves unwritten shows. Every
result is compared with NumPy's. The status is 1 where a number is wrong, or where memory, descriptors or threads grow.

With ``--engine host`` the same calls run on CPU ranks one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

import pblasmp as pb
from pblasmp.engines.gpu.tensor import ALGORITHMS
from pblasmp.layout.level3 import ROUTINES
from tests.chaos.program import held, resident_kib
from tests.helpers.gpu.algorithms import PARALLEL, parallel_job, product_job, routine_algorithms, small_panels
from tests.helpers.gpu.jobs import TURNS, Job, copied
from tests.helpers.gpu.level3 import random_case, routine_job
from tests.helpers.gpu.moves import move_job

__all__ = ["Gpu", "Host", "Stress", "grown"]

KINDS = {
    "product": "products",
    "routine": "level-3 calls",
    "parallel": "tensor-parallel calls",
    "move": "moves",
}
DRAWN = ("product", "product", "routine", "parallel", "parallel", "move")  # the calls of a round
PRODUCTS = ("auto", "auto", "push", "gathered", "panels", "stationary", "shared", "default")
STREAMS = 2
RUNS = 20, 60  # of a round, at least and at most
SLEEPS, LONGEST = 0.2, 2e-3  # how many runs begin with a rank that sleeps, and how many seconds at most
RECORDED = 0.4  # of the calls that have CUDA graphs replay one
MEMORY_ERRORS, CONTEXTS = 10, 100  # rounds from one to the next
WARM_UP = (
    500  # rounds until every buffer has its size and what is remembered of layouts is full, or half the time
)
STUCK = 120.0  # seconds of a round after which it hangs
ENOUGH = 10  # rounds with wrong numbers
GROWTH = {"descriptors": 0, "threads": 0, "resident KiB": 64 << 10, "CuPy KiB": 16 << 10, "GPU KiB": 64 << 10}
"""What may be added after the warm-up: of memory, what allocators keep and layouts not met before need."""

_SPIN = r"""
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < nanoseconds);
}
"""


class Host:
    """CPU ranks: calls return when they are done, so there are no streams, and a rank sleeps on the host."""

    graphs = False
    excess = 1 << 53  # bytes that no machine has, whatever it promises

    def stream(self, number: int) -> AbstractContextManager[Any]:
        """Queue on a stream what is called within."""
        return nullcontext()

    def sleep(self, seconds: float) -> None:
        """Let the current stream sleep."""
        time.sleep(seconds)

    def trim(self) -> None:
        """Give back what is free."""
        ctypes.CDLL(None).malloc_trim(0)

    def held(self) -> dict[str, int]:
        """Return what this process holds of the machine."""
        descriptors, threads = held()
        return {"descriptors": descriptors, "threads": threads, "resident KiB": resident_kib()}


class Gpu(Host):
    """A rank with a GPU: two streams that do not wait for CuPy's default one, and a kernel that sleeps."""

    graphs = True
    excess = 1 << 44

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(STREAMS)]
        self._spin = self.kernel()
        self.sleep(0)  # loads it, while nothing else runs

    def kernel(self) -> Any:
        """Return the kernel that sleeps for some nanoseconds."""
        return self._cupy.RawKernel(_SPIN, "spin")

    def stream(self, number: int) -> AbstractContextManager[Any]:
        """Queue on a stream what is called within."""
        stream: AbstractContextManager[Any] = self._streams[number]
        return stream

    def sleep(self, seconds: float) -> None:
        """Queue the kernel on the current stream."""
        self._spin((1,), (1,), (np.uint64(seconds * 1e9),))

    def trim(self) -> None:
        """Give back what is free."""
        super().trim()
        self._cupy.get_default_memory_pool().free_all_blocks()

    def held(self) -> dict[str, int]:
        """Return what this process holds of the machine, and what is taken of the GPU, which ranks may share."""
        pool = self._cupy.get_default_memory_pool()
        free, total = self._cupy.cuda.runtime.memGetInfo()
        return {**super().held(), "CuPy KiB": pool.used_bytes() >> 10, "GPU KiB": (total - free) >> 10}


class Watch:
    """Ends the process where a round hangs, and says what it was doing.

    Attributes:
        what: is being done.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.what, self._since = "", time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def doing(self, what: str) -> None:
        """Say what begins. Local."""
        self.what, self._since = what, time.monotonic()

    def _look(self) -> None:
        while not self._done.wait(1):
            if time.monotonic() > self._since + STUCK:
                print(f"rank {self._rank} hangs: {self.what}", file=sys.__stderr__, flush=True)
                faulthandler.dump_traceback(sys.__stderr__)
                os._exit(1)

    def close(self) -> None:
        """End it. Local."""
        self._done.set()
        self._thread.join()


class Stress:
    """Rounds of random calls. All ranks draw the same.

    Args:
        ctx: where they run.
        device: the streams of this rank.
        seed: of the first round's draw, and of the others'.
        without: names of algorithms that are not asked for.
        only: the kind of all calls; None: a mixture.
        slow: the rank that sleeps; None: a random one each time.

    Attributes:
        counts: what was done.
        taken: how many calls were made by each algorithm.
    """

    def __init__(
        self,
        ctx: pb.Context,
        device: Host,
        seed: int,
        *,
        without: Collection[str] = (),
        only: str | None = None,
        slow: int | None = None,
    ) -> None:
        self.ctx, self.device, self.seed, self.without, self.slow = ctx, device, seed, without, slow
        self.drawn = DRAWN if only is None else (only,) * len(DRAWN)
        self.counts: Counter[str] = Counter()
        self.taken: Counter[str] = Counter()
        self.watch = Watch(ctx.rank)

    # -- calls

    def job(self, kind: str, rng: random.Random) -> Job:
        """Return a random call that has run with all its operands. Collective over the context.

        An algorithm that refuses what was drawn gives way to "auto", for something else.
        """
        form, routine = rng.choice(list(PARALLEL)), rng.choice(list(ROUTINES))
        overlapped = list(ALGORITHMS[form]) if self.ctx.engine.name == "cublasmp" else []
        names = {
            "product": PRODUCTS,
            "routine": ("auto", *routine_algorithms(routine)),
            "parallel": ("auto", *PARALLEL[form], *overlapped),
            "move": ("auto",),
        }[kind]
        asked = rng.choice([name for name in names if name not in self.without])
        for algo in (asked, "auto"):
            job = None
            try:
                job = self._drawn(kind, rng, algo, form, routine)
                self.watch.doing(f"{self.where}, first runs of {kind}: {job.what}")
                for turn in range(TURNS):
                    job.run(turn)
            except pb.PblasmpError as error:
                if job is not None:
                    job.close()
                if algo == "auto" or not refused(error):
                    raise
                continue
            name = algo if job.plan is None else job.plan.report().algorithm
            self.taken[f"{form if kind == 'parallel' else kind} {name}"] += 1
            return job
        raise AssertionError("not reached")

    def _drawn(self, kind: str, rng: random.Random, algo: str, form: str, routine: str) -> Job:
        self.watch.doing(f"{self.where}, preparing {kind} {algo} {form} {routine}")
        if kind == "product":
            return product_job(self.ctx, rng, algo, anywhere=rng.random() < 0.3)
        if kind == "move":
            return move_job(self.ctx, rng)
        seed = rng.randrange(1 << 30)
        if kind == "parallel":
            return parallel_job(
                self.ctx, np.random.default_rng(seed), form, algo, uneven=rng.random() < 0.3,
                planned=rng.random() < 0.7, most=rng.choice([70, 70, 300, 800]),
            )  # fmt: skip
        case = replace(random_case(rng, self.ctx.size, routine, rng.choice(["any", "sources"])), new=False)
        return routine_job(self.ctx, case, seed, algo)

    # -- rounds

    def round(self, number: int) -> list[str]:
        """Make a round; return what is wrong, the same on every rank. Collective over the context."""
        rng = random.Random(f"{self.seed} {number}")
        self.where = f"seed {self.seed}, round {number}"
        panels = small_panels(self.ctx) if rng.random() < 0.5 else nullcontext()
        with panels, self._jobs(rng) as jobs:
            self.ctx.engine.synchronize()  # the streams do not wait for what made the operands
            memory_error = number % MEMORY_ERRORS == MEMORY_ERRORS - 1
            faults = self._queued(rng, jobs, self._out_of_memory if memory_error else None)
        if number % CONTEXTS == CONTEXTS - 1:
            faults += self._in_another_context(rng)
        found = [fault for of_rank in self.ctx.comm.allgather(faults) for fault in of_rank]
        return [f"{self.where}: {fault}" for fault in found]

    @contextlib.contextmanager
    def _jobs(self, rng: random.Random) -> Iterator[list[tuple[str, Job, bool]]]:
        """Make the calls of a round, by kind, and whether they replay a graph."""
        with contextlib.ExitStack() as closing:
            jobs = []
            for kind in rng.sample(self.drawn, len(self.drawn)):
                job = self.job(kind, rng)
                closing.callback(job.close)
                jobs.append((kind, job))
            records = [rng.random() < RECORDED and self.device.graphs for _ in jobs]
            yield [
                (kind, job, records[i] and job.plan is not None and job.record())
                for i, (kind, job) in enumerate(jobs)
            ]

    def _queued(
        self, rng: random.Random, jobs: list[tuple[str, Job, bool]], between: Callable[[random.Random], str] | None
    ) -> list[str]:  # fmt: skip
        """Queue runs in random order, wait, and return what is wrong on this rank. Collective over the context."""
        streams = [rng.randrange(STREAMS) for _ in jobs]
        kept = []
        runs, faults = rng.randint(*RUNS), []
        middle = runs // 2
        for run in range(runs):
            if between is not None and run == middle:
                faults += [fault] if (fault := between(rng)) else []
            index, turn = rng.randrange(len(jobs)), rng.randrange(TURNS)
            kind, job, recorded = jobs[index]
            sleeper = rng.randrange(self.ctx.size) if self.slow is None else self.slow
            sleeps = rng.random() < SLEEPS
            seconds = rng.random() * LONGEST
            self.watch.doing(f"{self.where}, run {run} of call {index}: {job.what}")
            with self.device.stream(streams[index]):
                if sleeps and sleeper == self.ctx.rank:
                    self.device.sleep(seconds)
                kept.append((run, index, turn, copied(job.run(turn))))
            self.counts.update({KINDS[kind]: 1, "graphs replayed": recorded, "sleeps": sleeps})
        self.watch.doing(f"{self.where}, waiting for all runs of {[job.what for _, job, _ in jobs]}")
        for number in range(STREAMS):
            with self.device.stream(number):
                self.ctx.engine.synchronize()
        for run, index, turn, result in kept:
            kind, job, recorded = jobs[index]
            how = f"run {run}, call {index} on stream {streams[index]}{', a graph' if recorded else ''}, turn {turn}"
            if fault := job.wrong(self.ctx.engine.to_host(result), turn):
                faults.append(f"{how}: rank {self.ctx.rank}: {fault}: {kind} {job.what}")
        for index, (kind, job, _) in enumerate(jobs):
            if fault := job.around():
                faults.append(f"call {index}: rank {self.ctx.rank}: {fault}: {kind} {job.what}")
        return faults

    def _out_of_memory(self, rng: random.Random) -> str:
        """Ask for memory that no machine has, on all ranks or on one; return what is wrong. Collective."""
        shape, size = (1 << 20, self.device.excess >> 23), self.ctx.size
        everywhere = rng.random() < 0.5
        width = -(-shape[1] // size) if everywhere else shape[1]
        layout = pb.MatrixDescriptor(
            shape, (shape[0], width), pb.Grid(1, size), (0, rng.randrange(size)), "float64"
        )
        try:
            self.ctx.empty(layout)
        except MemoryError:
            self.counts["out-of-memory errors"] += 1
            return ""
        return f"rank {self.ctx.rank}: no MemoryError for {layout}"

    def _in_another_context(self, rng: random.Random) -> list[str]:
        """Open a context, make a product in it, close it; return what is wrong. Collective over the context."""
        self.watch.doing(f"{self.where}, another context")
        with pb.Context(self.ctx.comm, engine=self.ctx.engine.name) as ctx:
            job = product_job(ctx, rng, "auto")
            fault = job.wrong(ctx.engine.to_host(job.run(1)), 1)
            job.close()
        self.counts["contexts"] += 1
        return [f"another context: rank {ctx.rank}: {fault}: {job.what}"] if fault else []

    def held(self) -> dict[str, int]:
        """Return what this process holds when nothing is queued on any rank. Collective over the context."""
        gc.collect()
        self.ctx.engine.synchronize()
        self.device.trim()
        self.ctx.comm.barrier()
        return self.device.held()

    def summary(self) -> str:
        """Return in words what was done."""
        return ", ".join(f"{count} {name}" for name, count in self.counts.items() if count)


def refused(error: pb.PblasmpError) -> bool:
    """Return whether an error, which every rank raises, says that there is no such algorithm for a call. Local."""
    return isinstance(error, pb.UnsupportedError) or "NOT_SUPPORTED" in str(error)


def grown(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return what is held more of than ``GROWTH`` allows. Local."""
    return [
        f"{name} {before[name]}, then {after[name]}"
        for name in after
        if after[name] > before[name] + GROWTH[name]
    ]


def run(stress: Stress, *, seconds: float, rounds: int, first: int, warm_up: int, different: int = 0) -> int:
    """Make rounds for some time, or some number of them; return the status. Collective over the context."""
    ctx, start, said = stress.ctx, time.monotonic(), time.monotonic()
    bad, number = 0, first
    before: dict[str, int] | None = None

    def say(text: str) -> None:
        if ctx.rank == 0:
            print(f"{time.monotonic() - start:5.0f} s  {text}", flush=True)

    def in_time(share: float) -> bool:
        return bool(ctx.comm.bcast(time.monotonic() < start + share * seconds))

    while bad < ENOUGH and (number < first + rounds if rounds else in_time(1)):
        if before is None and (number >= first + warm_up or not (rounds or in_time(0.5))):
            before = stress.held()
        try:
            faults = stress.round(first + (number - first) % different if different else number)
        except BaseException:
            print(f"rank {ctx.rank} raises: {stress.watch.what}", file=sys.stderr, flush=True)
            raise
        number += 1
        bad += bool(faults)
        for fault in faults[:5]:
            say(f"WRONG {fault}")
        if time.monotonic() > said + 10:
            said = time.monotonic()
            say(f"{number - first} rounds: {stress.summary()}")
    growth = ""
    if before is not None:
        after = stress.held()
        growth = "; ".join(grown(before, after))
        lines = ctx.comm.allgather(
            f"rank {ctx.rank}: {before}, then {after}" + (f": GROWN {growth}" if growth else "")
        )
        for line in lines:
            say(line)
    say(f"by algorithm: {dict(sorted(stress.taken.items()))}")
    say(f"{number - first} rounds of seed {stress.seed}, {bad} with wrong numbers: {stress.summary()}")
    return int(bad > 0 or any(ctx.comm.allgather(bool(growth))))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Random calls on two streams, with whatever may disturb them."
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=0, help="that many instead of minutes")
    parser.add_argument("--engine", choices=["cublasmp", "host"], default="cublasmp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--first", type=int, default=0, help="the first round; --rounds 1 makes it again alone"
    )
    parser.add_argument(
        "--warm-up",
        type=int,
        default=WARM_UP,
        help="rounds before what is held is counted, or half the time",
    )
    parser.add_argument(
        "--different",
        type=int,
        default=0,
        help="repeat so many rounds: what is remembered does not grow then",
    )
    parser.add_argument("--without", default="", help="algorithms that are not asked for, with commas")
    parser.add_argument("--only", choices=KINDS, help="make only calls of this kind")
    parser.add_argument("--slow", type=int, help="the rank that sleeps; by default a random one each time")
    given = parser.parse_args()
    device = Gpu if given.engine == "cublasmp" else Host
    with pb.Context(engine=given.engine) as ctx:
        stress = Stress(
            ctx, device(), given.seed, without=given.without.split(","), only=given.only, slow=given.slow
        )
        try:
            return run(
                stress, seconds=60 * given.minutes, rounds=given.rounds, first=given.first, warm_up=given.warm_up,
                different=given.different,
            )  # fmt: skip
        finally:
            stress.watch.close()


if __name__ == "__main__":
    sys.exit(main())
