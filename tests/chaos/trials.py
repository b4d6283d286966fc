# SPDX-License-Identifier: Apache-2.0
"""Trials: what is tried, and what must follow."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from pblasmp import launch
from pblasmp.launch import Job
from tests.chaos.program import CATCHABLE, KINDS
from tests.helpers import inside
from tests.helpers.mpi import NODES, ROOT, launcher_on

LIMIT = 10.0  # seconds from the fault to the end of the job
WHOLE_LIMIT = 120.0  # seconds of a job, its start included, on a machine that is busy


def ordered(seed: int) -> dict[str, Any]:
    """Return what the trial of a seed is."""
    choose = random.Random(seed)
    nranks = choose.randint(2, 6)
    return {
        "seed": seed,
        "ranks": nranks,
        "victim": choose.randrange(nranks),
        "kind": choose.choice(KINDS),
        "catches": choose.random() < 0.5,
        "with": choose.random() < 0.7,
        "calls": choose.randint(3, 20),
    }


def tried(seed: int, limit: float = LIMIT) -> tuple[dict[str, Any], list[str]]:
    """Run the trial of a seed; return what was tried and what was wrong with how it ended."""
    orders = ordered(seed)
    nranks: int = orders["ranks"]
    with tempfile.TemporaryDirectory(prefix="pblasmp-chaos-") as name:
        directory = Path(name)
        (directory / "trial.json").write_text(json.dumps(orders))
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [*launch.interpreter(), "-m", "tests.chaos.program", name]
        launcher = launcher_on(NODES, nranks)
        with Job(command, nranks, directory / "output", environ=environ, launcher=launcher) as job:
            status = job.wait(WHOLE_LIMIT)
            ended = time.monotonic()
            if status is None:
                show_stacks(job, directory, nranks)
            orphans = left_of(job)
            told = [lines(directory / f"rank{rank}.jsonl") for rank in range(nranks)]
            faults = list(judged(orders, status, ended, told, limit))
            if orphans:
                faults.append(f"{orphans} processes of the job are left")
            if status == 0:
                known = {"trial.json", "output", "a.npy"} | {f"rank{rank}.jsonl" for rank in range(nranks)}
                faults += [f"{path.name} is left" for path in directory.iterdir() if path.name not in known]
            if faults:
                faults.append(job.tail(60))
    return orders, faults


def show_stacks(job: Job, directory: Path, nranks: int) -> None:
    """Have every rank print where it stands."""
    ranks = {each["pid"] for rank in range(nranks) for each in lines(directory / f"rank{rank}.jsonl")[:1]}
    for pid in ranks & set(inside.processes(job)):
        os.kill(pid, signal.SIGUSR1)
    time.sleep(1)


def left_of(job: Job) -> int:
    """Return how many processes of a job that has ended are still there after two seconds."""
    deadline = time.monotonic() + 2
    while (left := len(inside.processes(job))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def lines(path: Path) -> list[dict[str, Any]]:
    """Return what a rank has written down."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def judged(
    orders: dict[str, Any], status: int | None, ended: float, told: list[list[dict[str, Any]]], limit: float
) -> list[str]:
    """Return what is wrong with the end of a trial."""
    faults = []
    victim = orders["victim"]
    met = next((line["at"] for line in told[victim] if line["what"] == "fault"), None)
    if status is None:
        faults.append("it hangs")
    elif met is not None and ended - met > limit:
        faults.append(f"it ended {ended - met:.1f} s after the fault")
    for rank, each in enumerate(told):
        for line in each:
            if line["what"] == "wrong":
                faults.append(f"rank {rank}: {line['call']} returned wrong numbers, or should have raised")
            if line["what"] == "held":
                faults.append(
                    f"rank {rank}: descriptors and threads: {line['before']}, now {line['after']}, "
                    f"with {', '.join(line['new'])}"
                )
            if line["what"] == "error" and rank != victim and f"rank {victim}" not in line["text"]:
                faults.append(f"rank {rank}: an error that does not name rank {victim}: {line['text']}")
    expected = expected_status(orders, met is not None)
    if expected is not None and status is not None and (status == 0) != (expected == 0):
        faults.append(f"status {status}")
    if faults:
        faults += [f"the alarm rang in {line['where']}" for line in told[victim] if "where" in line]
    if status == 0:
        faults += [
            f"rank {rank} has not come to its end"
            for rank, each in enumerate(told)
            if not any(line["what"] == "end" for line in each)
        ]
    return faults


def expected_status(orders: dict[str, Any], met: bool) -> int | None:
    """Return 0 or 1 (anything but 0) where the status is sure, else None."""
    kind = orders["kind"]
    if kind in ("none", "late", "child", "argument") or (kind in CATCHABLE and not met):
        return 0
    if kind in ("exit", "_exit", "kill") or (kind in CATCHABLE and not orders["catches"]):
        return 1
    if kind in CATCHABLE - {"user code"} and orders["catches"]:
        return 0
    return None
