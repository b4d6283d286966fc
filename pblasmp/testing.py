# SPDX-License-Identifier: Apache-2.0
"""Tests on MPI ranks from a plain pytest.

    from pblasmp.testing import run_mpi

    def sums(comm, offset):
        return comm.allreduce(comm.rank + offset)

    def test_sums():
        assert run_mpi(sums, 4, offset=1) == [10, 10, 10, 10]

``run_mpi`` is also a fixture of projects that ask for the plugin: ``pytest_plugins = ["pblasmp.pytest_plugin"]`` in
conftest.py.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from . import launch as launching
from .comm.mpi_communicator import mpi
from .errors import ArgumentError, short_repr
from .launch import Job, Launcher, surroundings
from .trust import private_folder

__all__ = ["RanksFailedError", "run_mpi", "run_torch"]

Function = Callable[..., Any]

_GRACE_SECONDS = 1.0  # for ranks that are about to answer, once another one has failed
_LOOK_SECONDS = 0.02
_SHOWN_LINES = 40
_RANK = (  # a rank imports from where this process does
    "import gc, json, sys\n"
    "gc.disable()\n"  # imports leave no garbage
    "with open(sys.argv[1] + '/call') as file: sys.path[:] = json.load(file)['path']\n"
    "from pblasmp.testing import run_rank\n"
    "run_rank(*sys.argv[1:])"
)


class RanksFailedError(AssertionError):
    """At least one rank failed, or the call did not end in time; the message tells how it went on each rank."""


def run_mpi(
    function: Function | str, nranks: int, *, timeout: float = 60.0, launch: bool = True, **kwargs: Any
) -> list[Any]:
    """Run ``function(comm, **kwargs)`` on ``nranks`` MPI ranks and return what each returned, by rank. Local.

    ``comm`` is the ranks' ``MPI.COMM_WORLD``. The ranks are started for this call. On them warnings are errors. A
    generator function runs many cases in one call: it yields ``(case, error)``, with None for a case that passed, and
    must yield the same cases on every rank.

    If mpirun started this process, nothing is launched: the first ranks of its world run the function, with a
    separate communicator.

    Args:
        function: a function at the top level of an importable module, or "module:name".
        nranks: the number of ranks.
        timeout: seconds for the whole call.
        launch: has no effect any more: ranks are always new.
        **kwargs: arguments of the function; they travel as JSON, and so do results.

    Raises:
        RanksFailedError: a rank failed, disappeared or took too long. The message says which one, in or after which
            case, with its traceback, and where every other rank was.
        LibraryNotFoundError: there is no MPI launcher.
        ArgumentError: the function is not at the top level of a module, ``nranks`` is not at least 1, ``timeout`` is no
            time, or JSON cannot hold an argument.
    """
    __tracebackhide__ = True
    del launch
    name, file = named(function, nranks)
    _check(timeout, kwargs)
    if surroundings():
        outcomes = _run_here(name, file, nranks, kwargs)
    else:
        outcomes = _run(name, file, nranks, kwargs, timeout, None)
    return results_of(name, outcomes)


def run_torch(
    function: Function | str, nranks: int, *, timeout: float = 60.0, launch: bool = True, **kwargs: Any
) -> list[Any]:
    """Run ``function(group, **kwargs)`` on ``nranks`` ranks that torchrun starts, without MPI. Local.

    ``group`` is PyTorch's default process group, with gloo. Everything else is as in :func:`run_mpi`.
    """
    __tracebackhide__ = True
    del launch
    name, file = named(function, nranks)
    _check(timeout, kwargs)
    return results_of(name, _run(name, file, nranks, kwargs, timeout, Torchrun()))


class Torchrun(Launcher):
    """PyTorch's launcher."""

    def __init__(self) -> None:
        super().__init__(Path(sys.executable), "torchrun", "")

    def command(self, nranks: int, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on ``nranks`` ranks. Local."""
        torchrun = [*launching.interpreter(), "-m", "torch.distributed.run", "--standalone", "--no-python"]
        return [*torchrun, f"--nproc-per-node={nranks}", *argv]

    def environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return ``environ`` with one BLAS thread per rank, which torchrun would set with a warning. Local."""
        return {"OMP_NUM_THREADS": "1", **environ}


def named(function: Function | str, nranks: object) -> tuple[str, str]:
    """Return "module:name", and the module's file for ranks that cannot import it by name; "" if unknown. Local.

    ArgumentError if the ranks could not find it, or there would be no rank.
    """
    if not isinstance(nranks, (int, np.integer)) or nranks < 1:
        raise ArgumentError(f"nranks: expected an integer, at least 1, got {short_repr(nranks)}")
    if isinstance(function, str):
        return function, ""
    name = getattr(function, "__qualname__", "<")
    if "<" in name:  # <lambda>, <locals>, or no function
        raise ArgumentError(
            "function: expected one at the top level of a module, where ranks can find it by name, "
            f"got {short_repr(function)}"
        )
    file = getattr(sys.modules.get(function.__module__), "__file__", None) or ""
    return f"{function.__module__}:{name}", file


def _check(timeout: object, kwargs: Mapping[str, Any]) -> None:
    """Raise ArgumentError unless ``timeout`` is a time, and JSON can hold the arguments."""
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ArgumentError(f"timeout: expected seconds, more than 0, got {short_repr(timeout)}")
    name = ""
    try:
        for name, value in kwargs.items():
            json.dumps({name: value})
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{name}: arguments travel to the ranks as JSON: {error}") from None


def import_path() -> list[str]:
    """Return where this process looks for modules, whatever its working directory will be. Local."""
    return [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100 ("" is the working directory)


def _run(
    name: str, file: str, nranks: int, kwargs: dict[str, Any], timeout: float, launcher: Launcher | None
) -> list[dict[str, Any]]:
    """Run a function on ranks that are started for it, and return what each answered."""
    __tracebackhide__ = True
    call = {"name": name, "file": file, "nranks": int(nranks), "kwargs": kwargs, "path": import_path()}
    with private_folder("pblasmp-test-") as directory:
        (directory / "call").write_text(json.dumps(call))
        kind = "mpi" if launcher is None else launcher.kind
        command = [*launching.interpreter(), "-W", "error", "-c", _RANK, str(directory), kind]
        start = time.monotonic()
        with Job(command, nranks, directory / "output", launcher=launcher) as job:
            how = _ending(job, directory, nranks, start + timeout)
            answers = _answers(directory, nranks)
            if not how and None not in answers:
                return [answer or {} for answer in answers]
            seconds = time.monotonic() - start
            if job.poll() is None:
                write_stacks([pid for rank, pid in _pids(directory, nranks).items() if answers[rank] is None])
            how = how.format(timeout) if how else "ended without an answer"
            title = f"{name} on {nranks} ranks ({job.launcher.kind}) {how} after {seconds:.1f} s"
            raise RanksFailedError(story(title, directory, answers, job.tail(_SHOWN_LINES)))


def _ending(job: Job, directory: Path, nranks: int, deadline: float) -> str:
    """Wait for the end of a job; return an empty string, or what went wrong. A failing rank's job does not end."""
    failed = False
    while (status := job.wait(_LOOK_SECONDS)) is None:
        now, gone = time.monotonic(), [r for r, pid in _pids(directory, nranks).items() if not _lives(pid)]
        answers = _answers(directory, nranks)
        if now >= deadline or (failed and None not in answers):
            return "failed" if failed else "did not end in {:g} s"
        if not failed and (
            any(answers[r] is None for r in gone) or any("error" in (x or ()) for x in answers)
        ):
            failed, deadline = True, min(deadline, now + _GRACE_SECONDS)
    return f"ended with status {status}" if status else ""


def _answers(directory: Path, nranks: int) -> list[dict[str, Any] | None]:
    files = (directory / f"answer{rank}" for rank in range(nranks))
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def _pids(directory: Path, nranks: int) -> dict[int, int]:
    """Return the processes of the ranks that have started, by rank."""
    files = {rank: directory / f"pid{rank}" for rank in range(nranks)}
    return {r: int(text) for r, file in files.items() if file.exists() and (text := file.read_text())}


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def write_stacks(pids: Sequence[int]) -> None:
    """Have ranks that are still running write their stacks. Local."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
    if pids:
        time.sleep(0.3)


def story(title: str, directory: Path, answers: Sequence[dict[str, Any] | None], printed: str) -> str:
    """Return what happened on every rank, by its answer and what it has left in the directory. Local."""
    parts = [title]
    for rank, answer in enumerate(answers):
        file, stack = directory / f"case{rank}", directory / f"stack{rank}"
        last = file.read_text().partition("\n")[0] if file.exists() else ""
        case = f" (after case {last})" if last else ""
        if answer is None:
            report = stack.read_text().rstrip() if stack.exists() else ""
            report = report or "no report: it was killed, or it exited without returning"
            parts.append(f"--- rank {rank} did not finish{case}\n{report}")
        elif "error" in answer:
            parts.append(f"--- rank {rank} FAILED{case}\n{answer['error'].rstrip()}")
        else:
            parts.append(f"--- rank {rank} was done")
    parts.append(f"--- printed\n{printed}")
    return "\n".join(parts)


def _run_here(name: str, file: str, nranks: int, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the function on the first ranks of the world that this process was started in."""
    world = mpi().COMM_WORLD
    if world.size < nranks:
        raise RanksFailedError(
            f"{name} needs {nranks} ranks and mpirun started {world.size}: mpirun -n {nranks} or more"
        )
    inside = world.rank < nranks
    comm = world.Split(0 if inside else 1, world.rank)
    try:
        outcome = run_function(name, file, comm, json.loads(json.dumps(kwargs))) if inside else None
        outcomes: list[dict[str, Any]] = world.allgather(outcome)
        return outcomes[:nranks]
    finally:
        comm.Free()


def results_of(name: str, outcomes: Sequence[dict[str, Any]]) -> list[Any]:
    """Return every rank's result; raise if a case failed, ranks ran different cases, or there was none. Local."""
    __tracebackhide__ = True
    results = [outcome["result"] for outcome in outcomes]
    if not outcomes[0]["cases"]:
        return results
    names = [[case for case, _ in result] for result in results]
    if not names[0] or any(n != names[0] for n in names):
        raise RanksFailedError(f"{name}: ranks must run the same cases, at least one; they ran {names}")
    faults = [
        f"{case}, rank {r}: {error or 'an empty text'}"
        for r, result in enumerate(results)
        for case, error in result
        if error or isinstance(error, str)
    ]
    if faults:
        raise RanksFailedError(
            f"{name} on {len(results)} ranks, {len(names[0])} cases, failed:\n" + "\n".join(faults)
        )
    return results


# -- on a rank


def run_function(
    name: str, file: str, comm: Any, kwargs: dict[str, Any], done: Callable[[str], object] = str
) -> dict[str, Any]:
    """Run "module:function" and return what it returned or, for a generator, the cases that it yielded.

    The file is the module's, in case it cannot be imported by name; ``done`` is called with the name of each case after
    it.
    """
    module, _, attribute = name.partition(":")
    function: Any = import_module(module, file)
    for part in attribute.split("."):
        function = getattr(function, part)
    outcome: dict[str, Any]
    if inspect.isgeneratorfunction(function):
        cases = []
        for case, error in function(comm, **kwargs):
            cases.append((case, repr(error) if isinstance(error, BaseException) else error))
            done(case)
        outcome = {"cases": True, "result": cases}
    else:
        outcome = {"cases": False, "result": function(comm, **kwargs)}
    whole: dict[str, Any] = json.loads(json.dumps(outcome, default=_plain))
    return whole


def import_module(name: str, file: str) -> ModuleType:
    """Import a module by name, else from its file: pytest's import mode "importlib" leaves sys.path alone. Local."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not file or not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python module")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _plain(value: Any) -> Any:
    """Turn NumPy values into JSON's."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a rank's result must be JSON, not {type(value).__name__}")


def world_of(kind: str) -> tuple[Any, int, int]:
    """Return the communicator of all ranks, this rank and how many there are. Collective over all ranks.

    The kind is "torchrun", or a launcher of MPI.
    """
    if kind == "torchrun":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    from mpi4py import MPI

    return MPI.COMM_WORLD, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def run_rank(folder: str, kind: str) -> None:
    """Run the call in a directory on this rank. Collective over all ranks.

    The rank leaves its number, its answer, its last case and, at SIGUSR2, its stack there. If it has failed it waits
    for its end: the others are still to say where they are.
    """
    directory = Path(folder)
    call = json.loads((directory / "call").read_text())
    comm, rank, size = world_of(kind)
    stack = (directory / f"stack{rank}").open("w")  # open until the process ends
    faulthandler.register(signal.SIGUSR2, file=stack)
    (directory / f"pid{rank}").write_text(str(os.getpid()))
    last = os.open(directory / f"case{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    left: list[str] = []
    sys.unraisablehook = lambda x: left.append(f"{x.err_msg or 'ignored'}: {x.exc_value!r}")
    gc.enable()
    try:
        if size != call["nranks"]:
            raise RuntimeError(
                f"a world of {size} ranks, not {call['nranks']}: mpirun and libmpi do not match"
            )
        # the name of a case is written over that of the one before
        answer = run_function(
            call["name"], call["file"], comm, call["kwargs"],
            lambda case: os.pwrite(last, f"{case!r}\n".encode(), 0),
        )  # fmt: skip
        gc.collect()
        if left:
            answer = {"error": "\n".join(left)}
    except BaseException:  # noqa: BLE001 (whatever ends a function is what the report is about)
        answer = {"error": traceback.format_exc()}
    sys.stdout.flush()
    sys.stderr.flush()
    made = directory / f"made{rank}"
    made.write_text(json.dumps(answer))
    made.rename(directory / f"answer{rank}")
    while "error" in answer:
        signal.pause()
