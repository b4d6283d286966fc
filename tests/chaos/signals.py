# SPDX-License-Identifier: Apache-2.0
"""Signals at random times of the command line's life: ``python -m tests.chaos.signals --count 500 --seed 1``.

Whenever SIGINT, SIGTERM or SIGHUP comes, the command ends within seconds, without a traceback, and leaves neither a
process nor a file. While Python itself starts, Ctrl-C may do what it does to any Python.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from pblasmp.launch import unheld

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "matmul --size 64 -n 2 -o D.npy",
    "matmul --size 64 -n 1 -o D.npy --check",
    "run grid-1x2",
    "check grid-2x2",
    "show grid-2x2",
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_SECONDS = 20


def _default_signals() -> None:
    for number in SIGNALS:  # what is ignored here would be ignored there
        signal.signal(number, signal.SIG_DFL)


def starts(pid: int) -> bool:
    """Whether Python still starts in the process: it catches SIGINT, and nobody SIGTERM."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                caught = int(line.split()[1], 16)
                return bool(caught >> (signal.SIGINT - 1) & 1) and not caught >> (signal.SIGTERM - 1) & 1
    return False


def processes(mark: str) -> list[str]:
    """Return the processes that have ``mark`` in their environment."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (directory / "environ").read_bytes():
                found.append(directory.name)
    return found


def shared_memory() -> set[str]:
    """Return MPICH's files in /dev/shm that no process has mapped or open."""
    directory = Path("/dev/shm")
    return unheld(str(path) for path in directory.glob("mpich*"))


def trial(
    directory: Path, command: str, number: signal.Signals, delay: float, *, alone: bool = False
) -> tuple[str, str]:
    """Send one signal after ``delay`` seconds; return what became of the command, and what was wrong with that."""
    mark = f"PBLASMP_CHAOS={directory}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PBLASMP_CHAOS": str(directory)}
    before = shared_memory()
    with subprocess.Popen(
        [sys.executable, "-m", "pblasmp", *command.split()],
        cwd=directory, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=_default_signals,  # noqa: PLW1509 (no thread runs)
    ) as process:  # fmt: skip
        time.sleep(delay)
        early = starts(process.pid)
        process.send_signal(number)
        start = time.monotonic()
        try:
            err = process.communicate(timeout=END_SECONDS)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            return "hung", f"still running {END_SECONDS} s after {number.name}"
    seconds = time.monotonic() - start
    status = process.returncode
    outcome = {0: "done before", 128 + number: "ended", -number: "killed"}.get(status, f"status {status}")
    (directory / "D.npy").unlink(missing_ok=True)
    deadline = time.monotonic() + 5
    while (left := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    wrong = []
    if early and number == signal.SIGINT and status not in (0, 128 + number):
        outcome = "while Python started"
    elif outcome.startswith("status"):
        wrong.append(f"{outcome}, stderr {err!r}")
    elif "Traceback" in err or "Exception ignored" in err:
        wrong.append(err)
    if left:
        wrong.append(f"processes left: {left}")
    if files := [path.name for path in directory.iterdir()]:
        wrong.append(f"files left: {files}")
    if alone and (new := shared_memory() - before):
        wrong.append(f"in /dev/shm: {sorted(new)}")
    if seconds > END_SECONDS / 2:
        wrong.append(f"took {seconds:.1f} s")
    return outcome, "; ".join(wrong)


def undisturbed(command: str) -> float:
    """Return how many seconds a command takes here."""
    with tempfile.TemporaryDirectory(prefix="pblasmp-chaos-") as directory:
        start = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "pblasmp", *command.split()],
            cwd=directory, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=True,
        )  # fmt: skip
        return time.monotonic() - start


def campaign(count: int, seed: int, *, alone: bool = False) -> tuple[Counter[str], list[str]]:
    """Send ``count`` signals; return how often what happened, and every trial that went wrong.

    A signal comes at any time of a command's life, or just after it. Where nobody else runs MPI (``alone``), files
    that are left in /dev/shm are these trials'.
    """
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    faults = []
    seconds: dict[str, float] = {}
    for number in range(count):
        command, which, part = rng.choice(COMMANDS), rng.choice(SIGNALS), rng.uniform(0, 1.1)
        if command not in seconds:
            seconds[command] = undisturbed(command)
        delay = part * seconds[command]
        with tempfile.TemporaryDirectory(prefix="pblasmp-chaos-") as directory:
            outcome, wrong = trial(Path(directory), command, which, delay, alone=alone)
        outcomes[outcome] += 1
        if wrong:
            faults.append(f"trial {number}, {command}, {which.name} after {delay:.3f} s: {wrong}")
    return outcomes, faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--alone", action="store_true", help="nobody else runs MPI here: check /dev/shm, too")
    given = parser.parse_args()
    print(f"seed {given.seed}")
    outcomes, faults = campaign(given.count, given.seed, alone=given.alone)
    print(", ".join(f"{name} {times}" for name, times in outcomes.most_common()))
    print("\n".join(faults) or "nothing went wrong")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
