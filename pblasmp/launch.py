# SPDX-License-Identifier: Apache-2.0
"""Starting MPI ranks: finding the launcher, its command and environment, and ending what was started.

Three families of launcher are known: MPICH's Hydra, Intel MPI's Hydra and Open MPI's mpirun (PRRTE). The
command line and the tests start their ranks through :class:`Job`, which leaves no process behind however it
ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

from .errors import LibraryNotFoundError

__all__ = ["Job", "Launcher", "Surroundings", "find_launcher", "python_environment", "surroundings"]

Kind = Literal["mpich", "intel", "openmpi", "other"]

_MPIRUN = "PBLASMP_MPIRUN"  # a launcher named by the user
_JOB = "PBLASMP_JOB"  # carried by every process of a job, so that all of them can be found again


class Surroundings(NamedTuple):
    """The launcher that this process was started by, and its place among the others."""

    name: str
    rank: int
    size: int


def surroundings(environ: Mapping[str, str] = os.environ) -> Surroundings | None:
    """Say which launcher started this process and with how many ranks, or None when none did. Local.

    Slurm's srun counts from two tasks on: one task is what an interactive shell has.
    """
    for name, of_rank, of_size, least in (
        ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", 1),
        ("Hydra", "PMI_RANK", "PMI_SIZE", 1),
        ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", 2),
    ):
        rank, size = environ.get(of_rank, ""), environ.get(of_size, "")
        if rank.isdigit() and size.isdigit() and int(size) >= least:
            return Surroundings(name, int(rank), int(size))
    return None


@dataclass(frozen=True, slots=True)
class Launcher:
    """An MPI launcher: where it is, which family it belongs to and what it calls itself."""

    path: Path
    kind: Kind
    version: str

    def command(self, nranks: int, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on ``nranks`` ranks, which may outnumber the cores. Local."""
        options: list[str] = []
        if self.kind == "openmpi":
            options = ["--oversubscribe", "--bind-to", "none"]
            if os.geteuid() == 0:
                options.insert(0, "--allow-run-as-root")
        return [str(self.path), *options, "-n", str(nranks), *argv]

    def environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return ``environ`` with what this launcher needs; what the user has set stays. Local."""
        environment = dict(environ)
        # Intel's and Debian's scripts call programs that lie beside them.
        environment["PATH"] = os.pathsep.join(p for p in (str(self.path.parent), environ.get("PATH")) if p)
        if self.kind == "openmpi":
            environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
            environment.setdefault("OMPI_MCA_osc", "^ucx")
            if self.version.startswith("5") and "SLURM_JOB_ID" not in environ:
                environment.setdefault("OMPI_MCA_btl", "self,sm")  # one node: starts twice as fast
        return environment


def find_launcher(environ: Mapping[str, str] = os.environ) -> Launcher:
    """Find the MPI launcher: the one named by PBLASMP_MPIRUN, else beside this Python, else on PATH. Local.

    Raises:
        LibraryNotFoundError: there is none, or it does not run.
    """
    named = environ.get(_MPIRUN)
    if named:
        return _identify(Path(named), environ)
    here = Path(sys.executable).parent
    for directory in [here, *(Path(p) for p in environ.get("PATH", "").split(os.pathsep) if p)]:
        for name in ("mpirun", "mpiexec"):
            path = directory / name
            if path.is_file() and os.access(path, os.X_OK):
                return _identify(path, environ)
    raise LibraryNotFoundError(
        f"no MPI launcher: neither mpirun nor mpiexec is in {here} or on PATH. "
        f"pip install 'pblasmp[mpi]' brings one, or {_MPIRUN} can name it"
    )


def _identify(path: Path, environ: Mapping[str, str]) -> Launcher:
    """Ask the launcher at ``path`` for its version and tell its family by the answer."""
    environment = {**environ, "PATH": f"{path.parent}{os.pathsep}{environ.get('PATH', '')}"}
    try:
        answer = subprocess.run(
            [path, "--version"], env=environment, capture_output=True, text=True, timeout=30, check=True,
            stdin=subprocess.DEVNULL,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise LibraryNotFoundError(f"the MPI launcher {path} does not run: {error}") from error
    words = answer.replace(",", " ").split()
    version = next((w for w in words if w[0].isdigit() and "." in w), "")
    if "Intel(R) MPI" in answer:
        hydra = path.with_name("mpiexec.hydra")
        return Launcher(hydra if hydra.is_file() else path, "intel", version)
    if "Open MPI" in answer or "OpenRTE" in answer or "PRRTE" in answer:
        return Launcher(path, "openmpi", version)
    return Launcher(path, "mpich" if "HYDRA" in answer else "other", version)


class Job:
    """Ranks of one MPI job, started by a launcher and ended together; a context manager. Local.

    The launcher gets a session of its own, so that a Ctrl-C in the terminal reaches this process alone, which
    then ends the job in order. Should this process be killed, the launcher gets SIGTERM from the kernel.

    Args:
        argv: the command that each rank runs.
        nranks: how many ranks.
        output: file that takes what launcher and ranks print (a pipe that nobody empties would block them).
        environ: the environment; what the launcher needs is added.
        launcher: default: the one that :func:`find_launcher` finds.

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
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                self.launcher.command(nranks, argv),
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

    def tail(self, lines: int = 20) -> str:
        """Return the last lines that launcher and ranks printed. Local."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])

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


def python_environment() -> dict[str, str]:
    """Return an environment in which a new Python imports from where this one does, and nowhere else. Local."""
    here = {"", str(Path.cwd())} & set(sys.path)
    return {**os.environ, **({} if here else {"PYTHONSAFEPATH": "1"})}


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _terminate_with_parent() -> None:
    """In the child, between fork and exec: have the kernel send SIGTERM when the parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
