# SPDX-License-Identifier: Apache-2.0
"""Running a function on ranks: on kept ones, on new ones or, under mpirun, on those that are running already."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import launch as launching
from ..comm.mpi_communicator import mpi
from ..errors import ArgumentError, short_repr
from ..launch import Launcher, surroundings
from .pool import RanksFailedError, World, pool
from .rank import run_function

__all__ = ["RanksFailedError", "run_launched", "run_mpi", "run_torch"]

Function = Callable[..., Any]


def run_mpi(
    function: Function | str, nranks: int, *, timeout: float = 60.0, launch: bool = False, **kwargs: Any
) -> list[Any]:
    """Run ``function(comm, **kwargs)`` on ``nranks`` MPI ranks and return what each returned, by rank. Local.

    ``comm`` is the ranks' ``MPI.COMM_WORLD``. The ranks are kept for the next call for as many ranks; a call that
    fails ends them. On them warnings are errors. A generator function runs many cases in one call: it yields
    ``(case, error)``, with None for a case that passed, and must yield the same cases on every rank.

    If mpirun started this process, nothing is launched: the first ranks of its world run the function, with a
    separate communicator.

    Args:
        function: a function at the top level of an importable module, or "module:name".
        nranks: the number of ranks.
        timeout: seconds for the whole call.
        launch: start new ranks for this call alone, to test how ranks start and end, or what libraries read on loading.
        **kwargs: arguments of the function; they travel as JSON, and so do results.

    Raises:
        RanksFailedError: a rank failed, disappeared or took too long. The message says which one, in or after which
            case, with its traceback, and where every other rank was.
        LibraryNotFoundError: there is no MPI launcher.
        ArgumentError: the function is not at the top level of a module, or ``nranks`` is not at least 1.
    """
    __tracebackhide__ = True
    name, file = _name(function, nranks), _file(function)
    if surroundings():
        outcomes = _run_here(name, file, nranks, kwargs)
    else:
        outcomes = _run(name, file, nranks, kwargs, timeout, launch, None)
    return _results(name, outcomes)


def run_torch(
    function: Function | str, nranks: int, *, timeout: float = 60.0, launch: bool = False, **kwargs: Any
) -> list[Any]:
    """Run ``function(group, **kwargs)`` on ``nranks`` ranks that torchrun starts, without MPI. Local.

    ``group`` is PyTorch's default process group, with gloo. Everything else is as in :func:`run_mpi`.
    """
    __tracebackhide__ = True
    return run_launched(Torchrun(), function, nranks, timeout=timeout, launch=launch, **kwargs)


def run_launched(
    launcher: Launcher,
    function: Function | str,
    nranks: int,
    *,
    timeout: float = 60.0,
    launch: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Do what :func:`run_mpi` does on ranks that this launcher starts. Local."""
    __tracebackhide__ = True
    name = _name(function, nranks)
    return _results(name, _run(name, _file(function), nranks, kwargs, timeout, launch, launcher))


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


def _name(function: Function | str, nranks: object) -> str:
    """Return "module:name", or raise ArgumentError if the ranks could not find it, or there would be no rank. Local."""
    if not isinstance(nranks, int) or nranks < 1:
        raise ArgumentError(f"nranks: expected an integer, at least 1, got {short_repr(nranks)}")
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", "<")
    if "<" in name:  # <lambda>, <locals>, or no function
        raise ArgumentError(
            "function: expected one at the top level of a module, where ranks can find it by name, "
            f"got {short_repr(function)}"
        )
    return f"{function.__module__}:{name}"


def _file(function: Function | str) -> str:
    """Return where the function's module is, for modules that cannot be imported by name; "" if that is unknown."""
    module = None if isinstance(function, str) else sys.modules.get(function.__module__)
    return getattr(module, "__file__", None) or ""


def _run(
    name: str,
    file: str,
    nranks: int,
    kwargs: dict[str, Any],
    timeout: float,
    launch: bool,
    launcher: Launcher | None,
) -> list[dict[str, Any]]:
    __tracebackhide__ = True
    if pool.keep and not launch:
        return pool.call(name, file, nranks, kwargs, timeout, launcher)
    with World(nranks, launcher) as world:
        answers = world.call(name, file, kwargs, timeout)
        world.dismiss()
        if (status := world.wait(timeout)) != 0:
            how = f"did not end in {timeout:g} s" if status is None else f"ended with status {status}"
            raise RanksFailedError(world.story(f"{name} returned on {nranks} ranks, but the job {how}"))
    return answers


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


def _results(name: str, outcomes: Sequence[dict[str, Any]]) -> list[Any]:
    """Return every rank's result; raise if a case failed, ranks ran different cases, or there was none."""
    __tracebackhide__ = True
    results = [outcome["result"] for outcome in outcomes]
    if not outcomes[0]["cases"]:
        return results
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
    return results
