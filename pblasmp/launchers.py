# SPDX-License-Identifier: Apache-2.0
"""The launchers of MPI ranks: how each is recognized, called and configured. One row per launcher.

A row of ``LAUNCHERS`` is all that pblasmp knows about a launcher, both as the one that started this process and as the
one that the command line starts ranks with.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .errors import LibraryNotFoundError, install

PROCESSES = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "prun", "srun", "flux")
"""What the processes of launchers are called."""

_MPIRUN = "PBLASMP_MPIRUN"  # a launcher named by the user
_MPI_LIBRARY = re.compile(r"/libmpi(ch|_abi)?[-.][^/]*$", re.MULTILINE)


class LauncherKind(NamedTuple):
    """What pblasmp knows about a launcher. A row without ``answer`` is only recognized, never started.

    Attributes:
        kind: a short name.
        name: what its users call it.
        rank, size: the environment variables of a rank; size is "" if the launcher sets none.
        here: the variable with the number of ranks on this machine, "" if there is none. In Slurm's, as in "2(x3),1",
            there are those of all machines.
        least: the smallest size that counts: srun gives an interactive shell one task.
        answer: a pattern in what ``mpirun --version`` prints.
        library: how the version text of its MPI library begins.
        options: arguments before ``-n``.
        root_options: arguments before all others if root starts it.
        environment: variables set unless the user has set them.
        hydra: the name of a program in the same directory to start instead, if it exists.
    """

    kind: str
    name: str
    rank: str = ""
    size: str = ""
    here: str = ""
    least: int = 1
    answer: str = ""
    library: str = ""
    options: tuple[str, ...] = ()
    root_options: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    hydra: str = ""


# The first row whose variables are set decides: mpirun inside a Slurm job comes before Slurm.
LAUNCHERS = (
    LauncherKind(
        "openmpi",
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        answer="Open MPI|OpenRTE|PRRTE",
        library="Open MPI",
        options=("--oversubscribe", "--bind-to", "none"),
        root_options=("--allow-run-as-root",),
        environment={"OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_osc": "^ucx"},
    ),
    LauncherKind(
        "intel",
        "Intel MPI",
        answer=r"Intel\(R\) MPI",
        library="Intel(R) MPI",
        hydra="mpiexec.hydra",
    ),
    LauncherKind(
        "mpich", "Hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", answer="HYDRA", library="MPICH"
    ),
    LauncherKind(
        "slurm", "Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", least=2
    ),
    LauncherKind("pmix", "PMIx", "PMIX_RANK"),
)
_UNKNOWN = LauncherKind("other", "an unknown launcher")


class Surroundings(NamedTuple):
    """The launcher that started this process, this process's rank, and how many there are: None if it does not say."""

    name: str
    rank: int
    size: int | None

    @property
    def title(self) -> str:
        """The launcher and the MPIs that it belongs to."""
        return "Hydra (of MPICH or Intel MPI)" if self.name == "Hydra" else f"{self.name}'s launcher"

    @property
    def variable(self) -> str:
        """The environment variable in which the launcher has put the rank."""
        return next(row.rank for row in LAUNCHERS if row.name == self.name)


def surroundings(environ: Mapping[str, str] = os.environ) -> Surroundings | None:
    """Return which launcher started this process and with how many ranks, None if none did. Local."""
    for row in LAUNCHERS:
        rank = _count(environ.get(row.rank, ""))
        size = _count(environ.get(row.size, ""))
        if rank is None or (size is None) != (not row.size):
            continue
        return None if size is not None and size < row.least else Surroundings(row.name, rank, size)
    return None


def ranks_here(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return how many processes the launcher of this one, or torchrun, has started on this machine. Local.

    None if it does not say, or there is none.
    """
    around = surroundings(environ)
    if around is None:
        return _count(environ.get("LOCAL_WORLD_SIZE", "")) or None  # torchrun's
    said = environ.get(next(row.here for row in LAUNCHERS if row.name == around.name), "")
    machines = re.findall(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?(?:,|$)", said)
    left = _count(environ.get("SLURM_NODEID", "")) or 0 if "(" in said or "," in said else 0
    for ranks, times in machines:
        left -= int(times or 1)
        if left < 0:
            return int(ranks) or None
    return None


def ancestors() -> Iterator[tuple[int, str]]:
    """Yield the number and the name of this process's parent, of the parent's parent and so on. Local."""
    pid = os.getppid()
    while pid > 1:
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            return
        yield pid, name
        pid = int(rest.split()[1])


def parent_rank(around: Surroundings) -> int | None:
    """Return the process that is the rank ``around`` and that this process is a child of; None if there is none. Local.

    A launcher lets each rank initialize MPI once. A rank's child inherits the rank's environment, but must not do so:
    MPI would end it, or it would wait forever.
    """
    variable = f"{around.variable}={around.rank}".encode()
    for pid, name in ancestors():
        if name in PROCESSES:
            return None
        try:
            if variable not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return None
            if _MPI_LIBRARY.search(Path(f"/proc/{pid}/maps").read_text()):
                return pid
        except OSError:
            return None
    return None


def _count(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def kind_of_library(version: str) -> str | None:
    """Return the kind of launcher that an MPI library with this version text goes with, None if unknown. Local."""
    return next((row.kind for row in LAUNCHERS if row.library and version.startswith(row.library)), None)


@dataclass(frozen=True, slots=True)
class Launcher:
    """An MPI launcher: where it is, which row of ``LAUNCHERS`` describes it and what it calls its version."""

    path: Path
    kind: str
    version: str

    def command(self, nranks: int, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on ``nranks`` ranks, which may outnumber the cores. Local."""
        row = self._row
        as_root = row.root_options if os.geteuid() == 0 else ()
        return [str(self.path), *as_root, *row.options, "-n", str(nranks), *argv]

    def environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return ``environ`` with what this launcher needs; what the user has set stays. Local."""
        # Intel's and Debian's scripts call programs of their directory.
        path = os.pathsep.join(p for p in (str(self.path.parent), environ.get("PATH")) if p)
        environment = {**self._row.environment, **environ, "PATH": path}
        if self.kind == "openmpi" and self.version.startswith("5") and "SLURM_JOB_ID" not in environ:
            environment.setdefault("OMPI_MCA_btl", "self,sm")  # one node: starts twice as fast
        return environment

    @property
    def _row(self) -> LauncherKind:
        return next((row for row in LAUNCHERS if row.kind == self.kind), _UNKNOWN)


@dataclass(frozen=True, slots=True)
class NoLauncher(Launcher):
    """Starts a single process without MPI."""

    path: Path = Path()
    kind: str = "none"
    version: str = ""

    def command(self, nranks: int, argv: Sequence[str]) -> list[str]:  # noqa: ARG002 (there is one)
        """Return ``argv``. Local."""
        return [*argv]

    def environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return ``environ``. Local."""
        return dict(environ)


def find_launcher(environ: Mapping[str, str] = os.environ) -> Launcher:
    """Find the MPI launcher: the one that PBLASMP_MPIRUN names, else this Python's, else the first on PATH. Local.

    LibraryNotFoundError if there is none, or it does not run.
    """
    named = environ.get(_MPIRUN)
    if named:
        return _identify(Path(named), environ)
    here = Path(sys.executable).parent
    path = next(_candidates([here, *(Path(p) for p in environ.get("PATH", "").split(os.pathsep) if p)]), None)
    if path is None:
        raise LibraryNotFoundError(
            f"no MPI launcher: neither mpirun nor mpiexec is in {here} or on PATH. "
            f"Get one with {install('mpi')}, name one with {_MPIRUN}, or use one rank (-n 1), which needs no MPI"
        )
    return _identify(path, environ)


def _candidates(directories: Sequence[Path]) -> Iterator[Path]:
    for directory in directories:
        for name in ("mpirun", "mpiexec"):
            path = directory / name
            if path.is_file() and os.access(path, os.X_OK):
                yield path


def _identify(path: Path, environ: Mapping[str, str]) -> Launcher:
    """Ask the launcher at ``path`` for its version and find its row by the answer."""
    import subprocess  # only here: ranks, which only ask who started them, do without it

    environment = {**environ, "PATH": f"{path.parent}{os.pathsep}{environ.get('PATH', '')}"}
    try:
        answer = subprocess.run(
            [path, "--version"], env=environment, capture_output=True, text=True, timeout=30, check=True,
            stdin=subprocess.DEVNULL,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "strerror", None) or error
        raise LibraryNotFoundError(f"the MPI launcher {path} cannot be run: {why}") from error
    row = next((row for row in LAUNCHERS if row.answer and re.search(row.answer, answer)), _UNKNOWN)
    if row.hydra and path.with_name(row.hydra).is_file():
        path = path.with_name(row.hydra)
    words = answer.replace(",", " ").split()
    return Launcher(path, row.kind, next((w for w in words if w[0].isdecimal() and "." in w), ""))
