# SPDX-License-Identifier: Apache-2.0
"""``mpirun -n 4 python -m pytest tests/mpi``: all ranks run pytest, rank 0 reports, a failure ends the job.

Without mpirun, which is the usual way, the tests start their own ranks and nothing here does anything.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from pathlib import Path

import pytest

from pblasmp.launch import surroundings

LIMIT = 300.0  # seconds for one test

_errors: list[int] = []  # a copy of the file descriptor of errors


@pytest.hookimpl(trylast=True)  # after the terminal plugin's
def pytest_configure(config: pytest.Config) -> None:
    if surroundings() is None:
        return
    _errors.append(os.dup(2))  # while a test runs, pytest keeps what goes to 2 itself
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank > 0:
        reporter = config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            reporter._tw._file = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until the process ends)


def pytest_runtest_logstart(nodeid: str) -> None:
    if surroundings() is not None:
        faulthandler.dump_traceback_later(LIMIT, exit=True, file=_errors[-1])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A rank that fails a test leaves the others waiting, if there are any: say what happened and end the job."""
    if surroundings() is None or not report.failed:
        return
    from mpi4py import MPI

    if MPI.COMM_WORLD.size == 1:
        return
    rank = MPI.COMM_WORLD.rank
    time.sleep(0.2 * rank)  # what fails on all ranks is shown once
    print(f"\n[rank {rank}] {report.nodeid} FAILED\n{report.longreprtext}", file=sys.__stderr__, flush=True)
    MPI.COMM_WORLD.Abort(1)
