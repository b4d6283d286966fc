# SPDX-License-Identifier: Apache-2.0
"""Which test runs which lines, on all ranks: a pytest plugin, and a tracer that a copy of pblasmp starts on import.

The plugin writes the number of the test that runs into a file; every process that imports the copy, ranks kept from
earlier tests and programs that tests start among them, reads it there and appends what it runs to a log.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

VARIABLE = "PBLASMP_MUTATION"  # the directory of both files
RANKS = "ranks"  # a file in it: the tests are run on real ranks
ROOT = f"{Path(__file__).parents[2]}/"
_tests: list[str] = []
_phases: list[tuple[float, str]] = []


def trace() -> None:
    """Append the lines of the package that this process runs from now on to the log."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        return
    log = os.open(f"{directory}/lines", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with Path(directory, "test").open("rb") as file:
        number = mmap.mmap(file.fileno(), 4, prot=mmap.PROT_READ)
    seen: set[tuple[bytes, str, int]] = set()

    def line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        key = number[:4], frame.f_code.co_filename, frame.f_lineno
        if key not in seen:
            seen.add(key)
            path = key[1].removeprefix(ROOT)
            os.write(log, f"{int.from_bytes(key[0], 'little')}\t{path}\t{key[2]}\n".encode())
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        return line if frame.f_code.co_filename.startswith(f"{ROOT}pblasmp/") else None

    threading.settrace(call)
    sys.settrace(call)


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    _tests.append(nodeid)
    with Path(os.environ[VARIABLE], "test").open("r+b") as file:
        file.write(len(_tests).to_bytes(4, "little"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _phases.append((report.duration, report.outcome))


def pytest_runtest_logfinish(nodeid: str) -> None:
    seconds = sum(duration for duration, _ in _phases)
    outcome = next((outcome for _, outcome in _phases if outcome != "passed"), "passed")
    _phases.clear()
    with Path(os.environ[VARIABLE], "tests").open("a") as file:
        file.write(f"{len(_tests)}\t{seconds:.3f}\t{outcome}\t{nodeid}\n")


class Record:
    """What was recorded: the seconds of every test that passed, and the tests that run a line."""

    def __init__(self, directories: list[Path]) -> None:
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.on_ranks: set[str] = set()
        for directory in directories:
            names: dict[str, str] = {}
            for entry in (directory / "tests").read_text().splitlines():
                number, seconds, outcome, name = entry.split("\t", 3)
                if outcome == "passed":
                    names[number] = name
                    self.seconds[name] = float(seconds)
            if (directory / RANKS).exists():
                self.on_ranks.update(names.values())
            for entry in (directory / "lines").read_text().splitlines():
                number, path, line = entry.split("\t")
                if number in names:
                    self.lines[path][int(line)].add(names[number])

    def tests(self, path: str, lines: range | None) -> list[str]:
        """Return the tests that run one of the lines, or any line of the file; the fastest first."""
        of = self.lines[path]
        chosen = of.values() if lines is None else (of[line] for line in lines if line in of)
        return sorted(set().union(*chosen), key=lambda name: (self.seconds[name], name))
