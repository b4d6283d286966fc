# SPDX-License-Identifier: Apache-2.0
"""Finding the launcher, its command line, and that no process outlives its job, with scripts as launchers."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pblasmp.errors import LibraryNotFoundError
from pblasmp.launch import (
    Job,
    Launcher,
    Surroundings,
    find_launcher,
    python_command,
    remove_shared_memory,
    surroundings,
)
from pblasmp.launchers import LAUNCHERS, LauncherKind, ranks_here
from tests.helpers.command_line import wait_for

ROOT = Path(__file__).parents[2]

VERSIONS = {
    "mpich": "HYDRA build details:\n    Version:                                 5.0.2\n",
    "openmpi": "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)\n",
    "other": "mpirun of its own kind, 3.1\n",
}


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def launcher_script(path: Path, kind: str = "mpich") -> Path:
    """A launcher that tells its version and otherwise runs the command once, whatever the number of ranks."""
    return script(
        path, f'if [ "$1" = --version ]; then printf \'{VERSIONS[kind]}\'; exit; fi\nshift 2\nexec "$@"'
    )


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """An environment with no launcher in it."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    return {"PATH": str(tmp_path / "usr")}


def test_the_launcher_beside_python_comes_first(nowhere, tmp_path):
    beside = launcher_script(tmp_path / "venv" / "mpirun")
    launcher_script(tmp_path / "usr" / "mpirun", "openmpi")
    assert find_launcher(nowhere) == Launcher(beside, "mpich", "5.0.2")


def test_path_comes_next_and_mpiexec_will_do(nowhere, tmp_path):
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr" / "mpirun").write_text("not a program")
    found = launcher_script(tmp_path / "usr" / "mpiexec", "openmpi")
    assert find_launcher(nowhere) == Launcher(found, "openmpi", "5.0.11")


def test_a_named_launcher_beats_all(nowhere, tmp_path):
    launcher_script(tmp_path / "venv" / "mpirun")
    mine = launcher_script(tmp_path / "mine", "other")
    assert find_launcher({**nowhere, "PBLASMP_MPIRUN": str(mine)}) == Launcher(mine, "other", "3.1")


def test_intel_is_started_by_its_hydra(nowhere, tmp_path):
    launcher_script(tmp_path / "venv" / "mpirun", "intel")
    hydra = launcher_script(tmp_path / "venv" / "mpiexec.hydra", "intel")
    assert find_launcher(nowhere) == Launcher(hydra, "intel", "2021.18.1")


def test_no_launcher(nowhere):
    with pytest.raises(LibraryNotFoundError, match=r"pip install .*pblasmp\[mpi\].*-n 1"):
        find_launcher(nowhere)


def test_a_launcher_that_does_not_run(nowhere, tmp_path):
    script(tmp_path / "usr" / "mpirun", "exit 3")
    with pytest.raises(LibraryNotFoundError, match="usr/mpirun cannot be run"):
        find_launcher(nowhere)
    with pytest.raises(LibraryNotFoundError, match=r"none cannot be run: No such file or directory$"):
        find_launcher({**nowhere, "PBLASMP_MPIRUN": str(tmp_path / "none")})


def test_commands(monkeypatch):
    path = Path("/x/mpirun")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert Launcher(path, "mpich", "5").command(4, ["a"]) == ["/x/mpirun", "-n", "4", "a"]
    assert "--allow-run-as-root" in Launcher(path, "openmpi", "5").command(4, ["a"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert Launcher(path, "openmpi", "5").command(2, ["a", "b"]) == [
        *("/x/mpirun", "--oversubscribe", "--bind-to", "none", "-n", "2", "a", "b")
    ]


def test_environments():
    path = Path("/x/mpirun")
    assert Launcher(path, "mpich", "5").environment({"PATH": "/bin"}) == {"PATH": "/x:/bin"}
    mine = {"OMPI_MCA_btl": "self,tcp"}
    found = Launcher(path, "openmpi", "5.0.11").environment(mine)
    assert found == {
        "PATH": "/x",
        "OMPI_MCA_btl": "self,tcp",
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    assert mine == {"OMPI_MCA_btl": "self,tcp"}
    assert "OMPI_MCA_btl" not in Launcher(path, "openmpi", "4.1").environment({})
    assert "OMPI_MCA_btl" not in Launcher(path, "openmpi", "5.0").environment({"SLURM_JOB_ID": "1"})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, Surroundings("Open MPI", 1, 4)),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, Surroundings("Hydra", 0, 1)),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}, Surroundings("Slurm", 3, 8)),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),  # srun --pty bash
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),  # inside sbatch
        ({"PMIX_RANK": "3"}, Surroundings("PMIx", 3, None)),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"PMIX_RANK": "2", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "2"}, Surroundings("Slurm", 2, 8)),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
            Surroundings("Hydra", 1, 2),
        ),
        ({"PMI_SIZE": "\u00b2", "PMI_RANK": "0"}, None),  # a superscript two, which isdigit() takes
        ({"PMI_SIZE": "2", "PMI_RANK": ""}, None),
    ],
)
def test_surroundings(environ, expected):
    assert surroundings(environ) == expected


@pytest.fixture
def launcher(tmp_path):
    return Launcher(launcher_script(tmp_path / "mpirun"), "mpich", "5")


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_job_runs_and_its_output_is_kept(launcher, tmp_path):
    with Job(["sh", "-c", "echo one; echo two >&2; exit 3"], 2, tmp_path / "out", launcher=launcher) as job:
        assert job.wait(20) == 3
        assert job.poll() == 3
    assert job.tail() == "one\ntwo"
    assert job.tail(1) == "two"


def test_shared_memory_of_killed_ranks_is_removed(tmp_path):
    for name in ("mpich_old", "mpich_left", "mpich_open", "mpich_mapped", "other"):
        (tmp_path / name).write_bytes(b"0" * 4096)
        if name == "mpich_old":
            time.sleep(0.05)
            since = time.time()
            time.sleep(0.05)
    with (tmp_path / "mpich_mapped").open("r+") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    with mapped, (tmp_path / "mpich_open").open():
        remove_shared_memory(since, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"mpich_old", "mpich_open", "mpich_mapped", "other"}


def test_a_job_removes_the_shared_memory_of_its_ranks(launcher, tmp_path):
    left = Path("/dev/shm") / f"mpich_test_{os.getpid()}"
    with Job(["sh", "-c", f"touch {left}; kill -9 $$"], 1, tmp_path / "out", launcher=launcher) as job:
        assert job.wait(20) != 0
    assert not left.exists()


SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "9", "SLURM_NODEID": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "8", "MPI_LOCALNRANKS": "4"}, 4),
        ({"PMI_RANK": "1", "PMI_SIZE": "8"}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "some"}, None),
        ({}, None),
        ({"MPI_LOCALNRANKS": "4"}, None),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3(x2),2,1"}, 2),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3(x3)"}, 3),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, None),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4"}, 4),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "many"}, None),
    ],
)
def test_ranks_of_this_machine(environ, expected):
    assert ranks_here(environ) == expected


def test_adding_a_launcher_is_adding_a_row(monkeypatch, nowhere, tmp_path):
    row = LauncherKind(
        "flux", "Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", answer="flux-core", options=("run",)
    )
    monkeypatch.setattr("pblasmp.launchers.LAUNCHERS", (*LAUNCHERS, row))
    assert surroundings({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"}) == Surroundings("Flux", 1, 2)
    mine = script(tmp_path / "flux", "echo flux-core 0.60.0")
    found = find_launcher({**nowhere, "PBLASMP_MPIRUN": str(mine)})
    assert found == Launcher(mine, "flux", "0.60.0")
    assert found.command(2, ["a"]) == [str(mine), "run", "-n", "2", "a"]


def test_a_new_python_imports_from_where_this_one_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "colorsys.py").write_text("print('mine')")
    command = python_command("import colorsys, sys; print(sys.argv[1:])", "a", "b")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "['a', 'b']\n"


def test_waiting_has_a_limit(launcher, tmp_path):
    with Job(["sleep", "60"], 1, tmp_path / "out", launcher=launcher) as job:
        assert job.wait(0.05) is None
    assert job.poll() == -signal.SIGTERM


def test_ending_takes_those_who_ignore_and_those_who_left_the_session(launcher, tmp_path):
    left = f"setsid sleep 61 & echo $! > {tmp_path}/left"
    stubborn = f"trap '' TERM; {left}; echo $$ > {tmp_path}/pid; sleep 60; sleep 60"
    with Job(["sh", "-c", stubborn], 1, tmp_path / "out", launcher=launcher) as job:
        wait_for((tmp_path / "pid").exists)
        start = time.monotonic()
        job.end(grace=0.2)
        assert time.monotonic() - start < 5
    for name in ("left", "pid"):
        assert not alive(int((tmp_path / name).read_text()))


def test_an_exception_ends_the_job(launcher, tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        Job(["sleep", "60"], 1, tmp_path / "out", launcher=launcher) as job,
    ):
        raise ZeroDivisionError
    assert job.poll() is not None


def test_the_launcher_ends_when_its_parent_is_killed(launcher, tmp_path):
    script = f"""
import os
from pathlib import Path
from pblasmp.launch import Job, Launcher
Job(["sleep", "60"], 1, Path("{tmp_path}/out"), launcher=Launcher(Path("{launcher.path}"), "mpich", "5"))
Path("{tmp_path}/started").touch()
import time; time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) as parent:
        wait_for((tmp_path / "started").exists)
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        parent.kill()
    assert len(children) == 1
    wait_for(lambda: not alive(int(children[0])))
