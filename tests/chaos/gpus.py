# SPDX-License-Identifier: Apache-2.0
"""Faults on real GPUs: ``python -m tests.chaos.gpus -n 2``. One job for each; several at once.

Every job must end within the limit, with the right status, and say which rank had which fault. The status is 1 where
one does not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from pblasmp import launch
from pblasmp.launch import Job
from tests.chaos.gpu_program import CASES, ONE_KERNEL
from tests.chaos.trials import left_of, lines, show_stacks
from tests.helpers.mpi import ROOT

LIMIT = 30.0  # seconds from the fault to the end of the job
WHOLE_LIMIT = 150.0  # seconds of a job, its start included
ENDINGS = 3  # times two seconds that killed processes are given to leave their GPUs


class Fault(NamedTuple):
    """What must follow.

    Attributes:
        words: patterns that the output must have; %d is the rank.
        told: patterns in the error of every rank that raises one; likewise.
        ends_well: whether the status is 0: None where both may be.
        everyone: every rank raises an error.
    """

    words: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    ends_well: bool | None = False
    everyone: bool = False


_RANK = r"\b[Rr]ank:? *%d\b"
FAULTS = {
    "kill": Fault((_RANK + "|RANK %d|signal 9|KILLED BY SIGNAL: 9",)),
    "_exit": Fault(ends_well=None),  # what status 0 without MPI_Finalize is, launchers see differently
    "raise": Fault(("FaultError: injected",)),
    "raise caught": Fault(ends_well=None),
    "return": Fault(("closing the context",), (r"\brank %d\b", "closing the context")),
    "trap": Fault((_RANK, "cudaError|719"), ("rank %d", "cudaError|719"), everyone=True),
    "trap caught": Fault((), ("rank %d", "cudaError|719"), ends_well=None, everyone=True),
    "nccl": Fault((_RANK, "NCCL"), ("rank %d", "NCCL"), everyone=True),
    "memory": Fault((), (), ends_well=True),
}  # fmt: skip

WORKS = "matmul gathered", "ar push", "ar one_shot", "ar nccl", "matmul default"
BETWEEN_HOSTS = (
    "matmul gathered",
    "matmul direct",
    "ar push",
    "ar nccl",
)  # work that needs no symmetric memory of all ranks
TRIALS: list[dict[str, Any]] = [
    {"fault": "memory", "work": "", "cases": CASES[:5]},
    {"fault": "memory", "work": "", "cases": CASES[5:]},
    {
        "fault": "memory",
        "work": "by messages",
        "cases": CASES[1:3],
        "environ": {"PBLASMP_RANKS_PER_NODE": "1"},
    },
    *({"fault": "kill", "work": work} for work in WORKS),
    *({"fault": "trap", "work": work} for work in WORKS),
    *({"fault": fault, "work": "matmul direct"} for fault in ("kill", "trap", "raise")),
    *({"fault": "raise", "work": work} for work in WORKS[::2]),
    *({"fault": "raise caught", "work": work, "n": n} for work in ONE_KERNEL for n in (512, 4096)),
    *({"fault": "kill", "work": work} for work in ONE_KERNEL),
    {"fault": "trap caught", "work": "ar nccl"},
    *({"fault": "nccl", "work": work} for work in WORKS[::2]),
    {"fault": "_exit", "work": "ar push"},
    {"fault": "return", "work": "matmul push"},
]


def tried(
    orders: Mapping[str, Any],
    nranks: int,
    limit: float = LIMIT,
    whole: float = WHOLE_LIMIT,
    wrapper: Sequence[str] = (),
) -> tuple[str, list[str], str]:
    """Run a trial; return how it ended in one line, what was wrong with that, and the end of its output.

    ``wrapper`` is a command that starts each rank.
    """
    with tempfile.TemporaryDirectory(prefix="pblasmp-chaos-") as name:
        directory = Path(name)
        (directory / "trial.json").write_text(json.dumps(dict(orders)))
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environ |= orders.get("environ", {})
        command = [*wrapper, *launch.interpreter(), "-m", "tests.chaos.gpu_program", name]
        with Job(command, nranks, directory / "output", environ=environ) as job:
            deadline = time.monotonic() + whole
            status = None
            while status is None and time.monotonic() < deadline:
                status = job.wait(0.25)
                met = met_at(told := [lines(directory / f"rank{rank}.jsonl") for rank in range(nranks)])
                if status is None and met is not None and time.monotonic() > met + limit + 5:
                    break
            ended = time.monotonic()
            if status is None:
                show_stacks(job, directory, nranks)
            orphans = 0 if status is None else min(left_of(job) for _ in range(ENDINGS))
            told = [lines(directory / f"rank{rank}.jsonl") for rank in range(nranks)]
            output = job.output.read_text(errors="replace")
            faults = judged(orders, status, ended, told, output, limit)
            if orphans:
                faults.append(f"{orphans} processes of the job are left")
            return summary(status, ended, told), faults, job.tail(70)


def met_at(told: list[list[dict[str, Any]]]) -> float | None:
    """Return when the last rank met its fault, None if it has not."""
    return next((line["at"] for line in told[-1] if line["what"] == "fault"), None)


def summary(status: int | None, ended: float, told: list[list[dict[str, Any]]]) -> str:
    """Return in one line how a trial ended."""
    met = met_at(told)
    words = [f"status {status}"]
    if met is not None:
        words.append(f"{ended - met:.1f} s after the fault")
    words += [
        f"{line['case']}: {line['kept']} errors, {line['broken']} broken contexts"
        for line in told[-1]
        if line["what"] == "survived"
    ]
    return ", ".join(words)


def judged(
    orders: Mapping[str, Any], status: int | None, ended: float, told: list[list[dict[str, Any]]], output: str,
    limit: float = LIMIT,
) -> list[str]:  # fmt: skip
    """Return what is wrong with the end of a trial."""
    fault, victim, met = FAULTS[orders["fault"]], len(told) - 1, met_at(told)
    faults = []
    if status is None:
        faults.append("it hangs")
    elif fault.ends_well is not None and (status == 0) != fault.ends_well:
        faults.append(f"status {status}")
    if orders["fault"] == "memory":
        survived = [line["case"] for line in told[victim] if line["what"] == "survived"]
        faults += [f"{case} was not tried to its end" for case in orders["cases"] if case not in survived]
    elif met is None:
        faults.append("the fault was never met")
    elif ended - met > limit:
        faults.append(f"it ended {ended - met:.1f} s after the fault")
    for rank, each in enumerate(told):
        faults += [f"rank {rank}: wrong: {line['case']}" for line in each if line["what"] == "wrong"]
        errors = [line["text"] for line in each if line["what"] == "error"]
        if fault.everyone and not errors:
            faults.append(f"rank {rank} raised nothing")
        for text in errors:
            faults += [
                f"rank {rank}: an error without {word!r}: {text}"
                for word in missing(fault.told, text, victim)
            ]
    faults += [f"the output has no {word!r}" for word in missing(fault.words, output, victim)]
    if "Exception ignored" in output:
        faults.append("a destructor's traceback")
    return faults


def missing(patterns: tuple[str, ...], text: str, rank: int) -> list[str]:
    """Return the patterns that a text lacks."""
    wanted = [pattern.replace("%d", str(rank)) for pattern in patterns]
    return [pattern for pattern in wanted if not re.search(pattern, text)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults on real GPUs, one job for each.")
    parser.add_argument("-n", type=int, default=2, help="ranks of a job, one GPU each")
    parser.add_argument(
        "--at-once", type=int, default=3, help="jobs that run at the same time, on the same GPUs"
    )
    parser.add_argument(
        "--hosts", action="store_true", help="each rank is a host of its own, as root: tests/gpu/hosts.sh"
    )
    parser.add_argument("--only", help="only trials whose fault and work contain this")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help="seconds from a fault to the end of the job"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no further job is started")
    given = parser.parse_args()
    start = time.monotonic()
    hosts = ("sh", str(ROOT / "tests" / "gpu" / "hosts.sh")) if given.hosts else ()

    def one(orders: dict[str, Any]) -> tuple[str, list[str], str] | None:
        if time.monotonic() > start + 60 * given.minutes:
            return None
        return tried(orders, given.n, given.limit, wrapper=hosts)

    chosen = [
        each
        for each in TRIALS
        if (given.only or "") in f"{each['fault']} {each['work']}"
        and not (hosts and each["work"] not in BETWEEN_HOSTS)
    ]
    bad, left = [], []
    print(f"{len(chosen)} trials on {given.n} GPUs, {given.at_once} at once", flush=True)
    with ThreadPoolExecutor(given.at_once) as pool:
        running = {pool.submit(one, orders): orders for orders in chosen}
        for future in as_completed(running):
            name = "{fault} {work}".format(**running[future]).strip()
            found = future.result()
            if found is None:
                left.append(name)
                continue
            ending, faults, output = found
            print(
                f"{'BAD ' if faults else 'ok  '} {time.monotonic() - start:4.0f} s  {name}: {ending}",
                flush=True,
            )
            if faults:
                bad.append(name)
                print("\n".join(f"    {each}" for each in faults), flush=True)
                print("\n".join(f"    | {line}" for line in output.splitlines()), flush=True)
    print(f"{len(chosen) - len(left)} trials in {time.monotonic() - start:.0f} s; bad: {bad or 'none'}; "
          f"not started: {left or 'none'}", flush=True)  # fmt: skip
    return 1 if bad or left else 0


if __name__ == "__main__":
    sys.exit(main())
