# SPDX-License-Identifier: Apache-2.0
"""Work on MPI ranks: on ranks that the command line starts, or in this process if mpirun or srun has started it.

A piece of work is a function ``work(options, reporter) -> result`` that every rank runs. Ranks started here
run ``reports.work_here``: they read their orders from a directory and answer through it. What they and the launcher
print is kept from the terminal.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..errors import ArgumentError, PblasmpError
from ..launch import Job, python_command
from ..launchers import NoLauncher, surroundings
from ..matrix.io.temporary import remove_abandoned
from ..resources import memory_bytes
from ..trust import private_folder
from .options import DEFAULT_RANKS
from .reports import Channel, Display, Reporter
from .signals import ending_at_once
from .terminal import caution, is_terminal, plain

_RANK = (  # imports leave no garbage; work_here() enables the collector
    "import gc, sys; gc.disable(); from pathlib import Path; from pblasmp.cli.reports import work_here; "
    "sys.exit(work_here(Path(sys.argv[1])))"
)
_START_SECONDS = 60  # that a launcher may take until a rank runs
_RANK_BYTES = 32 << 20  # of memory that a rank takes at least

Result = dict[str, Any]
Work = Callable[[Any, Reporter], Result]


class FailureError(Exception):
    """A rank failed.

    Attributes:
        status: the exit status: 2 for bad input, else 1.
        trace: its traceback.
        printed: what all ranks and the launcher printed, if nothing else says what went wrong.
    """

    def __init__(self, message: str, status: int = 1, trace: str = "", printed: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.trace = trace
        self.printed = printed


def on_ranks(
    work: Work, options: Any, nranks: int | None, hear: Callable[[Any], None] | None = None
) -> Result:
    """Run ``work`` on ``nranks`` new ranks, or in this process if an MPI launcher has started it, and so all ranks.

    Work is a function at the top level of a module; its options are sent by pickle. By default there are as many ranks
    as the launcher has started, or one per core up to 4. ``hear`` is called with what ``work`` hands over before its
    end.

    Returns:
        The result of rank 0, or in this process that of this rank.

    Raises:
        FailureError: a new rank failed.
        LibraryNotFoundError: there is no launcher.
        ArgumentError: the folder of temporary files is not trusted: the orders of new ranks lie there; or this machine
            has no memory for so many ranks.
        click.UsageError: the launcher started a different number of ranks from what was requested.
    """
    around = surroundings()
    if around is None:
        return _on_new_ranks(work, options, nranks or DEFAULT_RANKS, hear)
    if around.size is not None and nranks not in (None, around.size):
        raise click.UsageError(
            f"-n {nranks}, but {around.name} has started {around.size} ranks: leave -n out"
        )
    from ..comm.mpi_communicator import mpi

    with contextlib.suppress(PblasmpError), ending_at_once():  # which ``work`` raises again
        mpi()
    with _display() if around.rank == 0 else contextlib.nullcontext(Reporter()) as reporter:
        reporter.hear = hear
        return work(options, reporter)


def _on_new_ranks(work: Work, options: Any, nranks: int, hear: Callable[[Any], None] | None = None) -> Result:
    if nranks > (most := memory_bytes() // _RANK_BYTES):
        raise ArgumentError(
            f"{nranks} ranks, but this machine has memory for {most}: a launcher of several machines starts more, "
            f"as in mpirun -n {nranks} pblasmp ..."
        )
    result: Result | None = None
    with (
        private_folder("pblasmp-") as directory,
        contextlib.ExitStack() as leftovers,
        _display() as display,
    ):
        (directory / "orders").write_bytes(pickle.dumps((work, options, nranks)))
        display.step("starting ranks")
        launcher = NoLauncher() if nranks == 1 else None
        with Job(
            python_command(_RANK, str(directory)), nranks, directory / "output", launcher=launcher
        ) as job:
            leftovers.callback(_remove_temporaries, directory)
            channel = Channel(directory)
            status: int | None = None
            warned: set[str] = set()
            deadline = time.monotonic() + _START_SECONDS
            while status is None:
                status = job.wait(0.05)
                for event in channel.events():
                    deadline = float("inf")
                    if "error" in event:
                        raise FailureError(event["error"], 2 if event["bad_input"] else 1, event["trace"])
                    result = event.get("result", result)
                    if hear is not None and "found" in event:
                        hear(event["found"])
                    if event.get("warning") not in (None, *warned):
                        warned.add(event["warning"])
                        caution(event["warning"])
                    _show(event, display)
                if status is None and time.monotonic() > deadline:
                    raise _not_started(job)
        if status != 0 or result is None:
            from ..info import launcher_problem

            message = f"the ranks ended with status {status} and without a result"
            if problem := launcher_problem(job.launcher.kind) if nranks > 1 else "":
                message += f": {job.launcher.path}: {problem}. PBLASMP_MPIRUN names another one"
            raise FailureError(message, printed=job.tail())
    return result


def _not_started(job: Job) -> FailureError:
    """Return the error that a launcher neither starts ranks nor ends: MPICH's does so where srun fails. Local."""
    message = f"{job.launcher.path} has started no rank within {_START_SECONDS} seconds"
    if "SLURM_JOB_ID" in os.environ:
        message += ". In an allocation of Slurm let srun start pblasmp: srun pblasmp doctor"
    return FailureError(message, printed=job.tail())


def _display() -> contextlib.AbstractContextManager[Reporter]:
    """Return what shows progress. If stderr is not a terminal, nothing is shown, and rich is not imported."""
    return Display() if is_terminal(2) else contextlib.nullcontext(Reporter())


def _show(event: dict[str, Any], display: Reporter) -> None:
    if "step" in event:
        display.step(event["step"])
    elif "done" in event:
        display.progress(event["done"], event["total"])
    elif "log" in event:
        click.echo(plain(event["log"]), err=True)


def _remove_temporaries(directory: Path) -> None:
    """Remove temporary files that ranks which are gone may have left."""
    for event in Channel(directory).events():
        if "temporary" in event:
            remove_abandoned(Path(event["temporary"]))
