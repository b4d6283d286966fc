# SPDX-License-Identifier: Apache-2.0
"""One rank of a trial on GPUs: ``python -m tests.chaos.gpu_program DIRECTORY``; ``trial.json`` says what is to happen.

Every rank queues products and waits for them now and then; the last rank has a fault on the way. What each rank sees is
written to ``rank0.jsonl``, ``rank1.jsonl`` and so on, a line at a time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import pblasmp as pb
from pblasmp.comm import is_agreed
from pblasmp.dtypes import DTYPES
from tests.helpers.places import Places, places

N = 512  # order of the matrices, whose small integers make products exact
BEFORE, AFTER, WAITS = 12, 24, 6  # products before and after the fault, and between two waits of the host
ALLOCATIONS = 100  # that an out-of-memory trial lets fail at most, for each case
REMOTE_ERROR = 6  # of NCCL's
ENDS = 5.0  # seconds that queued work gets to end after a fault
ONE_KERNEL = "rs one_kernel", "ar one_kernel", "ag one_kernel"
CASES = [
    "zeros", "matmul gathered", "matmul panels", "matmul push", "matmul default", "ar push", "ar one_shot", "ar nccl",
    "gather", *ONE_KERNEL,
]  # fmt: skip


class FaultError(Exception):
    """The fault, where it is an exception."""


def numbers(rows: Any, cols: Any) -> Any:
    """Return what every matrix holds."""
    return (rows * 3 + cols * 5) % 7


class Trial:
    """One rank of a trial.

    Args:
        directory: where the orders are.
        gpu: a played GPU (see ``tests/helpers/fakegpu.py``), None for a real one.
    """

    def __init__(self, directory: Path, gpu: Any = None) -> None:
        from mpi4py import MPI

        self.world = MPI.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size
        self.orders = json.loads((directory / "trial.json").read_text())
        self.victim = self.rank == self.size - 1
        self.fault, self.work = self.orders["fault"], self.orders["work"]
        self.engine = self.orders.get("engine", "cublasmp")
        self.n = self.orders.get("n", N)
        self.played = gpu
        self.pools: list[Any] = []
        self.log = (directory / f"rank{self.rank}.jsonl").open("a", buffering=1)

    def tell(self, what: str, **more: Any) -> None:
        """Write down what has happened."""
        self.log.write(json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n")

    # -- work

    def prepared(self, ctx: pb.Context, work: str) -> tuple[Callable[[], Any], Callable[[], bool]]:
        """Return what queues a product, and what says whether its numbers are right."""
        kind, _, algo = work.partition(" ")
        i = np.arange(self.n)
        whole = numbers(i[:, None], i[None, :]).astype(np.float32)
        if kind == "matmul":
            d = pb.MatrixDescriptor((self.n, self.n), (self.n // 4, self.n // 4), pb.Grid.squarest(ctx.size),
                                    dtype="float32")  # fmt: skip
            a, out = ctx.from_function(numbers, d), ctx.zeros(d)
            call = partial(pb.matmul, a, a, out=out)  # a direct call
            queue = call if algo == "direct" else pb.plan(pb.matmul, a, a, out=out, algo=algo)
            queue()
            expected = (whole @ whole)[np.ix_(*d.global_indices(ctx.rank))]
            return queue, lambda: self.equal(out.on_host(), expected)
        if algo == "one_kernel":
            return self.in_one_kernel(ctx, kind, whole)
        share = self.n // ctx.size
        expected = whole[:, : share * ctx.size] @ whole[:, : share * ctx.size].T
        mine = np.ascontiguousarray(whole[:, share * ctx.rank : share * (ctx.rank + 1)])
        x = mine if ctx.engine.xp is np else ctx.engine.xp.asarray(mine)
        parallel = pb.plan(pb.matmul_allreduce, x, x, ctx, algo=algo)
        y = parallel()
        return parallel, lambda: self.equal(ctx.engine.to_host(y), expected)

    def in_one_kernel(
        self, ctx: pb.Context, kind: str, whole: Any
    ) -> tuple[Callable[[], Any], Callable[[], bool]]:
        """Return the same of a product with the identity, whose numbers are exact in 16 bits."""
        mine = pb.tensor_parallel.shard(self.n, ctx.size, ctx.rank)
        identity = np.eye(self.n, dtype=np.float32)
        form, x, w, expected = {
            "rs": (pb.matmul_reduce_scatter, whole[:, mine], identity[:, mine], whole[mine]),
            "ar": (pb.matmul_allreduce, whole[:, mine], identity[:, mine], whole),
            "ag": (pb.matmul_allgather, whole, identity[mine], whole),
        }[kind]
        x, w = (
            ctx.engine.xp.asarray(np.ascontiguousarray(each).astype(DTYPES["bfloat16"])) for each in (x, w)
        )
        plan = pb.plan(form, x, w, ctx, algo="one_kernel")
        y = plan()
        return plan, lambda: self.equal(ctx.engine.to_host(y).astype(np.float32), expected)

    def equal(self, found: Any, expected: Any) -> bool:
        """Return whether numbers are right; a played GPU computes none."""
        return self.played is not None or bool(np.array_equal(found, expected))

    # -- faults

    def meet(self, ctx: pb.Context) -> bool:
        """Inject the fault; return whether this rank continues."""
        self.tell("fault")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault.startswith("raise"):
            raise FaultError("injected")
        elif self.fault == "_exit":
            os._exit(0)
        elif self.fault == "return":
            return False
        elif self.fault.startswith("trap"):
            self.trap()
        elif self.fault == "nccl":
            if self.played is not None:
                self.played.nccl_error = REMOTE_ERROR
            else:
                ctx.engine.session.nccl.all.get_async_error = lambda: REMOTE_ERROR  # type: ignore[attr-defined]
            ctx.engine.synchronize()  # where it is found
        return True

    def trap(self) -> None:
        """Queue a kernel that traps: CUDA's error that stays, found by some later call."""
        if self.played is not None:
            self.played.lost = 719
            return
        import cupy

        cupy.RawKernel('extern "C" __global__ void trap() { asm("trap;"); }', "trap")((1,), (1,), ())

    def run_with_a_fault(self) -> None:
        """Queue products, meet the fault, and leave with what that raises."""
        with pb.Context(engine=self.engine) as ctx, self.telling():
            self.queue_with_a_fault(ctx)

    def queue_with_a_fault(self, ctx: pb.Context) -> None:
        """Queue products, wait for them now and then, and meet the fault on the way."""
        queue, right = self.prepared(ctx, self.work)
        if not right():
            self.tell("wrong", case=self.work)
        self.world.Barrier()
        self.tell("ready")
        for number in range(BEFORE + AFTER):
            if number == BEFORE:
                ctx.engine.synchronize()
                if self.victim and not self.meet(ctx):
                    return
            queue()
            if number % WAITS == WAITS - 1:
                ctx.engine.synchronize()
        right()
        ctx.zeros((8, 8), block=2)  # where the ranks agree

    def run_and_catch(self) -> None:
        """As above, but every rank catches what is raised, and ends as if nothing were."""
        with contextlib.suppress(Exception), pb.Context(engine=self.engine) as ctx, self.telling():
            self.queue_with_a_fault(ctx)
        if not (self.fault.startswith("trap") or self.is_idle()):
            self.tell("wrong", case="queued work does not end")
        with contextlib.suppress(pb.PblasmpError):
            ctx.zeros((8, 8), block=2)
            self.tell("wrong", case="a broken context can be used")
        ctx.close()

    def is_idle(self) -> bool:
        """Return whether what is queued on this GPU ends soon."""
        import cupy

        stream, deadline = cupy.cuda.get_current_stream(), time.monotonic() + ENDS
        while not stream.done and time.monotonic() < deadline:
            time.sleep(0.01)
        return bool(stream.done)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Write down what is raised."""
        try:
            yield
        except Exception as error:
            self.tell("error", text=f"{type(error).__name__}: {error}")
            raise

    # -- out of memory

    def run_out_of_memory(self) -> None:
        """Let every allocation of the last rank fail in turn, each where the library makes it for the first time.

        What has been allocated may be kept, so nothing succeeds in between; in the end, in the same context or in that
        which replaced a broken one, all is allocated and the numbers are right.
        """
        for case in self.orders["cases"]:
            ctx, kept, broken = pb.Context(engine=self.engine), 0, 0
            failed: set[Places] = set()
            for _ in range(ALLOCATIONS):
                with self.failing(failed) as met:
                    error = self.attempt(ctx, case)
                hit, agreed, text, gone = self.outcome(ctx, error, met)
                if not hit:
                    break
                if not text:
                    continue  # made another way
                if not agreed or "memory" not in text.lower() or f"rank {self.size - 1}" not in text:
                    self.tell("wrong", case=f"{case}, {met}: {text}")
                kept, broken = kept + (not gone), broken + gone
                if gone:
                    self.tell("broke", case=case, text=text)
                    ctx.close()
                    ctx = pb.Context(engine=self.engine)
            if hit or text:
                self.tell("wrong", case=f"{case}, when all memory was there: {text}")
            self.tell("survived", case=case, kept=kept, broken=broken)
            ctx.close()

    def outcome(
        self, ctx: pb.Context, error: Exception | None, met: list[int]
    ) -> tuple[bool, bool, str, bool]:
        """Return whether an allocation failed, whether all ranks raised, what, and whether the context is broken."""
        texts = self.world.allgather("" if error is None else f"{type(error).__name__}: {error}")
        hit = self.world.allreduce(len(met)) > 0
        gone = self.world.allreduce(int(bool(ctx.control.channel.cause))) > 0
        named = [each for each in texts if f"rank {self.size - 1}" in each]
        return hit, all(texts), next(iter(named), max(texts)), gone

    def attempt(self, ctx: pb.Context, case: str) -> Exception | None:
        """Make what a case is; return what that raises. Collective."""
        try:
            if case == "zeros":
                ctx.zeros((self.n, self.n), block=self.n // 4)
                ctx.engine.synchronize()
            elif case == "gather":
                a = ctx.from_function(numbers, (4 * self.n, 4 * self.n), block=self.n)
                a.gather()
            else:
                queue, right = self.prepared(ctx, case)
                queue()
                if not right():
                    self.tell("wrong", case=case)
            ctx.zeros((8, 8), block=2)  # where a rank hears that the context is broken
        except Exception as error:  # noqa: BLE001 - what it is, is the question
            if ctx.size > 1 and not is_agreed(error, ctx.control) and not ctx.control.channel.cause:
                ctx.control.channel.break_(error, case)  # such as an array of this program's own
            return error
        return None

    @contextlib.contextmanager
    def failing(self, failed: set[Places]) -> Iterator[list[int]]:
        """Let the first allocation fail that is made at a place where none has ``failed``; yield the bytes of it.

        On the last rank. What CuPy takes of memory that it holds is no allocation here: it begins with none.
        """
        import cupy
        import nccl.core

        met: list[int] = []

        def refuse(nbytes: int) -> bool:
            place = places()
            if met or not self.victim or not place or place in failed:
                return False
            failed.add(place)
            met.append(nbytes)
            return True

        def fails(real: Callable[..., Any]) -> Callable[..., Any]:
            def allocate(nbytes: int, *more: Any) -> Any:
                if refuse(nbytes):
                    raise MemoryError(f"out of memory, injected: {nbytes} bytes")
                return real(nbytes, *more)

            return allocate

        patched = [(nccl.core, "mem_alloc"), (cupy.cuda, "alloc_pinned_memory")]
        originals = [getattr(where, name) for where, name in patched]
        before = None
        if self.played is not None:
            self.played.refuses = refuse
        else:
            before = cupy.cuda.get_allocator()

            def malloc(nbytes: int) -> Any:
                if refuse(nbytes):
                    raise cupy.cuda.memory.OutOfMemoryError(nbytes, 0, 0)
                return cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)

            self.pools.append(cupy.cuda.MemoryPool(malloc))  # lives as long as its arrays may
            cupy.cuda.set_allocator(self.pools[-1].malloc)
        for (where, name), original in zip(patched, originals, strict=True):
            setattr(where, name, fails(original))
        try:
            yield met
        finally:
            for (where, name), original in zip(patched, originals, strict=True):
                setattr(where, name, original)
            if self.played is not None:
                self.played.refuses = None
            else:
                cupy.cuda.set_allocator(before)

    # -- the trial

    def run(self) -> None:
        """Do it all."""
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        self.tell("start", pid=os.getpid())
        if self.fault == "memory":
            self.run_out_of_memory()
        elif self.fault.endswith("caught"):
            self.run_and_catch()
        else:
            self.run_with_a_fault()
        self.tell("end")


def main() -> None:
    """Run on this machine's GPUs, or on one that is played."""
    directory = Path(sys.argv[1])
    library = json.loads((directory / "trial.json").read_text()).get("library")
    if library is None:
        Trial(directory).run()
        return
    from mpi4py import MPI

    from tests.helpers.fakelt import FakeLt
    from tests.helpers.machine import Meeting, machine

    with machine(library, Meeting, comm=MPI.COMM_WORLD.Dup(), lt=FakeLt()) as lib:
        lib.gpu.patience = 0.3
        Trial(directory, lib.gpu).run()


if __name__ == "__main__":
    main()
