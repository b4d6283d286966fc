# SPDX-License-Identifier: Apache-2.0
"""Random sequences of public calls, for as long as you like: on CPU ranks, on simulated GPUs and on real ones.

``python -m tests.chaos.sequences --engine host -n 4 --minutes 60`` starts its own ranks; under mpirun, as in
``mpirun -n 2 python -m tests.chaos.sequences --minutes 8``, the ranks are those.

Each sequence runs on a new context: small and large matrices that are scattered, moved, viewed, computed with, saved
and loaded; plans that are kept and dropped, on several streams, with CUDA graphs and sleeping ranks; mistakes on all
ranks or on one; lack of memory. Every result is compared with NumPy's. What a closed context leaves behind is counted.
A sequence that fails is shrunk by Hypothesis, and printed as a program; ``--replay FILE`` runs such a program again.
The status is 1 where something was wrong, or where memory, descriptors or threads grow.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import inspect
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import pblasmp as pb
from pblasmp import launch
from pblasmp.engines.gpu.runtime.graphs import Recordings
from tests.helpers.sequences import STEPS, Away, Gpu, Host, Sequence, Simulated, WrongError, replay, search
from tests.helpers.sequences.matrices import FORMATS

ROOT = Path(__file__).parents[2]
_SIMULATED = {"simulated": Simulated, "away": Away}  # the user has made another GPU the current one
ENGINES = ("host", "cublasmp", *_SIMULATED)
STUCK = 120.0  # seconds of a step after which it hangs
PORTION = 20  # sequences of one seed
WARM_UP = 8  # sequences until all that is kept for the whole process is there
GROWTH = {"descriptors": 0, "threads": 0, "resident KiB": 64 << 10, "CuPy KiB": 16 << 10, "GPU KiB": 64 << 10}
"""What may be added between two closed contexts after the warm-up: of memory, what allocators keep."""


class Watch:
    """Ends the process where a step hangs, and says what it was doing.

    Attributes:
        what: is being done.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.what, self._since = "", time.monotonic()
        self._done = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

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
        self.thread.join()


def grown(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return what is held more of than ``GROWTH`` allows. Local."""
    return [
        f"{name} {before[name]}, then {after[name]}"
        for name in after
        if after[name] > before[name] + GROWTH[name]
    ]


class Sequences:
    """Random sequences, one after the other.

    Args:
        comm: the ranks, of mpi4py.
        device: where they run.
        length: how many steps a sequence has.
        only: names of steps that are drawn; by default all. And "wait": shrinking turns others into what draws nothing.

    Attributes:
        counts: how often each step was made; "-" before those that had nothing to do.
        held: what the process held after each sequence.
    """

    def __init__(self, comm: Any, device: Host, *, length: int = 60, only: Collection[str] = ()) -> None:
        self.comm, self.device, self.length = comm, device, length
        self.counts: Counter[str] = Counter()
        self.held: list[dict[str, int]] = []
        self.watch = Watch(comm.rank)
        others = {
            name: None
            for name, function in inspect.getmembers(Sequence, inspect.isfunction)
            if only and function.__name__ in STEPS and function.__name__ not in (*only, "wait")
        }
        self._kind = type("Sequence", (Sequence,), others)

    def new(self) -> Sequence:
        """Return a sequence without a step. Local."""
        return self._kind(self.comm, self.device, self.watch.doing, self._ended)

    def _ended(self, state: Sequence) -> None:
        self.counts += state.counts
        if not state.failed:
            self.held.append(self._held())

    def begin(self) -> None:
        """Load what threads and descriptors are kept of for the whole process, as zarr's. Collective over the ranks."""
        state = self.new()
        (matrix,) = state.begin([pb.MatrixDescriptor((4, 4), 4, (1, 1))], 0).values
        for kind in FORMATS:
            state.save(matrix, 0, kind, None)
        state.teardown()
        self.held.clear()

    def search(self, count: int, seed: int, *, shrink: bool = True) -> str:
        """Make random sequences; return what is wrong with the smallest that fails. Collective over the ranks."""
        return search(self.comm, self.new, count, seed=seed, steps=self.length, shrink=shrink)

    def _held(self) -> dict[str, int]:
        gc.collect()
        self.device.trim()
        self.comm.barrier()
        held = self.device.held()
        self.comm.barrier()  # ranks may share a GPU
        return held

    def growth(self) -> str:
        """Return what grows on any rank, or an empty string. Collective over the ranks.

        Of a long run the second half counts: bounded caches and what allocators keep fill for hundreds of sequences.
        """
        faults = ""
        if len(self.held) > WARM_UP:
            before = self.held[max(WARM_UP, len(self.held) // 2) - 1]
            after = {name: min(each[name] for each in self.held[-3:]) for name in self.held[0]}
            faults = "; ".join(grown(before, after))
        of_all = self.comm.allgather(faults)
        return "; ".join(f"rank {rank}: GROWN {text}" for rank, text in enumerate(of_all) if text)

    def summary(self) -> str:
        """Return in words what was done."""
        made = {name: count for name, count in sorted(self.counts.items()) if name[0] != "-"}
        nothing = sum(count for name, count in self.counts.items() if name[0] == "-")
        return f"{sum(made.values())} steps, {nothing} more had nothing to do"


def run(program: Sequences, *, seconds: float, count: int, seed: int, say: Callable[[str], None]) -> int:
    """Make sequences for some time, or some number of them; return the status. Collective over the ranks."""
    comm, start, first, fault = program.comm, time.monotonic(), seed, ""
    program.begin()
    while not fault:
        try:
            fault = program.search(count or PORTION, seed)
        except BaseException:
            print(f"rank {comm.rank} raises: {program.watch.what}", file=sys.stderr, flush=True)
            raise
        say(f"FAILED, seed {seed}: {fault}" if fault else f"seed {seed}: {program.summary()}")
        seed += 1
        if count or not comm.bcast(time.monotonic() < start + seconds):
            break
    growth = program.growth()
    made = {name: times for name, times in sorted(program.counts.items()) if name[0] != "-"}
    say(f"{made}")
    for line in comm.allgather(f"rank {comm.rank}: {program.held[-1] if program.held else 'nothing held'}"):
        say(line)
    if growth:
        say(f"{growth}; rank 0 has the threads {[thread.name for thread in threading.enumerate()]}")
    say(
        f"seeds {first} to {seed - 1} on {comm.size} ranks in {time.monotonic() - start:.0f} s, "
        f"{'one failed' if fault else 'none failed'}: {program.summary()}"
    )
    return int(bool(fault or growth))


def number_on_node(comm: Any) -> int:
    """Return this rank's number among the ranks of its node. Collective over the ranks."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    number = int(node.rank)
    node.Free()
    return number


@contextlib.contextmanager
def device(comm: Any, engine: str) -> Iterator[Host]:
    """Return where sequences run; simulated GPUs, and a library that multiplies, are there within."""
    if engine not in _SIMULATED:
        yield Gpu(number_on_node(comm)) if engine == "cublasmp" else Host()
        return
    from tests.helpers.fused_machines import Scaling
    from tests.helpers.machine import machine
    from tests.helpers.recorder import build

    with tempfile.TemporaryDirectory(prefix="pblasmp-cublasmp-") as directory:
        path = comm.bcast(build(Path(directory)) if comm.rank == 0 else None)

        def again(_: Recordings, queue: Callable[[], None], **how: Any) -> Any:
            """Return a graph that queues again what it has."""
            return SimpleNamespace(launch=queue, current=True)

        with machine(path, Scaling, comm=comm) as lib, mock.patch.object(Recordings, "record", again):
            yield _SIMULATED[engine](lib)
            lib.assert_clean()
            lib.gpu.assert_clean()
        comm.barrier()


def work(given: argparse.Namespace) -> int:
    """Be a rank."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()

    def say(text: str) -> None:
        if comm.rank == 0:
            print(text, flush=True)

    missing = [name for name in ("npy", "h5", "zarr") if name not in FORMATS]
    if missing:
        say(f"left out, since their libraries are missing: {', '.join(missing)}")
    with device(comm, given.engine) as where:
        program = Sequences(comm, where, length=given.length, only=[x for x in given.only.split(",") if x])
        try:
            if given.replay is None:
                how = {"seconds": 60 * given.minutes, "count": given.sequences, "seed": given.seed}
                return run(program, **how, say=say)
            try:
                replay(program.new(), given.replay.read_text())
            except WrongError as error:
                say(f"FAILED: {error}")
                return 1
            say("all well")
            return 0
        finally:
            program.watch.close()


def start(nranks: int, arguments: list[str]) -> NoReturn:
    """Become a launcher of so many ranks with these arguments."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.setdefault("OMP_NUM_THREADS", "1")
    launcher = launch.find_launcher(environ)
    argv = launcher.command(nranks, [*launch.interpreter(), "-m", "tests.chaos.sequences", *arguments])
    os.execvpe(argv[0], argv, launcher.environment(environ))


def main() -> int:
    parser = argparse.ArgumentParser(description="Random sequences of public calls, compared with NumPy.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--sequences", type=int, default=0, help="that many instead of minutes")
    parser.add_argument("--engine", choices=ENGINES, default="cublasmp")
    parser.add_argument("-n", type=int, default=0, help="start so many ranks; not under mpirun")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=60, help="steps of a sequence")
    parser.add_argument("--only", default="", help="names of the steps that are drawn, with commas")
    parser.add_argument("--replay", type=Path, help="run the program in this file, as it was printed")
    given = parser.parse_args()
    if given.n:
        start(given.n, [*sys.argv[1:], "-n", "0"])
    return work(given)


if __name__ == "__main__":
    sys.exit(main())
