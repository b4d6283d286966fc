# SPDX-License-Identifier: Apache-2.0
"""One rank of a trial: ``python -m tests.chaos.program DIRECTORY``, whose file ``trial.json`` says what is to happen.

All ranks make the same random calls and check their numbers against NumPy; one rank has a fault on the way. What each
rank sees is written to ``rank0.jsonl``, ``rank1.jsonl`` and so on, a line at a time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import mmap
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import pblasmp as pb
import pblasmp.comm.agreement
import pblasmp.comm.board
import pblasmp.comm.exchange
import pblasmp.comm.mpi_communicator
import pblasmp.engines.host.direct.calls
import pblasmp.engines.host.host_operations
from tests.helpers.process import descriptors, held

# Where an exception is raised, and how often that place is passed in a trial, roughly.
PLACES: dict[str, tuple[Any, str, int]] = {
    "copy": (pblasmp.comm.exchange, "copy", 60),
    "isend": (pblasmp.comm.mpi_communicator.MpiCommunicator, "isend", 40),
    "irecv": (pblasmp.comm.mpi_communicator.MpiCommunicator, "irecv", 40),
    "wait": (pblasmp.comm.mpi_communicator.MpiCommunicator, "wait", 60),
    "board": (pblasmp.comm.board.Board, "imax", 40),
    "fence": (pblasmp.comm.board.Board, "meet", 20),
    "allgather": (pblasmp.comm.mpi_communicator.MpiCommunicator, "allgather", 6),
    "vote": (pblasmp.comm.agreement.Vote, "outcome", 40),
    "gemm": (pblasmp.engines.host.host_operations.HostOperations, "gemm", 20),
    "direct vote": (pblasmp.comm.board.Board, "vote", 20),
    "direct": (pblasmp.engines.host.direct.calls.HostDirect, "_status", 10),
    "late vote": (pblasmp.engines.host.direct.calls, "late_vote", 5),
    "mmap": (mmap, "mmap", 3),
}
KINDS = [
    *PLACES,
    "alarm",
    "user code",
    "argument",
    "exit",
    "return",
    "_exit",
    "kill",
    "late",
    "child",
    "thread",
    "none",
]
CATCHABLE = {*PLACES, "alarm", "user code"}  # faults that are an exception, which the rank may catch


SMALL = pb.MatrixDescriptor((4, 4), (1, 1), pb.Grid(1, 1))


class FaultError(Exception):
    """The fault, where it is an exception."""


def numbers(rows: Any, cols: Any) -> Any:
    """Return what every matrix holds."""
    return (rows * 7 + cols * 3) % 11


class Trial:
    """One rank of a trial."""

    def __init__(self, directory: Path) -> None:
        from mpi4py import MPI

        self.world = MPI.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size
        self.directory = directory
        self.orders = json.loads((directory / "trial.json").read_text())
        self.choose = random.Random(self.orders["seed"])  # the same on all ranks
        self.victim = self.orders["victim"] == self.rank
        self.kind = self.orders["kind"]
        self.log = (directory / f"rank{self.rank}.jsonl").open("a", buffering=1)
        self.n = self.choose.choice([8, 120, 400])

    def tell(self, what: str, **more: Any) -> None:
        """Write down what has happened."""
        self.log.write(json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n")

    # -- calls

    def descriptor(self) -> pb.MatrixDescriptor:
        """Return a random layout."""
        shapes = [(p, self.size // p) for p in range(1, self.size + 1) if self.size % p == 0]
        grid = pb.Grid(*self.choose.choice(shapes), self.choose.choice(["row", "col"]))
        block = self.choose.randint(1, 70), self.choose.randint(1, 70)
        return pb.MatrixDescriptor((self.n, self.n), block, grid, order=self.choose.choice("CF"))

    def check(self, call: str, found: Any, expected: Any) -> None:
        """Write down where a call that has returned is wrong."""
        if found is not expected and not np.array_equal(found, expected):
            self.tell("wrong", call=call)

    def calls(self, ctx: pb.Context) -> Iterator[Callable[[], None]]:
        """Yield calls to make, each of which checks what it returns."""
        i = np.arange(self.n)
        whole = numbers(i[:, None], i[None, :]).astype(float)
        product = whole @ whole

        def local(d: pb.MatrixDescriptor, values: Any) -> Any:
            return values[np.ix_(*d.global_indices(self.rank))]

        a = ctx.from_function(numbers, self.descriptor())
        for _ in range(self.orders["calls"]):
            d = self.descriptor()
            call = self.choose.choice(
                [
                    "move",
                    "gather",
                    "allgather",
                    "scatter",
                    "product",
                    "sum",
                    "triangle",
                    "plan",
                    "file",
                    "zeros",
                ]
            )
            algo = self.choose.choice(["auto", "panels", "shared", "stationary"])
            if call == "move":
                yield lambda d=d: self.check("redistribute", a.redistribute(d).local, local(d, whole))
            elif call == "gather":
                yield lambda: self.check("gather", a.gather(), None if self.rank else whole)
            elif call == "allgather":
                yield lambda: self.check("allgather", a.allgather(), whole)
            elif call == "scatter":
                yield lambda d=d: self.check("scatter", ctx.scatter(whole, d).local, local(d, whole))
            elif call == "product":
                yield lambda algo=algo: self.product(a, algo, local, product)
            elif call in ("sum", "triangle"):
                i, j, k = (self.choose.randint(0, self.n // 2 - 1) for _ in range(3))
                run = self.sum if call == "sum" else self.triangle
                yield lambda run=run, d=d, at=(i, j, k + 1): run(ctx, a, d, at, local, whole)
            elif call == "plan":
                yield lambda d=d: self.plan(a, ctx.zeros(d), local(d, product))
            elif call == "file":
                yield lambda d=d: self.file(ctx, a, d, local(d, whole))
            else:
                yield lambda d=d: self.check("zeros", ctx.zeros(d).local, 0 * local(d, whole))

    def product(self, a: pb.DistributedMatrix, algo: str, local: Callable[..., Any], product: Any) -> None:
        d = pb.matmul(a, a, algo=algo)
        self.check(algo, d.local, local(d.descriptor, product))

    def sum(
        self, ctx: pb.Context, a: pb.DistributedMatrix, d: pb.MatrixDescriptor, at: tuple[int, int, int],
        local: Callable[..., Any], whole: Any,
    ) -> None:  # fmt: skip
        i, j, k = at
        here = slice(i, i + k), slice(j, j + k)
        out = ctx.zeros(d)
        for _ in range(3):
            pb.blas.geadd(a[here], out[here], beta=1, out=out[here])
        expected = np.zeros_like(whole)
        expected[here] = 3 * whole[here]
        self.check("sum", out.local, local(d, expected))

    def triangle(
        self, ctx: pb.Context, a: pb.DistributedMatrix, d: pb.MatrixDescriptor, at: tuple[int, int, int],
        local: Callable[..., Any], whole: Any,
    ) -> None:  # fmt: skip
        i, j, k = at
        square, here = (slice(j, j + k), slice(j, j + k)), (slice(i, i + k), slice(j, None))
        out = ctx.from_function(numbers, d)
        expected = whole.copy()
        for _ in range(2):
            expected[here] = np.tril(whole[square]) @ expected[here] % 17
            pb.blas.trmm(a[square], out[here], out=out[here])
            out.local[...] %= 17
        expected[here] %= 17
        self.check("triangle", out.local, local(d, expected % 17))

    def plan(self, a: pb.DistributedMatrix, out: pb.DistributedMatrix, expected: Any) -> None:
        with pb.plan(pb.matmul, a, a, out=out) as plan:
            for _ in range(3):
                self.check("plan", plan().local, expected)

    def file(self, ctx: pb.Context, a: pb.DistributedMatrix, d: pb.MatrixDescriptor, expected: Any) -> None:
        path = self.directory / "a.npy"
        a.save(path)
        self.check("load", ctx.load(path, d).local, expected)

    # -- faults

    def prepare(self) -> None:
        """Have this rank meet its fault, if that comes by itself."""
        if self.kind in PLACES and self.victim:
            where, name, often = PLACES[self.kind]
            original, left = getattr(where, name), [self.choose_mine.randint(1, often)]

            def failing(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    self.tell("fault")
                    raise FaultError("injected")
                return original(*args, **kwargs)

            setattr(where, name, failing)
        elif self.kind == "alarm" and self.victim:

            def handler(_: int, frame: FrameType | None) -> None:
                stack = [f"{each.name}:{each.lineno}" for each in traceback.extract_stack(frame)]
                self.tell("fault", where=" ".join(stack))
                raise FaultError("injected")

            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, self.choose_mine.uniform(0.001, 0.3))

    def meet(self, ctx: pb.Context) -> str:
        """Meet a fault between two calls; return what this rank does then: "call", "skip" this call, or "end"."""
        if self.kind in ("user code", "exit", "return", "_exit", "kill", "child", "thread"):
            self.tell("fault")
        if self.kind == "user code":
            raise FaultError("injected")
        if self.kind == "argument":
            with contextlib.suppress(pb.ArgumentError):
                ctx.zeros(None)  # type: ignore[arg-type]
            return "skip"
        if self.kind == "exit":
            sys.exit(5)
        if self.kind == "_exit":
            os._exit(5)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "late":
            time.sleep(1.5)
        if self.kind == "child":
            self.child(ctx)
        if self.kind == "thread":
            with ctx.running("chaos"):
                thread = threading.Thread(target=self.in_thread, args=[ctx])
                thread.start()
                thread.join()
        return "end" if self.kind == "return" else "call"

    def in_thread(self, ctx: pb.Context) -> None:
        with contextlib.suppress(pb.ClosedError):
            ctx.zeros(SMALL)
            self.tell("wrong", call="two threads")

    def child(self, ctx: pb.Context) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                with contextlib.suppress(pb.ClosedError):
                    ctx.zeros(SMALL)
                    self.tell("wrong", call="a child")
                ctx.close()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)

    # -- the trial

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Write down the fault, or what the others are told of it, and catch it if this trial does."""
        try:
            yield
        except (FaultError, pb.PblasmpError) as error:
            self.tell("error", text=f"{type(error).__name__}: {error}")
            if not self.orders["catches"]:
                raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def run(self) -> None:
        """Do it all."""
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        self.tell("start", pid=os.getpid())
        with pb.Context(engine="host"):
            pass
        before, open_before = held(), descriptors()
        self.choose_mine = random.Random(f"{self.orders['seed']} {self.rank}")
        met = self.choose_mine.randrange(self.orders["calls"]) if self.victim else -1
        with self.catching():
            context = pb.Context(engine="host")
            with context if self.orders["with"] else contextlib.nullcontext(context) as ctx:
                self.prepare()
                for number, call in enumerate(self.calls(ctx)):
                    then = self.meet(ctx) if number == met else "call"
                    if then == "end":
                        break
                    try:
                        if then == "call":
                            call()
                    except pb.ArgumentError:  # an argument that is wrong on one rank is an error of all
                        if self.kind != "argument":
                            raise
        if not self.orders["with"]:
            with self.catching():
                context.close()
        context = ctx = call = None  # what a broken context holds goes with it
        gc.collect()
        if held() > before:
            new = [name for number, name in descriptors().items() if open_before.get(number) != name]
            self.tell("held", before=before, after=held(), new=new)
        self.tell("end")


if __name__ == "__main__":
    Trial(Path(sys.argv[1])).run()
