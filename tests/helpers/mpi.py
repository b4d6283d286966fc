# SPDX-License-Identifier: Apache-2.0
"""Running functions on MPI ranks from a plain pytest.

    from tests.helpers.mpi import run_mpi

    def sums(comm, offset):
        return comm.allreduce(comm.rank + offset)

    def test_sums():
        assert run_mpi(sums, 4, offset=1) == [10, 10, 10, 10]

The function is found again by module and name on every rank, gets the world communicator and the
keyword arguments (as JSON), and what it returns comes back (as JSON) in a list by rank. A generator runs many
cases in one launch: it yields ``(case, error)``, the error None where all is well, goes on after a case that
failed, and must yield the same cases on every rank:

    def products(comm, sizes):
        for n in sizes:
            yield f"n={n}", None if check(comm, n) else "wrong product"

Any exception ends the whole job. The failure says which rank failed in which case, with its traceback, and
where every other rank stood. Ranks that cannot be started are a failure.

Under ``mpirun -n 4 python -m pytest tests/mpi`` nothing is started: the first ranks run the
function.

``run_torch`` does the same with torchrun, without MPI: the function gets PyTorch's default process group.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pblasmp.launch import Job, Launcher, surroundings

from .rank import run_function

ROOT = Path(__file__).parents[2]

starts_ranks = pytest.mark.skipif(
    surroundings() is not None, reason="starts ranks of its own: not under mpirun"
)


class RanksFailedError(AssertionError):
    """At least one rank failed, or the job did not end in time; the message has the whole story."""


def run_mpi(
    function: Callable[..., Any] | str, nranks: int, *, timeout: float = 60.0, **kwargs: Any
) -> list[Any]:
    """Run ``function(comm, **kwargs)`` on ``nranks`` ranks and return what each returned.

    Args:
        function: at the top level of an importable module, or "module:name".
        nranks: the size of the world.
        timeout: seconds for the whole job.
        **kwargs: given to the function; JSON.

    Raises:
        RanksFailedError: see the message.
    """
    __tracebackhide__ = True
    name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
    if surroundings():
        outcomes = _run_here(name, nranks, kwargs)
        _check_cases(name, outcomes)
        return [o["result"] for o in outcomes]
    with tempfile.TemporaryDirectory(prefix="pblasmp-test-") as directory:
        return _Launch(name, nranks, Path(directory)).run(timeout, kwargs)


def run_torch(
    function: Callable[..., Any] | str, nranks: int, *, timeout: float = 60.0, **kwargs: Any
) -> list[Any]:
    """Run ``function(group, **kwargs)`` on ``nranks`` ranks that torchrun starts; all else as in :func:`run_mpi`."""
    __tracebackhide__ = True
    name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
    with tempfile.TemporaryDirectory(prefix="pblasmp-test-") as directory:
        return _Launch(name, nranks, Path(directory), Torchrun()).run(timeout, kwargs)


class Torchrun(Launcher):
    """PyTorch's launcher."""

    def __init__(self) -> None:
        super().__init__(Path(sys.executable), "other", "")

    def command(self, nranks: int, argv: Sequence[str]) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
        return [*torchrun, f"--nproc-per-node={nranks}", *argv]

    def environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1", **environ}


class _Launch:
    """One job and the directory through which its ranks report."""

    def __init__(self, name: str, nranks: int, directory: Path, launcher: Launcher | None = None) -> None:
        self.name = name
        self.nranks = nranks
        self.directory = directory
        self.launcher = launcher

    def run(self, timeout: float, kwargs: dict[str, Any]) -> list[Any]:
        __tracebackhide__ = True
        orders = {"function": self.name, "nranks": self.nranks, "kwargs": kwargs}
        orders["torch"] = isinstance(self.launcher, Torchrun)
        (self.directory / "orders.json").write_text(json.dumps(orders))
        python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        start = time.monotonic()
        with Job(
            [sys.executable, "-W", "error", "-m", "tests.helpers.rank", str(self.directory)],
            self.nranks,
            self.directory / "output",
            environ={**os.environ, "PYTHONPATH": python_path},
            launcher=self.launcher,
        ) as job:
            status = job.wait(timeout)
            if status is None:
                self._ask_for_stacks()
        seconds = time.monotonic() - start
        ended = (
            f"did not end in {timeout:g} s"
            if status is None
            else f"ended with status {status} after {seconds:.1f} s"
        )
        outcomes = [self._read_json(f"rank{r}.json") for r in range(self.nranks)]
        if status != 0 or any(o is None or "error" in o for o in outcomes):
            how = f"{self.name} on {self.nranks} ranks ({job.launcher.kind}) {ended}"
            raise RanksFailedError(self._story(how, outcomes, job))
        whole = [o for o in outcomes if o is not None]
        _check_cases(self.name, whole)
        return [o["result"] for o in whole]

    def _ask_for_stacks(self) -> None:
        """Have the ranks that are still at work write down where they are."""
        for rank in range(self.nranks):
            pid = self._read(f"pid{rank}")
            if pid and not (self.directory / f"rank{rank}.json").exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGUSR2)
        time.sleep(0.3)

    def _story(self, how: str, outcomes: Sequence[dict[str, Any] | None], job: Job) -> str:
        parts = [how]
        for rank, outcome in enumerate(outcomes):
            case = f" (after case {case!r})" if (case := self._read(f"case{rank}")) else ""
            if outcome is not None and "error" in outcome:
                parts.append(f"--- rank {rank} FAILED{case}\n{outcome['error'].rstrip()}")
            elif outcome is not None:
                parts.append(f"--- rank {rank} was done")
            else:
                stood = (
                    self._read(f"stack{rank}").rstrip()
                    or "it left no word: killed, or gone without returning"
                )
                parts.append(f"--- rank {rank} did not finish{case}\n{stood}")
        parts.append(f"--- printed\n{job.tail(40)}")
        return "\n".join(parts)

    def _read(self, name: str) -> str:
        path = self.directory / name
        return path.read_text() if path.exists() else ""

    def _read_json(self, name: str) -> dict[str, Any] | None:
        text = self._read(name)
        return json.loads(text) if text else None


def _check_cases(name: str, outcomes: Sequence[dict[str, Any]]) -> None:
    """Raise where a case failed, where ranks ran different cases, or where there was none."""
    __tracebackhide__ = True
    if not outcomes[0]["cases"]:
        return
    results = [o["result"] for o in outcomes]
    names = [[case for case, _ in result] for result in results]
    if not names[0] or any(n != names[0] for n in names):
        raise RanksFailedError(f"{name}: ranks must run the same cases, at least one; they ran {names}")
    faults = [
        f"{case}, rank {r}: {error}" for r, result in enumerate(results) for case, error in result if error
    ]
    if faults:
        raise RanksFailedError(
            f"{name} on {len(results)} ranks, {len(names[0])} cases, failed:\n" + "\n".join(faults)
        )


def _run_here(name: str, nranks: int, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the function on the first ranks of the world that this process was started in."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size < nranks:
        raise RanksFailedError(
            f"{name} needs {nranks} ranks and mpirun started {world.size}: mpirun -n {nranks} or more"
        )
    inside = world.rank < nranks
    comm = world.Split(0 if inside else 1, world.rank)
    try:
        outcome = run_function(name, comm, kwargs) if inside else None
        return world.allgather(outcome)[:nranks]
    finally:
        comm.Free()
