# SPDX-License-Identifier: Apache-2.0
"""The command line in this process, and its ranks among those that are kept: as it runs, without what a start takes."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pblasmp.cli import main, reports
from pblasmp.launch import Job
from tests.helpers.mpi import run_on_one_node


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until something is true. Local."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def run_here(
    arguments: Sequence[object], patch: pytest.MonkeyPatch, captured: pytest.CaptureFixture[str]
) -> subprocess.CompletedProcess[str]:
    """Run ``pblasmp`` with these arguments in this process and return what it would end with. Local."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    patch.setattr(sys, "argv", ["pblasmp", *map(str, arguments)])
    status: Any = None
    try:
        main()
    except SystemExit as end:
        status = end.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(sys.argv, status, *captured.readouterr())


def kept_ranks(argv: list[str], nranks: int, output: Path, **options: Any) -> Job | _KeptRanks:
    """Return a job of the command line on kept ranks, in the place of ``Job``. Local.

    A rank alone is started: it is one without MPI.
    """
    return Job(argv, nranks, output, **options) if nranks == 1 else _KeptRanks(argv[-1], nranks)


class _KeptRanks:
    def __init__(self, directory: str, nranks: int) -> None:
        self._directory, self._nranks = directory, nranks

    def wait(self, timeout: float | None = None) -> int:
        return max(run_on_one_node(do_as_ordered, self._nranks, directory=self._directory))

    def __enter__(self) -> _KeptRanks:  # noqa: PYI034 (typing.Self is newer than the oldest Python)
        return self

    def __exit__(self, *error: object) -> None:
        pass


def do_as_ordered(comm: Any, directory: str) -> int:
    """Do what a rank does that the command line has started, and return its exit status. Collective over ``comm``."""
    logger = logging.getLogger("pblasmp")
    before = list(logger.handlers)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        try:
            return reports.work_here(Path(directory))
        finally:
            logger.handlers[:] = before
