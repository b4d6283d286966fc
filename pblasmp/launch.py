# SPDX-License-Identifier: Apache-2.0
"""Starting MPI ranks and ending what was started. :mod:`pblasmp.launchers` knows the launchers.

The command line and the tests start their ranks through :class:`Job`, which leaves no process behind however it
ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from .launchers import Launcher, Surroundings, find_launcher, surroundings
from .logs import logger

__all__ = [
    "Job",
    "Launcher",
    "Surroundings",
    "find_launcher",
    "interpreter",
    "last_lines",
    "python_command",
    "surroundings",
]

_MOST_BYTES = 1 << 16  # that are shown of what ranks printed
_JOB = "PBLASMP_JOB"  # carried by every process of a job, so that all of them can be found again


class Job:
    """Ranks of one MPI job, started by a launcher and ended together; a context manager. Local.

    The launcher gets its own session, so that a Ctrl-C in the terminal reaches this process alone, which
    then ends the job in order. Should this process be killed, the launcher gets SIGTERM from the kernel.

    Args:
        argv: the command that each rank runs.
        nranks: how many ranks.
        output: file for the output of the launcher and the ranks (a pipe that nobody reads would block them).
        environ: the environment; what the launcher needs is added.
        launcher: by default the one that :func:`find_launcher` finds.

    Raises:
        LibraryNotFoundError: there is no launcher.
    """

    def __init__(
        self,
        argv: Sequence[str],
        nranks: int,
        output: Path,
        *,
        environ: Mapping[str, str] = os.environ,
        launcher: Launcher | None = None,
    ) -> None:
        self.launcher = launcher or find_launcher(environ)
        self.output = output
        self._token = secrets.token_hex(16)
        environment = {**self.launcher.environment(environ), _JOB: self._token}
        command = self.launcher.command(nranks, argv)
        logger.info("starting %d ranks with %s (%s)", nranks, command[0], self.launcher.kind)
        logger.debug("command: %s", shlex.join(command))
        self._started = time.time()
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=_terminate_with_parent,  # noqa: PLW1509 (one system call)
            )

    def poll(self) -> int | None:
        """Return the exit status of the job, or None while it runs. Local."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait at most ``timeout`` seconds; return the exit status, or None while the job runs. Local."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        return self._process.poll()

    def end(self, grace: float = 2.0) -> None:
        """End every process: SIGTERM to mpirun, SIGKILL after ``grace`` seconds to the rest. Local."""
        if self.poll() is None:
            self._process.terminate()
            if self.wait(grace) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 5.0
        while (left := list(self._members())) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self._process.wait()
        if not left:
            remove_shared_memory(self._started)

    def tail(self, lines: int = 20) -> str:
        """Return the last lines that the launcher and the ranks printed. Local."""
        return last_lines(self.output, lines)

    def _members(self) -> Iterator[int]:
        """Yield the processes that carry this job's token in their environment."""
        token = f"{_JOB}={self._token}".encode()
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if token in (directory / "environ").read_bytes():
                    yield int(directory.name)

    def __enter__(self) -> Job:  # noqa: PYI034 (typing.Self is newer than the oldest Python)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


def last_lines(file: Path, lines: int, since: int = 0) -> str:
    """Return the last lines of a file, which may be large, from a byte on; if it is not there, nothing. Local.

    No more than its last 64 KiB are read.
    """
    try:
        with file.open("rb") as stream:
            stream.seek(max(since, os.fstat(stream.fileno()).st_size - _MOST_BYTES))
            return "\n".join(stream.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def interpreter() -> list[str]:
    """Return the command that starts a rank's Python. Local."""
    return [sys.executable]


def python_command(script: str, *arguments: str) -> list[str]:
    """Return a command that runs a script in a new Python, from the current directory only if this one does. Local.

    By default Python looks for modules, even those of the standard library, in the current directory first;
    ``PYTHONSAFEPATH`` prevents that only from Python 3.11 on.
    """
    if not {"", str(Path.cwd())} & set(sys.path):
        script = f"import sys\nif sys.path[:1] == ['']: del sys.path[0]\n{script}"
    return [*interpreter(), "-c", script, *arguments]


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _terminate_with_parent() -> None:
    """In the child, between fork and exec: have the kernel send SIGTERM when the parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def remove_shared_memory(since: float, directory: Path = Path("/dev/shm")) -> None:
    """Remove files that killed ranks of MPICH left: this user's, made after ``since``, open in no process. Local."""
    files = set()
    for path in directory.glob("mpich*"):
        with contextlib.suppress(OSError):
            facts = path.stat()
            if facts.st_uid == os.geteuid() and facts.st_ctime >= since:
                files.add(str(path))
    for name in unheld(files):
        logger.debug("removing %s, left by killed ranks", name)
        with contextlib.suppress(OSError):
            Path(name).unlink()


def unheld(files: Iterable[str]) -> set[str]:
    """Return those of some files that no process has mapped or open. Local."""
    left = set(files)
    processes = sorted((int(path.name) for path in Path("/proc").glob("[0-9]*")), reverse=True)
    for process in processes:  # the youngest first: ranks have files, and most processes have none
        if not left:
            break
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process}/maps").read_text()
            names = tuple(left)
            left -= {line.split(maxsplit=5)[-1] for line in text.splitlines() if line.endswith(names)}
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    left.discard(str(link.readlink()))
    return left
