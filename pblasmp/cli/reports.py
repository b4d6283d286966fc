# SPDX-License-Identifier: Apache-2.0
"""Progress reports: discarded, sent to the process with the terminal by a rank that it has started, or shown there."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import pickle
import sys
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import click

from ..errors import ClosedError, FactorizationError, PblasmpError, StatusError
from ..launchers import surroundings
from ..logs import show_logs
from .terminal import console, use_color

Event = dict[str, Any]
_PACKAGE = Path(__file__).parents[1]


_FAILURES = ClosedError, FactorizationError, StatusError
_PATH_ERRORS = FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError, PermissionError
_NO_THREAD = "can't start new thread"  # Python's words
_PATH_FAULTS = errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG


def is_bad_input(error: BaseException) -> bool:
    """Return whether ``error`` means that the input is not valid, rather than that something failed. Local."""
    if isinstance(error, PblasmpError):
        return not isinstance(error, _FAILURES)
    if isinstance(error, OSError):  # a name that cannot be opened, not a disk that is full
        return isinstance(error, _PATH_ERRORS) or error.errno in _PATH_FAULTS
    return isinstance(error, click.ClickException)


def _is_expected(error: BaseException) -> bool:
    """Return whether the text of ``error`` is for the user, and not a sign of a fault in pblasmp. Local."""
    known = isinstance(error, (PblasmpError, OSError, MemoryError, click.ClickException))
    return known or str(error) == _NO_THREAD


def describe(error: BaseException) -> str:
    """Return the text that tells the user about ``error``. Local."""
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx is not None else "pblasmp"
        return f"{error.format_message().rstrip('.?')}. Try '{command} --help'"
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, MemoryError):
        return f"out of memory: {error}" if str(error) else "out of memory"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, FileNotFoundError) and error.strerror:  # os.getcwd's
        return "the current directory has been removed"
    if str(error) == _NO_THREAD:
        return f"{_NO_THREAD}: a limit of memory or of processes is too low (ulimit -v, ulimit -u)"
    return str(error) if _is_expected(error) else f"{type(error).__name__}: {error} (a bug in pblasmp)"


@contextlib.contextmanager
def warnings_to(tell: Callable[[str], None]) -> Iterator[None]:
    """Pass pblasmp's own warnings to ``tell``, each text once, during the ``with`` block. Local.

    Warnings of other libraries, and those about resources, go where they would go otherwise.
    """
    told: set[str] = set()
    with warnings.catch_warnings():
        elsewhere = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if not issubclass(category, UserWarning) or not Path(filename).is_relative_to(_PACKAGE):
                elsewhere(message, category, filename, lineno, file, line)
            elif (text := str(message)) not in told:
                told.add(text)
                tell(text)

        warnings.showwarning = show
        yield


class Reporter:
    """Receives the progress of work; this one discards it.

    Attributes:
        hear: is called with what the work finds before its end.
    """

    hear: Callable[[Any], None] | None = None

    def found(self, part: Any) -> None:
        """Hand over a part of the result before the others. Local."""
        if self.hear is not None:
            self.hear(part)

    def step(self, name: str) -> None:
        """Name the step that begins. Local."""

    def progress(self, done: int, total: int) -> None:
        """Report how far the step is, in its own units. Local."""

    def temporary(self, path: Path) -> None:
        """Name a file that is about to be written, so that it is removed if the ranks are killed. Local."""

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Report the exception that leaves the ``with`` block, before it is handled elsewhere. Local."""
        yield


class Channel(Reporter):
    """Both ends of the files in a directory through which a rank reports to the process that started it.

    There is one file per rank, to which lines are appended, one JSON object each.
    """

    def __init__(self, directory: Path, rank: int = 0) -> None:
        self._directory = directory
        self._rank = rank
        self._read: defaultdict[Path, int] = defaultdict(int)  # bytes
        self._told: BaseException | None = None
        self._next_progress = 0.0

    def found(self, part: Any) -> None:
        """Report it, on rank 0. Local."""
        self.tell(found=part)

    def step(self, name: str) -> None:
        """Report it, on rank 0. Local."""
        self._next_progress = 0.0
        self.tell(step=name)

    def progress(self, done: int, total: int) -> None:
        """Report it, on rank 0, at most ten times a second. Local."""
        now = time.monotonic()
        if now >= self._next_progress:
            self._next_progress = now + 0.1
            self.tell(done=done, total=total)

    def temporary(self, path: Path) -> None:
        """Report it, on rank 0. Local."""
        self.tell(temporary=str(path))

    def error(self, error: BaseException) -> None:
        """Report an error, once. Local."""
        if error is not self._told:
            self._told = error
            message = describe(error) if _is_expected(error) else f"rank {self._rank}: {describe(error)}"
            trace = traceback.format_exc()
            self.tell(error=message, bad_input=is_bad_input(error), trace=trace)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Report the exception that leaves the ``with`` block. Local."""
        try:
            yield
        except Exception as error:
            self.error(error)
            raise

    def events(self) -> Iterator[Event]:
        """Yield what has been reported since the last call, rank by rank. Local; for the side that reads."""
        for path in sorted(self._directory.glob("rank*.events")):
            with path.open("rb") as file:
                file.seek(self._read[path])
                for line in file:
                    if not line.endswith(b"\n"):  # a rank is writing it
                        break
                    self._read[path] += len(line)
                    yield json.loads(line)

    def tell(self, **event: Any) -> None:
        """Report an event: errors, log and warnings of any rank, all else on rank 0. Local."""
        if self._rank > 0 and not {"error", "log", "warning"} & event.keys():
            return
        with (self._directory / f"rank{self._rank:06}.events").open("a") as file:
            file.write(json.dumps(event) + "\n")


class LogHandler(logging.Handler):
    """Sends the log of a rank through its channel."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record. Local."""
        self._channel.tell(log=self.format(record))


def work_here(directory: Path) -> int:
    """Do the work that ``directory`` orders from a new rank; report its outcome there. Collective over all ranks."""
    from ..comm.mpi_communicator import check_world  # which the process with the terminal does not need

    work, options, nranks = pickle.loads((directory / "orders").read_bytes())
    gc.freeze()
    gc.enable()
    around = surroundings()
    channel = Channel(directory, around.rank if around else 0)
    channel.tell(began=True)
    try:
        show_logs(LogHandler(channel))
        if nranks == 1:
            sys.modules["mpi4py"] = None  # type: ignore[assignment]  # one rank needs no MPI: none is tried
        else:
            check_world(nranks, around.title if around else "mpirun")
        with warnings_to(lambda text: channel.tell(warning=text)):
            channel.tell(result=work(options, channel))
    except Exception as error:  # noqa: BLE001 (whatever it is, the parent tells it)
        channel.error(error)
        return 1
    return 0


class Display(Reporter):
    """Progress on the terminal that stderr is connected to, a line for each step. A context manager."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        context = click.get_current_context(silent=True)
        color = use_color("auto") if context is None else bool(context.color)
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console(color=color, stderr=True, terminal=True),
            transient=True,
        )
        self._task: Any = None

    def step(self, name: str) -> None:
        """Finish the previous step and start this one. Local."""
        if self._task is not None:
            self._progress.update(self._task, total=1, completed=1)
        self._task = self._progress.add_task(f"{name:<14}", total=None)

    def progress(self, done: int, total: int) -> None:
        """Show how far the step is. Local."""
        if self._task is not None:
            self._progress.update(self._task, total=total, completed=done)

    def __enter__(self) -> Display:  # noqa: PYI034 (typing.Self is newer than the oldest Python)
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
