# SPDX-License-Identifier: Apache-2.0
"""A Python that has imported already does what a new one does."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pblasmp import launch
from tests.helpers.command_line import wait_for
from tests.helpers.mpi import ROOT
from tests.helpers.warm import Interpreter

SCRIPTS = {
    "arguments": ["-c", "import os, sys; print(sys.argv, sys.path[0], os.getcwd(), __name__)", "a", "-b"],
    "file": ["script.py", "a"],
    "module": ["-m", "json.tool", "--help"],
    "environment": ["-c", "import os; print(os.environ['SEEN'], os.getenv('HOME'))"],
    "input": ["-c", "print(input())"],
    "status": ["-c", "raise SystemExit(3)"],
    "exception": ["-c", "print(1); 1 / 0"],
    "interrupt": ["-c", "raise KeyboardInterrupt"],
    "signal": ["-c", "import os; os.kill(os.getpid(), 9)"],
    "warning": ["-W", "error", "-c", "import warnings; warnings.warn('oh')"],
    "thread": ["-c", "import threading, time; threading.Thread(target=lambda: print(time.sleep(0.1))).start()"],
    "unbuffered": ["-u", "-c", "import os; print('out'); os._exit(0)"],
    "module in a module": ["-u", "-m", "mpi4py", "-m", "json.tool", "--help"],
    "C exit": ["-c", "import ctypes; c = ctypes.CDLL(None); c.printf(b'%s', b'no end of line'); c.exit(3)"],
    "site": ["-c", "import sitecustomize; print(sitecustomize.__file__)"],
    "path": ["-c", "import of_this_test; print(of_this_test.X)"],
    "option": ["-X", "utf8", "-c", "import sys; print(sys.flags.utf8_mode)"],
    "BLAS threads": ["-c", "import numpy, threadpoolctl as t; print({x['num_threads'] for x in t.threadpool_info()})"],
}  # fmt: skip


@pytest.fixture(scope="module")
def warm():
    """The command of this session's interpreter."""
    return launch.interpreter()


@pytest.fixture
def environ(tmp_path):
    (tmp_path / "of_this_test.py").write_text("X = 5\n")
    (tmp_path / "script.py").write_text(
        "import sys; print(sys.argv, sys.path[0], __file__, __name__); 1 / 0\n"
    )
    return {**os.environ, "SEEN": "yes", "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}


def outcome(command, directory, environ):
    done = subprocess.run(
        command, cwd=directory, env=environ, input="in\n", capture_output=True, text=True, check=False, timeout=60
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr.replace(sys.executable, "python")


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_does_what_a_new_python_does(warm, tmp_path, environ, name):
    if name == "site":
        (tmp_path / "sitecustomize.py").write_text("")
    found, expected = (
        outcome([*python, *SCRIPTS[name]], tmp_path, environ) for python in (warm, [sys.executable])
    )
    assert found == expected


def test_it_has_imported_already(warm, tmp_path):
    seen = [sys.executable, "-c", "import sys; print('pblasmp.context' in sys.modules)"]
    assert outcome([*warm, *seen[1:]], tmp_path, None)[1] == "True\n"
    assert outcome(seen, tmp_path, None)[1] == "False\n"


@pytest.mark.parametrize("name", ["PYTHONOPTIMIZE", "PBLASMP_LOG", "MPI4PY_LIBMPI", "OPENBLAS_VERBOSE"])
def test_a_new_one_runs_where_a_variable_matters_at_the_start(warm, tmp_path, name):
    command = [*warm, "-c", "import sys; print('pblasmp.context' in sys.modules)"]
    assert outcome(command, tmp_path, {**os.environ, name: "1"})[1] == "False\n"


def test_a_new_one_runs_where_there_is_no_server(warm, tmp_path):
    command = [warm[0], str(tmp_path / "socket"), sys.executable, "-c", "import sys; print(len(sys.argv))"]
    assert outcome(command, tmp_path, None) == (0, "1\n", "")


@pytest.fixture
def sleeper(warm, tmp_path):
    """A client, and the process that is forked for it, which prints the signals that it gets."""
    script = (
        "import os, signal, time\n"
        "signal.signal(15, lambda *_: os.write(1, b'got 15\\n'))\n"
        "print(os.getpid(), flush=True)\n"
        "while True: time.sleep(0.01)"
    )
    environ = {**os.environ, "PBLASMP_JOB": "12ab"}
    with subprocess.Popen([*warm, "-c", script], stdout=subprocess.PIPE, text=True, env=environ) as client:
        yield client, int(client.stdout.readline())
        client.kill()


def test_the_fork_gets_signals_is_found_by_its_job_and_dies_with_its_client(sleeper):
    client, pid = sleeper
    assert b"\0PBLASMP_JOB=12ab" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    client.terminate()
    assert client.stdout.readline() == "got 15\n"
    client.kill()
    assert client.wait() == -signal.SIGKILL
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), 10)


def test_the_client_dies_as_its_fork(sleeper):
    client, pid = sleeper
    os.kill(pid, signal.SIGUSR1)
    assert client.wait(10) == -signal.SIGUSR1


def test_a_lost_server_is_no_success(warm, tmp_path):
    """Of a server that is itself a fork: it has imported already."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join(warm)} "$@"\n')
    python.chmod(0o755)
    interpreter = Interpreter(os.environ)
    interpreter._python = str(python)
    command = [*interpreter(), "-c", "import time; print('here', flush=True); time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout.readline() == "here\n"
        interpreter.close()
        assert client.wait(10) == 1


def test_ranks_of_a_fork_are_forks(warm):
    script = "from pblasmp import launch; print(launch.interpreter())"
    assert outcome([*warm, "-c", script], ROOT, None)[1] == f"{warm}\n"
